//! The volume store in etcd, `[store]`.
//!
//! ```text
//!   claim the prefix (waits for etcd) ▸ write the note in the data directory ▸ copy the records of
//!   the file volumes.redb to etcd ▸ rename the file
//! ```
//!
//! Each step can be repeated: a daemon that is killed in between continues at its next start. The
//! note prevents a later start with another store, which would have none of the volumes.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::{EmbeddedStore, FILE, StoreError, VolumeStore};
use nacre_cluster_etcd::{
    Before, Compaction, Credentials, DaemonIdentity, Endpoints, EtcdStore, Health, Prefix, Tls,
};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::{holder, note};
use crate::config::settings::VolumeStoreSettings;
use crate::services::Engine;
use crate::services::keyring::file;
use crate::services::machine::host_name;
use crate::values::{files, host_identity};

/// Pause after the first failed attempt to reach etcd, and the longest pause.
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Interval of log lines while etcd does not answer.
const REMIND: Duration = Duration::from_secs(60);
/// Time by which each attempt extends the start timeout of the service manager.
const MORE_TIME: Duration = Duration::from_secs(90);
const LARGEST_PEM: usize = 1 << 20;
const LONGEST_PASSWORD: usize = 1024;
/// Name of the file after its records were copied to etcd.
const MOVED: &str = "volumes.redb.moved";

/// The opened store, the id of this daemon, and the state of etcd.
pub(super) struct OpenedStore {
    pub store: Arc<EtcdStore>,
    pub holder: Uuid,
    pub health: OfStore,
}

/// The key prefix and the state of the store, for status and metrics.
#[derive(Clone)]
pub struct OfStore {
    pub prefix: String,
    health: watch::Receiver<Health>,
}

impl OfStore {
    pub fn health(&self) -> Health {
        self.health.borrow().clone()
    }
}

/// Reports that etcd is lost or back, or that another daemon has claimed the prefix. Ends with the
/// store.
pub(super) async fn follow(engine: Rc<Engine>, mut of: OfStore) {
    let mut is_away = false;
    while of.health.changed().await.is_ok() {
        let (prefix, now) = (of.prefix.clone(), of.health.borrow_and_update().clone());
        let facts = json!({ "prefix": prefix });
        match now {
            Health::Answers(_) if std::mem::take(&mut is_away) => {
                let text = format!("etcd answers again ({prefix})");
                engine
                    .notes
                    .report("volume_store_back", prefix, text, facts);
            }
            Health::Silent { why } if !std::mem::replace(&mut is_away, true) => {
                let text = format!(
                    "the volume store is away; I/O goes on, and the loss of a replica waits: {why}"
                );
                warn!("{text}");
                engine
                    .notes
                    .report("volume_store_lost", prefix, text, facts);
            }
            Health::Taken { owner } => {
                let text = format!("{prefix} in etcd belongs to another daemon now: {owner}");
                error!("{text}");
                engine
                    .notes
                    .report("volume_store_taken", prefix, text, facts);
            }
            Health::Answers(_) | Health::Silent { .. } => {}
        }
    }
}

/// Opens the store; waits while etcd does not answer.
pub(super) async fn open(
    settings: &VolumeStoreSettings,
    dir: &Path,
) -> anyhow::Result<OpenedStore> {
    let prefix = prefix(settings)?;
    let (store, node, is_claimed) = {
        let (settings, dir, prefix) = (settings.clone(), dir.to_owned(), prefix.clone());
        blocking(move || {
            let noted = note::read(&dir)?;
            if let Some(other) = noted.as_ref().filter(|noted| **noted != name(&prefix)) {
                bail!(
                    "{} says that the volumes of this daemon are in {other}, and [store] names {}: \
                     correct prefix, or remove that file if the volumes are no longer needed",
                    note::path(&dir).display(),
                    name(&prefix)
                );
            }
            let node = this_node(holder::id(&dir)?);
            let compaction = settings.compact.then(Compaction::default);
            // Here, because a failure drops a runtime, which may block.
            let store = EtcdStore::open(&endpoints(&settings)?, prefix, compaction)?;
            Ok((store, node, noted.is_some()))
        })
        .await?
    };
    let before = Before {
        is_claimed,
        take_over: settings.take_over,
    };
    let health = claim(&store, &node, before).await?;
    let store = Arc::new(store);
    {
        let (dir, prefix) = (dir.to_owned(), prefix.clone());
        blocking(move || note::write(&dir, &name(&prefix))).await?;
    }
    move_records(&store, dir, &prefix).await?;
    info!(prefix = %prefix, endpoints = settings.endpoints.join(","), "the volume store is etcd");
    Ok(OpenedStore {
        store,
        holder: node.id,
        health: OfStore {
            prefix: prefix.to_string(),
            health,
        },
    })
}

async fn claim(
    store: &EtcdStore,
    node: &DaemonIdentity,
    before: Before,
) -> anyhow::Result<watch::Receiver<Health>> {
    let (mut pause, mut next_line) = (PAUSE, Instant::now());
    let mut is_late = false;
    loop {
        match store.claim(node, before).await {
            Ok(health) => {
                if is_late {
                    info!("etcd answers: the start goes on");
                }
                return Ok(health);
            }
            Err(error) if error.is_passing() => {
                is_late = true;
                if Instant::now() >= next_line {
                    next_line = Instant::now() + REMIND;
                    warn!(%error, "the start waits for the volume store");
                }
                waiting(&error.to_string());
            }
            Err(error) => {
                return Err(error)
                    .context("the volume store in etcd; see [store] in the configuration");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Extends the start timeout of the service manager, with `why` as the status.
fn waiting(why: &str) {
    let status = format!("waits for the volume store: {why}");
    let more = u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX);
    let _ = sd_notify::notify(&[
        sd_notify::NotifyState::Status(&status),
        sd_notify::NotifyState::ExtendTimeoutUsec(more),
    ]);
}

/// Copies the records of the data directory's file to etcd, and renames the file.
async fn move_records(store: &EtcdStore, dir: &Path, prefix: &Prefix) -> anyhow::Result<()> {
    let path = dir.join(FILE);
    if !path.exists() {
        return Ok(());
    }
    let shown = path.display();
    let records = {
        let dir = dir.to_owned();
        let open = blocking(move || Ok(EmbeddedStore::open(&dir)?));
        let file = open
            .await
            .with_context(|| format!("the volumes in {shown}"))?;
        file.list().await?
    };
    let moved = records.len();
    for record in records {
        let name = record.name.clone();
        let outcome = move_record(store, record).await;
        outcome.with_context(|| format!("moving volume \"{name}\" of {shown} to {prefix}"))?;
    }
    let (from, to) = (path.clone(), dir.join(MOVED));
    blocking(move || {
        std::fs::rename(&from, &to)?;
        Ok(files::sync_folder(&from)?)
    })
    .await
    .with_context(|| format!("renaming {shown} to {MOVED}"))?;
    if moved > 0 {
        info!(
            volumes = moved,
            "moved from {shown} to etcd; {MOVED} is a copy"
        );
    }
    Ok(())
}

async fn move_record(store: &EtcdStore, record: VolumeRecord) -> anyhow::Result<()> {
    let mut pause = PAUSE;
    loop {
        match store.create(record.clone()).await {
            Ok(()) => return Ok(()),
            Err(StoreError::Exists { name }) => match store.load(record.id).await {
                // An earlier attempt was made.
                Ok(found) if found == record => return Ok(()),
                Ok(_) => bail!("etcd has it with another content"),
                Err(StoreError::NotFound { .. }) => {
                    bail!("etcd has another volume \"{name}\": choose another prefix")
                }
                Err(StoreError::Unavailable { why }) => waiting(&why),
                Err(error) => return Err(error.into()),
            },
            Err(StoreError::Unavailable { why }) => {
                warn!(why, "the start waits for the volume store");
                waiting(&why);
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Reads all records of the store. Waits while etcd does not answer.
pub(super) async fn load_records(store: &EtcdStore) -> Result<Vec<VolumeRecord>, StoreError> {
    let (mut pause, mut next_line) = (PAUSE, Instant::now());
    loop {
        match store.list().await {
            Err(StoreError::Unavailable { why }) => {
                if Instant::now() >= next_line {
                    next_line = Instant::now() + REMIND;
                    warn!(why, "the start waits for the volume store");
                }
                waiting(&why);
            }
            outcome => return outcome,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

pub(super) fn prefix(settings: &VolumeStoreSettings) -> anyhow::Result<Prefix> {
    let prefix = settings.prefix.as_deref().and_then(Prefix::new);
    prefix.context("store.prefix is missing or invalid")
}

fn name(prefix: &Prefix) -> String {
    format!("etcd {prefix}")
}

/// The identity of this daemon, as other daemons find it in etcd.
pub(super) fn this_node(id: Uuid) -> DaemonIdentity {
    DaemonIdentity {
        id,
        machine: host_identity::machine(),
        host: host_name(),
    }
}

/// Reads the files that `[store]` names. Blocks.
pub fn endpoints(settings: &VolumeStoreSettings) -> anyhow::Result<Endpoints> {
    let public = |key: &str, path: &Option<PathBuf>| {
        let Some(path) = path else {
            return Ok(None);
        };
        let read = file::read_public(path, LARGEST_PEM);
        let read = read.with_context(|| format!("store.{key}: {}", path.display()))?;
        anyhow::Ok(Some(read))
    };
    let secret = |key: &str, path: &Option<PathBuf>, most| {
        let Some(path) = path else {
            return Ok(None);
        };
        let read = file::read_at_most(path, most);
        let (text, _) = read.with_context(|| format!("store.{key}: {}", path.display()))?;
        anyhow::Ok(Some(text))
    };
    let identity = public("cert", &settings.cert)?.zip(secret("key", &settings.key, LARGEST_PEM)?);
    let tls = public("ca", &settings.ca)?.map(|ca| Tls {
        ca,
        identity: identity.map(|(cert, key)| (cert, key.as_bytes().to_vec())),
    });
    let password = secret("password_file", &settings.password_file, LONGEST_PASSWORD)?;
    let line = |text: Zeroizing<String>| text.trim_matches(['\r', '\n']).to_owned();
    let credentials = settings.user.clone().zip(password.map(line));
    Ok(Endpoints {
        urls: settings.endpoints.clone(),
        tls,
        credentials: credentials.map(|(user, password)| Credentials { user, password }),
        deadline: Duration::from_millis(settings.deadline_ms),
    })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.context("the thread that opens the volume store failed")?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Goal: `[store]` reaches the client as written, and an unusable file is named with its key.
    #[test]
    fn the_files_of_the_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("{name}\n")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Some(path)
        };
        let settings = VolumeStoreSettings {
            endpoints: vec!["https://h:1".to_owned()],
            ca: write("ca", 0o644),
            cert: write("cert", 0o644),
            key: write("key", 0o600),
            user: Some("u".to_owned()),
            password_file: write("password", 0o600),
            deadline_ms: 700,
            ..VolumeStoreSettings::default()
        };
        let read = endpoints(&settings).unwrap();
        let tls = read.tls.unwrap();
        assert_eq!(tls.ca, b"ca\n");
        assert_eq!(tls.identity, Some((b"cert\n".to_vec(), b"key\n".to_vec())));
        let login = read.credentials.unwrap();
        assert_eq!((&*login.user, &*login.password), ("u", "password"));
        assert_eq!(read.deadline, Duration::from_millis(700));
        for (settings, expected) in [
            (
                VolumeStoreSettings {
                    password_file: write("open", 0o644),
                    ..settings.clone()
                },
                "store.password_file: ",
            ),
            (
                VolumeStoreSettings {
                    key: write("open", 0o644),
                    ..settings.clone()
                },
                "store.key: ",
            ),
            (
                VolumeStoreSettings {
                    ca: Some(dir.path().join("none")),
                    ..settings
                },
                "store.ca: ",
            ),
        ] {
            let refused = endpoints(&settings).unwrap_err();
            assert!(refused.to_string().starts_with(expected), "{refused:#}");
        }
    }
}
