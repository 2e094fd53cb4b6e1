//! [`VfioFunction`]: the PCI function of one drive, opened through VFIO, with its registers,
//! interrupts, reset and bus mastering.

use std::fmt;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nacre_bdev_nvme::{Function, FunctionError, GONE};
use nacre_hugepages::RegisterHook;
use parking_lot::{RwLock, RwLockReadGuard};
use vfio_bindings::bindings::vfio as abi;

use crate::bar::Bar;
use crate::container::{Group, GroupNode};
use crate::error::VfioError;
use crate::memory::Memory;
use crate::pci::{Address, System};
use crate::sys::{self, Argument, Plain, Structured};

/// Registers end with the doorbells (NVMe 2.0, section 3.1): those of the admin queue are at 1000h.
const DOORBELLS: u64 = 0x1000;
/// The doorbells of 65,536 queue pairs end here; a drive's registers beyond them are not mapped.
const REGISTERS_MAX: u64 = 1 << 20;

/// The command register in configuration space (PCI 3.0, section 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const NO_INTX: u16 = 1 << 10;

/// An NVMe drive that this process uses exclusively.
///
/// Fields drop in order: the mapping keeps the device open.
pub struct VfioFunction {
    bar: Bar,
    vectors: RwLock<Vec<Arc<OwnedFd>>>,
    vector_count: u16,
    /// Fires when the system requests the drive's removal.
    request: Option<OwnedFd>,
    requested: AtomicBool,
    /// `None` after the release.
    open: RwLock<Option<Open>>,
    config: u64,
    address: Address,
    name: String,
    numa_node: Option<u32>,
    system: Arc<System>,
    slot: usize,
    hook: Arc<dyn RegisterHook>,
}

/// The objects that hold the drive, in drop order. When a container loses its last group it loses
/// all memory, which could not be unregistered afterwards.
struct Open {
    device: OwnedFd,
    _memory: Arc<Memory>,
    _group: Arc<Group>,
}

impl VfioFunction {
    pub(crate) fn open(
        system: Arc<System>,
        address: Address,
        numa_node: Option<u32>,
        place: &GroupNode<'_>,
        group: Arc<Group>,
        memory: Arc<Memory>,
    ) -> Result<Self, VfioError> {
        let name = address.to_string();
        let step = |what| {
            let address = name.clone();
            move |source| VfioError::Step {
                address,
                what,
                source,
            }
        };
        let device = group.device(&name).map_err(|source| match source.kind() {
            io::ErrorKind::ResourceBusy => VfioError::GroupBusy {
                address: name.clone(),
                group: place.node.to_owned(),
                by: (place.user)(),
            },
            _ => step("opening it")(source),
        })?;
        let registers = region(&device, abi::VFIO_PCI_BAR0_REGION_INDEX)
            .map_err(step("asking for its registers"))?;
        let len = registers
            .mappable()
            .map_err(|problem| VfioError::Registers {
                address: name.clone(),
                problem,
            })?;
        let config = region(&device, abi::VFIO_PCI_CONFIG_REGION_INDEX)
            .map_err(step("asking for its configuration space"))?;
        let vector_count = irq_count(&device, abi::VFIO_PCI_MSIX_IRQ_INDEX)
            .map_err(step("asking for its interrupts"))?;
        let request = match irq_count(&device, abi::VFIO_PCI_REQ_IRQ_INDEX) {
            Ok(1..) => {
                let event = sys::event().map_err(step("making an event"))?;
                set_irqs(&device, abi::VFIO_PCI_REQ_IRQ_INDEX, &[&event])
                    .map_err(step("requesting notification of its removal"))?;
                Some(event)
            }
            // An old kernel has no such event: the removal is detected in sysfs.
            _ => None,
        };
        enable_memory(&device, config.offset).map_err(step("switching its registers on"))?;
        let bar = Bar::map(device.as_fd(), registers.offset, len)
            .map_err(step("mapping its registers"))?;
        Ok(Self {
            bar,
            vectors: RwLock::new(Vec::new()),
            vector_count: vector_count.min(u32::from(u16::MAX)) as u16,
            request,
            requested: AtomicBool::new(false),
            config: config.offset,
            address,
            name,
            numa_node,
            system,
            slot: memory.slot,
            hook: Arc::clone(&memory.hook),
            open: RwLock::new(Some(Open {
                device,
                _memory: memory,
                _group: group,
            })),
        })
    }

    /// Becomes readable when the system requests the drive's removal. The system then waits for
    /// [`Function::release`], or until this value is dropped.
    pub fn removal_fd(&self) -> Option<RawFd> {
        self.request.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Calls `f` with the device, unless it was released.
    fn with<T>(&self, f: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<T> {
        // A panic with the lock held leaves no partial change: the option is replaced as a whole.
        let open = self.open.read();
        match &*open {
            Some(open) => f(&open.device),
            None => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        }
    }

    fn failed(&self, what: &str) -> impl FnOnce(io::Error) -> FunctionError {
        let (address, what) = (self.name.clone(), what.to_owned());
        move |source| FunctionError {
            address,
            what,
            source,
        }
    }

    fn connected(&self) -> RwLockReadGuard<'_, Vec<Arc<OwnedFd>>> {
        // A panic with the lock held leaves no partial change: the list is replaced as a whole.
        self.vectors.read()
    }
}

impl Function for VfioFunction {
    fn address(&self) -> &str {
        &self.name
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn register_bytes(&self) -> u32 {
        self.bar.len() as u32
    }

    #[inline]
    fn read32(&self, offset: u32) -> u32 {
        self.bar.read32(offset)
    }

    #[inline]
    fn write32(&self, offset: u32, value: u32) {
        self.bar.write32(offset, value);
    }

    fn slot(&self) -> usize {
        self.slot
    }

    fn hook(&self) -> Arc<dyn RegisterHook> {
        Arc::clone(&self.hook)
    }

    fn set_bus_master(&self, on: bool) -> Result<(), FunctionError> {
        let what = if on {
            "letting it reach memory"
        } else {
            "keeping it from memory"
        };
        let changed = self.with(|device| {
            let command = read_config(device, self.config)?;
            let command = if on {
                command | BUS_MASTER
            } else {
                command & !BUS_MASTER
            };
            write_config(device, self.config, command)?;
            Ok((command, read_config(device, self.config)?))
        });
        let (command, now) = changed.map_err(self.failed(what))?;
        // All ones: the device is gone, and accesses no memory.
        if now != u16::MAX && now & BUS_MASTER != command & BUS_MASTER {
            let source = io::Error::other(format!("the command register is {now:#06x}"));
            return Err(self.failed(what)(source));
        }
        Ok(())
    }

    fn reset(&self) -> Result<(), FunctionError> {
        // A reset restores configuration space to its state before, so disable bus mastering first.
        self.set_bus_master(false)?;
        self.with(|device| sys::plain(device.as_fd(), Plain::DeviceReset))
            .map(drop)
            .map_err(self.failed("VFIO_DEVICE_RESET"))?;
        self.with(|device| enable_memory(device, self.config))
            .map_err(self.failed("switching its registers on"))
    }

    fn is_present(&self) -> bool {
        if let Some(request) = &self.request
            && sys::clear_event(request.as_fd())
        {
            self.requested.store(true, Ordering::Release);
        }
        !self.requested.load(Ordering::Acquire)
            && !self.bar.is_gone()
            && self.system.is_there(self.address)
    }

    fn vectors(&self) -> u16 {
        self.vector_count
    }

    fn interrupts(&self, count: u16) -> Result<(), FunctionError> {
        let failed = || self.failed("connecting interrupts");
        if count > self.vector_count {
            let text = format!("{count} vectors of {}", self.vector_count);
            return Err(failed()(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let events: Vec<Arc<OwnedFd>> = (0..count)
            .map(|_| sys::event().map(Arc::new))
            .collect::<io::Result<_>>()
            .map_err(failed())?;
        let mut connected = self.vectors.write();
        if !connected.is_empty() {
            // Some kernels cannot add vectors while any are connected: disconnect all first.
            self.with(|device| set_irqs(device, abi::VFIO_PCI_MSIX_IRQ_INDEX, &[]))
                .map_err(failed())?;
            connected.clear();
        }
        if count > 0 {
            let events: Vec<&OwnedFd> = events.iter().map(|event| &**event).collect();
            self.with(|device| set_irqs(device, abi::VFIO_PCI_MSIX_IRQ_INDEX, &events))
                .map_err(failed())?;
        }
        *connected = events;
        Ok(())
    }

    fn vector_fd(&self, vector: u16) -> Option<Arc<OwnedFd>> {
        self.connected().get(usize::from(vector)).cloned()
    }

    fn release(&self) {
        if let Err(error) = self.set_bus_master(false) {
            tracing::debug!(%error, "the drive goes as it is");
        }
        self.bar.detach();
        let mut open = self.open.write();
        *open = None;
    }

    fn acknowledge(&self, vector: u16) -> bool {
        let connected = self.connected();
        let event = connected.get(usize::from(vector));
        event.is_some_and(|event| sys::clear_event(event.as_fd()))
    }
}

impl Drop for VfioFunction {
    fn drop(&mut self) {
        if self.with(|_| Ok(())).is_err() {
            return;
        }
        // Closing the device also does this, and resets it. If its removal hangs in the kernel, the
        // drive must not access memory meanwhile.
        if let Err(error) = self.set_bus_master(false) {
            tracing::debug!(%error, "the drive goes as it is");
        }
    }
}

impl fmt::Debug for VfioFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioFunction")
            .field("address", &self.name)
            .field("register_bytes", &self.bar.len())
            .field("vectors", &self.vector_count)
            .finish_non_exhaustive()
    }
}

/// A region of a device's descriptor.
#[derive(Debug)]
struct Region {
    flags: u32,
    size: u64,
    offset: u64,
    /// Bytes that may be mapped, counted from the start of the region.
    mappable: u64,
}

impl Region {
    /// Returns how many bytes to map.
    fn mappable(&self) -> Result<usize, String> {
        const NEEDED: u32 = abi::VFIO_REGION_INFO_FLAG_MMAP
            | abi::VFIO_REGION_INFO_FLAG_READ
            | abi::VFIO_REGION_INFO_FLAG_WRITE;
        // The doorbells of the admin queue and of one I/O queue.
        let least = DOORBELLS + 16;
        if self.size < least {
            return Err(format!(
                "BAR 0 has {} bytes, a controller's registers take {least} at least; is the function in working order?",
                self.size
            ));
        }
        if self.flags & NEEDED != NEEDED || self.mappable < least {
            return Err(format!(
                "this kernel maps {} of its {} bytes of registers; that takes Linux 4.16 or later",
                self.mappable, self.size
            ));
        }
        Ok(self.mappable.min(REGISTERS_MAX) as usize)
    }

    fn read(info: &Argument) -> Self {
        let flags = info.u32(offset_of!(abi::vfio_region_info, flags));
        let size = info.u64(offset_of!(abi::vfio_region_info, size));
        let first = if flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0 {
            info.u32(offset_of!(abi::vfio_region_info, cap_offset))
        } else {
            0
        };
        let sparse = info.capability(first, abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        Self {
            flags,
            size,
            offset: info.u64(offset_of!(abi::vfio_region_info, offset)),
            mappable: sparse.map_or(size, |at| from_start(info, at)).min(size),
        }
    }
}

/// End in bytes of the sparse mmap area that starts at offset 0 of the region; 0: there is none.
fn from_start(info: &Argument, at: usize) -> u64 {
    let count = info.u32(at + offset_of!(abi::vfio_region_info_cap_sparse_mmap, nr_areas));
    let areas = at + size_of::<abi::vfio_region_info_cap_sparse_mmap>();
    let each = size_of::<abi::vfio_region_sparse_mmap_area>();
    (0..count as usize)
        .map(|index| areas + index * each)
        .take_while(|at| at + each <= info.len())
        .find(|&at| info.u64(at) == 0)
        .map_or(0, |at| info.u64(at + 8))
}

fn region(device: &OwnedFd, index: u32) -> io::Result<Region> {
    let size = size_of::<abi::vfio_region_info>();
    let info = sys::query(device.as_fd(), Structured::RegionInfo, size, |info| {
        info.set_u32(offset_of!(abi::vfio_region_info, index), index);
    })?;
    Ok(Region::read(&info))
}

/// Vectors of one kind that can be connected with descriptors.
fn irq_count(device: &OwnedFd, index: u32) -> io::Result<u32> {
    let size = size_of::<abi::vfio_irq_info>();
    let info = sys::query(device.as_fd(), Structured::IrqInfo, size, |info| {
        info.set_u32(offset_of!(abi::vfio_irq_info, index), index);
    })?;
    let flags = info.u32(offset_of!(abi::vfio_irq_info, flags));
    Ok(if flags & abi::VFIO_IRQ_INFO_EVENTFD != 0 {
        info.u32(offset_of!(abi::vfio_irq_info, count))
    } else {
        0
    })
}

/// Connects the first vectors of a kind to `events`; an empty list disconnects all.
fn set_irqs(device: &OwnedFd, index: u32, events: &[&OwnedFd]) -> io::Result<()> {
    let data = offset_of!(abi::vfio_irq_set, data);
    let mut set = Argument::new(data + 4 * events.len());
    let kind = if events.is_empty() {
        abi::VFIO_IRQ_SET_DATA_NONE
    } else {
        abi::VFIO_IRQ_SET_DATA_EVENTFD
    };
    set.set_u32(
        offset_of!(abi::vfio_irq_set, flags),
        kind | abi::VFIO_IRQ_SET_ACTION_TRIGGER,
    );
    set.set_u32(offset_of!(abi::vfio_irq_set, index), index);
    set.set_u32(offset_of!(abi::vfio_irq_set, count), events.len() as u32);
    for (at, event) in events.iter().enumerate() {
        set.set_u32(data + 4 * at, event.as_raw_fd() as u32);
    }
    sys::structured(device.as_fd(), Structured::SetIrqs, &mut set)
}

fn read_config(device: &OwnedFd, config: u64) -> io::Result<u16> {
    let mut bytes = [0; 2];
    match rustix::io::pread(device, &mut bytes, config + COMMAND)? {
        2 => Ok(u16::from_le_bytes(bytes)),
        read => Err(io::Error::other(format!("{read} bytes of 2 were read"))),
    }
}

fn write_config(device: &OwnedFd, config: u64, value: u16) -> io::Result<()> {
    match rustix::io::pwrite(device, &value.to_le_bytes(), config + COMMAND)? {
        2 => Ok(()),
        written => Err(io::Error::other(format!(
            "{written} bytes of 2 were written"
        ))),
    }
}

/// Enables register access, and disables legacy interrupts, which no code uses.
fn enable_memory(device: &OwnedFd, config: u64) -> io::Result<()> {
    let command = read_config(device, config)?;
    if command == GONE as u16 {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    write_config(device, config, command | MEMORY_SPACE | NO_INTX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(flags: u32, size: u64) -> Argument {
        let mut info = Argument::new(32 + 16 + 2 * 16);
        info.set_u32(4, flags);
        info.set_u64(16, size);
        info.set_u64(24, 1 << 40);
        info
    }

    const USABLE: u32 = 7;

    #[test]
    fn registers_that_can_be_mapped_whole() {
        let region = Region::read(&info(USABLE, 16 << 10));
        assert_eq!((region.offset, region.mappable()), (1 << 40, Ok(16 << 10)));
        let vast = Region::read(&info(USABLE, 1 << 30));
        assert_eq!(vast.mappable(), Ok(1 << 20));
    }

    /// Goal: if the kernel does not permit mapping the page of the interrupt table, the registers
    /// before it are still mapped.
    #[test]
    fn registers_that_can_be_mapped_in_parts() {
        let mut info = info(USABLE | abi::VFIO_REGION_INFO_FLAG_CAPS, 16 << 10);
        info.set_u32(12, 32);
        info.set_u32(32, abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP | 1 << 16);
        info.set_u32(40, 2);
        info.set_u64(48, 0x3000);
        info.set_u64(56, 0x1000);
        info.set_u64(64, 0);
        info.set_u64(72, 0x2000);
        assert_eq!(Region::read(&info).mappable(), Ok(0x2000));
        info.set_u64(72, 0x1000);
        let problem = Region::read(&info).mappable().unwrap_err();
        assert!(problem.contains("4096 of its 16384"), "{problem}");
    }

    #[test]
    fn invalid_register_regions() {
        let small = Region::read(&info(USABLE, 4096)).mappable().unwrap_err();
        assert!(small.contains("BAR 0 has 4096 bytes"), "{small}");
        let unmapped = Region::read(&info(3, 16 << 10)).mappable();
        assert!(unmapped.unwrap_err().contains("this kernel maps"));
    }
}
