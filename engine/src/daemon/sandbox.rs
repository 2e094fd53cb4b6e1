//! Sets up the sandbox of the daemon: drops capabilities before the first thread starts, and
//! installs the system call filter before the daemon is ready.
//!
//! A failure is not fatal, because a daemon without a sandbox is better than none. The log,
//! `sandbox_get` and the doctor report it.

use nacre_engine_sandbox::{self as sandbox, CapabilitySet, Mode, SandboxError, names};
use tracing::{error, info, warn};

use crate::config::Settings;
use crate::services::Engine;

/// The result of [`restrict`]; `None`: capabilities are kept.
pub(super) type Restricted = Option<Result<CapabilitySet, SandboxError>>;

/// Drops capabilities. Call it while the process has one thread, which is before the log is set up.
pub(super) fn restrict(settings: &Settings) -> Restricted {
    let keep = settings.capability_needs().set();
    (settings.security.sandbox == Mode::Enforce).then(|| sandbox::restrict(keep))
}

/// Logs the outcome of [`restrict`].
pub(super) fn report(engine: &Engine, restricted: Restricted) {
    match restricted {
        None => {}
        Some(Ok(kept)) => info!(capabilities = names(kept).join(","), "capabilities"),
        Some(Err(cause)) => {
            error!("the daemon keeps all of its capabilities: {cause}");
            engine
                .lifecycle
                .sandbox
                .missing(format!("capabilities: {cause}"));
        }
    }
}

/// Installs the filter of system calls on all threads.
pub(super) fn install(engine: &Engine) {
    let mode = engine.settings.security.sandbox;
    match sandbox::install(mode) {
        Ok(()) if mode == Mode::Off => {}
        Ok(()) => info!(mode = mode.word(), "system calls are filtered"),
        Err(cause) => {
            match mode {
                Mode::Enforce => error!("system calls are not filtered: {cause}"),
                _ => warn!("system calls are not observed: {cause}"),
            }
            engine
                .lifecycle
                .sandbox
                .missing(format!("system calls: {cause}"));
        }
    }
}
