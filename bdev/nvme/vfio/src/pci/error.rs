//! The errors of finding, binding and unbinding a drive. Each text contains the remedy.

use std::io;
use std::path::PathBuf;

use super::{Address, Driver, Member, Use};

fn list<T: ToString>(items: &[T]) -> String {
    if items.is_empty() {
        "none".into()
    } else {
        let items: Vec<String> = items.iter().map(T::to_string).collect();
        items.join(", ")
    }
}

/// Why a drive was not found, or not taken or given back. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    #[error(
        "there is no PCI function {address}; NVMe drives are at: {}",
        list(have)
    )]
    NotThere {
        address: Address,
        have: Vec<Address>,
    },
    #[error(
        "{address} is no NVMe drive: its class is {class}, that of NVMe drives {}",
        super::NVME_CLASS
    )]
    NotNvme { address: Address, class: String },
    #[error(
        "no drive says that its serial number is \"{serial}\"; those known are: {}; the kernel's driver does not have \
         these, name them by address: {}",
        list(have),
        list(silent)
    )]
    NoSuchSerial {
        serial: String,
        have: Vec<String>,
        silent: Vec<Address>,
    },
    #[error(
        "drive {address} is in use: {}; end that first, or give `--force {}`; data on the drive may be lost",
        list(uses),
        serial.as_deref().unwrap_or("SERIAL")
    )]
    InUse {
        address: Address,
        serial: Option<String>,
        uses: Vec<Use>,
    },
    #[error(
        "drive {address} is in use, and \"{given}\" is not its serial number, so it was not meant; look at `nacre nvme list`"
    )]
    OtherSerial { address: Address, given: String },
    #[error(
        "drive {address} has no IOMMU group{}; without it a drive may write to any memory; switch the IOMMU on in the \
         firmware and start Linux with `intel_iommu=on` (Intel) or `iommu=pt` (AMD); or, if every program on this \
         machine may be trusted, `--no-iommu`",
        if *has_groups { ", though others have" } else { ": this machine's IOMMU is off" }
    )]
    NoIommu { address: Address, has_groups: bool },
    #[error(
        "VFIO's mode without an IOMMU cannot be had for drive {address}: {why}; switch the IOMMU on instead"
    )]
    NoIommuMode { address: Address, why: String },
    #[error(
        "drive {address} shares IOMMU group {group} with functions that the kernel drives: {}; they go to userspace \
         together: unbind these from their drivers, or move the drive to a slot with a group of its own",
        list(members)
    )]
    SharedGroup {
        address: Address,
        group: u32,
        members: Vec<Member>,
    },
    #[error(
        "the kernel module {module} is not there: {said}; install this kernel's modules, or load it from outside a container"
    )]
    NoModule { module: &'static str, said: String },
    #[error(
        "drive {address} is driven by {by} through VFIO; detach it there (`nacre rpc bdev_nvme_detach_controller`) or end it"
    )]
    Driven { address: Address, by: String },
    #[error(
        "drive {address} has the driver {driver}, which is neither the kernel's NVMe driver nor vfio-pci; unbind it first"
    )]
    OtherDriver { address: Address, driver: Driver },
    #[error("{file} cannot be written: {source}; run this as root, outside a container")]
    NotPermitted { file: PathBuf, source: io::Error },
    #[error("drive {address}: writing \"{text}\" to {file} failed")]
    Write {
        address: Address,
        file: PathBuf,
        text: String,
        source: io::Error,
    },
    #[error(
        "drive {address} did not come to the driver {wanted} within {seconds} s; its driver is now {now}; look at `dmesg`"
    )]
    Late {
        address: Address,
        wanted: &'static str,
        now: Driver,
        seconds: u64,
    },
    #[error(
        "/dev/vfio/{node} did not appear within {seconds} s, so drive {address} was given back; is udev running, and is \
         this outside a container?"
    )]
    NoNode {
        address: Address,
        node: String,
        seconds: u64,
    },
}
