//! Checks of `[cluster]`.

use nacre_cluster_etcd::Prefix;
use nacre_cluster_node::MAX_POOLS;

use super::{Check, Settings};
use crate::config::cluster::ReplaceAfter;

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
}
