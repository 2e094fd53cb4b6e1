//! The seam: what the driver needs of a PCI function that is an NVMe controller.

use std::os::fd::RawFd;
use std::sync::Arc;

use nacre_hugepages::RegisterHook;

/// What a register reads as when nobody answers on the bus: the drive was pulled, or its link is down.
pub const GONE: u32 = u32::MAX;

/// Why the bus, or the kernel's part in it, did not do what it was told.
#[derive(Debug, thiserror::Error)]
#[error("NVMe drive {address}: {what}: {source}")]
pub struct FunctionError {
    pub address: String,
    /// What was tried, e.g. `VFIO_DEVICE_RESET`.
    pub what: String,
    pub source: std::io::Error,
}

/// One PCI function with an NVMe controller, owned by this process.
///
/// Registers may be used by every core at once: each is written by one owner (an SQ tail doorbell by the core of
/// its queue pair, all others by the control). Nothing here blocks, but for [`Function::reset`] and
/// [`Function::interrupts`].
///
/// A store to memory before a [`Function::write32`] is seen by the controller before the write is, and a load
/// after a [`Function::read32`] sees what the controller stored before it answered.
///
/// Dropping it gives the function back: the controller can reach no memory after that.
pub trait Function: Send + Sync + 'static {
    /// Where it is: `0000:5e:00.0`.
    fn address(&self) -> &str;

    /// The memory node it is attached to, if the system tells.
    fn numa_node(&self) -> Option<u32>;

    /// Bytes of BAR 0 that can be reached: registers and doorbells.
    fn register_bytes(&self) -> u32;

    /// The dword at `offset` of BAR 0; [`GONE`] when the function is not there any more.
    ///
    /// # Panics
    /// When `offset` is not aligned to 4, or not inside [`Function::register_bytes`].
    fn read32(&self, offset: u32) -> u32;

    /// # Panics
    /// As [`Function::read32`].
    fn write32(&self, offset: u32, value: u32);

    /// A 64-bit register, as two dwords, the lower one first.
    fn read64(&self, offset: u32) -> u64 {
        let low = u64::from(self.read32(offset));
        low | u64::from(self.read32(offset + 4)) << 32
    }

    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }

    /// The device slot under which memory notes the addresses that this function knows it by
    /// ([`nacre_hugepages::Buf::key`]: the address of the first byte of the region). Functions that share a
    /// view of memory (a VFIO container) share the slot.
    fn slot(&self) -> usize;

    /// Makes memory known under [`Function::slot`].
    fn hook(&self) -> Arc<dyn RegisterHook>;

    /// Lets the controller read and write memory, or stops it: after `set_bus_master(false)` nothing that it
    /// was told before reaches memory.
    fn set_bus_master(&self, on: bool) -> Result<(), FunctionError>;

    /// Resets the function itself (FLR, or what the bus has). Bus mastering is off after it.
    fn reset(&self) -> Result<(), FunctionError>;

    /// Whether the system still lists the function and has not told that it is being removed.
    fn is_present(&self) -> bool;

    /// Interrupt vectors (MSI-X) that the function has; 0: it can only be polled.
    fn vectors(&self) -> u16;

    /// Connects the first `count` vectors with descriptors of their own; 0 disconnects all.
    fn interrupts(&self, count: u16) -> Result<(), FunctionError>;

    /// Turns readable when the vector fires; `None` when it is not connected. Valid until the next
    /// [`Function::interrupts`].
    fn vector_fd(&self, vector: u16) -> Option<RawFd>;

    /// Gives the function back for good, although somebody still has this: the system waits for it before a drive
    /// that was announced to go is let go of. Registers read as [`GONE`] from now on, and what is written to them
    /// goes nowhere.
    fn release(&self);

    /// Makes the vector's descriptor unreadable again. True: it had fired.
    fn acknowledge(&self, vector: u16) -> bool;
}
