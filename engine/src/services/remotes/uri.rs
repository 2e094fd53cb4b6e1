//! Converts the address of a remote namespace to an attach call.

use nacre_nvmf::address::{Endpoint, Select};
use serde_json::{Value, json};

/// The parameters of `bdev_nvme_attach_controller`. The default name is the last part of the
/// subsystem's NQN.
pub fn attach_params(endpoint: &Endpoint, name: Option<String>) -> Value {
    let fields = endpoint.spdk_fields();
    let subnqn = fields.subnqn.unwrap_or_default();
    let mut params = json!({
        "name": name.unwrap_or_else(|| default_name(&subnqn)),
        "trtype": fields.trtype,
        "traddr": fields.traddr,
        "trsvcid": fields.trsvcid,
        "subnqn": subnqn,
    });
    if let Some(fallback) = fields.fallback {
        params["fallback"] = fallback.word().into();
    }
    if let Some(nqn) = &endpoint.hostnqn {
        params["hostnqn"] = nqn.to_string().into();
    }
    match endpoint.select {
        Select::All => {}
        Select::Nsid(nsid) => params["nsid"] = nsid.into(),
        Select::Uuid(uuid) => params["uuid"] = uuid.to_string().into(),
    }
    params
}

/// The text after the last colon: the name that the owner chose.
pub fn default_name(subnqn: &str) -> String {
    let last = subnqn.rsplit(':').next().unwrap_or(subnqn);
    last.chars().take(64).collect()
}
