//! Connects the missing paths of staged volumes again: those that failed while the volume was
//! staged, and those that the kernel gave up because a target refused them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};
use uuid::Uuid;

use super::Node;
use super::context::Portal;
use super::fabrics;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// Longest time between two tries of one path.
const LONGEST: Duration = Duration::from_secs(60);

/// The paths that failed, with the time of their next try.
#[derive(Debug, Default)]
pub struct Guardian {
    failed: BTreeMap<(Uuid, Portal), Retry>,
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
        for volume in volumes {
            // A call on the volume connects, or disconnects, its paths itself.
            let Some(_one) = node.pending.try_start(&volume.to_string()) else {
                continue;
            };
            let staged = match node.records.read(volume) {
                Ok(Some(staged)) => staged,
                Ok(None) => continue,
                Err(error) => {
                    warn!(%volume, "{}", error.message());
                    continue;
                }
            };
            let (host, me) = (&*node.host, &node.me);
            for portal in fabrics::missing(host, me, &staged.nqn, &staged.portals()) {
                let key = (volume, portal.clone());
                let retry = self.failed.get(&key).copied();
                if retry.is_some_and(|retry| now < retry.next) {
                    continue;
                }
                match fabrics::connect(host, me, &staged.nqn, &portal) {
                    Ok(()) => {
                        info!(%volume, %portal, "connected a missing path");
                        self.failed.remove(&key);
                        connected += 1;
                    }
                    Err(error) => {
                        let pause = retry.map_or(LOOK, |retry| (retry.pause * 2).min(LONGEST));
                        warn!(%volume, %portal, %error, "a path is missing");
                        let next = now + pause;
                        self.failed.insert(key, Retry { next, pause });
                    }
                }
            }
        }
        connected
    }

    /// Looks until the node is dropped elsewhere.
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
