//! Connects the missing paths of staged volumes again: those that failed while the volume was
//! staged, and those that the kernel gave up because a target refused them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};
use uuid::Uuid;

use super::Node;
use super::context::Address;
use super::fabrics;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// Time of one look. Its last connection may take some seconds more: the kernel waits for a silent
/// address. The next look goes on with the other paths, because the failed ones pause.
const ROUND: Duration = Duration::from_secs(30);
/// Longest time between two tries of one path.
const LONGEST: Duration = Duration::from_secs(60);

/// The paths that failed, with the time of their next try.
#[derive(Debug, Default)]
pub struct Guardian {
    failed: BTreeMap<(Uuid, Address), Retry>,
}

#[derive(Debug, Clone, Copy)]
struct Retry {
    next: Instant,
    pause: Duration,
}

impl Guardian {
    /// Tries the missing paths whose time has come. Returns the number of new connections.
    pub fn look(&mut self, node: &Node, now: Instant) -> usize {
        let volumes = node.records.volumes();
        self.failed
            .retain(|(volume, _), _| volumes.contains(volume));
        let mut connected = 0;
        let last = Instant::now() + ROUND;
        for volume in volumes {
            for address in self.missing(node, volume, now) {
                if Instant::now() >= last {
                    return connected;
                }
                connected += usize::from(self.try_one(node, volume, &address, now));
            }
        }
        connected
    }

    /// The paths of a volume whose time has come.
    fn missing(&self, node: &Node, volume: Uuid, now: Instant) -> Vec<Address> {
        let missing = node.staged(volume).and_then(|staged| match staged {
            Some(staged) => {
                let (host, me) = (&*node.host, &node.me);
                fabrics::missing(host, me, &staged.nqn, &staged.addresses())
            }
            None => Ok(Vec::new()),
        });
        let mut missing = missing.unwrap_or_else(|error| {
            warn!(%volume, "{}", error.message());
            Vec::new()
        });
        missing.retain(|address| {
            let retry = self.failed.get(&(volume, address.clone()));
            retry.is_none_or(|retry| now >= retry.next)
        });
        missing
    }

    /// Tries one path. A call on the volume waits for no more than that.
    fn try_one(&mut self, node: &Node, volume: Uuid, address: &Address, now: Instant) -> bool {
        // A call on the volume connects, or disconnects, its paths itself.
        let Some(_one) = node.pending.try_start(&volume.to_string()) else {
            return false;
        };
        // A call may have ended the stage, or changed its addresses, since the list was made.
        let staged = node.staged(volume).ok().flatten();
        let Some(staged) = staged.filter(|staged| staged.addresses().contains(address)) else {
            return false;
        };
        let key = (volume, address.clone());
        match fabrics::connect(&*node.host, &node.me, &staged.nqn, address) {
            Ok(()) => {
                info!(%volume, %address, "connected a missing path");
                self.failed.remove(&key);
                true
            }
            Err(error) => {
                let retry = self.failed.get(&key);
                let pause = retry.map_or(LOOK, |retry| (retry.pause * 2).min(LONGEST));
                warn!(%volume, %address, %error, "a path is missing");
                let next = now + pause;
                self.failed.insert(key, Retry { next, pause });
                false
            }
        }
    }

    /// Looks until the node is dropped elsewhere. Each look ends before the next one begins.
    pub fn watch(node: &Arc<Node>) {
        let node = Arc::downgrade(node);
        let mut guardian = Self::default();
        let watch = move || {
            while let Some(node) = node.upgrade() {
                guardian.look(&node, Instant::now());
                drop(node);
                std::thread::sleep(LOOK);
            }
        };
        std::thread::spawn(watch);
    }
}
