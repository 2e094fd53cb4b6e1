//! The identity of a daemon, by which it recognises keys that it wrote itself.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A daemon: its data directory, its machine, and its host name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonIdentity {
    /// The id in its data directory.
    pub id: Uuid,
    /// Derived from the machine's id; `None`: the machine has none.
    pub machine: Option<Uuid>,
    pub host: String,
}

impl DaemonIdentity {
    /// True if both are one data directory on one machine.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.id, self.machine) == (other.id, other.machine)
    }
}

impl std::fmt::Display for DaemonIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "node {} on host \"{}\"", self.id, self.host)?;
        match self.machine {
            Some(machine) => write!(f, " (machine {machine})"),
            None => f.write_str(" (a machine without an id)"),
        }
    }
}
