//! The listeners of a subsystem: whether hosts are refused on them, and their journal keys.

use nacre_nvmf::subsystems::Withheld;
use nacre_nvmf::transport::{Address, TransportType};
use nacre_nvmf_wire::Nqn;
use serde_json::{Value, json};

use super::key;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::store::{Change, Edit};
use crate::values::address::shown;

/// Updates the fields `withheld` and `withheld_reason` in the parameters of a listener's record.
pub fn note_withheld(record: &mut Value, why: Option<Withheld>) {
    let Some(fields) = record.as_object_mut() else {
        return;
    };
    fields.remove("withheld");
    fields.remove("withheld_reason");
    if let Some(why) = why {
        fields.insert("withheld".into(), true.into());
        if why != Withheld::ByRequest {
            fields.insert("withheld_reason".into(), json!(why));
        }
    }
}

/// True if the listener was added by RPC and is stored.
pub fn is_stored_listener(
    engine: &Engine,
    nqn: &Nqn,
    kind: TransportType,
    address: &Address,
) -> bool {
    let entry = engine
        .journal
        .find(&key::listener(nqn, kind, &place(address)));
    entry.is_some_and(|entry| entry.durable)
}

/// Withholds a subsystem's listener from hosts, or (`None`) admits hosts again. The record of the
/// listener changes too.
pub async fn withhold(
    engine: &Engine,
    nqn: &Nqn,
    kind: TransportType,
    address: &Address,
    why: Option<Withheld>,
) -> Result<(), RpcError> {
    let _changing = engine.changing().await;
    let plane = engine.plane()?;
    if let Some(entry) = engine
        .journal
        .find(&key::listener(nqn, kind, &place(address)))
    {
        let mut record = entry.record;
        note_withheld(&mut record.params, why);
        engine
            .journal
            .commit(Change(vec![Edit::Put(record)]))
            .await?;
    }
    plane.target.withhold(nqn, kind, address, why).or_refuse()?;
    engine.notes.send("nvmf_listener_change", nqn.as_str());
    Ok(())
}

/// The address as a part of a journal key. It has the interface's name, not its index, which can
/// change.
pub fn place(address: &Address) -> String {
    match address {
        Address::Ip(address) => shown(address),
        other => other.to_string(),
    }
}
