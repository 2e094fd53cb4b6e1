//! Parses the addresses of controllers and namespaces in the configuration, in RPC calls and on the
//! command line.
//!
//! ```text
//!   [SCHEME://]HOST[:PORT][/NQN][?nsid=N|uuid=UUID][&hostnqn=NQN]
//!   pcie://BDF[?nsid=N]                                    a drive of this machine
//!
//!   tcp://192.0.2.1:4420/nqn.2025-01.io.example:volume?nsid=1
//!   rdma+tcp://[fe80::1%eth0]/nqn.2025-01.io.example:volume
//!   storage-1.example.com
//! ```
//!
//! | scheme | also accepted | transport |
//! |---|---|---|
//! | `auto` | `nvmf` | RDMA if the route has it, else TCP; the daemon follows its configuration |
//! | `tcp` | `nvmf+tcp` | TCP |
//! | `rdma` | `nvmf+rdma` | RDMA |
//! | `rdma+tcp` | `nvmf+rdma+tcp` | RDMA, and TCP while RDMA fails |
//! | `pcie` | `vfio` | the PCI bus of this machine |
//!
//! A [`Grammar`] lists the parts that one use accepts. Parsing makes no system calls: the caller
//! resolves host names and interfaces.

mod endpoint;
pub mod fuzzing;
mod grammar;
#[cfg(test)]
mod tests;
mod transport;

pub use endpoint::{Endpoint, Select, SpdkFields, adrfam};
pub use grammar::{
    AddressError, Grammar, SubsystemPart, parse_nqn, parse_nsid, parse_port, split_authority,
};
pub use transport::{Fallback, IpTransport, Scheme, TransportChoice, UnknownTransport};

/// The port of NVMe/TCP and NVMe/RDMA controllers (registered with IANA).
pub const NVME_PORT: u16 = 4420;

/// The port of discovery controllers (registered with IANA).
pub const DISCOVERY_PORT: u16 = 8009;
