//! `bdev_lvol_start_shallow_copy`, `bdev_lvol_check_shallow_copy`: the units that a snapshot does
//! not share with its parent, copied to a device.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::copies::CopyState;
use crate::services::pools::find_lvol;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<StartCopy>().add::<CheckCopy>();
}

struct StartCopy;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StartCopyParams {
    /// The snapshot: UUID, or `lvs/lvol`.
    src_lvol_name: String,
    /// A device that is at least as large, and that nothing uses.
    dst_bdev_name: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct StartCopyReply {
    operation_id: u32,
}

impl Method<Engine> for StartCopy {
    const NAME: &'static str = "bdev_lvol_start_shallow_copy";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Copies the clusters that a snapshot does not share with its parent to a device, in the background.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = StartCopyParams;
    type Reply = StartCopyReply;

    async fn apply(
        params: StartCopyParams,
        engine: Rc<Engine>,
    ) -> Result<StartCopyReply, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "src_lvol_name", &params.src_lvol_name)?;
        let copies = &engine.devices.pools.copies;
        let started = copies.start(&engine, pool, lvol, &params.dst_bdev_name);
        let operation_id = started.await.map_err(super::lvol::coded_invalid)?;
        Ok(StartCopyReply { operation_id })
    }
}

struct CheckCopy;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CheckCopyParams {
    /// Number of the copy, from bdev_lvol_start_shallow_copy.
    operation_id: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
struct CheckCopyReply {
    copied_clusters: u64,
    total_clusters: u64,
    /// `in progress`, `complete` or `error`. The answer with one of the last two is the last.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Method<Engine> for CheckCopy {
    const NAME: &'static str = "bdev_lvol_check_shallow_copy";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Returns the progress of a shallow copy. A copy that has ended is forgotten.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = CheckCopyParams;
    type Reply = CheckCopyReply;

    async fn apply(
        params: CheckCopyParams,
        engine: Rc<Engine>,
    ) -> Result<CheckCopyReply, RpcError> {
        let progress = engine.devices.pools.copies.check(params.operation_id);
        let Some(progress) = progress else {
            let cause = format!("there is no shallow copy {}", params.operation_id);
            return Err(RpcError::errno(Errno::ENODEV, cause).field("operation_id"));
        };
        let (state, error) = match progress.state {
            CopyState::Runs => ("in progress", None),
            CopyState::Complete => ("complete", None),
            CopyState::Failed(refused) => ("error", Some(refused.message)),
        };
        Ok(CheckCopyReply {
            copied_clusters: progress.copied,
            total_clusters: progress.total,
            state,
            error,
        })
    }
}
