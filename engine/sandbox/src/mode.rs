//! The mode of the sandbox: `off`, `log` (reports calls that would be refused) or `enforce`.

use serde::{Deserialize, Serialize};

/// `[security] sandbox`. The default refuses nothing: an update of the daemon, of a library or of
/// the kernel must not lose a feature before its owner has seen the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    Off,
    /// Refuses nothing; the kernel logs calls that [`Mode::Enforce`] would refuse, except those for
    /// memory that is both writable and executable.
    #[default]
    Log,
    Enforce,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Log => "log",
            Self::Enforce => "enforce",
        }
    }
}
