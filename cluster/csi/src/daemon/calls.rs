//! The methods of the daemon that this driver calls, each with the part of its reply that the
//! driver reads.
//!
//! Parameters are the types of the methods. A daemon of another version may add fields to a reply,
//! so replies have types of their own here. A test compares these with the replies of the methods.

use nacre_engine::methods::cluster::pools::{ClusterPoolState, GetPools};
use nacre_engine::methods::cluster::status::{GetClusterStatus, GetNodes};
use nacre_engine::methods::cluster::unconfirmed::{GetUnconfirmed, UnconfirmedReason};
use nacre_engine::methods::cluster::volumes::{GetVolumes, MoveVolume};
use nacre_engine::methods::nvmf::host::{AddHost, RemoveHost};
use nacre_engine::methods::nvmf::subsystem::GetSubsystems;
use nacre_engine::methods::pool::ListPools;
use nacre_engine::methods::pool::lvols::{
    DeleteLvol, GetLvol, ListLvols, RenameLvol, SnapshotLvols,
};
use nacre_engine::methods::state::GetState;
use nacre_engine::methods::volume::create::{Create, Delete};
use nacre_engine::methods::volume::list::{GetVolume, List, Records};
use nacre_engine::methods::volume::operate::Grow;
use nacre_engine::methods::volume::publish::{GetConnections, Publish, Unpublish};
use nacre_engine::methods::volume::snapshots::{
    CreateVolumeSnapshot, DeleteVolumeSnapshot, ListVolumeSnapshots,
};
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
#[cfg(test)]
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, IgnoredAny};
use serde_json::Value;
use uuid::Uuid;

/// A method of the daemon that the driver calls.
pub(super) trait Called: Method<Engine, Params: serde::Serialize> {
    /// The part of the reply that the driver reads.
    type Answer: DeserializeOwned;
}

macro_rules! called {
    ($($method:ty => $answer:ty,)+) => {
        $(impl Called for $method { type Answer = $answer; })+

        /// Compares each answer with the reply of its method.
        #[cfg(test)]
        fn compare_all(compare: &mut dyn FnMut(&str, schemars::Schema, schemars::Schema)) {
            $(compare(
                <$method as Method<Engine>>::NAME,
                schemars::schema_for!($answer),
                schemars::schema_for!(<$method as Method<Engine>>::Reply),
            );)+
        }
    };
}

called! {
    GetClusterStatus => ClusterStatusAnswer,
    GetNodes => Vec<NodeAnswer>,
    GetPools => Vec<ClusterPoolAnswer>,
    GetUnconfirmed => Vec<UnconfirmedAnswer>,
    GetVolumes => Vec<ClusterVolumeAnswer>,
    GetVolume => VolumeAnswer,
    List => Vec<VolumeAnswer>,
    Records => RecordsAnswer,
    Create => VolumeAnswer,
    Grow => VolumeAnswer,
    GetConnections => Vec<ConnectionAnswer>,
    GetSubsystems => Vec<SubsystemAnswer>,
    ListPools => Vec<PoolAnswer>,
    GetState => StateAnswer,
    GetLvol => LvolAnswer,
    ListLvols => Vec<LvolAnswer>,
    CreateVolumeSnapshot => VolumeSnapshotAnswer,
    ListVolumeSnapshots => Vec<VolumeSnapshotAnswer>,
}

macro_rules! unread {
    ($($method:ty),+) => {
        $(impl Called for $method { type Answer = IgnoredAny; })+
    };
}

unread!(Delete, Publish, Unpublish, MoveVolume, AddHost, RemoveHost);
unread!(SnapshotLvols, RenameLvol, DeleteLvol, DeleteVolumeSnapshot);

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ClusterStatusAnswer {
    /// `None`: etcd does not show the cluster.
    pub cluster: Option<ClusterAnswer>,
    pub problem: Option<String>,
    /// A daemon of an earlier version does not say so.
    #[serde(default)]
    pub has_snapshots: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ClusterAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub id: Uuid,
}

/// A node of the cluster.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct NodeAnswer {
    pub id: String,
    #[serde(default)]
    pub this_node: bool,
}

/// A node that has not confirmed who may use a volume.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct UnconfirmedAnswer {
    pub id: String,
    pub name: Option<String>,
    /// `None`: a word of a later daemon.
    #[serde(default, deserialize_with = "known")]
    pub reason: Option<UnconfirmedReason>,
    #[serde(default)]
    pub why: Option<String>,
    #[serde(default)]
    pub since: Option<String>,
}

/// Deserializes a value of an enum. `None`: a value that this driver does not know.
fn known<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<Option<T>, D::Error> {
    let word = Value::deserialize(from)?;
    Ok(T::deserialize(word).ok())
}

/// A pool of any node of the cluster.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ClusterPoolAnswer {
    pub node: String,
    pub node_name: Option<String>,
    pub class: Option<String>,
    /// `None`: a word of a later daemon.
    #[serde(default, deserialize_with = "known")]
    pub state: Option<ClusterPoolState>,
    pub room_bytes: u64,
    pub thin_room_bytes: u64,
}

/// A volume as etcd has it.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ClusterVolumeAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub id: Uuid,
    pub holder: Option<VolumeNodeAnswer>,
    #[serde(default)]
    pub lease_stands: bool,
    #[serde(default)]
    pub nodes: Vec<VolumeNodeAnswer>,
    pub publication: Option<ClusterPublicationAnswer>,
}

/// A node that serves or shows a volume.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct VolumeNodeAnswer {
    pub id: String,
    pub name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ClusterPublicationAnswer {
    pub nqn: String,
    pub hosts: Vec<String>,
    #[serde(default)]
    pub any_host: bool,
    pub listen_addresses: Vec<AddressAnswer>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct AddressAnswer {
    pub trtype: String,
    pub traddr: String,
    pub trsvcid: String,
}

/// A volume as the daemon has it.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct VolumeAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub uuid: Uuid,
    pub name: String,
    pub block_size: u64,
    pub num_blocks: u64,
    pub replicas: Vec<ReplicaAnswer>,
    pub settings: SettingsAnswer,
    #[serde(default)]
    pub subsystems: Vec<String>,
    /// `None`: the volume began empty, or a daemon that did not store it made the volume.
    #[serde(default)]
    pub origin: Option<OriginAnswer>,
}

/// The snapshot with whose contents a volume began.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct OriginAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub snapshot: Uuid,
    pub name: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ReplicaAnswer {
    #[serde(default)]
    pub device: String,
    /// `in_sync`, or another word.
    #[serde(default)]
    pub state: String,
    /// The volume has the device.
    #[serde(default)]
    pub attached: bool,
    /// Present while blocks are copied to it.
    pub resync: Option<serde_json::Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct SettingsAnswer {
    #[serde(default)]
    pub description: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct RecordsAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub holder: Uuid,
    #[serde(default)]
    pub volumes: Vec<RecordAnswer>,
}

/// The record of a volume.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct RecordAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub id: Uuid,
    /// Each change of the record has another one.
    pub revision: u64,
    #[serde(default)]
    pub replicas: Vec<ReplicaRecordAnswer>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ReplicaRecordAnswer {
    pub device: String,
    pub state: ReplicaStateAnswer,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ReplicaStateAnswer {
    pub state: String,
}

/// A volume or snapshot of a pool.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct LvolAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub uuid: Uuid,
    pub name: String,
    pub pool: String,
    pub snapshot: bool,
}

/// A snapshot of a volume of the cluster.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct VolumeSnapshotAnswer {
    #[cfg_attr(test, schemars(with = "String"))]
    pub uuid: Uuid,
    pub name: String,
    #[cfg_attr(test, schemars(with = "String"))]
    pub volume: Uuid,
    pub size_bytes: u64,
    pub created_s: Option<u64>,
    /// `None`: a word of a later daemon.
    #[serde(default, deserialize_with = "known")]
    pub state: Option<VolumeSnapshotWord>,
    pub why: Option<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(super) enum VolumeSnapshotWord {
    Making,
    Ready,
    /// It was made, and its node is away.
    Unavailable,
    /// It was not made.
    Failed,
    /// It is no more for this driver.
    Deleting,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ConnectionAnswer {
    pub host: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct SubsystemAnswer {
    pub nqn: String,
    pub hosts: Vec<HostAnswer>,
    pub allow_any_host: bool,
    pub listen_addresses: Vec<AddressAnswer>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct HostAnswer {
    pub nqn: String,
}

/// The stored objects of this daemon.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct StateAnswer {
    pub objects: Vec<ObjectAnswer>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct ObjectAnswer {
    /// `pool/UUID` is a pool.
    pub key: String,
    /// `live`, `waiting` or `failed`.
    pub state: String,
}

/// A pool of this daemon.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub(super) struct PoolAnswer {
    pub name: String,
    /// `online` or `held`.
    pub state: String,
    pub free_bytes: u64,
    #[serde(default)]
    pub reserved_bytes: u64,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The schema without references, without `null`, and without the wrapper of an option.
    fn plain<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
        if let Some(name) = schema["$ref"].as_str() {
            let pointer = name.strip_prefix('#').expect("a reference in the schema");
            return plain(root.pointer(pointer).expect("a definition"), root);
        }
        let any = schema["anyOf"].as_array().into_iter().flatten();
        match any.into_iter().find(|one| one["type"] != "null") {
            Some(some) => plain(some, root),
            None => schema,
        }
    }

    /// The types of a value, without `null`.
    fn types(schema: &Value) -> Vec<&str> {
        let all = match &schema["type"] {
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect::<Vec<_>>(),
        };
        all.into_iter().filter(|one| *one != "null").collect()
    }

    /// The fields of the answer that the reply does not have, or has as another type.
    fn missing(at: &str, answer: (&Value, &Value), reply: (&Value, &Value)) -> Vec<String> {
        let (one, whole) = (plain(answer.0, answer.1), plain(reply.0, reply.1));
        // Any value.
        if whole == &json!(true) {
            return Vec::new();
        }
        if types(one) != types(whole) {
            return vec![format!("{at}: {:?}, not {:?}", types(one), types(whole))];
        }
        let mut found = Vec::new();
        for (name, field) in one["properties"].as_object().into_iter().flatten() {
            let at = format!("{at}.{name}");
            match whole["properties"].get(name) {
                Some(of_reply) => {
                    found.extend(missing(&at, (field, answer.1), (of_reply, reply.1)));
                }
                None => found.push(format!("{at}: absent")),
            }
        }
        if let Some(items) = one.get("items") {
            let of_reply = &whole["items"];
            found.extend(missing(at, (items, answer.1), (of_reply, reply.1)));
        }
        found
    }

    /// Goal: a field that a method renames, or gives another type, is found before a driver runs.
    /// Method: compares the schemas of all answers with those of the replies.
    #[test]
    fn replies_have_the_fields_that_the_driver_reads() {
        let mut found = Vec::new();
        compare_all(&mut |name, answer, reply| {
            let (answer, reply) = (answer.to_value(), reply.to_value());
            found.extend(missing(name, (&answer, &answer), (&reply, &reply)));
        });
        assert_eq!(found, [""; 0]);
    }

    /// Goal: a word or a field that this driver does not know, or that the daemon does not send,
    /// costs no volume and no node.
    #[test]
    fn replies_of_other_versions_are_read() {
        let node: NodeAnswer = serde_json::from_value(json!({
            "id": "a", "lease": "half", "this_node": true, "later": 1
        }))
        .unwrap();
        assert!(node.this_node);
        let reason = |word: &str| {
            let node = json!({ "id": "a", "reason": word });
            let node: UnconfirmedAnswer = serde_json::from_value(node).unwrap();
            node.reason
        };
        assert_eq!(reason("a later one"), None);
        assert_eq!(reason("not_known"), Some(UnconfirmedReason::NotKnown));
        let volume: VolumeAnswer = serde_json::from_value(json!({
            "uuid": Uuid::nil(), "name": "v", "block_size": 512, "num_blocks": 8,
            "replicas": [{}], "settings": {}
        }))
        .unwrap();
        assert_eq!(
            (&*volume.settings.description, volume.subsystems.len()),
            ("", 0)
        );
    }

    /// Goal: the comparison finds an absent field and another type, also in lists.
    #[test]
    fn other_fields_are_found() {
        #[derive(JsonSchema)]
        #[expect(dead_code, reason = "only the schema counts")]
        struct Other {
            nqn: u64,
            hosts: Vec<AddressAnswer>,
        }
        let answer = schemars::schema_for!(Vec<Other>).to_value();
        let reply = schemars::schema_for!(Vec<SubsystemAnswer>).to_value();
        let found = missing("list", (&answer, &answer), (&reply, &reply));
        let expected = [
            "list.hosts.traddr: absent",
            "list.hosts.trsvcid: absent",
            "list.hosts.trtype: absent",
            r#"list.nqn: ["integer"], not ["string"]"#,
        ];
        assert_eq!(found, expected);
    }
}
