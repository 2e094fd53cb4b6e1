//! State that the tasks of one open volume share. These tasks run on one reactor: they write the
//! dirty-region log, resync, verify, and take failed replicas out. They share the volume's state,
//! the signals that wake tasks, and the connections to lanes (the I/O queues of each core),
//! operators and observers.

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_reactor::{CoreHandle, LocalTask};
use parking_lot::Mutex;
use tokio::sync::Notify;
use uuid::Uuid;

use super::reasons::describe;
use super::state::State;
use crate::answers::AnswerLease;
use crate::handle::{
    Observer, ReplicaDevice, VolumeError, VolumeEvent, VolumeEventKind, VolumeStatus,
};
use crate::mutation::Mutation;
use crate::shared::{Failure, Shared};

pub(super) struct Context {
    pub core: CoreHandle,
    pub id: Uuid,
    pub shared: Arc<Shared>,
    pub state: RefCell<State>,
    pub status: Arc<Mutex<VolumeStatus>>,
    pub observer: Arc<dyn Observer>,
    /// See [`crate::answers`].
    pub lease: Option<Arc<dyn AnswerLease>>,
    pub signals: Signals,
    pub tasks: RefCell<Vec<LocalTask<()>>>,
}

/// Signals that wake tasks. Each remembers one notification.
#[derive(Default)]
pub(super) struct Signals {
    /// Requests and reports of lanes, from other cores.
    pub news: Arc<Notify>,
    /// Regions to mark in the dirty-region log.
    pub log: Notify,
    /// Reports of failed I/O.
    pub failures: Notify,
    /// Blocks that a read could not take from a replica.
    pub repair: Notify,
    /// Regions to remove from the dirty-region log.
    pub clean: Notify,
    /// An absent replica is due for another attempt to attach it.
    pub probe: Notify,
    /// A replica to resync.
    pub resync: Notify,
    /// Regions in `State::urgent`: a resync that pauses copies them at once.
    pub urgent: Notify,
    /// A verification begins or ends.
    pub verify: Notify,
    /// The devices may have changed: a check whether one is gone or has lost data.
    pub watch: Notify,
    /// A replica was attached.
    pub attached: Notify,
    /// Replicas to ask for their confirmation.
    pub confirmation: Notify,
    /// A replica has this holder's reservation.
    pub fence: Notify,
}

impl Context {
    pub(super) fn name(&self) -> String {
        self.state.borrow().record.name.clone()
    }

    pub(super) fn find_slot(&self, replica: &str) -> Result<usize, VolumeError> {
        let found = self.state.borrow().slot_of(replica);
        found.ok_or_else(|| VolumeError::NoReplica {
            name: self.name(),
            replica: replica.to_owned(),
        })
    }

    /// Fences this holder, because another one has the volume: nothing is acknowledged from now on.
    pub(super) fn fence(&self, why: String) {
        if self.state.borrow().fenced.is_some() || Mutation::ForgetFence.is_active() {
            return;
        }
        self.state.borrow_mut().fenced = Some(why.clone());
        self.publish();
        self.emit(VolumeEventKind::Fenced { why });
    }

    /// Reports a replica that failed an I/O of the control.
    pub(super) fn suspect(&self, slot: usize, incarnation: u64, why: Failure) {
        self.fence_if_superseded(why);
        self.shared.report(crate::shared::Report {
            slot,
            incarnation,
            op: nacre_bdev::Op::Write,
            lba: 0,
            why,
        });
    }

    pub(super) fn freeze(&self, why: &str) {
        if !std::mem::replace(&mut self.state.borrow_mut().frozen, true) {
            self.emit(VolumeEventKind::Frozen { why: why.into() });
        }
    }

    pub(super) fn thawed(&self) {
        if std::mem::replace(&mut self.state.borrow_mut().frozen, false) {
            self.emit(VolumeEventKind::Thawed);
        }
    }

    pub(super) fn replica_id(&self, slot: usize) -> Uuid {
        let state = self.state.borrow();
        state.record.replica(slot).map(|m| m.id).unwrap_or_default()
    }

    /// Fences the volume if the failure proves that another holder owns it.
    pub(super) fn fence_if_superseded(&self, why: Failure) {
        if why.is_fenced() {
            self.fence(describe(why));
        }
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.state.borrow().fenced.is_some()
    }

    pub(super) fn must_not_be_fenced(&self) -> Result<(), VolumeError> {
        let state = self.state.borrow();
        match state.fenced.clone() {
            None => Ok(()),
            Some(why) => Err(VolumeError::Fenced {
                name: state.record.name.clone(),
                why,
            }),
        }
    }

    /// With a lease, each replica must support reservations: it refuses writes of a former holder,
    /// and confirms this one. Without them, a holder that was stopped for a while and continues
    /// would still write to the device.
    pub(super) fn must_reserve(&self, device: &ReplicaDevice) -> Result<(), VolumeError> {
        if self.lease.is_none() || device.layer.reserves() {
            return Ok(());
        }
        Err(VolumeError::NoReservations {
            device: device.layer.name().to_owned(),
        })
    }

    pub(super) fn emit(&self, what: VolumeEventKind) {
        let name = self.state.borrow().record.name.clone();
        tracing::debug!(volume = name, event = %serde_json::json!(what), "volume event");
        self.observer.event(VolumeEvent {
            volume: self.id,
            name,
            what,
        });
    }

    /// Publishes the view and the status of the present state.
    pub(super) fn publish(&self) {
        let mut view = self.state.borrow().view();
        view.lease.clone_from(&self.lease);
        self.shared.publish(view);
        self.signals.watch.notify_one();
        self.signals.attached.notify_one();
        self.refresh_status();
    }

    pub(super) fn refresh_status(&self) {
        *self.status.lock() = self.state.borrow().status(&self.shared);
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let task = self.core.spawn_local(task);
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }

    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.state.borrow().record.settings.deadline_ms.max(1))
    }

    /// Reports a failing replica like [`Context::suspect`], for a read.
    pub(super) fn suspect_read(&self, slot: usize, incarnation: u64, why: Failure) {
        self.shared.report(crate::shared::Report {
            slot,
            incarnation,
            op: nacre_bdev::Op::Read,
            lba: 0,
            why,
        });
    }
}
