//! The VFIO container of this process: one DMA address space for all its drives.
//!
//! ```text
//!   Container ── Group ── device …      opened with the first drive, closed with the last
//!      │  iovas: free addresses
//!      └─ Hook (weak) ◀── memory: registered once, whatever the number of drives
//! ```
//!
//! Closing a container removes its mappings, so memory that is unregistered later needs no
//! unmapping.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use nacre_hugepages::{HookError, RegionInfo, RegisterHook};
use parking_lot::Mutex;
use vfio_bindings::bindings::vfio as abi;

use crate::error::VfioError;
use crate::iova::{Iovas, Range};
use crate::sys::{self, Argument, Plain, Structured};

/// Why memory cannot be registered with a drive.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    #[error(
        "{bytes} bytes cannot be pinned: RLIMIT_MEMLOCK is {limit} bytes and {locked} are locked already; `ulimit -l {}` \
         before starting, systemd: `LimitMEMLOCK=infinity`, container: `--ulimit memlock=-1`, or CAP_IPC_LOCK",
        locked.saturating_add(*bytes).div_ceil(1024)
    )]
    Memlock { bytes: u64, limit: u64, locked: u64 },
    #[error("{bytes} bytes cannot be pinned, the kernel has no memory for that: {source}")]
    NoMemory { bytes: u64, source: io::Error },
    #[error(
        "VFIO has no entry left for {bytes} bytes; raise their number: \
         `echo 262144 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit`, before the drives are attached"
    )]
    Entries { bytes: u64 },
    #[error(
        "no address is left for {bytes} bytes among those that the IOMMU translates: {}; give Nacre less memory \
         (`nacre doctor` says how many bits of address there are)",
        ranges(usable)
    )]
    NoAddress { bytes: u64, usable: Vec<Range> },
    #[error(
        "{bytes} bytes at {at:#x} are not whole pages of the IOMMU, whose smallest has {page} bytes"
    )]
    NotPages { at: u64, bytes: u64, page: u64 },
    #[error("all drives were detached meanwhile")]
    NoDrive,
    #[error("{bytes} bytes cannot be mapped for drives")]
    Map { bytes: u64, source: io::Error },
}

fn ranges(usable: &[Range]) -> String {
    let text = |range: &Range| format!("{:#x}-{:#x}", range.start(), range.end());
    usable.iter().map(text).collect::<Vec<_>>().join(", ")
}

pub(crate) struct Container {
    fd: OwnedFd,
    /// The smallest page of the IOMMU, and the unit of memory.
    page: u64,
    iovas: Mutex<Iovas>,
    /// Open groups with their device nodes. A group has one descriptor for all its drives.
    groups: Mutex<Vec<(String, Weak<Group>)>>,
}

/// An IOMMU group in a container; leaves it when the group's last drive is dropped.
#[derive(Debug)]
pub(crate) struct Group {
    fd: OwnedFd,
}

impl Group {
    pub(crate) fn device(&self, address: &str) -> io::Result<OwnedFd> {
        sys::device(self.fd.as_fd(), address)
    }
}

/// The drive that a group is opened for, for errors.
pub(crate) struct GroupNode<'a> {
    pub address: &'a str,
    /// `/dev/vfio`.
    pub folder: &'a Path,
    pub node: &'a str,
    /// Names the process that has the group open, and members that block it.
    pub user: &'a dyn Fn() -> String,
    pub members: &'a dyn Fn() -> String,
}

impl GroupNode<'_> {
    fn step(&self, what: &'static str) -> impl FnOnce(io::Error) -> VfioError {
        let address = self.address.to_owned();
        move |source| VfioError::Step {
            address,
            what,
            source,
        }
    }

    fn open(&self, path: PathBuf) -> Result<OwnedFd, VfioError> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path);
        opened
            .map(OwnedFd::from)
            .map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => VfioError::NoNode { path },
                io::ErrorKind::PermissionDenied => VfioError::NotPermitted { path, source },
                io::ErrorKind::ResourceBusy => VfioError::GroupBusy {
                    address: self.address.to_owned(),
                    group: self.node.to_owned(),
                    by: (self.user)(),
                },
                _ => self.step("opening its group")(source),
            })
    }
}

impl Container {
    /// Creates a container with its first group: without a group it has no IOMMU.
    pub(crate) fn new(place: &GroupNode<'_>) -> Result<(Arc<Self>, Arc<Group>), VfioError> {
        let fd = place.open(place.folder.join("vfio"))?;
        let version = sys::plain(fd.as_fd(), Plain::ApiVersion)
            .map_err(place.step("asking for VFIO's version"))?;
        if version != abi::VFIO_API_VERSION as i32 {
            return Err(VfioError::Version { version });
        }
        let type1 = Plain::CheckExtension(abi::VFIO_TYPE1v2_IOMMU);
        if !sys::plain(fd.as_fd(), type1).is_ok_and(|there| there == 1) {
            return Err(VfioError::NoType1);
        }
        let group = enter(&fd, place)?;
        sys::plain(fd.as_fd(), Plain::SetIommu(abi::VFIO_TYPE1v2_IOMMU))
            .map_err(place.step("giving the container an IOMMU"))?;
        let (page, usable) =
            limits(&fd).map_err(place.step("asking the IOMMU for its abilities"))?;
        let group = Arc::new(group);
        let container = Self {
            fd,
            page,
            iovas: Mutex::new(Iovas::new(&usable)),
            groups: Mutex::new(vec![(place.node.to_owned(), Arc::downgrade(&group))]),
        };
        Ok((Arc::new(container), group))
    }

    /// Returns the group, and opens it if necessary.
    pub(crate) fn group(&self, place: &GroupNode<'_>) -> Result<Arc<Group>, VfioError> {
        let mut groups = self.groups.lock();
        groups.retain(|(_, group)| group.strong_count() > 0);
        let known = groups.iter().find(|(node, _)| node == place.node);
        if let Some(group) = known.and_then(|(_, group)| group.upgrade()) {
            return Ok(group);
        }
        let group = Arc::new(enter(&self.fd, place)?);
        let (_, usable) =
            limits(&self.fd).map_err(place.step("asking the IOMMU for its abilities"))?;
        self.iovas.lock().restrict(&usable);
        groups.push((place.node.to_owned(), Arc::downgrade(&group)));
        Ok(group)
    }

    fn map(&self, region: &RegionInfo) -> Result<u64, DmaError> {
        let at = region.as_ptr().addr() as u64;
        // The rest of the memory's last page belongs to the same mapping, or is unused.
        let bytes = (region.len() as u64).next_multiple_of(self.page);
        if !at.is_multiple_of(self.page) {
            let page = self.page;
            return Err(DmaError::NotPages { at, bytes, page });
        }
        let mut iovas = self.iovas.lock();
        let Some(iova) = iovas.take(bytes, self.page) else {
            let usable = iovas.usable().to_vec();
            return Err(DmaError::NoAddress { bytes, usable });
        };
        drop(iovas);
        let mut map = Argument::new(size_of::<abi::vfio_iommu_type1_dma_map>());
        map.set_u32(
            offset_of!(abi::vfio_iommu_type1_dma_map, flags),
            abi::VFIO_DMA_MAP_FLAG_READ | abi::VFIO_DMA_MAP_FLAG_WRITE,
        );
        map.set_u64(offset_of!(abi::vfio_iommu_type1_dma_map, vaddr), at);
        map.set_u64(offset_of!(abi::vfio_iommu_type1_dma_map, iova), iova);
        map.set_u64(offset_of!(abi::vfio_iommu_type1_dma_map, size), bytes);
        let mut mapped = sys::structured(self.fd.as_fd(), Structured::MapDma, &mut map);
        // This process may raise its soft limit on locked memory to the hard limit.
        if is(&mapped, libc::ENOMEM) && raise_memlock() {
            mapped = sys::structured(self.fd.as_fd(), Structured::MapDma, &mut map);
        }
        mapped.map(|()| iova).map_err(|source| {
            self.iovas.lock().give(iova, bytes);
            refusal(bytes, source)
        })
    }

    fn unmap(&self, region: &RegionInfo, iova: u64) {
        let bytes = (region.len() as u64).next_multiple_of(self.page);
        let mut unmap = Argument::new(size_of::<abi::vfio_iommu_type1_dma_unmap>());
        unmap.set_u64(offset_of!(abi::vfio_iommu_type1_dma_unmap, iova), iova);
        unmap.set_u64(offset_of!(abi::vfio_iommu_type1_dma_unmap, size), bytes);
        match sys::structured(self.fd.as_fd(), Structured::UnmapDma, &mut unmap) {
            Ok(()) => self.iovas.lock().give(iova, bytes),
            // The address stays reserved: a drive may still access the memory there.
            Err(error) => tracing::error!(iova, bytes, %error, "memory stays mapped for drives"),
        }
    }
}

impl fmt::Debug for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Container({:?})", self.fd)
    }
}

/// Registers memory with a container, as long as the container exists.
#[derive(Debug)]
pub(crate) struct Hook(pub Weak<Container>);

impl RegisterHook for Hook {
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
        let container = self.0.upgrade().ok_or(DmaError::NoDrive)?;
        Ok(container.map(region)?)
    }

    fn unregister(&self, region: &RegionInfo, key: u64) {
        if let Some(container) = self.0.upgrade() {
            container.unmap(region, key);
        }
    }
}

fn enter(container: &OwnedFd, place: &GroupNode<'_>) -> Result<Group, VfioError> {
    let fd = place.open(place.folder.join(place.node))?;
    let size = size_of::<abi::vfio_group_status>();
    let status = sys::query(fd.as_fd(), Structured::GroupStatus, size, |_| ())
        .map_err(place.step("asking for its group's state"))?;
    let flags = status.u32(offset_of!(abi::vfio_group_status, flags));
    if flags & abi::VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err(VfioError::NotViable {
            address: place.address.to_owned(),
            group: place.node.to_owned(),
            members: (place.members)(),
        });
    }
    sys::set_container(fd.as_fd(), container.as_fd()).map_err(|source| {
        match source.raw_os_error() {
            // The group's IOMMU cannot use the container's addresses.
            Some(libc::EINVAL | libc::EMEDIUMTYPE | libc::EADDRINUSE) => VfioError::Addresses {
                address: place.address.to_owned(),
            },
            _ => place.step("putting its group into the container")(source),
        }
    })?;
    Ok(Group { fd })
}

/// Reads the smallest page, and the usable address ranges.
fn limits(container: &OwnedFd) -> io::Result<(u64, Vec<Range>)> {
    let size = size_of::<abi::vfio_iommu_type1_info>();
    let info = sys::query(container.as_fd(), Structured::IommuInfo, size, |_| ())?;
    Ok(read_limits(&info))
}

fn read_limits(info: &Argument) -> (u64, Vec<Range>) {
    let flags = info.u32(offset_of!(abi::vfio_iommu_type1_info, flags));
    let sizes = info.u64(offset_of!(abi::vfio_iommu_type1_info, iova_pgsizes));
    let page = if flags & abi::VFIO_IOMMU_INFO_PGSIZES != 0 && sizes != 0 {
        1 << sizes.trailing_zeros()
    } else {
        rustix::param::page_size() as u64
    };
    let first = if flags & abi::VFIO_IOMMU_INFO_CAPS != 0 {
        info.u32(offset_of!(abi::vfio_iommu_type1_info, cap_offset))
    } else {
        0
    };
    let Some(at) = info.capability(first, abi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) else {
        // Before Linux 5.4: assume the minimum of all machines, without the range of interrupt
        // messages on x86.
        return (page, vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]);
    };
    let count = info.u32(at + offset_of!(abi::vfio_iommu_type1_info_cap_iova_range, nr_iovas));
    let ranges = at + size_of::<abi::vfio_iommu_type1_info_cap_iova_range>();
    let each = size_of::<abi::vfio_iova_range>();
    let usable = (0..count as usize)
        .map(|index| ranges + index * each)
        .take_while(|at| at + each <= info.len())
        .map(|at| info.u64(at)..=info.u64(at + 8))
        .collect();
    (page, usable)
}

fn is(result: &io::Result<()>, code: i32) -> bool {
    matches!(result, Err(error) if error.raw_os_error() == Some(code))
}

/// Raises the soft limit on locked memory to the hard limit. Returns true if it was raised.
fn raise_memlock() -> bool {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Memlock);
    if limit.current.is_none() || limit.current == limit.maximum {
        return false;
    }
    limit.current = limit.maximum;
    setrlimit(Resource::Memlock, limit).is_ok()
}

fn refusal(bytes: u64, source: io::Error) -> DmaError {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match (source.raw_os_error(), limit) {
        (Some(libc::ENOMEM), Some(limit)) => DmaError::Memlock {
            bytes,
            limit,
            locked: locked(),
        },
        (Some(libc::ENOMEM), None) => DmaError::NoMemory { bytes, source },
        (Some(libc::ENOSPC), _) => DmaError::Entries { bytes },
        _ => DmaError::Map { bytes, source },
    }
}

/// Bytes of memory that count towards the limit now; 0: unknown.
fn locked() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    status
        .lines()
        .find(|line| line.starts_with("VmLck:"))
        .and_then(kib)
        .unwrap_or(0)
        .saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: limits are parsed in the kernel's format. Method: a reply built according to
    /// linux/vfio.h.
    #[test]
    fn the_iommus_limits() {
        let mut info = Argument::new(24 + 16 + 2 * 16);
        info.set_u32(4, abi::VFIO_IOMMU_INFO_PGSIZES | abi::VFIO_IOMMU_INFO_CAPS);
        info.set_u64(8, 0x4020_1000);
        info.set_u32(16, 24);
        info.set_u32(24, abi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE | 1 << 16);
        info.set_u32(32, 2);
        info.set_u64(40, 0);
        info.set_u64(48, 0xfedf_ffff);
        info.set_u64(56, 0xfef0_0000);
        info.set_u64(64, (1 << 39) - 1);
        let usable = vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];
        assert_eq!(read_limits(&info), (4096, usable.clone()));
        // A reply that claims more ranges than it has.
        info.set_u32(32, 9);
        assert_eq!(read_limits(&info), (4096, usable.clone()));
        // An old kernel.
        let (page, old) = read_limits(&Argument::new(24));
        assert_eq!((page, old), (rustix::param::page_size() as u64, usable));
    }

    /// Goal: refusals name the numbers and the remedy.
    #[test]
    fn refusals_of_memory() {
        let text = |code| refusal(4096, io::Error::from_raw_os_error(code)).to_string();
        assert!(text(libc::ENOSPC).contains("dma_entry_limit"));
        assert!(text(libc::EFAULT).contains("4096 bytes"));
        assert!(text(libc::ENOMEM).contains("4096 bytes cannot be pinned"));
        let memlock = DmaError::Memlock {
            bytes: 1 << 20,
            limit: 65_536,
            locked: 4096,
        };
        let text = memlock.to_string();
        for part in [
            "1048576",
            "65536",
            "4096",
            "`ulimit -l 1028`",
            "LimitMEMLOCK",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// Goal: a machine with 39 address bits gets no higher address, and the error lists the usable
    /// ranges.
    #[test]
    fn few_bits_of_address() {
        let usable = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];
        let mut iovas = Iovas::new(&usable);
        let mut bytes = 0;
        while let Some(at) = iovas.take(8 << 30, 4096) {
            assert!(at + (8 << 30) <= 1 << 39, "{at:#x}");
            bytes += 8u64 << 30;
        }
        assert!(bytes >= 480 << 30, "{bytes:#x}");
        let usable = iovas.usable().to_vec();
        let text = DmaError::NoAddress {
            bytes: 8 << 30,
            usable,
        }
        .to_string();
        for part in ["8589934592 bytes", "0xfef00000-0x7fffffffff", "doctor"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// Goal: memory that outlives the drives causes no error, and a new registration is refused
    /// with the reason.
    #[test]
    fn a_hook_without_a_container() {
        let hook: Arc<dyn RegisterHook> = Arc::new(Hook(Weak::new()));
        let options = nacre_hugepages::ArenaOptions {
            hugepages: nacre_hugepages::HugepagePolicy::Off,
            ..nacre_hugepages::ArenaOptions::new(4096)
        };
        let arena = nacre_hugepages::Arena::allocate(options).unwrap();
        let error = arena.register(0, Arc::clone(&hook)).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "all drives were detached meanwhile");
        hook.unregister(&arena.regions()[0], 4096);
    }
}
