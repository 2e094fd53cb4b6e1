//! `volume_*`, our own: replicated volumes.
//!
//! ```text
//!   create      make, delete, rename        members    add, remove, offline, online, replace, move, resync
//!   list        what they are and do        operate    verify, grow, set, thaw, fail I/O
//!   publish     to hosts, and who they are  paths      their transports, and the first of them
//! ```
//!
//! What is durable of a volume is its record in the volume store, which its control changes before it
//! answers: there is no journal record of it. The journal has who may use it: subsystem, namespace,
//! listeners, and `volume/published/<uuid>`, which says that the subsystem is served wherever the
//! configuration file says.
//!
//! Commands wait for the volume's control and change nothing else, so they hold nobody else up.

mod create;
mod devices;
#[cfg(test)]
mod frozen_tests;
#[cfg(test)]
mod half_tests;
mod list;
mod members;
mod operate;
mod paths;
mod publish;
#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod racing_tests;
#[cfg(test)]
mod renamed_tests;
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

pub use list::{MEMBER_STATES, STATES, kind_word, member_word, state_word};
pub use paths::{AnaByTransport, of_listener, with_ana};
pub use publish::{Published, published, published_key};

pub fn register(registry: &mut Registry<Engine>) {
    create::register(registry);
    list::register(registry);
    members::register(registry);
    operate::register(registry);
    publish::register(registry);
}

/// The call that makes each volume again where there is none of its name: never with force, so that
/// loading a configuration does not overwrite a replica.
pub fn config(on: &Engine) -> Vec<Value> {
    create::config(on)
}

/// The calls that note which subsystems were made by publishing volumes, for after those that make them.
pub fn published_config(on: &Engine) -> Vec<Value> {
    publish::config(on)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NameParams {
    /// Name or UUID of the volume.
    name: String,
}

/// Settings of a volume; one that is left out keeps its value, or its default. Times and sizes are
/// numbers in the unit of their names, or text such as "5s" and "100MB".
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SettingsParams {
    /// Which replica a read goes to: `local-first`, `least-outstanding` or `round-robin`.
    #[schemars(with = "Option<String>")]
    read_policy: Option<ReadPolicy>,
    /// Writes wait while fewer replicas than this are in sync; 1 unless set.
    min_in_sync: Option<u8>,
    /// A replica that does not answer an I/O for so long is out of sync; 8000 unless set.
    #[serde(deserialize_with = "read::some_millis")]
    deadline_ms: Option<u64>,
    /// How long commands of hosts wait while nothing is in sync, before hosts are told to ask again;
    /// 20000 unless set. Linux hosts give up a command after 30 s.
    #[serde(deserialize_with = "read::some_millis")]
    frozen_hold_ms: Option<u64>,
    /// Read errors of a replica within an hour after which it is out of sync; 16 unless set.
    read_errors: Option<u32>,
    /// What resync and rebuild may copy at most; 0: no limit.
    #[serde(deserialize_with = "read::some_bytes")]
    resync_bytes_per_s: Option<u64>,
    /// How long nothing is copied to a replica that returns, nor once a volume was opened or left by a host with
    /// writes under way; 500 unless set.
    #[serde(deserialize_with = "read::some_millis")]
    settle_ms: Option<u64>,
    /// Hours between verifications that run by themselves; 0: none.
    #[serde(deserialize_with = "read::some_hours")]
    verify_hours: Option<u32>,
    /// Over which transports hosts may use it when it is published: `inherit` and `any` (what its
    /// listeners offer), `rdma-only` or `tcp-only`.
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

/// `num_blocks`, or `size_mb` in blocks.
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

/// A call of another method on this one's behalf.
async fn call(on: &Rc<Engine>, method: &str, params: Value) -> Result<Value, RpcError> {
    let raw = serde_json::value::to_raw_value(&params);
    let raw = raw.map_err(|error| RpcError::internal(error.to_string()))?;
    let answer = on.own_call(method, Some(&raw)).await?;
    serde_json::from_str(answer.get()).map_err(|error| RpcError::internal(error.to_string()))
}

/// For errors of a parameter that names a member.
fn parse_id(text: &str) -> Option<Uuid> {
    Uuid::parse_str(text).ok()
}
