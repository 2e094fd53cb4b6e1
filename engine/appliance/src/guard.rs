//! Reasons to delay an update: volumes that a restart of this machine would stop, and resyncs that
//! it would interrupt.

use serde::Deserialize;
use serde_json::Value;

/// A volume, from the answer of `volume_list`.
#[derive(Debug, Deserialize)]
struct Volume {
    name: String,
    replicas: Vec<Replica>,
}

#[derive(Debug, Deserialize)]
struct Replica {
    device: String,
    state: String,
    /// `local`, or that of the remote namespace; none while its device is missing.
    transport: Option<String>,
    /// Of a volume that another node serves: its device is on this machine.
    #[serde(default)]
    on_this_node: bool,
    resync: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    #[error("volume {volume}: replica {device} is being resynced")]
    Resync { volume: String, device: String },
    #[error("volume {volume}: this node has its only replicas in sync, and others are not")]
    LastInSync { volume: String },
}

#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    #[error("the daemon's list of volumes: {0}")]
    Answer(#[from] serde_json::Error),
}

/// The obstacles in an answer of `volume_list`.
///
/// A volume that another node serves counts, too: that node may lose its last replica in sync. A
/// volume whose replicas are all on this node and in sync is no obstacle: to wait would not help.
pub fn obstacles(volumes: Value) -> Result<Vec<Obstacle>, GuardError> {
    let volumes: Vec<Volume> = serde_json::from_value(volumes)?;
    let mut found = Vec::new();
    for volume in volumes {
        let resyncs = |replica: &&Replica| {
            // The record of a volume that is not open here names its target only as filling.
            replica.resync.is_some()
                || ["syncing", "reconciling"].contains(&replica.state.as_str())
                || replica.state == "filling" && replica.on_this_node
        };
        if let Some(replica) = volume.replicas.iter().find(resyncs) {
            found.push(Obstacle::Resync {
                volume: volume.name.clone(),
                device: replica.device.clone(),
            });
        }
        let is_local = |replica: &Replica| {
            replica.on_this_node || replica.transport.as_deref() == Some("local")
        };
        let in_sync = |replica: &Replica| replica.state == "in_sync";
        let here = volume.replicas.iter().filter(|r| is_local(r) && in_sync(r));
        let here = here.count();
        let elsewhere = volume.replicas.iter().any(|r| !is_local(r) && in_sync(r));
        if here > 0 && here < volume.replicas.len() && !elsewhere {
            found.push(Obstacle::LastInSync {
                volume: volume.name,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_volume_is_an_obstacle_while_a_restart_harms_it() {
        let found = |replicas: &[(&str, Option<&str>, bool)]| -> Vec<&str> {
            let replicas: Vec<Value> = replicas
                .iter()
                .map(|(state, transport, resync)| {
                    let resync = resync.then(|| json!({ "kind": "full" }));
                    json!({ "device": "d", "state": state, "transport": transport, "resync": resync, "new": 1 })
                })
                .collect();
            let found =
                obstacles(json!([{ "name": "v", "replicas": replicas, "state": "healthy" }]));
            let name = |obstacle| match obstacle {
                Obstacle::Resync { .. } => "resync",
                Obstacle::LastInSync { .. } => "last",
            };
            found.unwrap().into_iter().map(name).collect()
        };
        let (local, tcp) = (Some("local"), Some("tcp"));
        let here = ("in_sync", local, false);
        for (replicas, expected) in [
            (vec![here], vec![]),
            (vec![here, here], vec![]),
            (vec![here, ("in_sync", tcp, false)], vec![]),
            (vec![here, ("out", tcp, false)], vec!["last"]),
            (vec![here, ("out", None, false)], vec!["last"]),
            (vec![here, ("out", local, false)], vec!["last"]),
            (
                vec![here, ("out", None, false), ("in_sync", tcp, false)],
                vec![],
            ),
            (vec![here, ("in_sync", tcp, true)], vec!["resync"]),
            (vec![here, ("syncing", tcp, true)], vec!["resync", "last"]),
            (
                vec![("filling", local, true), ("in_sync", tcp, false)],
                vec!["resync"],
            ),
            (vec![("out", local, false), ("in_sync", tcp, false)], vec![]),
            (vec![("out", local, false), ("out", tcp, false)], vec![]),
        ] {
            assert_eq!(found(&replicas), expected, "{replicas:?}");
        }
        // Another node serves the volume: its record has the place of each replica.
        let standby = |replicas: &[(&str, bool)]| {
            let replicas: Vec<Value> = replicas
                .iter()
                .map(|(state, here)| {
                    json!({ "device": "d", "state": state, "transport": null, "resync": null, "on_this_node": here })
                })
                .collect();
            obstacles(json!([{ "name": "v", "replicas": replicas, "state": "standby" }])).unwrap()
        };
        let last = [Obstacle::LastInSync { volume: "v".into() }];
        for (replicas, is_last) in [
            (&[("in_sync", true), ("out", false)][..], true),
            (&[("in_sync", true), ("filling", false)], true),
            (&[("in_sync", true), ("in_sync", false)], false),
            (&[("out", true), ("in_sync", false)], false),
            (&[("in_sync", false), ("out", false)], false),
        ] {
            let expected = if is_last { &last[..] } else { &[] };
            assert_eq!(standby(replicas), expected, "{replicas:?}");
        }
        assert_eq!(obstacles(json!([])).unwrap(), []);
        assert!(obstacles(json!({ "error": 1 })).is_err());
    }
}
