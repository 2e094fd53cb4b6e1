//! The errors of opening a drive through VFIO. The text contains the remedy where one is known.

use std::io;
use std::path::PathBuf;

use nacre_bdev_nvme::chain;
use nacre_hugepages::RegisterError;

use crate::pci::{AddressError, Driver, PciError};

/// The reason why a drive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Pci(#[from] PciError),
    #[error(
        "drive {address} has the driver {driver}, not vfio-pci; take it with `nacre nvme bind {address}`"
    )]
    NotBound { address: String, driver: Driver },
    #[error(
        "drive {address} is in a group without an IOMMU, whose addresses are the machine's own: memory in pages is not \
         where a drive would look for it; switch the IOMMU on in the firmware and start Linux with `intel_iommu=on` \
         (Intel) or `iommu=pt` (AMD)"
    )]
    NoIommu { address: String },
    #[error(
        "{path} is not there: load the module (`modprobe vfio-pci`), or pass /dev/vfio into this container"
    )]
    NoNode { path: PathBuf },
    #[error("{path} may not be used: {source}; run as root, or `chown USER {path}`")]
    NotPermitted { path: PathBuf, source: io::Error },
    #[error(
        "IOMMU group {group} of drive {address} is in use by {by}; only one process may have it: end that one"
    )]
    GroupBusy {
        address: String,
        group: String,
        by: String,
    },
    #[error(
        "IOMMU group {group} of drive {address} is not viable: {members} have kernel drivers; unbind these first"
    )]
    NotViable {
        address: String,
        group: String,
        members: String,
    },
    #[error("this kernel's VFIO speaks version {version}, not 0")]
    Version { version: i32 },
    #[error("this kernel's VFIO has no type 1 IOMMU; load the module: `modprobe vfio_iommu_type1`")]
    NoType1,
    #[error(
        "drive {address} cannot share the addresses of the drives that are in use, because its part of the machine \
         reserves some of those given out; detach the others, attach this one first"
    )]
    Addresses { address: String },
    #[error("drive {address}: {problem}")]
    Registers { address: String, problem: String },
    #[error("drive {address}: {what} failed: {source}")]
    Step {
        address: String,
        what: &'static str,
        source: io::Error,
    },
    #[error(
        "the data memory cannot be made known to drive {address}: {}",
        chain(source)
    )]
    Memory {
        address: String,
        source: RegisterError,
    },
}
