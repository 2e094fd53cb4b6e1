//! Detaches a controller: deletes its I/O queues, shuts it down (CC.SHN, Base 3.6.1), and disables
//! it (CC.EN). A controller that is not live skips these steps. In every case the driver then stops
//! the controller's memory accesses, and ends its queues and tasks.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::registers::{Cap, Cc, Csts, offset};
use nacre_reactor::CoreHandle;

use super::Controller;
use super::commands::Commands;
use crate::error::ControlError;
use crate::function::GONE;
use crate::info::State;

/// Minimum and maximum time for a controller's shutdown, whatever RTD3E reports.
const SHUTDOWN_MIN: Duration = Duration::from_secs(5);
const SHUTDOWN_MAX: Duration = Duration::from_secs(60);
/// Time limit for each command that deletes a queue, and for the admin commands of other callers to
/// complete. A controller that does not delete its queues is disabled nevertheless.
const DELETE: Duration = Duration::from_secs(2);
/// Interval at which pending admin commands and CSTS are checked.
const LOOK: Duration = Duration::from_millis(1);
/// CC.SHN: normal shutdown.
const SHN_NORMAL: u32 = 1;

impl Controller {
    /// Detaches the controller, on its home reactor. I/O in flight, and later I/O, completes with
    /// [`nacre_bdev::Status::Gone`]. A failed step is only logged. Does nothing if the controller
    /// is detached already.
    pub(crate) async fn shut_down(self: &Arc<Self>, core: &CoreHandle) {
        let _one = self.lifecycle.lock().await;
        let before = self.shared.state();
        if before == State::Detached {
            return;
        }
        self.shared.quiesce_all(core).await;
        if before == State::Live {
            self.admin.reject_new();
            self.let_finish(core).await;
            self.delete_all(core).await;
            self.commands(core).notify_shutdown().await;
        }
        let namespaces: Vec<u32> = self.namespaces.lock().keys().copied().collect();
        for nsid in namespaces {
            self.drop_namespace(nsid);
        }
        self.set_state(State::Detached);
        self.stop_all(core).await;
    }

    /// Fails waiting admin commands, stops the controller's memory accesses, and ends its queues,
    /// poller and tasks. The state is [`State::Detached`] already, at which the tasks end.
    pub(super) async fn stop_all(self: &Arc<Self>, core: &CoreHandle) {
        self.admin.close(ControlError::Detached);
        self.shared.quiesce_all(core).await;
        self.commands(core).stop_memory_access().await;
        self.shared.end_queues();
        self.remove_poller(core);
        if self.shared.properties().vectors > 0 {
            let disconnected = self.shared.function().interrupts(0);
            if let Err(error) = disconnected {
                tracing::warn!(controller = self.name(), %error, "interrupts stay connected");
            }
        }
        // Each task checks the state once more, and ends.
        self.stop.notify_waiters();
        self.shared.reported.notify_one();
        self.admin.news.notify_one();
    }

    /// Waits for the admin commands of other callers, at most for [`DELETE`].
    async fn let_finish(&self, core: &CoreHandle) {
        let deadline = core.now() + DELETE;
        while self.admin.is_awaited() && core.now() < deadline {
            core.after(LOOK).await;
        }
    }

    async fn delete_all(&self, core: &CoreHandle) {
        for link in self.shared.all_links() {
            if let Err(error) = self.commands(core).delete_queue(&link, DELETE).await {
                tracing::warn!(controller = self.name(), qid = link.qid, %error, "NVMe queue pair not deleted");
                return;
            }
        }
    }
}

impl Commands<'_> {
    /// Requests a normal shutdown, waits until the controller has written its cache (CSTS.SHST) or
    /// the time limit ends, and disables the controller. Does nothing if it was removed or is not
    /// enabled.
    async fn notify_shutdown(self) {
        let function = self.shared.function();
        let cc = Cc(function.read32(offset::CC));
        if function.read32(offset::CSTS) == GONE || !cc.is_enabled() {
            return;
        }
        function.write32(offset::CC, cc.with_shn(SHN_NORMAL).0);
        let limit = self
            .shared
            .properties()
            .rtd3e
            .clamp(SHUTDOWN_MIN, SHUTDOWN_MAX);
        let deadline = self.core.now() + limit;
        loop {
            let csts = function.read32(offset::CSTS);
            if csts == GONE || Csts(csts).shst() == Csts::SHST_COMPLETE {
                break;
            }
            if self.core.now() >= deadline {
                tracing::warn!(
                    controller = self.name(),
                    ?limit,
                    "NVMe controller did not shut down in time"
                );
                break;
            }
            self.core.after(LOOK).await;
        }
        let cap = Cap(function.read64(offset::CAP));
        if let Err(error) = self.disable(&*function, cap).await {
            tracing::warn!(controller = self.name(), %error, "NVMe controller was not disabled");
        }
    }
}
