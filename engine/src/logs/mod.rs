//! The daemon's log: `tracing` output with levels and flags that can change at run time.
//!
//! The interface has SPDK's five levels and debug flags. Internally a level is a `tracing` level
//! (`NOTICE` and `INFO` are both `INFO`), and a flag enables debug level for a set of targets,
//! regardless of the level. SPDK has a second level for printed output, besides that for syslog.
//! Here the second one is the level of the only output, and setting the first level sets both.

mod flood;
mod lines;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use flood::Flood;
use lines::LogLines;
use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, reload};

use crate::config::log_flags::{FLAGS, UnknownFlag, unknown_flags};
use crate::config::settings::{Log, LogFormat, LogLevel};

/// Prefix of the names of this program's crates.
const OURS: &str = "nacre";

/// The levels, flags and output of the log, which can be changed.
#[derive(Clone)]
pub struct Logs {
    state: Arc<Mutex<LevelSettings>>,
    timestamps: Arc<AtomicBool>,
    reload: Option<reload::Handle<Targets, Registry>>,
    lines: Option<LogLines>,
    /// `None`: stderr.
    file: Arc<Mutex<Option<PathBuf>>>,
    flood: Flood,
}

/// Longest time for which the exiting process waits until the log is written.
const PATIENCE: Duration = Duration::from_secs(1);

/// The levels and flags, as management sets them.
#[derive(Debug)]
struct LevelSettings {
    level: LogLevel,
    print_level: LogLevel,
    flags: BTreeMap<&'static str, bool>,
}

impl Logs {
    /// Installs the process's subscriber, writing to the log file or to standard error.
    pub fn install(settings: &Log) -> anyhow::Result<Self> {
        let mut logs = Self::detached(settings)?;
        let output: Box<dyn Write + Send> = match &settings.file {
            Some(path) => {
                Box::new(open(path).with_context(|| format!("the log file {}", path.display()))?)
            }
            None => Box::new(std::io::stderr()),
        };
        let lines = LogLines::to(
            output,
            match settings.format {
                LogFormat::Text => |lost| {
                    format!("{lost} lines are missing here: they could not be written in time")
                },
                LogFormat::Json => |lost| {
                    let message = "lines are missing here: they could not be written in time";
                    serde_json::json!({ "level": "WARN", "message": message, "missing": lost })
                        .to_string()
                },
            },
        )?;
        let (filter, handle) = reload::Layer::new(logs.filter());
        let time = Timestamps(Arc::clone(&logs.timestamps));
        let base = tracing_subscriber::registry()
            .with(filter)
            .with(logs.flood.clone());
        let output = tracing_subscriber::fmt::layer()
            .with_writer(lines.clone())
            .with_timer(time);
        // A second daemon in one process (in tests) keeps the first one's subscriber.
        let installed = match settings.format {
            LogFormat::Text => base
                .with(
                    output
                        .with_target(false)
                        .with_ansi(settings.file.is_none() && terminal()),
                )
                .try_init(),
            LogFormat::Json => base.with(output.json().flatten_event(true)).try_init(),
        };
        if installed.is_ok() {
            logs.reload = Some(handle);
            logs.lines = Some(lines);
        }
        Ok(logs)
    }

    /// Logs how many lines were dropped by the rate limit. Call it periodically.
    pub fn report_left_out(&self) {
        self.flood.report_left_out();
    }

    /// Waits until the log is written, because a separate thread writes it. Call it before the
    /// process ends.
    pub fn flush(&self) {
        if let Some(lines) = &self.lines {
            lines.flush(PATIENCE);
        }
    }

    /// Levels and flags without an output, for tests.
    pub fn detached(settings: &Log) -> Result<Self, UnknownFlag> {
        let state = LevelSettings {
            level: settings.level,
            print_level: settings.level,
            flags: FLAGS.iter().map(|(name, _)| (*name, false)).collect(),
        };
        let logs = Self {
            state: Arc::new(Mutex::new(state)),
            timestamps: Arc::new(AtomicBool::new(settings.timestamps)),
            reload: None,
            lines: None,
            file: Arc::new(Mutex::new(settings.file.clone())),
            flood: Flood::default(),
        };
        for flag in &settings.flags {
            logs.set_flag(flag, true)?;
        }
        Ok(logs)
    }

    pub fn level(&self) -> LogLevel {
        self.state.lock().level
    }

    pub fn print_level(&self) -> LogLevel {
        self.state.lock().print_level
    }

    pub fn set_level(&self, level: LogLevel) {
        self.change(|state| {
            state.level = level;
            state.print_level = level;
        });
    }

    pub fn set_print_level(&self, level: LogLevel) {
        self.change(|state| state.print_level = level);
    }

    pub fn flags(&self) -> BTreeMap<&'static str, bool> {
        self.state.lock().flags.clone()
    }

    /// `all` sets every flag.
    pub fn set_flag(&self, name: &str, on: bool) -> Result<(), UnknownFlag> {
        if !FLAGS.iter().any(|(known, _)| *known == name) {
            return Err(UnknownFlag(name.to_owned()));
        }
        self.change(|state| {
            for (flag, value) in &mut state.flags {
                if *flag == name || name == "all" {
                    *value = on;
                }
            }
        });
        Ok(())
    }

    /// Sets the named flags and clears all others.
    pub fn set_flags(&self, names: &[String]) -> Result<(), UnknownFlag> {
        if let Some((_, unknown)) = unknown_flags(names).next() {
            return Err(unknown);
        }
        self.set_flag("all", false)?;
        names.iter().try_for_each(|name| self.set_flag(name, true))
    }

    /// Opens the log file again, after a log rotation has renamed it.
    pub async fn reopen(&self) -> std::io::Result<()> {
        let path = self.file.lock().clone();
        match path {
            Some(path) => self.open_file(path).await,
            None => Ok(()),
        }
    }

    /// Logs to another file. Returns false, and changes nothing, for a change between a file and
    /// stderr, whose formats differ.
    pub async fn move_to(&self, path: Option<&Path>) -> std::io::Result<bool> {
        let is_file = self.file.lock().is_some();
        let Some(path) = path.filter(|_| is_file) else {
            return Ok(false);
        };
        self.open_file(path.to_owned()).await?;
        *self.file.lock() = Some(path.to_owned());
        Ok(true)
    }

    /// Opens the file off the management thread, because the disk may not respond.
    async fn open_file(&self, path: PathBuf) -> std::io::Result<()> {
        let Some(lines) = self.lines.clone() else {
            return Ok(());
        };
        let work = move || {
            if lines.replace(Box::new(open(&path)?), PATIENCE) {
                Ok(())
            } else {
                Err(std::io::Error::other(
                    "the disk of the log file takes no lines",
                ))
            }
        };
        tokio::task::spawn_blocking(work).await?
    }

    pub fn set_timestamps(&self, on: bool) {
        self.timestamps.store(on, Ordering::Relaxed);
    }

    fn change(&self, with: impl FnOnce(&mut LevelSettings)) {
        with(&mut self.state.lock());
        if let Some(reload) = &self.reload
            && let Err(error) = reload.modify(|filter| *filter = self.filter())
        {
            tracing::warn!(%error, "the log filter cannot be changed");
        }
    }

    /// The filter: the print level for our crates, warnings of others, debug for flagged targets,
    /// and every line of the audit log.
    fn filter(&self) -> Targets {
        let state = self.state.lock();
        let level = match state.print_level {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warning => LevelFilter::WARN,
            LogLevel::Notice | LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
        };
        let others = level.min(LevelFilter::WARN);
        let mut filter = Targets::new()
            .with_default(others)
            .with_target(OURS, level)
            .with_target(crate::audit::TARGET, LevelFilter::INFO);
        for (name, targets) in FLAGS {
            if state.flags[name] && name != "all" {
                filter = targets
                    .iter()
                    .fold(filter, |f, t| f.with_target(*t, LevelFilter::DEBUG));
            }
        }
        filter
    }
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.lock().fmt(f)
    }
}

/// Opens the file for appending, creating it if necessary.
fn open(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o640);
    // Without O_NONBLOCK, opening a pipe without a reader would block the start.
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    match file.metadata()? {
        found if found.is_file() => Ok(file),
        found => Err(std::io::Error::other(format!(
            "it is {}, not a regular file",
            crate::values::files::kind(&found)
        ))),
    }
}

fn terminal() -> bool {
    use std::io::IsTerminal;
    std::io::stderr().is_terminal()
}

/// The time of day, if enabled.
struct Timestamps(Arc<AtomicBool>);

impl FormatTime for Timestamps {
    fn format_time(&self, w: &mut Writer<'_>) -> fmt::Result {
        if self.0.load(Ordering::Relaxed) {
            SystemTime.format_time(w)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: level, print level and flags select the logged lines. Method: query the filter.

    use super::*;
    use tracing::Level;

    fn passes(logs: &Logs, target: &str, level: Level) -> bool {
        logs.filter().would_enable(target, &level)
    }

    #[test]
    fn levels_and_flags_select_the_lines() {
        let logs = Logs::detached(&Log::default()).unwrap();
        assert!(passes(&logs, "nacre_nvmf::queues", Level::INFO));
        assert!(!passes(&logs, "nacre_nvmf::queues", Level::DEBUG));
        assert!(!passes(&logs, "hyper", Level::INFO) && passes(&logs, "hyper", Level::WARN));
        logs.set_flag("nvmf", true).unwrap();
        assert!(passes(&logs, "nacre_nvmf::queues", Level::DEBUG));
        assert!(!passes(&logs, "nacre_bdev", Level::DEBUG));
        logs.set_print_level(LogLevel::Error);
        assert_eq!(
            (logs.level(), logs.print_level()),
            (LogLevel::Notice, LogLevel::Error)
        );
        assert!(!passes(&logs, "nacre_bdev", Level::WARN));
        assert!(passes(&logs, crate::audit::TARGET, Level::INFO));
        logs.set_level(LogLevel::Debug);
        assert!(passes(&logs, "nacre_bdev", Level::DEBUG));
        logs.set_flag("all", true).unwrap();
        assert!(logs.flags().values().all(|on| *on));
        assert_eq!(logs.set_flag("nvm", true), Err(UnknownFlag("nvm".into())));
    }

    /// The crates that this program depends on, from its manifest.
    fn crates() -> Vec<String> {
        let manifest = include_str!("../../Cargo.toml").split("[dev-").next();
        let lines = manifest.unwrap_or_default().lines();
        let ours = lines.filter(|line| line.starts_with("nacre-"));
        ours.filter_map(|line| line.split_once([' ', '.', '=']))
            .map(|(name, _)| name.replace('-', "_"))
            .collect()
    }

    /// Goal: the level and the flag `all` (SPDK's `-L all`) reach every crate.
    #[test]
    fn levels_and_all_reach_every_crate() {
        let crates = crates();
        assert!(
            crates.iter().any(|name| name == "nacre_transport_rdma"),
            "{crates:?}"
        );
        let silent = |logs: &Logs, level: Level| {
            let mut names = crates.iter();
            names.find(|name| !passes(logs, name, level)).cloned()
        };
        let logs = Logs::detached(&Log::default()).unwrap();
        assert_eq!(silent(&logs, Level::INFO), None);
        logs.set_flag("all", true).unwrap();
        assert_eq!(silent(&logs, Level::DEBUG), None);
        logs.set_flag("all", false).unwrap();
        assert!(!passes(
            &logs,
            "nacre_transport_rdma::control",
            Level::DEBUG
        ));
        logs.set_level(LogLevel::Debug);
        assert_eq!(silent(&logs, Level::DEBUG), None);
    }
}
