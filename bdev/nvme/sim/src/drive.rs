//! A test's control of a simulated drive: its actions and its questions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::log::SmartHealth;
use nacre_nvmf_wire::registers::Csts;
use nacre_random::Random;
use nacre_reactor::Nanos;
use parking_lot::{Mutex, MutexGuard};

use crate::config::{Config, NamespaceConfig};
use crate::faults::{Chances, Rule};
use crate::function::{Doorbells, SimFunction};
use crate::media::{Keep, Namespace};
use crate::memory::Iommu;
use crate::state::{State, Stats};

/// A simulated drive. Clones are the same one.
#[derive(Clone)]
pub struct Drive {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub state: Mutex<State>,
    /// What never changes, and so needs no lock.
    pub address: String,
    pub numa_node: Option<u32>,
    pub slot: usize,
    pub vectors: u16,
    pub register_bytes: u32,
    pub iommu: Arc<Iommu>,
    /// Used instead of the state's when doorbells are not judged.
    pub doorbells: Option<Doorbells>,
    /// The thread that ticks it, while it sleeps.
    pub asleep: AtomicBool,
    pub thread: Mutex<Option<Thread>>,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// There may be something to do.
    pub fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            let thread = self.thread.lock();
            if let Some(thread) = &*thread {
                thread.unpark();
            }
        }
    }
}

impl Drive {
    /// Makes a drive that is not plugged in yet.
    pub fn new(config: Config) -> Drive {
        let doorbells = 2 * (u32::from(config.io_queues) + 1);
        let bytes = 0x1000 + (doorbells * (4 << config.doorbell_stride)).next_multiple_of(4096);
        let fast = !config.strict_doorbells && !config.shadow_doorbells;
        Drive {
            shared: Arc::new(Shared {
                address: config.address.clone(),
                numa_node: config.numa_node,
                slot: config.slot,
                vectors: config.vectors,
                register_bytes: bytes,
                iommu: Arc::clone(&config.iommu),
                doorbells: fast.then(|| Doorbells::new(doorbells as usize, config.doorbell_stride)),
                asleep: AtomicBool::new(false),
                thread: Mutex::new(None),
                state: Mutex::new(State::new(config)),
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// Plugs it in, and gives the function that it then is. One that was given before is gone.
    pub fn plug(&self) -> Arc<SimFunction> {
        let mut state = self.lock();
        if state.present {
            state.pull(Keep::Some);
        }
        state.seat += 1;
        state.present = true;
        state.leaving = false;
        state.given_back = false;
        Arc::new(SimFunction::new(Arc::clone(&self.shared), state.seat))
    }

    /// Pulls it out: its registers read as all ones, and its cache has no power.
    pub fn pull(&self, keep: Keep) {
        self.lock().pull(keep);
    }

    pub fn is_present(&self) -> bool {
        self.lock().present
    }

    /// The system announces the drive's removal.
    pub fn announce_removal(&self) {
        self.lock().leaving = true;
    }

    /// A short power failure: everything is lost but the stored data.
    pub fn power_cycle(&self, keep: Keep) {
        let mut state = self.lock();
        state.lose_power(keep);
        state.reset_registers();
    }

    /// One turn, at `now`. Whether anything happened.
    pub fn tick(&self, now: Nanos) -> bool {
        let mut state = self.lock();
        if let Some(doorbells) = &self.shared.doorbells {
            doorbells.look(&mut state);
        }
        state.tick(now)
    }

    /// The moment at which something happens by itself.
    pub fn next(&self) -> Option<Nanos> {
        self.lock().next()
    }

    /// # Panics
    ///
    /// If the driver broke a rule.
    #[track_caller]
    pub fn check(&self) {
        let (violations, outside) = (self.violations(), self.shared.iommu.outside());
        assert!(
            violations.is_empty(),
            "{}: the driver's mistakes: {violations:#?}",
            self.shared.address
        );
        assert_eq!(
            outside, 0,
            "{}: accesses to memory that is not registered",
            self.shared.address
        );
    }

    /// The rules that the driver broke. Bounded to some dozens.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.kept.clone()
    }

    /// Forgets them, and gives how many there were.
    pub fn forgive(&self) -> u64 {
        std::mem::take(&mut self.lock().violations).count
    }

    pub fn stats(&self) -> Stats {
        self.lock().stats.clone()
    }

    /// Commands taken and not answered, but for Asynchronous Event Requests.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight()
    }

    pub fn async_requests(&self) -> usize {
        self.lock().async_requests.len()
    }

    /// I/O queue pairs that exist.
    pub fn io_queues(&self) -> usize {
        self.lock().sqs.iter().skip(1).flatten().count()
    }

    /// Which I/O completion queues interrupt, and by which vector.
    pub fn queue_vectors(&self) -> Vec<Option<u16>> {
        let state = self.lock();
        let queues = state.cqs.iter().skip(1).flatten();
        queues.map(|cq| cq.vector).collect()
    }

    pub fn is_enabled(&self) -> bool {
        self.lock().cc.is_enabled()
    }

    pub fn is_ready(&self) -> bool {
        self.lock().csts.is_ready()
    }

    /// A shutdown was announced, and is done.
    pub fn is_shut_down(&self) -> bool {
        self.lock().csts.shst() == Csts::SHST_COMPLETE
    }

    pub fn is_bus_master(&self) -> bool {
        self.lock().bus_master
    }

    /// True if the function of the drive was dropped.
    pub fn is_given_back(&self) -> bool {
        self.lock().given_back
    }

    pub fn inject(&self, rule: Rule) {
        self.lock().faults.rules.push(rule);
    }

    /// No rule is left, nothing goes wrong by chance, and nothing fails for good.
    pub fn heal(&self) {
        self.lock().faults = Default::default();
        self.release();
    }

    pub fn set_chances(&self, chances: Chances) {
        self.lock().faults.chances = chances;
    }

    /// Executes the held commands.
    pub fn release(&self) {
        let mut state = self.lock();
        let (held, stuck) = std::mem::take(&mut state.stuck)
            .into_iter()
            .partition(|command| command.action == Some(crate::Action::Hold));
        state.stuck = stuck;
        let held: Vec<_> = held;
        for mut command in held {
            command.action = None;
            state.waiting.push(command);
        }
    }

    /// Commands that are held, or will never be answered.
    pub fn stuck(&self) -> usize {
        self.lock().stuck.len()
    }

    pub fn never_ready(&self, on: bool) {
        self.lock().faults.never_ready = on;
    }

    pub fn never_disabled(&self, on: bool) {
        self.lock().faults.never_disabled = on;
    }

    pub fn never_shut_down(&self, on: bool) {
        self.lock().faults.never_shut_down = on;
    }

    /// Grants so many queue pairs at most, whatever it has.
    pub fn grant_queues(&self, most: u16) {
        self.lock().faults.grant = Some(most);
    }

    /// Resets of the function fail.
    pub fn fail_function_reset(&self, on: bool) {
        self.lock().faults.reset_fails = on;
    }

    /// Bus mastering cannot be switched.
    pub fn fail_bus_master(&self, on: bool) {
        self.lock().faults.bus_master_fails = on;
    }

    /// Aborts are answered "not aborted".
    pub fn fail_aborts(&self, on: bool) {
        self.lock().faults.aborts_fail = on;
    }

    /// The controller stops looking at its submission queues without setting the event index: later
    /// writes to shadow doorbells are lost, until the register is written.
    pub fn lose_shadow_doorbells(&self, on: bool) {
        self.lock().faults.careless = on;
    }

    /// The controller fails: CSTS.CFS.
    pub fn make_fatal(&self) {
        let mut state = self.lock();
        state.csts = state.csts.with_cfs(1);
    }

    /// The controller resets itself.
    pub fn reset_itself(&self) {
        self.lock().reset_controller();
    }

    /// A vector fires for no reason.
    pub fn interrupt(&self, vector: u16) {
        if let Some(signal) = self.lock().vectors.get(usize::from(vector)) {
            signal.set();
        }
    }

    pub fn raise(&self, event: AsyncEvent) {
        self.lock().raise(event);
    }

    /// Changes the health log; a new critical warning is an event.
    pub fn set_health(&self, change: impl FnOnce(&mut SmartHealth)) {
        let mut state = self.lock();
        let before = state.smart.critical_warning;
        change(&mut state.smart);
        state.raise_warnings(before);
    }

    /// Changes the configuration. Facts that were reported already are not reported again.
    pub fn reconfigure(&self, change: impl FnOnce(&mut Config)) {
        change(&mut self.lock().config);
    }

    pub fn add_namespace(&self, config: NamespaceConfig) {
        let mut state = self.lock();
        let nsid = config.nsid;
        state.namespaces.insert(nsid, Namespace::new(config));
        changed(&mut state, nsid);
    }

    pub fn remove_namespace(&self, nsid: u32) {
        let mut state = self.lock();
        state.namespaces.remove(&nsid);
        changed(&mut state, nsid);
    }

    /// Attaches or detaches the namespace, which keeps its data.
    pub fn attach_namespace(&self, nsid: u32, on: bool) {
        let mut state = self.lock();
        if let Some(namespace) = state.namespaces.get_mut(&nsid) {
            namespace.attached = on;
        }
        changed(&mut state, nsid);
    }

    pub fn resize_namespace(&self, nsid: u32, blocks: u64) {
        let mut state = self.lock();
        if let Some(namespace) = state.namespaces.get_mut(&nsid) {
            namespace.resize(blocks);
        }
        changed(&mut state, nsid);
    }

    /// Changes a namespace's configuration.
    pub fn change_namespace(&self, nsid: u32, change: impl FnOnce(&mut NamespaceConfig)) {
        let mut state = self.lock();
        if let Some(namespace) = state.namespaces.get_mut(&nsid) {
            change(&mut namespace.config);
        }
        changed(&mut state, nsid);
    }

    /// The block cannot be read until it is written.
    pub fn spoil_block(&self, nsid: u32, lba: u64) {
        if let Some(namespace) = self.lock().namespaces.get_mut(&nsid) {
            namespace.bad.insert(lba);
        }
    }

    /// The stored blocks of a namespace, if they are stored.
    pub fn stored(&self, nsid: u32, lba: u64, blocks: u64) -> Option<Vec<u8>> {
        let state = self.lock();
        let namespace = state.namespaces.get(&nsid)?;
        let holds = namespace.holds(lba, blocks);
        holds.then(|| namespace.read(lba, blocks).to_vec())
    }

    /// Blocks of all namespaces that would not survive a loss of power.
    pub fn dirty_blocks(&self) -> usize {
        self.lock().namespaces.values().map(Namespace::dirty).sum()
    }

    /// Chance itself, from now on.
    pub fn reseed(&self, seed: u64) {
        self.lock().random = Random::new(seed);
    }

    pub fn iommu(&self) -> &Arc<Iommu> {
        &self.shared.iommu
    }
}

fn changed(state: &mut State, nsid: u32) {
    state.changed.insert(nsid);
    state.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
}
