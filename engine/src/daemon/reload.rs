//! SIGHUP: reopens the log file and rereads the configuration file.
//!
//! Some settings are applied while the daemon runs. New `[[key]]`, `[[remote]]`, `[[bdev]]`, and
//! hosts and namespaces of existing subsystems are created. Listeners start, stop and move as in
//! the file. The log names every other difference, which takes effect at the next start.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use nacre_engine_web::certificate::CertificateError;
use serde_json::{Value, json};
use tracing::{error, info, warn};

use crate::config::{Loaded, Settings};
use crate::services::Engine;
use crate::services::certificates::{Certificates, RefusedCertificates};
use crate::services::http_token::{Token, TokenError};
use crate::services::lifecycle::Phase;
use crate::signals::Hangups;

/// Reads the configuration as at start: the same file, environment and flags.
#[derive(Clone)]
pub struct Source(Arc<dyn Fn() -> anyhow::Result<Loaded> + Send + Sync>);

impl Source {
    pub fn new(load: impl Fn() -> anyhow::Result<Loaded> + Send + Sync + 'static) -> Self {
        Self(Arc::new(load))
    }

    /// Reads on another thread, because the file may be on a disk that does not respond.
    async fn load(&self) -> anyhow::Result<Loaded> {
        let load = Arc::clone(&self.0);
        let loaded = tokio::task::spawn_blocking(move || load()).await;
        loaded.unwrap_or_else(|panic| Err(panic.into()))
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

/// Handles each SIGHUP, until the task is dropped.
pub async fn follow(engine: Rc<Engine>, mut hangups: Hangups, source: Source) {
    let mut effective = flat(&engine.settings);
    loop {
        hangups.next().await;
        info!("SIGHUP: reopening the log file and reading the configuration again");
        if let Err(error) = engine.logs.reopen().await {
            warn!(%error, "cannot reopen the log file; the open file stays in use");
        }
        engine.lifecycle.reached(Phase::Runtime).await;
        if engine.lifecycle.phase() == Phase::Stopping {
            return;
        }
        // Key files are read again, too: PSKs that their former contents proved end.
        if let Ok(plane) = engine.plane() {
            plane.target.authentication.generated.forget_all();
        }
        match source.load().await {
            Ok(loaded) => {
                // The files may have other contents although their names are the same.
                let mut refused = Files::read(&loaded.settings).await.apply(&engine);
                let reloaded = engine.calls.page.reload(&loaded.settings.web).await;
                refused.page = reloaded.err();
                if let Some(error) = &refused.token {
                    warn!("{error}; the token stays as it was");
                }
                apply(&engine, &mut effective, &loaded.settings, &refused).await;
                if let Some(error) = &refused.page {
                    warn!("{error}; the certificate of the page stays as it was");
                }
                for error in refused.certificates.all() {
                    warn!("{error}; the certificates of this listener stay as they were");
                }
            }
            Err(refused) => error!("the configuration stays as it was: {refused}"),
        }
    }
}

/// The contents of the token file and of the certificate files of `[rpc.tls]` and `[metrics.tls]`.
pub struct Files {
    token: Result<Option<Token>, TokenError>,
    certificates: Certificates,
}

/// The errors of files whose contents are not in effect.
#[derive(Default)]
pub struct RefusedFiles {
    pub token: Option<TokenError>,
    pub certificates: RefusedCertificates,
    /// Error of the administration page's certificate.
    pub page: Option<CertificateError>,
}

impl Files {
    /// Reads on another thread, because a file may be on a disk that does not respond.
    pub async fn read(settings: &Settings) -> Self {
        let settings = settings.clone();
        let read = tokio::task::spawn_blocking(move || Self {
            token: settings
                .metrics
                .token_file
                .as_deref()
                .map(Token::read)
                .transpose(),
            certificates: Certificates::read(&settings),
        });
        match read.await {
            Ok(files) => files,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// Puts the contents into effect. Where a file could not be read, the former content stays.
    pub fn apply(self, engine: &Engine) -> RefusedFiles {
        let token = match self.token {
            Ok(token) => {
                let mut tunables = engine.tunables();
                tunables.http_token = token;
                engine.tune(tunables);
                None
            }
            Err(error) => Some(error),
        };
        RefusedFiles {
            token,
            certificates: self.certificates.apply(engine),
            page: None,
        }
    }
}

/// The settings in effect, by key.
type Effective = BTreeMap<String, Value>;

/// Applies the differences between the effective settings and `new`. `refused`: errors of files.
async fn apply(
    engine: &Rc<Engine>,
    effective: &mut Effective,
    new: &Settings,
    refused: &RefusedFiles,
) {
    let (mut applied, mut later) = (Vec::new(), Vec::new());
    for (key, value) in flat(new) {
        if effective.get(&key) == Some(&value) {
            continue;
        }
        match apply_one(engine, &key, new, refused).await {
            Ok(true) => {
                applied.push(key.clone());
                effective.insert(key, value);
            }
            Ok(false) => later.push(key),
            Err(error) => warn!(key, %error, "not applied"),
        }
    }
    let declared = engine.declared.amend(new).await;
    if !declared.added.is_empty() {
        engine.declared.make(engine).await;
        for record in engine.journal.waiting() {
            engine.replay(&record).await;
        }
    }
    applied.extend(declared.added);
    later.extend(declared.later);
    if applied.is_empty() && later.is_empty() {
        info!("the configuration has not changed");
    }
    if !applied.is_empty() {
        info!("applied: {}", applied.join(", "));
    }
    if !later.is_empty() {
        warn!("takes effect at the next start: {}", later.join(", "));
    }
}

/// Applies one setting. False: it takes effect at the next start.
async fn apply_one(
    engine: &Rc<Engine>,
    key: &str,
    new: &Settings,
    refused: &RefusedFiles,
) -> anyhow::Result<bool> {
    let mut tunables = engine.tunables();
    match key {
        "log.level" => engine.logs.set_level(new.log.level),
        "log.timestamps" => engine.logs.set_timestamps(new.log.timestamps),
        "log.flags" => engine.logs.set_flags(&new.log.flags)?,
        "log.file" => return Ok(engine.logs.move_to(new.log.file.as_deref()).await?),
        "rpc.deadline_s" => tunables.deadline_s = new.rpc.deadline_s,
        "rpc.allowed" => tunables.allowed = new.rpc.allowed.clone(),
        key if key.starts_with("rpc.access.") || key == "rpc.tls.roles" => {
            engine.calls.change_rules(new.rpc.clone()).await?;
        }
        // Read before; the listener itself needs a restart.
        "rpc.tls.cert" | "rpc.tls.key" | "rpc.tls.client_ca" | "rpc.tls.client_crl" => {
            if let Some(error) = &refused.certificates.rpc {
                anyhow::bail!("{error}");
            }
            let listens = [&engine.settings, new].map(|of| of.rpc.tls.listen.is_some());
            return Ok(listens == [true, true]);
        }
        key if key.starts_with("metrics.tls.") => {
            if let Some(error) = &refused.certificates.metrics {
                anyhow::bail!("{error}");
            }
            return Ok(true);
        }
        // Read at every reload; the addresses need a restart.
        "web.cert" | "web.key" => {
            if let Some(error) = &refused.page {
                anyhow::bail!("{error}");
            }
            return Ok(!engine.settings.web.listen.is_empty());
        }
        // Read before. After a failure the old token counts, and the setting is not applied.
        "metrics.token_file" => {
            if let Some(error) = &refused.token {
                anyhow::bail!("{error}");
            }
            return Ok(true);
        }
        "data.retry_s" => tunables.retry_s = new.data.retry_s,
        "alert.webhook" | "alert.mail" => engine.alerts.declare(engine, &new.alert),
        "nvmf.listener" | "nvmf.listen" => {
            engine.listeners.declare(engine, new.listeners()).await?;
        }
        _ => return Ok(false),
    }
    engine.tune(tunables);
    Ok(true)
}

/// Every setting by its key. Omits declared bdevs and subsystems, except for the listeners of
/// subsystems: [`crate::services::declared`] compares the others.
fn flat(settings: &Settings) -> Effective {
    let value = serde_json::to_value(settings).expect("settings are plain data");
    let mut flat = Effective::new();
    flatten("", value, &mut flat);
    flat.retain(|key, _| !key.starts_with("rpc.tls.roles."));
    flat.insert("rpc.tls.roles".into(), json!(settings.rpc.tls.roles));
    flat.remove("bdev");
    flat.remove("nvmf.subsystem");
    let subsystems = settings.nvmf.subsystem.iter();
    let listeners: BTreeMap<_, _> = subsystems.map(|s| (&s.nqn, &s.listeners)).collect();
    flat.insert("nvmf.subsystem.listeners".into(), json!(listeners));
    flat
}

fn flatten(path: &str, value: Value, into: &mut Effective) {
    match value {
        Value::Object(table) => {
            for (key, value) in table {
                let path = match path {
                    "" => key,
                    path => format!("{path}.{key}"),
                };
                flatten(&path, value, into);
            }
        }
        value => drop(into.insert(path.to_owned(), value)),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a changed file is applied where possible, and each other difference is reported.

    use nacre_random_ports::local_port;

    use super::*;
    use crate::config::load_text;
    use crate::config::settings::LogLevel;
    use crate::methods::testing::TestDaemon;

    const NQN: &str = "nqn.2026-01.org.example:reloaded";

    fn settings(text: &str) -> Settings {
        load_text(Some(("/etc/n.toml", text)), [], &[])
            .unwrap()
            .settings
    }

    /// Goal: the management thread does not wait for the disks of certificates and tokens. Method:
    /// a read on this thread would always be complete after the first poll.
    #[test]
    fn files_are_read_on_another_thread() {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "0123456789abcdef").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&token, mode).unwrap();
        let settings = settings(&format!("[metrics]\ntoken_file = {token:?}\n"));
        let daemon = TestDaemon::with(Settings::default(), None);
        let files = daemon.run(async {
            for _ in 0..100 {
                let mut reading = std::pin::pin!(Files::read(&settings));
                if futures_util::poll!(&mut reading).is_pending() {
                    return reading.await;
                }
            }
            panic!("each read was complete after the first poll");
        });
        let refused = files.apply(&daemon.engine);
        assert!(refused.token.is_none());
        assert!(daemon.engine.tunables().http_token.is_some());
    }

    #[test]
    fn applicable_changes_are_applied() {
        let before = &format!(
            "[data]\nretry_s = 3600\n[[bdev]]\nname = \"a\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
             [[nvmf.subsystem]]\nnqn = \"{NQN}\"\n"
        );
        let daemon = TestDaemon::with(settings(before), None);
        let engine = &daemon.engine;
        let mut effective = flat(&engine.settings);
        let after = "[log]\nlevel = \"debug\"\nflags = [\"nvmf\"]\n[rpc]\ndeadline_s = 7\nmax_clients = 9\n\
            allowed = [\"bdev_get_bdevs\"]\n[data]\nretry_s = 5\n\
            [[bdev]]\nname = \"b\"\ntype = \"malloc\"\nsize = \"1MiB\"\n";
        let refused = RefusedFiles::default();
        daemon.run(apply(engine, &mut effective, &settings(after), &refused));
        assert_eq!(engine.logs.level(), LogLevel::Debug);
        assert!(engine.logs.flags()["nvmf"]);
        assert_eq!(engine.deadline().as_secs(), 7);
        assert_eq!(engine.tunables().retry_s, 5);
        assert!(engine.allowed("bdev_get_bdevs") && !engine.allowed("bdev_null_create"));
        let devices = daemon.call("bdev_get_bdevs", json!(null));
        let names: Vec<&str> = devices
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d["name"].as_str().unwrap())
            .collect();
        assert_eq!(
            names,
            ["a", "b"],
            "the one that is gone from the file stays"
        );
        assert_eq!(effective["rpc.deadline_s"], 7);
        assert_eq!(effective["rpc.max_clients"], 64, "as at the start");
        // A listener is added, moved, refused and removed.
        let places = || -> Vec<String> {
            let found = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }));
            let listeners = found[0]["listen_addresses"].as_array().unwrap().clone();
            let place = |l: &Value| format!("{}:{}", l["traddr"], l["trsvcid"]).replace('"', "");
            listeners.iter().map(place).collect()
        };
        let subsystem = format!("[[nvmf.subsystem]]\nnqn = \"{NQN}\"\n");
        let (one, two) = (local_port(), local_port());
        let none = subsystem.clone();
        let at = |port: u16| {
            format!("{subsystem}[[nvmf.listener]]\naddress = \"127.0.0.1\"\nport = {port}\n")
        };
        let nowhere = format!("{subsystem}[[nvmf.listener]]\niface = [\"name:eth99\"]\n");
        for (text, expected) in [
            (&none, vec![]),
            (&at(one), vec![format!("127.0.0.1:{one}")]),
            (&at(two), vec![format!("127.0.0.1:{two}")]),
            (&nowhere, vec![format!("127.0.0.1:{two}")]),
            (&none, vec![]),
        ] {
            daemon.run(apply(engine, &mut effective, &settings(text), &refused));
            assert_eq!(places(), expected, "{text}");
        }
        // Restore the old configuration.
        daemon.run(apply(engine, &mut effective, &settings(before), &refused));
        assert!(engine.allowed("bdev_null_create") && !engine.logs.flags()["nvmf"]);
        assert_eq!(engine.deadline().as_secs(), 55);
    }
}
