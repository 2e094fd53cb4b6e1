//! [`Vfio`]: the state that all drives of the process share: the VFIO container, the registered
//! memory, and the device slot of the arenas.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use nacre_hugepages::Arena;
use parking_lot::Mutex;

use crate::container::{Container, GroupNode};
use crate::error::VfioError;
use crate::function::VfioFunction;
use crate::memory::Memory;
use crate::pci::{Address, Driver, Iommu, System};

/// Opens drives. A process has one `Vfio`, so that memory is registered once for all drives.
pub struct Vfio {
    system: Arc<System>,
    nodes: PathBuf,
    arenas: Vec<Arena>,
    /// Exists while a drive is open.
    memory: Mutex<Weak<Memory>>,
}

impl Vfio {
    /// Prepares to open drives of this machine. Memory of `arenas` is registered with them: its
    /// buffers have keys under the drives' slot.
    pub fn new(arenas: &[Arena]) -> Self {
        Self {
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

    /// Opens the drive at a PCI address (`0000:5e:00.0`). The drive must be bound to vfio-pci.
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
        let place = GroupNode {
            address: &name,
            folder: &self.nodes,
            node: &node,
            user: &user,
            members: &members,
        };
        // Locked: concurrent first opens would create two containers.
        let mut shared = self.memory.lock();
        let (memory, group) = match shared.upgrade() {
            Some(memory) => {
                let group = memory.container.group(&place)?;
                (memory, group)
            }
            None => {
                let (container, group) = Container::new(&place)?;
                let memory = Arc::new(Memory::new(&name, &self.arenas, container)?);
                *shared = Arc::downgrade(&memory);
                (memory, group)
            }
        };
        drop(shared);
        let (system, node) = (Arc::clone(&self.system), drive.numa_node);
        let function = VfioFunction::open(system, address, node, &place, group, memory)?;
        Ok(Arc::new(function))
    }
}

impl fmt::Debug for Vfio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vfio")
            .field("arenas", &self.arenas)
            .finish_non_exhaustive()
    }
}
