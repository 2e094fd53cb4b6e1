//! Computes the time until which a core may sleep without polling the queue.

use std::time::Duration;

use nacre_reactor::{Idle, Nanos};

use super::{IoQueue, QueuePhase, TIMEOUT_CHECK};

impl IoQueue {
    pub(super) fn arm_connection(&mut self, now: Nanos) -> Idle {
        let waits = !self.pending.is_empty();
        match (&mut self.queue, self.phase) {
            // A controller that reconnects or fails does not wake this core, so poll at intervals.
            (_, QueuePhase::Down { retry_at }) => {
                Idle::Until(retry_at.max(now + Duration::from_millis(1)))
            }
            (Some(queue), QueuePhase::Live) => {
                let idle = queue.arm(now);
                if let Some(until) = self.waits.no_access_until {
                    return idle.and(Idle::Until(until));
                }
                if self.unsent.is_empty() || queue.room() < 2 {
                    let look = if waits { self.check_at } else { Nanos::MAX };
                    idle.and(Idle::Until(look.min(now + TIMEOUT_CHECK)))
                } else {
                    Idle::Busy
                }
            }
            (Some(queue), QueuePhase::Draining) => {
                queue.arm(now).and(Idle::Until(now + TIMEOUT_CHECK))
            }
            (
                Some(queue),
                QueuePhase::Dialling { since }
                | QueuePhase::Connecting { since }
                | QueuePhase::Authenticating { since },
            ) => queue
                .arm(now)
                .and(Idle::Until(since + self.options.connect_timeout)),
            (None, _) => Idle::Busy,
        }
    }
}
