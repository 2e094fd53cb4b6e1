//! Memory for emulation: a reserved bounce buffer, so that a job can always finish whatever the
//! pool's other users hold, more buffers from the pool while it has some, and zeroes to write.
//!
//! All devices of a core share both. A core's pool has a few hundred large buffers, and a host with
//! a hundred namespaces must not reserve them all. One buffer is enough for jobs to finish in
//! sequence: its owner only reads and writes the device, and that needs no second buffer.

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
    /// Never written again, so I/O can share parts of it.
    zeroes: Buf,
    reserve: RefCell<Option<Buf>>,
}

impl Shared {
    /// The memory of the core's other queues, or two more buffers. `None`: the pool has none.
    fn of(pool: &Pool, len: usize) -> Option<Rc<Shared>> {
        HERE.with_borrow_mut(|here| {
            here.retain(|shared| shared.strong_count() > 0);
            let fits = |s: &Rc<Shared>| pool.owns(&s.zeroes) && s.zeroes.len() == len;
            if let Some(shared) = here.iter().filter_map(Weak::upgrade).find(fits) {
                return Some(shared);
            }
            let reserve = pool.acquire(len)?;
            let mut zeroes = pool.acquire(len)?;
            zeroes.bytes_mut()?.fill(0);
            let shared = Rc::new(Shared {
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
    pub fn none(len: usize) -> Memory {
        Memory { shared: None, len }
    }

    /// Buffers of `len` bytes. `None`: the pool has none.
    pub fn reserve(pool: &Pool, len: usize) -> Option<Memory> {
        let shared = Some(Shared::of(pool, len)?);
        Some(Memory { shared, len })
    }

    /// Bytes of a buffer; 0: there can be none.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn take(&mut self, pool: &Pool) -> Option<Buf> {
        // A device below may still read the last buffer (a mirror that does not wait for a failed
        // member): do not read into it before that member is done.
        let reserve = self.shared.as_ref().and_then(|shared| {
            let mut reserve = shared.reserve.borrow_mut();
            reserve.take_if(|buf| buf.is_unshared())
        });
        reserve.or_else(|| pool.acquire(self.len))
    }

    /// What zeroes are written from. `None`: the pool has nothing for it now.
    pub fn zeroes(&mut self, pool: &Pool) -> Option<&Buf> {
        if self.shared.is_none() {
            self.shared = Shared::of(pool, self.len);
        }
        self.shared.as_ref().map(|shared| &shared.zeroes)
    }

    pub fn give(&mut self, buf: Buf) {
        let Some(shared) = &self.shared else { return };
        let mut reserve = shared.reserve.borrow_mut();
        if reserve.is_none() && buf.len() == self.len {
            *reserve = Some(buf);
        }
    }
}
