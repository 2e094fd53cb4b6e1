//! `bdev_lvol_clone_bdev` and `bdev_lvol_set_parent_bdev`: lvols that show a bdev outside of their
//! lvstore (SPDK's external snapshots).
//!
//! Codes as in [`super::lvol`]; but a bdev or lvstore that does not exist is -32602 here, as in
//! SPDK. The lvol of `bdev_lvol_set_parent_bdev` must not be in use.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::Deserialize;
use uuid::Uuid;

use super::lvol::coded_invalid;
use crate::methods::pool::lvols;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::{self, check_name, find_lvol};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<BdevLvolCloneBdev>()
        .add::<BdevLvolSetParentBdev>();
}

struct BdevLvolCloneBdev;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolCloneBdevParams {
    /// The bdev, by name, alias or UUID: of another lvstore or of none. Its size is a multiple of
    /// the cluster size.
    bdev: String,
    /// Name of the lvstore for the new lvol.
    lvs_name: String,
    /// Name of the new lvol: 1 to 63 bytes, without `/`.
    clone_name: String,
}

impl Method<Engine> for BdevLvolCloneBdev {
    const NAME: &'static str = "bdev_lvol_clone_bdev";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a thin lvol that shows the contents of a bdev outside of the lvstore, and answers its UUID. \
         Nothing may write the bdev while an lvol shows it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolCloneBdevParams;
    type Reply = String;

    async fn apply(
        params: BdevLvolCloneBdevParams,
        engine: Rc<Engine>,
    ) -> Result<String, RpcError> {
        engine.earlier_changes().await;
        let refused = coded_invalid;
        let pool = engine.devices.pools.find(&params.lvs_name);
        let pool = pool.map_err(|error| RpcError {
            message: "lvs does not exist".to_owned(),
            ..refused(error.field("lvs_name"))
        })?;
        if engine.plane()?.bdevs.lookup(&params.bdev).is_none() {
            let cause = format!("there is no bdev \"{}\"", params.bdev);
            let missing = RpcError::errno(Errno::ENODEV, cause).field("bdev");
            return Err(RpcError {
                message: "bdev does not exist".to_owned(),
                ..refused(missing)
            });
        }
        check_name("clone_name", &params.clone_name).map_err(refused)?;
        let id = Uuid::new_v4();
        let bdev = ("bdev", &*params.bdev);
        let made = pools::external::clone_bdev(&engine, &pool, bdev, id, params.clone_name).await;
        made.map_err(refused)?;
        lvols::made(&engine, &pool, id).await?;
        Ok(id.to_string())
    }
}

struct BdevLvolSetParentBdev;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolSetParentBdevParams {
    /// UUID, or `lvs/lvol`.
    lvol_name: String,
    /// The bdev, by name, alias or UUID: of another lvstore or of none. Its size is a multiple of
    /// the cluster size.
    parent_name: String,
}

impl Method<Engine> for BdevLvolSetParentBdev {
    const NAME: &'static str = "bdev_lvol_set_parent_bdev";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a bdev outside of the lvstore the parent of a thin lvol that is not in use; the clusters that \
         the lvol owns stay on top.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolSetParentBdevParams;
    type Reply = bool;

    async fn apply(
        params: BdevLvolSetParentBdevParams,
        engine: Rc<Engine>,
    ) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol_name", &params.lvol_name)?;
        let parent = ("parent_name", &*params.parent_name);
        let changed = pools::set_parent_bdev(&engine, &pool, lvol, parent).await;
        changed.map_err(coded_invalid)?;
        Ok(true)
    }
}
