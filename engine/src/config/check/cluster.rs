//! Checks of `[cluster]`.

use nacre_cluster_etcd::Prefix;
use nacre_cluster_node::MAX_POOLS;

use super::{Check, Settings};
use crate::config::cluster::ReplaceAfter;
use crate::config::replication::LegTls;

/// Most labels of a node, and most bytes of the key or value of a label.
const MAX_LABELS: usize = 16;
const MAX_LABEL: usize = 63;

impl Check<'_> {
    pub(super) fn cluster(&mut self, settings: &Settings) {
        let (cluster, store) = (&settings.cluster, &settings.store);
        let Some(name) = &cluster.name else {
            let is_set = [
                ("node", cluster.node.is_some()),
                ("labels", !cluster.labels.is_empty()),
                ("pool_class", !cluster.pool_class.is_empty()),
                (
                    "replace_after",
                    cluster.replace_after != ReplaceAfter::default(),
                ),
                ("balance", cluster.balance),
            ];
            if let Some((key, _)) = is_set.iter().find(|(_, is_set)| *is_set) {
                let cause = format!("it is missing, and cluster.{key} needs it");
                self.refuse("cluster.name", &cause, "add name = \"NAME\" to [cluster]");
            }
            return;
        };
        if Prefix::new(name).is_none() {
            let cause = format!(
                "\"{name}\" is not 1 to {} letters, digits, \".\", \"_\" or \"-\"",
                Prefix::MAX_NAME
            );
            self.refuse("cluster.name", &cause, "choose another name");
        }
        if !store.is_etcd() {
            let cause = "it is empty, and a cluster needs etcd";
            let remedy = "add endpoints = [\"https://HOST:2379\"] to [store]";
            self.refuse("store.endpoints", cause, remedy);
        }
        for (key, is_set) in [
            ("prefix", store.prefix.is_some()),
            ("take_over", store.take_over.is_some()),
        ] {
            if is_set {
                let cause =
                    "it is for a daemon that uses etcd alone, and [cluster] names a cluster";
                self.refuse(&format!("store.{key}"), cause, "remove it from [store]");
            }
        }
        self.no_keys_of_replication(settings);
        let is_text =
            |text: &str| (1..=MAX_LABEL).contains(&text.len()) && !text.contains(char::is_control);
        if let Some(node) = cluster.node.as_deref().filter(|node| !is_text(node)) {
            let cause =
                format!("\"{node}\" is not 1 to {MAX_LABEL} bytes without control characters");
            self.refuse("cluster.node", &cause, "choose another name");
        }
        let is_bad = |(key, value): &(&String, &String)| !is_text(key) || !is_text(value);
        for (key, table, noun, most) in [
            ("labels", &cluster.labels, "labels", MAX_LABELS),
            ("pool_class", &cluster.pool_class, "pools", MAX_POOLS),
        ] {
            if table.len() > most || table.iter().any(|one| is_bad(&one)) {
                let cause = format!(
                    "at most {most} {noun}, each key and value of 1 to {MAX_LABEL} bytes without \
                     control characters"
                );
                self.refuse(&format!("cluster.{key}"), &cause, "shorten them");
            }
        }
    }
    /// Refuses keys for all remote controllers. The exports of a node allow the other nodes by
    /// name, without keys, so a node that used a key would connect to none of them.
    fn no_keys_of_replication(&mut self, settings: &Settings) {
        let replication = &settings.replication;
        for (key, is_set) in [
            ("dhchap_key", replication.dhchap_key.is_some()),
            ("dhchap_ctrlr_key", replication.dhchap_ctrlr_key.is_some()),
            ("psk", replication.psk.is_some()),
            ("tls", replication.tls == LegTls::Require),
        ] {
            if is_set {
                let cause = "[cluster] names a cluster, whose nodes connect to each other without \
                             keys and without TLS: with it, no node reaches the replicas of another";
                let remedy = format!(
                    "remove {key} from [replication], and give the nodes a network of their own; \
                     name the keys of targets outside of the cluster in their [[remote]] or \
                     bdev_nvme_attach_controller"
                );
                self.refuse(&format!("replication.{key}"), cause, &remedy);
            }
        }
    }
}
