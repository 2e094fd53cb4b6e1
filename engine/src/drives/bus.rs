//! Where drives come from: this machine's bus through VFIO, or one that a test made.

use std::sync::{Arc, OnceLock};

use nacre_bdev_nvme::Function;
use nacre_bdev_nvme_vfio::pci::{Address, Driver, System};
use nacre_bdev_nvme_vfio::{Vfio, VfioError};
use nacre_hugepages::Arena;

use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};

/// A bus with NVMe drives that a process may have.
pub trait Bus: Send + Sync + 'static {
    /// Takes the drive at `address`, which has been given to userspace before. `arenas`: all memory that data
    /// comes from or goes to. Blocks for a moment.
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError>;

    /// The addresses of the drives that were given to userspace, in order.
    fn ready(&self) -> Vec<String>;
}

/// `0000:5e:00.0` of what people write: the domain may be left out, letters may be large.
pub fn address(text: &str) -> Option<String> {
    let address: Address = text.parse().ok()?;
    Some(address.to_string())
}

/// This machine's.
#[derive(Default)]
pub struct Machine {
    vfio: OnceLock<Vfio>,
}

impl Machine {
    pub fn new() -> Machine {
        Machine::default()
    }
}

impl Bus for Machine {
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError> {
        // They are made once, before the first drive.
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
