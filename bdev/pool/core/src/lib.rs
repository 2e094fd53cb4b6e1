//! The core of storage pools, which share one or more block devices (*disks*) among thin or thick
//! volumes and snapshots. It has the block map of each of them, the log of metadata, checkpoints
//! and recovery.
//!
//! It does no I/O, and has no clock and no thread: requests and ended I/O go in, I/O to do and
//! answers come out. Data never passes through it.
//!
//! ```text
//!   NewPool ──▶ Pool ◀── Import         pool     requests, writes in flight, checkpoints, deletion
//!                │          │           import   from bytes to a pool
//!                ▼          ▼           image    from a state to pages
//!         log, settle, space, zones     log      records and their order
//!                │                      state    versions and their changes  
//!                ▼                      map      places of a volume, units of the disk
//!              state ──▶ map            format   bytes
//! ```
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | version | a volume or a snapshot of the pool |
//! | unit | 64 KiB of the pool's disks, with a number; space is allocated and freed in units |
//! | granule | 4 KiB of a unit: one block of a volume. A set of granules has a bit for each |
//! | place | 64 KiB of a version's address range: place `n` begins at byte `n` x 64 KiB |
//! | entry | the map's value at one place: at most two units, and the granules to read from each |
//! | leaf | the entries of 256 consecutive places (16 MiB of a volume), in the tree of a version |
//! | generation | the age of a unit: the number of the version that it was allocated in |
//! | floor | a version's generation up to which other versions may share its units |
//! | record, LSN | a change of metadata in the pool's log, and the record's number |
//! | settled | a record whose data and log page were flushed: a loss of power cannot undo it |
//! | root | a superblock, and the tree of metadata pages that it refers to: a checkpoint |
//!
//! # Invariants, in order of rank
//!
//! 1. A request that was answered and then flushed survives a loss of power; a request that was
//!    answered survives the death of the daemon. So a write is answered when its data, its record
//!    and every record before it are on the disk.
//! 2. A read finds data that was written there, or zeroes: never the contents that a unit had
//!    before, and never those of another volume.
//! 3. A record counts whole or not at all: up to the settled mark always, after it if the data on
//!    the disk has the record's checksums.
//! 4. Nothing overwrites a granule that an unsettled MAP record is about. This goes by the place on
//!    the disk, so an unmap in between changes nothing. An UNMAP record does not hold a granule:
//!    - before a flush, a loss of power may undo an unmap. The granule then has its old contents
//!      or those of a later write, sector by sector, as if the host had overwritten it in place;
//!    - a unit without granules leaves the volume, and rule 5 holds it: an unmap that may be undone
//!      never gives a unit to another volume.
//! 5. A freed unit is reused when the record that freed it is settled and all I/O of that time has
//!    ended.
//! 6. A root is written when every record that it includes is settled and its pages are durable.
//!    Pages of the last two roots are not overwritten.
//! 7. A snapshot does not change from its answer on: the answer waits for the writes in place from
//!    before the cut, and for a flush after them. Nothing is copied from a unit before they end.
//!    If it has a write, it has every write that was answered before that one was submitted.
//! 8. Metadata is checked before it is used: a bad copy is healed from the good one; a node lost in
//!    both copies answers errors.
//! 9. Trims and deletions need no data unit.
//!
//! # Limits of today
//!
//! The log is on one disk, and so is metadata while that has room: without it there is no pool.
//! The whole map is in memory, and an import reads all of it. A failed write of the log
//! or of metadata holds the pool until it is imported again.

#![forbid(unsafe_code)]

mod bits;
pub mod check;
pub mod create;
pub mod disks;
pub mod format;
pub mod geometry;
mod grace;
pub mod ids;
mod image;
pub mod import;
pub mod interface;
mod log;
pub mod map;
mod mutation;
pub mod pool;
mod report;
mod settle;
pub mod space;
pub mod state;
#[cfg(test)]
mod tests;
mod zones;
