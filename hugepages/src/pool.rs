//! Fixed buffer pools: a few size classes, owned by one core, counted when they run out.
//!
//! ```text
//!   memory  | 512 512 512 … | 4096 4096 … | 135168 135168 … |     classes, smallest first
//!   Buf       pool, class, index, offset, len                     24 bytes, finds address and key
//! ```
//!
//! No buffer lies across two regions, and none of up to 8 MiB lies across two grains. So one
//! registration key is right for all of it, however short the pieces are that a device registers.
//! Slots of a power of two lie at multiples of their size, which costs nothing. For other classes,
//! the slot at the end of a grain is left out (of 132 KiB every 125th).

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::arena::{Arena, ArenaSlice, CarveError, SLICE_ALIGN};
use crate::heap::Heap;
use crate::register::{GRAIN, REGION_MAX, RegionId, RegionInfo, Regions};

/// One size class of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassSpec {
    /// Bytes per buffer, a multiple of 512.
    pub size: usize,
    /// Number of buffers.
    pub count: usize,
}

/// What one size class holds now and how often it had nothing to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassStats {
    pub size: usize,
    pub count: usize,
    pub free: usize,
    /// The lowest `free` ever seen.
    pub low_water: usize,
    /// Requests answered with a buffer, ever.
    pub acquired: u64,
    /// Requests answered `None`.
    pub exhausted: u64,
}

struct Class {
    size: usize,
    /// How many buffers are ever given; slots across two regions are not.
    count: usize,
    base: NonNull<u8>,
    /// Handles alive per slot; a buffer with none is on the free list.
    refs: Box<[Cell<u32>]>,
    /// Of those, how many came from [`Buf::split_off`]. No byte is covered by more than
    /// `refs - splits` handles: a clone adds to both sides, a split to neither, and a drop takes
    /// one split along while there is one. So a difference of 1 says that no two handles overlap.
    splits: Box<[Cell<u32>]>,
    /// Last in, first out: the buffer used last is still in the cache.
    free: RefCell<Vec<u32>>,
    low_water: Cell<usize>,
    acquired: Cell<u64>,
    exhausted: Cell<u64>,
}

struct Inner {
    classes: Vec<Class>,
    regions: Arc<Regions>,
    /// The first byte and the number of bytes that this pool owns.
    base: NonNull<u8>,
    len: usize,
    /// The region that the first byte is in.
    first_region: usize,
    /// Keeps the memory mapped for as long as a pool or a buffer of it lives.
    _memory: Memory,
}

#[expect(dead_code, reason = "owned for its drop")]
enum Memory {
    Heap(Heap),
    Slice(ArenaSlice),
}

/// Buffers of a few size classes, owned by one core.
///
/// Neither `Send` nor `Sync`: taking and giving back is a few plain instructions.
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
    inner: Rc<Inner>,
}

impl Pool {
    /// A pool on ordinary heap memory: for tests and for tools that talk to no device.
    ///
    /// # Panics
    /// When the classes are nonsense (a buffer of no bytes, more than an address can name).
    pub fn heap(classes: &[ClassSpec]) -> Pool {
        let len = Pool::bytes_for(classes)
            .next_multiple_of(SLICE_ALIGN)
            .max(SLICE_ALIGN);
        let memory = Heap::zeroed(len, SLICE_ALIGN);
        let base = memory.base();
        let regions = Arc::new(Regions::new(base, len));
        let layout = Layout::new(0, classes);
        debug_assert!(layout.end <= len);
        // SAFETY: `memory` has room for the layout (`bytes_for`), has no other owner and moves into
        // the pool.
        unsafe { Pool::build(base, len, layout, regions, Memory::Heap(memory)) }
    }

    /// A pool on a slice of an arena, on the core that this is called on.
    ///
    /// # Errors
    /// When the classes need more than the slice; [`Pool::bytes_for`] is always enough.
    pub fn on_slice(slice: ArenaSlice, classes: &[ClassSpec]) -> Result<Pool, CarveError> {
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
        Ok(unsafe { Pool::build(base, len, layout, regions, Memory::Slice(slice)) })
    }

    /// A pool on as much of an arena as it needs.
    pub fn on_arena(arena: &Arena, classes: &[ClassSpec]) -> Result<Pool, CarveError> {
        Pool::on_slice(arena.carve(Pool::bytes_for(classes))?, classes)
    }

    /// The bytes that these classes need, wherever in an arena they come to lie.
    pub fn bytes_for(classes: &[ClassSpec]) -> usize {
        let most = |spec: &ClassSpec| {
            let size = stride(spec.size);
            let (unit, align) = placing(size);
            let mut slots = spec.count;
            // At multiples of its size no slot crosses an end. Other slots cross at most one more
            // end than the class has whole units, and the omitted slots make the class longer.
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
    ) -> Pool {
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
        Pool {
            inner: Rc::new(Inner {
                classes,
                regions,
                base,
                len,
                first_region,
                _memory: memory,
            }),
        }
    }

    /// A buffer of exactly `len` bytes (the handle's length; its class may be larger), with
    /// whatever was in it before. `None` when every class that is large enough is empty.
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

    /// As [`Pool::acquire`], but only if one of `beside` bytes is left afterwards.
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

    /// The largest buffer that this pool can ever give.
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

    /// The memory of this pool, region by region: a ring registers it as its fixed buffers, in the
    /// order of [`Pool::region_index`].
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.inner.regions.parts(self.inner.base, self.inner.len)
    }

    /// Whether a buffer is one of this pool's.
    #[inline]
    pub fn owns(&self, buf: &Buf) -> bool {
        Rc::ptr_eq(&self.inner, &buf.pool)
    }

    /// Where in [`Pool::regions`] a buffer lies; `None` when it is another pool's.
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
    pool: Rc<Inner>,
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

    /// The bytes, for writing. `None` while another handle shares them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let start = self.as_mut_ptr()?;
        // SAFETY: the range is inside this buffer of the pool, which `self.pool` keeps mapped;
        // no other handle covers any byte of it (`as_mut_ptr` checks), and it is borrowed mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.len as usize) })
    }

    /// Whether no other handle shares any of the bytes.
    #[inline]
    pub fn is_unshared(&self) -> bool {
        let class = self.class();
        let at = self.index as usize;
        class.refs[at].get() - class.splits[at].get() == 1
    }

    /// The address of the first byte, for the kernel or a device to write to. `None` while another
    /// handle shares any of the bytes.
    pub fn as_mut_ptr(&mut self) -> Option<*mut u8> {
        self.is_unshared().then(|| self.as_ptr().cast_mut())
    }

    /// A handle on `offset..offset + len` of this one.
    ///
    /// # Panics
    /// When the range is not inside this handle's.
    pub fn slice(&self, offset: usize, len: usize) -> Buf {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "slice outside buffer"
        );
        let mut part = self.clone();
        part.offset += offset as u32;
        part.len = len as u32;
        part
    }

    /// Keeps the first `at` bytes and answers a handle on the rest: two handles that share no
    /// byte, each of which may be written.
    ///
    /// # Panics
    /// When `at` is not inside this handle's range.
    pub fn split_off(&mut self, at: usize) -> Buf {
        assert!(at <= self.len(), "split outside buffer");
        let rest = self.slice(at, self.len() - at);
        self.len = at as u32;
        let splits = &self.class().splits[self.index as usize];
        splits.set(splits.get() + 1);
        rest
    }

    /// Takes back what [`Buf::split_off`] answered: `rest` must begin where this handle ends.
    /// Otherwise it is handed back.
    pub fn unsplit(&mut self, rest: Buf) -> Result<(), Buf> {
        let adjoins = Rc::ptr_eq(&self.pool, &rest.pool)
            && (self.class, self.index) == (rest.class, rest.index)
            && self.offset + self.len == rest.offset;
        if !adjoins {
            return Err(rest);
        }
        self.len += rest.len;
        Ok(())
    }

    /// Exchanges this buffer and its bytes for the free buffer of its class that was returned last:
    /// the cache probably holds that one. Changes nothing if no buffer is free, or if another
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

    /// The address of the first byte: for handing to the kernel or a device, together with a
    /// handle kept until it is done.
    pub fn as_ptr(&self) -> *const u8 {
        let class = self.class();
        let at = self.index as usize * class.size + self.offset as usize;
        // SAFETY: `index` and `offset` are inside the class's memory by construction.
        unsafe { class.base.as_ptr().add(at) }
    }

    /// The key of the device in `slot` for all of this buffer, if that device knows it by one.
    #[inline]
    pub fn key(&self, slot: usize) -> Option<u64> {
        self.pool.regions.key(self.as_ptr(), self.len(), slot)
    }

    /// The address by which the device in `slot` knows the first byte. For a device that registered
    /// whole regions and whose keys are the addresses of their first bytes.
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

    /// How far into its region the first byte is: with a key that is an IOVA, of a device that
    /// registered whole regions, the device's address of it is their sum.
    #[inline]
    pub fn region_offset(&self) -> usize {
        self.pool.regions.region_offset(self.as_ptr())
    }

    /// Where in [`Pool::regions`] of its pool this buffer lies.
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
    fn clone(&self) -> Buf {
        let refs = &self.class().refs[self.index as usize];
        // A handle may be forgotten; four billion of them must not look like none.
        refs.set(
            refs.get()
                .checked_add(1)
                .expect("no buffer has four billion handles"),
        );
        Buf {
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

/// Where the buffers of all classes lie in a memory.
struct Layout {
    classes: Vec<Placed>,
    /// Bytes from the start of the memory to the end of the last buffer.
    end: usize,
}

struct Placed {
    size: usize,
    /// From the start of the memory.
    offset: usize,
    /// Room for so many buffers, …
    slots: usize,
    /// … of which these are used, the one to give first last.
    usable: Vec<u32>,
}

impl Layout {
    /// In memory that begins `start` bytes into its mapping, a multiple of [`SLICE_ALIGN`].
    fn new(start: usize, specs: &[ClassSpec]) -> Layout {
        let mut specs = specs.to_vec();
        specs.sort_by_key(|c| c.size);
        let mut at = start;
        let mut classes = Vec::with_capacity(specs.len());
        for spec in specs {
            let size = stride(spec.size);
            // A device that wants aligned buffers gets them where the size allows.
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
        Layout {
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

/// The distance of two buffers of a class: whole sectors, less than a region.
fn stride(size: usize) -> usize {
    assert!(
        size > 0 && size <= REGION_MAX,
        "a buffer of {size} bytes is not possible"
    );
    size.next_multiple_of(512)
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
