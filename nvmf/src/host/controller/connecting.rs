//! The beginning of an association: the connection, and the authentication after Connect.

use nacre_nvmf_wire::fabrics::AuthRequirements;
use nacre_reactor::Nanos;

use super::{Controller, OWN};
use crate::host::authentication;
use crate::host::options::{HostError, Wanted};
use crate::host::queue::CommandQueue;
use crate::host::step::{ADMIN_ENTRIES, Step};
use crate::transport::TransportType;

impl Controller {
    /// Begins a connection for an admin queue.
    pub(super) fn dial_admin(
        &mut self,
        transport: Option<TransportType>,
    ) -> Result<CommandQueue, HostError> {
        let wanted = Wanted {
            qid: 0,
            entries: ADMIN_ENTRIES,
            cntlid: 0,
            transport,
        };
        let dialled = self.dial.dial_wanted(&wanted);
        let transport = dialled.map_err(|e| HostError::Dial(e.to_string()))?;
        Ok(CommandQueue::new(transport, ADMIN_ENTRIES))
    }

    pub(super) fn step_after_connect(
        &mut self,
        required: AuthRequirements,
    ) -> Result<Step, HostError> {
        self.transaction = authentication::after_connect(&self.options, required, 0)?;
        Ok(match self.transaction {
            Some(_) => Step::Authenticate,
            None => Step::ReadCap,
        })
    }

    /// Goes on with the transaction, if there is one.
    pub(super) fn authenticate(&mut self, now: Nanos) -> Result<(), HostError> {
        let (Some(transaction), Some(queue)) = (&mut self.transaction, &mut self.queue) else {
            return Ok(());
        };
        if let Some(result) = transaction.drive(queue, &self.pool, OWN, now) {
            self.transaction = None;
            result?;
            self.enter(Step::ReadCap, now);
        }
        Ok(())
    }
}
