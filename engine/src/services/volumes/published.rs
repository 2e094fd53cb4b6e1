//! Published volumes: each has a subsystem made by `volume_publish`.

use nacre_bdev_replica::model::TransportPolicy;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::services::Engine;
use crate::services::subsystems::ADD_LISTENER;

/// Method name in the record of a published volume.
pub const PUBLISH: &str = "volume_publish";

pub fn published_key(id: Uuid) -> String {
    format!("volume/published/{id}")
}

/// A subsystem made by publishing a volume.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    pub volume: Uuid,
    pub nqn: String,
    /// Served on the listeners of the configuration file, not on addresses of the call.
    pub on_declared: bool,
    pub policy: TransportPolicy,
    /// `None`: the subsystem reports no ANA states.
    pub ana: Option<AnaByTransport>,
}

/// Published volumes whose subsystem exists.
pub fn published(engine: &Engine) -> Vec<Published> {
    published_as(engine, |_| true)
}

/// Published volumes whose parameters satisfy `wanted`.
pub fn published_as(engine: &Engine, wanted: impl Fn(&Value) -> bool) -> Vec<Published> {
    let Ok(plane) = engine.plane() else {
        return Vec::new();
    };
    let read = |entry: crate::journal::JournalEntry| {
        let params = &entry.record.params;
        let volume = Uuid::parse_str(params["name"].as_str()?).ok()?;
        let nqn = Nqn::new(params["nqn"].as_str()?).ok()?;
        // The subsystem may have been deleted by its own method.
        let subsystem = plane.target.subsystem(&nqn).ok()?;
        let ana = || serde_json::from_value(params["ana"].clone()).unwrap_or_default();
        let listed = engine.volumes.find(&volume.to_string()).ok()?;
        let settings = listed.status().map(|s| s.settings);
        Some(Published {
            volume,
            nqn: nqn.to_string(),
            on_declared: params["listeners"].as_array().is_none_or(Vec::is_empty),
            policy: settings.unwrap_or(listed.record.settings).transport_policy,
            ana: subsystem.config.ana_reporting.then(ana),
        })
    };
    let ours =
        |e: &crate::journal::JournalEntry| e.record.method == PUBLISH && wanted(&e.record.params);
    let entries = engine.journal.select(ours);
    entries.into_iter().filter_map(read).collect()
}

/// Initial ANA states of the listeners of a published volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AnaByTransport {
    /// Over RDMA; default `optimized`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<AnaState>,
    /// Over TCP; default `non_optimized`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp: Option<AnaState>,
}

impl AnaByTransport {
    pub(super) fn given(&self, trtype: &str) -> Option<AnaState> {
        if trtype.eq_ignore_ascii_case("RDMA") {
            self.rdma
        } else {
            self.tcp
        }
    }

    pub fn of(&self, trtype: &str) -> AnaState {
        self.given(trtype).unwrap_or_else(|| {
            if trtype.eq_ignore_ascii_case("RDMA") {
                AnaState::Optimized
            } else {
                AnaState::NonOptimized
            }
        })
    }
}

/// Calls that publish the volumes again, for a saved configuration. Addresses of the configuration
/// file are written out, because the daemon that loads the calls may have another file.
pub fn config(engine: &Engine) -> Vec<Value> {
    let served = |nqn: &str| -> Vec<Value> {
        let of = |e: &crate::journal::JournalEntry| {
            e.record.method == ADD_LISTENER && e.record.params["nqn"] == nqn
        };
        let addresses = engine.journal.select(of).into_iter();
        addresses
            .map(|mut e| e.record.params["listen_address"].take())
            .collect()
    };
    let call = |published: Published| {
        let entry = engine.journal.find(&published_key(published.volume))?;
        let mut params = entry.record.params;
        if published.on_declared {
            params["listeners"] = served(&published.nqn).into();
        }
        params["adopt"] = true.into();
        Some(json!({ "method": PUBLISH, "params": params }))
    };
    published(engine).into_iter().filter_map(call).collect()
}
