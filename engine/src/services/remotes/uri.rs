//! Converts the address of a remote namespace to an attach call.

use nacre_nvmf::address::{Endpoint, Select};

use crate::services::nvme::AttachParams;

/// The parameters that attach the namespaces of `endpoint`. The default name is the last part of
/// the subsystem's NQN.
pub fn attach_params(endpoint: &Endpoint, name: Option<String>) -> AttachParams {
    let fields = endpoint.spdk_fields();
    let subnqn = fields.subnqn.unwrap_or_default();
    let (nsid, uuid) = match endpoint.select {
        Select::All => (None, None),
        Select::Nsid(nsid) => (Some(nsid), None),
        Select::Uuid(uuid) => (None, Some(uuid)),
    };
    AttachParams {
        name: name.unwrap_or_else(|| default_name(&subnqn)),
        trtype: fields.trtype.to_owned(),
        traddr: fields.traddr,
        trsvcid: fields.trsvcid,
        subnqn: Some(subnqn),
        hostnqn: endpoint.hostnqn.as_ref().map(ToString::to_string),
        fallback: fields.fallback,
        nsid,
        uuid,
        ..AttachParams::default()
    }
}

/// The text after the last colon: the name that the owner chose.
pub fn default_name(subnqn: &str) -> String {
    let last = subnqn.rsplit(':').next().unwrap_or(subnqn);
    last.chars().take(64).collect()
}
