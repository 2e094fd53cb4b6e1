//! Fixed buffer pools: a few size classes, owned by one core; exhaustion is counted.
//!
//! ```text
//!   memory  | 512 512 512 … | 4096 4096 … | 135168 135168 … |     classes, smallest first
//!   Buf       pool, class, index, offset, len                     24 bytes, finds address and key
//! ```
//!
//! No buffer crosses a region boundary, and none of up to 8 MiB crosses a grain boundary. So one
//! registration key is valid for all of it, however short a device's pieces are. Power-of-two slots
//! lie at multiples of their size, which wastes nothing. In other classes the slot at the end of a
//! grain is left out (every 125th of 132 KiB).

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, ArenaSlice, CarveError, SLICE_ALIGN};
use crate::heap_memory::Heap;
use crate::register::{GRAIN, REGION_MAX, RegionId, RegionInfo, Regions};

/// One size class of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassSpec {
    /// Bytes per buffer: 1 to 1 GiB, rounded up to a multiple of 512.
    pub size: usize,
    /// Number of buffers.
    pub count: usize,
}

/// Statistics of one size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassStats {
    pub size: usize,
    pub count: usize,
    pub free: usize,
    /// The lowest value that `free` ever had.
    pub low_water: usize,
    /// Buffers that this class has provided, in total.
    pub acquired: u64,
    /// Requests refused for lack of a free buffer, counted in the smallest class that is large
    /// enough for the request.
    pub exhausted: u64,
}

struct Class {
    size: usize,
    /// Number of buffers in use or free; excludes slots that cross a grain or region boundary.
    count: usize,
    base: NonNull<u8>,
    /// Live handles per slot; a slot with none is on the free list.
    refs: Box<[Cell<u32>]>,
    /// Those of them that came from [`Buf::split_off`]. No byte is covered by more than `refs -
    /// splits` handles: a clone increments `refs`, a split increments both, and a drop decrements
    /// `refs`, and `splits` while it is above zero. So a difference of 1 proves that no two handles
    /// overlap.
    splits: Box<[Cell<u32>]>,
    /// LIFO: the buffer used last is probably still in the cache.
    free: RefCell<Vec<u32>>,
    low_water: Cell<usize>,
    acquired: Cell<u64>,
    exhausted: Cell<u64>,
}

struct PoolInner {
    classes: Vec<Class>,
    regions: Arc<Regions>,
    /// The first byte and the number of bytes that this pool owns.
    base: NonNull<u8>,
    len: usize,
    /// The region that contains the first byte.
    first_region: usize,
    /// Keeps the memory mapped while a pool or a buffer on it lives.
    _memory: Memory,
}

#[expect(dead_code, reason = "owned for its drop")]
enum Memory {
    Heap(Heap),
    Slice(ArenaSlice),
}

/// Buffers of a few size classes, owned by one core.
///
/// Neither `Send` nor `Sync`: acquiring and returning a buffer take a few plain instructions.
///
/// ```compile_fail,E0277
/// fn to_another_thread(pool: nacre_hugepages::Pool) {
///     std::thread::spawn(move || drop(pool));
/// }
/// ```
/// ```compile_fail,E0277
/// fn seen_by_another_thread(pool: &'static nacre_hugepages::Pool) {
///     std::thread::spawn(move || pool.acquire(512).is_some());
/// }
/// ```
#[derive(Clone)]
pub struct Pool {
    inner: Rc<PoolInner>,
}

impl Pool {
    /// A pool on ordinary heap memory, for tests and for tools without a device.
    ///
    /// # Panics
    /// If a class is invalid: a buffer of 0 bytes or of more than 1 GiB, or more memory than the
    /// address space has.
    pub fn heap(classes: &[ClassSpec]) -> Self {
        let len = Self::bytes_for(classes)
            .next_multiple_of(SLICE_ALIGN)
            .max(SLICE_ALIGN);
        let memory = Heap::zeroed(len, SLICE_ALIGN);
        let base = memory.base();
        let regions = Arc::new(Regions::new(base, len));
        let layout = Layout::new(0, classes);
        debug_assert!(layout.end <= len);
        // SAFETY: `memory` has room for the layout (`bytes_for`), has no other owner and moves into
        // the pool.
        unsafe { Self::build(base, len, layout, regions, Memory::Heap(memory)) }
    }

    /// A pool on a slice of an arena, on the calling core.
    ///
    /// # Errors
    /// If the classes need more than the slice; [`Pool::bytes_for`] is always enough.
    pub fn on_slice(slice: ArenaSlice, classes: &[ClassSpec]) -> Result<Self, CarveError> {
        let (base, len) = (slice.base, slice.len);
        let start = base.addr().get() - slice.mapping.base().addr().get();
        let layout = Layout::new(start, classes);
        if layout.end > len {
            return Err(CarveError {
                asked: layout.end,
                there: len,
            });
        }
        let regions = Arc::clone(&slice.mapping.regions);
        // SAFETY: the slice has room for the layout (just checked), is the only owner of its bytes
        // and moves into the pool.
        Ok(unsafe { Self::build(base, len, layout, regions, Memory::Slice(slice)) })
    }

    /// A pool on a new slice of the arena, as large as it needs.
    pub fn on_arena(arena: &Arena, classes: &[ClassSpec]) -> Result<Self, CarveError> {
        Self::on_slice(arena.carve(Self::bytes_for(classes))?, classes)
    }

    /// The bytes that these classes need, wherever in an arena the slice begins.
    pub fn bytes_for(classes: &[ClassSpec]) -> usize {
        let most = |spec: &ClassSpec| {
            let size = stride(spec.size);
            let (unit, align) = placing(size);
            let mut slots = spec.count;
            // Power-of-two slots cross no boundary. Other slots cross at most one more boundary
            // than the class has whole units, and the omitted slots make the class longer.
            while !size.is_power_of_two() {
                let more = spec.count + slots * size / unit + 1;
                if more == slots {
                    break;
                }
                slots = more;
            }
            slots * size + align
        };
        let sum: usize = classes.iter().map(most).sum();
        sum.next_multiple_of(SLICE_ALIGN)
    }

    /// # Safety
    ///
    /// `layout` fits in `base..base + len`, which is in the mapping that `regions` describe, is
    /// valid, initialised, writable, has no other user and stays so until `memory` is dropped.
    unsafe fn build(
        base: NonNull<u8>,
        len: usize,
        layout: Layout,
        regions: Arc<Regions>,
        memory: Memory,
    ) -> Self {
        let class = |placed: Placed| Class {
            size: placed.size,
            count: placed.usable.len(),
            // SAFETY: inside the memory, as the layout fits.
            base: unsafe { base.add(placed.offset) },
            refs: (0..placed.slots).map(|_| Cell::new(0)).collect(),
            splits: (0..placed.slots).map(|_| Cell::new(0)).collect(),
            low_water: Cell::new(placed.usable.len()),
            free: RefCell::new(placed.usable),
            acquired: Cell::new(0),
            exhausted: Cell::new(0),
        };
        let classes = layout.classes.into_iter().map(class).collect();
        let first_region = regions.index(base.as_ptr());
        Self {
            inner: Rc::new(PoolInner {
                classes,
                regions,
                base,
                len,
                first_region,
                _memory: memory,
            }),
        }
    }

    /// Acquires a buffer of exactly `len` bytes (the handle's length; its class may be larger). The
    /// contents are undefined: those of the last use. `None` if every class that is large enough is
    /// empty.
    pub fn acquire(&self, len: usize) -> Option<Buf> {
        let mut wanted = None;
        for (at, class) in self.inner.classes.iter().enumerate() {
            if class.size < len {
                continue;
            }
            wanted.get_or_insert(class);
            let mut free = class.free.borrow_mut();
            let Some(index) = free.pop() else { continue };
            class.refs[index as usize].set(1);
            class.acquired.set(class.acquired.get() + 1);
            if free.len() < class.low_water.get() {
                class.low_water.set(free.len());
            }
            return Some(Buf {
                pool: Rc::clone(&self.inner),
                class: at as u32,
                index,
                offset: 0,
                len: len as u32,
            });
        }
        if let Some(class) = wanted {
            class.exhausted.set(class.exhausted.get() + 1);
        }
        None
    }

    /// Like [`Pool::acquire`], but only if a buffer of `beside` bytes remains free afterwards.
    pub fn acquire_beside(&self, len: usize, beside: usize) -> Option<Buf> {
        let classes = &self.inner.classes;
        let free = |class: &Class| class.free.borrow().len();
        let from = classes.iter().position(|c| c.size >= len && free(c) > 0);
        let mut others = classes.iter().enumerate();
        if others.any(|(at, c)| c.size >= beside && free(c) > usize::from(Some(at) == from)) {
            return self.acquire(len);
        }
        if let Some(wanted) = classes.iter().find(|class| class.size >= len) {
            wanted.exhausted.set(wanted.exhausted.get() + 1);
        }
        None
    }

    /// The size of the largest class.
    pub fn max_len(&self) -> usize {
        self.inner.classes.last().map_or(0, |c| c.size)
    }

    pub fn stats(&self) -> Vec<ClassStats> {
        let stat = |c: &Class| ClassStats {
            size: c.size,
            count: c.count,
            free: c.free.borrow().len(),
            low_water: c.low_water.get(),
            acquired: c.acquired.get(),
            exhausted: c.exhausted.get(),
        };
        self.inner.classes.iter().map(stat).collect()
    }

    /// The memory of this pool, region by region. A ring registers it as fixed buffers, in the
    /// order of [`Pool::region_index`].
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.inner.regions.parts(self.inner.base, self.inner.len)
    }

    /// True if the buffer belongs to this pool.
    #[inline]
    pub fn owns(&self, buf: &Buf) -> bool {
        Rc::ptr_eq(&self.inner, &buf.pool)
    }

    /// The index of the buffer's region in [`Pool::regions`]; `None` for a buffer of another pool.
    #[inline]
    pub fn region_index(&self, buf: &Buf) -> Option<usize> {
        self.owns(buf).then(|| buf.region_index())
    }
}

/// A counted handle on a buffer, or on a part of one.
///
/// Cloning shares the bytes, which are then read-only; [`Buf::bytes_mut`] needs the only handle.
/// The buffer returns to its pool when its last handle is dropped. Code that gives memory to a
/// device or to the kernel keeps a handle until the operation ends.
///
/// ```compile_fail,E0277
/// fn to_another_thread(buf: nacre_hugepages::Buf) {
///     std::thread::spawn(move || drop(buf));
/// }
/// ```
/// ```compile_fail,E0277
/// fn seen_by_another_thread(buf: &'static nacre_hugepages::Buf) {
///     std::thread::spawn(move || buf.len());
/// }
/// ```
pub struct Buf {
    pool: Rc<PoolInner>,
    class: u32,
    index: u32,
    offset: u32,
    len: u32,
}

impl Buf {
    pub fn len(&self) -> usize {
        self.len as usize
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, writable. `None` while another handle shares them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let start = self.as_mut_ptr()?;
        // SAFETY: the range is inside this buffer of the pool, which `self.pool` keeps mapped;
        // no other handle covers any byte of it (`as_mut_ptr` checks), and it is borrowed mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.len as usize) })
    }

    /// True if no other handle shares any of the bytes.
    #[inline]
    pub fn is_unshared(&self) -> bool {
        let class = self.class();
        let at = self.index as usize;
        class.refs[at].get() - class.splits[at].get() == 1
    }

    /// The address of the first byte, for the kernel or a device to write to. `None` while another
    /// handle shares any byte.
    pub fn as_mut_ptr(&mut self) -> Option<*mut u8> {
        self.is_unshared().then(|| self.as_ptr().cast_mut())
    }

    /// A handle on `offset..offset + len` of this one.
    ///
    /// # Panics
    /// If the range is outside this handle's range.
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "slice outside buffer"
        );
        let mut part = self.clone();
        part.offset += offset as u32;
        part.len = len as u32;
        part
    }

    /// Keeps the first `at` bytes and returns a handle on the rest. The two handles share no byte,
    /// so both may be written.
    ///
    /// # Panics
    /// If `at` is outside this handle's range.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len(), "split outside buffer");
        let rest = self.slice(at, self.len() - at);
        self.len = at as u32;
        let splits = &self.class().splits[self.index as usize];
        splits.set(splits.get() + 1);
        rest
    }

    /// Rejoins a part from [`Buf::split_off`]. `rest` must begin where this handle ends; otherwise
    /// it is returned as the error.
    pub fn unsplit(&mut self, rest: Self) -> Result<(), Self> {
        let adjoins = Rc::ptr_eq(&self.pool, &rest.pool)
            && (self.class, self.index) == (rest.class, rest.index)
            && self.offset + self.len == rest.offset;
        if !adjoins {
            return Err(rest);
        }
        self.len += rest.len;
        Ok(())
    }

    /// Swaps this buffer for the free buffer of its class that was returned last, which is probably
    /// still in the cache. The contents are lost. Does nothing if no buffer is free, or if another
    /// handle shares this one.
    #[inline]
    pub fn exchange(&mut self) {
        let class = &self.pool.classes[self.class as usize];
        let mut free = class.free.borrow_mut();
        let Some(last) = free.last_mut() else { return };
        let (mine, theirs) = (self.index as usize, *last as usize);
        if class.refs[mine].get() == 1 && class.splits[mine].get() == 0 {
            class.refs[mine].set(0);
            class.refs[theirs].set(1);
            std::mem::swap(last, &mut self.index);
        }
    }

    /// Keeps the first `len` bytes of this handle.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as u32);
    }

    /// The address of the first byte, for the kernel or a device. The caller keeps a handle until
    /// the operation ends.
    pub fn as_ptr(&self) -> *const u8 {
        let class = self.class();
        let at = self.index as usize * class.size + self.offset as usize;
        // SAFETY: `index` and `offset` are inside the class's memory by construction.
        unsafe { class.base.as_ptr().add(at) }
    }

    /// The registration key of the device in `slot`. `None`: not registered, or no single key
    /// covers all of this buffer.
    #[inline]
    pub fn key(&self, slot: usize) -> Option<u64> {
        self.pool.regions.key(self.as_ptr(), self.len(), slot)
    }

    /// The device address of the first byte. Only for a device that registered whole regions with
    /// the address of each region's first byte as its key.
    #[inline]
    pub fn address(&self, slot: usize) -> Option<u64> {
        self.pool.regions.address(self.as_ptr(), self.len(), slot)
    }

    /// The whole region of this buffer, including buffers of other owners.
    pub fn region(&self) -> RegionInfo {
        self.pool
            .regions
            .info(self.pool.regions.index(self.as_ptr()))
    }

    pub fn region_id(&self) -> RegionId {
        self.region().id
    }

    /// The offset of the first byte in its region. If the key is an IOVA of a whole region, key
    /// plus offset is the device address.
    #[inline]
    pub fn region_offset(&self) -> usize {
        self.pool.regions.region_offset(self.as_ptr())
    }

    /// The index of this buffer's region in [`Pool::regions`].
    #[inline]
    pub fn region_index(&self) -> usize {
        self.pool.regions.index(self.as_ptr()) - self.pool.first_region
    }

    #[inline]
    fn class(&self) -> &Class {
        &self.pool.classes[self.class as usize]
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside this buffer of the pool, which `self.pool` keeps mapped. No
        // code writes through a handle while it is shared (`bytes_mut` checks).
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len as usize) }
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        let refs = &self.class().refs[self.index as usize];
        // Handles may be leaked (`mem::forget`); the counter must not wrap to zero.
        refs.set(
            refs.get()
                .checked_add(1)
                .expect("no buffer has four billion handles"),
        );
        Self {
            pool: Rc::clone(&self.pool),
            ..*self
        }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let class = self.class();
        let refs = &class.refs[self.index as usize];
        refs.set(refs.get() - 1);
        let splits = &class.splits[self.index as usize];
        splits.set(splits.get().saturating_sub(1));
        if refs.get() == 0 {
            class.free.borrow_mut().push(self.index);
        }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Buf({}:{}+{}..{})",
            self.class,
            self.index,
            self.offset,
            self.offset + self.len
        )
    }
}

/// Positions of all classes in a memory range.
struct Layout {
    classes: Vec<Placed>,
    /// Bytes from the start of the memory to the end of the last buffer.
    end: usize,
}

struct Placed {
    size: usize,
    /// Offset from the start of the memory.
    offset: usize,
    /// Number of slots.
    slots: usize,
    /// Indices of usable slots; the last one is acquired first.
    usable: Vec<u32>,
}

impl Layout {
    /// Lays out buffers in memory that begins `start` bytes into its mapping, a multiple of
    /// [`SLICE_ALIGN`].
    fn new(start: usize, specs: &[ClassSpec]) -> Self {
        let mut specs = specs.to_vec();
        specs.sort_by_key(|c| c.size);
        let mut at = start;
        let mut classes = Vec::with_capacity(specs.len());
        for spec in specs {
            let size = stride(spec.size);
            // Align buffers where the size allows it, for devices that prefer alignment.
            let (unit, align) = placing(size);
            at = at.next_multiple_of(align);
            let offset = at - start;
            let mut usable = Vec::with_capacity(spec.count);
            let mut slots = 0;
            while usable.len() < spec.count {
                let end = at
                    .checked_add(size)
                    .expect("buffer classes are larger than the address space");
                if at / unit == (end - 1) / unit {
                    usable.push(
                        u32::try_from(slots).expect("a class has less than four billion buffers"),
                    );
                }
                slots += 1;
                at = end;
            }
            usable.reverse();
            classes.push(Placed {
                size,
                offset,
                slots,
                usable,
            });
        }
        Self {
            classes,
            end: at - start,
        }
    }
}

/// The boundary that no slot of this size crosses, and the alignment of a class of this size.
fn placing(size: usize) -> (usize, usize) {
    let unit = if size <= GRAIN / 2 { GRAIN } else { REGION_MAX };
    let align = if size.is_power_of_two() { size } else { 1 };
    (unit, align.max(SLICE_ALIGN))
}

/// The distance between two buffers of a class: a multiple of 512 bytes, at most a region.
fn stride(size: usize) -> usize {
    assert!(
        size > 0 && size <= REGION_MAX,
        "a buffer of {size} bytes is not possible"
    );
    size.next_multiple_of(512)
}

#[cfg(test)]
mod tests;
