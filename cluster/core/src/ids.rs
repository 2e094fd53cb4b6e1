//! Identities: nodes, volumes, replicas, and the store's numbers for incarnations and changes.

use uuid::Uuid;

/// Most nodes of a cluster.
pub const MAX_NODES: usize = 128;
/// Most volumes of a cluster.
pub const MAX_VOLUMES: usize = 16_384;
/// Most replicas of a volume.
pub const MAX_REPLICAS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub Uuid);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub Uuid);

/// One replica of a volume, on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub Uuid);

/// An exported device of a node, by an id that all nodes know. A volume's record names the device
/// of a replica by this id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId(pub Uuid);

/// A storage pool of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub Uuid);

/// The creation revision of a node's lease key: the store assigns it once, and never again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// The modification revision of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);
