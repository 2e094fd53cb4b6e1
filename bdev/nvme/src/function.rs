//! The interface between the driver and a PCI function with an NVMe controller: registers, memory
//! registration, interrupts and resets. The crate `vfio` implements it for drives, the crate `sim`
//! for tests.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nacre_hugepages::RegisterHook;

/// The value of a register when no device answers on the bus: the drive was removed, or its link is
/// down.
pub const GONE: u32 = u32::MAX;

/// The error of the bus or of the kernel's VFIO driver.
#[derive(Debug, thiserror::Error)]
#[error("NVMe drive {address}: {what}: {source}")]
pub struct FunctionError {
    pub address: String,
    /// The failed operation, e.g. `VFIO_DEVICE_RESET`.
    pub what: String,
    pub source: std::io::Error,
}

/// One PCI function with an NVMe controller, owned by this process.
///
/// All cores may access registers concurrently, but each register has one writer: the core of a
/// queue pair writes its doorbells, the control writes all other registers. Register accesses never
/// block; [`Function::reset`] and [`Function::interrupts`] may take long.
///
/// Ordering: stores to memory are visible to the controller before a later [`Function::write32`].
/// The controller's stores before it completes a [`Function::read32`] are visible after that read.
///
/// Dropping the object releases the function. Afterwards the controller cannot access memory.
pub trait Function: Send + Sync + 'static {
    /// PCI address of the function: `0000:5e:00.0`.
    fn address(&self) -> &str;

    /// The NUMA node of the function, if the system reports it.
    fn numa_node(&self) -> Option<u32>;

    /// Size of the accessible part of BAR 0 in bytes: registers and doorbells.
    fn register_bytes(&self) -> u32;

    /// Reads the dword at `offset` of BAR 0; [`GONE`] when the function was removed.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of 4, or not inside [`Function::register_bytes`].
    fn read32(&self, offset: u32) -> u32;

    /// Writes the dword at `offset` of BAR 0.
    ///
    /// # Panics
    ///
    /// Like [`Function::read32`].
    fn write32(&self, offset: u32, value: u32);

    /// Reads a 64-bit register as two dwords, the lower one first.
    fn read64(&self, offset: u32) -> u64 {
        let low = u64::from(self.read32(offset));
        low | u64::from(self.read32(offset + 4)) << 32
    }

    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }

    /// The device slot under which memory stores this function's addresses
    /// ([`nacre_hugepages::Buf::key`]: the address of the first byte of the region). Functions that
    /// share a view of memory (a VFIO container) share the slot.
    fn slot(&self) -> usize;

    /// Registers memory under [`Function::slot`].
    fn hook(&self) -> Arc<dyn RegisterHook>;

    /// Enables or disables the controller's memory accesses. After `set_bus_master(false)` no
    /// earlier command accesses memory.
    fn set_bus_master(&self, on: bool) -> Result<(), FunctionError>;

    /// Resets the function (FLR or bus reset). Bus mastering is disabled afterwards.
    fn reset(&self) -> Result<(), FunctionError>;

    /// True if the system still lists the function and has not announced its removal.
    fn is_present(&self) -> bool;

    /// Number of interrupt vectors (MSI-X); 0: the function can only be polled.
    fn vectors(&self) -> u16;

    /// Connects the first `count` vectors to separate descriptors; 0 disconnects all.
    fn interrupts(&self, count: u16) -> Result<(), FunctionError>;

    /// Becomes readable when the vector fires; `None` when it is not connected. The next
    /// [`Function::interrupts`] creates others.
    fn vector_fd(&self, vector: u16) -> Option<Arc<OwnedFd>>;

    /// Releases the function although references to this object exist. The kernel waits for this
    /// before it completes an announced removal. From now on registers read as [`GONE`], and writes
    /// have no effect.
    fn release(&self);

    /// Clears the vector's descriptor. Returns true if the vector had fired.
    fn acknowledge(&self, vector: u16) -> bool;
}
