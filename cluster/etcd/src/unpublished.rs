//! The key `unpublished`: written with each deletion of a publication (the list of hosts that may
//! use a volume). Each node confirms in its lease the revision up to which publications are in
//! effect on it. A deleted key has no revision, so this key has that of the last deletion.
//!
//! Versions of Nacre that do not confirm publications do not write the key either. While such a
//! node has a lease, no publication counts as confirmed. Later versions wrote the key only when a
//! volume was unpublished, not when it was deleted. So a node that is asked also knows the
//! deletions that it saw itself. A deletion without the key before that node started is not
//! covered.

use nacre_cluster_core::VolumeId;
use serde_json::json;

use crate::client::Txn;
use crate::keys::Prefix;
use crate::stored::{FORMAT, bytes};

impl Txn {
    /// Adds a write of the key to a transaction that deletes the publication of the volume. Only
    /// the revision of the key is used; its value, the volume's id, is for people.
    pub fn note_unpublished(self, prefix: &Prefix, volume: VolumeId) -> Self {
        let value = json!({ "v": FORMAT, "volume": volume.0 });
        self.put(&prefix.unpublished(), bytes(&value))
    }
}
