//! Tests of an open volume on RAM disks with faults, in virtual time: control, lanes and store as
//! in the daemon, on one thread.

mod assent;
mod believed;
mod commands;
mod crash;
mod cut;
mod cuttable;
mod fence;
mod prepared;
mod rebuild;
mod replaced;
mod replicas;
mod restored;
mod rig;
mod shared_device;
mod short;
mod unawaited;
