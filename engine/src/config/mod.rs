//! Configuration in layers: defaults, the TOML file, the environment (`NACRE_…`), flags.
//!
//! Each layer is a source of the `config` crate. Its values carry their origin (`nacre.toml:12`,
//! `$NACRE_DATA_DIR`, `--cpumask`), which `config show` and every error name. An unknown key is
//! refused with the nearest known one. All errors are reported at once.
//!
//! ```text
//!   file, environment, flags ─▶ source ─▶ values::read ─▶ check ───────▶ here
//!                               (keys)    (values)        (any machine)  (this machine)
//! ```

pub mod alert;
mod capabilities;
pub(crate) mod check;
pub mod cluster;
pub mod declared;
mod hints;
pub mod host_keys;
pub mod listener;
mod lists;
pub mod log_flags;
pub mod names;
mod paths;
pub mod reference;
pub mod remote;
pub mod replication;
pub mod security;
pub mod settings;
pub mod source;
pub mod tls;
pub mod volume_store;
pub mod web;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use nacre_reactor::CoreSet;

pub use settings::Settings;
use source::{EnvSource, FileSource, FlagSource};

use crate::values::read::{self, Texts};

/// All errors of a configuration, each with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the configuration is refused:{}", .problems.iter().map(|p| format!("\n  {p}")).collect::<String>())]
pub struct ConfigError {
    pub problems: Vec<Problem>,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// `nacre.toml:12`, `$NACRE_DATA_DIR`, `--cpumask`.
    pub origin: String,
    pub key: String,
    pub cause: String,
    pub remedy: Option<String>,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.origin, self.cause)?;
        match &self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl Problem {
    pub fn new(
        origin: impl Into<String>,
        key: impl Into<String>,
        cause: impl Into<String>,
    ) -> Self {
        Self {
            origin: origin.into(),
            key: key.into(),
            cause: cause.into(),
            remedy: None,
        }
    }

    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self {
            problems: vec![problem],
        }
    }
}

/// The effective settings and their origins.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    pub settings: Settings,
    /// Origin of each key that was set, by path, such as `nacre.toml:12`.
    pub origins: BTreeMap<String, String>,
}

/// One setting given on the command line.
#[derive(Debug, Clone)]
pub struct Flag {
    pub key: &'static str,
    pub value: serde_json::Value,
    /// The flag on the command line: `--cpumask`.
    pub flag: &'static str,
}

/// Reads the layers. If `file` is given, it must exist.
pub fn load(
    file: Option<&Path>,
    env: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[Flag],
) -> Result<Loaded, ConfigError> {
    let text = match file {
        None => None,
        Some(path) => Some((
            path.display().to_string(),
            std::fs::read_to_string(path).map_err(|e| {
                Problem::new(
                    path.display().to_string(),
                    "",
                    format!("cannot be read: {e}"),
                )
            })?,
        )),
    };
    load_text(
        text.as_ref()
            .map(|(name, text)| (name.as_str(), text.as_str())),
        env,
        flags,
    )
}

/// As [`load`], with the name and the text of the file.
pub fn load_text(
    file: Option<(&str, &str)>,
    env: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[Flag],
) -> Result<Loaded, ConfigError> {
    let defaults = serde_json::to_value(Settings::default()).expect("settings are plain data");
    let mut problems = Vec::new();
    let mut builder = config::Config::builder();
    if let Some((name, text)) = file {
        builder = builder.add_source(FileSource::parse(name, text, &defaults, &mut problems));
    }
    let layered = builder
        .add_source(EnvSource::collect(env, &defaults, &mut problems))
        .add_source(FlagSource::new(flags))
        .build()
        .map_err(|e| Problem::new("configuration", "", e.to_string()))?;
    let mut origins = BTreeMap::new();
    note_origins("", &layered.cache, &mut origins);
    let (settings, wrong) = read::all::<Settings>(source::to_json(&layered.cache), Texts::Read);
    for (place, error) in wrong {
        let key = read::path(&place);
        let origin = origin_of(&origins, &key);
        let cause = format!("{key}: {}", check::in_range(&place, &error));
        let problem = Problem::new(origin, &key, cause);
        problems.push(match error.remedy() {
            Some(remedy) => problem.remedy(remedy),
            None => problem,
        });
    }
    let mut settings = settings.unwrap_or_default();
    let wrong: Vec<String> = problems.iter().map(|p| p.key.clone()).collect();
    // A problem inside a value that could not be read is a consequence; report only the cause.
    let led_to = |problem: &Problem| {
        let inside = |key: &String| {
            let rest = problem.key.strip_prefix(key.as_str());
            !key.is_empty()
                && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let table = |key: &str| key.rsplit_once('.').map(|(table, _)| table.to_owned());
        let missing = !origins.contains_key(&problem.key);
        let beside = |key: &String| missing && table(key) == table(&problem.key);
        // A list with an item that could not be read is empty.
        let around = |key: &String| {
            let rest = key.strip_prefix(problem.key.as_str());
            rest.is_some_and(|rest| rest.starts_with('[') && rest.ends_with(']'))
        };
        wrong
            .iter()
            .any(|key| inside(key) || beside(key) || around(key))
    };
    let mut checked = paths::make_absolute(&mut settings, &origins, file.map(|(name, _)| name));
    checked.extend(check::everywhere(&settings, &origins));
    problems.extend(checked.into_iter().filter(|problem| !led_to(problem)));
    in_order(&mut problems);
    if problems.is_empty() {
        Ok(Loaded { settings, origins })
    } else {
        Err(ConfigError { problems })
    }
}

/// Sorts problems: those of the file by line, then the others.
pub fn in_order(problems: &mut [Problem]) {
    problems.sort_by_cached_key(|problem| {
        let line = problem.origin.rsplit_once(':');
        line.and_then(|(_, line)| line.parse().ok())
            .unwrap_or(usize::MAX)
    });
}

fn note_origins(path: &str, value: &config::Value, into: &mut BTreeMap<String, String>) {
    if let Some(origin) = value.origin() {
        into.insert(path.to_owned(), origin.to_owned());
    }
    if let config::ValueKind::Table(table) = &value.kind {
        for (key, value) in table {
            let path = if path.is_empty() {
                key.clone()
            } else {
                format!("{path}.{key}")
            };
            note_origins(&path, value, into);
        }
    }
    if let config::ValueKind::Array(items) = &value.kind {
        for (at, value) in items.iter().enumerate() {
            note_origins(&format!("{path}[{at}]"), value, into);
        }
    }
}

/// Where `key` was set: its own origin, or that of the nearest enclosing table.
pub(crate) fn origin_of(origins: &BTreeMap<String, String>, key: &str) -> String {
    let mut key = key;
    loop {
        if let Some(origin) = origins.get(key) {
            return origin.clone();
        }
        match key.rfind(['.', '[']) {
            Some(cut) => key = &key[..cut],
            None => return "default".into(),
        }
    }
}

/// The cores of the reactors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cores {
    /// The first cores that the process may use, at most four.
    Auto,
    /// This many of the cores that the process may use, from the first.
    Count(usize),
    /// Cores near the network cards and disks; without a number, at most four.
    NearDevices(Option<usize>),
    These(CoreSet),
}

impl Cores {
    pub const FORMS: &'static str = "write auto, auto:2 for two of them, auto-numa or auto-numa:2 for cores near the network cards and disks, a \
         list such as 0,2-5 or a mask such as 0x3";

    /// Reads `auto`, `auto:3`, `auto-numa`, `auto-numa:3`, and every notation of
    /// [`CoreSet::parse`]: a number is always a core.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "auto" {
            return Ok(Self::Auto);
        }
        if text == "auto-numa" {
            return Ok(Self::NearDevices(None));
        }
        let (count, near) = match text.strip_prefix("auto-numa:") {
            Some(count) => (Some(count), true),
            None => (text.strip_prefix("auto:"), false),
        };
        let Some(count) = count else {
            // `FORMS` replaces the remedy, because this key accepts more forms.
            let cause = |text: String| text.split(": write").next().unwrap_or(&text).to_owned();
            let parsed = CoreSet::parse(text).map(Cores::These);
            return parsed.map_err(|error| cause(error.to_string()));
        };
        match count.parse::<usize>() {
            Ok(0) => Err("0 reactors cannot serve".into()),
            Ok(count) if near => Ok(Self::NearDevices(Some(count))),
            Ok(count) => Ok(Self::Count(count)),
            Err(_) => Err(format!(
                "\"{count}\" in \"{text}\" is not a number of cores"
            )),
        }
    }
}

/// The system's configuration file.
pub const SYSTEM_FILE: &str = "/etc/nacre/nacre.toml";

/// The system's configuration file, used if no file is named; `None` if it does not exist.
pub fn system_file() -> Option<PathBuf> {
    Some(PathBuf::from(SYSTEM_FILE)).filter(|path| path.exists())
}

/// The program as which the daemon was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Personality {
    Nacre,
    /// SPDK's `nvmf_tgt`: its socket, its flags, and no state of its own.
    NvmfTgt,
}

/// Default path of the RPC socket: in `/run` for root, else in the user's runtime directory.
pub fn default_socket() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/run/nacre/nacre.sock");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| Path::new(d).is_dir()) {
        Some(dir) => PathBuf::from(dir).join("nacre/nacre.sock"),
        None => std::env::temp_dir().join(format!(
            "nacre-{}/nacre.sock",
            rustix::process::geteuid().as_raw()
        )),
    }
}

#[cfg(test)]
mod tests;
