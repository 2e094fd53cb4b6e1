//! Maps the DMA memory of the process (arenas of hugepages) into its VFIO container, once for all
//! drives of the process: the IOMMU then lets them access it.

use std::sync::Arc;

use nacre_hugepages::{Arena, DEVICE_SLOTS, RegisterHook, register_all};

use crate::container::{Container, Hook};
use crate::error::VfioError;

/// The container, and the arenas that are mapped in it. Each drive holds a reference; after the
/// last one the arenas are unmapped.
pub(crate) struct Memory {
    /// The index under which a buffer has its address for these drives.
    pub slot: usize,
    /// Maps and unmaps memory in the container.
    pub hook: Arc<dyn RegisterHook>,
    pub container: Arc<Container>,
    arenas: Vec<Arena>,
}

impl Memory {
    /// Maps the arenas in the container. `address` is the PCI address of the first drive, for
    /// errors.
    pub(crate) fn new(
        address: &str,
        arenas: &[Arena],
        container: Arc<Container>,
    ) -> Result<Self, VfioError> {
        let hook: Arc<dyn RegisterHook> = Arc::new(Hook(Arc::downgrade(&container)));
        let slot = if arenas.is_empty() {
            DEVICE_SLOTS - 1
        } else {
            register_all(arenas, &hook).map_err(|source| VfioError::Memory {
                address: address.to_owned(),
                source,
            })?
        };
        Ok(Self {
            slot,
            hook,
            container,
            arenas: arenas.to_vec(),
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // No drive uses these keys any longer, and the slot is free for others.
        for arena in &self.arenas {
            arena.unregister(self.slot);
        }
    }
}
