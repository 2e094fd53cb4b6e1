//! A stand-in for the engine. Gates are files, a member is reached while its node's
//! process lives, and one thread answers a read of each open volume every 2 ms. It writes the time
//! of each answer, with the volume and its epoch, to a file.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::gate::Key;
use nacre_cluster_core::volume::State;
use nacre_cluster_core::{BootTime, Holder, Incarnation, Member, MemberId, NodeId, VolumeId};
use nacre_cluster_node::serving::{Answer, Reports, Role};
use nacre_cluster_node::{Export, Link, NodeKey, Publication, Serving, clock};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use uuid::Uuid;

const TICK: Duration = Duration::from_millis(2);

pub(crate) struct Fake {
    dir: PathBuf,
    lanes: Arc<Mutex<BTreeMap<VolumeId, Lane>>>,
}

#[derive(Default)]
struct Lane {
    role: Option<Role>,
    is_open: bool,
    granted: Vec<MemberId>,
    take: Option<u64>,
    close: Option<u64>,
}

/// The lock of a node's process, for its lifetime.
pub(crate) fn live(dir: &Path, node: NodeId) -> File {
    let file = alive_file(dir, node);
    flock(&file, FlockOperation::LockExclusive).expect("one process per data directory");
    file
}

fn alive_file(dir: &Path, node: NodeId) -> File {
    let path = dir.join(format!("alive-{}", node.0));
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true);
    options.open(path).expect("a file")
}

fn is_alive(dir: &Path, node: NodeId) -> bool {
    flock(alive_file(dir, node), FlockOperation::NonBlockingLockShared).is_err()
}

impl Fake {
    pub(crate) fn new(dir: &Path, me: NodeId, link: Link) -> Self {
        let lanes: Arc<Mutex<BTreeMap<VolumeId, Lane>>> = Arc::default();
        let log = dir.join(format!("answers-{}", me.0));
        let mut worker = Worker {
            dir: dir.to_owned(),
            link,
            lanes: Arc::clone(&lanes),
            log: File::options()
                .create(true)
                .append(true)
                .open(log)
                .expect("a log"),
        };
        std::thread::spawn(move || {
            loop {
                worker.turn();
                std::thread::sleep(TICK);
            }
        });
        Self {
            dir: dir.to_owned(),
            lanes,
        }
    }

    fn lane(&mut self, volume: VolumeId, change: impl FnOnce(&mut Lane)) {
        change(self.lanes.lock().entry(volume).or_default());
    }
}

impl Serving for Fake {
    fn reached(
        &mut self,
        volume: VolumeId,
    ) -> arrayvec::ArrayVec<MemberId, { nacre_cluster_core::ids::MAX_MEMBERS }> {
        let lanes = self.lanes.lock();
        let role = lanes.get(&volume).and_then(|lane| lane.role.as_ref());
        let members = role.into_iter().flat_map(|role| &role.record.members);
        members
            .filter(|member| is_alive(&self.dir, member.node))
            .map(|member| member.id)
            .collect()
    }

    fn take(&mut self, volume: VolumeId, number: u64) {
        self.lane(volume, |lane| lane.take = Some(number));
    }

    fn close(&mut self, volume: VolumeId, number: u64) {
        self.lane(volume, |lane| {
            lane.is_open = false;
            lane.close = Some(number);
        });
    }

    fn abort(&mut self, _: VolumeId) {}

    fn drop_all(&mut self, volume: VolumeId) {
        self.lane(volume, |lane| {
            let role = lane.role.take();
            *lane = Lane {
                role,
                ..Lane::default()
            };
        });
    }

    fn show(&mut self, volume: VolumeId, role: &Role) {
        self.lane(volume, |lane| lane.role = Some(role.clone()));
    }

    fn forget(&mut self, volume: VolumeId) {
        self.lanes.lock().remove(&volume);
    }

    fn publish(&mut self, _: VolumeId, _: Option<&Publication>) {}

    fn nodes(&mut self, _: &BTreeMap<NodeId, NodeKey>, _: &BTreeMap<NodeId, Incarnation>) {}

    fn exports(&mut self, _: &BTreeMap<MemberId, Export>) {}
}

struct Worker {
    dir: PathBuf,
    link: Link,
    lanes: Arc<Mutex<BTreeMap<VolumeId, Lane>>>,
    log: File,
}

impl Worker {
    fn turn(&mut self) {
        let lanes = Arc::clone(&self.lanes);
        for (id, lane) in lanes.lock().iter_mut() {
            self.report(*id, lane);
            if lane.is_open {
                self.answer(*id, lane);
            }
        }
    }

    fn report(&self, id: VolumeId, lane: &mut Lane) {
        let send = |answer| {
            let reports: &Reports = &self.link.reports;
            reports.send(id, answer).expect("room for a report");
        };
        if let (Some(key), Some(number)) = (lane.role.as_ref().and_then(key), lane.take) {
            lane.take = None;
            let members = lane.role.iter().flat_map(|role| &role.record.members);
            let granted = members.filter(|member| acquire(&self.dir, member.id, key).is_ok());
            lane.granted = granted.map(|member| member.id).collect();
            lane.is_open = true;
            send(Answer::Opened { number });
        }
        if let Some(number) = lane.close.take() {
            send(Answer::Drained { number });
        }
    }

    /// Reads from a member, and answers if the lease is good after that, or by assent.
    fn answer(&mut self, id: VolumeId, lane: &Lane) {
        let Some(role) = &lane.role else { return };
        let Some(key) = key(role) else { return };
        let collected = clock::now();
        let source = lane.granted.iter().find(|id| role.record.is_in_sync(**id));
        if source.is_none_or(|member| gate(&self.dir, *member) != Some(key)) {
            return;
        }
        let now = clock::now();
        let at = if self.link.word.is_good(now) {
            now
        } else {
            let says_yes = |member: &Member| gate(&self.dir, member.id) == Some(key);
            if !role.record.in_sync().all(says_yes) {
                return;
            }
            collected
        };
        writeln!(self.log, "{} {} {}", id.0, key.epoch, at.0).expect("a line");
    }
}

fn key(role: &Role) -> Option<Key> {
    let epoch = role.record.epoch;
    let is_ours = matches!(role.state, State::Taking | State::Holding | State::Leaving);
    role.holder
        .filter(|_| is_ours)
        .map(|holder| Key { epoch, holder })
}

/// The key at the member's gate. A reader needs no lock, because each write replaces the file: a
/// process that is stopped with a lock would stop all readers.
fn gate(dir: &Path, member: MemberId) -> Option<Key> {
    let text = std::fs::read_to_string(dir.join(format!("gate-{}", member.0))).ok()?;
    let mut parts = text.split_whitespace();
    let epoch = parts.next()?.parse().ok()?;
    let node = NodeId(Uuid::parse_str(parts.next()?).ok()?);
    let incarnation = Incarnation(parts.next()?.parse().ok()?);
    let holder = Holder { node, incarnation };
    Some(Key { epoch, holder })
}

fn acquire(dir: &Path, member: MemberId, key: Key) -> Result<(), Key> {
    let path = dir.join(format!("gate-{}", member.0));
    let lock = File::create(path.with_extension("lock")).expect("a lock");
    flock(&lock, FlockOperation::LockExclusive).expect("a lock");
    if let Some(current) = gate(dir, member)
        && (current.epoch > key.epoch || current.epoch == key.epoch && current.holder != key.holder)
    {
        return Err(current);
    }
    let Holder { node, incarnation } = key.holder;
    let new = path.with_extension("new");
    std::fs::write(&new, format!("{} {} {}", key.epoch, node.0, incarnation.0)).expect("a file");
    std::fs::rename(new, path).expect("a file");
    Ok(())
}

/// One answer of a node to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) at: BootTime,
    pub(crate) epoch: u64,
    pub(crate) node: NodeId,
}

/// All answers for a volume, sorted by time.
pub(crate) fn served(dir: &Path, nodes: &[NodeId], volume: VolumeId) -> Vec<Served> {
    let mut all = Vec::new();
    for node in nodes.iter().copied() {
        let Ok(text) = std::fs::read_to_string(dir.join(format!("answers-{}", node.0))) else {
            continue;
        };
        for line in text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
        {
            let parts: Vec<&str> = line.split_whitespace().collect();
            let [id, epoch, at] = parts[..] else {
                panic!("{line}")
            };
            if id == volume.0.to_string() {
                let epoch = epoch.parse().expect("an epoch");
                let at = BootTime(at.parse().expect("a time"));
                all.push(Served { at, epoch, node });
            }
        }
    }
    all.sort_by_key(|served| served.at);
    all
}
