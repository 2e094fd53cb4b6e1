//! [`Commands`]: sends admin commands and waits for their completions, for one task of a
//! controller.

use std::pin::pin;
use std::time::Duration;

use nacre_nvmf_wire::Sqe;
use nacre_nvmf_wire::registers::{Csts, offset};
use nacre_reactor::CoreHandle;

use crate::admin::{Admin, AdminCompletion};
use crate::error::ControlError;
use crate::function::GONE;
use crate::options::DriveOptions;
use crate::shared::Shared;

/// Interval at which CSTS is read while a command is outstanding.
const CSTS_CHECK: Duration = Duration::from_millis(100);

/// The admin queue of a controller, for a task on its home reactor. The other files of this folder
/// add the sequences of commands: initialisation, queues, namespaces, logs, shutdown.
#[derive(Clone, Copy)]
pub(crate) struct Commands<'a> {
    pub core: &'a CoreHandle,
    pub admin: &'a Admin,
    pub shared: &'a Shared,
}

impl Commands<'_> {
    /// Sends an admin command and waits for success.
    pub(super) async fn ask(
        self,
        sqe: Sqe,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<AdminCompletion, ControlError> {
        self.ask_within(sqe, self.timeout(), data, into).await
    }

    pub(super) async fn ask_within(
        self,
        sqe: Sqe,
        limit: Duration,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<AdminCompletion, ControlError> {
        let mut command = pin!(self.admin.execute(self.core, sqe, limit, data, into));
        let answer = loop {
            match self.core.timeout(CSTS_CHECK, command.as_mut()).await {
                Ok(answer) => break answer?,
                Err(_) => self.check_csts(),
            }
        };
        if answer.status.is_success() {
            Ok(answer)
        } else {
            Err(ControlError::Status {
                opcode: sqe.opcode,
                status: answer.status,
            })
        }
    }

    /// Fails the pending admin commands of a controller that was removed or has failed.
    fn check_csts(self) {
        let csts = self.shared.function().read32(offset::CSTS);
        if csts == GONE {
            self.admin.close(ControlError::Gone);
        } else if Csts(csts).is_fatal() || !Csts(csts).is_ready() {
            self.admin.close(ControlError::Fatal);
        }
    }

    pub(super) fn timeout(self) -> Duration {
        let configured = self.shared.options.admin_timeout;
        configured.max(DriveOptions::ADMIN_TIMEOUT_MIN)
    }

    pub(super) fn name(&self) -> &str {
        self.shared.name()
    }
}
