//! `accel_*`: acceleration modules. Nacre always copies, fills, compares and computes checksums on
//! the CPU. SPDK's queries get replies; modules cannot be assigned.

use std::collections::BTreeMap;
use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rpc::error::PARSE_ERROR;
use crate::rpc::{Changes, Class, Method, NoParams, Registry, RpcError, When};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetModuleInfo>()
        .add::<GetOpcAssignments>()
        .add::<SetAccelOptions>();
}

/// Operations on data, by SPDK's names.
const OPERATIONS: [&str; 4] = ["copy", "fill", "compare", "crc32c"];

const SOFTWARE: &str = "software";

#[derive(Debug, Serialize, JsonSchema)]
struct ModuleInfo {
    module: &'static str,
    #[serde(rename = "supported ops")]
    supported_ops: [&'static str; OPERATIONS.len()],
}

struct GetModuleInfo;

impl Method<Engine> for GetModuleInfo {
    const NAME: &'static str = "accel_get_module_info";
    const ABOUT: &'static str = "Lists acceleration modules and the operations they support.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = Vec<ModuleInfo>;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Vec<ModuleInfo>, RpcError> {
        Ok(vec![ModuleInfo {
            module: SOFTWARE,
            supported_ops: OPERATIONS,
        }])
    }
}

struct GetOpcAssignments;

impl Method<Engine> for GetOpcAssignments {
    const NAME: &'static str = "accel_get_opc_assignments";
    const ABOUT: &'static str = "Lists the module of each operation on data.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = BTreeMap<&'static str, &'static str>;

    async fn apply(
        _: NoParams,
        _: Rc<Engine>,
    ) -> Result<BTreeMap<&'static str, &'static str>, RpcError> {
        Ok(OPERATIONS.map(|operation| (operation, SOFTWARE)).into())
    }
}

/// Sizes of SPDK's pools and caches.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct SetAccelOptionsParams {
    /// Accepted without effect: SPDK's small buffers per thread.
    small_cache_size: Option<u32>,
    /// Accepted without effect: SPDK's large buffers per thread.
    large_cache_size: Option<u32>,
    /// Accepted without effect: SPDK's tasks per thread.
    task_count: Option<u32>,
    /// Accepted without effect: SPDK's sequences per thread.
    sequence_count: Option<u32>,
    /// Accepted without effect: SPDK's acceleration buffers per thread.
    buf_count: Option<u32>,
}

struct SetAccelOptions;

impl Method<Engine> for SetAccelOptions {
    const NAME: &'static str = "accel_set_options";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str =
        "Accepted, as SPDK has it in every configuration that it saves: there are no such pools.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const WHEN: When = When::Startup;
    type Params = SetAccelOptionsParams;
    type Reply = bool;

    async fn apply(_: SetAccelOptionsParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::{TestDaemon, test_daemon};
    use serde_json::json;

    /// Goal: sizes of pools that Nacre lacks are accepted without effect; invalid sizes are
    /// refused.
    #[test]
    fn sizes_of_pools_are_accepted() {
        let daemon = TestDaemon::waiting();
        let set = "accel_set_options";
        assert_eq!(daemon.call(set, json!({ "task_count": 2048 })), true);
        assert_eq!(
            daemon.refused(set, json!({ "tusk_count": 2048 })).code,
            -32700
        );
    }

    #[test]
    fn all_operations_use_the_software_module() {
        let daemon = test_daemon();
        assert_eq!(
            daemon.call("accel_get_module_info", json!(null)),
            json!([{ "module": "software", "supported ops": ["copy", "fill", "compare", "crc32c"] }])
        );
        assert_eq!(
            daemon.call("accel_get_opc_assignments", json!(null)),
            json!({ "copy": "software", "fill": "software", "compare": "software", "crc32c": "software" })
        );
    }
}
