//! The requested and actual state of a path.

use super::plan::{Path, PathProblem};

/// Actual state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actual {
    Listening,
    /// The path is usable, but no subsystem listens on it.
    Idle,
    Not(PathProblem),
}

impl Actual {
    /// The name of the state in replies and metrics.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Idle => "idle",
            Self::Not(_) => "absent",
        }
    }

    pub fn reason(&self) -> &'static str {
        match self {
            Self::Listening => "",
            Self::Idle => "no_subsystem",
            Self::Not(lack) => lack.reason,
        }
    }
}

/// One path with its requested and actual state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathStatus {
    pub path: Path,
    pub actual: Actual,
    /// NQNs of the subsystems that listen on the path.
    pub subsystems: Vec<String>,
}

impl PathStatus {
    pub fn is_listening(&self) -> bool {
        self.actual == Actual::Listening
    }
}
