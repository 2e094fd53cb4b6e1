//! The DMA memory of the process: registered once in the VFIO container, for all its drives.

use std::sync::Arc;

use nacre_hugepages::{Arena, DEVICE_SLOTS, RegisterHook, register_all};

use crate::container::{Container, Hook};
use crate::error::VfioError;

/// The container, the arenas that it maps, and their device slot. Lives as long as the last drive.
pub(crate) struct Memory {
    pub slot: usize,
    pub hook: Arc<dyn RegisterHook>,
    pub container: Arc<Container>,
    arenas: Vec<Arena>,
}

impl Memory {
    /// Maps the arenas in the container. `address`: the drive that needs them, for errors.
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
