//! One turn of a reactor, and its transition to sleep after the last idle turn.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::core::Core;
use crate::stats::Activity;
use crate::{Idle, Nanos, Work};

/// Bounds per turn for messages, futures and timers, so that many of one kind do not starve the
/// others.
const MESSAGES_PER_TURN: usize = 64;
const FUTURES_PER_TURN: usize = 64;
const TIMERS_PER_TURN: usize = 256;

/// Result of preparing to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SleepDecision {
    /// Work was found, or a poller is [`Idle::Busy`].
    No,
    /// All pollers are armed and the sleep is announced. Block until this time, then call
    /// [`Core::wake_up`].
    Until(Option<Nanos>),
}

impl Core {
    /// Runs pending work, within bounds. The tasks must be entered. Returns true if there was any.
    pub(crate) fn turn(&mut self) -> bool {
        let now = self.inner.shared.clock.now();
        self.account(now);
        self.inner.now.set(now);
        self.inner.shared.counters.pulse.turn(now);

        let messages = self.read_mail();
        self.apply_pending();
        let items = self.run_pollers(now);
        let futures = self.run_futures();
        self.apply_pending();
        let timers = self.fire_timers(now);

        let counters = &self.inner.shared.counters;
        counters.turns.add(1);
        counters.messages.add(messages);
        counters.futures_run.add(futures);
        counters.timers_fired.add(timers);
        counters
            .tasks
            .store(self.inner.tasks.len(), Ordering::Relaxed);
        counters
            .timers
            .store(self.inner.timers.borrow().len(), Ordering::Relaxed);
        counters.pulse.now_doing(Activity::Housekeeping);
        self.last_turn_worked = messages + items + futures + timers > 0;
        self.last_turn_worked
    }

    /// Arms every wake source, announces the sleep and polls once more. This order loses no wake-up
    /// (see [`crate::doorbell`]).
    pub(crate) fn prepare_to_sleep(&mut self) -> SleepDecision {
        let inner = Rc::clone(&self.handle.inner);
        let shared = &inner.shared;
        let Some(until) = self.arm() else {
            self.disarm();
            return SleepDecision::No;
        };
        shared.bell.doorbell().announce();
        let worked = self.turn();
        let disturbed = !shared.bell.doorbell().undisturbed()
            || shared.stop.load(Ordering::Relaxed)
            || self.slots.iter().any(|slot| !slot.armed || slot.unwatched)
            || !shared.mailbox.is_empty()
            || inner.tasks.woken_elsewhere()
            || inner.tasks.ready_len() > 0;
        if worked || disturbed {
            self.wake_up();
            return SleepDecision::No;
        }
        let timer = inner.timers.borrow().next();
        SleepDecision::Until(match (until, timer) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// Call this after a sleep, or when the sleep is cancelled.
    pub(crate) fn wake_up(&mut self) {
        self.inner.shared.bell.doorbell().awake();
        self.disarm();
    }

    /// Blocks until a wake source fires or `until`.
    pub(crate) fn sleep(&mut self, until: Option<Nanos>) -> std::io::Result<()> {
        let inner = Rc::clone(&self.handle.inner);
        let counters = &inner.shared.counters;
        let asleep = inner.shared.clock.now();
        self.account(asleep);
        // A deadline in the past becomes a timeout of zero, which still checks the descriptors.
        let timeout = until.map(|until| until.since(asleep));
        counters.pulse.turn(asleep);
        counters.pulse.now_doing(Activity::Asleep);
        let waited = inner.wake_set.borrow_mut().wait(timeout);
        let awake = inner.shared.clock.now();
        counters.pulse.turn(awake);
        counters.sleep_ns.add(awake.0 - asleep.0);
        counters.sleeps.add(1);
        if until.is_none_or(|until| awake < until) {
            counters.wakeups.add(1);
        }
        self.accounted = awake;
        self.last_turn_worked = false;
        inner.now.set(awake);
        self.wake_up();
        waited
    }

    /// Adds the time since the last call to the activity of the previous turn.
    fn account(&mut self, now: Nanos) {
        let spent = now.0.saturating_sub(self.accounted.0);
        self.accounted = now;
        let counters = &self.handle.inner.shared.counters;
        if self.last_turn_worked {
            counters.busy_ns.add(spent);
        } else {
            counters.idle_ns.add(spent);
        }
        if spent > counters.longest_turn_ns.read() {
            counters.longest_turn_ns.set(spent);
        }
    }

    fn read_mail(&mut self) -> u64 {
        let inner = &self.handle.inner;
        for read in 0..MESSAGES_PER_TURN {
            let Some(envelope) = inner.shared.mailbox.pop() else {
                return read as u64;
            };
            let label = inner.label(envelope.from);
            inner
                .shared
                .counters
                .pulse
                .now_doing(Activity::Message(label));
            (envelope.message)(&self.handle);
        }
        MESSAGES_PER_TURN as u64
    }

    fn run_pollers(&mut self, now: Nanos) -> u64 {
        let inner = Rc::clone(&self.handle.inner);
        let budget = inner.shared.tuning.poll_budget.load(Ordering::Relaxed);
        let mut items = 0;
        let mut at = 0;
        while at < self.slots.len() {
            let slot = &mut self.slots[at];
            inner
                .shared
                .counters
                .pulse
                .now_doing(Activity::Poller(slot.id));
            inner.set_current_poller(Some(slot.id));
            let work = slot.poller.poll(now, budget);
            inner.set_current_poller(None);
            slot.counters.run_count.add(1);
            if let Work::Did(did @ 1..) = work {
                slot.counters.busy_count.add(1);
                slot.counters.items.add(u64::from(did));
                items += u64::from(did);
            }
            at += 1;
            if inner.changes_pending() {
                at = self.apply_changes(at);
            }
        }
        items
    }

    fn run_futures(&mut self) -> u64 {
        let inner = &self.handle.inner;
        inner.tasks.collect_woken();
        // Run only those ready at the start: a future that wakes itself waits for the next turn.
        let count = inner.tasks.ready_len().min(FUTURES_PER_TURN);
        for _ in 0..count {
            let Some(run) = inner.tasks.pop_ready() else {
                break;
            };
            inner
                .shared
                .counters
                .pulse
                .now_doing(Activity::Future(*run.metadata()));
            run.run();
        }
        count as u64
    }

    fn fire_timers(&mut self, now: Nanos) -> u64 {
        let inner = &self.handle.inner;
        for fired in 0..TIMERS_PER_TURN {
            let Some(waker) = inner.timers.borrow_mut().pop_due(now) else {
                return fired as u64;
            };
            inner.shared.counters.pulse.now_doing(Activity::Timers);
            waker.wake();
        }
        TIMERS_PER_TURN as u64
    }

    fn apply_pending(&mut self) {
        if self.inner.changes_pending() {
            self.apply_changes(0);
        }
    }

    /// Arms the pollers. Returns `None` if one is busy, otherwise the earliest moment at which a
    /// poller must run.
    fn arm(&mut self) -> Option<Option<Nanos>> {
        let inner = Rc::clone(&self.handle.inner);
        let now = inner.now.get();
        let mut idle = Idle::Quiet;
        for slot in &mut self.slots {
            inner
                .shared
                .counters
                .pulse
                .now_doing(Activity::Arming(slot.id));
            slot.armed = true;
            idle = idle.and(slot.poller.arm(now));
            if slot.unwatched {
                idle = Idle::Busy;
            }
            if idle == Idle::Busy {
                break;
            }
        }
        inner
            .shared
            .counters
            .pulse
            .now_doing(Activity::Housekeeping);
        match idle {
            Idle::Busy => None,
            Idle::Quiet => Some(None),
            Idle::Until(until) if until == Nanos::MAX => Some(None),
            Idle::Until(until) => Some(Some(until)),
        }
    }

    fn disarm(&mut self) {
        for slot in &mut self.slots {
            if std::mem::take(&mut slot.armed) {
                slot.poller.disarm();
            }
        }
    }

    /// The idle time after which an adaptive reactor goes to sleep.
    pub(crate) fn busy_poll(&self) -> Duration {
        Duration::from_nanos(
            self.inner
                .shared
                .tuning
                .busy_poll_ns
                .load(Ordering::Relaxed),
        )
    }
}
