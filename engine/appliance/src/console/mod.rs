//! The screen of the appliance's own terminals: `nacre console`.
//!
//! ```text
//!   daemon, machine ─▶ Facts ─▶ App ─▶ view      keys ─▶ App ─▶ Action ─▶ the caller performs it
//! ```
//!
//! The screen works without the daemon. An action that cannot be undone asks first, the factory
//! reset by the machine's name. A start of the installer shows disks instead of the daemon.

mod app;
mod install;
mod rows;
#[cfg(test)]
mod tests;
mod view;

use serde_json::Value;

pub use self::app::App;
pub use self::view::{cleared, draw};
use crate::host::HostName;
use crate::install::Disk;
use crate::network::{Interface, Settings};
use crate::slots::Slot;

/// State of the machine and its daemon, for the screen.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub host: String,
    pub version: String,
    /// Interfaces with their addresses, one line each.
    pub addresses: Vec<String>,
    /// Interfaces whose settings can be changed.
    pub interfaces: Vec<String>,
    pub daemon: Daemon,
    /// The other slot, if its version matters to the next start.
    pub other_slot: Option<Slot>,
    /// Why the daemon did not get ready, and what follows from it.
    pub trouble: Vec<String>,
    /// The interface with settings that wait for their confirmation.
    pub pending: Option<String>,
    /// The installer's disks, or why there is no list. None: this start is not the installer's.
    pub install: Option<Result<Vec<Disk>, String>>,
}

#[derive(Debug, Clone, Default)]
pub enum Daemon {
    /// Not asked yet.
    #[default]
    Unknown,
    /// The daemon does not answer, with the cause.
    Away(String),
    Up(Box<Answers>),
}

/// Answers of the daemon.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    /// Of `volume_list`; none: the call was refused.
    pub volumes: Option<Value>,
    /// Of `web_get_status`; none: the call was refused.
    pub web: Option<Value>,
    /// Listeners with their state, one line each.
    pub listeners: Vec<String>,
}

/// An order of the person at the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Restart,
    PowerOff,
    FactoryReset {
        typed: String,
    },
    SetNetwork {
        interface: Interface,
        settings: Settings,
    },
    SetName {
        name: HostName,
    },
    ConfirmNetwork,
    RevertNetwork,
    Install {
        serial: String,
        /// The operator has confirmed that the data on the disk is lost.
        overwrite: bool,
    },
}
