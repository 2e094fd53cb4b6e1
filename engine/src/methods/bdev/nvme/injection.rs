//! `bdev_nvme_add_error_injection` and `bdev_nvme_remove_error_injection`: make commands of a
//! controller fail, for tests.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::injection::Injection;
use nacre_nvmf::host::InjectionQueues;
use schemars::JsonSchema;
use serde::Deserialize;

use super::commands::CommandType;
use super::no_controller;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AddErrorInjection>()
        .add::<RemoveErrorInjection>();
}

/// SPDK's code for parameters that it cannot decode.
const UNDECODABLE: i32 = -(Errno::EINVAL as i32);

struct AddErrorInjection;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddErrorInjectionParams {
    /// The controller. Of a remote controller with several paths, the first path.
    name: String,
    /// The queues in which commands fail: `admin`, or all I/O queues.
    cmd_type: CommandType,
    /// Opcode of the commands that fail.
    opc: u8,
    /// The commands are not sent: reads return no data, and writes write none. Default false: the
    /// controller executes them, and their success is replaced by the status.
    do_not_submit: Option<bool>,
    /// With `do_not_submit`: how long each command takes; default 0.
    timeout_in_us: Option<u64>,
    /// Number of commands that fail in each queue; default 1.
    err_count: Option<u32>,
    /// Status code type, of which 3 bits are used; default 0.
    sct: Option<u8>,
    /// Status code; default 0, which is a success with `sct` 0.
    sc: Option<u8>,
}

impl Method<Engine> for AddErrorInjection {
    const NAME: &'static str = "bdev_nvme_add_error_injection";
    const UNDECODABLE: i32 = UNDECODABLE;
    const ABOUT: &'static str = "Makes the next commands of an opcode fail, in the connected queues of a controller, for tests. It ends with the connection.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AddErrorInjectionParams;
    type Reply = bool;

    async fn apply(params: AddErrorInjectionParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let delay = Duration::from_micros(params.timeout_in_us.unwrap_or(0));
        let injection = Injection {
            sct: params.sct.unwrap_or(0),
            sc: params.sc.unwrap_or(0),
            count: params.err_count.unwrap_or(1),
            unsent: (params.do_not_submit == Some(true)).then_some(delay),
        };
        let queues = params.cmd_type;
        inject(&engine, &params.name, queues, params.opc, Some(injection)).await
    }
}

struct RemoveErrorInjection;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveErrorInjectionParams {
    /// The controller. Of a remote controller with several paths, the first path.
    name: String,
    /// The queues of the injection: `admin`, or all I/O queues.
    cmd_type: CommandType,
    /// Opcode of the injection, 0 to 255.
    opc: u8,
}

impl Method<Engine> for RemoveErrorInjection {
    const NAME: &'static str = "bdev_nvme_remove_error_injection";
    const UNDECODABLE: i32 = UNDECODABLE;
    const ABOUT: &'static str =
        "Ends an error injection. Commands that are not sent still take their time.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveErrorInjectionParams;
    type Reply = bool;

    async fn apply(
        params: RemoveErrorInjectionParams,
        engine: Rc<Engine>,
    ) -> Result<bool, RpcError> {
        inject(&engine, &params.name, params.cmd_type, params.opc, None).await
    }
}

/// Sets or removes the rule of an opcode in the queues of a controller.
async fn inject(
    engine: &Engine,
    name: &str,
    queues: CommandType,
    opcode: u8,
    injection: Option<Injection>,
) -> Result<bool, RpcError> {
    if let Some(remote) = engine.remotes.find(name) {
        let queues = match queues {
            CommandType::Admin => InjectionQueues::Admin,
            CommandType::Io => InjectionQueues::Io,
        };
        remote.path().path.inject(queues, opcode, injection);
        // The queues see the rule in the next turn of their reactor.
        for _ in 0..2 {
            on_each_core(engine, || ()).await?;
        }
        return Ok(true);
    }
    let drive = engine.drives.find(name);
    let drive = drive.ok_or_else(|| no_controller(name))?;
    match queues {
        CommandType::Admin => drive.controller.inject_admin(opcode, injection),
        CommandType::Io => {
            let controller = Arc::clone(&drive.controller);
            on_each_core(engine, move || controller.inject_io(opcode, injection)).await?;
        }
    }
    Ok(true)
}

async fn on_each_core(
    engine: &Engine,
    work: impl Fn() + Clone + Send + 'static,
) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    for reactor in &plane.reactors {
        let work = work.clone();
        let ran = reactor.run(move |_| work()).await;
        ran.map_err(|error| RpcError::internal(error.to_string()))?;
    }
    Ok(())
}
