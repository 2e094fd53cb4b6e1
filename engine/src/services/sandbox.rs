//! The state of the daemon's sandbox: the configured mode, and the parts that could not be set up.

use std::cell::RefCell;

use nacre_engine_sandbox::{Mode, kernel_has_filters};

use crate::config::Settings;
use crate::doctor;

/// The parts of the sandbox that could not be set up, each with the reason. Complete at the end of
/// the start.
#[derive(Debug, Default)]
pub struct SandboxProblems {
    problems: RefCell<Vec<String>>,
}

impl SandboxProblems {
    pub fn missing(&self, reason: String) {
        self.problems.borrow_mut().push(reason);
    }

    pub fn problems(&self) -> Vec<String> {
        self.problems.borrow().clone()
    }
}

/// The input of the doctor's check. Without a daemon, `problems` is empty.
pub fn for_doctor(settings: &Settings, problems: Vec<String>) -> doctor::Sandbox {
    let mode = settings.security.sandbox;
    doctor::Sandbox {
        mode,
        kernel: mode == Mode::Off || kernel_has_filters(),
        problems,
    }
}
