//! `sandbox_get`, a Nacre extension: the daemon's capabilities and its system call filter.

use std::rc::Rc;

use nacre_engine_sandbox::{Mode, Status, names};
use schemars::JsonSchema;
use serde::Serialize;

use crate::rpc::{Class, Method, NoParams, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetSandbox>();
}

pub struct GetSandbox;

#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxState {
    /// `off`, `log` or `enforce`: `[security] sandbox`.
    mode: &'static str,
    /// True if capabilities and system calls are as the mode says.
    complete: bool,
    /// Filters of system calls that the kernel applies to this process, a container's included.
    filters: u32,
    /// No program that the daemon starts could get more rights.
    no_new_privs: bool,
    /// Capabilities of the daemon's threads.
    capabilities: Vec<String>,
    /// Capabilities that a program of the daemon could get at most.
    bounding: Vec<String>,
    /// Why a part is missing.
    problems: Vec<String>,
}

impl Method<Engine> for GetSandbox {
    const NAME: &'static str = "sandbox_get";
    const ABOUT: &'static str =
        "Shows which capabilities the daemon has, and whether its system calls are filtered.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = SandboxState;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<SandboxState, RpcError> {
        let status = Status::read().map_err(|error| RpcError::internal(error.to_string()))?;
        let (mode, problems) = (
            engine.settings.security.sandbox,
            engine.lifecycle.sandbox.problems(),
        );
        Ok(SandboxState {
            mode: mode.word(),
            complete: mode == Mode::Off || problems.is_empty() && status.filters > 0,
            filters: status.filters,
            no_new_privs: status.no_new_privs,
            capabilities: names(status.effective),
            bounding: names(status.bounding),
            problems,
        })
    }
}
