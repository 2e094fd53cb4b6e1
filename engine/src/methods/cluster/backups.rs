//! Saves a cluster to a file, and restores it from one, for `nacre cluster backup` and `restore`.
//! No daemon is needed.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nacre_cluster_node::backup::{self, LARGEST, Restored};
use nacre_cluster_node::{Backup, BackupError};

use super::without_daemon::with_etcd;
use crate::config::settings::VolumeStore;
use crate::services::cluster::{seconds, write_backup};

/// Longest time of a backup, and of a restore: it waits for etcd, and for the longest lease.
const SAVED: Duration = Duration::from_secs(300);
const RESTORED: Duration = Duration::from_secs(3600);

/// Saves the cluster. The file is complete or as before, and only its owner may read it.
pub fn save(store: &VolumeStore, name: &str, file: &Path) -> anyhow::Result<Backup> {
    let backup = with_etcd(store, name, Some(SAVED), async |client, prefix| {
        Ok(Backup::save(&client, &prefix, seconds()).await?)
    })?;
    write_backup(file, &backup)?;
    Ok(backup)
}

/// Reads and verifies a whole backup.
pub fn open(file: &Path) -> anyhow::Result<Backup> {
    let shown = || file.display().to_string();
    let opened = File::open(file).with_context(shown)?;
    let bytes = opened.metadata().with_context(shown)?.len();
    if bytes > LARGEST {
        return Err(BackupError::TooLarge { bytes }).with_context(shown);
    }
    let mut text = Vec::new();
    let mut limited = opened.take(LARGEST + 1);
    limited.read_to_end(&mut text).with_context(shown)?;
    Backup::parse(&text).with_context(shown)
}

/// Restores the backup into the etcd of `store`. `without`: names or ids of nodes that never
/// return.
pub fn restore(
    store: &VolumeStore,
    backup: &Backup,
    without: &[String],
) -> anyhow::Result<Restored> {
    let nodes = without.iter().map(|node| backup.node(node));
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    with_etcd(
        store,
        &backup.name,
        Some(RESTORED),
        async |client, prefix| Ok(backup::restore(&client, &prefix, backup, &nodes).await?),
    )
}
