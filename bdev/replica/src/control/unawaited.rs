//! Finds replicas that owe an answer and do not complete anything. Such a replica is out before the
//! deadline in two cases:
//!
//! - Its device is known not to answer ([`crate::handle::Devices::is_awaited`]): at once.
//! - It has been silent for [`crate::handle::Devices::patience`], and another in-sync replica
//!   answers. Its node has a lease, and cannot be reached. The decision about one replica writes to
//!   the others, so that two silent ones would take a deadline each.
//!
//! A replica owes an answer while a lane or the control has I/O in flight to it and nothing
//! completes. That is looked at in short intervals. So time in which this process did not run
//! counts as one of them, and not against the replica. Devices of the holder's own node are not
//! looked at: their deadline decides.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::context::Context;
use super::media::{Media, UNAWAITED};
use super::state::Live;
use crate::model::MAX_REPLICAS;
use crate::shared::Failure;

/// Interval of the looks at remote replicas.
const LOOK: Duration = Duration::from_millis(100);

/// Looks without progress that take so long.
fn looks_in(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / LOOK.as_millis()).unwrap_or(u32::MAX)
}

pub(super) struct Unawaited {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
}

/// The looks at one slot that found it silent, one after the other.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Silence {
    incarnation: u64,
    completed: u64,
    looks: u32,
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
            self.context.core.after(LOOK).await;
            let mut present = self.context.state.borrow().present();
            present.retain(|(_, live)| is_remote(live));
            let former = silences;
            silences = Default::default();
            for (slot, live) in &present {
                silences[*slot] = self.look_at(*slot, live, former[*slot]);
            }
            for (slot, live) in &present {
                if self.is_over(*slot, live, &silences) && !live.disk.is_silent() {
                    live.disk.set_silent(true);
                    self.context
                        .suspect(*slot, live.incarnation, Failure::Deadline);
                    // Decisions wait for the control's own I/O.
                    live.disk.give_up();
                }
            }
        }
    }

    fn look_at(&self, slot: usize, live: &Live, former: Silence) -> Silence {
        let shared = &self.context.shared;
        let totals = &shared.totals;
        let count = |of: &[std::sync::atomic::AtomicU64]| of[slot].load(Ordering::Relaxed);
        let now = Silence {
            incarnation: live.incarnation,
            completed: count(&totals.reads) + count(&totals.writes) + live.disk.completed(),
            looks: former.looks,
        };
        let owes = shared.outstanding(slot) > 0 || live.disk.under_way() > 0;
        if !owes || now != former {
            live.disk.set_silent(false);
            return Silence { looks: 0, ..now };
        }
        let looks = former.looks.saturating_add(1);
        Silence { looks, ..now }
    }

    /// True if the replica has been silent for longer than the volume waits for it.
    fn is_over(&self, slot: usize, live: &Live, silences: &[Silence; MAX_REPLICAS]) -> bool {
        let devices = &self.media.devices;
        let looks = silences[slot].looks;
        if !devices.is_awaited(&live.disk.device) {
            return looks >= looks_in(UNAWAITED);
        }
        let Some(patience) = devices.patience() else {
            return false;
        };
        // Without another replica that answers, I/O waits anyway: the silent one may still answer,
        // and its deadline decides. A silence of half the patience is none yet.
        let answers = |other: &usize| silences[*other].looks <= looks_in(patience) / 2;
        let state = self.context.state.borrow();
        let mut others = state.in_sync().map(|(other, _)| other);
        looks >= looks_in(patience) && others.any(|other| other != slot && answers(&other))
    }
}
