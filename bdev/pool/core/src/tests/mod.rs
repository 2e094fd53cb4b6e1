//! Tests of the whole core, on a simulated disk.

mod basics;
mod checking;
pub(crate) mod content;
mod damage;
mod disk;
mod disks;
mod enumeration;
mod external;
mod growth;
mod histories;
mod importing;
mod leaving;
mod length;
mod lost;
mod model;
mod op;
mod parents;
pub(crate) mod rig;
mod seeds;
mod world;
