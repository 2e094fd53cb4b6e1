//! Finds and opens NVMe drives: on this machine's PCI bus through VFIO, or on a simulated bus in
//! tests.

use std::sync::{Arc, OnceLock};

use nacre_bdev_nvme::Function;
use nacre_bdev_nvme_vfio::pci::{Address, Driver, System};
use nacre_bdev_nvme_vfio::{Vfio, VfioError};
use nacre_hugepages::Arena;

use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};

/// A PCI bus whose NVMe drives this process may open.
pub trait Bus: Send + Sync + 'static {
    /// Opens the drive at PCI address `address`, which must be bound to vfio-pci. `arenas`: all
    /// memory that the drive may access by DMA. Blocks for a short time.
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError>;

    /// The PCI addresses of the drives bound to vfio-pci, in ascending order.
    fn ready(&self) -> Vec<String>;
}

/// Normalises a PCI address to `0000:5e:00.0`. In `text` the domain is optional and letters may
/// be upper case. `None` if `text` is not a PCI address.
pub fn address(text: &str) -> Option<String> {
    let address: Address = text.parse().ok()?;
    Some(address.to_string())
}

/// The PCI bus of this machine.
#[derive(Default)]
pub struct RealBus {
    vfio: OnceLock<Vfio>,
}

impl RealBus {
    pub fn new() -> Self {
        Self::default()
    }
}

impl Bus for RealBus {
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError> {
        // The VFIO container is created once, before the first drive.
        let vfio = self.vfio.get_or_init(|| Vfio::new(arenas));
        let function = vfio.open(address).map_err(refusal)?;
        Ok(function)
    }

    fn ready(&self) -> Vec<String> {
        let drives = System::real().drives().into_iter();
        drives
            .filter(|drive| drive.driver == Driver::VfioPci)
            .map(|drive| drive.address.to_string())
            .collect()
    }
}

fn refusal(error: VfioError) -> RpcError {
    let errno = match &error {
        VfioError::NotBound { .. } | VfioError::GroupBusy { .. } | VfioError::NotViable { .. } => {
            Errno::EBUSY
        }
        VfioError::NotPermitted { .. } => Errno::EPERM,
        VfioError::Address(_) => Errno::EINVAL,
        VfioError::NoIommu { .. } | VfioError::NoType1 | VfioError::Version { .. } => {
            Errno::ENOTSUP
        }
        _ => Errno::ENODEV,
    };
    let cause = causes(&anyhow::Error::new(error));
    RpcError::errno(errno, cause)
        .field("traddr")
        .remedy("`nacre nvme list` shows the drives and their drivers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, is) in [
            ("0000:5e:00.0", Some("0000:5e:00.0")),
            ("5E:00.0", Some("0000:5e:00.0")),
            ("0000:5e:20.0", None),
            ("0000:5e:00.8", None),
            ("5e00.0", None),
            ("", None),
        ] {
            assert_eq!(address(text).as_deref(), is, "{text}");
        }
    }
}
