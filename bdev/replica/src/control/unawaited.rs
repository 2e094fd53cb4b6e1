//! Finds replicas that owe an answer and do not complete anything. Such a replica is out before the
//! deadline in two cases:
//!
//! - Its device is known not to answer ([`crate::handle::Devices::is_awaited`]): at once.
//! - It has been silent for [`crate::handle::Devices::patience`], does not answer a read of its
//!   label, and another in-sync replica answers such a read. The decision about one replica writes
//!   to the others, so that two silent ones would take a deadline each.
//!
//! A replica owes an answer while a lane or the control has I/O in flight to it and nothing
//! completes. That is checked in short intervals. So time in which this process did not run counts
//! as one of them, and not against the replica. Devices of the holder's own node are not checked:
//! their deadline decides.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::context::Context;
use super::media::{Media, UNAWAITED};
use super::state::Live;
use crate::format::{LabelCopy, label_offset};
use crate::model::MAX_REPLICAS;
use crate::shared::Failure;

/// Interval of the checks of remote replicas.
const INTERVAL: Duration = Duration::from_millis(100);

/// Number of checks in `time`.
fn checks_in(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / INTERVAL.as_millis()).unwrap_or(u32::MAX)
}

pub(super) struct Unawaited {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
}

/// The checks of one slot that found it silent, one after the other.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Silence {
    incarnation: u64,
    completed: u64,
    checks: u32,
}

impl Unawaited {
    pub(super) async fn find_silent(self) {
        let mut silences = [Silence::default(); MAX_REPLICAS];
        loop {
            let is_remote = |live: &Rc<Live>| !live.device.local;
            let remote = {
                let state = self.context.state.borrow();
                state.live.iter().flatten().any(is_remote)
            };
            if !remote {
                // Woken by each view: a replica may have been attached.
                self.context.signals.attached.notified().await;
                continue;
            }
            self.context.core.after(INTERVAL).await;
            let mut present = self.context.state.borrow().present();
            present.retain(|(_, live)| is_remote(live));
            let former = silences;
            silences = Default::default();
            for (slot, live) in &present {
                silences[*slot] = self.check(*slot, live, former[*slot]);
            }
            for (slot, live) in &present {
                if !live.disk.is_silent() && self.is_over(*slot, live, &mut silences[*slot]).await {
                    live.disk.set_silent(true);
                    self.context
                        .suspect(*slot, live.incarnation, Failure::Deadline);
                    // Decisions wait for the control's own I/O.
                    live.disk.give_up();
                }
            }
        }
    }

    fn check(&self, slot: usize, live: &Live, former: Silence) -> Silence {
        let shared = &self.context.shared;
        let totals = &shared.totals;
        let count = |of: &[std::sync::atomic::AtomicU64]| of[slot].load(Ordering::Relaxed);
        let now = Silence {
            incarnation: live.incarnation,
            completed: count(&totals.reads) + count(&totals.writes) + live.disk.completed(),
            checks: former.checks,
        };
        let owes = shared.outstanding(slot) > 0 || live.disk.under_way() > 0;
        if !owes || now != former {
            live.disk.set_silent(false);
            return Silence { checks: 0, ..now };
        }
        let checks = former.checks.saturating_add(1);
        Silence { checks, ..now }
    }

    /// True if the replica has been silent for longer than the volume waits for it.
    async fn is_over(&self, slot: usize, live: &Live, silence: &mut Silence) -> bool {
        let devices = &self.media.devices;
        if !devices.is_awaited(&live.disk.device) {
            return silence.checks >= checks_in(UNAWAITED);
        }
        let Some(patience) = devices.patience(&live.disk.device) else {
            return false;
        };
        // The replica has the rest of the time for its label.
        if silence.checks < checks_in(patience.saturating_sub(UNAWAITED)) {
            return false;
        }
        // Not again at the next check: the device may keep what it does not answer.
        silence.checks = 0;
        let completed = live.disk.completed();
        if self.answers(live).await || live.disk.completed() != completed {
            return false;
        }
        // Without another replica that answers, I/O waits anyway: the silent one may still answer,
        // and its deadline decides.
        let others: Vec<Rc<Live>> = {
            let state = self.context.state.borrow();
            let others = state.in_sync().filter(|(other, _)| *other != slot);
            others.map(|(_, live)| Rc::clone(live)).collect()
        };
        for other in others {
            if self.answers(&other).await {
                return self.note_silence(slot, live.incarnation);
            }
        }
        false
    }

    /// Counts the silence against the replica. Returns false if that incarnation left the slot
    /// while the labels were read: another replica may have the slot now, or the same one anew.
    fn note_silence(&self, slot: usize, incarnation: u64) -> bool {
        let now = self.context.core.now();
        let mut state = self.context.state.borrow_mut();
        let of_slot = state.live[slot].as_ref();
        let stays = of_slot.is_some_and(|live| live.incarnation == incarnation);
        if stays {
            state.retries[slot].fell_silent(now);
        }
        stays
    }

    /// True if the replica answers a read of its label.
    async fn answers(&self, live: &Live) -> bool {
        let read = self
            .media
            .read_block(&live.disk, label_offset(LabelCopy::A));
        matches!(self.context.core.timeout(UNAWAITED, read).await, Ok(Ok(_)))
    }
}
