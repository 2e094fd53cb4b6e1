//! The harness of the tests: disks that outlive the volume on them, and a process in virtual time
//! that opens the volume repeatedly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nacre_bdev::fault::{self, FaultDevice};
use nacre_bdev::registry::Removal;
use nacre_bdev::{Bdev, Completion, Done, Flags, Io, Layer, Op, Queue, Registry, Status, malloc};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::{LocalTask, ReactorConfig, TestCore, VirtualClock};
use parking_lot::Mutex;
use uuid::Uuid;

use super::shared_device::{Reservations, SharedDevice};
use super::truncatable::Cuttable;
use crate::answers::Holder;
use crate::control;
use crate::handle::{
    Command, Devices, NewVolume, NoDevice, Observer, ReplicaDevice, VolumeError, VolumeEvent,
    VolumeEventKind, VolumeHandle, VolumeState, VolumeStatus,
};
use crate::lane::tests::rig::TestLease;
use crate::model::{ReplicaState, Settings, Stamp, VolumeRecord};
use crate::prepared::Prepared;
use crate::store::{MemoryStore, VolumeStore};

pub(super) const BLOCK: u32 = 512;
/// Blocks of each disk: the reserved area and eight regions.
pub(super) const DISK_BLOCKS: u64 = 9 * 2048;
/// Blocks of a region.
pub(super) const REGION: u64 = 2048;

/// All disks there are. A disk that is out of reach answers `Gone` and cannot be claimed.
pub(super) struct TestDisks {
    registry: Registry,
    faults: Arc<Mutex<BTreeMap<String, Arc<FaultDevice>>>>,
    /// The reservations of disks that have them, as they were made; this shelf's host is one of the
    /// registrants.
    guards: Arc<Mutex<BTreeMap<String, Arc<Mutex<Reservations>>>>>,
    host: Option<u8>,
    /// Disks that this host does not reach.
    cut: Arc<Mutex<BTreeSet<String>>>,
    away: Mutex<BTreeSet<String>>,
    claimed: Arc<Mutex<BTreeSet<String>>>,
    pub cuttable: Mutex<BTreeMap<String, Arc<Cuttable>>>,
    /// The disks are on other machines.
    pub remote: AtomicBool,
    pub(super) unawaited: Mutex<BTreeSet<String>>,
    pub(super) patience: Mutex<Option<Duration>>,
}

struct Claimed {
    name: String,
    claimed: Arc<Mutex<BTreeSet<String>>>,
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.claimed.lock().remove(&self.name);
    }
}

impl TestDisks {
    fn add(&self, name: &str, blocks: u64) {
        self.add_on(name, blocks, |medium| medium);
    }

    /// Adds a device whose medium may be another module on top of the memory.
    pub(super) fn add_on(
        &self,
        name: &str,
        blocks: u64,
        medium: impl FnOnce(Arc<dyn Bdev>) -> Arc<dyn Bdev>,
    ) {
        self.add_formatted(name, BLOCK, blocks, medium);
    }

    /// Replaces the disk by an empty one with this block size.
    pub(super) fn exchange(&self, name: &str, block_size: u32, blocks: u64) {
        let base = format!("{name}-medium");
        for device in [format!("EE_{base}"), base] {
            self.registry.remove(&device, Removal::Hot).unwrap();
        }
        self.add_formatted(name, block_size, blocks, |memory| memory);
    }

    fn add_formatted(
        &self,
        name: &str,
        block_size: u32,
        blocks: u64,
        medium: impl FnOnce(Arc<dyn Bdev>) -> Arc<dyn Bdev>,
    ) {
        let base = format!("{name}-medium");
        let config =
            serde_json::json!({"name": base, "block_size": block_size, "num_blocks": blocks});
        let config = serde_json::from_value(config).unwrap();
        let memory = malloc::create(config).unwrap();
        self.registry.register(medium(memory)).unwrap();
        let config = fault::Config {
            base_name: base,
            uuid: None,
        };
        let device = fault::create(config, &self.registry).unwrap();
        self.registry.register(Arc::clone(&device) as _).unwrap();
        self.faults.lock().insert(name.into(), device);
    }

    pub(super) fn fault(&self, name: &str) -> Arc<FaultDevice> {
        Arc::clone(&self.faults.lock()[name])
    }

    pub(super) fn layer(&self, name: &str) -> Arc<Layer> {
        self.registry.lookup(&format!("EE_{name}-medium")).unwrap()
    }

    /// The disk answers nothing but `Gone` until it is back.
    pub(super) fn take(&self, name: &str) {
        self.away.lock().insert(name.into());
        let gone = fault::Fault::new(fault::Action::Fail(Status::Gone));
        self.fault(name).inject(gone).unwrap();
    }

    /// The disk is pulled out.
    pub(super) fn remove(&self, name: &str) {
        self.away.lock().insert(name.into());
        let device = format!("EE_{name}-medium");
        self.registry.remove(&device, Removal::Hot).unwrap();
    }

    pub(super) fn bring(&self, name: &str) {
        self.away.lock().remove(name);
        self.fault(name).clear();
    }
}

impl Devices for TestDisks {
    fn claim(&self, name: &str, _volume: &str) -> Result<ReplicaDevice, NoDevice> {
        let no = |why: &str| NoDevice {
            name: name.into(),
            why: why.into(),
        };
        if self.away.lock().contains(name) || !self.faults.lock().contains_key(name) {
            return Err(no("it is not there"));
        }
        if self.cut.lock().contains(name) {
            return Err(no("it cannot be reached"));
        }
        if !self.claimed.lock().insert(name.into()) {
            return Err(no("another user has it"));
        }
        Ok(ReplicaDevice {
            layer: self.seen(name),
            local: !self.remote.load(Ordering::Relaxed),
            claim: Box::new(Claimed {
                name: name.into(),
                claimed: Arc::clone(&self.claimed),
            }),
        })
    }

    fn is_awaited(&self, name: &str) -> bool {
        !self.unawaited.lock().contains(name)
    }

    fn patience(&self, _name: &str) -> Option<Duration> {
        *self.patience.lock()
    }
}

impl TestDisks {
    fn seen(&self, name: &str) -> Arc<Layer> {
        let Some(host) = self.host else {
            return self.layer(name);
        };
        Layer::new(Arc::new(SharedDevice {
            // A layer of its own: hosts have nothing in common but the medium.
            base: Layer::new(Arc::clone(self.layer(name).module())),
            host,
            name: name.into(),
            cut: Arc::clone(&self.cut),
            reservations: self.reservations(name),
        }))
    }

    pub(super) fn reservations(&self, name: &str) -> Arc<Mutex<Reservations>> {
        let mut guards = self.guards.lock();
        Arc::clone(guards.entry(name.into()).or_default())
    }

    /// Under which key a host is registered with a disk.
    pub(super) fn key(&self, name: &str, host: u8) -> Option<u64> {
        let reservations = self.reservations(name);
        let known = reservations.lock();
        known.keys.get(&host).copied()
    }

    pub(super) fn cut(&self, name: &str, cut: bool) {
        let mut all = self.cut.lock();
        if cut {
            all.insert(name.into())
        } else {
            all.remove(name)
        };
    }

    /// As if another machine asked: it knows nothing of the claims here.
    pub(super) fn forget_claims(&self) {
        self.claimed.lock().clear();
    }
}

type Reaction = Box<dyn Fn(&VolumeEventKind) + Send>;

#[derive(Default)]
pub(super) struct RecordedEvents(Mutex<Vec<VolumeEventKind>>, Mutex<Option<Reaction>>);

impl RecordedEvents {
    pub(super) fn all(&self) -> Vec<VolumeEventKind> {
        self.0.lock().clone()
    }

    /// Called with each event, at the moment of the event.
    pub(super) fn on(&self, callback: impl Fn(&VolumeEventKind) + Send + 'static) {
        *self.1.lock() = Some(Box::new(callback));
    }
}

impl Observer for RecordedEvents {
    fn event(&self, event: VolumeEvent) {
        if let Some(callback) = &*self.1.lock() {
            callback(&event.what);
        }
        self.0.lock().push(event.what);
    }
}

pub(super) struct World {
    pub shelf: Arc<TestDisks>,
    pub store: MemoryStore,
    pub recorded: Arc<RecordedEvents>,
    pub clock: VirtualClock,
    pub core: TestCore,
    pub pool: Pool,
    pub handle: Option<VolumeHandle>,
    pub lane: Option<Box<dyn Queue>>,
    done: Done,
    next: u64,
    pub ended: BTreeMap<u64, Completion>,
    pub id: Uuid,
    pub holder: Uuid,
    pub lease: Option<Arc<TestLease>>,
}

impl World {
    /// Creates and opens a volume on this number of disks, named `d0` and so on.
    pub(super) fn with(disks: usize) -> Self {
        let mut world = Self::empty(disks);
        world.create(disks, Settings::default()).unwrap();
        world.open().unwrap();
        world
    }

    pub(super) fn empty(disks: usize) -> Self {
        Self::on(disks, None)
    }

    /// The same with disks that do reservations, and a host that has this number.
    pub(super) fn shared(disks: usize, host: u8) -> Self {
        Self::on(disks, Some(host))
    }

    fn on(disks: usize, host: Option<u8>) -> Self {
        let shelf = Arc::new(TestDisks {
            registry: Registry::new(),
            faults: Arc::default(),
            guards: Arc::default(),
            host,
            cut: Arc::default(),
            away: Mutex::default(),
            claimed: Arc::default(),
            cuttable: Mutex::default(),
            remote: AtomicBool::default(),
            unawaited: Mutex::default(),
            patience: Mutex::default(),
        });
        (0..disks).for_each(|at| shelf.add(&format!("d{at}"), DISK_BLOCKS));
        let clock = VirtualClock::new();
        Self {
            shelf,
            store: MemoryStore::new(),
            recorded: Arc::default(),
            core: TestCore::with_clock(ReactorConfig::default(), clock.clone()),
            clock,
            pool: pool(),
            handle: None,
            lane: None,
            done: Done::with_capacity(64),
            next: 0,
            ended: BTreeMap::new(),
            id: Uuid::nil(),
            holder: Uuid::from_u128(1),
            lease: None,
        }
    }

    /// Another host that reaches the same disks, with its own copy of this one's present store.
    pub(super) fn rival(&self, host: u8) -> Self {
        let shelf = Arc::new(TestDisks {
            registry: self.shelf.registry.clone(),
            faults: Arc::clone(&self.shelf.faults),
            guards: Arc::clone(&self.shelf.guards),
            host: self.shelf.host.map(|_| host),
            cut: Arc::default(),
            away: Mutex::default(),
            claimed: Arc::default(),
            cuttable: Mutex::default(),
            remote: AtomicBool::default(),
            unawaited: Mutex::default(),
            patience: Mutex::default(),
        });
        let mut rival = Self {
            shelf,
            store: if self.store.is_shared() {
                MemoryStore::new()
            } else {
                MemoryStore::alone()
            },
            recorded: Arc::default(),
            core: TestCore::with_clock(ReactorConfig::default(), self.clock.clone()),
            clock: self.clock.clone(),
            pool: pool(),
            handle: None,
            lane: None,
            done: Done::with_capacity(64),
            next: 0,
            ended: BTreeMap::new(),
            id: self.id,
            holder: Uuid::from_u128(host.into()),
            lease: None,
        };
        let copied = rival.store.create(self.record());
        rival.core.block_on(copied).unwrap();
        rival
    }

    pub(super) fn add_disk(&self, name: &str, blocks: u64) {
        self.shelf.add(name, blocks);
    }

    pub(super) fn create(&mut self, disks: usize, settings: Settings) -> Result<(), VolumeError> {
        let new = NewVolume {
            name: "vol".into(),
            id: None,
            bytes: None,
            devices: (0..disks).map(|at| format!("d{at}")).collect(),
            settings,
            force: false,
            copied_from: None,
        };
        self.create_new(new)
    }

    pub(super) fn create_new(&mut self, new: NewVolume) -> Result<(), VolumeError> {
        let core = self.core.core().clone();
        let store: Arc<dyn VolumeStore> = Arc::new(self.store.clone());
        let devices = Arc::clone(&self.shelf) as Arc<dyn Devices>;
        let make = control::create(&core, self.pool.clone(), store, devices, new);
        self.id = self.core.block_on(make)?;
        Ok(())
    }

    pub(super) fn open(&mut self) -> Result<(), VolumeError> {
        let opening = self.begin_open();
        let handle = self.core.block_on(opening).unwrap()?;
        self.opened(handle);
        Ok(())
    }

    /// While another host goes on.
    pub(super) fn open_beside(&mut self, other: &mut Self) -> Result<(), VolumeError> {
        let opening = self.begin_open();
        while !opening.is_finished() {
            self.core.turn();
            other.step();
        }
        let handle = self.core.block_on(opening).unwrap()?;
        self.opened(handle);
        Ok(())
    }

    fn as_holder(&self) -> Holder {
        Holder {
            id: self.holder,
            lease: self.lease.clone().map(|lease| lease as _),
        }
    }

    pub(super) fn begin_open(&self) -> LocalTask<Result<VolumeHandle, VolumeError>> {
        let core = self.core.core().clone();
        let store: Arc<dyn VolumeStore> = Arc::new(self.store.clone());
        let devices = Arc::clone(&self.shelf) as Arc<dyn Devices>;
        let observer = Arc::clone(&self.recorded) as Arc<dyn Observer>;
        let (pool, id, holder) = (self.pool.clone(), self.id, self.as_holder());
        let spawner = core.clone();
        spawner.spawn_local(async move {
            control::open(&core, pool, store, devices, observer, id, holder).await
        })
    }

    /// Users of a volume that is not open.
    pub(super) fn prepare(&mut self, record: &VolumeRecord) -> Prepared {
        let prepared = Prepared::new(record);
        let volume = prepared.volume().unwrap();
        self.lane = Some(volume.open(&self.pool).unwrap());
        prepared
    }

    /// Opens the prepared volume; its users stay if they may.
    pub(super) fn open_prepared(&mut self, prepared: &Prepared) -> Result<(), VolumeError> {
        let core = self.core.core().clone();
        let store: Arc<dyn VolumeStore> = Arc::new(self.store.clone());
        let devices = Arc::clone(&self.shelf) as Arc<dyn Devices>;
        let observer = Arc::clone(&self.recorded) as Arc<dyn Observer>;
        let (pool, holder, prepared) = (self.pool.clone(), self.as_holder(), prepared.clone());
        let opening = core.clone().spawn_local(async move {
            control::open_prepared(&core, pool, store, devices, observer, holder, &prepared).await
        });
        while !opening.is_finished() {
            self.step();
        }
        self.handle = Some(self.core.block_on(opening).unwrap()?);
        Ok(())
    }

    pub(super) fn opened(&mut self, handle: VolumeHandle) {
        self.lane = Some(Arc::clone(handle.volume()).open(&self.pool).unwrap());
        self.handle = Some(handle);
    }

    pub(super) fn delete(&mut self) -> Result<(), VolumeError> {
        let core = self.core.core().clone();
        let store: Arc<dyn VolumeStore> = Arc::new(self.store.clone());
        let devices = Arc::clone(&self.shelf) as Arc<dyn Devices>;
        let delete = control::delete(&core, self.pool.clone(), store, devices, self.id);
        self.core.block_on(delete)
    }

    pub(super) fn force_in_sync(&mut self, replica: &str, force: &str) -> Result<(), VolumeError> {
        let seen = self.record().version();
        self.force_as_of(seen, replica, force)
    }

    pub(super) fn force_as_of(
        &mut self,
        seen: Stamp,
        replica: &str,
        force: &str,
    ) -> Result<(), VolumeError> {
        let core = self.core.core().clone();
        let store: Arc<dyn VolumeStore> = Arc::new(self.store.clone());
        let devices = Arc::clone(&self.shelf) as Arc<dyn Devices>;
        let (pool, id) = (self.pool.clone(), self.id);
        let forced = control::force_in_sync(&core, pool, store, devices, id, seen, replica, force);
        self.core.block_on(forced)
    }

    /// The process dies: nothing of it is left but the disks and the store.
    pub(super) fn crash(&mut self) {
        self.lane = None;
        self.handle = None;
        self.ended.clear();
        self.core = TestCore::with_clock(ReactorConfig::default(), self.clock.clone());
        self.pool = pool();
    }

    pub(super) fn close(&mut self) {
        self.lane = None;
        self.run(Command::Close).unwrap();
        self.handle = None;
    }

    pub(super) fn run(&mut self, command: Command) -> Result<(), VolumeError> {
        let handle = self.handle.clone().unwrap();
        let task = self
            .core
            .core()
            .spawn_local(async move { handle.run(command).await });
        for _ in 0..100_000 {
            if task.is_finished() {
                return self.core.block_on(task).unwrap();
            }
            self.step();
        }
        panic!("the command does not end: {:?}", self.status());
    }

    pub(super) fn status(&self) -> VolumeStatus {
        self.handle.as_ref().unwrap().status()
    }

    pub(super) fn state(&self) -> VolumeState {
        self.status().state
    }

    pub(super) fn record(&self) -> VolumeRecord {
        self.store.records()[0].clone()
    }

    pub(super) fn replica_state(&self, name: &str) -> ReplicaState {
        let record = self.record();
        record
            .replicas
            .iter()
            .find(|m| m.device == name)
            .unwrap()
            .state
    }

    pub(super) fn has_event(&self, what: impl Fn(&VolumeEventKind) -> bool) -> bool {
        self.recorded.0.lock().iter().any(what)
    }

    /// A little time passes.
    pub(super) fn step(&mut self) {
        self.core.turn();
        self.store.advance(self.clock.now());
        if let Some(lane) = &mut self.lane {
            lane.poll(self.clock.now(), &mut self.done);
            for completion in self.done.drain() {
                self.ended.insert(completion.token, completion);
            }
        }
        self.clock.advance(Duration::from_micros(100));
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.clock.now() + time;
        while self.clock.now() < until {
            self.step();
            // In larger steps if no I/O is in flight.
            if self.lane.as_ref().is_none_or(|lane| lane.inflight() == 0) {
                self.clock.advance(Duration::from_millis(1));
            }
        }
    }

    /// Until `what`, at most two minutes.
    pub(super) fn until(&mut self, what: impl Fn(&Self) -> bool) {
        let limit = self.clock.now() + Duration::from_secs(120);
        while !what(self) {
            assert!(self.clock.now() < limit, "never: {:#?}", self.status());
            self.step();
            self.clock.advance(Duration::from_micros(400));
        }
    }

    pub(super) fn until_healthy(&mut self) {
        self.until(|world| world.state() == VolumeState::Healthy);
    }

    pub(super) fn buf(&self, blocks: u64, fill: u8) -> Buf {
        let mut buf = self
            .pool
            .acquire((blocks * u64::from(BLOCK)) as usize)
            .unwrap();
        buf.bytes_mut().unwrap().fill(fill);
        buf
    }

    pub(super) fn submit(&mut self, mut io: Io) -> u64 {
        self.next += 1;
        io.token = self.next;
        self.lane.as_mut().unwrap().submit(io).unwrap();
        self.next
    }

    pub(super) fn begin_write(&mut self, lba: u64, blocks: u64, fill: u8) -> u64 {
        let data = self.buf(blocks, fill);
        self.submit(Io::new(0, Op::Write, lba, blocks as u32).with(data))
    }

    pub(super) fn ended(&mut self, token: u64) -> Option<Completion> {
        self.ended.remove(&token)
    }

    pub(super) fn wait(&mut self, token: u64) -> Completion {
        let limit = self.clock.now() + Duration::from_secs(120);
        loop {
            if let Some(completion) = self.ended(token) {
                return completion;
            }
            assert!(
                self.clock.now() < limit,
                "an I/O never ends: {:#?}",
                self.status()
            );
            self.step();
        }
    }

    pub(super) fn write(&mut self, lba: u64, blocks: u64, fill: u8) {
        let token = self.begin_write(lba, blocks, fill);
        assert_eq!(self.wait(token).status, Status::Ok);
    }

    /// Reads one block; all its bytes are the same.
    pub(super) fn read(&mut self, lba: u64) -> u8 {
        let data = self.buf(1, 0xee);
        let token = self.submit(Io::new(0, Op::Read, lba, 1).with(data));
        let done = self.wait(token);
        assert_eq!(done.status, Status::Ok);
        let bytes = &done.data[0];
        assert!(bytes.iter().all(|b| *b == bytes[0]));
        bytes[0]
    }

    /// A disk's contents of the volume, one byte per block, bypassing the volume.
    pub(super) fn medium(&mut self, name: &str) -> Vec<u8> {
        self.raw(name, Op::Read, 2048, DISK_BLOCKS - 2048)
    }

    pub(super) fn scribble(&mut self, name: &str, lba: u64, fill: u8) {
        let pool = pool();
        let mut data = pool.acquire(BLOCK as usize).unwrap();
        data.bytes_mut().unwrap().fill(fill);
        let write = Io::new(1, Op::Write, 2048 + lba, 1).with(data);
        self.behind(&pool, name, write.flags(Flags::FUA));
    }

    /// All that a disk has before the volume's first block: labels and log.
    pub(super) fn reserved(&self, name: &str) -> Vec<Buf> {
        let pool = pool();
        let read = |lba: u64| {
            let data = pool.acquire(64 * BLOCK as usize).unwrap();
            let mut read = self.behind(&pool, name, Io::new(1, Op::Read, lba, 64).with(data));
            read.data.pop().unwrap()
        };
        (0..2048).step_by(64).map(read).collect()
    }

    /// Restores the reserved area that [`World::reserved`] returned, as a backup of the disk would.
    pub(super) fn put_back(&self, name: &str, reserved: &[Buf]) {
        let pool = pool();
        for (at, data) in reserved.iter().enumerate() {
            let write = Io::new(1, Op::Write, at as u64 * 64, 64).with(data.clone());
            self.behind(&pool, name, write);
        }
    }

    fn raw(&self, name: &str, op: Op, from: u64, blocks: u64) -> Vec<u8> {
        let (pool, mut out) = (pool(), Vec::new());
        for lba in (from..from + blocks).step_by(64) {
            let data = pool.acquire(64 * BLOCK as usize).unwrap();
            let read = self.behind(&pool, name, Io::new(1, op, lba, 64).with(data));
            out.extend(read.data[0].chunks(BLOCK as usize).map(|block| block[0]));
        }
        out
    }

    /// Executes an I/O on a disk, bypassing the volume.
    pub(super) fn behind(&self, pool: &Pool, name: &str, io: Io) -> Completion {
        let layer = self.shelf.registry.lookup(&format!("{name}-medium"));
        let module = Arc::clone(layer.unwrap().module());
        let mut queue = module.open(pool).unwrap();
        let mut done = Done::with_capacity(1);
        queue.submit(io).unwrap();
        while queue.poll(self.clock.now(), &mut done) == 0 {}
        done.drain().next().unwrap()
    }

    pub(super) fn all_equal(&mut self, disks: &[&str]) {
        let first = self.medium(disks[0]);
        for other in &disks[1..] {
            let differs = |(a, b): (&u8, &u8)| a != b;
            let other_medium = self.medium(other);
            let at = first.iter().zip(&other_medium).position(differs);
            assert_eq!(at, None, "{} and {other} differ", disks[0]);
        }
    }
}

pub(super) fn pool() -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 256,
        },
        ClassSpec {
            size: 1 << 19,
            count: 32,
        },
    ])
}
