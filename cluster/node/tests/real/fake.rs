//! A stand-in for the engine. It opens a volume as the daemon's control does: by changes of the
//! record through [`EtcdStore`], and by the replicas' gates, which are files. A replica is reached
//! while its node's process lives. One thread answers a read of each open volume every 2 ms, and
//! writes the time of each answer, with the volume and its epoch, to a file.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev_replica::model::{ReplicaRecord, ReplicaState, Stamp, VolumeRecord};
use nacre_bdev_replica::store::suite::block_on;
use nacre_bdev_replica::store::{StoreError, VolumeStore};
use nacre_cluster_core::gate::Key;
use nacre_cluster_core::{BootTime, ExportId, Holder, Incarnation, NodeId, ReplicaId, VolumeId};
use nacre_cluster_etcd::{Endpoints, EtcdStore};
use nacre_cluster_node::serving::{Answer, VolumeRole};
use nacre_cluster_node::{Export, Link, NodeKey, Publication, Serving, clock};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use uuid::Uuid;

use crate::process::prefix;

const TICK: Duration = Duration::from_millis(2);
/// Interval between two looks at the replicas of open volumes.
const LOOK: Duration = Duration::from_millis(100);
const AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone)]
pub(crate) struct Fake(Arc<Shared>);

struct Shared {
    dir: PathBuf,
    me: NodeId,
    link: Link,
    store: EtcdStore,
    lanes: Mutex<BTreeMap<VolumeId, Lane>>,
}

#[derive(Default)]
struct Lane {
    role: Option<VolumeRole>,
    /// Incremented by each drop: what began before is over.
    generation: u64,
    open: Option<Open>,
    /// Held by the one act that changes the record.
    turn: Arc<Mutex<()>>,
}

/// The state of an open volume.
#[derive(Clone)]
struct Open {
    number: u64,
    key: Key,
    record: VolumeRecord,
    /// A promotion whose answer is missing.
    promoted: Option<Uuid>,
    is_closing: bool,
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
    pub(crate) fn new(dir: &Path, me: NodeId, link: Link, endpoints: &Endpoints) -> Self {
        let incarnation = Arc::clone(&link.incarnation);
        let store = EtcdStore::of_node(endpoints, prefix(), me, incarnation);
        let fake = Self(Arc::new(Shared {
            dir: dir.to_owned(),
            me,
            link,
            store: store.expect("a store"),
            lanes: Mutex::default(),
        }));
        let log = dir.join(format!("answers-{}", me.0));
        let log = File::options().create(true).append(true).open(log);
        let mut log = log.expect("a log");
        let of_lanes = fake.clone();
        std::thread::spawn(move || {
            loop {
                for (id, lane) in of_lanes.0.lanes.lock().iter() {
                    of_lanes.answer(*id, lane, &mut log);
                }
                std::thread::sleep(TICK);
            }
        });
        let of_replicas = fake.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                let ids: Vec<VolumeId> = of_replicas.0.lanes.lock().keys().copied().collect();
                ids.into_iter().for_each(|id| of_replicas.look(id));
            }
        });
        fake
    }

    fn lane<T>(&self, volume: VolumeId, change: impl FnOnce(&mut Lane) -> T) -> T {
        change(self.0.lanes.lock().entry(volume).or_default())
    }

    fn send(&self, volume: VolumeId, answer: Answer) {
        let sent = self.0.link.reports.send(volume, answer);
        sent.expect("room for a report");
    }

    /// Runs an act after the earlier ones of this volume.
    fn act(&self, volume: VolumeId, act: impl FnOnce(&Self, u64) + Send + 'static) {
        let (turn, generation) =
            self.lane(volume, |lane| (Arc::clone(&lane.turn), lane.generation));
        let fake = self.clone();
        std::thread::spawn(move || {
            let _turn = turn.lock();
            act(&fake, generation);
        });
    }

    fn is_over(&self, volume: VolumeId, generation: u64) -> bool {
        self.lane(volume, |lane| lane.generation != generation)
    }

    /// Changes the record. `None`: this node is no longer the holder.
    fn commit(
        &self,
        generation: u64,
        before: &VolumeRecord,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Option<VolumeRecord> {
        let mut next = before.clone();
        next.revision += 1;
        next.holder = Some(self.0.me.0);
        change(&mut next);
        while !self.is_over(VolumeId(before.id), generation) {
            match block_on(self.0.store.swap(before.version(), next.clone())) {
                Ok(()) => return Some(next),
                Err(StoreError::Unavailable { .. }) => {}
                Err(_) => return None,
            }
            match block_on(self.0.store.load(before.id)) {
                Ok(found) if found == next => return Some(next),
                Ok(found) if found.version() != before.version() => return None,
                _ => std::thread::sleep(AGAIN),
            }
        }
        None
    }

    fn open(&self, volume: VolumeId, generation: u64, number: u64) -> Option<Open> {
        let before = loop {
            if self.is_over(volume, generation) {
                return None;
            }
            match block_on(self.0.store.load(volume.0)) {
                Ok(record) => break record,
                Err(_) => std::thread::sleep(AGAIN),
            }
        };
        let record = self.commit(generation, &before, |record| record.epoch += 1)?;
        let incarnation = self.0.link.incarnation.load(Ordering::SeqCst);
        let key = Key {
            epoch: record.epoch,
            holder: Holder {
                node: self.0.me,
                incarnation: Incarnation(incarnation as u64),
            },
        };
        let mut gated = Vec::new();
        for replica in record.in_sync().filter(|replica| self.reaches(replica)) {
            acquire(&self.0.dir, ReplicaId(replica.id), key).ok()?;
            gated.push(replica.id);
        }
        if gated.is_empty() {
            return None;
        }
        let record = self.commit(generation, &record, |record| {
            record.serving = record.epoch;
            for replica in &mut record.replicas {
                if !gated.contains(&replica.id) {
                    put_out(replica);
                }
            }
        })?;
        Some(Open {
            number,
            key,
            record,
            promoted: None,
            is_closing: false,
        })
    }

    fn reaches(&self, replica: &ReplicaRecord) -> bool {
        let node = replica.node.expect("of a node");
        is_alive(&self.0.dir, NodeId(node))
    }

    /// Puts replicas out whose nodes are down, and replicas in that are back.
    fn look(&self, volume: VolumeId) {
        let turn = self.lane(volume, |lane| Arc::clone(&lane.turn));
        let Some(_turn) = turn.try_lock() else { return };
        let (open, generation) = self.lane(volume, |lane| (lane.open.clone(), lane.generation));
        let Some(open) = open.filter(|open| !open.is_closing) else {
            return;
        };
        for replica in &open.record.replicas {
            let is_in_sync = replica.state == ReplicaState::InSync;
            if self.reaches(replica) == is_in_sync {
                continue;
            }
            if !is_in_sync {
                if acquire(&self.0.dir, ReplicaId(replica.id), open.key).is_err() {
                    return;
                }
                self.change(volume, generation, |open| open.promoted = Some(replica.id));
            }
            let changed = self.commit(generation, &open.record, |record| {
                let slot = usize::from(replica.slot);
                let replica = record.replica_mut(slot).expect("it is there");
                if is_in_sync {
                    put_out(replica);
                } else {
                    replica.state = ReplicaState::InSync;
                }
            });
            match changed {
                Some(record) => self.change(volume, generation, |open| {
                    open.record = record;
                    open.promoted = None;
                }),
                None => self.fenced(volume, generation),
            }
            return;
        }
    }

    fn change(&self, volume: VolumeId, generation: u64, change: impl FnOnce(&mut Open)) {
        self.lane(volume, |lane| {
            if lane.generation == generation
                && let Some(open) = &mut lane.open
            {
                change(open);
            }
        });
    }

    /// The volume closes by itself.
    fn fenced(&self, volume: VolumeId, generation: u64) {
        let open = self.lane(volume, |lane| {
            lane.open.take_if(|_| lane.generation == generation)
        });
        if let Some(Open { number, .. }) = open {
            self.send(volume, Answer::NotOpened { number });
        }
    }

    /// Reads from a replica, and answers if the lease is good after that, or by confirmation.
    fn answer(&self, id: VolumeId, lane: &Lane, log: &mut File) {
        let Some(open) = lane.open.as_ref().filter(|open| !open.is_closing) else {
            return;
        };
        let has_key = |id: Uuid| gate(&self.0.dir, ReplicaId(id)) == Some(open.key);
        let collected = clock::now();
        let mut replicas = open.record.in_sync().map(|replica| replica.id);
        if !replicas.any(has_key) {
            return;
        }
        let now = clock::now();
        let at = if self.0.link.word.is_good(now) {
            now
        } else {
            let replicas = open.record.in_sync().map(|replica| replica.id);
            if !replicas.chain(open.promoted).all(has_key) {
                return;
            }
            collected
        };
        writeln!(log, "{} {} {}", id.0, open.key.epoch, at.0).expect("a line");
    }
}

fn put_out(replica: &mut ReplicaRecord) {
    let last_label = Stamp::default();
    replica.state = ReplicaState::Out { last_label };
}

impl Serving for Fake {
    fn reached(
        &mut self,
        volume: VolumeId,
    ) -> arrayvec::ArrayVec<ReplicaId, { nacre_cluster_core::ids::MAX_REPLICAS }> {
        let lanes = self.0.lanes.lock();
        let role = lanes.get(&volume).and_then(|lane| lane.role.as_ref());
        let replicas = role.into_iter().flat_map(|role| &role.record.replicas);
        replicas
            .filter(|replica| is_alive(&self.0.dir, replica.node))
            .map(|replica| replica.id)
            .collect()
    }

    fn take(&mut self, volume: VolumeId, number: u64) {
        self.act(volume, move |fake, generation| {
            let opened = fake.open(volume, generation, number);
            let answer = fake.lane(volume, |lane| {
                lane.open = opened.filter(|_| lane.generation == generation);
                match lane.open {
                    Some(_) => Answer::Opened { number },
                    None => Answer::NotOpened { number },
                }
            });
            fake.send(volume, answer);
        });
    }

    fn close(&mut self, volume: VolumeId, number: u64) {
        let generation = self.lane(volume, |lane| lane.generation);
        self.change(volume, generation, |open| open.is_closing = true);
        self.act(volume, move |fake, generation| {
            if let Some(open) = fake.lane(volume, |lane| lane.open.clone()) {
                fake.commit(generation, &open.record, |record| record.holder = None);
            }
            if !fake.is_over(volume, generation) {
                fake.lane(volume, |lane| lane.open = None);
                fake.send(volume, Answer::Drained { number });
            }
        });
    }

    fn abort(&mut self, _: VolumeId) {}

    fn drop_all(&mut self, volume: VolumeId) {
        self.lane(volume, |lane| {
            lane.generation += 1;
            lane.open = None;
        });
    }

    fn show(&mut self, volume: VolumeId, role: &VolumeRole) {
        assert_eq!(role.value["later"], "kept");
        self.lane(volume, |lane| lane.role = Some(role.clone()));
    }

    fn forget(&mut self, volume: VolumeId) {
        self.0.lanes.lock().remove(&volume);
    }

    fn publish(&mut self, _: VolumeId, publication: Option<&Publication>) {
        assert_eq!(
            publication.map(|publication| publication.nodes().len()),
            Some(3)
        );
    }

    fn nodes(&mut self, _: &BTreeMap<NodeId, NodeKey>, _: &BTreeMap<NodeId, Incarnation>) {}

    fn exports(&mut self, exports: &BTreeMap<ExportId, Export>) {
        // Shown in the file of the node's state.
        let file = self.0.dir.join(format!("exports-{}", self.0.me.0));
        let lines = exports.iter().map(|(export_id, export)| {
            format!(
                "{} {} {:?} {:?}\n",
                export_id.0, export.device, export.want, export.is
            )
        });
        std::fs::write(file, lines.collect::<String>()).expect("a file");
    }
}

/// The key at the replica's gate. A reader needs no lock, because each write replaces the file: a
/// process that is stopped with a lock would stop all readers.
fn gate(dir: &Path, replica: ReplicaId) -> Option<Key> {
    let text = std::fs::read_to_string(dir.join(format!("gate-{}", replica.0))).ok()?;
    let mut parts = text.split_whitespace();
    let epoch = parts.next()?.parse().ok()?;
    let node = NodeId(Uuid::parse_str(parts.next()?).ok()?);
    let incarnation = Incarnation(parts.next()?.parse().ok()?);
    let holder = Holder { node, incarnation };
    Some(Key { epoch, holder })
}

fn acquire(dir: &Path, replica: ReplicaId, key: Key) -> Result<(), Key> {
    let path = dir.join(format!("gate-{}", replica.0));
    let lock = File::create(path.with_extension("lock")).expect("a lock");
    flock(&lock, FlockOperation::LockExclusive).expect("a lock");
    if let Some(current) = gate(dir, replica)
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
    // Polled while the files grow: the other volumes' lines are not parsed.
    let own = volume.0.to_string();
    for node in nodes.iter().copied() {
        let Ok(text) = std::fs::read_to_string(dir.join(format!("answers-{}", node.0))) else {
            continue;
        };
        for line in text
            .split_inclusive('\n')
            .filter(|line| line.starts_with(&own) && line.ends_with('\n'))
        {
            let parts: Vec<&str> = line.split_whitespace().collect();
            let [_, epoch, at] = parts[..] else {
                panic!("{line}")
            };
            let epoch = epoch.parse().expect("an epoch");
            let at = BootTime(at.parse().expect("a time"));
            all.push(Served { at, epoch, node });
        }
    }
    all.sort_by_key(|served| served.at);
    all
}
