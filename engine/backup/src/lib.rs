//! Backups of block devices in a directory or an object store: the format, and the work on it.
//!
//! ```text
//!   nacre-backup/<volume>/manifests/<backup>.json       written last: without one, no backup
//!   nacre-backup/<volume>/objects/<backup>/<index>      4 MiB of the volume, compressed
//!   nacre-backup/<volume>/running/<holder>_<backup>     marks an unfinished backup
//! ```
//!
//! An object is written once. A backup names its own objects, and the unchanged ones of earlier
//! backups. Places that read as zeroes have no object. A sweep removes the objects that no
//! manifest names.
//!
//! # Writers
//!
//! Several daemons may back up different volumes to one place. A sweep removes nothing of a volume
//! while another holder's mark is younger than a day. This order makes it safe:
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
