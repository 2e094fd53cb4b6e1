//! The types of events, and their reference: docs/reference/events.md.

use super::{Category, Severity};

use Category as C;
use Severity as S;

/// Every event type, with its sentence in the reference.
pub const TYPES: [(&str, Category, Severity, &str); 84] = [
    (
        "bdev_register",
        C::Device,
        S::Info,
        "A block device was created.",
    ),
    (
        "bdev_unregister",
        C::Device,
        S::Info,
        "A block device was deleted.",
    ),
    (
        "bdev_resize",
        C::Device,
        S::Info,
        "A block device has another size.",
    ),
    (
        "pool_create",
        C::Device,
        S::Info,
        "A storage pool was created.",
    ),
    (
        "pool_import",
        C::Device,
        S::Info,
        "A storage pool was imported: its volumes are available.",
    ),
    (
        "pool_lost",
        C::Device,
        S::Error,
        "A disk of a storage pool went away, and the volumes of the pool with it.",
    ),
    (
        "pool_interrupted",
        C::Device,
        S::Error,
        "A disk of a storage pool lost its connection, and perhaps writes that were not flushed; Nacre opens the pool again.",
    ),
    (
        "pool_disk_cut",
        C::Device,
        S::Error,
        "A disk of a storage pool lost blocks at its end, and the data in them.",
    ),
    (
        "pool_device_lost",
        C::Device,
        S::Error,
        "A block device that lvols of a storage pool show was removed or lost blocks: reads that need it fail.",
    ),
    (
        "pool_device_back",
        C::Device,
        S::Info,
        "Lvols of a storage pool have a block device again that they show.",
    ),
    (
        "pool_add_disk",
        C::Device,
        S::Info,
        "A storage pool has a further disk.",
    ),
    (
        "pool_disk_leaving",
        C::Device,
        S::Info,
        "A disk begins to leave its storage pool: its data move to the other disks.",
    ),
    (
        "pool_remove_disk",
        C::Device,
        S::Info,
        "A disk has left its storage pool, and is free.",
    ),
    (
        "pool_disk_stays",
        C::Device,
        S::Warning,
        "A disk that was leaving its storage pool stays: the cause is named.",
    ),
    (
        "pool_space_low",
        C::Device,
        S::Warning,
        "80, 90 or 95 % of the space of a storage pool are in use.",
    ),
    (
        "pool_space_back",
        C::Device,
        S::Info,
        "A storage pool has more free space again.",
    ),
    (
        "pool_full",
        C::Device,
        S::Error,
        "A storage pool is full: writes to new space wait, and then fail.",
    ),
    (
        "backup_created",
        C::Device,
        S::Info,
        "A backup of a snapshot is complete.",
    ),
    (
        "backup_restored",
        C::Device,
        S::Info,
        "A backup was restored into a new volume.",
    ),
    (
        "backup_deleted",
        C::Device,
        S::Info,
        "A backup was deleted, with the data that no other backup has.",
    ),
    (
        "backup_damaged",
        C::Device,
        S::Error,
        "Data of a backup is damaged or missing in its store.",
    ),
    (
        "backup_failed",
        C::Device,
        S::Error,
        "A backup was not created, verified, restored or deleted.",
    ),
    (
        "nvme_live",
        C::Device,
        S::Info,
        "A drive is in use, or in use again.",
    ),
    (
        "nvme_reset",
        C::Device,
        S::Warning,
        "A drive's controller was reset; its I/O is sent again.",
    ),
    (
        "nvme_failed",
        C::Device,
        S::Error,
        "A drive's controller cannot be brought back.",
    ),
    (
        "nvme_removed",
        C::Device,
        S::Error,
        "A drive was pulled or vanished from its bus.",
    ),
    (
        "nvme_refused",
        C::Device,
        S::Warning,
        "A drive's namespace cannot be used, or not under its old name.",
    ),
    (
        "nvme_limits",
        C::Device,
        S::Warning,
        "A drive grants less than was asked for.",
    ),
    (
        "nvme_timeout",
        C::Device,
        S::Warning,
        "A drive did not complete a command in time.",
    ),
    (
        "nvme_health_warning",
        C::Device,
        S::Warning,
        "A drive reports a critical warning.",
    ),
    (
        "nvme_health_good",
        C::Device,
        S::Info,
        "A drive has withdrawn its critical warnings.",
    ),
    (
        "nvmf_subsystem_add",
        C::Target,
        S::Info,
        "A subsystem was created.",
    ),
    (
        "nvmf_subsystem_remove",
        C::Target,
        S::Info,
        "A subsystem was deleted.",
    ),
    (
        "nvmf_namespace_change",
        C::Target,
        S::Info,
        "A namespace was added to a subsystem or removed from it.",
    ),
    (
        "nvmf_listener_change",
        C::Target,
        S::Info,
        "A listener was added to a subsystem or removed from it.",
    ),
    (
        "auth_failed",
        C::Target,
        S::Warning,
        "A host failed to authenticate itself.",
    ),
    (
        "tls_failed",
        C::Target,
        S::Warning,
        "A connection to the target ended because of TLS: no key that fits, too many handshakes, or TLS left out.",
    ),
    (
        "key_expired",
        C::Target,
        S::Warning,
        "A key has expired: hosts that use it are refused.",
    ),
    (
        "host_key_rotated",
        C::Target,
        S::Info,
        "The former key of a host has ended; its new one is the only one.",
    ),
    (
        "nvmf_ana_change",
        C::Target,
        S::Info,
        "A path has another ANA state.",
    ),
    (
        "remote_connected",
        C::Transport,
        S::Info,
        "A controller of another target is connected.",
    ),
    (
        "remote_failed",
        C::Transport,
        S::Error,
        "A controller of another target cannot be connected.",
    ),
    (
        "remote_lost",
        C::Transport,
        S::Warning,
        "The connection to another target ended; Nacre connects again.",
    ),
    (
        "remote_refused",
        C::Transport,
        S::Warning,
        "A namespace of another target is not used: it is not the one attached earlier.",
    ),
    (
        "transport_downgraded",
        C::Transport,
        S::Warning,
        "A listener or a connection that wants RDMA uses TCP.",
    ),
    (
        "transport_restored",
        C::Transport,
        S::Info,
        "A listener or a connection is back on RDMA.",
    ),
    (
        "rdma_queue_failed",
        C::Transport,
        S::Warning,
        "A work request of an RDMA connection failed, which ends the connection.",
    ),
    (
        "rdma_refused",
        C::Transport,
        S::Warning,
        "A host's RDMA connection was refused.",
    ),
    (
        "rdma_device_lost",
        C::Transport,
        S::Error,
        "An RDMA device vanished or reported a fatal error.",
    ),
    (
        "state_restore_failed",
        C::State,
        S::Warning,
        "A configured object could not be restored; Nacre tries again.",
    ),
    (
        "state_restored",
        C::State,
        S::Info,
        "A configured object that could not be restored is there again.",
    ),
    (
        "alert_failed",
        C::State,
        S::Warning,
        "Alerts to a receiver are not delivered. Once per outage; not sent to that receiver.",
    ),
    (
        "alert_recovered",
        C::State,
        S::Info,
        "Alerts to a receiver are delivered again.",
    ),
    ("volume_create", C::Volume, S::Info, "A volume was created."),
    ("volume_delete", C::Volume, S::Info, "A volume was deleted."),
    ("volume_open", C::Volume, S::Info, "A volume serves I/O."),
    (
        "volume_open_failed",
        C::Volume,
        S::Error,
        "A volume could not be opened; Nacre tries again.",
    ),
    ("volume_close", C::Volume, S::Info, "A volume was closed."),
    (
        "volume_frozen",
        C::Volume,
        S::Error,
        "A volume has no usable replica; hosts wait.",
    ),
    (
        "volume_thaw",
        C::Volume,
        S::Info,
        "A frozen volume serves again.",
    ),
    (
        "volume_fenced",
        C::Volume,
        S::Error,
        "Another daemon has the volume; this one acknowledges nothing any longer.",
    ),
    (
        "volume_store_lost",
        C::Volume,
        S::Error,
        "The volume store does not answer; decisions about replicas wait.",
    ),
    (
        "volume_store_taken",
        C::Volume,
        S::Error,
        "Another daemon has the volume store; this one changes no volume any longer.",
    ),
    (
        "volume_store_back",
        C::Volume,
        S::Info,
        "The volume store answers again.",
    ),
    (
        "volume_verify_start",
        C::Volume,
        S::Info,
        "A comparison of the replicas began.",
    ),
    (
        "volume_verify_end",
        C::Volume,
        S::Info,
        "A comparison of the replicas ended.",
    ),
    (
        "volume_differences",
        C::Volume,
        S::Error,
        "A comparison found blocks that differ between replicas.",
    ),
    ("volume_grow", C::Volume, S::Info, "A volume is larger."),
    (
        "volume_rename",
        C::Volume,
        S::Info,
        "A volume has another name.",
    ),
    (
        "volume_publish",
        C::Volume,
        S::Info,
        "A volume is published to hosts.",
    ),
    (
        "volume_unpublish",
        C::Volume,
        S::Info,
        "A volume is no longer published to hosts.",
    ),
    (
        "cluster_replica_replaced",
        C::Volume,
        S::Warning,
        "A lost replica of a cluster's volume, or one on an evicted node, is being replaced.",
    ),
    (
        "cluster_replica_given_up",
        C::Volume,
        S::Info,
        "The new replica of a cluster's volume is not needed any more, or was lost itself.",
    ),
    (
        "cluster_brake",
        C::Volume,
        S::Error,
        "Many nodes of the cluster lost their leases at once: no lost replica is replaced.",
    ),
    (
        "cluster_brake_released",
        C::Volume,
        S::Info,
        "Lost replicas of the cluster's volumes are replaced again.",
    ),
    (
        "replica_out",
        C::Replica,
        S::Warning,
        "A replica is out of sync.",
    ),
    (
        "replica_resync_start",
        C::Replica,
        S::Info,
        "A resync of a replica began.",
    ),
    (
        "replica_resync_end",
        C::Replica,
        S::Info,
        "A resync ended; the replica is in sync.",
    ),
    (
        "replica_resync_stop",
        C::Replica,
        S::Warning,
        "A resync of a replica stopped before its end.",
    ),
    (
        "replica_source_change",
        C::Replica,
        S::Warning,
        "After an unclean stop, replicas are made equal to another replica than before.",
    ),
    (
        "replica_add",
        C::Replica,
        S::Info,
        "A volume has a new replica.",
    ),
    (
        "replica_remove",
        C::Replica,
        S::Info,
        "A volume has a replica less.",
    ),
    (
        "replica_read_repair",
        C::Replica,
        S::Warning,
        "Unreadable blocks of a replica were written again from another replica.",
    ),
    (
        "replica_salvage",
        C::Replica,
        S::Warning,
        "Unreadable blocks of the resync source were taken from another replica.",
    ),
];

/// The reference of all events: docs/reference/events.md.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Events\n\n\
         Written by `nacre events --reference`; do not edit.\n\n\
         `nacre events` shows the last 1024 events; `--follow` continues with new ones, `--category` selects.\n\
         Programs use `events_get` and `events_subscribe` ([RPC reference](rpc.md)).\n\
         Each event has an id, a time, a category, a severity, a type, its subject (`ctx`), a text for people,\n\
         and where more is known `facts` by name. `left_out` counts similar events that a limit suppressed.\n\n\
         | severity | meaning |\n|---|---|\n\
         | info | a change that was asked for, or a recovery |\n\
         | warning | something is worse than it should be |\n\
         | error | hosts notice |\n",
    );
    for category in Category::ALL {
        let word = category.word();
        out.push_str(&format!(
            "\n## {word}\n\n| type | severity | meaning |\n|---|---|---|\n"
        ));
        for (kind, _, severity, about) in TYPES.iter().filter(|(_, c, ..)| *c == category) {
            let severity = format!("{severity:?}").to_lowercase();
            out.push_str(&format!("| `{kind}` | {severity} | {about} |\n"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/events.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/reference/events.md is out of date: run `nacre events --reference > docs/reference/events.md`"
        );
    }
}
