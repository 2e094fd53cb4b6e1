//! Tests of write zeroes on a target that rejects the Deallocate bit (DEAC).

use std::collections::VecDeque;
use std::sync::Arc;

use nacre_bdev::{
    Bdev, Busy, Completion, Done, Flags, Geometry, Io, Limits, Op, OpenError, Queue, Status,
    Support, Token,
};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;
use nacre_tests::target::{TestTarget, ram};
use uuid::Uuid;

use super::rig::{AttachedRemote, config, options, tcp};

/// A RAM disk that does not deallocate, and rejects requests to do so.
struct NoDeallocate(Arc<dyn Bdev>);

impl Bdev for NoDeallocate {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn product_name(&self) -> &'static str {
        "NoDeallocate"
    }

    fn uuid(&self) -> Uuid {
        self.0.uuid()
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn limits(&self) -> Limits {
        Limits {
            zero_copy_blocks: 0,
            immediate: false,
            unmap_zeroes: false,
            zeroes_deallocate: false,
            ..self.0.limits()
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.0.supports(op)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(StrictQueue {
            disk: Arc::clone(&self.0).open(pool)?,
            refused: VecDeque::new(),
        }))
    }
}

struct StrictQueue {
    disk: Box<dyn Queue>,
    refused: VecDeque<Completion>,
}

impl Queue for StrictQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if io.flags.contains(Flags::DEALLOCATE) {
            self.refused.push_back(io.complete(Status::DeviceError));
            return Ok(());
        }
        self.disk.submit(io)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(completion) = self.refused.pop_front()
        {
            done.push(completion);
        }
        self.disk.poll(now, done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.disk.abort(token)
    }

    fn inflight(&self) -> usize {
        self.refused.len() + self.disk.inflight()
    }
}

/// Goal: zeroes that may be deallocated are written where the namespace does not report
/// deallocation (DLFEAT). Resync and the creation of volumes rely on it. Method: a device behind a
/// target that rejects every such request.
#[test]
fn deallocation_is_not_requested_without_support() {
    let target = TestTarget::start();
    target.add_namespace(Arc::new(NoDeallocate(ram("strict", 4096, 4 << 20))));
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    let module = attached.attachment.devices().remove(0);
    assert!(!module.limits().zeroes_deallocate);
    assert_eq!(module.supports(Op::WriteZeroes), Support::Native);
    let mut user = attached.user(1);
    assert_eq!(user.write(1, 7), Status::Ok);
    assert_eq!(user.read(1), Ok(7));
    assert_eq!(user.zero(1, Flags::DEALLOCATE), Status::Ok);
    assert_eq!(user.read(1), Ok(0));
}
