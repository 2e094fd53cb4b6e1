//! Listeners of a subsystem: their ANA states, and whether hosts are refused there.

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
use crate::services::Engine;
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
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::Optimized,
            Self::NonOptimized,
            Self::Inaccessible,
            Self::PersistentLoss,
            Self::Change,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
        }))
    }
}

impl From<AnaWord> for AnaState {
    fn from(word: AnaWord) -> Self {
        match word {
            AnaWord::Optimized => Self::Optimized,
            AnaWord::NonOptimized => Self::NonOptimized,
            AnaWord::Inaccessible => Self::Inaccessible,
            AnaWord::PersistentLoss => Self::PersistentLoss,
            AnaWord::Change => Self::Change,
        }
    }
}

impl From<AnaState> for AnaWord {
    fn from(state: AnaState) -> Self {
        match state {
            AnaState::Optimized => Self::Optimized,
            AnaState::NonOptimized => Self::NonOptimized,
            AnaState::Inaccessible => Self::Inaccessible,
            AnaState::PersistentLoss => Self::PersistentLoss,
            AnaState::Change => Self::Change,
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
    pub fn of(why: Withheld) -> Option<Self> {
        match why {
            Withheld::TcpFallback => Some(Self::TcpFallback),
            Withheld::TransportPolicy => Some(Self::TransportPolicy),
            Withheld::ByRequest => None,
        }
    }

    pub fn why(word: Option<Self>) -> Withheld {
        match word {
            Some(Self::TcpFallback) => Withheld::TcpFallback,
            Some(Self::TransportPolicy) => Withheld::TransportPolicy,
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
