//! Rules for names that the configuration file and RPC calls share.

use nacre_nvmf_wire::Nqn;
use tracing::warn;

use crate::rpc::RpcError;

/// The reason for which the path of a key file is refused.
pub const RELATIVE_KEY: &str = "the path is not absolute";

/// Most bytes of a key's name.
const MAX_KEY_NAME: usize = 128;

pub fn check_key_name(name: &str) -> Result<(), RpcError> {
    if (1..=MAX_KEY_NAME).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let cause =
        format!("a name of 1 to {MAX_KEY_NAME} bytes, none of them a control character, is needed");
    Err(RpcError::invalid_params(cause).field("name"))
}

pub fn host_nqn(text: &str) -> Result<Nqn, RpcError> {
    let host = Nqn::foreign(text).map_err(|error| {
        RpcError::invalid_params(error.to_string())
            .field("host")
            .remedy("give the host's NQN, as in its /etc/nvme/hostnqn")
    })?;
    if !host.is_well_formed() {
        warn!(%host, "the host's name is not a valid NQN; the host is served under it nevertheless");
    }
    Ok(host)
}
