//! Listeners of a subsystem: their state for hosts, and whether hosts are refused.

use clap::builder::PossibleValue;
use nacre_nvmf::subsystems::Withheld;
use nacre_nvmf::transport::{Address, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::key;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::services::engine::Engine;
use crate::store::{Change, Edit};
use crate::values::address::shown;

/// ANA state of a path in SPDK's words; the last two are Nacre extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnaWord {
    Optimized,
    NonOptimized,
    Inaccessible,
    /// The namespaces never become available on this path again.
    PersistentLoss,
    /// In transition: hosts wait, at most ten seconds.
    Change,
}

impl AnaWord {
    /// The name that calls use.
    pub fn word(self) -> String {
        let word = serde_json::to_value(self).ok();
        word.and_then(|w| w.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

impl clap::ValueEnum for AnaWord {
    fn value_variants<'a>() -> &'a [AnaWord] {
        &[
            AnaWord::Optimized,
            AnaWord::NonOptimized,
            AnaWord::Inaccessible,
            AnaWord::PersistentLoss,
            AnaWord::Change,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            AnaWord::Optimized => "optimized",
            AnaWord::NonOptimized => "non-optimized",
            AnaWord::Inaccessible => "inaccessible",
            AnaWord::PersistentLoss => "persistent-loss",
            AnaWord::Change => "change",
        }))
    }
}

impl From<AnaWord> for AnaState {
    fn from(word: AnaWord) -> AnaState {
        match word {
            AnaWord::Optimized => AnaState::Optimized,
            AnaWord::NonOptimized => AnaState::NonOptimized,
            AnaWord::Inaccessible => AnaState::Inaccessible,
            AnaWord::PersistentLoss => AnaState::PersistentLoss,
            AnaWord::Change => AnaState::Change,
        }
    }
}

impl From<AnaState> for AnaWord {
    fn from(state: AnaState) -> AnaWord {
        match state {
            AnaState::Optimized => AnaWord::Optimized,
            AnaState::NonOptimized => AnaWord::NonOptimized,
            AnaState::Inaccessible => AnaWord::Inaccessible,
            AnaState::PersistentLoss => AnaWord::PersistentLoss,
            AnaState::Change => AnaWord::Change,
        }
    }
}

/// Reason why a listener refuses the hosts of a subsystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WithheldWord {
    /// The listener has tcp_fallback = false.
    TcpFallback,
    /// The volume allows other transports only.
    TransportPolicy,
}

impl WithheldWord {
    /// `None` if an operator withheld the listener without a reason.
    pub fn of(why: Withheld) -> Option<WithheldWord> {
        match why {
            Withheld::TcpFallback => Some(WithheldWord::TcpFallback),
            Withheld::TransportPolicy => Some(WithheldWord::TransportPolicy),
            Withheld::ByRequest => None,
        }
    }

    pub fn why(word: Option<WithheldWord>) -> Withheld {
        match word {
            Some(WithheldWord::TcpFallback) => Withheld::TcpFallback,
            Some(WithheldWord::TransportPolicy) => Withheld::TransportPolicy,
            None => Withheld::ByRequest,
        }
    }
}

/// Updates the withheld fields in the call that restores a listener.
pub fn note_withheld(record: &mut Value, why: Option<Withheld>) {
    let Some(fields) = record.as_object_mut() else {
        return;
    };
    fields.remove("withheld");
    fields.remove("withheld_reason");
    if let Some(why) = why {
        fields.insert("withheld".into(), true.into());
        if let Some(word) = WithheldWord::of(why) {
            fields.insert("withheld_reason".into(), json!(word));
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

/// Withholds a subsystem's listener from hosts, or opens it again; the change is stored.
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

/// The address as part of a journal key. Uses the interface name, because indexes change.
pub fn place(address: &Address) -> String {
    match address {
        Address::Ip(address) => shown(address),
        other => other.to_string(),
    }
}
