//! The names of the keys of one cluster in etcd: `/nacre/NAME/`, then a kind, and an id if there
//! may be several keys of that kind.

use std::fmt::Display;

use nacre_cluster_core::{ExportId, NodeId, PoolId, VolumeId};
use uuid::Uuid;

/// The start of all keys of one cluster: `/nacre/NAME/`. Methods with a plural name return the
/// start of all keys of a kind, or of those of one node; so do those that begin with `all_`, and
/// [`Prefix::found`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(String);

impl Prefix {
    pub const MAX_NAME: usize = 64;

    /// `None`: the name is empty, longer than [`Prefix::MAX_NAME`] bytes, or has a character other
    /// than letters, digits, `.`, `_` and `-`. A name with `/` could be another cluster's key.
    pub fn new(cluster: &str) -> Option<Self> {
        let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let length = 1..=Self::MAX_NAME;
        if length.contains(&cluster.len()) && cluster.chars().all(is_valid) {
            Some(Self(format!("/nacre/{cluster}/")))
        } else {
            None
        }
    }

    /// The key of the daemon that alone uses this prefix.
    pub fn owner(&self) -> String {
        format!("{}owner", self.0)
    }

    /// The key of the cluster itself: its id, and the duration of its leases.
    pub fn meta(&self) -> String {
        format!("{}meta", self.0)
    }

    /// The mark of a restore, or of a rebuild of the store, that has not ended.
    pub fn restoring(&self) -> String {
        format!("{}restoring", self.0)
    }

    /// The reports of all nodes to a rebuild.
    pub fn all_found(&self) -> String {
        self.all("found")
    }

    /// The parts of one node's report.
    pub fn found(&self, node: NodeId) -> String {
        format!("{}{}/", self.all_found(), node.0)
    }

    /// The prefix of all keys of a kind.
    fn all(&self, kind: &str) -> String {
        format!("{}{kind}/", self.0)
    }

    fn one(&self, kind: &str, id: impl Display) -> String {
        format!("{}{kind}/{id}", self.0)
    }

    pub fn volumes(&self) -> String {
        self.all("vol")
    }

    pub fn volume(&self, id: Uuid) -> String {
        self.one("vol", id)
    }

    pub fn core_volume(&self, id: VolumeId) -> String {
        self.volume(id.0)
    }

    /// The names of all volumes, one for each.
    pub fn names(&self) -> String {
        self.all("name")
    }

    /// The key of the name of a volume.
    pub fn name(&self, name: &str) -> String {
        self.one("name", name)
    }

    /// The keys that are deleted with the volume: publication, reservation, `paths`, operation.
    pub fn of_volume(&self, id: Uuid) -> [String; 4] {
        ["pub", "resv", "paths", "op"].map(|kind| self.one(kind, id))
    }

    pub fn publications(&self) -> String {
        self.all("pub")
    }

    /// A key that each deletion of a publication writes: its revision is that of the last deletion.
    pub fn unpublished(&self) -> String {
        format!("{}unpublished", self.0)
    }

    /// Requests of operators to the holder of a volume, one for each volume.
    pub fn operations(&self) -> String {
        self.all("op")
    }

    pub fn operation(&self, volume: VolumeId) -> String {
        self.one("op", volume.0)
    }

    pub fn nodes(&self) -> String {
        self.all("node")
    }

    pub fn node(&self, id: NodeId) -> String {
        self.one("node", id.0)
    }

    /// The exports of a node, for replicas of volumes. Their kind keeps its first name, `member`.
    pub fn exports(&self, node: NodeId) -> String {
        format!("{}{}/", self.all("member"), node.0)
    }

    /// The exports of all nodes.
    pub fn all_exports(&self) -> String {
        self.all("member")
    }

    pub fn export(&self, node: NodeId, export_id: ExportId) -> String {
        format!("{}{}", self.exports(node), export_id.0)
    }

    /// The node and the id in the key of an export.
    pub fn export_of(&self, key: &[u8]) -> Option<(NodeId, ExportId)> {
        let key = std::str::from_utf8(key).ok()?;
        let (node, export_id) = key.strip_prefix(&self.all_exports())?.split_once('/')?;
        let id = |text| Uuid::parse_str(text).ok();
        Some((NodeId(id(node)?), ExportId(id(export_id)?)))
    }

    /// The storage pools of all nodes.
    pub fn pools(&self) -> String {
        self.all("pool")
    }

    pub fn pool(&self, pool: PoolId) -> String {
        self.one("pool", pool.0)
    }

    /// The snapshots of all volumes.
    pub fn snapshots(&self) -> String {
        self.all("snap")
    }

    pub fn snapshot(&self, id: Uuid) -> String {
        self.one("snap", id)
    }

    /// The brake on replacements of lost replicas. The key keeps its first name, `steward`.
    pub fn brake(&self) -> String {
        format!("{}steward", self.0)
    }

    /// The NVMe reservation of a volume.
    pub fn reservation(&self, volume: VolumeId) -> String {
        self.one("resv", volume.0)
    }

    pub fn publication(&self, volume: VolumeId) -> String {
        self.one("pub", volume.0)
    }

    pub fn leases(&self) -> String {
        self.all("lease")
    }

    pub fn lease(&self, node: NodeId) -> String {
        self.one("lease", node.0)
    }

    /// The node in the key of a lease.
    pub fn node_of(&self, key: &[u8]) -> Option<NodeId> {
        Self::id_after(&self.leases(), key).map(NodeId)
    }

    pub fn logs(&self) -> String {
        self.all("log")
    }

    /// A line of the log of ended leases: sorted by time, and unique by `id`.
    pub fn log(&self, unix_ms: u128, id: Uuid) -> String {
        self.one("log", format_args!("{unix_ms:015}-{id}"))
    }

    /// The UUID that follows `prefix` in `key`, up to the end.
    pub fn id_after(prefix: &str, key: &[u8]) -> Option<Uuid> {
        let key = std::str::from_utf8(key).ok()?;
        Uuid::parse_str(key.strip_prefix(prefix)?).ok()
    }
}

impl Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The end of the range of all keys that start with `prefix`.
pub(crate) fn range_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys.
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ranges() {
        assert!(Prefix::new("lab-1").is_some());
        for name in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert_eq!(Prefix::new(name), None, "{name}");
        }
        let prefix = Prefix::new("lab").expect("valid");
        let node = NodeId(Uuid::from_u128(7));
        assert_eq!(prefix.node_of(prefix.lease(node).as_bytes()), Some(node));
        assert_eq!(prefix.node_of(b"/nacre/other/lease/7"), None);
        let id = Uuid::from_u128(8);
        assert!(prefix.volume(id).starts_with(&prefix.volumes()));
        // A request to a volume's holder goes with the volume.
        let operation = prefix.operation(VolumeId(id));
        assert!(operation.starts_with(&prefix.operations()));
        assert!(prefix.of_volume(id).contains(&operation));
        assert!(
            prefix
                .of_volume(id)
                .contains(&prefix.publication(VolumeId(id)))
        );
        let (export_id, other) = (ExportId(id), NodeId(id));
        let export = prefix.export(node, export_id);
        // Stored keys have these names since the first version.
        assert_eq!(export, format!("/nacre/lab/member/{}/{id}", node.0));
        assert_eq!(prefix.brake(), "/nacre/lab/steward");
        assert!(export.starts_with(&prefix.exports(node)));
        assert!(!export.starts_with(&prefix.exports(other)));
        assert_eq!(prefix.export_of(export.as_bytes()), Some((node, export_id)));
        assert_eq!(prefix.export_of(b"/nacre/lab/member/7"), None);
        assert!(prefix.snapshot(id).starts_with(&prefix.snapshots()));
        let log = "/nacre/lab/log/000000000000009-00000000-0000-0000-0000-000000000008";
        assert_eq!(prefix.log(9, id), log);
        assert_eq!(range_end(b"/a/"), b"/a0");
        assert_eq!(range_end(&[b'a', 0xff]), b"b");
        assert_eq!(range_end(&[0xff]), [0]);
    }
}
