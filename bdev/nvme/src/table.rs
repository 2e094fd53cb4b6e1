//! The I/O queue pairs of this core: at most one per controller, shared by all bdev queues of the
//! core. Thread-local; only the core that created a queue pair uses it.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::injection::Injection;

use crate::link::{Report, Request};
use crate::phase::QueueState;
use crate::queue_pair::Pair;
use crate::queue_pair::inject::inject;
use crate::shared::{QueuePairError, Shared};

thread_local! {
    static HERE: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
    /// Queue pairs without users whose buffers the controller may still access by DMA.
    static LEFT: RefCell<Vec<Rc<RefCell<Pair>>>> = const { RefCell::new(Vec::new()) };
}

struct Entry {
    /// The controller's id.
    id: u64,
    pair: Weak<RefCell<Pair>>,
}

/// Returns this core's queue pair to `controller`. The first call asks the controller to create
/// the queues; later calls share them.
pub(crate) fn pair(controller: &Arc<Shared>) -> Result<Rc<RefCell<Pair>>, QueuePairError> {
    sweep();
    let id = controller.id();
    let known = HERE.with_borrow_mut(|here| {
        here.retain(|entry| entry.pair.strong_count() > 0);
        let mut mine = here.iter().filter(|entry| entry.id == id);
        mine.find_map(|entry| entry.pair.upgrade())
    });
    if let Some(pair) = known {
        return Ok(pair);
    }
    let link = controller.grant_link()?;
    let pair = Rc::new(RefCell::new(Pair::new(
        Arc::clone(controller),
        Arc::clone(&link),
    )));
    HERE.with_borrow_mut(|here| {
        here.push(Entry {
            id,
            pair: Rc::downgrade(&pair),
        })
    });
    controller.report(Report {
        qid: link.qid,
        generation: 0,
        want: Request::Make,
    });
    Ok(pair)
}

/// Sets a rule of error injection in this core's queue pair of controller `id`, if there is one.
pub(crate) fn inject_into(id: u64, opcode: u8, injection: Option<Injection>) {
    HERE.with_borrow(|here| {
        let mut mine = here.iter().filter(|entry| entry.id == id);
        if let Some(pair) = mine.find_map(|entry| entry.pair.upgrade()) {
            inject(&mut pair.borrow_mut(), opcode, injection);
        }
    });
}

/// Reports that a user of the queue pair has gone. After the last one, the controller deletes
/// both queues.
pub(crate) fn left(pair: &Rc<RefCell<Pair>>) {
    let here = pair.borrow();
    if here.has_lanes() {
        return;
    }
    let link = Arc::clone(here.link());
    let holds = here.holds();
    here.desert();
    drop(here);
    link.deserted.store(true, Ordering::Release);
    let _ = HERE.try_with(|entries| {
        let is_this = |entry: &Entry| std::ptr::eq(entry.pair.as_ptr(), Rc::as_ptr(pair));
        entries.borrow_mut().retain(|entry| !is_this(entry));
    });
    if holds {
        // The thread's end destroys this table. Memory that the controller may still write to is
        // leaked then.
        let _ = LEFT.try_with(|left| left.borrow_mut().push(Rc::clone(pair)));
    }
}

/// Releases the queue pairs without users whose buffers the controller can no longer access.
pub(crate) fn sweep() {
    let _ = LEFT.try_with(|left| {
        let mut left = left.borrow_mut();
        if left.is_empty() {
            return;
        }
        left.retain(|pair| {
            let mut pair = pair.borrow_mut();
            pair.reap_left();
            pair.holds() && pair.link().phase.state() != QueueState::Gone
        });
    });
}
