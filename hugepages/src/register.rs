//! Regions: stretches of DMA memory that a device learns once, and whose key a buffer finds in O(1).
//!
//! ```text
//!   mapping  |<------- 1 GiB ------->|<------- 1 GiB ------->|<-- rest -->|
//!   region            id 7                    id 8               id 9
//!   key[slot]      0: lkey/rkey  1: IOVA   …one per device that registered
//! ```
//!
//! A device takes one of [`DEVICE_SLOTS`] slots, the same in every arena, and gives each region a
//! key of its own meaning: lkey and rkey of a protection domain, the IOVA of the region's first
//! byte, the index of a fixed buffer. This module does not know what a key means.

use std::error::Error;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many devices (protection domains, containers, rings) can know a region at once.
pub const DEVICE_SLOTS: usize = 8;

/// No region is longer: the most that one fixed buffer of io_uring may be, and within what RDMA
/// devices register at once.
pub const REGION_MAX: usize = 1 << REGION_SHIFT;
const REGION_SHIFT: u32 = 30;

/// Names a region for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// A region, or the part of one that belongs to a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    pub id: RegionId,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length, which nobody dereferences without an `unsafe` of their own.
unsafe impl Send for RegionInfo {}
// SAFETY: as above; there is nothing to change through a shared reference.
unsafe impl Sync for RegionInfo {}

impl RegionInfo {
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Never 0, at most [`REGION_MAX`].
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

pub type HookError = Box<dyn Error + Send + Sync>;

/// A device that must be told about memory before it may touch it.
pub trait RegisterHook: Send + Sync {
    /// Makes the region known to the device; the key is what [`crate::Buf::key`] will say.
    /// `u64::MAX` is not a key.
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError>;

    /// Undoes `register`. The memory is still mapped, and may be unmapped right after.
    fn unregister(&self, region: &RegionInfo, key: u64);
}

/// Why a device does not know a region now.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("there is no device slot {slot}; there are {DEVICE_SLOTS}")]
    NoSuchSlot { slot: usize },
    #[error("device slot {slot} is taken")]
    SlotTaken { slot: usize },
    #[error("all {DEVICE_SLOTS} device slots are taken")]
    NoFreeSlot,
    #[error("the device gave region {} the reserved key {:#x}", region.0, NO_KEY)]
    ReservedKey { region: RegionId },
    #[error("the device refused region {} of {len} bytes", region.0)]
    Device {
        region: RegionId,
        len: usize,
        source: HookError,
    },
}

/// Stands for "not registered", so that looking a key up is one load.
const NO_KEY: u64 = u64::MAX;

struct Region {
    info: RegionInfo,
    keys: [AtomicU64; DEVICE_SLOTS],
}

/// The regions of one mapping, and the devices that know them.
pub(crate) struct Regions {
    base: NonNull<u8>,
    regions: Box<[Region]>,
    hooks: Mutex<[Option<Arc<dyn RegisterHook>>; DEVICE_SLOTS]>,
}

// SAFETY: `base` is only compared with, never dereferenced; everything else is `Send` and `Sync`.
unsafe impl Send for Regions {}
// SAFETY: as above; keys are atomic and hooks are behind a lock.
unsafe impl Sync for Regions {}

impl Regions {
    /// Of a mapping of `len` bytes at `base`.
    pub fn new(base: NonNull<u8>, len: usize) -> Regions {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let count = len.div_ceil(REGION_MAX);
        let region = |index: usize| {
            let start = index << REGION_SHIFT;
            let info = RegionInfo {
                id: RegionId(NEXT.fetch_add(1, Ordering::Relaxed)),
                base: offset(base, start),
                len: REGION_MAX.min(len - start),
            };
            Region {
                info,
                keys: [const { AtomicU64::new(NO_KEY) }; DEVICE_SLOTS],
            }
        };
        Regions {
            base,
            regions: (0..count).map(region).collect(),
            hooks: Mutex::default(),
        }
    }

    /// The index of the region that `at`, an address in the mapping, is in.
    #[inline]
    pub fn index(&self, at: *const u8) -> usize {
        (at.addr() - self.base.addr().get()) >> REGION_SHIFT
    }

    #[inline]
    pub fn key(&self, at: *const u8, slot: usize) -> Option<u64> {
        let key = self.regions[self.index(at)]
            .keys
            .get(slot)?
            .load(Ordering::Acquire);
        (key != NO_KEY).then_some(key)
    }

    pub fn info(&self, index: usize) -> RegionInfo {
        self.regions[index].info
    }

    pub fn all(&self) -> Vec<RegionInfo> {
        self.regions.iter().map(|r| r.info).collect()
    }

    /// The parts of regions that `len` bytes at `at` are made of.
    pub fn parts(&self, at: NonNull<u8>, len: usize) -> Vec<RegionInfo> {
        let start = at.addr().get() - self.base.addr().get();
        let clip = |region: &Region| {
            let first = region.info.base.addr().get() - self.base.addr().get();
            let from = start.max(first);
            let to = (start + len).min(first + region.info.len);
            (from < to).then(|| RegionInfo {
                base: offset(self.base, from),
                len: to - from,
                ..region.info
            })
        };
        self.regions.iter().filter_map(clip).collect()
    }

    pub fn is_free(&self, slot: usize) -> bool {
        self.hooks().get(slot).is_some_and(Option::is_none)
    }

    /// Registers every region, or none.
    pub fn register(&self, slot: usize, hook: Arc<dyn RegisterHook>) -> Result<(), RegisterError> {
        let mut hooks = self.hooks();
        let place = hooks
            .get_mut(slot)
            .ok_or(RegisterError::NoSuchSlot { slot })?;
        if place.is_some() {
            return Err(RegisterError::SlotTaken { slot });
        }
        // Keys are published only when all are there, so nobody sees a device half informed, not
        // even after a hook that panicked.
        let mut keys = Vec::with_capacity(self.regions.len());
        for region in &self.regions {
            let RegionInfo { id, len, .. } = region.info;
            let error = match hook.register(&region.info) {
                Ok(NO_KEY) => {
                    hook.unregister(&region.info, NO_KEY);
                    RegisterError::ReservedKey { region: id }
                }
                Ok(key) => {
                    keys.push(key);
                    continue;
                }
                Err(source) => RegisterError::Device {
                    region: id,
                    len,
                    source,
                },
            };
            self.regions
                .iter()
                .zip(keys)
                .for_each(|(known, key)| hook.unregister(&known.info, key));
            return Err(error);
        }
        for (region, key) in self.regions.iter().zip(keys) {
            region.keys[slot].store(key, Ordering::Release);
        }
        *place = Some(hook);
        Ok(())
    }

    pub fn unregister(&self, slot: usize) {
        if let Some(hook) = self.hooks().get_mut(slot).and_then(Option::take) {
            for region in &self.regions {
                // The key goes first: who looks from now on does not find what will be invalid.
                let key = region.keys[slot].swap(NO_KEY, Ordering::AcqRel);
                hook.unregister(&region.info, key);
            }
        }
    }

    pub fn unregister_all(&self) {
        (0..DEVICE_SLOTS).for_each(|slot| self.unregister(slot));
    }

    fn hooks(&self) -> MutexGuard<'_, [Option<Arc<dyn RegisterHook>>; DEVICE_SLOTS]> {
        // A hook that panicked changed neither keys nor places.
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address `bytes` after `base`, in the same mapping. Computed, not dereferenced.
fn offset(base: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    base.map_addr(|a| {
        a.checked_add(bytes)
            .expect("a mapping does not wrap around")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that numbers what it knows, and refuses after `capacity`.
    #[derive(Default)]
    struct Device {
        known: Mutex<Vec<(RegionId, u64)>>,
        capacity: usize,
        first: u64,
    }

    impl Device {
        fn new(capacity: usize, first: u64) -> Arc<Device> {
            Arc::new(Device {
                known: Mutex::default(),
                capacity,
                first,
            })
        }

        fn count(&self) -> usize {
            self.known.lock().unwrap().len()
        }
    }

    impl RegisterHook for Device {
        fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
            let mut known = self.known.lock().unwrap();
            if known.len() == self.capacity {
                return Err("full".into());
            }
            let key = self.first + known.len() as u64;
            known.push((region.id, key));
            Ok(key)
        }

        fn unregister(&self, region: &RegionInfo, key: u64) {
            let mut known = self.known.lock().unwrap();
            let at = known
                .iter()
                .position(|&k| k == (region.id, key))
                .expect("only what was registered");
            known.remove(at);
        }
    }

    /// Regions of an address range that nobody touches: only numbers are looked at.
    fn regions(len: usize) -> (NonNull<u8>, Regions) {
        let base = NonNull::new(std::ptr::without_provenance_mut::<u8>(1 << 40)).unwrap();
        (base, Regions::new(base, len))
    }

    fn at(base: NonNull<u8>, offset: usize) -> *const u8 {
        base.as_ptr().wrapping_add(offset)
    }

    /// Goal: every address finds its region and its key. Method: both sides of each boundary.
    #[test]
    fn addresses_find_their_key() {
        let (base, regions) = regions(2 * REGION_MAX + 4096);
        let lens: Vec<usize> = regions.all().iter().map(RegionInfo::len).collect();
        assert_eq!(lens, [REGION_MAX, REGION_MAX, 4096]);
        assert_eq!(regions.key(at(base, 0), 0), None);

        regions.register(3, Device::new(9, 100)).unwrap();
        for (offset, key) in [
            (0, 100),
            (REGION_MAX - 1, 100),
            (REGION_MAX, 101),
            (2 * REGION_MAX, 102),
        ] {
            assert_eq!(regions.key(at(base, offset), 3), Some(key));
        }
        assert_eq!(regions.key(at(base, 0), 2), None);
        assert_eq!(regions.key(at(base, 0), DEVICE_SLOTS), None);
    }

    /// Goal: all regions or none. Method: a device that refuses the third.
    #[test]
    fn a_refusal_undoes_what_was_done() {
        let (base, regions) = regions(3 * REGION_MAX);
        let device = Device::new(2, 0);
        let error = regions.register(0, device.clone()).unwrap_err();
        assert!(
            matches!(
                error,
                RegisterError::Device {
                    len: REGION_MAX,
                    ..
                }
            ),
            "{error}"
        );
        assert_eq!(device.count(), 0);
        assert_eq!(regions.key(at(base, 0), 0), None);
        assert!(regions.is_free(0));
    }

    /// Goal: the key that stands for "none" is refused, not stored.
    #[test]
    fn the_reserved_key_is_refused() {
        let (_, regions) = regions(4096);
        let device = Device::new(2, NO_KEY);
        assert!(matches!(
            regions.register(0, device.clone()),
            Err(RegisterError::ReservedKey { .. })
        ));
        assert_eq!(device.count(), 0);
    }

    /// Goal: slots are exclusive, bounded and reusable.
    #[test]
    fn slots_are_taken_and_given_back() {
        let (base, regions) = regions(4096);
        let device = Device::new(9, 0);
        regions.register(7, device.clone()).unwrap();
        let again = regions.register(7, Device::new(9, 0)).unwrap_err();
        assert!(matches!(again, RegisterError::SlotTaken { slot: 7 }));
        let beyond = regions.register(8, device.clone()).unwrap_err();
        assert!(matches!(beyond, RegisterError::NoSuchSlot { slot: 8 }));

        regions.unregister(7);
        assert_eq!((device.count(), regions.key(at(base, 0), 7)), (0, None));
        regions.register(7, Device::new(9, 5)).unwrap();
        assert_eq!(regions.key(at(base, 9), 7), Some(5));
    }

    /// Goal: a stretch of memory is cut where regions meet, and nowhere else.
    #[test]
    fn parts_are_clipped_to_the_stretch() {
        let (base, regions) = regions(3 * REGION_MAX);
        let start = NonNull::new(at(base, REGION_MAX - 8192).cast_mut()).unwrap();
        let parts = regions.parts(start, REGION_MAX + 8192 + 512);
        let lens: Vec<(RegionId, usize)> = parts.iter().map(|p| (p.id, p.len)).collect();
        let ids: Vec<RegionId> = regions.all().iter().map(|r| r.id).collect();
        assert_eq!(lens, [(ids[0], 8192), (ids[1], REGION_MAX), (ids[2], 512)]);
        assert_eq!(parts[0].base, start);
        assert_eq!(regions.parts(start, 8192).len(), 1);
    }
}
