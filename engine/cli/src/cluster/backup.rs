//! `nacre cluster backup` and `restore`: the cluster's keys in etcd to a file and back, without a
//! daemon.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::anyhow;
use clap::Args;
use serde_json::json;

use super::super::{Failure, absolute, output};
use super::access::EtcdArgs;
use nacre_engine::methods::cluster::backups;

#[derive(Debug, Args)]
#[command(
    after_help = "The file has all keys of the cluster at one moment, except those that end with its nodes: leases, \
                  requests, the log of decisions. It names hosts and devices, and only its owner may read it. Each \
                  node also makes one a day in its data directory, and keeps the last three."
)]
pub(super) struct ClusterBackupArgs {
    /// The file to write; a former one is replaced
    file: PathBuf,
    /// Name of the cluster; that of the configuration file unless given
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "No member of the former etcd may run. The command refuses an etcd that has keys of the cluster. \
                  Run an interrupted restore again with the same file. Nodes join by themselves when it ends. A \
                  volume is served when all its replicas are there, because their labels say which of them have \
                  every write since the backup. If the backup lacks volumes or publications of the last \
                  days, `nacre cluster rebuild-store` has them.\n\n\
                  Hosts get no access without --publish: a host that was removed after the backup would be back."
)]
pub(super) struct RestoreArgs {
    /// The file of a backup
    file: PathBuf,
    /// A node that never returns, by name or id, or one of its devices; several times for several.
    /// Its replicas are not waited for: writes that only they have are lost
    #[arg(long, value_name = "NODE[:DEVICE]")]
    without: Vec<String>,
    /// Restore the hosts and their reservations as of the backup. Otherwise admit hosts afterwards
    /// with `nacre volume publish`
    #[arg(long)]
    publish: bool,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn count(number: usize, noun: &str) -> String {
    output::count(u64::try_from(number).unwrap_or(u64::MAX), noun)
}

pub(super) fn save(args: &ClusterBackupArgs) -> Result<(), Failure> {
    let name = match &args.cluster {
        Some(name) => Some(name.clone()),
        None => args.etcd.named()?,
    };
    let name = name.ok_or_else(|| {
        Failure::Usage("no configuration names a cluster: name it with --cluster".to_owned())
    })?;
    let file = absolute(&args.file)?;
    let store = args.etcd.store(&name)?;
    let backup = backups::save(&store, &name, &file)?;
    let (keys, volumes) = (backup.keys.len(), backup.volumes());
    if args.json {
        return output::json(&json!({
            "file": file, "cluster": name, "id": backup.id, "revision": backup.revision,
            "keys": keys, "volumes": volumes,
        }));
    }
    output::line(&format!(
        "Saved cluster {name}, id {}, as of revision {}: {}, {}.",
        backup.id,
        backup.revision,
        count(volumes, "volume"),
        count(keys, "key"),
    ))
}

pub(super) fn restore(args: &RestoreArgs) -> Result<(), Failure> {
    let backup = backups::open(&args.file)?;
    let store = args.etcd.store(&backup.name)?;
    let created = UNIX_EPOCH.checked_add(Duration::from_secs(backup.created));
    let created = created.ok_or_else(|| anyhow!("its time is no time"))?;
    let restored = backups::restore(&store, &backup, &args.without, args.publish)?;
    if args.json {
        return output::json(&json!({
            "cluster": backup.name, "id": backup.id, "revision": backup.revision,
            "keys": restored.keys, "volumes": restored.volumes,
            "volumes_without_hosts": restored.without_hosts, "is_repeated": restored.is_repeated,
        }));
    }
    let hosts = if restored.without_hosts > 0 {
        format!(
            "\nNo host has access to {}: admit hosts with `nacre volume publish`.",
            count(restored.without_hosts, "volume")
        )
    } else {
        String::new()
    };
    output::line(&format!(
        "Restored cluster {}, id {}, as of {}: {}, {}.\n\
         Its nodes join by themselves. A volume is served when all its replicas are there.{hosts}",
        backup.name,
        backup.id,
        humantime::format_rfc3339_seconds(created),
        count(restored.volumes, "volume"),
        count(restored.keys, "key"),
    ))
}
