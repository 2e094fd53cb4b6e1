//! Memory for emulated operations: one reserved bounce buffer, more buffers from the pool while it
//! is not empty, and a buffer of zeroes. With the reserved buffer a job finishes even if the pool
//! is empty.
//!
//! All devices of a core share the reserved buffer and the zeroes. A core's pool has a few
//! hundred large buffers, and a host with a hundred namespaces must not reserve them all. One
//! buffer is enough for jobs to finish in sequence: its owner only reads and writes the device,
//! and that needs no second buffer.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use nacre_hugepages::{Buf, Pool};

thread_local! {
    /// The memory that the queues of this core share. All use one pool, except in tests. A pool
    /// that is too small for [`super::BOUNCE`] has one entry for each block size.
    static HERE: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct Shared {
    /// A buffer of zeroes. It is never written again, so several I/Os can share parts of it.
    zeroes: Buf,
    reserve: RefCell<Option<Buf>>,
}

impl Shared {
    /// Returns the shared memory of this core's other queues, or acquires two new buffers.
    /// `None`: the pool has no free buffer.
    fn of(pool: &Pool, len: usize) -> Option<Rc<Self>> {
        HERE.with_borrow_mut(|here| {
            here.retain(|shared| shared.strong_count() > 0);
            let fits = |s: &Rc<Self>| pool.owns(&s.zeroes) && s.zeroes.len() == len;
            if let Some(shared) = here.iter().filter_map(Weak::upgrade).find(fits) {
                return Some(shared);
            }
            let reserve = pool.acquire(len)?;
            let mut zeroes = pool.acquire(len)?;
            zeroes.bytes_mut()?.fill(0);
            let shared = Rc::new(Self {
                zeroes,
                reserve: RefCell::new(Some(reserve)),
            });
            here.push(Rc::downgrade(&shared));
            Some(shared)
        })
    }
}

#[derive(Debug)]
pub(super) struct Memory {
    shared: Option<Rc<Shared>>,
    len: usize,
}

impl Memory {
    /// Memory without reserved buffers; buffers taken on demand have `len` bytes.
    pub(super) fn none(len: usize) -> Self {
        Self { shared: None, len }
    }

    /// Memory with a reserved buffer of `len` bytes. `None`: the pool has no free buffer.
    pub(super) fn reserve(pool: &Pool, len: usize) -> Option<Self> {
        let shared = Some(Shared::of(pool, len)?);
        Some(Self { shared, len })
    }

    /// Bytes per buffer; 0: the pool has no buffers for emulation.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn take(&mut self, pool: &Pool) -> Option<Buf> {
        // A device below may still read the last buffer: a volume does not wait for a failed
        // replica. Do not read into the buffer before that replica is done.
        let reserve = self.shared.as_ref().and_then(|shared| {
            let mut reserve = shared.reserve.borrow_mut();
            reserve.take_if(|buf| buf.is_unshared())
        });
        reserve.or_else(|| pool.acquire(self.len))
    }

    /// The buffer of zeroes. `None`: the pool has no free buffer now.
    pub(super) fn zeroes(&mut self, pool: &Pool) -> Option<&Buf> {
        if self.shared.is_none() {
            self.shared = Shared::of(pool, self.len);
        }
        self.shared.as_ref().map(|shared| &shared.zeroes)
    }

    pub(super) fn give(&mut self, buf: Buf) {
        let Some(shared) = &self.shared else { return };
        let mut reserve = shared.reserve.borrow_mut();
        if reserve.is_none() && buf.len() == self.len {
            *reserve = Some(buf);
        }
    }
}
