//! Allocates controller identifiers: selects the controller for a host's Connect (Base 3.1.1, 6.3).
//!
//! ```text
//!               CNTLID of the admin queue's Connect
//! dynamic       FFFFh         the next free id
//! static        an id         that controller, unless it has an association
//!               FFFEh         any free controller, searched from a start that the host determines
//! ```
//!
//! The subsystem has the model, not the request: "all controllers in an NVM subsystem shall support
//! the same controller model". Hosts learn it before they connect, by the CNTLID of its discovery
//! log entries, and again by FCATT of Identify Controller. So a static subsystem refuses FFFFh, the
//! only value that Linux and SPDK use, and a dynamic one refuses every other value, with Connect
//! Invalid Parameters. A discovery subsystem can only be dynamic.
//!
//! Static controllers are to be "durable, so that hosts can expect to form associations to the same
//! controllers repeatedly (e.g., after each host reboot)". That needs no storage: the search for
//! FFFEh starts at an id derived from the host's NQN and identifier. So a returning host finds the
//! same controller, after its own restart and after the target's. The controller's settings are not
//! kept, as there are no saveable features.

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::fabrics::ConnectData;
use uuid::Uuid;

use crate::subsystems::subsystem_config::{ControllerModel, SubsystemConfig};

/// The error of a Connect whose CNTLID does not fit the subsystem's controller model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchController {
    #[error("controller id {asked:#x} asked for; controllers are dynamic, ask for FFFFh")]
    Dynamic { asked: u16 },
    #[error(
        "a dynamic controller (FFFFh) asked for; controllers are static, ask for one of {min} to {max}, or for FFFEh, \
         any of them"
    )]
    Static { min: u16, max: u16 },
    #[error("controller id {asked:#x} asked for; there are {min} to {max}")]
    OutOfRange { asked: u16, min: u16, max: u16 },
}

/// The identity of a host, from which the search of a static controller starts.
pub(crate) struct Home<'a> {
    pub hostnqn: &'a Nqn,
    pub hostid: [u8; 16],
}

impl SubsystemConfig {
    /// Checks the CNTLID of a Connect against the controller model.
    pub(crate) fn check_cntlid(&self, asked: u16) -> Result<(), NoSuchController> {
        let (min, max) = (self.min_cntlid, self.max_cntlid);
        match (self.controller_model, asked) {
            (ControllerModel::Dynamic, ConnectData::CNTLID_DYNAMIC) => Ok(()),
            (ControllerModel::Dynamic, asked) => Err(NoSuchController::Dynamic { asked }),
            (ControllerModel::Static, ConnectData::CNTLID_DYNAMIC) => {
                Err(NoSuchController::Static { min, max })
            }
            (ControllerModel::Static, ConnectData::CNTLID_STATIC_ANY) => Ok(()),
            (ControllerModel::Static, asked) if (min..=max).contains(&asked) => Ok(()),
            (ControllerModel::Static, asked) => {
                Err(NoSuchController::OutOfRange { asked, min, max })
            }
        }
    }

    /// The id for a Connect with CNTLID `asked`, after [`SubsystemConfig::check_cntlid`]. `None`:
    /// the requested controller, or every controller, is in use.
    pub(crate) fn choose_cntlid(
        &self,
        asked: u16,
        last: u16,
        host: &Home,
        is_free: impl Fn(u16) -> bool,
    ) -> Option<u16> {
        let start = match (self.controller_model, asked) {
            // Continue after the last id, so that an id is reused as late as possible.
            (ControllerModel::Dynamic, _) => self.after(last),
            (ControllerModel::Static, ConnectData::CNTLID_STATIC_ANY) => self.home(host),
            (ControllerModel::Static, asked) => return is_free(asked).then_some(asked),
        };
        let mut ids = (start..=self.max_cntlid).chain(self.min_cntlid..start);
        ids.find(|id| is_free(*id))
    }

    fn after(&self, last: u16) -> u16 {
        if (self.min_cntlid..self.max_cntlid).contains(&last) {
            last + 1
        } else {
            self.min_cntlid
        }
    }

    fn home(&self, host: &Home) -> u16 {
        let id = Uuid::from_bytes(host.hostid);
        let mixed = Uuid::new_v5(&id, host.hostnqn.as_str().as_bytes()).as_u128();
        let count = u128::from(self.max_cntlid - self.min_cntlid) + 1;
        self.min_cntlid + (mixed % count) as u16
    }
}
