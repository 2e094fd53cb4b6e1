//! Finds replicas that owe an answer and do not complete anything. Such a replica is out before the
//! deadline in two cases:
//!
//! - Its device is known not to answer ([`crate::handle::Devices::is_awaited`]): at once.
//! - It has been silent for [`crate::handle::Devices::patience`]. Its node has a lease, and cannot
//!   be reached. The decision about one replica writes to the others, so that two silent ones would
//!   take a deadline each.
//!
//! A replica owes an answer while a lane or the control has I/O in flight to it and nothing
//! completes. That is looked at in short intervals. So time in which this process did not run
//! counts as one of them, and not against the replica.

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
            let present = self.context.state.borrow().present();
            for (slot, live) in present.iter().filter(|(_, live)| is_remote(live)) {
                self.look_at(*slot, live, &mut silences[*slot]);
            }
        }
    }

    fn look_at(&self, slot: usize, live: &Live, silence: &mut Silence) {
        let shared = &self.context.shared;
        let totals = &shared.totals;
        let count = |of: &[std::sync::atomic::AtomicU64]| of[slot].load(Ordering::Relaxed);
        let now = Silence {
            incarnation: live.incarnation,
            completed: count(&totals.reads) + count(&totals.writes) + live.disk.completed(),
            looks: silence.looks,
        };
        let owes = shared.outstanding(slot) > 0 || live.disk.under_way() > 0;
        if !owes || now != *silence {
            *silence = Silence { looks: 0, ..now };
            live.disk.set_silent(false);
            return;
        }
        silence.looks = silence.looks.saturating_add(1);
        let devices = &self.media.devices;
        let patience = match devices.is_awaited(&live.disk.device) {
            false => Some(UNAWAITED),
            true => devices.patience(),
        };
        let is_over = patience.is_some_and(|patience| silence.looks >= looks_in(patience));
        if is_over && !live.disk.is_silent() {
            live.disk.set_silent(true);
            self.context
                .suspect(slot, live.incarnation, Failure::Deadline);
            // Decisions wait for the control's own I/O.
            live.disk.give_up();
        }
    }
}
