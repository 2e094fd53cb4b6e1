//! The limits of RDMA devices (`ibv_query_device`). The kernel reports them only through verbs, so
//! this needs libibverbs and access to the device.

use nacre_transport_rdma_verbs::{DeviceAttributes, Provider, VerbsProvider};

use super::size::Limits;

/// The attributes of every device that can be opened, or the reason why none can.
pub(super) fn all() -> Result<Vec<DeviceAttributes>, String> {
    let provider = VerbsProvider::open().map_err(|error| error.to_string())?;
    let devices = provider.devices().map_err(|error| error.to_string())?;
    Ok(devices
        .iter()
        .map(|device| device.attributes().clone())
        .collect())
}

impl From<&DeviceAttributes> for Limits {
    fn from(attributes: &DeviceAttributes) -> Self {
        Self {
            max_qp: attributes.max_qp,
            max_qp_wr: attributes.max_qp_wr,
            max_cqe: attributes.max_cqe,
            max_srq_wr: attributes.max_srq_wr,
        }
    }
}
