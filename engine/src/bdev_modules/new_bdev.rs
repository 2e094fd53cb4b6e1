//! The parameters that malloc and null devices share.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::rpc::RpcError;
use crate::rpc::error::Errno;

/// Options of a new malloc or null device. The only declaration of these parameters of
/// bdev_malloc_create and bdev_null_create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NewBdevOptions {
    /// Physical block size in bytes that hosts see, a power of two and not less than block_size. 0:
    /// block_size.
    pub physical_block_size: u32,
    /// Must be 0: metadata is not supported.
    pub md_size: u32,
    /// Must be 0.
    pub dif_type: u32,
    /// Accepted without effect: there is no protection information.
    pub dif_is_head_of_md: bool,
    /// Accepted without effect: there is no protection information.
    pub dif_pi_format: u32,
    /// Default: random.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
}

impl NewBdevOptions {
    /// Refuses metadata and protection information, which SPDK has and Nacre does not support.
    pub(super) fn check(&self) -> Result<(), RpcError> {
        let asked = [("md_size", self.md_size), ("dif_type", self.dif_type)];
        match asked.iter().find(|(_, value)| *value != 0) {
            None => Ok(()),
            Some((field, value)) => Err(RpcError::errno(
                Errno::ENOTSUP,
                format!("{field} {value}: devices here have no metadata"),
            )
            .field(*field)
            .remedy("leave it out, or 0")),
        }
    }

    pub(super) fn physical_block_size(&self) -> Option<u32> {
        Some(self.physical_block_size).filter(|bytes| *bytes != 0)
    }
}
