//! Tests of lanes on real devices: the conformance suite, and two lanes on replicas with faults and
//! delays, against a model and with a minimal control.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::fault::{Action, Fault, FaultDevice};
use nacre_bdev::{Bdev, Done, Flags, Io, Layer, Op, Queue, Registry, Status, delay, fault, malloc};
use nacre_hugepages::Pool;
use nacre_random::Random;
use nacre_reactor::Nanos;

use super::rig::{BLOCK, FIRST, pool, record, replica};
use crate::lane::Lane;
use crate::shared::Shared;
use crate::view::{Mode, Role, View};
use crate::volume::{Volume, weakest};

fn disk(name: &str, blocks: u64) -> Arc<Layer> {
    // The random delays derive from it.
    let uuid = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, name.as_bytes());
    let config = serde_json::json!({"name": name, "block_size": BLOCK, "num_blocks": FIRST + blocks,
        "uuid": uuid});
    let config = serde_json::from_value(config).expect("a complete configuration");
    Layer::new(malloc::create(config).expect("a good configuration"))
}

fn volume(layers: &[Arc<Layer>], blocks: u64) -> (Arc<Volume>, View) {
    let record = record(blocks, layers.len());
    let shared = Shared::new(&record);
    let mut view = View::closed(&record.settings);
    view.mode = Mode::Serving;
    for (slot, layer) in layers.iter().enumerate() {
        view.replicas[slot] = Some(replica(layer, Role::InSync));
    }
    shared.publish(view.clone());
    let limits = weakest(layers.iter().map(|layer| &**layer));
    (Volume::new(&record, shared, limits), view)
}

#[test]
fn conforms() {
    for replicas in [1, 3] {
        nacre_bdev::conformance::run(move || {
            let layers: Vec<_> = (0..replicas)
                .map(|at| disk(&format!("{at}"), 4096))
                .collect();
            let (volume, _) = volume(&layers, 4096);
            log_for(Arc::clone(volume.shared()));
            volume
        });
    }
}

/// A control that makes wanted regions dirty after a delay.
fn log_for(shared: Arc<Shared>) {
    let (notify, notified) = std::sync::mpsc::channel();
    shared.on_news(Some(Box::new(move || _ = notify.send(()))));
    let shared = Arc::downgrade(&shared);
    std::thread::spawn(move || {
        while notified.recv_timeout(Duration::from_secs(20)).is_ok() {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            std::thread::sleep(Duration::from_micros(200));
            let (news, _) = shared.take_news();
            news.wanted
                .iter()
                .for_each(|r| shared.regions.set_dirty(*r));
            shared.ring_all();
        }
    });
}

const SEED: &str = "NACRE_LANE_SEED";
const BLOCKS: u64 = 8192;
const LANES: usize = 2;

/// The possible values of a block: those that no later acknowledged write has replaced.
#[derive(Clone)]
struct Block {
    may_be: Vec<Value>,
}

impl Default for Block {
    fn default() -> Self {
        let nothing = Value {
            token: 0,
            tag: 0,
            ended: Some(0),
        };
        Self {
            may_be: vec![nothing],
        }
    }
}

impl Block {
    fn tags(&self) -> Vec<u64> {
        self.may_be.iter().map(|held| held.tag).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Value {
    token: u64,
    tag: u64,
    ended: Option<u64>,
}

struct Flight {
    op: Op,
    lba: u64,
    blocks: u32,
    began: u64,
    /// For a read: the possible values of each block since its submission.
    might: Vec<Vec<u64>>,
}

impl Flight {
    fn range(&self) -> std::ops::Range<usize> {
        match self.op {
            Op::Flush => 0..0,
            _ => self.lba as usize..self.lba as usize + self.blocks as usize,
        }
    }
}

struct World {
    random: Random,
    pool: Pool,
    shared: Arc<Shared>,
    view: View,
    faults: Vec<Arc<FaultDevice>>,
    disks: Vec<Arc<Layer>>,
    lanes: Vec<Lane>,
    flights: HashMap<u64, Flight>,
    model: Vec<Block>,
    clock: u64,
    now: Nanos,
    next: u64,
    acknowledged: u64,
    failed: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let registry = Registry::new();
        let (mut faults, mut disks, mut layers) = (Vec::new(), Vec::new(), Vec::new());
        for at in 0..3 {
            let name = format!("M{at}");
            let base = disk(&name, BLOCKS);
            registry
                .register(Arc::clone(base.module()))
                .expect("a free name");
            let config = fault::Config {
                base_name: name.clone(),
                uuid: None,
            };
            let faulty = fault::create(config, &registry).expect("the base is there");
            registry
                .register(Arc::clone(&faulty) as Arc<dyn Bdev>)
                .expect("a free name");
            let config = delay::Config {
                name: format!("D{at}"),
                base_bdev_name: format!("EE_{name}"),
                avg_read_latency: 20 + 10 * at,
                p99_read_latency: 900,
                avg_write_latency: 30 + 20 * at,
                p99_write_latency: 1500,
                uuid: None,
            };
            layers.push(Layer::new(
                delay::create(config, &registry).expect("the base is there"),
            ));
            disks.push(base);
            faults.push(faulty);
        }
        let (volume, mut view) = volume(&layers, BLOCKS);
        (view.deadline, view.frozen_hold) = (Duration::from_millis(80), Duration::from_millis(400));
        volume.shared().publish(view.clone());
        let pool = pool();
        let lane = || Lane::new(Arc::clone(volume.shared()), BLOCK, &pool).expect("opens");
        Self {
            lanes: (0..LANES).map(|_| lane()).collect(),
            random: Random::new(seed),
            shared: Arc::clone(volume.shared()),
            pool,
            view,
            faults,
            disks,
            flights: HashMap::new(),
            clock: 0,
            model: vec![Block::default(); BLOCKS as usize],
            now: Nanos(1),
            next: 0,
            acknowledged: 0,
            failed: 0,
        }
    }

    fn submit(&mut self) {
        if self.flights.len() > 120 {
            return;
        }
        let lane = self.random.below(LANES as u64) as usize;
        let most = if self.random.below(10) == 0 { 120 } else { 12 };
        let blocks = 1 + self.random.below(most) as u32;
        // Most in one area, so that they overlap.
        let span = if self.random.below(4) == 0 {
            BLOCKS
        } else {
            300
        };
        let lba = self
            .random
            .below(span - u64::from(blocks).min(span - 1))
            .min(BLOCKS - 120);
        let op = [
            Op::Read,
            Op::Read,
            Op::Write,
            Op::Write,
            Op::Write,
            Op::WriteZeroes,
            Op::Unmap,
            Op::Flush,
        ][self.random.below(8) as usize];
        self.next += 1;
        self.clock += 1;
        let tag = if op == Op::Write { self.next } else { 0 };
        let mut io = Io::new(self.next, op, lba, blocks);
        if matches!(op, Op::Read | Op::Write) {
            let Some(mut buf) = self.pool.acquire((blocks * BLOCK) as usize) else {
                return;
            };
            let bytes = buf.bytes_mut().expect("no other handle");
            for word in bytes.chunks_mut(8) {
                word.copy_from_slice(&tag.to_le_bytes());
            }
            io = io.with(buf);
        }
        if self.random.below(8) == 0 && op == Op::Write {
            io = io.flags(Flags::FUA);
        }
        let range = lba as usize..lba as usize + blocks as usize;

        let mut flight = Flight {
            op,
            lba,
            blocks,
            began: self.clock,
            might: Vec::new(),
        };
        let token = io.token;
        if self.lanes[lane].submit(io).is_err() {
            return;
        }
        if op == Op::Read {
            flight.might = self.model[range].iter().map(Block::tags).collect();
        } else if op.is_write() {
            for lba in range {
                self.model[lba].may_be.push(Value {
                    token,
                    tag,
                    ended: None,
                });
                self.supersede_earlier(lba as u64, tag);
            }
        }
        self.flights.insert(token, flight);
    }

    fn supersede_earlier(&mut self, lba: u64, tag: u64) {
        for read in self.flights.values_mut().filter(|f| f.op == Op::Read) {
            if read.range().contains(&(lba as usize)) {
                read.might[(lba - read.lba) as usize].push(tag);
            }
        }
    }

    fn turn(&mut self) {
        self.now = self.now + Duration::from_micros(20 + self.random.below(60));
        let mut done = Done::with_capacity(8);
        for lane in 0..LANES {
            self.lanes[lane].poll(self.now, &mut done);
            for ended in done.drain() {
                let flight = self.flights.remove(&ended.token).expect("in flight, once");

                self.ended(ended.token, &flight);
                match (flight.op, ended.status) {
                    (Op::Read, Status::Ok) => check(&flight, &ended.data[0]),
                    (_, Status::Ok) => self.acknowledge(&flight),
                    (
                        _,
                        Status::Gone | Status::WriteError | Status::ReadError | Status::Aborted,
                    ) => {
                        self.failed += 1;
                    }
                    (op, status) => panic!("{op:?} ended {status:?}"),
                }
            }
        }
    }

    /// An acknowledged write replaces all values whose writes ended before it began.
    fn acknowledge(&mut self, flight: &Flight) {
        self.acknowledged += 1;
        if flight.op.is_write() {
            for lba in flight.range() {
                let after = |held: &Value| held.ended.is_none_or(|ended| ended > flight.began);
                self.model[lba].may_be.retain(after);
            }
        }
    }

    fn ended(&mut self, token: u64, flight: &Flight) {
        self.clock += 1;
        for lba in flight.range() {
            let held = self.model[lba].may_be.iter_mut();
            held.filter(|held| held.token == token)
                .for_each(|held| held.ended = Some(self.clock));
        }
    }

    /// The control's work: the log and judgements, without repairs.
    fn control(&mut self) {
        if self.random.below(3) > 0 {
            return;
        }
        let (news, reported) = self.shared.take_news();
        news.wanted
            .iter()
            .for_each(|region| self.shared.regions.set_dirty(*region));
        self.shared.ring_all();
        let mut changed = false;
        for report in &news.reports {
            changed = true;
            let others = self
                .view
                .in_sync()
                .filter(|(slot, _)| *slot != report.slot)
                .count();
            if others > 0 && report.op != Op::Read {
                self.view.replicas[report.slot] = None;
            }
        }
        if !changed {
            return;
        }
        for (slot, reported) in reported.iter().enumerate() {
            if let Some(replica) = &mut self.view.replicas[slot] {
                replica.decided = *reported;
            }
        }
        self.shared.publish(self.view.clone());
    }

    fn injure(&mut self) {
        let victim = self.random.below(3) as usize;
        let action = match self.random.below(7) {
            0 => Action::FailMedium,
            1 => Action::Fail(Status::Gone),
            2 => Action::Hang,
            3 => Action::Delay { latency_us: 3_000 },
            4 => Action::Busy,
            _ => Action::Fail(Status::Retry),
        };
        let reads_only = matches!(
            action,
            Action::FailMedium | Action::Fail(Status::Gone) | Action::Hang
        ) && self.random.below(3) > 0;
        let ops: &[Op] = if reads_only { &[Op::Read] } else { &[] };
        let times = 1 + self.random.below(4);
        self.faults[victim].clear();
        self.faults[victim]
            .inject(Fault::new(action).on(ops).times(times))
            .expect("a good fault");
    }
}

fn check(read: &Flight, data: &[u8]) {
    for (at, block) in data.chunks(BLOCK as usize).enumerate() {
        let tag = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
        let (lba, might) = (read.lba + at as u64, &read.might[at]);
        assert!(
            might.contains(&tag),
            "block {lba} held {tag}, not one of {might:?}"
        );
    }
}

fn contents(disk: &Arc<Layer>, pool: &Pool) -> Vec<u64> {
    let mut queue = disk.open_queue(pool).expect("opens");
    let mut done = Done::with_capacity(1);
    let mut tags = Vec::new();
    for lba in (0..BLOCKS).step_by(64) {
        let buf = pool.acquire(64 * BLOCK as usize).expect("enough");
        queue
            .submit(Io::new(0, Op::Read, FIRST + lba, 64).with(buf))
            .expect("room");
        while done.is_empty() {
            queue.poll(Nanos(1), &mut done);
        }
        let read = done.drain().next().expect("one");
        assert_eq!(read.status, Status::Ok);
        for block in read.data[0].chunks(BLOCK as usize) {
            tags.push(u64::from_le_bytes(
                block[..8].try_into().expect("eight bytes"),
            ));
        }
    }
    tags
}

/// Seeded: two lanes on three replicas that are slow at random, fail, hang and are busy; the test
/// is the control. Every read must return a value that the model allows, and in the end the in-sync
/// replicas must be equal.
#[test]
fn random_failures() {
    let given = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
    let seeds = given.map_or(0..60u64, |seed| seed..seed + 1);
    let (mut acknowledged, mut failed, mut retired) = (0, 0, 0);
    for seed in seeds {
        let caught = std::panic::catch_unwind(|| one_run(seed));
        let (a, f, r) = caught.unwrap_or_else(|_| panic!("replay with {SEED}={seed}"));
        (acknowledged, failed, retired) = (acknowledged + a, failed + f, retired + r);
    }
    assert!(
        given.is_some() || (retired > 20 && failed > 0 && acknowledged > 20_000),
        "{acknowledged} {failed} {retired}"
    );
}

fn one_run(seed: u64) -> (u64, u64, usize) {
    let mut world = World::new(seed);
    for step in 0..1500 {
        let most = 1 + world.random.below(4);
        (0..most).for_each(|_| world.submit());
        if step % 100 == 50 {
            world.injure();
        }
        if world.random.below(40) == 0
            && let Some(token) = world.flights.keys().min().copied()
        {
            world
                .lanes
                .iter_mut()
                .for_each(|lane| _ = lane.abort(token));
        }
        world.turn();
        world.control();
    }
    world.faults.iter().for_each(|fault| fault.clear());
    let mut turns = 0;
    while !world.flights.is_empty() || world.lanes.iter().any(|lane| !lane.is_settled()) {
        // Hanging I/O ends; the requests that waited for it have given up by then, or not.
        if turns == 4000 {
            world.faults.iter().for_each(|fault| fault.resume_pending());
        }
        turns += 1;
        assert!(turns < 100_000, "{} do not end", world.flights.len());
        world.turn();
        world.control();
    }
    assert!(world.shared.stripes.all_free());
    (0..world.shared.regions.len()).for_each(|r| assert_eq!(world.shared.regions.inside(r), 0));
    (0..5).for_each(|slot| assert_eq!(world.shared.outstanding(slot), 0));
    let alive: Vec<usize> = world.view.in_sync().map(|(slot, _)| slot).collect();
    let first = contents(&world.disks[alive[0]], &world.pool);
    for (lba, tag) in first.iter().enumerate() {
        let may_be = world.model[lba].tags();
        assert!(
            may_be.contains(tag),
            "block {lba} holds {tag}, not one of {may_be:?}"
        );
    }
    for slot in &alive[1..] {
        assert!(
            contents(&world.disks[*slot], &world.pool) == first,
            "{slot} differs"
        );
    }
    (world.acknowledged, world.failed, 3 - alive.len())
}
