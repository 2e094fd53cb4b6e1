//! Describes RDMA devices for `nacre rdma devices` and `rdma_get_devices`.

use nacre_transport_rdma_link::{Device, Fabric};
use nacre_transport_rdma_verbs::DeviceAttributes;
use serde_json::{Value, json};

/// Adds `limits`, or `limits_unknown` with the reason, to the description of a device.
pub fn add_limits(device: &mut Value, known: &Result<Vec<DeviceAttributes>, String>) {
    let found = match known {
        Ok(all) => all.iter().find(|of| device["name"] == of.name[..]).ok_or(
            "libibverbs does not show this device: is its provider (ibverbs-providers) installed?",
        ),
        Err(why) => Err(&why[..]),
    };
    match found {
        Ok(attributes) => device["limits"] = limits(attributes),
        Err(why) => device["limits_unknown"] = why.into(),
    }
}

/// The description of the devices, from the kernel's facts.
pub fn described(fabric: &Fabric) -> Value {
    fabric.devices.iter().map(describe).collect()
}

fn describe(device: &Device) -> Value {
    let mut value = serde_json::to_value(device).expect("a device serialises");
    value["software"] = device.is_software().into();
    if let Some(quirk) = device.quirk() {
        value["title"] = quirk.title.into();
        value["module"] = quirk.module.into();
        value["note"] = quirk.note.into();
    }
    value
}

/// The limits of a device, under the names of `ibv_devinfo -v`.
pub fn limits(attributes: &DeviceAttributes) -> Value {
    let (general, operations) = paging(attributes);
    json!({
        "vendor_id": format!("{:#06x}", attributes.vendor.0),
        "vendor_part_id": attributes.vendor.1,
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
        "general_odp_caps": general,
        "rc_odp_caps": operations,
    })
}

/// The support of on-demand paging: in general, and for reliable connected queue pairs.
fn paging(attributes: &DeviceAttributes) -> (String, String) {
    let Some(paging) = &attributes.on_demand_paging else {
        return ("unknown".into(), "unknown".into());
    };
    let general = [
        ("ODP_SUPPORT", paging.explicit),
        ("ODP_SUPPORT_IMPLICIT", paging.implicit),
    ];
    let general = general.into_iter().filter(|(_, supported)| *supported);
    let general: Vec<&str> = general.map(|(name, _)| name).collect();
    let or_none = |names: &[&str]| match names {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    (or_none(&general), or_none(&paging.operations))
}
