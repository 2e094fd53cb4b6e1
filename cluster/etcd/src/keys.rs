//! The keys of a cluster.

use nacre_cluster_core::{NodeId, VolumeId};
use uuid::Uuid;

/// The keys of one cluster start with `/nacre/NAME/`.
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

    /// The daemon that alone uses these keys.
    pub fn owner(&self) -> String {
        format!("{}owner", self.0)
    }

    pub fn volumes(&self) -> String {
        format!("{}vol/", self.0)
    }

    pub fn volume(&self, id: Uuid) -> String {
        format!("{}vol/{id}", self.0)
    }

    pub fn core_volume(&self, id: VolumeId) -> String {
        self.volume(id.0)
    }

    pub fn name(&self, name: &str) -> String {
        format!("{}name/{name}", self.0)
    }

    /// The keys that belong to one volume and go with it.
    pub fn of_volume(&self, id: Uuid) -> [String; 3] {
        ["pub", "resv", "paths"].map(|kind| format!("{}{kind}/{id}", self.0))
    }

    pub fn leases(&self) -> String {
        format!("{}lease/", self.0)
    }

    pub fn lease(&self, node: NodeId) -> String {
        format!("{}lease/{}", self.0, node.0)
    }

    /// The node whose lease `key` is.
    pub fn node_of(&self, key: &[u8]) -> Option<NodeId> {
        Self::id_after(&self.leases(), key).map(NodeId)
    }

    /// The cluster itself: its id, and the duration of its leases.
    pub fn meta(&self) -> String {
        format!("{}meta", self.0)
    }

    pub fn nodes(&self) -> String {
        format!("{}node/", self.0)
    }

    pub fn node(&self, id: NodeId) -> String {
        format!("{}node/{}", self.0, id.0)
    }

    pub fn publications(&self) -> String {
        format!("{}pub/", self.0)
    }

    /// Requests of operators to the holder, one per volume.
    pub fn operations(&self) -> String {
        format!("{}op/", self.0)
    }

    pub fn operation(&self, volume: VolumeId) -> String {
        format!("{}op/{}", self.0, volume.0)
    }

    pub fn logs(&self) -> String {
        format!("{}log/", self.0)
    }

    /// The id after `prefix`, as in `vol/ID`.
    pub fn id_after(prefix: &str, key: &[u8]) -> Option<Uuid> {
        let key = std::str::from_utf8(key).ok()?;
        Uuid::parse_str(key.strip_prefix(prefix)?).ok()
    }

    /// A line of the log of decisions: sorted by time, and unique with the id.
    pub fn log(&self, unix_ms: u128, id: Uuid) -> String {
        format!("{}log/{unix_ms:015}-{id}", self.0)
    }
}

impl std::fmt::Display for Prefix {
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
        assert_eq!(range_end(b"/a/"), b"/a0");
        assert_eq!(range_end(&[b'a', 0xff]), b"b");
        assert_eq!(range_end(&[0xff]), [0]);
    }
}
