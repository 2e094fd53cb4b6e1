//! The lease of a shared store: a holder loads the volume's record from the store every second, and
//! stops acknowledging I/O if the store does not reply in time.
//!
//! Another holder that opens the volume raises the epoch in the store, and waits for
//! [`TAKE_OVER`] before it serves. By then the previous holder has either read the new epoch, or
//! had no reply from the store for a whole lease: in both cases it has stopped acknowledging I/O.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_reactor::Nanos;

use super::context::Context;
use crate::store::VolumeStore;

/// Time from a request to the store for which its reply is valid. A holder notices the end when its
/// present request ends, so up to two [`RENEW`] late.
pub(super) const LEASE: Duration = Duration::from_secs(4);
/// How long a new holder waits: a lease, and half of one for the late end of the other holder's
/// lease, clock differences and I/O in flight.
pub(super) const TAKE_OVER: Duration = Duration::from_secs(6);
const RENEW: Duration = Duration::from_secs(1);

pub(super) struct Lease {
    pub context: Rc<Context>,
    pub store: Arc<dyn VolumeStore>,
}

impl Lease {
    pub(super) async fn keep_lease(self: Rc<Self>) {
        let mut last_reply = self.context.core.now();
        loop {
            // No wait passes the end of the lease.
            self.context.core.after(self.longest_wait(last_reply)).await;
            let sent = self.context.core.now();
            if sent.since(last_reply) >= LEASE {
                self.suspend();
            }
            let found = self
                .context
                .core
                .timeout(
                    self.rest(last_reply).unwrap_or(RENEW),
                    self.store.load(self.context.id),
                )
                .await;
            let (known, fenced) = {
                let state = self.context.state.borrow();
                (state.record.epoch, state.fenced.is_some())
            };
            if fenced {
                return;
            }
            match found {
                Ok(Ok(record)) if record.epoch > known => {
                    let why = format!("another holder opened it (epoch {})", record.epoch);
                    return self.context.fence(why);
                }
                Ok(Ok(_)) => {
                    last_reply = sent;
                    self.resume();
                }
                _ if self.context.core.now().since(last_reply) >= LEASE => self.suspend(),
                _ => {}
            }
        }
    }

    /// The rest of the lease, if it has not ended.
    fn rest(&self, last_reply: Nanos) -> Option<Duration> {
        let age = self.context.core.now().since(last_reply);
        (age < LEASE).then(|| LEASE - age)
    }

    fn longest_wait(&self, last_reply: Nanos) -> Duration {
        self.rest(last_reply).map_or(RENEW, |rest| rest.min(RENEW))
    }

    fn suspend(&self) {
        if !std::mem::replace(
            &mut self.context.state.borrow_mut().store_lease_expired,
            true,
        ) {
            let why = format!("no reply from the store for {LEASE:?}");
            self.context
                .emit(crate::handle::VolumeEventKind::StoreLost { why });
            self.context.publish();
        }
    }

    fn resume(&self) {
        if std::mem::replace(
            &mut self.context.state.borrow_mut().store_lease_expired,
            false,
        ) {
            self.context.emit(crate::handle::VolumeEventKind::StoreBack);
            self.context.publish();
        }
    }
}
