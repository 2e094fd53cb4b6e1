//! Regions: ranges of DMA memory that a device registers once, and whose key a buffer finds in
//! O(1).
//!
//! ```text
//!   mapping  |<------- 1 GiB ------->|<------- 1 GiB ------->|<-- rest -->|
//!   region            id 7                    id 8               id 9
//!   grain    |...|...|...|...|...|...|...|...|...|...|...|...|...|  16 MiB each
//!   key[slot]      0: lkey/rkey  1: IOVA   …one per device that registered, noted in every grain
//! ```
//!
//! A device that takes less than a region at once registers pieces of it ([`Piece`]), each with a
//! key and a number of its own. Keys are noted per grain, which is a part of one piece however long
//! the pieces are. So an address finds its key by one shift and one load, for all devices, each
//! with pieces of its own.
//!
//! A device takes one of [`DEVICE_SLOTS`] slots, the same in every arena, and gives each region a
//! key of its own meaning: lkey and rkey of a protection domain, the IOVA of the region's first
//! byte, the index of a fixed buffer. This module does not interpret keys.

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

/// No piece is shorter, unless memory ends with it. Buffers of up to half of it lie in one piece
/// ([`crate::Pool`]).
pub const GRAIN: usize = 1 << GRAIN_SHIFT;
const GRAIN_SHIFT: u32 = 24;

/// How much one registration covers: a power of two from [`GRAIN`] to [`REGION_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece(usize);

impl Piece {
    pub const LONGEST: Piece = Piece(REGION_MAX);

    /// The longest of at most `bytes`; `None`: even a grain is longer.
    pub fn at_most(bytes: u64) -> Option<Piece> {
        let bytes = bytes.min(REGION_MAX as u64) as usize;
        (bytes >= GRAIN).then(|| Piece(1 << bytes.ilog2()))
    }

    pub fn bytes(self) -> usize {
        self.0
    }
}

/// Names a region for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// A region, a piece of one, or the part of one that belongs to a pool.
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

    /// Never 0, at most [`REGION_MAX`].
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

pub type HookError = Box<dyn Error + Send + Sync>;

/// A device that must register memory before it may touch it.
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

/// The regions of one mapping, and the devices that know them.
pub(crate) struct Regions {
    base: NonNull<u8>,
    len: usize,
    /// The number of the first grain. What begins with a grain, region or piece, has its number.
    first_id: u32,
    /// By grain and slot: the key of the piece that the grain is in.
    keys: Box<[[AtomicU64; DEVICE_SLOTS]]>,
    known: Mutex<[Option<Known>; DEVICE_SLOTS]>,
}

/// A device that registered the memory, in pieces of this length.
struct Known {
    hook: Arc<dyn RegisterHook>,
    piece: Piece,
}

// SAFETY: `base` is only compared with, never dereferenced; everything else is `Send` and `Sync`.
unsafe impl Send for Regions {}
// SAFETY: as above; keys are atomic and hooks are behind a lock.
unsafe impl Sync for Regions {}

impl Regions {
    /// Of a mapping of `len` bytes at `base`.
    pub fn new(base: NonNull<u8>, len: usize) -> Regions {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let grains = len.div_ceil(GRAIN);
        let unknown = |_| [const { AtomicU64::new(NO_KEY) }; DEVICE_SLOTS];
        Regions {
            base,
            len,
            first_id: NEXT.fetch_add(grains as u32, Ordering::Relaxed),
            keys: (0..grains).map(unknown).collect(),
            known: Mutex::default(),
        }
    }

    /// The index of the region that `at`, an address in the mapping, is in.
    #[inline]
    pub fn index(&self, at: *const u8) -> usize {
        self.offset(at) >> REGION_SHIFT
    }

    #[inline]
    fn offset(&self, at: *const u8) -> usize {
        at.addr() - self.base.addr().get()
    }

    /// The key of `len` bytes at `at`, in the mapping. `None` if the device does not know all of
    /// them by one key.
    #[inline]
    pub fn key(&self, at: *const u8, len: usize, slot: usize) -> Option<u64> {
        let start = self.offset(at);
        let (first, last) = (
            start >> GRAIN_SHIFT,
            (start + len.max(1) - 1) >> GRAIN_SHIFT,
        );
        // Nothing at the end of the mapping is behind the last grain.
        let key = self.keys.get(first)?.get(slot)?.load(Ordering::Acquire);
        // Two registrations have two keys: the same at both ends is the same between them.
        let whole = first == last || self.keys[last][slot].load(Ordering::Acquire) == key;
        (key != NO_KEY && whole).then_some(key)
    }

    /// The key as [`Regions::key`] returns it, for a device that registered whole regions, plus the
    /// offset of `at` in its region.
    #[inline]
    pub fn address(&self, at: *const u8, len: usize, slot: usize) -> Option<u64> {
        let key = self.key(at, len, slot)?;
        Some(key + self.region_offset(at) as u64)
    }

    #[inline]
    pub fn region_offset(&self, at: *const u8) -> usize {
        self.offset(at) & (REGION_MAX - 1)
    }

    pub fn info(&self, index: usize) -> RegionInfo {
        self.piece(Piece::LONGEST, index)
    }

    pub fn all(&self) -> Vec<RegionInfo> {
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

    /// The grains that a piece is made of.
    fn grains(&self, of: &RegionInfo) -> &[[AtomicU64; DEVICE_SLOTS]] {
        let first = self.offset(of.as_ptr()) >> GRAIN_SHIFT;
        &self.keys[first..first + of.len.div_ceil(GRAIN)]
    }

    /// The parts of regions that `len` bytes at `at` are made of.
    pub fn parts(&self, at: NonNull<u8>, len: usize) -> Vec<RegionInfo> {
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

    pub fn is_free(&self, slot: usize) -> bool {
        self.known().get(slot).is_some_and(Option::is_none)
    }

    /// Registers everything in such pieces, or nothing.
    pub fn register(
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
        // Keys are published only when all exist, so that no reader sees a partial registration,
        // not even after a hook that panicked.
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

    pub fn unregister(&self, slot: usize) {
        if let Some(Known { hook, piece }) = self.known().get_mut(slot).and_then(Option::take) {
            for info in self.pieces(piece) {
                // The key goes first: later lookups must not find a key that becomes invalid.
                let mut key = NO_KEY;
                for grain in self.grains(&info) {
                    key = grain[slot].swap(NO_KEY, Ordering::AcqRel);
                }
                hook.unregister(&info, key);
            }
        }
    }

    pub fn unregister_all(&self) {
        (0..DEVICE_SLOTS).for_each(|slot| self.unregister(slot));
    }

    /// The pieces that the device in `slot` registered, with their keys.
    pub fn registered(&self, slot: usize) -> Vec<(RegionInfo, u64)> {
        let known = self.known();
        let Some(Some(Known { piece, .. })) = known.get(slot) else {
            return Vec::new();
        };
        let key = |info: &RegionInfo| self.grains(info)[0][slot].load(Ordering::Acquire);
        let all = self.pieces(*piece);
        all.map(|info| (info, key(&info))).collect()
    }

    fn known(&self) -> MutexGuard<'_, [Option<Known>; DEVICE_SLOTS]> {
        // A hook that panicked changed neither keys nor places.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// A device that numbers its registrations, and refuses after `capacity`.
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

    /// Regions of an address range that the test never touches: it only uses the numbers.
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

    /// Goal: devices with limits of their own know the same memory in pieces of their own, each
    /// with its number and its key, and no range has a key that is not right for all of it. Method:
    /// both sides of each boundary.
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
        // Within a piece there are ends of grains, but not of keys.
        assert_eq!(key(0, piece.bytes()), Some(1000));
        assert_eq!(key(GRAIN - 1, 2), Some(1000));
        assert_eq!(key(piece.bytes() - 1, 2), None);
        assert_eq!(key(piece.bytes(), 0), Some(1001));
        assert_eq!(key(REGION_MAX + 3 * GRAIN, 0), None);
        assert_eq!(
            regions.key(at(base, piece.bytes() - 1), 2, 1),
            Some(100),
            "the other device's are longer"
        );
        let told = regions.registered(0);
        let mut known = short.known.lock().unwrap().clone();
        let listed: Vec<_> = told.iter().map(|(info, key)| (info.id, *key)).collect();
        assert_eq!(listed, known);
        known.sort_unstable();
        known.dedup_by_key(|(id, _)| *id);
        assert_eq!(known.len(), told.len(), "a number of its own");
        let sum: usize = told.iter().map(|(info, _)| info.len()).sum();
        assert_eq!(sum, REGION_MAX + 2 * GRAIN + 4096);
        regions.unregister(0);
        assert_eq!((short.count(), key(0, 1)), (0, None));
        assert_eq!(
            (regions.registered(0), regions.registered(1).len()),
            (vec![], 2)
        );
        // Refused half way: as if nothing had been.
        let small = Device::new(3, 0);
        assert!(regions.register(0, small.clone(), piece).is_err());
        assert_eq!((small.count(), key(0, 1)), (0, None));
    }

    /// Goal: a piece is a power of two, at most what the device takes and at least what buffers
    /// need.
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

    /// Goal: all regions or none. Method: a device that refuses the third.
    #[test]
    fn a_refusal_undoes_what_was_done() {
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

    /// Goal: the key that stands for "none" is refused, not stored.
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
