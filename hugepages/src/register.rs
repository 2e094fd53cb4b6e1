//! Regions: ranges of DMA memory that a device registers once. A buffer finds its registration key
//! in O(1).
//!
//! ```text
//!   mapping  |<------- 1 GiB ------->|<------- 1 GiB ------->|<-- rest -->|
//!   region            id 7                   id 71              id 135
//!   grain    |...|...|...|...|...|...|...|...|...|...|...|...|...|  16 MiB each
//!   key[slot]      0: lkey/rkey  1: IOVA   …one per device that registered, noted in every grain
//! ```
//!
//! The id of a region is the number of its first grain, counted over all mappings of the process.
//!
//! A device with a smaller registration limit registers pieces of a region ([`Piece`]), each with
//! its own key and id. Keys are stored per grain; a grain never crosses a piece boundary. So one
//! shift and one load find the key of an address, for every device and piece length.
//!
//! A device takes one of [`DEVICE_SLOTS`] slots, the same in every arena, and defines the meaning
//! of its keys: lkey and rkey of a protection domain, the IOVA of the region's first byte, the
//! index of a fixed buffer. This module only stores them.

use std::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Most devices (protection domains, containers, rings) that can register a region at once.
pub const DEVICE_SLOTS: usize = 8;

/// The largest region: the limit of one io_uring fixed buffer, and below the registration limit of
/// RDMA devices.
pub const REGION_MAX: usize = 1 << REGION_SHIFT;
const REGION_SHIFT: u32 = 30;

/// The shortest piece, except at the end of the memory. Buffers of up to half a grain never cross a
/// piece boundary ([`crate::Pool`]).
pub const GRAIN: usize = 1 << GRAIN_SHIFT;
const GRAIN_SHIFT: u32 = 24;

/// Bytes per registration: a power of two from [`GRAIN`] to [`REGION_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece(usize);

impl Piece {
    pub const LONGEST: Self = Self(REGION_MAX);

    /// The largest piece of at most `bytes`; `None` if `bytes` is less than a grain.
    pub fn at_most(bytes: u64) -> Option<Self> {
        let bytes = bytes.min(REGION_MAX as u64) as usize;
        (bytes >= GRAIN).then(|| Self(1 << bytes.ilog2()))
    }

    pub fn bytes(self) -> usize {
        self.0
    }
}

/// Identifies a region for the lifetime of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// A region, a piece of one, or a pool's part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    pub id: RegionId,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; dereferencing them needs an `unsafe` block elsewhere.
unsafe impl Send for RegionInfo {}
// SAFETY: as above; there is nothing to change through a shared reference.
unsafe impl Sync for RegionInfo {}

impl RegionInfo {
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length of the region in bytes: never 0, at most [`REGION_MAX`].
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

pub type HookError = Box<dyn Error + Send + Sync>;

/// A device that must register memory before it may touch it.
pub trait RegisterHook: Send + Sync {
    /// Registers the region with the device. Returns the key, which [`crate::Buf::key`] will
    /// return. `u64::MAX` is not a valid key.
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError>;

    /// Undoes `register`. The memory is still mapped, and may be unmapped right after.
    fn unregister(&self, region: &RegionInfo, key: u64);
}

/// The reason why memory could not be registered with a device.
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

/// Stands for "not registered", so that a key lookup is one load.
const NO_KEY: u64 = u64::MAX;

/// The regions of one mapping, and the devices that know them.
pub(crate) struct Regions {
    base: NonNull<u8>,
    len: usize,
    /// The number of the first grain. A region or piece has the number of its first grain.
    first_id: u32,
    /// Key of the piece that contains the grain, indexed by grain and device slot.
    keys: Box<[[AtomicU64; DEVICE_SLOTS]]>,
    known: Mutex<[Option<Known>; DEVICE_SLOTS]>,
}

/// A device that registered the memory, with its piece length.
struct Known {
    hook: Arc<dyn RegisterHook>,
    piece: Piece,
}

// SAFETY: `base` is only compared with, never dereferenced; everything else is `Send` and `Sync`.
unsafe impl Send for Regions {}
// SAFETY: as above; keys are atomic and hooks are behind a lock.
unsafe impl Sync for Regions {}

impl Regions {
    /// The regions of a mapping of `len` bytes at `base`.
    pub(crate) fn new(base: NonNull<u8>, len: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let grains = len.div_ceil(GRAIN);
        let unknown = |_| [const { AtomicU64::new(NO_KEY) }; DEVICE_SLOTS];
        Self {
            base,
            len,
            first_id: NEXT.fetch_add(grains as u32, Ordering::Relaxed),
            keys: (0..grains).map(unknown).collect(),
            known: Mutex::default(),
        }
    }

    /// The index of the region that contains `at`, an address in the mapping.
    #[inline]
    pub(crate) fn index(&self, at: *const u8) -> usize {
        self.offset(at) >> REGION_SHIFT
    }

    #[inline]
    fn offset(&self, at: *const u8) -> usize {
        at.addr() - self.base.addr().get()
    }

    /// The key for `len` bytes at `at`, an address in the mapping. `None` if no single key of the
    /// device covers all of them.
    #[inline]
    pub(crate) fn key(&self, at: *const u8, len: usize, slot: usize) -> Option<u64> {
        let start = self.offset(at);
        let (first, last) = (
            start >> GRAIN_SHIFT,
            (start + len.max(1) - 1) >> GRAIN_SHIFT,
        );
        // An empty range at the end of the mapping lies behind the last grain.
        let key = self.keys.get(first)?.get(slot)?.load(Ordering::Acquire);
        // Each registration has its own key, so equal keys at both ends mean one registration.
        let whole = first == last || self.keys[last][slot].load(Ordering::Acquire) == key;
        (key != NO_KEY && whole).then_some(key)
    }

    /// [`Regions::key`] plus the offset of `at` in its region, for a device that registered whole
    /// regions.
    #[inline]
    pub(crate) fn address(&self, at: *const u8, len: usize, slot: usize) -> Option<u64> {
        let key = self.key(at, len, slot)?;
        Some(key + self.region_offset(at) as u64)
    }

    #[inline]
    pub(crate) fn region_offset(&self, at: *const u8) -> usize {
        self.offset(at) & (REGION_MAX - 1)
    }

    pub(crate) fn info(&self, index: usize) -> RegionInfo {
        self.piece(Piece::LONGEST, index)
    }

    pub(crate) fn all(&self) -> Vec<RegionInfo> {
        self.pieces(Piece::LONGEST).collect()
    }

    fn pieces(&self, piece: Piece) -> impl Iterator<Item = RegionInfo> {
        let count = self.len.div_ceil(piece.bytes());
        (0..count).map(move |index| self.piece(piece, index))
    }

    fn piece(&self, piece: Piece, index: usize) -> RegionInfo {
        let start = index * piece.bytes();
        RegionInfo {
            id: RegionId(self.first_id + (start >> GRAIN_SHIFT) as u32),
            base: offset(self.base, start),
            len: piece.bytes().min(self.len - start),
        }
    }

    /// The grains of a piece.
    fn grains(&self, of: &RegionInfo) -> &[[AtomicU64; DEVICE_SLOTS]] {
        let first = self.offset(of.as_ptr()) >> GRAIN_SHIFT;
        &self.keys[first..first + of.len.div_ceil(GRAIN)]
    }

    /// Splits `len` bytes at `at` at the region boundaries.
    pub(crate) fn parts(&self, at: NonNull<u8>, len: usize) -> Vec<RegionInfo> {
        let start = at.addr().get() - self.base.addr().get();
        let clip = |region: RegionInfo| {
            let first = self.offset(region.as_ptr());
            let from = start.max(first);
            let to = (start + len).min(first + region.len);
            (from < to).then(|| RegionInfo {
                base: offset(self.base, from),
                len: to - from,
                ..region
            })
        };
        self.pieces(Piece::LONGEST).filter_map(clip).collect()
    }

    pub(crate) fn is_free(&self, slot: usize) -> bool {
        self.known().get(slot).is_some_and(Option::is_none)
    }

    /// Registers all pieces, or none.
    pub(crate) fn register(
        &self,
        slot: usize,
        hook: Arc<dyn RegisterHook>,
        piece: Piece,
    ) -> Result<(), RegisterError> {
        let mut known = self.known();
        let place = known
            .get_mut(slot)
            .ok_or(RegisterError::NoSuchSlot { slot })?;
        if place.is_some() {
            return Err(RegisterError::SlotTaken { slot });
        }
        // Publish keys only when all exist, so that no reader sees a partial registration, not even
        // after a hook panics.
        let mut keys = Vec::with_capacity(self.len.div_ceil(piece.bytes()));
        for info in self.pieces(piece) {
            let RegionInfo { id, len, .. } = info;
            let error = match hook.register(&info) {
                Ok(NO_KEY) => {
                    hook.unregister(&info, NO_KEY);
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
            self.pieces(piece)
                .zip(keys)
                .for_each(|(known, key)| hook.unregister(&known, key));
            return Err(error);
        }
        for (info, key) in self.pieces(piece).zip(keys) {
            for grain in self.grains(&info) {
                grain[slot].store(key, Ordering::Release);
            }
        }
        *place = Some(Known { hook, piece });
        Ok(())
    }

    pub(crate) fn unregister(&self, slot: usize) {
        if let Some(Known { hook, piece }) = self.known().get_mut(slot).and_then(Option::take) {
            for info in self.pieces(piece) {
                // Clear the key first: later lookups must not return a key that is becoming
                // invalid.
                let mut key = NO_KEY;
                for grain in self.grains(&info) {
                    key = grain[slot].swap(NO_KEY, Ordering::AcqRel);
                }
                hook.unregister(&info, key);
            }
        }
    }

    pub(crate) fn unregister_all(&self) {
        (0..DEVICE_SLOTS).for_each(|slot| self.unregister(slot));
    }

    /// The pieces that the device in `slot` registered, with their keys.
    pub(crate) fn registered(&self, slot: usize) -> Vec<(RegionInfo, u64)> {
        let known = self.known();
        let Some(Some(Known { piece, .. })) = known.get(slot) else {
            return Vec::new();
        };
        let key = |info: &RegionInfo| self.grains(info)[0][slot].load(Ordering::Acquire);
        let all = self.pieces(*piece);
        all.map(|info| (info, key(&info))).collect()
    }

    fn known(&self) -> MutexGuard<'_, [Option<Known>; DEVICE_SLOTS]> {
        // A hook that panicked changed neither keys nor slots.
        self.known.lock()
    }
}

/// The address `bytes` after `base`, in the same mapping. Not dereferenced.
fn offset(base: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    base.map_addr(|a| {
        a.checked_add(bytes)
            .expect("a mapping does not wrap around")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that numbers its registrations, and refuses after `capacity`.
    #[derive(Default)]
    struct Device {
        known: Mutex<Vec<(RegionId, u64)>>,
        capacity: usize,
        first: u64,
    }

    impl Device {
        fn new(capacity: usize, first: u64) -> Arc<Self> {
            Arc::new(Self {
                known: Mutex::default(),
                capacity,
                first,
            })
        }

        fn count(&self) -> usize {
            self.known.lock().len()
        }
    }

    impl RegisterHook for Device {
        fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
            let mut known = self.known.lock();
            if known.len() == self.capacity {
                return Err("full".into());
            }
            let key = self.first + known.len() as u64;
            known.push((region.id, key));
            Ok(key)
        }

        fn unregister(&self, region: &RegionInfo, key: u64) {
            let mut known = self.known.lock();
            let at = known
                .iter()
                .position(|&k| k == (region.id, key))
                .expect("a registered region");
            known.remove(at);
        }
    }

    /// Regions of an address range that the test never accesses; only the numbers matter.
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
        assert_eq!(regions.key(at(base, 0), 1, 0), None);

        regions
            .register(3, Device::new(9, 100), Piece::LONGEST)
            .unwrap();
        for (offset, key) in [
            (0, 100),
            (REGION_MAX - 1, 100),
            (REGION_MAX, 101),
            (2 * REGION_MAX, 102),
        ] {
            assert_eq!(regions.key(at(base, offset), 1, 3), Some(key));
        }
        assert_eq!(regions.key(at(base, 0), 1, 2), None);
        assert_eq!(regions.key(at(base, 0), 1, DEVICE_SLOTS), None);
    }

    /// Goal: devices with different limits register the same memory in different pieces, each with
    /// its id and key. A key is returned only for a range that it covers completely. Method: both
    /// sides of each boundary.
    #[test]
    fn pieces() {
        let (base, regions) = regions(REGION_MAX + 2 * GRAIN + 4096);
        let short = Device::new(99, 1000);
        let piece = Piece::at_most(2 * GRAIN as u64 + 1).unwrap();
        regions.register(0, short.clone(), piece).unwrap();
        regions
            .register(1, Device::new(9, 100), Piece::LONGEST)
            .unwrap();
        let per_region = (REGION_MAX / piece.bytes()) as u64;
        assert_eq!(short.count() as u64, per_region + 2);
        let key = |offset, len| regions.key(at(base, offset), len, 0);
        for (offset, expected) in [
            (0, 1000),
            (piece.bytes() - 1, 1000),
            (piece.bytes(), 1001),
            (REGION_MAX - 1, 1000 + per_region - 1),
            (REGION_MAX, 1000 + per_region),
            (REGION_MAX + 2 * GRAIN, 1001 + per_region),
        ] {
            assert_eq!(key(offset, 1), Some(expected), "{offset}");
        }
        // A range may cross grain boundaries inside a piece.
        assert_eq!(key(0, piece.bytes()), Some(1000));
        assert_eq!(key(GRAIN - 1, 2), Some(1000));
        assert_eq!(key(piece.bytes() - 1, 2), None);
        assert_eq!(key(piece.bytes(), 0), Some(1001));
        assert_eq!(key(REGION_MAX + 3 * GRAIN, 0), None);
        assert_eq!(
            regions.key(at(base, piece.bytes() - 1), 2, 1),
            Some(100),
            "the other device has longer pieces"
        );
        let pieces = regions.registered(0);
        let mut known = short.known.lock().clone();
        let listed: Vec<_> = pieces.iter().map(|(info, key)| (info.id, *key)).collect();
        assert_eq!(listed, known);
        known.sort_unstable();
        known.dedup_by_key(|(id, _)| *id);
        assert_eq!(known.len(), pieces.len(), "each piece has its own id");
        let sum: usize = pieces.iter().map(|(info, _)| info.len()).sum();
        assert_eq!(sum, REGION_MAX + 2 * GRAIN + 4096);
        regions.unregister(0);
        assert_eq!((short.count(), key(0, 1)), (0, None));
        assert_eq!(
            (regions.registered(0), regions.registered(1).len()),
            (vec![], 2)
        );
        // A failure half way leaves nothing registered.
        let small = Device::new(3, 0);
        assert!(regions.register(0, small.clone(), piece).is_err());
        assert_eq!((small.count(), key(0, 1)), (0, None));
    }

    /// Goal: a piece is a power of two, at most the device's limit and at least what buffers need.
    #[test]
    fn lengths_of_pieces() {
        let at_most = |bytes| Piece::at_most(bytes).map(Piece::bytes);
        assert_eq!(at_most(GRAIN as u64 - 1), None);
        assert_eq!(at_most(GRAIN as u64), Some(GRAIN));
        assert_eq!(at_most(2 * GRAIN as u64 - 1), Some(GRAIN));
        assert_eq!(at_most(REGION_MAX as u64 - 1), Some(REGION_MAX / 2));
        assert_eq!(at_most(REGION_MAX as u64), Some(REGION_MAX));
        assert_eq!(at_most(u64::MAX), Some(REGION_MAX));
    }

    /// Goal: registration is all or nothing. Method: a device that refuses the third region.
    #[test]
    fn a_refusal_undoes_earlier_registrations() {
        let (base, regions) = regions(3 * REGION_MAX);
        let device = Device::new(2, 0);
        let error = regions
            .register(0, device.clone(), Piece::LONGEST)
            .unwrap_err();
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
        assert_eq!(regions.key(at(base, 0), 1, 0), None);
        assert!(regions.is_free(0));
    }

    /// Goal: the reserved key for "not registered" is refused, not stored.
    #[test]
    fn the_reserved_key_is_refused() {
        let (_, regions) = regions(4096);
        let device = Device::new(2, NO_KEY);
        assert!(matches!(
            regions.register(0, device.clone(), Piece::LONGEST),
            Err(RegisterError::ReservedKey { .. })
        ));
        assert_eq!(device.count(), 0);
    }

    /// Goal: slots are exclusive, bounded and reusable.
    #[test]
    fn slots_are_taken_and_given_back() {
        let (base, regions) = regions(4096);
        let device = Device::new(9, 0);
        regions.register(7, device.clone(), Piece::LONGEST).unwrap();
        let again = regions
            .register(7, Device::new(9, 0), Piece::LONGEST)
            .unwrap_err();
        assert!(matches!(again, RegisterError::SlotTaken { slot: 7 }));
        let beyond = regions
            .register(8, device.clone(), Piece::LONGEST)
            .unwrap_err();
        assert!(matches!(beyond, RegisterError::NoSuchSlot { slot: 8 }));

        regions.unregister(7);
        assert_eq!((device.count(), regions.key(at(base, 0), 1, 7)), (0, None));
        regions
            .register(7, Device::new(9, 5), Piece::LONGEST)
            .unwrap();
        assert_eq!(regions.key(at(base, 9), 1, 7), Some(5));
    }

    /// Goal: a memory range is split at region boundaries and nowhere else.
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
