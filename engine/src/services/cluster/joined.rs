//! The note in the data directory about the cluster that it belongs to: `cluster NAME ID`.
//!
//! By the id, the node recognises an etcd that lost its data, or another etcd.

use std::path::Path;

use anyhow::{Context, bail};
use nacre_bdev_replica::store::{EmbeddedStore, FILE, VolumeStore};
use uuid::Uuid;

use super::copy;
use crate::services::volumes::note;

fn text(name: &str, id: Uuid) -> String {
    format!("cluster {name} {id}")
}

/// The id of the cluster `name`, if this node has joined it before. Refuses a data directory whose
/// note names another cluster or store. Blocks.
pub(super) fn read(dir: &Path, name: &str) -> anyhow::Result<Option<Uuid>> {
    let Some(noted) = note::read(dir)? else {
        return Ok(None);
    };
    let mut words = noted.split(' ');
    let (kind, of, id) = (words.next(), words.next(), words.next());
    if (kind, of) != (Some("cluster"), Some(name)) {
        bail!(
            "{} says that the volumes of this daemon are in {noted}, and [cluster] names {name}: \
             correct cluster.name, or remove that file if the volumes are no longer needed",
            note::path(dir).display()
        );
    }
    let id = id.unwrap_or_default().parse();
    let id = id.with_context(|| format!("{} has no id", note::path(dir).display()))?;
    Ok(Some(id))
}

/// As [`read`]. Without a note, takes the id from the copy of the cluster's keys. Blocks.
pub(super) fn known(dir: &Path, name: &str) -> anyhow::Result<Option<Uuid>> {
    if let Some(noted) = read(dir, name)? {
        return Ok(Some(noted));
    }
    // A copy that cannot be read says nothing, and the rebuild of a store reports it.
    let copy = copy::read(&dir.join(copy::FILE));
    let copy = copy.ok().flatten().filter(|copy| copy.meta.name == name);
    Ok(copy.map(|copy| copy.meta.id))
}

/// Refuses a data directory whose file has volumes: they would not be served.
pub(super) async fn must_have_no_volumes(dir: &Path) -> anyhow::Result<()> {
    let path = dir.join(FILE);
    if !path.exists() {
        return Ok(());
    }
    let open = {
        let dir = dir.to_owned();
        tokio::task::spawn_blocking(move || EmbeddedStore::open(&dir))
    };
    let shown = path.display();
    let file = open
        .await?
        .with_context(|| format!("the volumes in {shown}"))?;
    let records = file.list().await?;
    if let Some(record) = records.first() {
        bail!(
            "{shown} has {} volumes, for example \"{}\": a node of a cluster serves no others. \
             Delete them, or give the node another data directory",
            records.len(),
            record.name
        );
    }
    Ok(())
}

/// Writes the note. It is durable when this returns.
pub(super) fn write(dir: &Path, name: &str, id: Uuid) -> anyhow::Result<()> {
    let text = text(name, id);
    if note::read(dir)?.as_deref() == Some(text.as_str()) {
        return Ok(());
    }
    note::write(dir, &text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: a data directory belongs to one cluster.
    #[test]
    fn a_data_directory_belongs_to_one_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let (dir, id) = (dir.path(), Uuid::from_u128(7));
        assert_eq!(read(dir, "lab").unwrap(), None);
        for _ in 0..2 {
            write(dir, "lab", id).unwrap();
            assert_eq!(read(dir, "lab").unwrap(), Some(id));
        }
        let refused = read(dir, "prod").unwrap_err().to_string();
        assert!(refused.contains("are in cluster lab "), "{refused}");
        note::write(dir, "etcd /nacre/lab/").unwrap();
        assert!(read(dir, "lab").is_err());
        note::write(dir, "cluster lab").unwrap();
        assert!(format!("{:#}", read(dir, "lab").unwrap_err()).contains("has no id"));
    }

    /// Goal: a node whose note is gone knows its cluster by the copy of the keys. Method: a copy of
    /// the cluster, of another one, and a damaged one.
    #[test]
    fn a_copy_names_the_cluster() {
        use crate::services::cluster::copy::FILE;
        use nacre_cluster_node::{Cluster, rebuild::Copy};

        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(known(dir, "lab").unwrap(), None);
        let cluster = Cluster::new("lab", std::time::Duration::from_secs(2)).unwrap();
        let copy = Copy::of_cluster(cluster.clone());
        std::fs::write(dir.join(FILE), copy.encode()).unwrap();
        assert_eq!(known(dir, "lab").unwrap(), Some(cluster.id));
        assert_eq!(known(dir, "prod").unwrap(), None);
        write(dir, "lab", Uuid::from_u128(7)).unwrap();
        assert_eq!(known(dir, "lab").unwrap(), Some(Uuid::from_u128(7)));
        assert!(known(dir, "prod").is_err());
        std::fs::remove_file(note::path(dir)).unwrap();
        std::fs::write(dir.join(FILE), "damaged").unwrap();
        assert_eq!(known(dir, "lab").unwrap(), None);
    }

    /// Goal: a node does not hide volumes of its data directory.
    #[tokio::test]
    async fn volumes_of_the_data_directory_are_not_hidden() {
        let dir = tempfile::tempdir().unwrap();
        must_have_no_volumes(dir.path()).await.unwrap();
        let store = EmbeddedStore::open(dir.path()).unwrap();
        let record = json!({
            "id": Uuid::from_u128(1), "name": "ant", "block_size": 512, "blocks": 8,
            "region_shift": 20, "epoch": 1, "serving": 1, "revision": 1, "holder": null,
            "members": [],
        });
        store
            .create(serde_json::from_value(record).unwrap())
            .await
            .unwrap();
        drop(store);
        let refused = must_have_no_volumes(dir.path()).await.unwrap_err();
        assert!(
            refused
                .to_string()
                .contains("has 1 volumes, for example \"ant\"")
        );
    }
}
