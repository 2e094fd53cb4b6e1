//! Memory that several cores, the kernel and devices access at the same time: the storage of RAM
//! disks.
//!
//! It is treated like device memory: no Rust reference to its bytes exists, and they are copied in
//! and out by routines that are opaque to the compiler. Concurrent copies to the same bytes leave a
//! mix of both, as on a disk, without undefined behaviour.

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;

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
use crate::written::WrittenUnits;

/// Memory for RAM disks, used by several cores at once.
///
/// Ranges are checked: a range outside the memory panics, because only a bug can cause it.
pub struct Shared {
    mapping: Mapping,
    len: usize,
    report: ArenaReport,
    /// The unit in which the kernel releases memory; `None` if it does not.
    release_unit: Option<usize>,
    /// Tracks written units where huge pages are allocated at the first write; `None` otherwise.
    taken: Option<WrittenUnits>,
    /// True if large writes bypass the caches because the memory exceeds them.
    past_caches: bool,
    /// True once a device registered this memory. Locked for writing while it changes.
    registered: RwLock<bool>,
}

/// Smallest write that bypasses the caches, if any does.
const STREAM_MIN: usize = 4096;

/// Shorter ranges are cleared by writing zeroes; a system call costs more.
const RELEASE_MIN: usize = 64 * 1024;

impl Shared {
    /// Allocates `bytes` zero bytes; pages are populated at the first write.
    ///
    /// With [`HugepagePolicy::Auto`] the pages are transparent huge pages, else plain ones. So
    /// hugetlb pages are left to arenas, and a RAM disk can be released in parts. A policy that
    /// requires hugetlb pages populates all of them at once.
    pub fn allocate(bytes: u64, policy: HugepagePolicy) -> Result<Self, ArenaError> {
        let options = ArenaOptions {
            hugepages: policy,
            populate: false,
            ..ArenaOptions::new(bytes)
        };
        Self::allocate_with(options)
    }

    /// Like [`Shared::allocate`], with a NUMA node, and populated on request. Locked only if
    /// [`ArenaOptions::require_lock`] is set.
    pub fn allocate_with(options: ArenaOptions) -> Result<Self, ArenaError> {
        let (mapping, report) = allocate(&options, Purpose::RamDisk)?;
        let release_unit = match report.pages {
            _ if options.require_lock => None,
            PageKind::OneGiB | PageKind::TwoMiB => None,
            PageKind::Transparent | PageKind::Plain => Some(base_page_size()),
        };
        let is_lazy = !options.populate && !options.require_lock;
        let taken = (is_lazy && report.pages == PageKind::Transparent)
            .then(|| WrittenUnits::none(mapping.len()));
        // The usable length is the requested one, not the rounded one.
        let len = options.bytes as usize;
        let cache = System::real().last_level_cache();
        Ok(Self {
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

    /// Copies `into.len()` bytes from `offset` into `into`.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `from` has `into.len()` mapped bytes (`at` checks). `into` is a unique reference,
        // so it is not part of this memory, to which no reference exists.
        unsafe { opaque::copy(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies `from` to `offset`.
    ///
    /// Large writes bypass the caches if the memory exceeds them and the processor can: written
    /// data is rarely read soon. This avoids reading each line before writing it, and leaves the
    /// caches to the buffers in constant use. Memory that fits into the caches is written through
    /// them, which takes a third to half of the time, because no store waits for memory.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at_to_write(offset, from.len());
        #[cfg(target_arch = "x86_64")]
        if self.past_caches && from.len() >= STREAM_MIN && stream::is_possible(to, from.len()) {
            // SAFETY: `to` has `from.len()` mapped, writable bytes (`at` checks), to which no
            // reference exists, and meets the requirements of `stream`. `from` may be a view of
            // this memory: where they overlap, the result is a mix, as on a disk.
            return unsafe { stream::copy(from.as_ptr(), to, from.len()) };
        }
        // SAFETY: `to` has `from.len()` mapped, writable bytes (`at` checks), to which no reference
        // exists. `from` may be a view of this memory: `copy` allows an overlap.
        unsafe { opaque::copy(from.as_ptr(), to, from.len()) }
    }

    /// Loads the dword at `offset` atomically with acquire ordering: later reads see everything
    /// that another core or a device wrote before it stored this value.
    ///
    /// # Panics
    /// If `offset` is not aligned to 4, or the dword is outside the memory.
    #[inline]
    pub fn load(&self, offset: usize) -> u32 {
        self.dword(offset).load(Ordering::Acquire)
    }

    /// Stores a dword atomically with release ordering: after all earlier writes.
    ///
    /// # Panics
    /// As for [`Shared::load`].
    #[inline]
    pub fn store(&self, offset: usize, value: u32) {
        self.dword(offset).store(value, Ordering::Release);
    }

    #[inline]
    fn dword(&self, offset: usize) -> &AtomicU32 {
        let at = self.at_to_write(offset, size_of::<u32>()).cast::<u32>();
        assert!(at.is_aligned(), "a dword at {offset} is not aligned");
        // SAFETY: mapped, writable and aligned (just checked), as long as `self` lives. Other
        // accesses use only atomics, opaque routines, the kernel or a device.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// The registration key of the device in `slot` for these bytes, and the offset of the first
    /// byte in its region. `None`: not registered, or the bytes cross two regions.
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

    /// Zeroes a range. Parts that were never written are zero already and stay unpopulated.
    pub fn zero(&self, offset: usize, len: usize) {
        let clear = |offset, len| {
            let to = self.at(offset, len);
            // SAFETY: mapped, writable bytes (`at` checks), to which no reference exists.
            unsafe { opaque::zero(to, len) }
        };
        // Check the range now rather than half way.
        self.at(offset, len);
        match &self.taken {
            None => clear(offset, len),
            Some(taken) => taken
                .written(offset..offset + len)
                .for_each(|part| clear(part.start, part.len())),
        }
    }

    /// True if the bytes at `offset` equal `with`.
    pub fn compare(&self, offset: usize, with: &[u8]) -> bool {
        let at = self.at(offset, with.len());
        // SAFETY: both have `with.len()` readable bytes (`at` checks).
        unsafe { opaque::equal(at, with.as_ptr(), with.len()) }
    }

    /// Copies `len` bytes from offset `from` to offset `to`; the ranges may overlap.
    pub fn copy_within(&self, from: usize, to: usize, len: usize) {
        let (from, to) = (self.at(from, len), self.at_to_write(to, len));
        // SAFETY: both are mapped and writable for `len` bytes (`at` checks).
        unsafe { opaque::copy(from, to, len) }
    }

    /// Zeroes a range. Releases its whole pages to the system if they are 64 KiB or more, not
    /// locked and not hugetlb pages. Does not release them if a device has ever registered the
    /// memory.
    pub fn discard(&self, offset: usize, len: usize) {
        // Check the range now rather than half way.
        self.at(offset, len);
        let whole = self.releasable(offset..offset + len);
        // Held until the release is done: a device that registers meanwhile would keep the old
        // pages.
        let registered = self.registered.read();
        if *registered || whole.is_empty() || self.mapping.release(whole.clone()).is_err() {
            return self.zero(offset, len);
        }
        drop(registered);
        self.zero(offset, whole.start - offset);
        self.zero(whole.end, offset + len - whole.end);
    }

    /// Creates the handle of one core.
    pub fn on_core(self: &Arc<Self>) -> CoreShared {
        CoreShared {
            shared: Rc::new(Share(Arc::clone(self))),
        }
    }

    pub fn regions(&self) -> Vec<RegionInfo> {
        self.mapping.regions.all()
    }

    /// Registers the whole memory with a device, see [`crate::Arena::register`]. This populates the
    /// memory, and [`Shared::discard`] no longer releases it.
    pub fn register(&self, slot: usize, hook: Arc<dyn RegisterHook>) -> Result<(), RegisterError> {
        // A device may write anywhere.
        if let Some(taken) = &self.taken {
            taken.before_write(0..self.len, |unit| self.take(unit));
        }
        // Stays set after the device unregisters, which may take time to complete.
        *self.registered.write() = true;
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

    /// Like [`Shared::at`], for writing: populates the range with huge pages first.
    #[inline]
    fn at_to_write(&self, offset: usize, len: usize) -> *mut u8 {
        let to = self.at(offset, len);
        if let Some(taken) = &self.taken {
            taken.before_write(offset..offset + len, |unit| self.take(unit));
        }
        to
    }

    /// Replaces the shared zero page by a huge page. `unit` was never written.
    fn take(&self, unit: Range<usize>) {
        if self.mapping.release(unit.clone()).is_err() {
            return;
        }
        // The next access is a write, for which the kernel allocates a huge page if it has one.
        let first = self.mapping.base().as_ptr().wrapping_add(unit.start);
        // SAFETY: mapped, writable and aligned: `unit` is inside the mapping. Other cores at most
        // read it.
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

/// Shared memory as one core uses it. Views are counted per core without atomics: a shared counter
/// would move between the cores' caches with every I/O.
#[derive(Debug)]
pub struct CoreShared {
    shared: Rc<Share>,
}

/// One core's reference to the memory, counted by its handles.
#[derive(Debug)]
struct Share(Arc<Shared>);

impl std::ops::Deref for Share {
    type Target = Shared;

    #[inline]
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl CoreShared {
    /// A handle on `len` bytes at `offset`, to send them without a copy.
    #[inline]
    pub fn view(&self, offset: usize, len: usize) -> MemoryView {
        self.shared.at(offset, len);
        MemoryView {
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

/// A range of shared memory, which stays mapped while this handle exists.
///
/// It is a view without a copy, so concurrent writes are visible through it. To send exactly the
/// bytes that a digest covers, copy them first ([`MemoryView::read`]).
#[derive(Clone)]
pub struct MemoryView {
    shared: Rc<Share>,
    offset: usize,
    len: usize,
}

impl MemoryView {
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

    /// Returns the bytes for vectored writes only: the kernel reads them at the time of the call.
    ///
    /// The slice is mapped, initialised and of constant length while this handle is borrowed. Its
    /// contents may change at any time, so do not read it: use [`MemoryView::read`].
    #[inline]
    pub fn as_io_slice(&self) -> IoSlice<'_> {
        // SAFETY: mapped and initialised (zero at first) for `len` bytes, and kept so by `shared`,
        // which `self` keeps. Only the kernel reads it, which tolerates changing bytes; safe Rust
        // has no other type for a vectored write.
        IoSlice::new(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// Copies `into.len()` bytes from `offset` of this part.
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
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            outside(offset, len, self.len);
        }
        Self {
            shared: Rc::clone(&self.shared),
            offset: self.offset + offset,
            len,
        }
    }

    /// The registration key of the device in `slot`, and the offset of the first byte in its
    /// region. `None`: not registered, or the part crosses two regions; slice it then.
    pub fn key(&self, slot: usize) -> Option<(u64, usize)> {
        self.shared.key(self.offset, self.len, slot)
    }
}

impl fmt::Debug for MemoryView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryView({}..{})", self.offset, self.offset + self.len)
    }
}

#[cfg(test)]
mod tests;
