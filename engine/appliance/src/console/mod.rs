//! The text screen on the appliance's own terminals (display, serial line): `nacre console`.
//!
//! ```text
//!   daemon, machine ─▶ Facts ─▶ App ─▶ view      keys ─▶ App ─▶ Action ─▶ the caller performs it
//! ```
//!
//! The screen works without the daemon. It asks before an action that cannot be undone; for the
//! factory reset, the person types the machine's name. If the installer was booted, the screen
//! shows the disks instead of the daemon.

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
    /// The other slot, if its version affects the next boot.
    pub other_slot: Option<Slot>,
    /// The cause and the consequences of a boot in which the daemon did not get ready, a line each.
    pub trouble: Vec<String>,
    /// The interface with settings that are not confirmed yet.
    pub pending: Option<String>,
    /// The disks for the installer, or the reason why there is no list. `None`: the installer was
    /// not booted.
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
    /// The answer to `volume_list`; `None`: the call was refused.
    pub volumes: Option<Value>,
    /// The answer to `web_get_status`; `None`: the call was refused.
    pub web: Option<Value>,
    /// Listeners with their state, one line each.
    pub listeners: Vec<String>,
}

/// An action that the person at the screen has requested.
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
