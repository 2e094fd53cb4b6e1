//! `[cluster]`: this daemon is one node of a cluster. `[store]` has the access to etcd.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterSettings {
    /// Name of the cluster, and of a [`Prefix`](nacre_cluster_etcd::Prefix). `None`: this daemon is
    /// not in a cluster.
    pub name: Option<String>,
    /// Name of this node. `None`: the name of the machine.
    pub node: Option<String>,
    /// Labels of the node, for example `zone`.
    pub labels: BTreeMap<String, String>,
    /// The class of each pool of the node, by the pool's name.
    pub pool_class: BTreeMap<String, String>,
    pub replace_after: ReplaceAfter,
    /// Volumes move from this node while it serves many more of them than other nodes.
    pub balance: bool,
}

/// The time after which the cluster replaces a lost replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplaceAfter(Option<Duration>);

impl Default for ReplaceAfter {
    fn default() -> Self {
        Self(Some(Duration::from_secs(600)))
    }
}

impl ReplaceAfter {
    const OFF: &'static str = "off";
    /// Shortest time: a restart of a daemon or a reconnect of a device must not count as a loss.
    const LEAST: Duration = Duration::from_secs(10);

    /// `None`: lost replicas are not replaced.
    pub fn time(self) -> Option<Duration> {
        self.0
    }
}

impl Serialize for ReplaceAfter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(time) => serializer.collect_str(&humantime::format_duration(time)),
            None => serializer.serialize_str(Self::OFF),
        }
    }
}

impl<'de> Deserialize<'de> for ReplaceAfter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text == Self::OFF {
            return Ok(Self(None));
        }
        let time = crate::values::time::above_zero(&text);
        let time = time.map_err(|why| D::Error::custom(format!("{why}, or \"off\"")))?;
        if time < Self::LEAST {
            let why = "shorter than a restart: use 10s at least, or \"off\"";
            return Err(D::Error::custom(why));
        }
        Ok(Self(Some(time)))
    }
}

impl ClusterSettings {
    pub fn is_node(&self) -> bool {
        self.name.is_some()
    }
}

#[cfg(test)]
mod tests {
    use crate::config::load_text;

    const STORE: &str = "[store]\nendpoints = [\"http://[::1]:2379\"]\n";

    fn said(text: &str) -> String {
        match load_text(Some(("/n.toml", text)), [], &[]) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    /// Goal: keys that do not go together are refused with the key, the cause and the remedy.
    #[test]
    fn keys_that_do_not_go_together() {
        let lab = "[cluster]\nname = \"lab\"\n";
        let long = "x".repeat(64);
        let many: Vec<String> = (0..17).map(|n| format!("k{n} = \"v\"")).collect();
        for (text, expected) in [
            (
                lab.to_owned(),
                "store.endpoints: it is empty, and a cluster",
            ),
            (
                format!("[cluster]\nnode = \"ant\"\n{STORE}prefix = \"a\""),
                "cluster.name: it is missing, and cluster.node needs it",
            ),
            (
                format!("[cluster]\nlabels = {{ zone = \"a\" }}\n{STORE}prefix = \"a\""),
                "cluster.name: it is missing, and cluster.labels needs it",
            ),
            (
                format!("{lab}{STORE}prefix = \"a\""),
                "store.prefix: it is for a daemon that uses etcd alone",
            ),
            (
                format!("{lab}{STORE}take_over = \"6f1c1f0a-3c5b-4f0e-9d5e-0f5d7b1c2a34\""),
                "store.take_over: it is for a daemon that uses etcd alone",
            ),
            (
                format!("{lab}labels = {{ zone = \"{long}\" }}\n{STORE}"),
                "cluster.labels: at most 16 labels",
            ),
            (
                format!("{lab}labels = {{ {} }}\n{STORE}", many.join(", ")),
                "cluster.labels: at most 16 labels",
            ),
            (
                format!("{lab}{STORE}[data]\ndir = \"none\""),
                "store.endpoints: data.dir = \"none\" keeps no identity",
            ),
        ] {
            let said = said(&text);
            assert!(said.contains(expected), "{text}: {said}");
            // A line before them.
            assert_eq!(said.lines().count(), 2, "{text}: {said}");
        }
    }

    /// Goal: keys with which no node would reach another are refused, each at its line, and only in
    /// a cluster.
    #[test]
    fn nodes_have_no_keys_of_replication() {
        let node = format!("[cluster]\nname = \"lab\"\n{STORE}");
        for (key, value) in [
            ("dhchap_key", "own"),
            ("dhchap_ctrlr_key", "far"),
            ("psk", "far-tls"),
            ("tls", "require"),
        ] {
            let keys = format!("[replication]\n{key} = \"{value}\"\n");
            let said = said(&format!("{node}{keys}"));
            let expected = format!("/n.toml:6: replication.{key}: [cluster] names a cluster");
            assert!(said.contains(&expected), "{said}");
            let remedy = format!("remove {key} from [replication], and give the nodes a network");
            assert!(said.contains(&remedy), "{said}");
            load_text(Some(("/n.toml", &keys)), [], &[]).expect("no cluster");
        }
        let all = "[replication]\ndhchap_key = \"a\"\npsk = \"b\"\ntls = \"require\"\n";
        let said = said(&format!("{node}{all}"));
        assert_eq!(
            said.matches("[cluster] names a cluster").count(),
            3,
            "{said}"
        );
        let prefers = format!("{node}[replication]\ntls = \"prefer\"\n");
        load_text(Some(("/n.toml", &prefers)), [], &[]).expect("no key");
    }

    #[test]
    fn a_node_needs_no_prefix() {
        let labels = "labels = { zone = \"a\", rack = \"7\" }";
        let text = format!("[cluster]\nname = \"lab\"\nnode = \"ant\"\n{labels}\n{STORE}");
        let loaded = load_text(Some(("/n.toml", &text)), [], &[]).expect("good");
        let cluster = loaded.settings.cluster;
        assert!(cluster.is_node());
        assert_eq!(cluster.labels.get("zone").map(String::as_str), Some("a"));
    }
}
