//! How strict the sandbox is.

use serde::{Deserialize, Serialize};

/// `[security] sandbox`. The default refuses nothing: an update of the daemon, of a library or of
/// the kernel must not lose a feature before its owner has seen the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    Off,
    /// Refuses nothing; the kernel logs calls that [`Mode::Enforce`] would refuse.
    #[default]
    Log,
    Enforce,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Log => "log",
            Mode::Enforce => "enforce",
        }
    }
}
