//! `[security]`: the sandbox of the daemon.

use nacre_engine_sandbox::Mode;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Security {
    pub sandbox: Mode,
    /// Capabilities to keep in addition to those of [`Needs`](nacre_engine_sandbox::Needs).
    pub capabilities: Vec<String>,
    /// Core dumps are written, which contain keys. False: the daemon lowers RLIMIT_CORE.
    pub core_dumps: bool,
}
