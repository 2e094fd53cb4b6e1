//! What devices can hold. The kernel says it to verbs alone, so this takes libibverbs and access to the device.

use nacre_rdma_verbs::{DeviceAttributes, Provider, VerbsProvider};
use serde_json::{Value, json};

use super::size::Limits;

/// The attributes of every device that can be opened, or why none can.
pub fn all() -> Result<Vec<DeviceAttributes>, String> {
    let provider = VerbsProvider::open().map_err(|error| error.to_string())?;
    let devices = provider.devices().map_err(|error| error.to_string())?;
    Ok(devices
        .iter()
        .map(|device| device.attributes().clone())
        .collect())
}

pub fn json(attributes: &DeviceAttributes) -> Value {
    json!({
        "vendor_id": format!("{:#06x}", attributes.vendor_id),
        "vendor_part_id": attributes.vendor_part_id,
        "max_qp": attributes.max_qp,
        "max_qp_wr": attributes.max_qp_wr,
        "max_sge": attributes.max_sge,
        "max_sge_rd": attributes.max_sge_rd,
        "max_cq": attributes.max_cq,
        "max_cqe": attributes.max_cqe,
        "max_mr": attributes.max_mr,
        "max_mr_size": attributes.max_mr_size,
        "max_pd": attributes.max_pd,
        "max_qp_rd_atom": attributes.max_responder_resources,
        "max_qp_init_rd_atom": attributes.max_initiator_depth,
        "max_srq": attributes.max_srq,
        "max_srq_wr": attributes.max_srq_wr,
        "max_srq_sge": attributes.max_srq_sge,
        "send_with_invalidate": attributes.send_with_invalidate,
    })
}

impl From<&DeviceAttributes> for Limits {
    fn from(attributes: &DeviceAttributes) -> Limits {
        Limits {
            max_qp: attributes.max_qp,
            max_qp_wr: attributes.max_qp_wr,
            max_cqe: attributes.max_cqe,
            max_srq_wr: attributes.max_srq_wr,
        }
    }
}
