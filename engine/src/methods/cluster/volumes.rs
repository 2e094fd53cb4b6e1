//! `cluster_move_volume`: the place where a volume is served.

use std::rc::Rc;

use nacre_cluster_core::VolumeId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{LIMIT, node, refuse_long_wait, within};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::engine::Engine;
use crate::values::read;

/// Default of `wait_s`: a hand-over takes less than a second, and gives up after 5 s.
const WAIT_S: u64 = 10;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<MoveVolume>();
}

pub struct MoveVolume;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveVolumeParams {
    /// Name or id of the volume.
    pub volume: String,
    /// Name or id of the node that shall serve the volume.
    pub node: String,
    /// How long to wait for the end of the move, in seconds: at most 600. Default: 10.
    #[serde(default = "wait_s", deserialize_with = "read::seconds")]
    pub wait_s: u64,
}

fn wait_s() -> u64 {
    WAIT_S
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct MoveVolumeReply {
    #[schemars(with = "String")]
    volume: Uuid,
    #[schemars(with = "String")]
    node: Uuid,
}

impl Method<Engine> for MoveVolume {
    const NAME: &'static str = "cluster_move_volume";
    const ABOUT: &'static str = "Asks the node that serves a volume to hand it over to another \
         node, and waits until that is done. Hosts see no error.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = MoveVolumeParams;
    type Reply = MoveVolumeReply;

    async fn apply(
        params: MoveVolumeParams,
        engine: Rc<Engine>,
    ) -> Result<MoveVolumeReply, RpcError> {
        let wait = refuse_long_wait(params.wait_s)?;
        let operator = engine.volumes.cluster.operator()?;
        let volume = match params.volume.parse::<Uuid>() {
            Ok(id) => id,
            Err(_) => {
                let found = engine.volumes.find(&params.volume);
                found.map_err(|error| error.field("volume"))?.id()
            }
        };
        let node = node(&operator, &params.node).await?;
        let moved = operator.move_volume(VolumeId(volume), node, wait);
        within(wait + LIMIT, moved).await?;
        Ok(MoveVolumeReply {
            volume,
            node: node.0,
        })
    }
}
