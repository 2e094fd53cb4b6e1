//! Volumes that hosts can use: each has a subsystem made by `volume_publish`.

use nacre_bdev_replica::model::TransportPolicy;
use nacre_nvmf_wire::Nqn;
use serde_json::Value;
use uuid::Uuid;

use super::paths::AnaByTransport;
use crate::services::engine::Engine;

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
    /// Served on the listeners of the configuration file.
    pub on_declared: bool,
    pub policy: TransportPolicy,
    /// None: the subsystem reports no ANA states.
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
    let read = |entry: crate::journal::Entry| {
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
    let ours = |e: &crate::journal::Entry| e.record.method == PUBLISH && wanted(&e.record.params);
    let entries = engine.journal.select(ours);
    entries.into_iter().filter_map(read).collect()
}
