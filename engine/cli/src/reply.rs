//! Reads replies of the daemon that several commands need.

use serde_json::Value;

use super::Failure;
use nacre_engine::methods::nvmf::subsystem::{GetSubsystems, GetSubsystemsParams};
use nacre_engine_rpc::client::Client;

/// All subsystems, or the one with this name.
pub(crate) fn subsystems(client: &mut Client, nqn: Option<&str>) -> Result<Vec<Value>, Failure> {
    let params = GetSubsystemsParams {
        nqn: nqn.map(str::to_owned),
        tgt_name: None,
    };
    let answer = client.call_for_json::<GetSubsystems, _>(&params)?;
    Ok(items(&answer).to_vec())
}

pub(crate) fn is_discovery(subsystem: &Value) -> bool {
    subsystem["subtype"]
        .as_str()
        .is_some_and(|subtype| subtype.starts_with("Discovery"))
}

pub(crate) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
