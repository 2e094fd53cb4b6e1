//! Metrics of replicated volumes: states, I/O of replicas, and resyncs.

use nacre_bdev_replica::handle::{ReplicaStatus, VolumeState, VolumeStatus};

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};
use crate::services::volumes::words::{REPLICA_STATES, STATES, replica_word};

family!(
    STATE,
    "nacre_volume_state",
    Gauge,
    "1 for the state that the volume is in, 0 for the others.",
    ["volume", "state"]
);
family!(
    REPLICA_STATE,
    "nacre_volume_replica_state",
    Gauge,
    "1 for the state that the replica is in, 0 for the others.",
    ["volume", "device", "state"]
);
family!(
    REPLICA_ATTACHED,
    "nacre_volume_replica_attached",
    Gauge,
    "1 while the replica's device is present and in use.",
    ["volume", "device"]
);
family!(
    IN_SYNC,
    "nacre_volume_replicas_in_sync",
    Gauge,
    "Replicas that have every acknowledged write.",
    ["volume"]
);
family!(
    DIRTY,
    "nacre_volume_dirty_regions",
    Gauge,
    "Regions of the dirty-region log that are set.",
    ["volume"]
);
family!(
    RESYNC_LEFT,
    "nacre_volume_resync_bytes_left",
    Gauge,
    "Bytes that the resync of a replica still has to copy.",
    ["volume", "device", "kind"]
);
family!(
    RESYNC_SPEED,
    "nacre_volume_resync_speed",
    Gauge,
    "Bytes per second that the resync of a replica copies, as the mean of the last 10 s.",
    ["volume", "device", "kind"]
);
family!(
    RESYNCS,
    "nacre_resyncs_active",
    Gauge,
    "Replicas with a resync in progress.",
    []
);
family!(
    READS,
    "nacre_volume_replica_reads",
    Counter,
    "Reads sent to a replica.",
    ["volume", "device"]
);
family!(
    WRITES,
    "nacre_volume_replica_writes",
    Counter,
    "Writes sent to a replica.",
    ["volume", "device"]
);
family!(
    ERRORS,
    "nacre_volume_replica_errors",
    Counter,
    "I/Os that a replica failed.",
    ["volume", "device"]
);
family!(
    LOG_WAITS,
    "nacre_volume_log_waits",
    Counter,
    "Writes that waited for the dirty-region log.",
    ["volume"]
);
family!(
    OVERLAP_WAITS,
    "nacre_volume_overlap_waits",
    Counter,
    "Writes that waited for an overlapping one.",
    ["volume"]
);
family!(
    READS_MOVED,
    "nacre_volume_reads_moved",
    Counter,
    "Reads that another replica answered after an error.",
    ["volume"]
);
family!(
    FROZEN_ANSWERS,
    "nacre_volume_frozen_answers",
    Counter,
    "Commands answered with a path error because no replica was in sync.",
    ["volume"]
);
family!(
    DIFFERENCES,
    "nacre_volume_verify_different_blocks",
    Gauge,
    "Blocks that the last verification found to differ between replicas.",
    ["volume"]
);

#[derive(Debug)]
pub struct VolumeMetrics;

impl MetricsSource for VolumeMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 16] = [
            &STATE,
            &IN_SYNC,
            &DIRTY,
            &REPLICA_STATE,
            &REPLICA_ATTACHED,
            &RESYNC_LEFT,
            &RESYNC_SPEED,
            &RESYNCS,
            &READS,
            &WRITES,
            &ERRORS,
            &LOG_WAITS,
            &OVERLAP_WAITS,
            &READS_MOVED,
            &FROZEN_ANSWERS,
            &DIFFERENCES,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let mut resyncs = 0usize;
        for listed in of.engine.volumes.list() {
            let status = listed.status();
            let name = listed.name();
            let now = listed.state();
            for state in STATES {
                into.value(&STATE, &[&name, state], state == now);
            }
            // The node that serves the volume has the figures.
            if let Some(status) = status.as_ref().filter(|s| s.state != VolumeState::Standby) {
                volume(status, into);
                let in_resync = |m: &&ReplicaStatus| m.resync.is_some();
                resyncs += status.replicas.iter().filter(in_resync).count();
            }
        }
        into.value(&RESYNCS, &[], resyncs);
    }
}

fn volume(status: &VolumeStatus, into: &mut Scrape) {
    let name = status.name.as_str();
    into.value(&DIRTY, &[name], status.dirty_regions);
    into.value(&LOG_WAITS, &[name], status.log_waits);
    into.value(&OVERLAP_WAITS, &[name], status.overlap_waits);
    into.value(&READS_MOVED, &[name], status.reads_moved);
    into.value(&FROZEN_ANSWERS, &[name], status.frozen_answers);
    if let Some(verify) = &status.verify {
        into.value(&DIFFERENCES, &[name], verify.different_blocks);
    }
    let good = |m: &&ReplicaStatus| matches!(replica_word(m), "in_sync" | "reconciling");
    let in_sync = status.replicas.iter().filter(good).count();
    into.value(&IN_SYNC, &[name], in_sync);
    for replica in &status.replicas {
        let device = replica.device.as_str();
        let now = replica_word(replica);
        for state in REPLICA_STATES {
            into.value(&REPLICA_STATE, &[name, device, state], state == now);
        }
        into.value(&REPLICA_ATTACHED, &[name, device], replica.attached);
        into.value(&READS, &[name, device], replica.reads);
        into.value(&WRITES, &[name, device], replica.writes);
        into.value(&ERRORS, &[name, device], replica.errors);
        if let Some(resync) = &replica.resync {
            let kind = crate::services::volumes::words::kind_word(resync.kind);
            into.value(&RESYNC_LEFT, &[name, device, kind], resync.left_bytes);
            into.value(&RESYNC_SPEED, &[name, device, kind], resync.bytes_per_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::test_daemon;
    use serde_json::json;

    /// Goal: every family of volume metrics has the expected samples.
    #[test]
    fn volume_metrics_are_complete() {
        let daemon = test_daemon();
        for name in ["a", "b"] {
            let params = json!({ "name": name, "num_blocks": 16384, "block_size": 512 });
            daemon.call("bdev_malloc_create", params);
        }
        // RAM disks are zeroed quickly: both replicas are in sync at once.
        let params = json!({ "name": "v", "devices": ["a", "b"] });
        assert_eq!(daemon.call("volume_create", params)["state"], "healthy");
        let text = daemon
            .run(crate::metrics::Scrape::of(&daemon.engine))
            .text();
        for expected in [
            "nacre_volume_state{volume=\"v\",state=\"healthy\"} 1.0",
            "nacre_volume_state{volume=\"v\",state=\"frozen\"} 0.0",
            "nacre_volume_replica_state{volume=\"v\",device=\"b\",state=\"in_sync\"} 1.0",
            "nacre_volume_replicas_in_sync{volume=\"v\"} 2.0",
            "nacre_volume_replica_errors_total{volume=\"v\",device=\"a\"} 0",
            "nacre_volume_dirty_regions{volume=\"v\"} 0.0",
            "nacre_volume_frozen_answers_total{volume=\"v\"} 0",
            "nacre_resyncs_active{} 0.0",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }
}
