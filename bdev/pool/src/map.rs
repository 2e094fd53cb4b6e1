//! The block map of one volume or snapshot, in memory, as the data path reads it: for each 64 KiB
//! of the volume, the disk space that has its data.
//!
//! Every core's queue to the volume (a *lane*) reads the map without a lock. Only the *keeper*,
//! the poller that owns the pool's metadata, changes it. So the map consists of atomics.
//!
//! ```text
//!   chunk   64 leaves (1 GiB), allocated when the volume is opened or grows
//!   leaf    256 places (16 MiB): unknown ─▶ empty ─▶ filled
//!   place   64 KiB of the volume, in four words of 64 bits:
//!           own unit and its granules │ second unit and its granules │ generations │ LSN
//! ```
//!
//! A *unit* is 64 KiB of the pool, and a *granule* is one 4 KiB block of it. A place reads each
//! granule from its own unit, from its second unit (older data, under a snapshot or clone), or as
//! zeroes. The *generation* of a unit says whether another volume or snapshot may share it. The
//! *LSN* is the number of the last log record that the entry includes.
//!
//! The keeper fills a leaf when a lane first asks for it: a map takes memory for the parts of the
//! volume that are in use. A leaf has a sequence number that is odd while the keeper writes. A lane
//! that reads an odd number, or two different ones, sends its request to the keeper instead.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use nacre_bdev::Claim;
use std::sync::OnceLock;

use nacre_bdev_pool_core::geometry::MAX_UNITS_PER_LEAF;
use nacre_bdev_pool_core::ids::{Lsn, VersionId};
use nacre_bdev_pool_core::map::{EXTERNAL_UNIT, Entry, Part};

/// Places of a leaf.
const PLACES: u64 = MAX_UNITS_PER_LEAF as u64;
/// Leaves of a chunk.
const LEAVES: u64 = 64;
/// Low bits of the first two words: the unit's number. The 16 bits above have its granules.
const UNIT_BITS: u32 = 36;
/// This bit of the first word marks an unreadable entry.
const DAMAGED: u64 = 1 << 63;
/// This bit of a part's word marks granules of the external device; their unit is 0.
const EXTERNAL: u64 = 1 << 62;

/// States of a leaf: not filled yet.
const UNKNOWN: u8 = 0;
/// No place of the leaf has data; it has no words.
const EMPTY: u8 = 1;
const FILLED: u8 = 2;

/// The value of [`LvolMap::mapped`] for a thick volume.
const ALL: u64 = u64::MAX;

/// The map of one volume or snapshot.
pub(crate) struct LvolMap {
    /// The volume or snapshot.
    pub version: VersionId,
    /// Distinguishes this map from later maps of the same version number. The keeper changes
    /// nothing for a lane that has an old map.
    pub serial: u64,
    /// Size of the volume in units of 64 KiB.
    units: AtomicU64,
    /// Places with data, or [`ALL`].
    mapped: AtomicU64,
    /// Units up to this generation may be shared with other versions: no write in place.
    floor: AtomicU64,
    /// Disks that a FLUSH of the volume must reach, one bit each: the disk with the log (bit 0),
    /// and those that lanes wrote to.
    disks: AtomicU64,
    /// The volume was deleted, or the pool closed.
    gone: AtomicBool,
    read_only: AtomicBool,
    /// The device that the external places of entries are on, while it is there.
    external: ArcSwapOption<Claim>,
    chunks: ArcSwap<Vec<Arc<Chunk>>>,
}

struct Chunk {
    leaves: [Leaf; LEAVES as usize],
}

#[derive(Default)]
struct Leaf {
    sequence: AtomicU64,
    state: AtomicU8,
    /// The last log record that an empty leaf includes.
    empty_since: AtomicU64,
    words: OnceLock<Box<[[AtomicU64; 4]]>>,
}

/// The result of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The leaf is not filled, or the keeper is changing it: send the request to the keeper.
    Unknown,
    /// The metadata of the place is unreadable: a read fails, and a write goes to the keeper.
    Damaged,
    Known {
        entry: Entry,
        /// Number of the last log record that the entry may include: a lane writes in place only
        /// when that record is settled. `Lsn::MAX` while the unit moves to another disk.
        lsn: Lsn,
    },
}

impl LvolMap {
    /// A map without a filled leaf. `units` is the size of the volume, `floor` the generation up
    /// to which other versions may share units.
    pub(crate) fn new(version: VersionId, serial: u64, units: u64, floor: u32) -> Self {
        let map = Self {
            version,
            serial,
            units: AtomicU64::new(0),
            mapped: AtomicU64::new(ALL),
            floor: AtomicU64::new(u64::from(floor)),
            disks: AtomicU64::new(1),
            gone: AtomicBool::new(false),
            read_only: AtomicBool::new(false),
            external: ArcSwapOption::default(),
            chunks: ArcSwap::default(),
        };
        map.set_units(units);
        map
    }

    /// Size of the volume in units of 64 KiB.
    pub(crate) fn units(&self) -> u64 {
        self.units.load(Ordering::SeqCst)
    }

    /// Places with data, filled leaves or not. `None`: the volume is thick.
    pub(crate) fn mapped(&self) -> Option<u64> {
        let mapped = self.mapped.load(Ordering::SeqCst);
        // A parent may have had more places than the volume.
        (mapped != ALL).then(|| mapped.min(self.units()))
    }

    /// Generation up to which other versions may share units. A lane writes in place only to units
    /// above it.
    pub(crate) fn floor(&self) -> u32 {
        self.floor.load(Ordering::SeqCst) as u32
    }

    /// The disk with the log, and the disks that lanes wrote to since the import of the pool, one
    /// bit each. A FLUSH of the volume must reach them.
    pub(crate) fn disks(&self) -> u64 {
        self.disks.load(Ordering::SeqCst)
    }

    /// True when the volume was deleted or the pool closed: all I/O fails.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// True when the version takes no writes.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }

    /// The external device of entries that a lane reads after this call and before another one with
    /// the same outcome.
    pub(crate) fn external(&self) -> Option<Arc<Claim>> {
        self.external.load_full()
    }

    /// The entry of a place; `Unknown` past the end.
    pub(crate) fn get(&self, place: u64) -> Seen {
        let chunks = self.chunks.load();
        let Some((leaf, at)) = find(&chunks, place) else {
            return Seen::Unknown;
        };
        let before = leaf.sequence.load(Ordering::SeqCst);
        if before % 2 == 1 {
            return Seen::Unknown;
        }
        let seen = match leaf.state.load(Ordering::SeqCst) {
            EMPTY => Seen::Known {
                entry: Entry::default(),
                lsn: 0,
            },
            FILLED => match leaf.words.get() {
                Some(words) => read(&words[at]),
                None => Seen::Unknown,
            },
            _ => Seen::Unknown,
        };
        if leaf.sequence.load(Ordering::SeqCst) == before {
            seen
        } else {
            Seen::Unknown
        }
    }

    /// The last log record that a leaf without data includes. `None`: the leaf of the place has
    /// data, or is unknown.
    pub(crate) fn empty_since(&self, place: u64) -> Option<Lsn> {
        let chunks = self.chunks.load();
        let (leaf, _) = find(&chunks, place)?;
        let is_empty = leaf.state.load(Ordering::SeqCst) == EMPTY;
        is_empty.then(|| leaf.empty_since.load(Ordering::SeqCst))
    }

    /// True when the keeper has filled the leaf of a place.
    pub(crate) fn is_loaded(&self, place: u64) -> bool {
        let chunks = self.chunks.load();
        find(&chunks, place).is_some_and(|(leaf, _)| leaf.state.load(Ordering::SeqCst) != UNKNOWN)
    }
}

/// Changes. Only the keeper calls them, except [`LvolMap::note_disk`], which lanes call.
impl LvolMap {
    /// `None`: the volume is thick.
    pub(crate) fn set_mapped(&self, places: Option<u64>) {
        self.mapped.store(places.unwrap_or(ALL), Ordering::SeqCst);
    }

    pub(crate) fn set_floor(&self, floor: u32) {
        self.floor.store(u64::from(floor), Ordering::SeqCst);
    }

    /// Adds `disk` (an index of the pool's disks, below 64) to the disks that a FLUSH must reach.
    /// Lanes call it before each write. The import of the pool has flushed all earlier writes.
    pub(crate) fn note_disk(&self, disk: usize) {
        if self.disks() >> disk & 1 == 0 {
            self.disks.fetch_or(1 << disk, Ordering::SeqCst);
        }
    }

    /// Returns true if that is another device than before. There is none while entries change to
    /// places of another one.
    pub(crate) fn set_external(&self, device: Option<&Arc<Claim>>) -> bool {
        let before = self.external.load_full();
        let is_same = before.as_ref().map(Arc::as_ptr) == device.map(Arc::as_ptr);
        if !is_same {
            self.external.store(device.cloned());
        }
        !is_same
    }

    pub(crate) fn set_read_only(&self) {
        self.read_only.store(true, Ordering::SeqCst);
    }

    /// Returns true if there was an external device, which the map gives up.
    pub(crate) fn set_gone(&self) -> bool {
        self.gone.store(true, Ordering::SeqCst);
        self.set_external(None)
    }

    /// Sets the size of the volume. Growth allocates chunks; a smaller size keeps them.
    pub(crate) fn set_units(&self, units: u64) {
        let needed = units.div_ceil(PLACES * LEAVES) as usize;
        let chunks = self.chunks.load();
        if chunks.len() < needed {
            let mut more: Vec<Arc<Chunk>> = chunks.iter().cloned().collect();
            more.resize_with(needed, || {
                Arc::new(Chunk {
                    leaves: std::array::from_fn(|_| Leaf::default()),
                })
            });
            self.chunks.store(Arc::new(more));
        }
        self.units.store(units, Ordering::SeqCst);
    }

    /// Fills the leaf of a place. `entry` returns the entry of each place of the leaf, `None` if it
    /// is unreadable, and the number of the last log record that it includes.
    pub(crate) fn load(&self, place: u64, entry: impl Fn(u64) -> (Option<Entry>, Lsn)) {
        let chunks = self.chunks.load();
        let Some((leaf, _)) = find(&chunks, place) else {
            return;
        };
        let first = place / PLACES * PLACES;
        let is_empty = |entry: Option<Entry>| entry.is_some_and(|entry| entry.is_empty());
        if leaf.words.get().is_none() && (first..first + PLACES).all(|at| is_empty(entry(at).0)) {
            leaf.empty_since.store(entry(first).1, Ordering::SeqCst);
            leaf.state.store(EMPTY, Ordering::SeqCst);
            return;
        }
        self.change(leaf, |words| {
            for (at, words) in words.iter().enumerate() {
                let (entry, lsn) = entry(first + at as u64);
                write(words, entry, lsn);
            }
        });
    }

    /// Replaces the entry of one place, if its leaf is filled; `None` marks it unreadable. `lsn` is
    /// the last log record that the entry includes.
    pub(crate) fn set(&self, place: u64, lsn: Lsn, entry: Option<Entry>) {
        let chunks = self.chunks.load();
        let Some((leaf, at)) = find(&chunks, place) else {
            return;
        };
        let is_empty = entry.is_some_and(|entry| entry.is_empty());
        match leaf.state.load(Ordering::SeqCst) {
            UNKNOWN => {}
            EMPTY if is_empty => leaf.empty_since.store(lsn, Ordering::SeqCst),
            _ => self.change(leaf, |words| write(&words[at], entry, lsn)),
        }
    }

    /// The first place of every filled leaf.
    pub(crate) fn loaded(&self) -> Vec<u64> {
        let chunks = self.chunks.load();
        let leaves = chunks.iter().flat_map(|chunk| &chunk.leaves).enumerate();
        leaves
            .filter(|(_, leaf)| leaf.state.load(Ordering::SeqCst) != UNKNOWN)
            .map(|(at, _)| at as u64 * PLACES)
            .collect()
    }

    /// Begins (`is_changing`) or ends a change of a leaf, so that lanes see the keeper at work.
    #[cfg(test)]
    pub(crate) fn hold(&self, place: u64, is_changing: bool) {
        let chunks = self.chunks.load();
        let (leaf, _) = find(&chunks, place).expect("a place of the volume");
        let before = leaf.sequence.fetch_add(1, Ordering::SeqCst);
        assert_eq!(before % 2 == 0, is_changing);
    }

    fn change(&self, leaf: &Leaf, change: impl FnOnce(&[[AtomicU64; 4]])) {
        let words = leaf.words.get_or_init(|| {
            let empty = || [const { AtomicU64::new(0) }; 4];
            (0..PLACES).map(|_| empty()).collect()
        });
        leaf.sequence.fetch_add(1, Ordering::SeqCst);
        change(words);
        leaf.state.store(FILLED, Ordering::SeqCst);
        leaf.sequence.fetch_add(1, Ordering::SeqCst);
    }
}

fn find(chunks: &[Arc<Chunk>], place: u64) -> Option<(&Leaf, usize)> {
    let leaf = place / PLACES;
    let chunk = chunks.get((leaf / LEAVES) as usize)?;
    Some((
        &chunk.leaves[(leaf % LEAVES) as usize],
        (place % PLACES) as usize,
    ))
}

fn read(words: &[AtomicU64; 4]) -> Seen {
    let [own, second, generation, lsn] = [0, 1, 2, 3].map(|at| words[at].load(Ordering::SeqCst));
    if own & DAMAGED != 0 {
        return Seen::Damaged;
    }
    let part = |word: u64, generation: u64| Part {
        unit: if word & EXTERNAL == 0 {
            word & ((1 << UNIT_BITS) - 1)
        } else {
            EXTERNAL_UNIT
        },
        generation: generation as u32,
        granules: (word >> UNIT_BITS) as u16,
    };
    Seen::Known {
        entry: Entry {
            own: part(own, generation & 0xFFFF_FFFF),
            second: part(second, generation >> 32),
        },
        lsn,
    }
}

fn write(words: &[AtomicU64; 4], entry: Option<Entry>, lsn: Lsn) {
    let values = match entry {
        None => [DAMAGED, 0, 0, lsn],
        Some(Entry { own, second }) => {
            let unit = |part: Part| match part.unit {
                EXTERNAL_UNIT => EXTERNAL,
                unit => unit,
            };
            let word = |part: Part| unit(part) | u64::from(part.granules) << UNIT_BITS;
            let generations = u64::from(own.generation) | u64::from(second.generation) << 32;
            [word(own), word(second), generations, lsn]
        }
    };
    for (word, value) in words.iter().zip(values) {
        word.store(value, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(unit: u64, generation: u32, granules: u16) -> Part {
        Part {
            unit,
            generation,
            granules,
        }
    }

    /// A leaf is unknown, then empty, then has words; growth keeps it.
    #[test]
    fn a_leaf_is_loaded_changed_and_kept_by_growth() {
        let map = LvolMap::new(VersionId(1), 1, 10, 0);
        assert_eq!(map.get(3), Seen::Unknown);
        map.set(3, 7, Some(Entry::default()));
        assert_eq!(map.get(3), Seen::Unknown);
        map.load(3, |_| (Some(Entry::default()), 7));
        assert_eq!(
            (map.empty_since(200), map.empty_since(300)),
            (Some(7), None)
        );
        // Data that came and went before the keeper looked.
        map.set(4, 8, Some(Entry::default()));
        assert_eq!(map.empty_since(200), Some(8));
        let entry = Entry {
            own: part((1 << 36) - 1, (1 << 24) - 1, 0xFFF0),
            second: part(5, 2, 0x000F),
        };
        map.set(3, 9, Some(entry));
        assert_eq!(map.get(3), Seen::Known { entry, lsn: 9 });
        let external = Entry {
            own: part(7, 3, 0x00FF),
            second: Part::external(2, 0xFF00),
        };
        map.set(5, 9, Some(external));
        let seen = Seen::Known {
            entry: external,
            lsn: 9,
        };
        assert_eq!(map.get(5), seen);
        map.set(4, 10, None);
        assert_eq!(map.get(4), Seen::Damaged);
        assert_eq!(map.get(1 << 20), Seen::Unknown);
        map.set_units(2 << 20);
        assert_eq!(map.get(3), Seen::Known { entry, lsn: 9 });
        assert_eq!(map.loaded(), [0]);
    }
}
