//! The management interface of an open pool, for other threads.

use std::sync::Arc;

use nacre_bdev::Claim;
use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

use crate::lvol::Lvol;
use crate::model::{
    Answer, Command, CommandRequest, Departed, KeeperCommand, Outcome, PoolError, PoolStatus,
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
    /// for space, when the removal of a disk ends, and when the pool closes. For one task.
    pub fn news(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.news)
    }

    /// The removals that ended since the last call.
    pub fn take_departed(&self) -> Vec<Departed> {
        std::mem::take(&mut self.shared.departed.lock())
    }

    /// The names of the devices that a close, an export or a deletion has waited for.
    pub fn late_disks(&self) -> Vec<String> {
        self.shared.late.lock().clone()
    }

    /// The names of the pool's devices, that with the log first. A device that is being added is
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
