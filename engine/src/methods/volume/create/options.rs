//! The options of a new volume, which `volume_create` and `nacre volume create` share.

use nacre_bdev_replica::model::SettingsPatch;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The only declaration of these parameters and options. Words of the command line stand beside a
/// parameter where it has another name there, or where the command line itself checks the rest.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema, clap::Args)]
#[command(about = None, long_about = None)]
#[serde(default, deny_unknown_fields)]
pub struct NewVolumeOptions {
    /// In a cluster, instead of devices: so many replicas, 1 to 5, on pools that the cluster
    /// chooses, each on another node. Their lvols go with the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        long = "replicas",
        value_name = "COUNT",
        conflicts_with_all = ["device", "pool", "force"],
        help = "In a cluster: so many replicas, on pools that the cluster chooses"
    )]
    pub replica_count: Option<usize>,
    /// With replica_count: take space as it is written. Default: the pools keep room for the whole
    /// size.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[arg(
        long,
        help = "Take space of the pools as it is written; unless given they keep room for the whole size"
    )]
    pub thin: bool,
    /// With replica_count: only pools of this class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, requires = "replica_count", help = "Only pools of this class")]
    pub class: Option<String>,
    /// With replica_count: labels of nodes, at most 8, the most important one first. The nodes of
    /// the replicas differ in them as far as possible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[arg(
        long,
        value_name = "LABEL",
        value_delimiter = ',',
        requires = "replica_count",
        help = "The nodes differ in these labels as far as possible, the first one first (several \
                with commas)"
    )]
    pub spread: Vec<String>,
    /// The nodes must differ in each label of spread.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[arg(
        long,
        requires = "spread",
        help = "The nodes must differ in each label of --spread"
    )]
    pub strict_spread: bool,
    /// With replica_count: each of these nodes, by name or id, gets a replica.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[arg(
        long = "on",
        value_name = "NODE",
        value_delimiter = ',',
        requires = "replica_count",
        help = "Each of these nodes gets a replica (several with commas)"
    )]
    pub nodes: Vec<String>,
    /// A snapshot of volume_snapshot_create, by UUID or name: the new volume begins with its
    /// contents. The size is that of the snapshot, or larger. Replicas on its pools are in sync at
    /// once, and the others are filled from them. Without replicas: one on each of its pools. In a
    /// cluster, with replica_count: as many replicas as can be are on its pools. Outside of a
    /// cluster also a snapshot of the lvol of a replica, by UUID or `pool/name`: the first one of
    /// replicas is on its pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        long,
        conflicts_with = "device",
        help = "Begin with the contents of this snapshot of a volume (name or UUID), on its pools \
                unless others are named; outside of a cluster also of a replica's lvol (pool/name)"
    )]
    pub snapshot: Option<String>,
    /// Default: random. If a volume with this UUID and this name exists, it is returned unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    #[arg(long, help = "Random unless given")]
    pub uuid: Option<Uuid>,
    #[command(flatten)]
    pub settings: SettingsPatch,
    /// Use devices that hold data. The data is lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[arg(long, help = "Accept devices with data on them, which is lost")]
    pub force: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::CreateParams;
    use crate::values::read::{self, Texts};

    /// Goal: a call has the options beside its own parameters, and no option without a value.
    /// Method: calls with one and with most of them, read and written again.
    #[test]
    fn options_are_parameters_of_the_call() {
        let read = |call: &serde_json::Value| -> CreateParams {
            let read = read::first(call, Texts::Read);
            read.unwrap_or_else(|(_, error)| panic!("{call}: {error}"))
        };
        let short = json!({ "name": "v", "size_mb": null, "num_blocks": null, "settings": {} });
        assert_eq!(json!(read(&json!({ "name": "v" }))), short);
        let long = json!({
            "name": "v",
            "devices": ["a"],
            "size_mb": 64,
            "num_blocks": null,
            "replica_count": 3,
            "thin": true,
            "spread": ["zone"],
            "strict_spread": true,
            "uuid": "0c5e0f9e-8a3c-4c6b-9a55-0d9f1f6f3c11",
            "settings": { "min_in_sync": 2, "deadline_ms": 9000 },
            "force": true,
        });
        let params = read(&long);
        assert_eq!(params.options.settings.min_in_sync, Some(2));
        assert_eq!(json!(params), long);
        let wrong = json!({ "name": "v", "settings": { "min_in_sync": 300 } });
        let (place, _) = read::first::<CreateParams>(&wrong, Texts::Read).unwrap_err();
        assert_eq!(read::path(&place), "settings.min_in_sync");
    }
}
