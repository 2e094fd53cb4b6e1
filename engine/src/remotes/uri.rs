//! Converts the URI of a remote namespace to an attach call.

use nacre_bdev_remote::{RemoteUri, Select, Way};
use serde_json::{Value, json};

/// The parameters of `bdev_nvme_attach_controller`. The default name is the last part of the
/// subsystem's NQN.
pub fn attach_params(uri: &RemoteUri, name: Option<String>) -> Value {
    let (trtype, fallback) = match uri.way {
        Way::Auto => ("AUTO", None),
        Way::Tcp => ("TCP", None),
        Way::Rdma => ("RDMA", Some("none")),
        Way::RdmaThenTcp => ("RDMA", Some("tcp")),
    };
    let subnqn = uri.subnqn.to_string();
    let mut params = json!({
        "name": name.unwrap_or_else(|| default_name(&subnqn)),
        "trtype": trtype,
        "traddr": uri.host,
        "trsvcid": uri.port.to_string(),
        "subnqn": subnqn,
    });
    if let Some(fallback) = fallback {
        params["fallback"] = fallback.into();
    }
    if let Some(nqn) = &uri.hostnqn {
        params["hostnqn"] = nqn.to_string().into();
    }
    match uri.select {
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
