//! Options that startup-only methods set before the data plane starts.

use nacre_nvmf::auth::{Group, Hash};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plane::demand::IobufOptions;
use crate::values::options;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct StartupOptions {
    pub iobuf: IobufOptions,
    pub bdev: BdevOptions,
    pub nvmf: NvmfOptions,
    pub sock: SockOptions,
}

/// Options of `nvmf_set_max_subsystems`, `nvmf_set_crdt` and `nvmf_set_config`, given before the
/// start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NvmfOptions {
    pub max_subsystems: Option<u32>,
    /// Command retry delay times (CRDT1 to CRDT3) in units of 100 ms.
    pub command_retry_delay: Option<[u16; 3]>,
    pub discovery_filters: Vec<DiscoveryFilter>,
    /// Hash functions for DH-HMAC-CHAP, in order of preference; `None`: those of the settings.
    pub hashes: Option<Vec<Hash>>,
    pub groups: Option<Vec<Group>>,
}

options! {
    /// Options of the block device layer, with SPDK's defaults.
    BdevOptions,
    /// The parameters of `bdev_set_options`.
    BdevParams:
    /// Accepted under SPDK's rules: requests are bounded per queue and need no pool.
    bdev_io_pool_size: u32 = 64 * 1024 - 1;
    /// Accepted under SPDK's rules: one cache per thread must fit into bdev_io_pool_size.
    bdev_io_cache_size: u32 = 256;
    /// Accepted: no module examines other devices on its own.
    bdev_auto_examine: bool = true;
    /// Accepted: every reactor has its own buffers, see iobuf_set_options.
    iobuf_small_cache_size: u32 = 128;
    /// Accepted: every reactor has its own buffers, see iobuf_set_options.
    iobuf_large_cache_size: u32 = 16;
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

options! {
    /// Socket options under SPDK's names; set before the TCP transport is created. Only sizes of
    /// buffers ever differ from the defaults.
    SockOptions,
    /// Options that `sock_impl_set_options` is given.
    SockParams:
    /// Bytes of a socket's receive buffer; default 0: the kernel sizes it.
    recv_buf_size: u32 = 0;
    /// As recv_buf_size.
    send_buf_size: u32 = 0;
    /// Accepted: receiving is always buffered.
    enable_recv_pipe: bool = true;
    /// Must be false.
    enable_quickack: bool = false;
    /// Must be 0: connections are placed by load.
    enable_placement_id: u32 = 0;
    /// Accepted, like the two that follow: the kernel copies sent data.
    enable_zerocopy_send_server: bool = false;
    /// Accepted without effect.
    enable_zerocopy_send_client: bool = false;
    /// Accepted without effect.
    zerocopy_threshold: u32 = 0;
    /// Must be 0.
    tls_version: u32 = 0;
    /// Must be false.
    enable_ktls: bool = false;
}
