//! The harness of the tests: a lane on devices that complete I/O on command. The test takes the
//! place of the control.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nacre_bdev::listing::{AllocatedRanges, ListAnswer, ListQuery};
use nacre_bdev::{
    Bdev, Busy, Completion, Done, Flags, Geometry, Io, Layer, Limits, Op, OpenError, Queue, Status,
    Support, Token,
};
use nacre_hugepages::{Buf, ClassSpec, MemoryView, Pool};
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::answers::AnswerLease;
use crate::lane::Lane;
use crate::model::{RESERVED, ReplicaRecord, ReplicaState, Settings, VolumeRecord};
use crate::shared::{LaneMessages, Shared};
use crate::view::{Mode, ReplicaView, Role, View};
use crate::volume::{Volume, weakest};

pub(crate) const BLOCK: u32 = 512;
/// Number of blocks of a region.
pub(crate) const REGION: u64 = 2048;
pub(crate) const REGIONS: u64 = 16;
pub(crate) const BLOCKS: u64 = REGION * REGIONS;
pub(crate) const FIRST: u64 = RESERVED / BLOCK as u64;

/// The I/Os of a device's queues and their scripted statuses. Accessed by the device's name,
/// because buffers do not leave a thread.
#[derive(Default)]
pub(crate) struct ScriptedIos {
    pub has: Vec<(u64, Io)>,
    pub answers: Vec<(u64, Completion)>,
    pub busy: bool,
    /// The device executes aborts.
    pub aborts: bool,
    pub aborted: usize,
    pub open: usize,
    /// The device's queues report work of their own.
    pub restless: bool,
    pub polled: usize,
    /// The status of synchronous I/O; `None`: the device executes no I/O synchronously.
    pub prompt: Option<Status>,
    /// Synchronous I/Os of the device: operation, and block of the volume.
    pub did: Vec<(Op, u64)>,
}

thread_local! {
    static TRAYS: RefCell<HashMap<String, ScriptedIos>> = RefCell::default();
}

pub(crate) fn tray<T>(name: &str, with: impl FnOnce(&mut ScriptedIos) -> T) -> T {
    TRAYS.with_borrow_mut(|trays| with(trays.entry(name.to_owned()).or_default()))
}

pub(crate) struct Script {
    name: String,
    pub limits: Limits,
    pub unmaps: bool,
    pub allocated: Option<u64>,
    pub losses: AtomicU64,
    pub shut: AtomicBool,
    /// Opening a queue fails for lack of memory.
    pub short: AtomicBool,
    /// The errno of opening a queue; 0: it succeeds.
    pub errno: AtomicI32,
    queues: AtomicU64,
}

impl Script {
    pub(crate) fn new(name: &str) -> Self {
        TRAYS.with_borrow_mut(|trays| trays.remove(name));
        Self {
            name: name.to_owned(),
            limits: Limits {
                unmap_zeroes: true,
                ..Limits::unlimited(64)
            },
            unmaps: true,
            allocated: None,
            losses: AtomicU64::new(0),
            shut: AtomicBool::new(false),
            short: AtomicBool::new(false),
            errno: AtomicI32::new(0),
            queues: AtomicU64::new(0),
        }
    }
}

impl Bdev for Script {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "script"
    }

    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: BLOCK,
            blocks: FIRST + BLOCKS,
            physical_block_size: BLOCK,
        }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::Unmap if !self.unmaps => Support::No,
            _ => Support::Native,
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn allocated_blocks(&self) -> Option<u64> {
        self.allocated
    }

    /// Only block 3 of the volume has data.
    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        assert!(query.range.start >= FIRST);
        answer.give(Ok(AllocatedRanges {
            ranges: std::iter::once(FIRST + 3..FIRST + 4).collect(),
            is_complete: true,
        }));
    }

    fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let is = |refuses: &AtomicBool| refuses.load(Ordering::SeqCst);
        let source = match self.errno.load(Ordering::SeqCst) {
            0 if is(&self.shut) => Some(std::io::ErrorKind::NotConnected.into()),
            0 if is(&self.short) => Some(std::io::ErrorKind::OutOfMemory.into()),
            0 => None,
            errno => Some(std::io::Error::from_raw_os_error(errno)),
        };
        if let Some(source) = source {
            return Err(OpenError {
                bdev: self.name.clone(),
                what: "open".into(),
                source,
            });
        }
        tray(&self.name, |tray| tray.open += 1);
        Ok(Box::new(ScriptQueue {
            id: self.queues.fetch_add(1, Ordering::SeqCst),
            inflight: 0,
            device: self,
        }))
    }
}

struct ScriptQueue {
    device: Arc<Script>,
    id: u64,
    inflight: usize,
}

impl Queue for ScriptQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        tray(&self.device.name, |tray| {
            if tray.busy {
                return Err((Busy, io));
            }
            self.inflight += 1;
            tray.has.push((self.id, io));
            Ok(())
        })
    }

    fn run_sync(&mut self, io: &mut Io, _zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        tray(&self.device.name, |tray| {
            let status = tray.prompt?;
            tray.did.push((io.op, io.lba - FIRST));
            Some(status)
        })
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        tray(&self.device.name, |tray| {
            tray.polled += 1;
            let before = done.len();
            while done.has_room()
                && let Some(at) = tray.answers.iter().position(|(id, _)| *id == self.id)
            {
                done.push(tray.answers.remove(at).1);
                self.inflight -= 1;
            }
            done.len() - before
        })
    }

    fn abort(&mut self, token: Token) -> bool {
        tray(&self.device.name, |tray| {
            tray.aborted += 1;
            let at = tray
                .has
                .iter()
                .position(|(id, io)| *id == self.id && io.token == token);
            let Some(at) = at.filter(|_| tray.aborts) else {
                return false;
            };
            let (id, io) = tray.has.remove(at);
            tray.answers.push((id, io.complete(Status::Aborted)));
            true
        })
    }

    fn inflight(&self) -> usize {
        self.inflight
    }

    fn is_settled(&self) -> bool {
        self.inflight == 0 && !tray(&self.device.name, |tray| tray.restless)
    }
}

impl Drop for ScriptQueue {
    fn drop(&mut self) {
        tray(&self.device.name, |tray| {
            tray.open -= 1;
            tray.has.retain(|(id, _)| *id != self.id);
            tray.answers.retain(|(id, _)| *id != self.id);
        });
    }
}

pub(crate) fn record(blocks: u64, replicas: usize) -> VolumeRecord {
    VolumeRecord {
        id: Uuid::from_u128(7),
        name: "V".into(),
        block_size: BLOCK,
        blocks,
        region_shift: 20,
        epoch: 1,
        serving: 1,
        revision: 1,
        holder: None,
        replicas: (0..replicas)
            .map(|slot| ReplicaRecord {
                id: Uuid::from_u128(100 + slot as u128),
                slot: slot as u8,
                device: format!("{slot}"),
                node: None,
                node_device: None,
                state: ReplicaState::InSync,
                cut: false,
                replaces: None,
                offline: false,
                why: None,
            })
            .collect(),
        settings: Settings::default(),
        limits: None,
        restored: None,
        origin: None,
    }
}

pub(crate) fn pool() -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 1600,
        },
        ClassSpec {
            size: 64 << 10,
            count: 32,
        },
    ])
}

pub(crate) fn replica(device: &Arc<Layer>, role: Role) -> ReplicaView {
    ReplicaView {
        device: Arc::clone(device),
        incarnation: 1,
        role,
        flushed: role == Role::InSync,
        local: true,
        losses: device.losses(),
        decided: 0,
    }
}

/// A lease whose answer the test decides.
pub(crate) struct TestLease {
    pub good: Mutex<Box<dyn Fn() -> bool + Send>>,
    asked: AtomicUsize,
}

impl TestLease {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            good: Mutex::new(Box::new(|| true)),
            asked: AtomicUsize::new(0),
        })
    }

    pub(crate) fn set(&self, good: bool) {
        *self.good.lock() = Box::new(move || good);
    }

    /// Number of checks since the last call.
    pub(crate) fn asked(&self) -> usize {
        self.asked.swap(0, Ordering::Relaxed)
    }
}

impl AnswerLease for TestLease {
    fn is_good(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        (self.good.lock())()
    }
}

pub(crate) const DEADLINE: Duration = Duration::from_millis(800);
pub(crate) const HOLD: Duration = Duration::from_millis(2000);

pub(crate) struct Rig {
    pub shared: Arc<Shared>,
    pub volume: Arc<Volume>,
    pub scripts: Vec<Arc<Script>>,
    pub layers: Vec<Arc<Layer>>,
    pub lanes: Vec<Lane>,
    pub pool: Pool,
    pub view: View,
    pub now: Nanos,
    done: Done,
    pub ended: Vec<(Token, Status)>,
    next: Token,
    news: LaneMessages,
}

/// Devices named A, B, …, all in sync, with every region clean and one lane.
pub(crate) fn rig(replicas: usize) -> Rig {
    Rig::of((0..replicas).map(|slot| Script::new(["A", "B", "C", "D", "E"][slot])))
}

impl Rig {
    pub(crate) fn of(scripts: impl Iterator<Item = Script>) -> Self {
        let scripts: Vec<_> = scripts.map(Arc::new).collect();
        let layers: Vec<_> = scripts
            .iter()
            .map(|s| Layer::new(Arc::clone(s) as Arc<dyn Bdev>))
            .collect();
        let record = record(BLOCKS, layers.len());
        let shared = Shared::new(&record);
        let limits = weakest(layers.iter().map(|layer| &**layer));
        let volume = Volume::new(&record, Arc::clone(&shared), limits);
        let mut view = View::closed(&record.settings);
        view.mode = Mode::Serving;
        (view.deadline, view.frozen_hold) = (DEADLINE, HOLD);
        for (slot, layer) in layers.iter().enumerate() {
            view.replicas[slot] = Some(replica(layer, Role::InSync));
        }
        let pool = pool();
        let mut rig = Self {
            lanes: Vec::new(),
            shared,
            volume,
            scripts,
            layers,
            pool,
            view,
            now: Nanos(1_000_000),
            done: Done::with_capacity(16),
            ended: Vec::new(),
            next: 0,
            news: LaneMessages::default(),
        };
        rig.publish(|_| {});
        rig.add_lane();
        rig
    }

    pub(crate) fn add_lane(&mut self) {
        let lane = Lane::new(Arc::clone(&self.shared), BLOCK, &self.pool).expect("opens");
        self.lanes.push(lane);
    }

    pub(crate) fn all_dirty(mut self) -> Self {
        (0..REGIONS).for_each(|region| self.shared.regions.set_dirty(region));
        self.turn();
        self
    }

    pub(crate) fn publish(&mut self, change: impl FnOnce(&mut View)) {
        change(&mut self.view);
        self.shared.publish(self.view.clone());
    }

    /// Decides about all reported failures, without another change of the view.
    pub(crate) fn decide_failures(&mut self) {
        let reported: Vec<u64> = (0..5).map(|slot| self.shared.reported(slot)).collect();
        self.publish(|view| {
            for (slot, replica) in view.replicas.iter_mut().enumerate() {
                if let Some(replica) = replica {
                    replica.decided = reported[slot];
                }
            }
        });
    }

    /// Takes a replica out, and decides about all reported failures.
    pub(crate) fn retire(&mut self, slot: usize) {
        self.view.replicas[slot] = None;
        self.decide_failures();
    }

    pub(crate) fn news(&mut self) -> &mut LaneMessages {
        let (news, _) = self.shared.take_news();
        self.news.wanted.extend(news.wanted);
        self.news.reports.extend(news.reports);
        self.news.repairs.extend(news.repairs);
        self.news.urgent.extend(news.urgent);
        &mut self.news
    }

    pub(crate) fn buf(&self, blocks: u32) -> Buf {
        self.pool
            .acquire((blocks * BLOCK) as usize)
            .expect("enough")
    }

    pub(crate) fn io(&mut self, op: Op, lba: u64, blocks: u32) -> Io {
        self.next += 1;
        let io = Io::new(self.next, op, lba, blocks);
        match op.data_len(1) {
            0 => io,
            _ => io.with(self.buf(blocks)),
        }
    }

    pub(crate) fn submit_on(&mut self, lane: usize, op: Op, lba: u64, blocks: u32) -> Token {
        let io = self.io(op, lba, blocks);
        let token = io.token;
        self.lanes[lane].submit(io).expect("room");
        token
    }

    pub(crate) fn write(&mut self, lba: u64) -> Token {
        self.submit_on(0, Op::Write, lba, 8)
    }

    pub(crate) fn write_on(&mut self, lane: usize, lba: u64) -> Token {
        self.submit_on(lane, Op::Write, lba, 8)
    }

    pub(crate) fn read(&mut self, lba: u64) -> Token {
        self.submit_on(0, Op::Read, lba, 8)
    }

    pub(crate) fn flush(&mut self) -> Token {
        self.submit_on(0, Op::Flush, 0, 0)
    }

    pub(crate) fn turn(&mut self) {
        for lane in &mut self.lanes {
            let inflight = lane.inflight();
            let collected = lane.poll(self.now, &mut self.done);
            assert_eq!(
                collected,
                self.done.len(),
                "poll returns how many it collected"
            );
            assert_eq!(inflight - collected, lane.inflight());
            let ended = self.done.drain().map(|c| (c.token, c.status));
            self.ended.extend(ended);
        }
    }

    /// Advances time in small steps.
    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = self.now + Duration::from_millis(10);
            self.turn();
        }
    }

    /// The I/Os in flight at a device: operation, flags, and block of the volume.
    pub(crate) fn has(&self, name: &str) -> Vec<(Op, Flags, u64)> {
        let lba = |io: &Io| io.lba.saturating_sub(FIRST);
        tray(name, |tray| {
            tray.has
                .iter()
                .map(|(_, io)| (io.op, io.flags, lba(io)))
                .collect()
        })
    }

    pub(crate) fn count(&self, name: &str) -> usize {
        tray(name, |tray| tray.has.len())
    }

    /// Completes the oldest I/O of a device, then runs a turn of the lanes.
    pub(crate) fn answer(&mut self, name: &str, status: Status) {
        tray(name, |tray| {
            assert!(!tray.has.is_empty(), "{name} has no I/O to complete");
            let (id, io) = tray.has.remove(0);
            tray.answers.push((id, io.complete(status)));
        });
        self.turn();
    }

    pub(crate) fn answer_all(&mut self, name: &str, status: Status) {
        while self.count(name) > 0 {
            self.answer(name, status);
        }
    }

    /// The requests completed since the last call.
    pub(crate) fn take(&mut self) -> Vec<(Token, Status)> {
        std::mem::take(&mut self.ended)
    }

    /// Like [`Rig::take`], in order of submission.
    pub(crate) fn take_sorted(&mut self) -> Vec<(Token, Status)> {
        let mut ended = self.take();
        ended.sort_by_key(|(token, _)| *token);
        ended
    }

    pub(crate) fn none(&mut self) {
        assert_eq!(self.take(), []);
    }

    /// Checks that no lock, slot or request is left.
    pub(crate) fn clean(&mut self) {
        self.turn();
        for lane in &self.lanes {
            assert_eq!(lane.inflight(), 0);
            assert!(lane.is_settled(), "a lane has pending work");
            assert_eq!(lane.admission.counts(), (0, 0));
            assert_eq!(
                (lane.requests.failures(), lane.replicas.loads()),
                (0, [0; 5])
            );
        }
        self.free();
    }

    pub(crate) fn free(&self) {
        assert!(self.shared.stripes.all_free(), "a stripe is held");
        (0..REGIONS).for_each(|r| assert_eq!(self.shared.regions.inside(r), 0, "region {r}"));
        (0..5).for_each(|slot| assert_eq!(self.shared.outstanding(slot), 0, "slot {slot}"));
    }
}
