//! The note of deleted publications. Nodes confirm in their leases up to which revision they have
//! seen the publications; the key of a deleted one is gone, and its revision with it.
//!
//! A version before leases say what is in effect writes no note. While one has a lease, nothing
//! counts as confirmed. Another version notes unpublished volumes and not deleted ones. So a node
//! that is asked also knows the deletions that it saw itself. One that such a version made before
//! that node started is not covered.

use nacre_cluster_core::VolumeId;
use serde_json::json;

use crate::client::Txn;
use crate::keys::Prefix;
use crate::stored::{FORMAT, bytes};

impl Txn {
    /// Notes that this transaction deletes the publication of the volume. Only the revision of the
    /// key counts; its value is for readers.
    pub fn note_unpublished(self, prefix: &Prefix, volume: VolumeId) -> Self {
        let value = json!({ "v": FORMAT, "volume": volume.0 });
        self.put(&prefix.unpublished(), bytes(&value))
    }
}
