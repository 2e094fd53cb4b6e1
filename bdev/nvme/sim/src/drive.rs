//! [`Drive`]: a test's handle on a simulated drive, to run it, inject faults, remove and insert it,
//! and read its statistics.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::log::SmartHealth;
use nacre_nvmf_wire::registers::Csts;
use nacre_random::Random;
use nacre_reactor::Nanos;
use parking_lot::Mutex;

use crate::config::{Config, NamespaceConfig};
use crate::doorbells::Doorbells;
use crate::executor::Stats;
use crate::faults::{Chances, Rule};
use crate::function::SimFunction;
use crate::media::{CacheSurvival, Namespace};
use crate::memory::Iommu;
use crate::shared::Shared;
use crate::state::State;

/// A simulated drive. Clones refer to the same drive.
#[derive(Clone)]
pub struct Drive {
    pub(crate) shared: Arc<Shared>,
}

impl Drive {
    /// Creates a drive that is not inserted yet.
    pub fn new(config: Config) -> Self {
        let doorbells = 2 * (u32::from(config.io_queues) + 1);
        let bytes = 0x1000 + (doorbells * (4 << config.doorbell_stride)).next_multiple_of(4096);
        let fast = !config.strict_doorbells && !config.shadow_doorbells;
        Self {
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

    /// Inserts the drive and returns its PCI function. A drive that is inserted is removed first,
    /// as by [`Drive::pull`] with [`CacheSurvival::Some`]. All registers of an earlier function
    /// read as all ones.
    pub fn plug(&self) -> Arc<SimFunction> {
        let mut state = self.shared.state.lock();
        if state.present {
            state.pull(CacheSurvival::Some);
        }
        state.seat += 1;
        state.present = true;
        state.leaving = false;
        state.given_back = false;
        Arc::new(SimFunction::new(Arc::clone(&self.shared), state.seat))
    }

    /// Removes the drive: its registers read as all ones, and its cache loses power.
    pub fn pull(&self, keep: CacheSurvival) {
        self.shared.state.lock().pull(keep);
    }

    pub fn is_present(&self) -> bool {
        self.shared.state.lock().present
    }

    /// Announces the drive's removal, as the system does: `Function::is_present` returns false, and
    /// the registers still work.
    pub fn announce_removal(&self) {
        self.shared.state.lock().leaving = true;
    }

    /// A short power failure: the registers are reset, and the cache keeps those of its unflushed
    /// blocks that `keep` selects.
    pub fn power_cycle(&self, keep: CacheSurvival) {
        let state = &mut *self.shared.state.lock();
        state.exec.lose_power(keep, &mut state.random);
        state.reset_registers();
    }

    /// Runs one turn at `now`: fetches commands, executes the due ones and posts completions.
    /// Returns true if it did anything.
    pub fn tick(&self, now: Nanos) -> bool {
        let mut state = self.shared.state.lock();
        if let Some(doorbells) = &self.shared.doorbells {
            doorbells.take(&mut state);
        }
        state.tick(now)
    }

    /// When the next action is due. `None`: no action before the driver's next access.
    pub fn next(&self) -> Option<Nanos> {
        self.shared.state.lock().next()
    }

    /// Checks that the driver kept the rules.
    ///
    /// # Panics
    ///
    /// If the driver broke a rule, or a controller behind this drive's IOMMU accessed memory that
    /// is not registered.
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

    /// The rules that the driver broke; the first 32 are stored.
    pub fn violations(&self) -> Vec<String> {
        self.shared.state.lock().exec.violations.kept.clone()
    }

    /// Clears the violations and returns their number.
    pub fn clear_violations(&self) -> u64 {
        std::mem::take(&mut self.shared.state.lock().exec.violations).count
    }

    pub fn stats(&self) -> Stats {
        self.shared.state.lock().exec.stats.clone()
    }

    /// Commands fetched and not completed, other than Asynchronous Event Requests.
    pub fn in_flight(&self) -> usize {
        self.shared.state.lock().in_flight()
    }

    pub fn async_requests(&self) -> usize {
        self.shared.state.lock().async_requests.len()
    }

    /// Number of I/O submission queues.
    pub fn io_queues(&self) -> usize {
        self.shared
            .state
            .lock()
            .sqs
            .iter()
            .skip(1)
            .flatten()
            .count()
    }

    /// The interrupt vector of each I/O completion queue; `None`: no interrupts.
    pub fn queue_vectors(&self) -> Vec<Option<u16>> {
        let state = self.shared.state.lock();
        let queues = state.cqs.iter().skip(1).flatten();
        queues.map(|cq| cq.vector).collect()
    }

    pub fn is_enabled(&self) -> bool {
        self.shared.state.lock().cc.is_enabled()
    }

    pub fn is_ready(&self) -> bool {
        self.shared.state.lock().csts.is_ready()
    }

    /// True after a shutdown has completed.
    pub fn is_shut_down(&self) -> bool {
        self.shared.state.lock().csts.shst() == Csts::SHST_COMPLETE
    }

    pub fn is_bus_master(&self) -> bool {
        self.shared.state.lock().bus_master
    }

    /// True if the driver released or dropped the drive's function.
    pub fn is_given_back(&self) -> bool {
        self.shared.state.lock().given_back
    }

    pub fn inject(&self, rule: Rule) {
        self.shared.state.lock().faults.rules.push(rule);
    }

    /// Removes all faults and chances. Commands that [`crate::Action::Hold`] holds are executed in
    /// the next turn.
    pub fn heal(&self) {
        self.shared.state.lock().faults = Default::default();
        self.release();
    }

    pub fn set_chances(&self, chances: Chances) {
        self.shared.state.lock().faults.chances = chances;
    }

    /// Executes the commands that [`crate::Action::Hold`] holds, in the next turn.
    pub fn release(&self) {
        let mut state = self.shared.state.lock();
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

    /// Number of commands that are held, or never complete.
    pub fn stuck(&self) -> usize {
        self.shared.state.lock().stuck.len()
    }

    /// Keeps CSTS.RDY at 0 after CC.EN is set.
    pub fn never_ready(&self, on: bool) {
        self.shared.state.lock().faults.never_ready = on;
    }

    /// Keeps CSTS.RDY at 1 after CC.EN is cleared.
    pub fn never_disabled(&self, on: bool) {
        self.shared.state.lock().faults.never_disabled = on;
    }

    /// Keeps CSTS.SHST from reporting that a shutdown is complete.
    pub fn never_shut_down(&self, on: bool) {
        self.shared.state.lock().faults.never_shut_down = on;
    }

    /// Makes Set Features, Number of Queues grant at most this number of queue pairs.
    pub fn grant_queues(&self, most: u16) {
        self.shared.state.lock().faults.grant = Some(most);
    }

    /// Makes function resets fail.
    pub fn fail_function_reset(&self, on: bool) {
        self.shared.state.lock().faults.reset_fails = on;
    }

    /// Makes switching of bus mastering fail.
    pub fn fail_bus_master(&self, on: bool) {
        self.shared.state.lock().faults.bus_master_fails = on;
    }

    /// Makes Abort commands abort nothing: dword 0 bit 0 is 1.
    pub fn fail_aborts(&self, on: bool) {
        self.shared.state.lock().faults.aborts_fail = on;
    }

    /// Makes the controller stop reading its shadow doorbells without setting the event index:
    /// later writes to them have no effect until the register is written.
    pub fn lose_shadow_doorbells(&self, on: bool) {
        self.shared.state.lock().faults.careless = on;
    }

    /// Makes the controller fail: sets CSTS.CFS.
    pub fn make_fatal(&self) {
        let mut state = self.shared.state.lock();
        state.csts = state.csts.with_cfs(1);
    }

    /// Makes the controller reset itself: CSTS.RDY becomes 0, and all queues are deleted.
    pub fn reset_itself(&self) {
        self.shared.state.lock().reset_controller();
    }

    /// Fires a vector without a completion.
    pub fn interrupt(&self, vector: u16) {
        if let Some(signal) = self.shared.state.lock().vectors.get(usize::from(vector)) {
            signal.set();
        }
    }

    /// Raises an asynchronous event, which is dropped if it is one of Asynchronous Event
    /// Configuration and the driver did not enable it.
    pub fn raise(&self, event: AsyncEvent) {
        self.shared.state.lock().raise(event);
    }

    /// Changes the SMART / Health log page; a new critical warning raises an event.
    pub fn set_health(&self, change: impl FnOnce(&mut SmartHealth)) {
        let mut state = self.shared.state.lock();
        let before = state.exec.smart.critical_warning;
        change(&mut state.exec.smart);
        state.raise_warnings(before);
    }

    /// Changes the configuration without an event. The next Identify command or register read shows
    /// the change. `namespaces`, `seed` and `strict_doorbells` have no effect. The PCI function
    /// stays as it is: address, NUMA node, slot, number of vectors, size of the registers, IOMMU.
    pub fn reconfigure(&self, change: impl FnOnce(&mut Config)) {
        change(&mut self.shared.state.lock().exec.config);
    }

    pub fn add_namespace(&self, config: NamespaceConfig) {
        let mut state = self.shared.state.lock();
        let nsid = config.nsid;
        state.exec.namespaces.insert(nsid, Namespace::new(config));
        changed(&mut state, nsid);
    }

    pub fn remove_namespace(&self, nsid: u32) {
        let mut state = self.shared.state.lock();
        state.exec.namespaces.remove(&nsid);
        changed(&mut state, nsid);
    }

    /// Attaches or detaches the namespace, which keeps its data.
    pub fn attach_namespace(&self, nsid: u32, on: bool) {
        let mut state = self.shared.state.lock();
        if let Some(namespace) = state.exec.namespaces.get_mut(&nsid) {
            namespace.attached = on;
        }
        changed(&mut state, nsid);
    }

    pub fn resize_namespace(&self, nsid: u32, blocks: u64) {
        let mut state = self.shared.state.lock();
        if let Some(namespace) = state.exec.namespaces.get_mut(&nsid) {
            namespace.resize(blocks);
        }
        changed(&mut state, nsid);
    }

    /// Changes a namespace's configuration.
    pub fn change_namespace(&self, nsid: u32, change: impl FnOnce(&mut NamespaceConfig)) {
        let mut state = self.shared.state.lock();
        if let Some(namespace) = state.exec.namespaces.get_mut(&nsid) {
            change(&mut namespace.config);
        }
        changed(&mut state, nsid);
    }

    /// Makes reads of a block fail with Unrecovered Read Error until it is written.
    pub fn spoil_block(&self, nsid: u32, lba: u64) {
        if let Some(namespace) = self.shared.state.lock().exec.namespaces.get_mut(&nsid) {
            namespace.bad.insert(lba);
        }
    }

    /// The data of blocks of a namespace, as in the cache. `None` if the namespace does not exist,
    /// or is smaller.
    pub fn stored(&self, nsid: u32, lba: u64, blocks: u64) -> Option<Vec<u8>> {
        let state = self.shared.state.lock();
        let namespace = state.exec.namespaces.get(&nsid)?;
        let holds = namespace.holds(lba, blocks);
        holds.then(|| namespace.read(lba, blocks).to_vec())
    }

    /// Number of blocks, in all namespaces, that a loss of power would lose.
    pub fn dirty_blocks(&self) -> usize {
        self.shared
            .state
            .lock()
            .exec
            .namespaces
            .values()
            .map(Namespace::dirty)
            .sum()
    }

    /// Restarts the random numbers from `seed`.
    pub fn reseed(&self, seed: u64) {
        self.shared.state.lock().random = Random::new(seed);
    }

    pub fn iommu(&self) -> &Arc<Iommu> {
        &self.shared.iommu
    }
}

fn changed(state: &mut State, nsid: u32) {
    state.exec.changed.insert(nsid);
    state.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
}
