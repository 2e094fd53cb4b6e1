//! A command that systemd runs after a time unless it is stopped, even if this program has ended:
//! it undoes a change.

use crate::run::{Run, RunError};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Timer {
    pub(crate) unit: &'static str,
    pub(crate) seconds: u32,
}

impl Timer {
    /// Starts the timer, in place of an earlier one of the same name.
    pub(crate) fn start(self, run: &impl Run, command: &[&str]) -> Result<(), RunError> {
        // The rest of an earlier change would end this one early.
        self.stop(run);
        let unit = format!("--unit={}", self.unit);
        let after = format!("--on-active={}s", self.seconds);
        let options = [
            unit.as_str(),
            &after,
            "--timer-property=AccuracySec=1s",
            "--collect",
            "--quiet",
        ];
        run.run("systemd-run", &[&options[..], command].concat())?;
        Ok(())
    }

    /// Stops the timer. A command that was started just before finds nothing to do.
    pub(crate) fn stop(self, run: &impl Run) {
        let _ = run.run("systemctl", &["stop", &format!("{}.timer", self.unit)]);
    }
}
