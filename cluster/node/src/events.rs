//! The last decisions and observations of this node, in a ring of [`KEPT`] events.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use nacre_cluster_core::{Incarnation, NodeId, VolumeId};
use parking_lot::Mutex;

/// Most events in the ring; the oldest one goes first.
pub const KEPT: usize = 1024;

/// A decision or observation of this node.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// This node has a lease.
    NodeJoined { incarnation: Incarnation },
    /// The incarnation of this node has ended: its lease key was deleted or replaced, or etcd has
    /// other data than before.
    NodeLost { incarnation: Incarnation },
    /// This node fenced another one.
    NodeFenced {
        node: NodeId,
        /// The time since the last renewal that this node saw.
        silent: Duration,
    },
    /// Another node's lease has ended, by a fence or in order.
    NodeGone { node: NodeId },
    /// Another node has a lease again.
    NodeBack { node: NodeId },
    /// This node stays out of the cluster until its daemon starts again: another process renews the
    /// lease of its id, or the cluster in etcd is another one or cannot be used.
    NodeExcluded { why: String },
    /// This node became the holder of the volume, and serves it.
    VolumeTaken {
        volume: VolumeId,
        epoch: u64,
        /// The former holder; `None`: the volume had none.
        from: Option<NodeId>,
        /// The time from the decision to take until hosts are served.
        took: Duration,
    },
    /// This node closed the volume, and released it for another node.
    VolumeHandedOver {
        volume: VolumeId,
        epoch: u64,
        to: Option<NodeId>,
    },
    /// The engine did not open the volume, or closed it by itself. This node releases it.
    VolumeNotOpened { volume: VolumeId, epoch: u64 },
    /// The close for a handover took 5 seconds: this node goes on to hold the volume.
    VolumeKept { volume: VolumeId },
    /// This node lost the volume: another node holds it, or this node's incarnation has ended.
    VolumeFenced { volume: VolumeId, epoch: u64 },
    /// The volume has no holder, and this node reaches none of its in-sync replicas.
    VolumeWithoutHolder {
        volume: VolumeId,
        /// For a volume restored from a backup: the nodes whose replicas it waits for.
        missing: Vec<NodeId>,
    },
    /// The lease of this node is no longer good: etcd does not answer, or answers too late.
    StoreAway { why: String },
    /// The lease of this node is good again, after this time.
    StoreBack { away: Duration },
    /// This program cannot read the key, and ignores it.
    KeyIgnored { key: String, why: String },
}

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Counts from 1.
    pub number: u64,
    pub at: SystemTime,
    pub what: Decision,
}

/// Decisions of this process so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub takes: u64,
    pub handovers: u64,
    /// Volumes that this node lost ([`Decision::VolumeFenced`]).
    pub volumes_lost: u64,
    /// Other nodes that this one fenced.
    pub fences: u64,
    /// Incarnations that this node lost ([`Decision::NodeLost`]).
    pub incarnations_lost: u64,
}

impl Counts {
    fn count(&mut self, what: &Decision) {
        let count = match what {
            Decision::VolumeTaken { .. } => &mut self.takes,
            Decision::VolumeHandedOver { .. } => &mut self.handovers,
            Decision::VolumeFenced { .. } => &mut self.volumes_lost,
            Decision::NodeFenced { .. } => &mut self.fences,
            Decision::NodeLost { .. } => &mut self.incarnations_lost,
            _ => return,
        };
        *count += 1;
    }
}

#[derive(Debug, Default)]
pub struct Events(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    last: u64,
    counts: Counts,
    kept: VecDeque<Event>,
}

impl Events {
    pub(crate) fn note(&self, what: Decision) {
        tracing::info!(?what, "cluster");
        let mut ring = self.0.lock();
        ring.last += 1;
        ring.counts.count(&what);
        let number = ring.last;
        if ring.kept.len() == KEPT {
            ring.kept.pop_front();
        }
        ring.kept.push_back(Event {
            number,
            at: SystemTime::now(),
            what,
        });
    }

    pub fn counts(&self) -> Counts {
        self.0.lock().counts
    }

    /// The events after `number`, oldest first; 0: all events of the ring.
    pub fn after(&self, number: u64) -> Vec<Event> {
        let ring = self.0.lock();
        let later = ring.kept.iter().filter(|event| event.number > number);
        later.cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_has_a_bound() {
        let events = Events::default();
        for _ in 0..KEPT + 10 {
            events.note(Decision::StoreAway { why: String::new() });
        }
        events.note(Decision::NodeFenced {
            node: NodeId(uuid::Uuid::nil()),
            silent: Duration::ZERO,
        });
        let fences = Counts {
            fences: 1,
            ..Counts::default()
        };
        assert_eq!(events.counts(), fences);
        let all = events.after(0);
        assert_eq!((all.len(), all[0].number), (KEPT, 12));
        assert_eq!(events.after(KEPT as u64 + 8).len(), 3);
    }
}
