//! A bdev that the test controls: its geometry, its limits, and the status of each I/O.

use std::sync::Arc;

use nacre_bdev::listing::{ListAnswer, ListQuery};
use nacre_bdev::{
    Bdev, Busy, Done, Geometry, Io, Limits, Op, OpenError, Queue, Status, Support, Token,
};
use nacre_hugepages::{MemoryView, Pool};
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

use super::rig::{Rig, SUBNQN, nqn};
use crate::subsystems::{Backing, NamespaceConfig, NamespaceIds, TargetConfig};

pub(super) struct ScriptedBdev {
    pub state: Mutex<State>,
    /// Questions for the ranges with data, not answered yet.
    pub lists: Mutex<Vec<(ListQuery, ListAnswer)>>,
    uuid: Uuid,
}

#[derive(Clone)]
pub(super) struct State {
    pub geometry: Geometry,
    pub limits: Limits,
    /// How every I/O ends.
    pub status: Status,
    /// The source of the one copy that fails.
    pub bad: Option<u64>,
    /// No I/O ends for now, but those that are aborted if they can be.
    pub held: bool,
    pub aborts: bool,
    /// No I/O is taken.
    pub full: bool,
    /// I/Os that were taken.
    pub submitted: u32,
    /// The number of blocks that take space.
    pub allocated: Option<u64>,
    /// Flushes that were carried out.
    pub flushes: u32,
    /// True: I/Os are executed synchronously.
    pub prompt: bool,
    /// Number of I/Os that were executed synchronously.
    pub sync_runs: u32,
    /// Polls that the cleanup takes.
    pub leftovers: u32,
    pub polls: u32,
}

impl ScriptedBdev {
    pub(super) fn new() -> Arc<Self> {
        let geometry = Geometry {
            block_size: 512,
            blocks: 4096,
            physical_block_size: 512,
        };
        Arc::new(Self {
            state: Mutex::new(State {
                geometry,
                limits: Limits::unlimited(64),
                status: Status::Ok,
                bad: None,
                held: false,
                aborts: false,
                full: false,
                submitted: 0,
                flushes: 0,
                allocated: None,
                prompt: false,
                sync_runs: 0,
                leftovers: 0,
                polls: 0,
            }),
            lists: Mutex::default(),
            uuid: Uuid::from_u128(0x1234),
        })
    }

    pub(super) fn script(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
    }
}

/// A rig whose namespace 1 is on such a device, without the layer.
pub(super) fn rig_scripted() -> (Rig, Arc<ScriptedBdev>) {
    let rig = Rig::new(TargetConfig::default());
    let scripted = add_scripted(&rig, 1);
    (rig, scripted)
}

/// Another one.
pub(super) fn add_scripted(rig: &Rig, nsid: u32) -> Arc<ScriptedBdev> {
    let scripted = ScriptedBdev::new();
    let opened = Arc::clone(&scripted);
    let open = move |pool: &Pool| (Arc::clone(&opened) as Arc<dyn Bdev>).open(pool);
    let config = NamespaceConfig {
        nsid: Some(nsid),
        bdev_name: "told".to_string(),
        ids: NamespaceIds::from_uuid(Uuid::from_u128(0x1234 + u128::from(nsid))),
        backing: Backing::new(Arc::clone(&scripted) as Arc<dyn Bdev>, Arc::new(open)),
        ana_group: None,
        auto_visible: true,
        reservations: Default::default(),
    };
    rig.target.add_namespace(&nqn(SUBNQN), config).unwrap();
    scripted
}

impl Bdev for ScriptedBdev {
    fn name(&self) -> &str {
        "told"
    }

    fn product_name(&self) -> &'static str {
        "Scripted disk"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        self.state.lock().geometry
    }

    fn limits(&self) -> Limits {
        self.state.lock().limits
    }

    fn supports(&self, _op: Op) -> Support {
        Support::Native
    }

    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        self.lists.lock().push((query, answer));
    }

    fn allocated_blocks(&self) -> Option<u64> {
        self.state.lock().allocated
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(Channel {
            scripted: self,
            taken: Vec::new(),
            aborted: Vec::new(),
        }))
    }
}

struct Channel {
    scripted: Arc<ScriptedBdev>,
    taken: Vec<Io>,
    aborted: Vec<Io>,
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let mut state = self.scripted.state.lock();
        if state.full {
            return Err((Busy, io));
        }
        state.submitted += 1;
        self.taken.push(io);
        Ok(())
    }

    fn run_sync(&mut self, io: &mut Io, _zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        let mut state = self.scripted.state.lock();
        state.sync_runs += u32::from(state.prompt);
        if io.op == Op::Read && state.prompt {
            let into = io.data.iter_mut().filter_map(|buf| buf.bytes_mut());
            into.for_each(|bytes| bytes.fill(0x5a));
        }
        state.prompt.then_some(state.status)
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        self.scripted.script(|state| {
            state.leftovers = state.leftovers.saturating_sub(1);
            state.polls += 1;
        });
        let state = self.scripted.state.lock().clone();
        let (held, mut count) = (state.held, 0);
        while done.has_room()
            && let Some(io) = self.aborted.pop()
        {
            done.push(io.complete(Status::Aborted));
            count += 1;
        }
        while !held
            && done.has_room()
            && let Some(io) = self.taken.pop()
        {
            let status = match io.op {
                Op::Copy if state.bad == Some(io.source_lba) => Status::ReadError,
                _ => state.status,
            };
            let flushes = u32::from(io.op == Op::Flush);
            self.scripted.script(|state| state.flushes += flushes);
            done.push(io.complete(status));
            count += 1;
        }
        count
    }

    fn abort(&mut self, token: Token) -> bool {
        let at = self.taken.iter().position(|io| io.token == token);
        match at {
            Some(at) if self.scripted.state.lock().aborts => {
                self.aborted.push(self.taken.remove(at));
                true
            }
            _ => false,
        }
    }

    fn inflight(&self) -> usize {
        self.taken.len() + self.aborted.len()
    }

    fn is_settled(&self) -> bool {
        self.inflight() == 0 && self.scripted.state.lock().leftovers == 0
    }
}
