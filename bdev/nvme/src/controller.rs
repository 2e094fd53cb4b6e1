//! The handle on one controller.

use std::sync::{Arc, Mutex, PoisonError};

use nacre_nvmf_wire::Sqe;
use nacre_reactor::CoreHandle;

use crate::device::NvmeBdev;
use crate::error::{AttachError, ControlError};
use crate::event::Observer;
use crate::function::Function;
use crate::info::{ControllerInfo, ErrorEntry, FirmwareInfo, Health, Status};
use crate::options::Options;

/// What goes with an admin command that is passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminData {
    None,
    /// So many bytes that the controller fills.
    Read(usize),
}

/// How an admin command that was passed through was answered: successfully.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminReply {
    pub dword0: u32,
    pub data: Vec<u8>,
}

/// An attached controller. May be used from any thread: what there is to do is done on the reactor that
/// attached it, its home. It stays attached until [`Controller::detach`].
pub struct Controller {
    name: String,
    info: Mutex<ControllerInfo>,
    status: Mutex<Status>,
}

impl Controller {
    /// Brings the controller up, on the reactor that becomes its home. The observer is told of each namespace.
    pub async fn attach(
        core: &CoreHandle,
        function: Arc<dyn Function>,
        options: Options,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Controller>, AttachError> {
        let _ = (core, function, options, observer);
        Err(ControlError::Stopped.into())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn info(&self) -> ControllerInfo {
        let info = self.info.lock().unwrap_or_else(PoisonError::into_inner);
        info.clone()
    }

    pub fn status(&self) -> Status {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.clone()
    }

    /// In the order of their identifiers.
    pub fn namespaces(&self) -> Vec<Arc<NvmeBdev>> {
        Vec::new()
    }

    /// Resets the controller; what is in flight is sent again afterwards.
    pub async fn reset(&self) -> Result<(), ControlError> {
        Err(ControlError::Detached)
    }

    /// The SMART log, as it is now.
    pub async fn health(&self) -> Result<Health, ControlError> {
        Err(ControlError::Detached)
    }

    /// At most so many entries of the error log, the newest first.
    pub async fn error_log(&self, entries: usize) -> Result<Vec<ErrorEntry>, ControlError> {
        let _ = entries;
        Err(ControlError::Detached)
    }

    pub async fn firmware_slots(&self) -> Result<FirmwareInfo, ControlError> {
        Err(ControlError::Detached)
    }

    /// Passes an admin command through, if it is one that only reads: Identify, Get Log Page, Get Features. The
    /// command identifier and the data pointer are the driver's.
    pub async fn admin(&self, sqe: Sqe, data: AdminData) -> Result<AdminReply, ControlError> {
        let _ = data;
        Err(ControlError::NotAllowed { opcode: sqe.opcode })
    }

    /// Ends it: what is in flight is waited for, queues are deleted, the controller is shut down and disabled.
    /// Its namespaces answer [`nacre_bdev::Status::Gone`] afterwards.
    pub async fn detach(&self) {}

    /// The system says that the drive is gone.
    pub fn removed(&self) {}

    /// The drive (by its serial number) is there again: the same namespaces go on.
    pub async fn returned(&self, function: Arc<dyn Function>) -> Result<(), AttachError> {
        let _ = function;
        Err(AttachError::NotRemoved {
            name: self.name.clone(),
        })
    }
}
