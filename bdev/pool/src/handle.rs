//! The management interface of an open pool, for other threads.

use std::sync::Arc;

use nacre_bdev::Claim;
use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

use crate::lvol::Lvol;
use crate::model::{
    Answer, Command, CommandRequest, Departed, ExternalWork, KeeperCommand, Outcome, PoolError,
    PoolStatus,
};
use crate::port::{KeeperMessage, Shared};

/// An open pool, usable from any thread. Dropping all handles does not close it.
#[derive(Clone)]
pub struct PoolHandle {
    pub(crate) shared: Arc<Shared>,
}

impl PoolHandle {
    pub fn id(&self) -> Uuid {
        self.shared.status.lock().id
    }

    pub fn status(&self) -> PoolStatus {
        self.shared.status.lock().clone()
    }

    /// Is notified when the use of the space passes a threshold, when writes begin or cease to wait
    /// for space, when the removal of a disk ends, and when the pool is interrupted or closes. For
    /// one task.
    pub fn news(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.news)
    }

    /// The disk that may have lost writes, of a pool that is [`crate::PoolState::Interrupted`].
    pub fn interrupted_by(&self) -> Option<String> {
        self.shared.losses.disk()
    }

    /// The removals that ended since the last call.
    pub fn take_departed(&self) -> Vec<Departed> {
        std::mem::take(&mut self.shared.departed.lock())
    }

    /// The names of the devices that a close, an export or a deletion has waited for.
    pub fn late_disks(&self) -> Vec<String> {
        self.shared.late.lock().clone()
    }

    /// The names of the pool's devices, first the one with the log. A device that is being added is
    /// not among them.
    pub fn bases(&self) -> Vec<String> {
        self.shared.bases()
    }

    /// Adds a claimed device to the pool. `force`: data on it is lost.
    pub async fn add_disk(&self, claim: Claim, force: bool) -> Result<(), PoolError> {
        let (answer, outcome) = oneshot::channel();
        let claim = Arc::new(claim);
        let command = KeeperCommand::AddDisk { claim, force };
        self.send(command, Answer::Outcome(answer))?;
        outcome.await.unwrap_or(Err(PoolError::Closed)).map(drop)
    }

    /// Makes a volume that shows the contents of a claimed device outside of the pool. The claim
    /// excludes writers of the device.
    pub async fn clone_external(
        &self,
        claim: Claim,
        id: Uuid,
        name: String,
    ) -> Result<Outcome, PoolError> {
        self.use_external(claim, ExternalWork::Clone { id, name })
            .await
    }

    /// Makes a claimed device outside of the pool the parent of a thin volume, whose own units stay
    /// on top. No queue of the volume may be open.
    pub async fn set_external_parent(
        &self,
        claim: Claim,
        lvol: Uuid,
    ) -> Result<Outcome, PoolError> {
        self.use_external(claim, ExternalWork::SetParent { lvol })
            .await
    }

    /// Gives the pool a claimed device that its volumes show ([`PoolStatus::externals`]).
    pub async fn attach(&self, claim: Claim) -> Result<(), PoolError> {
        let attached = self.use_external(claim, ExternalWork::Attach).await;
        attached.map(drop)
    }

    /// Gives an external device up: its claim ends when no queue on it is open. I/O of volumes that
    /// needs it ends with [`nacre_bdev::Status::Gone`] until it is attached again.
    pub async fn detach(&self, device: Uuid) -> Result<(), PoolError> {
        self.end_use(device, false).await
    }

    /// Like [`PoolHandle::detach`], for a device that is being removed. A device that has come back
    /// with the same UUID, and was attached meanwhile, stays.
    pub async fn detach_gone(&self, device: Uuid) -> Result<(), PoolError> {
        self.end_use(device, true).await
    }

    async fn end_use(&self, device: Uuid, only_gone: bool) -> Result<(), PoolError> {
        let (answer, outcome) = oneshot::channel();
        let command = KeeperCommand::Detach { device, only_gone };
        self.send(command, Answer::Outcome(answer))?;
        outcome.await.unwrap_or(Err(PoolError::Closed)).map(drop)
    }

    async fn use_external(&self, claim: Claim, work: ExternalWork) -> Result<Outcome, PoolError> {
        let (answer, outcome) = oneshot::channel();
        let claim = Arc::new(claim);
        let command = KeeperCommand::External { claim, work };
        self.send(command, Answer::Outcome(answer))?;
        outcome.await.unwrap_or(Err(PoolError::Closed))
    }

    /// Completes when the command is done, durably. Dropping the future does not cancel it.
    pub async fn run(&self, command: Command) -> Result<Outcome, PoolError> {
        let (answer, outcome) = oneshot::channel();
        self.send(KeeperCommand::Public(command), Answer::Outcome(answer))?;
        outcome.await.unwrap_or(Err(PoolError::Closed))
    }

    /// The block device of a volume or snapshot, to be registered.
    pub async fn lvol(&self, id: Uuid) -> Result<Arc<Lvol>, PoolError> {
        let (answer, outcome) = oneshot::channel();
        self.send(KeeperCommand::OpenMap(id), Answer::Map(answer))?;
        let (info, map) = outcome.await.unwrap_or(Err(PoolError::Closed))?;
        Ok(Arc::new(Lvol::new(Arc::clone(&self.shared), info, map)))
    }

    fn send(&self, command: KeeperCommand, answer: Answer) -> Result<(), PoolError> {
        let request = CommandRequest { command, answer };
        let sent = self.shared.inbox.send([KeeperMessage::Command(request)]);
        sent.then_some(()).ok_or(PoolError::Closed)
    }
}
