//! Creates queue pairs for new connections, removes ended ones, and runs their periodic work.

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_reactor::Nanos;

use crate::queues::queue_group::QueueGroup;
use crate::queues::queue_pair::{ConnectionEnds, QueuePair, Stage};
use crate::queues::resources::Resources;
use crate::queues::{admin, connect};
use crate::subsystems::association::{Phase, Teardown};
use crate::subsystems::config::IoLimits;
use crate::transport::{CloseWhy, Closed, ConnId};

/// Interval of the periodic work of associations (keep-alive, cleanup).
const UPKEEP: Duration = Duration::from_millis(100);

/// Time limit of a connection without a Connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl QueueGroup {
    pub(super) fn open_queue(
        &mut self,
        (port, conn): (usize, ConnId),
        ends: ConnectionEnds,
        now: Nanos,
    ) {
        let Some(id) = self.queues.reserve() else {
            tracing::warn!(peer = %ends.peer, limit = self.queues.max(), "connection refused: this core has all of its queue pairs");
            return self.core.ports.turn_away(port, conn);
        };
        let caps = self.core.ports.caps_of(port, conn);
        let limits = IoLimits::new(&self.core.target.config, caps);
        self.core.buffers.serve(caps);
        let qp = QueuePair::new(id, (port, conn), ends, limits, now);
        self.queues.insert(qp);
        self.core.ports.assign(port, conn, id);
    }

    /// Removes an ending queue pair once neither devices nor the transport have commands of it.
    pub(super) fn reap(&mut self, q: u32) {
        let (qp, core) = (self.queues.present(q), &mut self.core);
        if qp.stage != Stage::Ending || qp.inflight > 0 {
            return;
        }
        if let Some(response) = qp.closing.response.take()
            && !qp.closing.is_closed
        {
            core.ports.respond(qp, *response);
            return core.ports.close(qp, CloseWhy::Drained);
        }
        if !qp.closing.is_closed {
            return;
        }
        let qp = self.queues.remove(q);
        core.devices.stale = true;
        core.ports.forget(&qp);
        if let Some(association) = &qp.association
            && association.remove_queue(qp.qid) == 0
        {
            association.tear_down(Teardown::HostLeft);
            let (host, cntlid) = (&association.hostnqn, association.cntlid);
            let reason = association
                .teardown_reason()
                .map_or("unknown", Teardown::text);
            tracing::info!(subsystem = %association.subnqn, %host, cntlid, reason, "controller removed");
            if let Some(subsystem) = &qp.subsystem {
                subsystem.forget(association);
            }
        }
    }

    /// Runs the periodic work of all associations with a queue in this group.
    pub(super) fn upkeep(&mut self, now: Nanos) {
        self.upkeep_at = now + UPKEEP;
        for q in 0..self.queues.places() {
            if let Some(qp) = self.queues.get_mut(q) {
                self.core.upkeep(qp, now);
                self.after_access(q, now);
            }
        }
        let core = &mut self.core;
        core.devices.list_pending_cleanup();
        core.devices.release_unused(&self.queues, &core.sleepers);
        self.publish_counts();
    }

    fn publish_counts(&self) {
        let unassociated = self.queues.iter().filter(|qp| qp.association.is_none());
        let waiting = self.core.buffers.all_waiting() + self.core.devices.all_waiting();
        let counts = self.core.handle.counts();
        counts
            .unassociated
            .store(unassociated.count() as u64, Ordering::Relaxed);
        counts.waiting.store(waiting as u64, Ordering::Relaxed);
    }
}

impl Resources {
    /// Runs the periodic work of a queue pair.
    fn upkeep(&mut self, qp: &mut QueuePair, now: Nanos) {
        if qp.stage == Stage::Fresh && now.since(qp.opening.since) > CONNECT_TIMEOUT {
            tracing::warn!(peer = %qp.ends.peer, "no Connect within {CONNECT_TIMEOUT:?}");
            return self.close(qp, CloseWhy::Now);
        }
        if qp.stage == Stage::Fresh
            && let Some(index) = qp.opening.waiting.take()
        {
            return connect::run(&mut self.command(qp, index, now));
        }
        let Some(association) = &qp.association else {
            return;
        };
        let phase = association.phase();
        let reset = phase == Phase::Connected && !qp.is_admin();
        if (reset || phase == Phase::Closing) && qp.stage != Stage::Ending {
            return self.close(qp, CloseWhy::Now);
        }
        if phase == Phase::Closing && qp.closing.response.take().is_some() && !qp.closing.is_closed
        {
            self.ports.close(qp, CloseWhy::Now);
        }
        self.refresh_view(qp);
        let inflight = qp.requests.outstanding() as u64;
        qp.stats.inflight.store(inflight, Ordering::Relaxed);
        if qp.stage != Stage::Ending {
            self.authentication_upkeep(qp, now);
        }
        if qp.is_admin() && qp.stage == Stage::Live {
            admin::upkeep(self, qp, now);
        }
    }

    pub(super) fn connection_closed(&mut self, qp: &mut QueuePair, why: &Closed) {
        qp.closing.is_closed = true;
        match why {
            Closed::Local | Closed::Peer => {
                tracing::debug!(peer = %qp.ends.peer, qid = qp.qid, "connection closed: {why}");
            }
            _ => tracing::warn!(peer = %qp.ends.peer, qid = qp.qid, "connection lost: {why}"),
        }
        self.close(qp, CloseWhy::Now);
    }
}
