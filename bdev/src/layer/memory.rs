//! Memory for emulation: a bounce buffer that is always there, so that a job can always end whatever the pool's other
//! users hold, more from the pool while it has some, and zeroes to write.
//!
//! Both are one for all devices that a core uses, not for each: a core's pool has a few hundred large buffers, and a
//! host with a hundred namespaces must not find them all set aside. One is enough for jobs to end, one after the
//! other: who has it only reads and writes the device, for which nobody needs another.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use nacre_hugepages::{Buf, Pool};

thread_local! {
    /// What the queues of this core share. Of one pool, but for tests; and a pool that is too small for
    /// [`super::BOUNCE`] has one for each block size.
    static HERE: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
struct Shared {
    /// Never written again, and so shared with whoever is given a part of it.
    zeroes: Buf,
    reserve: RefCell<Option<Buf>>,
}

impl Shared {
    /// What the other queues of this core have, or two buffers more. `None`: the pool has none.
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
    /// Nothing that is always there; what is needed all the same has `len` bytes.
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
        // A device below may still look at what it was given last (a mirror that does not wait for a
        // member that left): that buffer is not to be read into before it is done.
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
