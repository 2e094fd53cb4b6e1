//! Checks of `[store]` together with other tables.

use super::{Check, Settings};

impl Check<'_> {
    pub(super) fn volume_store(&mut self, settings: &Settings) {
        // A name that cannot be read is a name: it is the only report.
        let is_node = settings.cluster.is_node() || self.is_set("cluster.name");
        for (key, cause, remedy) in settings.store.problems(is_node) {
            self.refuse_unless_refused_with(&format!("store.{key}"), cause, remedy);
        }
        if settings.store.is_etcd() && settings.data.dir == "none" {
            let cause = "data.dir = \"none\" keeps no identity, by which etcd knows this daemon";
            let remedy = "name a directory in [data]";
            self.refuse("store.endpoints", cause, remedy);
        }
    }
}
