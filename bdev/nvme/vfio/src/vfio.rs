//! What all drives of a process share: the container, the data memory, the device slot.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use nacre_hugepages::{Arena, DEVICE_SLOTS, RegisterHook, register_all};
use parking_lot::Mutex;

use crate::container::{Container, Hook, Place};
use crate::error::VfioError;
use crate::function::VfioFunction;
use crate::pci::{Address, Driver, Iommu, System};

/// Opens drives. A process has one, so that memory is registered once, whatever the number of
/// drives.
pub struct Vfio {
    system: Arc<System>,
    nodes: PathBuf,
    arenas: Vec<Arena>,
    /// There while a drive is open.
    memory: Mutex<Weak<Memory>>,
}

/// The container, and what memory knows it by. Lives as long as the last drive.
pub(crate) struct Memory {
    pub slot: usize,
    pub hook: Arc<dyn RegisterHook>,
    arenas: Vec<Arena>,
    container: Arc<Container>,
}

impl Vfio {
    /// Opens drives of this machine that know these arenas: their buffers have keys under the
    /// drives' slot.
    pub fn new(arenas: &[Arena]) -> Vfio {
        Vfio {
            system: Arc::new(System::real()),
            nodes: "/dev/vfio".into(),
            arenas: arenas.to_vec(),
            memory: Mutex::default(),
        }
    }

    /// The machine's PCI functions.
    pub fn system(&self) -> &System {
        &self.system
    }

    /// Opens the drive at an address (`0000:5e:00.0`), which has to be bound to vfio-pci.
    pub fn open(&self, address: &str) -> Result<Arc<VfioFunction>, VfioError> {
        self.open_at(address.parse()?)
    }

    pub fn open_at(&self, address: Address) -> Result<Arc<VfioFunction>, VfioError> {
        let drive = self.system.drive(address)?;
        let name = address.to_string();
        if drive.driver != Driver::VfioPci {
            return Err(VfioError::NotBound {
                address: name,
                driver: drive.driver,
            });
        }
        let Iommu::Group(group) = drive.iommu else {
            return Err(VfioError::NoIommu { address: name });
        };
        let node = group.to_string();
        let user = || {
            let user = self.system.group_user(&node);
            user.unwrap_or_else(|| "another process".into())
        };
        let members = || {
            let in_the_way = drive.group_members.iter().filter(|m| m.is_in_the_way());
            let names: Vec<String> = in_the_way.map(ToString::to_string).collect();
            if names.is_empty() {
                "other functions".into()
            } else {
                names.join(", ")
            }
        };
        let place = Place {
            address: &name,
            folder: &self.nodes,
            node: &node,
            user: &user,
            members: &members,
        };
        // One at a time: two first drives would make two containers.
        let mut shared = self.memory.lock();
        let (memory, group) = match shared.upgrade() {
            Some(memory) => {
                let group = memory.container.group(&place)?;
                (memory, group)
            }
            None => {
                let (container, group) = Container::new(&place)?;
                let memory = self.make_known(&name, container)?;
                *shared = Arc::downgrade(&memory);
                (memory, group)
            }
        };
        drop(shared);
        let (system, node) = (Arc::clone(&self.system), drive.numa_node);
        let function = VfioFunction::open(system, address, node, &place, group, memory)?;
        Ok(Arc::new(function))
    }

    fn make_known(
        &self,
        address: &str,
        container: Arc<Container>,
    ) -> Result<Arc<Memory>, VfioError> {
        let hook: Arc<dyn RegisterHook> = Arc::new(Hook(Arc::downgrade(&container)));
        let slot = if self.arenas.is_empty() {
            DEVICE_SLOTS - 1
        } else {
            register_all(&self.arenas, &hook).map_err(|source| VfioError::Memory {
                address: address.to_owned(),
                source,
            })?
        };
        Ok(Arc::new(Memory {
            slot,
            hook,
            arenas: self.arenas.clone(),
            container,
        }))
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

impl fmt::Debug for Vfio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vfio")
            .field("arenas", &self.arenas)
            .finish_non_exhaustive()
    }
}
