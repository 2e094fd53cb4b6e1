//! Memory that several cores, the kernel and devices read and write at once: what RAM disks are of.
//!
//! It is treated like the memory of a device. Nobody holds a Rust reference to its bytes; they are
//! copied in and out by routines that the compiler does not look into. Two copies of the same bytes
//! at the same time are a race between writers, as on a disk: what is then there is a mix of both,
//! and no promise of Rust is broken by it, as no reference says otherwise.

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::arena::{ArenaReport, allocate};
use crate::copy::opaque;
#[cfg(target_arch = "x86_64")]
use crate::copy::stream;
use crate::error::ArenaError;
use crate::mapping::Mapping;
use crate::pages::{HugepagePolicy, PageKind, base_page_size};
use crate::plan::{ArenaOptions, Purpose};
use crate::register::{Piece, RegionInfo, RegisterError, RegisterHook};
use crate::system::System;
use crate::taken::Taken;

/// Memory for RAM disks, used by several cores at once.
///
/// Ranges are checked: one that is not inside the memory panics, as only a bug of ours makes it.
pub struct Shared {
    mapping: Mapping,
    len: usize,
    report: ArenaReport,
    /// The unit in which the system takes memory back; `None` when it does not.
    release_unit: Option<usize>,
    /// What has been written, where it is taken in huge pages as it is; `None` where there is nothing to take.
    taken: Option<Taken>,
    /// Whether much at a time is written past the caches: they cannot hold all of it.
    past_caches: bool,
    /// Whether a device ever knew this memory. Held for writing while that changes.
    registered: RwLock<bool>,
}

/// Writes of at least this many bytes go past the caches, if any do.
const STREAM_MIN: usize = 4096;

/// Ranges shorter than this are cleared by writing zeroes: a system call costs more.
const RELEASE_MIN: usize = 64 * 1024;

impl Shared {
    /// `bytes` of zeroes, taken page by page as they are written.
    ///
    /// With [`HugepagePolicy::Auto`] the pages are transparent huge ones: those of the kernel's
    /// pool are kept for arenas, and a RAM disk can be given back in parts. Who insists on pages of
    /// the pool gets them all at once.
    pub fn allocate(bytes: u64, policy: HugepagePolicy) -> Result<Shared, ArenaError> {
        let options = ArenaOptions {
            hugepages: policy,
            populate: false,
            ..ArenaOptions::new(bytes)
        };
        Shared::allocate_with(options)
    }

    /// As [`Shared::allocate`], on a node, populated or locked. Locked only if required.
    pub fn allocate_with(options: ArenaOptions) -> Result<Shared, ArenaError> {
        let (mapping, report) = allocate(&options, Purpose::RamDisk)?;
        let release_unit = match report.pages {
            _ if options.require_lock => None,
            PageKind::OneGiB | PageKind::TwoMiB => None,
            PageKind::Transparent | PageKind::Plain => Some(base_page_size()),
        };
        let is_lazy = !options.populate && !options.require_lock;
        let taken = (is_lazy && report.pages == PageKind::Transparent)
            .then(|| Taken::nothing_of(mapping.len()));
        // Not more than asked, whatever it was rounded up to.
        let len = options.bytes as usize;
        let cache = System::real().last_level_cache();
        Ok(Shared {
            mapping,
            len,
            report,
            release_unit,
            taken,
            past_caches: cache.is_none_or(|cache| options.bytes > cache),
            registered: RwLock::new(false),
        })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// Copies from `offset` on into `into`.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `from` has `into.len()` mapped bytes (`at` checks). `into` is a unique reference,
        // so it is not part of this memory, to which no reference exists.
        unsafe { opaque::copy(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies `from` to `offset` on.
    ///
    /// Where the memory is larger than the caches, much at a time goes past them, if the processor can: what is
    /// written is rarely read soon. That is faster (a line need not be read to be written), and leaves
    /// them to the buffers that are in use all the time. What they can hold is written through them: that
    /// takes half the time, or a third, as no store waits for the memory.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at_to_write(offset, from.len());
        #[cfg(target_arch = "x86_64")]
        if self.past_caches && from.len() >= STREAM_MIN && stream::is_possible(to, from.len()) {
            // SAFETY: `to` has `from.len()` mapped, writable bytes (`at` checks), to which no reference
            // exists, and is as `stream` wants it. `from` may be bytes lent by this very memory:
            // where they overlap, the result is a mix, as on a disk.
            return unsafe { stream::copy(from.as_ptr(), to, from.len()) };
        }
        // SAFETY: `to` has `from.len()` mapped, writable bytes (`at` checks), to which no reference
        // exists. `from` may be bytes lent by this very memory: `copy` allows an overlap.
        unsafe { opaque::copy(from.as_ptr(), to, from.len()) }
    }

    /// The dword at `offset`, whole. Whatever is read after it is at least as new: what another core or a
    /// device wrote before it stored this one.
    ///
    /// # Panics
    /// When `offset` is not aligned to 4, or the dword is not inside the memory.
    #[inline]
    pub fn load(&self, offset: usize) -> u32 {
        self.dword(offset).load(Ordering::Acquire)
    }

    /// Stores a dword, whole, after everything that was written before.
    ///
    /// # Panics
    /// As [`Shared::load`].
    #[inline]
    pub fn store(&self, offset: usize, value: u32) {
        self.dword(offset).store(value, Ordering::Release);
    }

    #[inline]
    fn dword(&self, offset: usize) -> &AtomicU32 {
        let at = self.at_to_write(offset, size_of::<u32>()).cast::<u32>();
        assert!(at.is_aligned(), "a dword at {offset} is not aligned");
        // SAFETY: mapped, writable and aligned (just checked), for as long as `self` is. Others use the bytes
        // only through atomics, routines the compiler does not look into, the kernel or a device.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// The key of the device in `slot` for these bytes, and how far into its region the first one is:
    /// as [`Lent::key`].
    pub fn key(&self, offset: usize, len: usize, slot: usize) -> Option<(u64, usize)> {
        let base = NonNull::new(self.at(offset, len))?;
        let regions = &self.mapping.regions;
        let [part] = regions.parts(base, len)[..] else {
            return None;
        };
        let region = regions.info(regions.index(part.as_ptr()));
        let key = regions.key(base.as_ptr(), len, slot)?;
        Some((key, part.as_ptr().addr() - region.as_ptr().addr()))
    }

    /// Makes a range zero. What was never written is so, and takes no memory by it.
    pub fn zero(&self, offset: usize, len: usize) {
        let clear = |offset, len| {
            let to = self.at(offset, len);
            // SAFETY: mapped, writable bytes (`at` checks), to which no reference exists.
            unsafe { opaque::zero(to, len) }
        };
        // Panics here rather than half way.
        self.at(offset, len);
        match &self.taken {
            None => clear(offset, len),
            Some(taken) => taken
                .written(offset..offset + len)
                .for_each(|part| clear(part.start, part.len())),
        }
    }

    /// Whether the bytes from `offset` on are these.
    pub fn compare(&self, offset: usize, with: &[u8]) -> bool {
        let at = self.at(offset, with.len());
        // SAFETY: both have `with.len()` readable bytes (`at` checks).
        unsafe { opaque::equal(at, with.as_ptr(), with.len()) }
    }

    /// Copies `len` bytes at `from` to `to`; the ranges may overlap.
    pub fn copy_within(&self, from: usize, to: usize, len: usize) {
        let (from, to) = (self.at(from, len), self.at_to_write(to, len));
        // SAFETY: both are mapped and writable for `len` bytes (`at` checks).
        unsafe { opaque::copy(from, to, len) }
    }

    /// Makes a range zero, giving back to the system what it can.
    pub fn discard(&self, offset: usize, len: usize) {
        // Panics here rather than half way.
        self.at(offset, len);
        let whole = self.releasable(offset..offset + len);
        // Kept until the release is done: a device that registers meanwhile would be left with the
        // old pages.
        let registered = self
            .registered
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if *registered || whole.is_empty() || self.mapping.release(whole.clone()).is_err() {
            return self.zero(offset, len);
        }
        drop(registered);
        self.zero(offset, whole.start - offset);
        self.zero(whole.end, offset + len - whole.end);
    }

    /// What one core lends parts of it with.
    pub fn lender(self: &Arc<Shared>) -> Lender {
        Lender {
            shared: Rc::new(Share(Arc::clone(self))),
        }
    }

    pub fn regions(&self) -> Vec<RegionInfo> {
        self.mapping.regions.all()
    }

    /// Makes the whole memory known to a device, see [`crate::Arena::register`]. It is all taken
    /// then, and not given back by [`Shared::discard`] any more.
    pub fn register(&self, slot: usize, hook: Arc<dyn RegisterHook>) -> Result<(), RegisterError> {
        // A device writes where it likes.
        if let Some(taken) = &self.taken {
            taken.before_write(0..self.len, |unit| self.take(unit));
        }
        // It stays so when the device forgets: that may take its time.
        *self
            .registered
            .write()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.mapping.regions.register(slot, hook, Piece::LONGEST)
    }

    pub fn unregister(&self, slot: usize) {
        self.mapping.regions.unregister(slot);
    }

    /// The whole pages in a range, if they are worth a system call.
    fn releasable(&self, range: Range<usize>) -> Range<usize> {
        let none = range.start..range.start;
        let Some(unit) = self.release_unit else {
            return none;
        };
        let (start, end) = (
            range.start.next_multiple_of(unit),
            range.end - range.end % unit,
        );
        if end.saturating_sub(start) < RELEASE_MIN {
            none
        } else {
            start..end
        }
    }

    /// As [`Shared::at`], for those who write there: their pages are taken.
    #[inline]
    fn at_to_write(&self, offset: usize, len: usize) -> *mut u8 {
        let to = self.at(offset, len);
        if let Some(taken) = &self.taken {
            taken.before_write(offset..offset + len, |unit| self.take(unit));
        }
        to
    }

    /// Puts a huge page where there is none but that of zeroes. Nobody has ever written to `unit`.
    fn take(&self, unit: Range<usize>) {
        if self.mapping.release(unit.clone()).is_err() {
            return;
        }
        // The first access after that is a write, for which the kernel takes a huge page if it has one.
        let first = self.mapping.base().as_ptr().wrapping_add(unit.start);
        // SAFETY: mapped, writable and aligned: `unit` is inside the mapping. Others read it at most.
        unsafe { AtomicU32::from_ptr(first.cast()) }.fetch_or(0, Ordering::Relaxed);
    }

    /// The address of `len` bytes at `offset`, all inside the memory.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            outside(offset, len, self.len);
        }
        // SAFETY: just checked.
        unsafe { self.mapping.base().as_ptr().add(offset) }
    }
}

#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize, of: usize) -> ! {
    panic!("{len} bytes at {offset} are not inside {of} bytes of shared memory")
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({} bytes, {})", self.len, self.report)
    }
}

/// Lends parts of shared memory on one core. The handles are counted there, without atomics: a
/// count that all cores changed with every I/O would be passed around between their caches.
#[derive(Debug)]
pub struct Lender {
    shared: Rc<Share>,
}

/// One core's share in the memory: what its handles count.
#[derive(Debug)]
struct Share(Arc<Shared>);

impl std::ops::Deref for Share {
    type Target = Shared;

    #[inline]
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Lender {
    /// A handle on `len` bytes from `offset` on, to send them from where they are.
    #[inline]
    pub fn lend(&self, offset: usize, len: usize) -> Lent {
        self.shared.at(offset, len);
        Lent {
            shared: Rc::clone(&self.shared),
            offset,
            len,
        }
    }

    /// The memory itself.
    #[inline]
    pub fn memory(&self) -> &Shared {
        &self.shared
    }
}

/// A part of shared memory, kept mapped while this handle lives.
///
/// It is a view, not a copy: what is written to that part meanwhile is seen through it. Who must
/// send the very bytes that a digest was made of makes a copy first ([`Lent::read`]).
#[derive(Clone)]
pub struct Lent {
    shared: Rc<Share>,
    offset: usize,
    len: usize,
}

impl Lent {
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.shared.at(self.offset, self.len)
    }

    /// For a vectored write, and for nothing else: the kernel reads the bytes as they are then.
    ///
    /// The slice is mapped, initialised and as long as it says for as long as this handle is
    /// borrowed. That it does not change is not promised, so do not look into it: use
    /// [`Lent::read`].
    #[inline]
    pub fn as_io_slice(&self) -> IoSlice<'_> {
        // SAFETY: mapped and initialised (zero at first) for `len` bytes, and kept so by `shared`,
        // which `self` keeps. Its reader is the kernel, for which changing bytes are no more than
        // that; the language has no other way to name them in a safe vectored write.
        IoSlice::new(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// Copies from `offset` of this part on.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        if offset
            .checked_add(into.len())
            .is_none_or(|end| end > self.len)
        {
            outside(offset, into.len(), self.len);
        }
        self.shared.read(self.offset + offset, into);
    }

    /// A handle on `offset..offset + len` of this one.
    pub fn slice(&self, offset: usize, len: usize) -> Lent {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            outside(offset, len, self.len);
        }
        Lent {
            shared: Rc::clone(&self.shared),
            offset: self.offset + offset,
            len,
        }
    }

    /// The key of the device in `slot`, and how far into its region the first byte is. `None` also
    /// when the part lies across two regions: slice it then.
    pub fn key(&self, slot: usize) -> Option<(u64, usize)> {
        self.shared.key(self.offset, self.len, slot)
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({}..{})", self.offset, self.offset + self.len)
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
