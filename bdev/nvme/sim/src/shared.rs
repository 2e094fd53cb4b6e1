//! [`Shared`]: the parts of a simulated drive that its handles and its PCI function share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;

use parking_lot::Mutex;

use crate::doorbells::Doorbells;
use crate::memory::Iommu;
use crate::state::State;

pub(crate) struct Shared {
    pub state: Mutex<State>,
    /// Constant, and so needs no lock.
    pub address: String,
    pub numa_node: Option<u32>,
    pub slot: usize,
    pub vectors: u16,
    pub register_bytes: u32,
    pub iommu: Arc<Iommu>,
    /// Used instead of the state's doorbells when doorbell writes are not checked.
    pub doorbells: Option<Doorbells>,
    /// The thread that ticks the drive is asleep.
    pub asleep: AtomicBool,
    pub thread: Mutex<Option<Thread>>,
}

impl Shared {
    /// Wakes the thread: there may be work.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            let thread = self.thread.lock();
            if let Some(thread) = &*thread {
                thread.unpark();
            }
        }
    }
}
