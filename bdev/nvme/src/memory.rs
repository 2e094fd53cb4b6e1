//! Memory that the driver and a controller share: submission and completion queues, PRP and SGL
//! lists, pages for admin commands.

use std::sync::Arc;

use nacre_hugepages::{ArenaError, ArenaOptions, HugepagePolicy, RegisterError, Shared};

use crate::function::Function;

/// Why there is no memory to share with the controller.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("cannot get {bytes} bytes of memory for the queues of NVMe drive {address}")]
    Allocate {
        address: String,
        bytes: usize,
        #[source]
        source: ArenaError,
    },
    #[error("NVMe drive {address} cannot map {bytes} bytes of memory for its queues")]
    Register {
        address: String,
        bytes: usize,
        #[source]
        source: RegisterError,
    },
}

/// Zeroed, page-aligned memory, contiguous in the controller's address space (IOVA). Its bytes are
/// copied in and out, because the controller may change them at any time. Single dwords are loaded
/// and stored atomically and in order.
#[derive(Debug)]
pub struct DmaMemory {
    shared: Shared,
    address: u64,
}

impl DmaMemory {
    /// Allocates and registers `bytes` of memory: at most 1 GiB, which is one region.
    pub fn allocate(function: &Arc<dyn Function>, bytes: usize) -> Result<Self, MemoryError> {
        let options = ArenaOptions {
            numa_node: function.numa_node(),
            // Queues need few pages: the kernel's pool of huge pages is for data.
            hugepages: HugepagePolicy::Off,
            ..ArenaOptions::new(bytes as u64)
        };
        let shared = Shared::allocate_with(options).map_err(|source| MemoryError::Allocate {
            address: function.address().to_owned(),
            bytes,
            source,
        })?;
        let slot = function.slot();
        let register = |source| MemoryError::Register {
            address: function.address().to_owned(),
            bytes,
            source,
        };
        shared.register(slot, function.hook()).map_err(register)?;
        let (key, offset) = shared
            .key(0, bytes, slot)
            .ok_or_else(|| register(RegisterError::NoSuchSlot { slot }))?;
        let address = key + offset as u64;
        Ok(Self { shared, address })
    }

    /// The controller's address of the byte at `offset`.
    #[inline]
    pub fn address(&self, offset: usize) -> u64 {
        self.address + offset as u64
    }

    pub fn len(&self) -> usize {
        self.shared.len()
    }

    pub fn is_empty(&self) -> bool {
        self.shared.is_empty()
    }

    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.shared.read(offset, into);
    }

    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.shared.write(offset, from);
    }

    pub fn zero(&self, offset: usize, len: usize) {
        self.shared.zero(offset, len);
    }

    /// Loads the dword at `offset`, in the byte order of the machine. Later loads see all that the
    /// controller wrote before that dword.
    #[inline]
    pub fn load(&self, offset: usize) -> u32 {
        self.shared.load(offset)
    }

    /// Stores a dword, after everything written before.
    #[inline]
    pub fn store(&self, offset: usize, value: u32) {
        self.shared.store(offset, value);
    }
}
