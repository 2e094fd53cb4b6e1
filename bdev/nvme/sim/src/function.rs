//! The PCI function of a simulated drive, as the driver sees it: registers, doorbells, interrupt
//! vectors and reset.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nacre_bdev_nvme::{Function, FunctionError, GONE};
use nacre_hugepages::RegisterHook;
use nacre_nvmf_wire::registers::offset;

use crate::shared::Shared;
use crate::state::{Signal, State};

/// The PCI function of a simulated drive, from one insertion of the drive until its removal or
/// until the driver releases the function. From then on, all registers read as all ones, even if
/// the drive is inserted again.
pub struct SimFunction {
    shared: Arc<Shared>,
    seat: u64,
}

impl SimFunction {
    pub(crate) fn new(shared: Arc<Shared>, seat: u64) -> Self {
        Self { shared, seat }
    }

    /// Calls `f` with the drive's state. `None` after the removal or the release.
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> Option<R> {
        let mut state = self.shared.state.lock();
        (state.present && state.seat == self.seat).then(|| f(&mut state))
    }

    fn error(&self, what: &str, source: io::Error) -> FunctionError {
        FunctionError {
            address: self.shared.address.clone(),
            what: what.to_owned(),
            source,
        }
    }

    fn gone(&self, what: &str) -> FunctionError {
        self.error(what, io::Error::from_raw_os_error(libc::ENODEV))
    }

    fn check_register(&self, at: u32) {
        assert!(at.is_multiple_of(4), "register {at:#x} is not aligned");
        assert!(
            at < self.shared.register_bytes,
            "register {at:#x} is not there"
        );
    }
}

impl Function for SimFunction {
    fn address(&self) -> &str {
        &self.shared.address
    }

    fn numa_node(&self) -> Option<u32> {
        self.shared.numa_node
    }

    fn register_bytes(&self) -> u32 {
        self.shared.register_bytes
    }

    fn read32(&self, at: u32) -> u32 {
        self.check_register(at);
        self.with(|state| state.read(at)).unwrap_or(GONE)
    }

    fn write32(&self, at: u32, value: u32) {
        self.check_register(at);
        match &self.shared.doorbells {
            Some(doorbells) if at >= offset::DOORBELLS => {
                doorbells.ring(at - offset::DOORBELLS, value);
            }
            _ => {
                self.with(|state| state.write(at, value));
            }
        }
        self.shared.wake();
    }

    fn slot(&self) -> usize {
        self.shared.slot
    }

    fn hook(&self) -> Arc<dyn RegisterHook> {
        Arc::clone(&self.shared.iommu) as Arc<dyn RegisterHook>
    }

    fn set_bus_master(&self, on: bool) -> Result<(), FunctionError> {
        let what = "PCI command register";
        let outcome = self.with(|state| {
            if state.faults.bus_master_fails {
                return Err(());
            }
            state.bus_master = on;
            Ok(())
        });
        match outcome {
            Some(Ok(())) => Ok(()),
            Some(Err(())) => Err(self.error(what, io::Error::from_raw_os_error(libc::EIO))),
            None => Err(self.gone(what)),
        }
    }

    fn reset(&self) -> Result<(), FunctionError> {
        let what = "function level reset";
        let outcome = self.with(|state| {
            if state.faults.reset_fails {
                return Err(());
            }
            state.reset_function();
            Ok(())
        });
        if let Some(doorbells) = &self.shared.doorbells {
            doorbells.clear();
        }
        match outcome {
            Some(Ok(())) => Ok(()),
            Some(Err(())) => Err(self.error(what, io::Error::from_raw_os_error(libc::ENOTTY))),
            None => Err(self.gone(what)),
        }
    }

    fn is_present(&self) -> bool {
        self.with(|state| !state.leaving).unwrap_or(false)
    }

    fn vectors(&self) -> u16 {
        self.shared.vectors
    }

    fn interrupts(&self, count: u16) -> Result<(), FunctionError> {
        let what = "MSI-X vectors";
        if count > self.shared.vectors {
            return Err(self.error(what, io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let signals: io::Result<Vec<Signal>> = (0..count).map(|_| Signal::new()).collect();
        let signals = signals.map_err(|source| self.error(what, source))?;
        self.with(|state| state.vectors = signals)
            .ok_or_else(|| self.gone(what))
    }

    fn vector_fd(&self, vector: u16) -> Option<Arc<OwnedFd>> {
        self.with(|state| state.vectors.get(usize::from(vector)).map(Signal::fd))?
    }

    fn release(&self) {
        self.with(|state| {
            state.reset_registers();
            state.given_back = true;
            // This function is no longer valid.
            state.seat += 1;
        });
    }

    fn acknowledge(&self, vector: u16) -> bool {
        self.with(|state| state.vectors.get(usize::from(vector)).map(Signal::clear))
            .flatten()
            .unwrap_or(false)
    }
}

impl Drop for SimFunction {
    fn drop(&mut self) {
        self.with(|state| {
            state.reset_registers();
            state.given_back = true;
        });
    }
}
