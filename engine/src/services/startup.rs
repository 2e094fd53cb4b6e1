//! Options that startup-only methods set before the data plane starts.

use nacre_nvmf::auth::{Group, Hash};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plane::demand::IobufOptions;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct StartupOptions {
    pub iobuf: IobufOptions,
    pub bdev: BdevOptions,
    pub nvmf: NvmfOptions,
    pub sock: SockOptions,
}

/// Options of `nvmf_set_max_subsystems`, `nvmf_set_crdt` and `nvmf_set_config`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NvmfOptions {
    pub max_subsystems: Option<u32>,
    /// Command retry delay times (CRDT1 to CRDT3) in units of 100 ms.
    pub command_retry_delay: Option<[u16; 3]>,
    pub discovery_filters: Vec<DiscoveryFilter>,
    /// Hash functions and groups for authentication; `None`: as the settings say.
    pub hashes: Option<Vec<Hash>>,
    pub groups: Option<Vec<Group>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BdevOptions {
    pub bdev_io_pool_size: u32,
    pub bdev_io_cache_size: u32,
    pub bdev_auto_examine: bool,
    pub iobuf_small_cache_size: u32,
    pub iobuf_large_cache_size: u32,
}

impl Default for BdevOptions {
    fn default() -> Self {
        Self {
            bdev_io_pool_size: 64 * 1024 - 1,
            bdev_io_cache_size: 256,
            bdev_auto_examine: true,
            iobuf_small_cache_size: 128,
            iobuf_large_cache_size: 16,
        }
    }
}

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum DiscoveryFilter {
    Transport,
    Address,
    Svcid,
}

/// SPDK's name for kernel sockets.
pub const POSIX: &str = "posix";

/// Socket options; set before the TCP transport is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SockOptions {
    pub impl_name: &'static str,
    /// Bytes; 0: the kernel sizes the buffer.
    pub recv_buf_size: u32,
    pub send_buf_size: u32,
}

impl Default for SockOptions {
    fn default() -> Self {
        Self {
            impl_name: POSIX,
            recv_buf_size: 0,
            send_buf_size: 0,
        }
    }
}
