//! Backups of snapshots in a directory or an S3 object store: the format on disk; creation,
//! listing, verification, restore and deletion.
//!
//! ```text
//!   nacre-backup/<volume>/manifests/<backup>.json       written last: without one, no backup
//!   nacre-backup/<volume>/objects/<backup>/<index>      4 MiB of the volume, compressed with LZ4
//!   nacre-backup/<volume>/running/<holder>_<backup>     marks an unfinished backup
//! ```
//!
//! Volumes, backups and holders (the daemons that write) are named by UUIDs, objects by the hex
//! index of their 4 MiB. An object is written once. A backup names its own objects, and the
//! unchanged ones of earlier backups. 4 MiB of zeroes have no object. A sweep removes the objects
//! that no manifest names.
//!
//! # Writers
//!
//! Several daemons may use one store, for different volumes. A sweep removes nothing of a volume
//! while another holder's mark (the file in `running`) is younger than a day. This order makes it
//! safe:
//!
//! | creates | sweeps |
//! |---|---|
//! | writes its mark | lists objects |
//! | lists manifests, reads the base | lists marks: with a foreign one it ends here |
//! | writes objects | reads all manifests: with a bad one it ends here |
//! | checks that its mark is there | removes listed objects that no manifest names |
//! | writes the manifest, removes the mark | |
//!
//! The caller does one creation or deletion of a volume at a time.
//!
//! # Limits
//!
//! Everything in the store is hostile: sizes, counts and names are bounded, and digests are
//! compared before data is used. Manifests are not signed: a person with write access to the store
//! can change backups. Data is not encrypted. A backup has at most 2^20 objects (4 TiB of data).
#![forbid(unsafe_code)]

mod create;
mod failure;
mod location;
mod manifest;
mod object;
mod progress;
mod remove;
mod restore;
mod staged;
mod store;
#[cfg(test)]
mod tests;

pub use create::{Created, Piece, Request, Source, create};
pub use failure::{Damage, Failure};
pub use location::{Credentials, Location, S3Options};
pub use manifest::{Header, Volume};
pub use object::OBJECT_BYTES;
pub use progress::Progress;
pub use remove::{Removed, remove};
pub use restore::{Target, Verified, restore, verify};
pub use store::{BadBackup, Listed, Store};
