//! `volume_*`, Nacre extensions: replicated volumes.
//!
//! ```text
//!   create      create, delete, rename
//!   replicas     add, remove, offline, online, replace, move, resync
//!   list        state and records
//!   operate     verify, grow, set, thaw, fail I/O
//!   publish     subsystem and connections
//!   paths       transports and ANA states of the listeners
//!   devices     devices for replicas
//! ```
//!
//! The durable part of a volume is its record in the volume store, which the volume's control
//! updates before it replies. The journal has no record of the volume itself, but of its access:
//! subsystem, namespace, listeners, and `volume/published/<uuid>`. The latter means that the
//! subsystem follows the listeners of the configuration file.
//!
//! Commands wait for the volume's control and change nothing else, so they do not block other
//! calls.

mod create;
mod devices;
#[cfg(test)]
mod frozen_tests;
#[cfg(test)]
mod half_tests;
mod list;
mod operate;
mod paths;
mod publish;
#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod racing_tests;
#[cfg(test)]
mod renamed_tests;
mod replicas;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use nacre_bdev_replica::handle::SettingsPatch;
use nacre_bdev_replica::model::{ReadPolicy, TransportPolicy};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use crate::engine::Engine;
use crate::rpc::error::Errno;
use crate::rpc::{Registry, RpcError};
use crate::values::read;

pub use list::{REPLICA_STATES, STATES, kind_word, replica_word, state_word};
pub use paths::{AnaByTransport, of_listener, with_ana};
pub use publish::{Published, published, published_key};

pub fn register(registry: &mut Registry<Engine>) {
    create::register(registry);
    list::register(registry);
    replicas::register(registry);
    operate::register(registry);
    publish::register(registry);
}

/// Calls that create each volume unless one of its name exists. Never with force: loading a
/// configuration must not overwrite a replica.
pub fn config(engine: &Engine) -> Vec<Value> {
    create::config(engine)
}

/// Calls that mark subsystems as made by publishing a volume. They follow the calls that create the
/// subsystems.
pub fn published_config(engine: &Engine) -> Vec<Value> {
    publish::config(engine)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NameParams {
    /// Name or UUID of the volume.
    name: String,
}

/// Settings of a volume; one left out keeps its value, or its default. Times and sizes are numbers
/// in the unit of their name, or text such as "5s" and "100MB".
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SettingsParams {
    /// Replica selection for reads: `local-first`, `least-outstanding` or `round-robin`.
    #[schemars(with = "Option<String>")]
    read_policy: Option<ReadPolicy>,
    /// Writes wait while fewer replicas than this are in sync; default 1.
    min_in_sync: Option<u8>,
    /// A replica with an I/O that takes longer than this goes out of sync; default 8000.
    #[serde(deserialize_with = "read::some_millis")]
    deadline_ms: Option<u64>,
    /// How long host commands wait while no replica is in sync, before hosts are asked to retry;
    /// default 20000. Linux hosts time out a command after 30 s.
    #[serde(deserialize_with = "read::some_millis")]
    frozen_hold_ms: Option<u64>,
    /// Read errors within an hour that take a replica out of sync; default 16.
    read_errors: Option<u32>,
    /// Rate limit of resync; 0: no limit.
    #[serde(deserialize_with = "read::some_bytes")]
    resync_bytes_per_s: Option<u64>,
    /// Delay before a resync to a returning replica, and after a host with writes in flight left or
    /// the volume was opened; default 500. Late writes of an old connection arrive within it.
    #[serde(deserialize_with = "read::some_millis")]
    settle_ms: Option<u64>,
    /// Hours between automatic verifications; 0: none.
    #[serde(deserialize_with = "read::some_hours")]
    verify_hours: Option<u32>,
    /// Transports that hosts may use for a published volume: `inherit` and `any` (every listener),
    /// `rdma-only` or `tcp-only`.
    #[schemars(with = "Option<String>")]
    transport_policy: Option<TransportPolicy>,
}

impl SettingsParams {
    fn patch(&self) -> SettingsPatch {
        SettingsPatch {
            read_policy: self.read_policy,
            min_in_sync: self.min_in_sync,
            deadline_ms: self.deadline_ms,
            frozen_hold_ms: self.frozen_hold_ms,
            read_errors: self.read_errors,
            resync_bytes_per_s: self.resync_bytes_per_s,
            settle_ms: self.settle_ms,
            verify_hours: self.verify_hours,
            transport_policy: self.transport_policy,
        }
    }
}

/// `num_blocks`, or `size_mb` converted to blocks.
fn blocks(
    num_blocks: Option<u64>,
    size_mb: Option<u64>,
    block_size: u32,
) -> Result<Option<u64>, RpcError> {
    let wrong = |field, why: &str| RpcError::errno(Errno::EINVAL, why).field(field);
    match (num_blocks, size_mb) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => {
            Err(wrong("size_mb", "the size is given twice").remedy("give size_mb or num_blocks"))
        }
        (Some(blocks), None) => Ok(Some(blocks)),
        (None, Some(mb)) => mb
            .checked_mul((1 << 20) / u64::from(block_size))
            .map(Some)
            .ok_or_else(|| wrong("size_mb", "that is more than 64 bits of bytes")),
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
