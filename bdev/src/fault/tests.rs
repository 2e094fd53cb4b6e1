//! Tests of the fault module: conformance, and the effect of each kind of fault.

use nacre_hugepages::{Buf, ClassSpec};
use nacre_reactor::{Idle, Nanos};

use super::*;
use crate::io::{Completion, Io, Op, Status, Token};
use crate::malloc;
use crate::queue::{Busy, Done};
use crate::registry::Removal;

struct Rig {
    registry: Registry,
    device: Arc<FaultDevice>,
    queue: Box<dyn Queue>,
    pool: Pool,
    now: Nanos,
}

fn make(registry: &Registry) -> Arc<FaultDevice> {
    let base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 2048});
    let base = serde_json::from_value(base).expect("a complete configuration");
    registry
        .register(malloc::create(base).expect("a good one"))
        .expect("free");
    create(
        Config {
            base_name: "Base".into(),
            uuid: None,
        },
        registry,
    )
    .expect("the base is there")
}

impl Rig {
    fn new() -> Self {
        let registry = Registry::new();
        let device = make(&registry);
        let pool = Pool::heap(&[ClassSpec {
            size: 512,
            count: 16,
        }]);
        let queue = Arc::clone(&device).open(&pool).expect("opens");
        Self {
            registry,
            device,
            queue,
            pool,
            now: Nanos(1),
        }
    }

    fn buf(&self, fill: u8) -> Buf {
        let mut buf = self.pool.acquire(512).expect("free");
        buf.bytes_mut().expect("not shared").fill(fill);
        buf
    }

    fn submit(&mut self, token: Token, op: Op, lba: u64) {
        let mut io = Io::new(token, op, lba, 1);
        if op.data_len(1) > 0 {
            io = io.with(self.buf(7));
        }
        self.queue.submit(io).expect("room");
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut done = Done::with_capacity(16);
        self.queue.poll(self.now, &mut done);
        done.drain().collect()
    }

    fn run(&mut self, op: Op, lba: u64) -> Option<Status> {
        self.submit(1, op, lba);
        self.poll().first().map(|completion| completion.status)
    }
}

/// Without faults, and with faults that only delay or push back, nothing is different.
#[test]
fn conforms() {
    crate::conformance::run(|| make(&Registry::new()));
    crate::conformance::run(|| {
        let device = make(&Registry::new());
        let busy = Fault {
            probability: 0.3,
            seed: 1,
            ..Fault::new(Action::Busy)
        };
        let late = Fault {
            probability: 0.1,
            ..Fault::new(Action::Delay { latency_us: 50 })
        };
        device.inject(busy).expect("good");
        device.inject(late).expect("good");
        device
    });
}

/// A fault affects its operations, in its range, for its number of times, and can be ended; the
/// list shows it.
#[test]
fn by_operation_range_and_count() {
    let mut rig = Rig::new();
    let nvme = Status::Nvme {
        sct: 2,
        sc: 0x81,
        dnr: true,
    };
    let fault = Fault {
        range: Some((10, 2)),
        ..Fault::new(Action::Fail(nvme))
    };
    let id = rig
        .device
        .inject(fault.on(&[Op::Read]).times(2))
        .expect("good");
    assert_eq!(rig.run(Op::Write, 10), Some(Status::Ok));
    assert_eq!(rig.run(Op::Read, 9), Some(Status::Ok));
    assert_eq!(rig.run(Op::Read, 11), Some(nvme));
    assert_eq!(rig.device.injected()[0].left, Some(1));
    assert_eq!(rig.run(Op::Read, 10), Some(nvme));
    assert_eq!(rig.run(Op::Read, 10), Some(Status::Ok));
    assert_eq!(
        (rig.device.injected()[0].hits, rig.device.injected()[0].id),
        (2, id)
    );
    assert!(rig.device.remove(id) && !rig.device.remove(id));
    rig.device
        .inject(Fault::new(Action::FailMedium))
        .expect("good");
    assert_eq!(rig.run(Op::Read, 0), Some(Status::ReadError));
    assert_eq!(rig.run(Op::WriteZeroes, 0), Some(Status::WriteError));
    rig.device.clear();
    assert_eq!(rig.run(Op::Read, 0), Some(Status::Ok));
}

/// Chance repeats with its seed.
#[test]
fn probability() {
    let strikes = |seed| {
        let mut rig = Rig::new();
        let fault = Fault {
            probability: 0.25,
            seed,
            ..Fault::new(Action::FailMedium)
        };
        rig.device.inject(fault).expect("good");
        (0..400)
            .map(|_| rig.run(Op::Flush, 0) != Some(Status::Ok))
            .collect::<Vec<bool>>()
    };
    let once = strikes(3);
    let count = once.iter().filter(|strike| **strike).count();
    assert!((60..140).contains(&count), "{count} of 400");
    assert_eq!(once, strikes(3));
    assert_ne!(once, strikes(4));
}

/// Written data goes down corrupted but its buffer comes back unchanged; read data is corrupted on
/// its way up.
#[test]
fn corruption() {
    let mut rig = Rig::new();
    let corrupt = Action::Corrupt {
        offset: 100,
        value: 0x0F,
    };
    rig.device
        .inject(Fault::new(corrupt).on(&[Op::Write]).times(1))
        .expect("good");
    rig.submit(1, Op::Write, 0);
    let written = rig.poll().remove(0);
    assert!(
        written.data[0].iter().all(|byte| *byte == 7),
        "the writer's data is untouched"
    );
    rig.submit(2, Op::Read, 0);
    let read = rig.poll().remove(0);
    let wrong: Vec<usize> = (0..512).filter(|at| read.data[0][*at] != 7).collect();
    assert_eq!((wrong, read.data[0][100]), (vec![100], 7 ^ 0x0F));
    rig.device
        .inject(Fault::new(corrupt).on(&[Op::Read]).times(1))
        .expect("good");
    rig.submit(3, Op::Read, 0);
    assert_eq!(rig.poll()[0].data[0][100], 7, "twice is as it was");
    let nothing = Fault::new(Action::Corrupt {
        offset: 0,
        value: 0,
    });
    assert!(matches!(
        rig.device.inject(nothing),
        Err(FaultError::CorruptsNothing)
    ));
}

/// A hung I/O ends when it is resumed or aborted, or when the base goes. Its core may sleep
/// meanwhile, but polls again.
#[test]
fn hangs() {
    let mut rig = Rig::new();
    rig.device
        .inject(Fault::new(Action::Hang).times(3))
        .expect("good");
    for token in 1..=3 {
        rig.submit(token, Op::Write, token);
    }
    assert!(rig.poll().is_empty());
    assert!(matches!(rig.queue.arm(rig.now), Idle::Until(_)));
    assert!(rig.queue.abort(2));
    let ended: Vec<_> = rig.poll().iter().map(|c| (c.token, c.status)).collect();
    assert_eq!(ended, [(2, Status::Aborted)]);
    rig.device.resume_pending();
    let mut ended: Vec<_> = rig.poll().iter().map(|c| (c.token, c.status)).collect();
    ended.sort_unstable_by_key(|(token, _)| *token);
    assert_eq!(ended, [(1, Status::Ok), (3, Status::Ok)]);
    rig.device.inject(Fault::new(Action::Hang)).expect("good");
    rig.submit(4, Op::Write, 0);
    assert!(rig.poll().is_empty());
    let ticket = rig.registry.remove("Base", Removal::Hot).expect("by force");
    assert_eq!(rig.poll().first().map(|c| c.status), Some(Status::Gone));
    assert!(!ticket.is_done(), "its queue is open");
    rig.queue = Box::new(ClosedQueue);
    assert!(ticket.is_done());
}

/// Back-pressure: handed back while others are under way below, else taken and tried again later.
#[test]
fn busy() {
    let mut rig = Rig::new();
    let fault = Fault {
        queue_depth: 1,
        ..Fault::new(Action::Busy).times(1)
    };
    rig.device.inject(fault).expect("good");
    rig.submit(1, Op::Read, 0);
    let io = Io::new(2, Op::Read, 1, 1).with(rig.buf(0));
    let Err((Busy, io)) = rig.queue.submit(io) else {
        panic!("the fault wants it handed back")
    };
    assert_eq!((io.token, io.data.len()), (2, 1));
    assert_eq!(rig.poll().len(), 1);
    rig.queue.submit(io).expect("that was the one time");
    assert_eq!(rig.poll().len(), 1);
    rig.device
        .inject(Fault::new(Action::Busy).times(2))
        .expect("good");
    rig.submit(3, Op::Read, 0);
    assert_eq!(rig.queue.arm(rig.now), Idle::Busy);
    assert!(rig.poll().is_empty(), "the second time");
    assert_eq!(rig.poll().len(), 1);
}

/// SPDK's call: a slot per operation, replaced by the next call and ended by `clear`; one time by
/// default.
#[test]
fn spdk_dialect() {
    let mut rig = Rig::new();
    let inject = |device: &FaultDevice, params: serde_json::Value| {
        device.inject_spdk(&serde_json::from_value(params).expect("good parameters"))
    };
    let failure = serde_json::json!({"io_type": "all", "error_type": "failure"});
    inject(&rig.device, failure.clone()).expect("good");
    assert_eq!(rig.run(Op::Read, 0), Some(Status::ReadError));
    assert_eq!(rig.run(Op::Read, 0), Some(Status::Ok), "num is 1");
    assert_eq!(
        rig.run(Op::WriteZeroes, 0),
        Some(Status::Ok),
        "not among SPDK's operations"
    );
    let nvme = serde_json::json!({"io_type": "write", "error_type": "nvme_failure", "num": 5,
        "nvme_sct": 1, "nvme_sc": 0x80});
    inject(&rig.device, nvme).expect("good");
    assert_eq!(
        rig.run(Op::Write, 0),
        Some(Status::Nvme {
            sct: 1,
            sc: 0x80,
            dnr: false
        })
    );
    assert_eq!(rig.device.injected().len(), 4, "replaced, not added");
    let corrupt = serde_json::json!({"io_type": "read", "error_type": "corrupt_data"});
    assert!(matches!(
        inject(&rig.device, corrupt),
        Err(FaultError::CorruptsNothing)
    ));
    let clear = serde_json::json!({"io_type": "clear", "error_type": "failure"});
    inject(&rig.device, clear).expect("good");
    assert_eq!(rig.run(Op::Write, 0), Some(Status::Ok));
    assert_eq!(
        (Bdev::name(&*rig.device), FaultDevice::PRODUCT),
        ("EE_Base", "Error Injection Disk")
    );
}

/// Stands in for a queue that was closed.
struct ClosedQueue;

impl Queue for ClosedQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        Err((Busy, io))
    }

    fn poll(&mut self, _now: Nanos, _done: &mut Done) -> usize {
        0
    }

    fn abort(&mut self, _token: Token) -> bool {
        false
    }

    fn inflight(&self) -> usize {
        0
    }
}
