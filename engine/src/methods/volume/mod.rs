//! `volume_*`, Nacre extensions: replicated volumes.
//!
//! ```text
//!   create      create, delete, rename
//!   replicas     add, remove, offline, online, replace, move, resync
//!   list        state and records
//!   operate     verify, grow, set, thaw, fail I/O
//!   publish     subsystem and connections
//!   devices     devices for replicas
//!   on_pools    lvols for replicas
//!   snapshots   snapshots of volumes of a cluster
//! ```
//!
//! The durable part of a volume is its record in the volume store, which the volume's control
//! updates before it replies. The journal has no record of the volume itself, but of its access:
//! subsystem, namespace, listeners, and `volume/published/<uuid>`, the call of `volume_publish`.
//!
//! Commands wait for the volume's control only, so they do not block other calls.

pub mod create;
mod devices;
pub mod list;
pub mod on_pools;
pub mod operate;
pub mod publish;
pub mod replicas;
pub mod snapshots;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::rpc::error::Errno;
use crate::rpc::{Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    create::register(registry);
    on_pools::register(registry);
    list::register(registry);
    replicas::register(registry);
    operate::register(registry);
    publish::register(registry);
    snapshots::register(registry);
}

/// Calls that create each volume unless one of its name exists. Never with force: loading a
/// configuration must not overwrite a replica.
pub fn config(engine: &Engine) -> Vec<Value> {
    create::config(engine)
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NameParams {
    /// Name or UUID of the volume.
    pub name: String,
}

/// `num_blocks`, or `size_mb` or `size` (in bytes) converted to blocks.
fn blocks(
    num_blocks: Option<u64>,
    size_mb: Option<u64>,
    size: Option<u64>,
    block_size: u32,
) -> Result<Option<u64>, RpcError> {
    let wrong = |field, why: &str| RpcError::errno(Errno::EINVAL, why).field(field);
    match (num_blocks, size_mb, size) {
        (None, None, None) => Ok(None),
        (Some(blocks), None, None) => Ok(Some(blocks)),
        (None, Some(mb), None) => mb
            .checked_mul((1 << 20) / u64::from(block_size))
            .map(Some)
            .ok_or_else(|| wrong("size_mb", "that is more than 64 bits of bytes")),
        (None, None, Some(bytes)) => Ok(Some(bytes.div_ceil(u64::from(block_size)))),
        _ => {
            Err(wrong("size_mb", "the size is given twice")
                .remedy("give size, size_mb or num_blocks"))
        }
    }
}

/// Calls another method on behalf of this one.
async fn call(engine: &Rc<Engine>, method: &str, params: Value) -> Result<Value, RpcError> {
    let raw = serde_json::value::to_raw_value(&params);
    let raw = raw.map_err(|error| RpcError::internal(error.to_string()))?;
    let answer = engine.own_call(method, Some(&raw)).await?;
    serde_json::from_str(answer.get()).map_err(|error| RpcError::internal(error.to_string()))
}

/// Parses a replica id; `None` if the text is a device name.
fn parse_id(text: &str) -> Option<Uuid> {
    Uuid::parse_str(text).ok()
}
