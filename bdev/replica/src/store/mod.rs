//! The trait [`VolumeStore`]: stores the records of volumes. It is the authority on the epoch and
//! the replicas of a volume.

mod embedded;
mod memory;
pub mod reply;
pub mod suite;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::pin::Pin;

use uuid::Uuid;

use crate::model::{Stamp, VolumeRecord};

pub use embedded::{EmbeddedStore, FILE, dump};
pub use memory::{Call, MemoryStore, Outcome, Plan, StoreRequest};

/// Every operation completes when it is durable, or has failed. It may be awaited on any executor.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Another holder changed the record: this holder is fenced.
    #[error("volume {id}: the store has epoch {} revision {}, not epoch {} revision {}",
        found.epoch, found.revision, expected.epoch, expected.revision)]
    Conflict {
        id: Uuid,
        expected: Stamp,
        found: Stamp,
    },
    #[error("volume {id} is not in the store")]
    NotFound { id: Uuid },
    #[error("volume \"{name}\" exists already")]
    Exists { name: String },
    #[error(
        "the cluster has {most} volumes, and can have no more: delete some, or create another cluster"
    )]
    TooMany { most: usize },
    /// Whether the change was made is unknown: the caller loads the record and checks.
    #[error("the volume store cannot be reached: {why}")]
    Unavailable { why: String },
    #[error("the volume store is damaged: {what}")]
    Damaged { what: String },
    #[error("the volume store {path} is in use by another process")]
    InUse { path: String },
    /// Another daemon has taken the store: this holder is fenced.
    #[error("the volume store {store} belongs to another daemon: {owner} (claim {claim})")]
    Owned {
        store: String,
        owner: String,
        claim: Uuid,
    },
    /// This node's lease is over, or another node holds the volume: this holder is fenced.
    #[error("the volume store refuses this node: {why}")]
    Fenced { why: String },
    #[error(
        "the volume store {path} is of version {found}, newer than this program: start the newer one"
    )]
    Newer { path: String, found: u64 },
}

/// Keeps [`VolumeRecord`]s. [`suite`] has the tests that every implementation must pass.
///
/// A call is made when the method is called: dropping the future does not take it back.
pub trait VolumeStore: Send + Sync + 'static {
    /// Returns all records in order of creation.
    fn list(&self) -> StoreFuture<Vec<VolumeRecord>>;

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord>;

    /// Adds a record. Its id and its name are unique.
    fn create(&self, record: VolumeRecord) -> StoreFuture<()>;

    /// Replaces the record of `next.id` if its version is `expected` (a compare-and-swap, durable
    /// when it completes). `next`'s version must be greater, and its name unique.
    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()>;

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()>;

    /// True when other holders may use the store. Then a holder without a lease of its node must
    /// receive replies from the store regularly, or it stops acknowledging I/O.
    fn is_shared(&self) -> bool {
        true
    }
}

/// Panics if a swap does not raise the version: it could not be distinguished from no swap.
pub fn assert_grows(expected: Stamp, next: &VolumeRecord) {
    assert!(
        next.version() > expected,
        "a swap from {expected:?} to {:?}",
        next.version()
    );
}

/// Checks that the stored version is the one that the caller expects.
pub fn compare(stored: &VolumeRecord, expected: Stamp) -> Result<(), StoreError> {
    let found = stored.version();
    if found == expected {
        Ok(())
    } else {
        Err(StoreError::Conflict {
            id: stored.id,
            expected,
            found,
        })
    }
}
