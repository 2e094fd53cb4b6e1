//! The source of drives: this machine's bus through VFIO, or a simulated one in tests.

use std::sync::{Arc, OnceLock};

use nacre_bdev_nvme::Function;
use nacre_bdev_nvme_vfio::pci::{Address, Driver, System};
use nacre_bdev_nvme_vfio::{Vfio, VfioError};
use nacre_hugepages::Arena;

use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};

/// A bus with NVMe drives for this process.
pub trait Bus: Send + Sync + 'static {
    /// Opens the drive at `address`, which must be bound to userspace. `arenas` is all memory that
    /// data comes from or goes to. Blocks for a short time.
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError>;

    /// The addresses of the drives bound to userspace, in order.
    fn ready(&self) -> Vec<String>;
}

/// Normalises an address to `0000:5e:00.0`: the domain is optional, letters may be upper case.
pub fn address(text: &str) -> Option<String> {
    let address: Address = text.parse().ok()?;
    Some(address.to_string())
}

/// The bus of this machine.
#[derive(Default)]
pub struct RealBus {
    vfio: OnceLock<Vfio>,
}

impl RealBus {
    pub fn new() -> RealBus {
        RealBus::default()
    }
}

impl Bus for RealBus {
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError> {
        // Created once, before the first drive.
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
