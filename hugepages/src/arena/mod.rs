//! Arenas: DMA memory on the largest available pages, divided into slices with one owner each.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::ArenaError;
use crate::mapping::Mapping;
use crate::pages::{PageKind, base_page_size, human};
use crate::plan::{ArenaOptions, Plan, Purpose, check_lock, explain, plan};
use crate::register::{DEVICE_SLOTS, Piece, RegionInfo, RegisterError, RegisterHook};
use crate::system::{Facts, System};

/// DMA memory in one mapping, on the requested NUMA node if there is one. Clones share the memory.
/// It is unmapped when the last clone, slice, pool and buffer of it are dropped.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<ArenaInner>,
}

struct ArenaInner {
    mapping: Arc<Mapping>,
    /// Bytes carved so far.
    carved: AtomicUsize,
    report: ArenaReport,
}

/// Slices start at multiples of this: what PRPs, O_DIRECT and fixed buffers all accept.
pub(crate) const SLICE_ALIGN: usize = 4096;

impl Arena {
    /// Allocates memory on the best available pages that [`ArenaOptions::hugepages`] allows.
    ///
    /// # Errors
    /// If `options` has no bytes, or requires a page size, node or lock that this machine cannot
    /// provide, or if there is not enough memory.
    pub fn allocate(options: ArenaOptions) -> Result<Self, ArenaError> {
        let (mapping, report) = allocate(&options, Purpose::Dma)?;
        let inner = ArenaInner {
            mapping: Arc::new(mapping),
            carved: AtomicUsize::new(0),
            report,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The kind of pages of the arena, and the reasons why they are not better, with remedies.
    pub fn report(&self) -> &ArenaReport {
        &self.inner.report
    }

    pub fn len(&self) -> usize {
        self.inner.mapping.len()
    }

    #[expect(
        clippy::missing_const_for_fn,
        reason = "always false, asked for by convention"
    )]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes not carved yet.
    pub fn remaining(&self) -> usize {
        self.len() - self.inner.carved.load(Ordering::Relaxed)
    }

    /// Carves the next `bytes`, rounded up to 4 KiB, for one owner. Carving is final: dropping the
    /// slice does not return its bytes.
    pub fn carve(&self, bytes: usize) -> Result<ArenaSlice, CarveError> {
        let short = |there| CarveError {
            asked: bytes,
            there,
        };
        let taken = bytes
            .checked_next_multiple_of(SLICE_ALIGN)
            .ok_or_else(|| short(self.remaining()))?;
        let end = |start: usize| start.checked_add(taken).filter(|&end| end <= self.len());
        let start = self
            .inner
            .carved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, end)
            .map_err(|start| short(self.len() - start))?;
        // SAFETY: `start <= len`, so the address is inside the mapping or one past it.
        let base = unsafe { self.inner.mapping.base().add(start) };
        Ok(ArenaSlice {
            mapping: Arc::clone(&self.inner.mapping),
            base,
            len: taken,
        })
    }

    /// The regions that devices register.
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.inner.mapping.regions.all()
    }

    /// Registers the whole arena with a device. `slot` is the device's index in the arena's table
    /// of memory keys: below [`DEVICE_SLOTS`], and free. After an error nothing stays registered.
    /// The registration ends with [`Arena::unregister`], at the latest when the memory is unmapped.
    pub fn register(&self, slot: usize, hook: Arc<dyn RegisterHook>) -> Result<(), RegisterError> {
        self.register_in(slot, hook, Piece::LONGEST)
    }

    /// Like [`Arena::register`], for a device that registers at most `piece` bytes at once. Each
    /// device has its own piece length.
    pub fn register_in(
        &self,
        slot: usize,
        hook: Arc<dyn RegisterHook>,
        piece: Piece,
    ) -> Result<(), RegisterError> {
        self.inner.mapping.regions.register(slot, hook, piece)
    }

    /// The pieces that the device in `slot` registered, and their keys.
    pub fn registered(&self, slot: usize) -> Vec<(RegionInfo, u64)> {
        self.inner.mapping.regions.registered(slot)
    }

    /// True if both are clones of the same arena.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Unregisters the arena from a device. Call it when the device has nothing in flight.
    pub fn unregister(&self, slot: usize) {
        self.inner.mapping.regions.unregister(slot);
    }
}

/// Registers several arenas with one device in a slot that is free in all of them, and returns the
/// slot. After an error nothing stays registered.
pub fn register_all(
    arenas: &[Arena],
    hook: &Arc<dyn RegisterHook>,
) -> Result<usize, RegisterError> {
    register_all_in(arenas, hook, Piece::LONGEST)
}

/// Like [`register_all`], in pieces as for [`Arena::register_in`].
pub fn register_all_in(
    arenas: &[Arena],
    hook: &Arc<dyn RegisterHook>,
    piece: Piece,
) -> Result<usize, RegisterError> {
    let free = |slot: &usize| {
        arenas
            .iter()
            .all(|a| a.inner.mapping.regions.is_free(*slot))
    };
    let slot = (0..DEVICE_SLOTS)
        .find(free)
        .ok_or(RegisterError::NoFreeSlot)?;
    for (done, arena) in arenas.iter().enumerate() {
        if let Err(error) = arena.register_in(slot, Arc::clone(hook), piece) {
            arenas[..done].iter().for_each(|a| a.unregister(slot));
            return Err(error);
        }
    }
    Ok(slot)
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Arena({}, {} left)",
            self.report(),
            human(self.remaining() as u64)
        )
    }
}

/// A part of an arena with one owner. The owner may move it to another thread and build a
/// [`crate::Pool`] on it there.
pub struct ArenaSlice {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: the slice is the only owner of its bytes, and the mapping is the process's.
unsafe impl Send for ArenaSlice {}

impl ArenaSlice {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for ArenaSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaSlice({})", human(self.len as u64))
    }
}

/// The request exceeds the rest of an arena or a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked} bytes of DMA memory asked, {there} left; remedy: a larger arena, or fewer or smaller buffers"
)]
pub struct CarveError {
    /// The requested bytes.
    pub asked: usize,
    /// The bytes that are left.
    pub there: usize,
}

/// The kind of memory that an arena got. `Display` prints one line for the log.
#[derive(Debug)]
pub struct ArenaReport {
    pub pages: PageKind,
    pub bytes: u64,
    /// The requested node: strict for huge pages, preferred for others.
    pub node: Option<u32>,
    /// Locked in memory: never swapped out.
    pub locked: bool,
    /// Why the pages are not larger or not locked, each with its remedy.
    pub shortages: Vec<ArenaError>,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, ", human(self.bytes), self.pages)?;
        match self.node {
            Some(node) if self.pages.is_hugetlb() => write!(f, "node {node}, ")?,
            Some(node) => write!(f, "node {node} preferred, ")?,
            None => write!(f, "any node, ")?,
        }
        f.write_str(if self.locked { "locked" } else { "not locked" })?;
        // Report the smallest missing step: advice on 1 GiB pages is useless without 2 MiB pages.
        let (locks, pages): (Vec<_>, Vec<_>) = self.shortages.iter().partition(|s| {
            matches!(
                s,
                ArenaError::Memlock { .. } | ArenaError::System { step: "mlock", .. }
            )
        });
        for shortage in pages.last().into_iter().chain(locks.last()) {
            write!(f, "; {}", Chain(shortage))?;
        }
        Ok(())
    }
}

/// An error and its sources, on one line.
struct Chain<'a>(&'a dyn std::error::Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        self.0
            .source()
            .map_or(Ok(()), |source| write!(f, ": {}", Chain(source)))
    }
}

/// Executes the plan: takes the first kind of pages that the kernel provides.
pub(crate) fn allocate(
    options: &ArenaOptions,
    purpose: Purpose,
) -> Result<(Mapping, ArenaReport), ArenaError> {
    let system = System::real();
    allocate_with(options, purpose, &system.facts(), &|| system.facts())
}

/// Like [`allocate`], with the given facts. `now` reads them again after a failure.
fn allocate_with(
    options: &ArenaOptions,
    purpose: Purpose,
    facts: &Facts,
    now: &dyn Fn() -> Facts,
) -> Result<(Mapping, ArenaReport), ArenaError> {
    let Plan {
        tries,
        mut shortages,
    } = plan(options, purpose, facts)?;
    let last = tries.len() - 1;
    for (at, &kind) in tries.iter().enumerate() {
        match try_kind(kind, options, purpose, facts, now) {
            Ok((mapping, unlocked)) => {
                let tried = options.require_lock || purpose == Purpose::Dma;
                let locked = kind.is_hugetlb() || (tried && unlocked.is_none());
                let report = ArenaReport {
                    pages: kind,
                    bytes: mapping.len() as u64,
                    node: options.numa_node,
                    locked,
                    shortages: better_kinds_missing(shortages, kind)
                        .chain(unlocked)
                        .collect(),
                };
                return Ok((mapping, report));
            }
            // The kernel had fewer pages than it reported: try the next kind, if any.
            Err(error) if at == last => return Err(error),
            Err(error) => shortages.push((kind, error)),
        }
    }
    unreachable!("a plan has at least one kind to try")
}

/// The kinds of pages better than the arena's kind that were not available, best first.
fn better_kinds_missing(
    mut shortages: Vec<(PageKind, ArenaError)>,
    got: PageKind,
) -> impl Iterator<Item = ArenaError> {
    shortages.retain(|(of, _)| *of < got);
    shortages.sort_by_key(|(of, _)| *of);
    shortages.into_iter().map(|(_, shortage)| shortage)
}

/// Maps memory of one kind. Also returns the reason if it should be locked but is not.
fn try_kind(
    kind: PageKind,
    options: &ArenaOptions,
    purpose: Purpose,
    facts: &Facts,
    now: &dyn Fn() -> Facts,
) -> Result<(Mapping, Option<ArenaError>), ArenaError> {
    let bytes = kind.round_up(options.bytes).ok_or(ArenaError::TooLarge {
        asked: options.bytes,
    })?;
    let explain = |(step, errno)| explain(step, errno, kind, options, &now());
    let mapping = Mapping::new(kind, bytes as usize, options.numa_node).map_err(explain)?;
    // A hugetlb page missing at first access raises SIGBUS, so populate all pages now.
    if kind.is_hugetlb() {
        mapping
            .populate(kind.size() as usize)
            .map_err(|e| explain(("populate", e)))?;
        return Ok((mapping, None));
    }
    let mut unlocked = None;
    if options.require_lock || purpose == Purpose::Dma {
        let locked = check_lock(kind, (bytes, options.beside), facts)
            .and_then(|()| mapping.lock().map_err(|e| explain(("mlock", e))));
        match locked {
            // mlock also populates every page.
            Ok(()) => return Ok((mapping, None)),
            Err(error) if options.require_lock => return Err(error),
            Err(error) => unlocked = Some(error),
        }
    }
    if options.populate {
        mapping
            .populate(base_page_size())
            .map_err(|e| explain(("populate", e)))?;
    }
    Ok((mapping, unlocked))
}

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// An arena of unpopulated plain pages, so a test can make it very large.
    pub(crate) fn untouched(bytes: usize) -> Arena {
        let mapping = Mapping::new(
            PageKind::Plain,
            bytes.next_multiple_of(base_page_size()),
            None,
        )
        .expect("mmap");
        let report = ArenaReport {
            pages: PageKind::Plain,
            bytes: bytes as u64,
            node: None,
            locked: false,
            shortages: Vec::new(),
        };
        Arena {
            inner: Arc::new(ArenaInner {
                mapping: Arc::new(mapping),
                carved: AtomicUsize::new(0),
                report,
            }),
        }
    }
}
