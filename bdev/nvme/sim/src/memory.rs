//! The memory that the simulated controller can access: the registered regions, at their own bus
//! addresses.
//!
//! The only file of this crate with unsafe code: a controller copies to and from memory by address,
//! without references.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nacre_hugepages::{HookError, RegionInfo, RegisterHook};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// First assigned bus address: not 0, and none at which Linux usually maps memory of a process.
const FIRST: u64 = 0x40_0000_0000;
/// Unit of address assignment. At least one unit stays free behind each region.
const STEP: u64 = 2 << 20;

/// An access to an address outside of all regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {address:#x} are not registered")]
pub(crate) struct UnmappedAddress {
    pub address: u64,
    pub len: usize,
}

/// Translates bus addresses to addresses of this process, for one controller or several that share
/// it.
///
/// Copies to and from a region hold the table's lock for reading, and removing a region holds it
/// for writing. After `unregister` returned, the controller no longer accesses that memory.
pub struct Iommu {
    table: RwLock<Table>,
    outside: AtomicU64,
    most: AtomicU64,
}

struct Table {
    next: u64,
    /// Registered regions, keyed by their first address.
    regions: BTreeMap<u64, Region>,
}

struct Region {
    base: usize,
    len: usize,
}

impl Iommu {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self {
            table: RwLock::new(Table {
                next: FIRST,
                regions: BTreeMap::new(),
            }),
            outside: AtomicU64::new(0),
            most: AtomicU64::new(u64::MAX),
        }
    }

    /// Number of accesses outside of all regions since creation.
    pub fn outside(&self) -> u64 {
        self.outside.load(Ordering::Relaxed)
    }

    /// Number of registered regions.
    pub fn regions(&self) -> usize {
        self.read_table().regions.len()
    }

    /// Makes registrations fail beyond this number of regions.
    pub fn limit_regions(&self, most: u64) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Copies from memory.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), UnmappedAddress> {
        let table = self.read_table();
        let from = self.find(&table, address, into.len())?;
        // SAFETY: the region is registered now, as the table is locked: its owner keeps it mapped
        // until `unregister` returns, which needs the table. `into` is a unique reference, so no
        // part of that memory.
        unsafe { copy(from.cast_const(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies to memory.
    pub(crate) fn write(&self, address: u64, from: &[u8]) -> Result<(), UnmappedAddress> {
        let table = self.read_table();
        let to = self.find(&table, address, from.len())?;
        // SAFETY: as in `read`. A device may write registered memory at any time: its owner looks
        // at bytes of a command only after completion, and at all else through atomics and routines
        // that the compiler does not look into.
        unsafe { copy(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Loads the dword at an aligned address. Later loads are at least as new.
    pub(crate) fn load(&self, address: u64) -> Result<u32, UnmappedAddress> {
        let table = self.read_table();
        Ok(self.dword(&table, address)?.load(Ordering::Acquire))
    }

    /// Stores a dword after all earlier writes.
    pub(crate) fn store(&self, address: u64, value: u32) -> Result<(), UnmappedAddress> {
        let table = self.read_table();
        self.dword(&table, address)?.store(value, Ordering::Release);
        Ok(())
    }

    fn dword<'a>(&self, table: &'a Table, address: u64) -> Result<&'a AtomicU32, UnmappedAddress> {
        let at = self.find(table, address, 4)?.cast::<u32>();
        assert!(at.is_aligned(), "a dword at {address:#x} is not aligned");
        // SAFETY: mapped as in `read`, for as long as the table is locked, which `'a` ends before;
        // aligned (just checked). The other side uses these bytes through atomics or opaque
        // routines only.
        Ok(unsafe { AtomicU32::from_ptr(at) })
    }

    fn find(&self, table: &Table, address: u64, len: usize) -> Result<*mut u8, UnmappedAddress> {
        let found = table
            .regions
            .range(..=address)
            .next_back()
            .and_then(|(first, region)| {
                let offset = usize::try_from(address - first).ok()?;
                (offset.checked_add(len)? <= region.len).then(|| region.base + offset)
            });
        match found {
            Some(at) => Ok(std::ptr::with_exposed_provenance_mut(at)),
            None => {
                self.outside.fetch_add(1, Ordering::Relaxed);
                Err(UnmappedAddress { address, len })
            }
        }
    }

    fn read_table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read()
    }

    fn write_table(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write()
    }
}

impl RegisterHook for Iommu {
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
        let mut table = self.write_table();
        let most = self.most.load(Ordering::Relaxed);
        if table.regions.len() as u64 >= most {
            return Err(format!("the simulated IOMMU takes {most} regions").into());
        }
        let address = table.next;
        // An address is never reused: a stale address finds no region.
        table.next += (region.len() as u64).next_multiple_of(STEP) + STEP;
        let base = region.as_ptr().expose_provenance();
        let len = region.len();
        table.regions.insert(address, Region { base, len });
        Ok(address)
    }

    fn unregister(&self, _region: &RegionInfo, key: u64) {
        self.write_table().regions.remove(&key);
    }
}

/// Copies by a routine that is opaque to the compiler. The driver may read the same bytes
/// meanwhile, as it polls completion entries; it then sees a mix of old and new bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    type Move =
        unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;
    let routine: Move = black_box(libc::memmove);
    // SAFETY: upheld by the caller.
    unsafe { routine(to.cast(), from.cast(), len) };
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nacre_hugepages::{Arena, ArenaOptions, HugepagePolicy};

    use super::*;

    /// Goal: bytes move both ways through the assigned address, through no other, and not after the
    /// memory was unregistered.
    #[test]
    fn only_registered_memory_is_accessible() {
        let iommu = Arc::new(Iommu::new());
        let arena = Arena::allocate(ArenaOptions {
            hugepages: HugepagePolicy::Off,
            ..ArenaOptions::new(64 << 10)
        })
        .unwrap();
        arena.register(2, iommu.clone()).unwrap();
        let [(region, address)] = arena.registered(2)[..] else {
            panic!("one region")
        };
        assert_ne!(address, region.as_ptr().addr() as u64);
        iommu.write(address + 8, &[1, 2, 3, 4]).unwrap();
        let mut bytes = [0; 4];
        iommu.read(address + 8, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        assert_eq!(iommu.load(address + 8), Ok(0x0403_0201));
        iommu.store(address + 8, 7).unwrap();
        assert_eq!(iommu.load(address + 8), Ok(7));
        let end = address + region.len() as u64;
        for (address, len) in [(address - 1, 1), (end, 1), (end - 1, 2), (u64::MAX, 4)] {
            let mut bytes = [0; 4];
            assert!(iommu.read(address, &mut bytes[..len]).is_err());
        }
        assert_eq!((iommu.outside(), iommu.regions()), (4, 1));
        arena.unregister(2);
        assert!(iommu.write(address, &[0]).is_err());
        assert_eq!((iommu.outside(), iommu.regions()), (5, 0));
    }
}
