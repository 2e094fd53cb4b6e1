//! Fixed buffer pools: a few size classes, owned by one core, counted when they run out.

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::ptr::NonNull;
use std::rc::Rc;

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
    /// Requests answered `None`.
    pub exhausted: u64,
}

struct Class {
    size: usize,
    base: NonNull<u8>,
    /// Handles alive per buffer; a buffer with none is on the free list.
    refs: Box<[Cell<u32>]>,
    /// Handles per buffer that came from [`Buf::split_off`] and share no byte with their origin:
    /// `refs - splits == 1` says that no two handles overlap.
    splits: Box<[Cell<u32>]>,
    free: RefCell<Vec<u32>>,
    low_water: Cell<usize>,
    exhausted: Cell<u64>,
}

struct Inner {
    classes: Vec<Class>,
    /// Keeps the memory mapped for as long as a pool or a buffer of it lives.
    _memory: Box<dyn std::any::Any>,
}

/// Buffers of a few size classes, owned by one core.
///
/// Neither `Send` nor `Sync`: taking and giving back is a few plain instructions.
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
}

impl Pool {
    /// A pool on ordinary heap memory: for tests and for tools that talk to no device.
    pub fn heap(classes: &[ClassSpec]) -> Pool {
        let total: usize = classes.iter().map(|c| c.size * c.count).sum();
        let pages = total.div_ceil(4096).max(1);
        let mut memory: Box<[Page]> = vec![Page([0; 4096]); pages].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr().cast::<u8>()).expect("a box is never null");
        // SAFETY: `memory` has room for every class, moves into the pool with the pointer, and its
        // heap allocation does not move.
        unsafe { Pool::on_memory(base, pages * 4096, classes, Box::new(memory)) }
    }

    /// A pool on `len` bytes at `base`, which `owner` keeps alive.
    ///
    /// # Safety
    /// `base..base + len` is valid, writable, unaliased by any other owner and stays so until
    /// `owner` is dropped.
    pub(crate) unsafe fn on_memory(
        base: NonNull<u8>,
        len: usize,
        classes: &[ClassSpec],
        owner: Box<dyn std::any::Any>,
    ) -> Pool {
        let mut specs = classes.to_vec();
        specs.sort_by_key(|c| c.size);
        let mut offset = 0;
        let mut built = Vec::with_capacity(specs.len());
        for spec in specs {
            let bytes = spec.size * spec.count;
            assert!(offset + bytes <= len, "buffer classes do not fit their memory");
            // SAFETY: just checked to be inside the memory.
            let class_base = unsafe { base.add(offset) };
            offset += bytes;
            built.push(Class {
                size: spec.size,
                base: class_base,
                refs: (0..spec.count).map(|_| Cell::new(0)).collect(),
                splits: (0..spec.count).map(|_| Cell::new(0)).collect(),
                free: RefCell::new((0..spec.count as u32).rev().collect()),
                low_water: Cell::new(spec.count),
                exhausted: Cell::new(0),
            });
        }
        Pool { inner: Rc::new(Inner { classes: built, _memory: owner }) }
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

    /// The largest buffer that this pool can ever give.
    pub fn max_len(&self) -> usize {
        self.inner.classes.last().map_or(0, |c| c.size)
    }

    pub fn stats(&self) -> Vec<ClassStats> {
        let stat = |c: &Class| ClassStats {
            size: c.size,
            count: c.refs.len(),
            free: c.free.borrow().len(),
            low_water: c.low_water.get(),
            exhausted: c.exhausted.get(),
        };
        self.inner.classes.iter().map(stat).collect()
    }
}

/// A counted handle on a buffer, or on a part of one.
///
/// Cloning shares the bytes, which are then read-only; [`Buf::bytes_mut`] needs the only handle.
/// The buffer returns to its pool when its last handle is dropped, so whoever gives memory to a
/// device or to the kernel keeps a handle until that is done with it.
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
        let class = self.class();
        let at = self.index as usize;
        if class.refs[at].get() - class.splits[at].get() != 1 {
            return None;
        }
        let start = self.as_ptr();
        // SAFETY: the range is inside this buffer of the pool, which `self.pool` keeps mapped;
        // no other handle covers any byte of it (see `Class::splits`), and it is borrowed mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(start.cast_mut(), self.len as usize) })
    }

    /// A handle on `offset..offset + len` of this one.
    ///
    /// # Panics
    /// When the range is not inside this handle's.
    pub fn slice(&self, offset: usize, len: usize) -> Buf {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len()), "slice outside buffer");
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

    fn class(&self) -> &Class {
        &self.pool.classes[self.class as usize]
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside this buffer of the pool, which `self.pool` keeps mapped, and
        // nobody writes through a handle while it is shared (`bytes_mut` checks).
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len as usize) }
    }
}

impl Clone for Buf {
    fn clone(&self) -> Buf {
        let refs = &self.class().refs[self.index as usize];
        refs.set(refs.get() + 1);
        Buf { pool: Rc::clone(&self.pool), ..*self }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let class = self.class();
        let refs = &class.refs[self.index as usize];
        refs.set(refs.get() - 1);
        // `refs - splits` must not shrink while handles may overlap: whichever handle goes takes
        // one split along, so the difference falls to 1 only when a single handle is left.
        let splits = &class.splits[self.index as usize];
        splits.set(splits.get().saturating_sub(1));
        if refs.get() == 0 {
            class.free.borrow_mut().push(self.index);
        }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({}:{}+{}..{})", self.class, self.index, self.offset, self.offset + self.len)
    }
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

#[cfg(test)]
mod split_tests {
    use super::*;

    fn one_buffer() -> (Pool, Buf) {
        let pool = Pool::heap(&[ClassSpec { size: 4096, count: 1 }]);
        let buf = pool.acquire(4096).expect("the pool is full");
        (pool, buf)
    }

    /// Parts that share no byte are written independently and come together again.
    #[test]
    fn split_parts_are_writable_and_rejoin() {
        let (pool, mut head) = one_buffer();
        let mut tail = head.split_off(1024);
        let last = tail.split_off(1024);
        head.bytes_mut().expect("no overlap").fill(1);
        tail.bytes_mut().expect("no overlap").fill(2);
        let last = head.unsplit(last).expect_err("does not adjoin");
        assert_eq!(last.len(), 2048);
        head.unsplit(tail).expect("adjoins");
        head.unsplit(last).expect("adjoins");

        assert_eq!(pool.stats()[0].free, 0);
        assert!(head.bytes_mut().is_some());
        drop(head);
        assert_eq!(pool.stats()[0].free, 1);
    }

    /// A clone of a part makes every handle read-only until only one handle is left.
    #[test]
    fn overlap_is_read_only() {
        let (_pool, mut head) = one_buffer();
        let mut tail = head.split_off(512);
        let shared = tail.clone();
        assert!(tail.bytes_mut().is_none() && head.bytes_mut().is_none());
        drop(head);
        assert!(tail.bytes_mut().is_none());
        drop(shared);
        assert!(tail.bytes_mut().is_some());
    }
}
