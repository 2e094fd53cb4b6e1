//! Configuration in layers: defaults, the TOML file, the environment (`NACRE_…`), flags.
//!
//! Each layer is a source of the `config` crate whose values carry where they came from
//! (`nacre.toml:12`, `$NACRE_DATA_DIR`, `--cpumask`), so that `config show` and every error can
//! say so. A key that nobody knows is refused with the nearest one that somebody does.

pub mod listener;
mod paths;
pub mod rdma;
pub mod replication;
pub mod settings;
pub mod source;
pub mod suggest;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use nacre_nvmf::target::MAX_CNTLID;
use nacre_reactor::CoreSet;

pub use settings::Settings;
use source::{EnvSource, FileSource, FlagSource};

/// Everything that is wrong with a configuration, each with its place.
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
    ) -> Problem {
        Problem {
            origin: origin.into(),
            key: key.into(),
            cause: cause.into(),
            remedy: None,
        }
    }

    pub fn remedy(mut self, remedy: impl Into<String>) -> Problem {
        self.remedy = Some(remedy.into());
        self
    }
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> ConfigError {
        ConfigError {
            problems: vec![problem],
        }
    }
}

/// The effective settings and where each came from.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    pub settings: Settings,
    /// Keys that are not at their default, by path.
    pub origins: BTreeMap<String, String>,
}

/// One setting given on the command line.
#[derive(Debug, Clone)]
pub struct Flag {
    pub key: &'static str,
    pub value: serde_json::Value,
    /// As typed: `--cpumask`.
    pub flag: &'static str,
}

/// Reads the layers. `file` must exist when given.
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

/// As [`load`], with the file's name and text.
pub fn load_text(
    file: Option<(&str, &str)>,
    env: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[Flag],
) -> Result<Loaded, ConfigError> {
    let defaults = serde_json::to_value(Settings::default()).expect("settings are plain data");
    let mut builder = config::Config::builder();
    if let Some((name, text)) = file {
        builder = builder.add_source(FileSource::parse(name, text, &defaults)?);
    }
    let layered = builder
        .add_source(EnvSource::collect(env, &defaults)?)
        .add_source(FlagSource::new(flags))
        .build()
        .map_err(|e| Problem::new("configuration", "", e.to_string()))?;
    let mut origins = BTreeMap::new();
    note_origins("", &layered.cache, &mut origins);
    let mut settings: Settings = serde_path_to_error::deserialize(layered).map_err(|e| {
        let key = e.path().to_string();
        Problem::new(
            origin_of(&origins, &key),
            key.clone(),
            format!("{key}: {}", describe(e.inner())),
        )
    })?;
    let mut problems = paths::make_absolute(&mut settings, &origins, file.map(|(name, _)| name));
    problems.extend(validate(&settings, &origins));
    if problems.is_empty() {
        Ok(Loaded { settings, origins })
    } else {
        Err(ConfigError { problems })
    }
}

/// The error without the key and place that the `config` crate appends; ours are better.
fn describe(error: &config::ConfigError) -> String {
    let text = error.to_string();
    let text = text.split(" for key `").next().unwrap_or(&text);
    text.split(" in ").next().unwrap_or(text).to_owned()
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

/// Where `key` was set: its own origin or that of the nearest thing around it.
fn origin_of(origins: &BTreeMap<String, String>, key: &str) -> String {
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

/// What types cannot say. Nothing here looks at the machine, so that a file can be checked anywhere.
fn validate(settings: &Settings, origins: &BTreeMap<String, String>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut refuse = |key: &str, cause: String, remedy: &str| {
        let problem = Problem::new(origin_of(origins, key), key, format!("{key}: {cause}"));
        problems.push(if remedy.is_empty() {
            problem
        } else {
            problem.remedy(remedy)
        });
    };
    if let Err(cause) = Cores::parse(&settings.reactor.cores) {
        refuse(
            "reactor.cores",
            cause,
            "write auto, auto:2 for two of them, a list such as 0,2-5 or a mask such as 0x3",
        );
    }
    for (key, value, least, most) in [
        ("rpc.max_clients", settings.rpc.max_clients as u64, 1, 1024),
        ("rpc.deadline_s", settings.rpc.deadline_s, 1, 3600),
        ("memory.size_mb", settings.memory.size_mb, 0, 1 << 24),
        (
            "nvmf.max_subsystems",
            settings.nvmf.max_subsystems.into(),
            1,
            65_536,
        ),
        (
            "nvmf.max_connections",
            settings.nvmf.max_connections.into(),
            1,
            1_000_000,
        ),
        (
            "nvmf.max_pending_connections",
            settings.nvmf.max_pending_connections.into(),
            1,
            65_536,
        ),
        (
            "nvmf.max_queue_depth",
            settings.nvmf.max_queue_depth.into(),
            2,
            4096,
        ),
        (
            "nvmf.max_io_qpairs_per_ctrlr",
            settings.nvmf.max_io_qpairs_per_ctrlr.into(),
            1,
            1024,
        ),
        (
            "nvmf.in_capsule_data_size",
            settings.nvmf.in_capsule_data_size.into(),
            0,
            1 << 20,
        ),
        (
            "nvmf.max_io_size",
            settings.nvmf.max_io_size.into(),
            4096,
            16 << 20,
        ),
    ] {
        if value < least || value > most {
            refuse(key, format!("{value} is not in {least}..={most}"), "");
        }
    }
    for (key, cause) in settings.nvmf.sizes_that_cannot_be() {
        refuse(&format!("nvmf.{key}"), cause, "");
    }
    if let Err(error) = settings.nvmf.discovery_name() {
        let cause = format!("\"{}\": {error}", settings.nvmf.discovery_nqn);
        refuse(
            "nvmf.discovery_nqn",
            cause,
            "write auto, well-known, or an NQN",
        );
    }
    for (key, cause) in settings.rdma.problems() {
        refuse(&format!("rdma.{key}"), cause, "");
    }
    for (key, cause) in settings.replication.problems() {
        refuse(&format!("replication.{key}"), cause, "");
    }
    let mut names = std::collections::BTreeSet::new();
    for (at, bdev) in settings.bdev.iter().enumerate() {
        let key = format!("bdev[{at}]");
        if bdev.name.is_empty() {
            refuse(&key, "a bdev without a name".into(), "add name = \"…\"");
        } else if !names.insert(bdev.name.as_str()) {
            refuse(&key, format!("a second bdev named \"{}\"", bdev.name), "");
        }
        if bdev.uuid.is_some_and(|uuid| uuid.is_nil()) {
            let cause = "the nil UUID identifies no device".to_owned();
            refuse(
                &format!("{key}.uuid"),
                cause,
                "leave it out, or write another",
            );
        }
        match bdev.kind {
            settings::BdevKind::File if bdev.path.is_none() => {
                refuse(
                    &key,
                    "a file bdev without a path".into(),
                    "add path = \"/…\"",
                );
            }
            settings::BdevKind::Malloc | settings::BdevKind::Null if bdev.size.is_none() => {
                refuse(&key, "a bdev without a size".into(), "add size = \"64MiB\"");
            }
            _ => {}
        }
    }
    let mut listeners = std::collections::BTreeSet::new();
    for (at, listener) in settings.nvmf.listener.iter().enumerate() {
        let key = format!("nvmf.listener[{at}]");
        if !listeners.insert(listener.name.as_str()) {
            refuse(&key, format!("a second listener \"{}\"", listener.name), "");
        }
        for (cause, remedy) in listener.problems() {
            refuse(&key, cause, remedy);
        }
    }
    for (at, text) in settings.nvmf.listen.iter().enumerate() {
        if let Err(cause) = listener::Listener::short(at + 1, text) {
            refuse("nvmf.listen", cause.to_string(), "");
        }
    }
    let names: Vec<String> = settings
        .nvmf
        .listeners()
        .into_iter()
        .map(|l| l.name)
        .collect();
    let mut nqns = std::collections::BTreeSet::new();
    nqns.insert(settings.nvmf.discovery_nqn.as_str());
    for (at, subsystem) in settings.nvmf.subsystem.iter().enumerate() {
        let key = format!("nvmf.subsystem[{at}]");
        let (min, max) = (subsystem.min_cntlid, subsystem.max_cntlid);
        if min == 0 || min > max || max > MAX_CNTLID {
            let cause = format!("controller ids {min} to {max} are not within 1..={MAX_CNTLID}");
            refuse(&key, cause, "");
        }
        if subsystem.nqn.is_empty() {
            refuse(
                &key,
                "a subsystem without an NQN".into(),
                "add nqn = \"nqn.2026-01.org.example:name\"",
            );
        } else if !nqns.insert(subsystem.nqn.as_str()) {
            refuse(
                &key,
                format!("a second subsystem \"{}\"", subsystem.nqn),
                "",
            );
        }
        for (n, namespace) in subsystem.namespace.iter().enumerate() {
            if namespace.uuid.is_some_and(|uuid| uuid.is_nil()) {
                refuse(
                    &format!("{key}.namespace[{n}].uuid"),
                    "the nil UUID identifies no namespace".into(),
                    "leave it out to use the device's, or write another",
                );
            }
            if namespace.bdev.is_empty() {
                refuse(
                    &format!("{key}.namespace[{n}]"),
                    "a namespace without a bdev".into(),
                    "add bdev = \"name\"",
                );
            }
        }
        for name in &subsystem.listeners {
            if !names.contains(name) {
                refuse(
                    &key,
                    format!("no [[nvmf.listener]] is named \"{name}\""),
                    "",
                );
            }
        }
    }
    problems
}

/// Which cores the reactors run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cores {
    /// As many as suit the machine.
    Auto,
    /// This many, the first of those that the process may use.
    Count(usize),
    These(CoreSet),
}

impl Cores {
    /// Reads `auto`, `auto:3`, and every spelling of [`CoreSet::parse`]: a number is always a core.
    pub fn parse(text: &str) -> Result<Cores, String> {
        let text = text.trim();
        if text == "auto" {
            return Ok(Cores::Auto);
        }
        let Some(count) = text.strip_prefix("auto:") else {
            return CoreSet::parse(text)
                .map(Cores::These)
                .map_err(|e| e.to_string());
        };
        match count.parse::<usize>() {
            Ok(0) => Err("0 reactors cannot serve".into()),
            Ok(count) => Ok(Cores::Count(count)),
            Err(_) => Err(format!(
                "\"{count}\" in \"{text}\" is not a number of cores"
            )),
        }
    }
}

/// The configuration that is read when none is named, if it is there.
pub fn system_file() -> Option<PathBuf> {
    Some(PathBuf::from("/etc/nacre/nacre.toml")).filter(|path| path.exists())
}

/// Where the socket is when nothing says otherwise: root's runtime directory, else the user's.
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

/// Where state is kept when nothing says otherwise; `None` when the user has no home.
pub fn default_data_dir() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/nacre"));
    }
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    state
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join("nacre"))
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
