//! Finds replicas that owe an answer and whose device is known not to answer
//! ([`crate::handle::Devices::is_awaited`]): such a replica is out at once, not after the deadline.
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
/// Looks without progress after which a replica is out.
const LOOKS: u32 = (UNAWAITED.as_millis() / LOOK.as_millis()) as u32;

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
        if !owes || now != *silence || self.media.devices.is_awaited(&live.disk.device) {
            *silence = Silence { looks: 0, ..now };
            return;
        }
        silence.looks += 1;
        if silence.looks == LOOKS {
            self.context
                .suspect(slot, live.incarnation, Failure::Deadline);
            // Decisions wait for the control's own I/O.
            live.disk.give_up();
        }
    }
}
