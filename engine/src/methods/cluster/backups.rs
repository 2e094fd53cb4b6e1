//! Saves a cluster to a file, and restores it from one, for `nacre cluster backup` and `restore`.
//! No daemon is needed.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nacre_cluster_node::Backup;
use nacre_cluster_node::backup::{self, RestoreOptions, Restored};

use super::without_daemon::with_etcd;
use crate::config::settings::VolumeStoreSettings;
use crate::services::cluster::{must_be_replaceable, read_backup, seconds, write_backup};

/// Time limit of a backup, and of a restore, which waits for etcd and for the longest lease.
const SAVED: Duration = Duration::from_secs(300);
const RESTORED: Duration = Duration::from_secs(3600);

/// Saves the cluster to a file that only its owner can read. After an error the file is as before.
pub fn save(store: &VolumeStoreSettings, name: &str, file: &Path) -> anyhow::Result<Backup> {
    must_be_replaceable(file)?;
    let backup = with_etcd(store, name, Some(SAVED), async |client, prefix| {
        Ok(Backup::save(&client, &prefix, seconds()).await?)
    })?;
    write_backup(file, &backup)?;
    Ok(backup)
}

/// Reads and verifies a whole backup.
pub fn open(file: &Path) -> anyhow::Result<Backup> {
    read_backup(file)?.with_context(|| file.display().to_string())
}

/// Restores the backup into the etcd of `store`. `without`: nodes, or devices as `NODE:DEVICE`,
/// that do not return. `publish`: restores the hosts' access, too.
pub fn restore(
    store: &VolumeStoreSettings,
    backup: &Backup,
    without: &[String],
    publish: bool,
) -> anyhow::Result<Restored> {
    let without = without.iter().map(|text| backup.lost(text));
    let without = without.collect::<Result<Vec<_>, _>>()?;
    let options = RestoreOptions { without, publish };
    with_etcd(
        store,
        &backup.name,
        Some(RESTORED),
        async |client, prefix| Ok(backup::restore(&client, &prefix, backup, &options).await?),
    )
}
