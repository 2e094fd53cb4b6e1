//! Connects the missing paths of staged volumes again. Some paths failed while the volume was
//! staged. The kernel gave up other paths, because a target refused them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Status;
use tracing::{info, warn};
use uuid::Uuid;

use super::Node;
use super::context::Address;

/// Time between two rounds, and the first pause of a path that fails.
const LOOK: Duration = Duration::from_secs(5);
/// Time of one round. Its last connection may take some seconds more: the kernel waits for a silent
/// address. The next round continues with the other paths, because the failed ones pause.
const ROUND: Duration = Duration::from_secs(30);
/// Longest pause between two tries of one path. Each failure doubles the pause.
const LONGEST: Duration = Duration::from_secs(60);

type Path = (Uuid, Address);

/// The missing paths, with the times of their tries.
#[derive(Debug, Default)]
pub struct Reconnector {
    missing: BTreeMap<Path, Wait>,
}

#[derive(Debug, Clone, Copy)]
struct Wait {
    /// The time of the last try, or of the first round that found the path missing.
    since: Instant,
    /// The time of the next try.
    next: Instant,
    pause: Duration,
}

impl Reconnector {
    /// One round: tries the missing paths whose pause is over, for about 30 s. Returns the number
    /// of new connections.
    pub fn connect_missing(&mut self, node: &Node, now: Instant) -> usize {
        self.note_missing(node, now);
        let mut connected = 0;
        let last = Instant::now() + ROUND;
        for (volume, address) in in_turn(&self.missing, now) {
            if Instant::now() >= last {
                break;
            }
            connected += usize::from(self.try_one(node, volume, &address, now));
        }
        connected
    }

    /// Forgets the paths that are there again, and notes the others.
    fn note_missing(&mut self, node: &Node, now: Instant) {
        let volumes = node.records.volumes().unwrap_or_else(|error| {
            warn!(%error, "cannot list the records of staged volumes");
            Vec::new()
        });
        let mut missing = BTreeSet::new();
        for volume in volumes {
            match missing_of(node, volume) {
                Ok(addresses) => missing.extend(addresses.into_iter().map(|one| (volume, one))),
                Err(error) => warn!(%volume, "{}", error.message()),
            }
        }
        self.missing.retain(|path, _| missing.contains(path));
        for path in missing {
            self.missing.entry(path).or_insert(Wait {
                since: now,
                next: now,
                pause: Duration::ZERO,
            });
        }
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
        // A call on another volume of the subsystem.
        let Some(change) = node.paths.try_change(&staged.nqn) else {
            return false;
        };
        let path = (volume, address.clone());
        match change.connect(address) {
            Ok(()) => {
                info!(%volume, %address, "connected a missing path");
                self.missing.remove(&path);
                true
            }
            Err(error) => {
                warn!(%volume, %address, %error, "a path is missing");
                if let Some(wait) = self.missing.get_mut(&path) {
                    let pause = (wait.pause * 2).clamp(LOOK, LONGEST);
                    *wait = Wait {
                        since: now,
                        next: now + pause,
                        pause,
                    };
                }
                false
            }
        }
    }

    /// Starts a thread that runs a round and pauses 5 s, until no other reference to the node is
    /// left.
    pub fn watch(node: &Arc<Node>) {
        let node = Arc::downgrade(node);
        let mut reconnector = Self::default();
        let watch = move || {
            while let Some(node) = node.upgrade() {
                reconnector.connect_missing(&node, Instant::now());
                drop(node);
                std::thread::sleep(LOOK);
            }
        };
        std::thread::spawn(watch);
    }
}

fn missing_of(node: &Node, volume: Uuid) -> Result<Vec<Address>, Status> {
    match node.staged(volume)? {
        Some(staged) => node.paths.missing(&staged.nqn, &staged.addresses()),
        None => Ok(Vec::new()),
    }
}

/// The paths whose time has come. Volumes take turns, so that silent addresses of one volume do not
/// delay another. Of each volume, and of each turn, the path that has waited longest comes first.
fn in_turn(missing: &BTreeMap<Path, Wait>, now: Instant) -> Vec<Path> {
    let due = missing.iter().filter(|(_, wait)| now >= wait.next);
    let mut due: Vec<_> = due.map(|(path, wait)| (wait.since, path)).collect();
    due.sort();
    let mut turns: BTreeMap<Uuid, usize> = BTreeMap::new();
    let turn = |(since, path)| {
        let turn: &mut usize = turns.entry(Path::clone(path).0).or_default();
        *turn += 1;
        (*turn, since, path)
    };
    let mut due: Vec<(usize, Instant, &Path)> = due.into_iter().map(turn).collect();
    due.sort();
    due.into_iter().map(|(.., path)| path.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the path that has waited longest is tried first, and many silent addresses of one
    /// volume do not delay another volume. Method: rounds of two tries, without a machine.
    #[test]
    fn volumes_take_turns_and_the_longest_wait_is_first() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let path = |volume: u128, last: u8| {
            let address = format!("tcp://192.0.2.{last}:4420");
            let address = Address::read(&address).expect("an address");
            (Uuid::from_u128(volume), address)
        };
        let wait = |since: u64, next: u64| Wait {
            since: at(since),
            next: at(next),
            pause: LOOK,
        };
        // Volume 1 has many silent addresses, which are missing for longer than the others.
        let mut missing: BTreeMap<Path, Wait> =
            (1..=20).map(|last| (path(1, last), wait(0, 0))).collect();
        missing.insert(path(1, 7), wait(2, 0));
        missing.insert(path(2, 1), wait(5, 0));
        missing.insert(path(2, 2), wait(4, 0));
        missing.insert(path(3, 1), wait(1, 0));
        missing.insert(path(3, 2), wait(1, 99));
        let all = in_turn(&missing, at(10));
        assert_eq!(all.len(), missing.len() - 1, "one pauses");
        let first = [path(1, 1), path(3, 1), path(2, 2), path(1, 2), path(2, 1)];
        assert_eq!(all[..5], first);
        assert_eq!(all.last(), Some(&path(1, 7)));
        // Whatever fails comes last in its volume, so that each path has its turn.
        let mut tried = BTreeSet::new();
        for round in 11..41 {
            for path in in_turn(&missing, at(round)).into_iter().take(2) {
                missing.insert(path.clone(), wait(round, round));
                tried.insert(path);
            }
        }
        assert_eq!(tried.len(), missing.len() - 1);
    }
}
