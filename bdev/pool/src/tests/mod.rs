//! Pools on a RAM disk, with a keeper on its own thread.

mod allocated;
mod conformance;
mod disks;
mod erasure;
mod external;
mod failures;
mod full;
mod leaving;
mod losses;
mod model;
mod parents;
mod reads;
mod rig;
mod silent;
mod trims;
