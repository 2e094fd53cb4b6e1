//! Where volumes' records are kept: the authority on epoch and membership.

use std::future::Future;
use std::pin::Pin;

use uuid::Uuid;

use crate::model::{Stamp, VolumeRecord};

/// Every operation answers when it is durable, or has failed. It may be awaited on any executor.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Somebody else changed the record: this holder is fenced.
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
    /// Whether the change was made is not known: the caller loads the record and looks.
    #[error("the volume store cannot be reached: {why}")]
    Unavailable { why: String },
    #[error("the volume store is damaged: {what}")]
    Damaged { what: String },
}

/// Keeps [`VolumeRecord`]s.
pub trait VolumeStore: Send + Sync + 'static {
    fn list(&self) -> StoreFuture<Vec<VolumeRecord>>;

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord>;

    /// A new record. Its id and its name are nobody else's.
    fn create(&self, record: VolumeRecord) -> StoreFuture<()>;

    /// Replaces the record of `next.id` if its version is `expected` (a compare-and-swap, durable when it
    /// answers). `next`'s version must be greater.
    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()>;

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()>;
}
