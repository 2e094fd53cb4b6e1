//! Tests of an open volume on RAM disks with faults, in virtual time: control, lanes and store as
//! in the daemon, on one thread.

mod buffer_shortage;
mod commands;
mod confirmation;
mod crash;
mod fence;
mod hold;
mod label_choice;
mod prepared;
mod replaced;
mod replicas;
mod restored;
mod resync;
mod rig;
mod shared_device;
mod space;
mod truncatable;
mod truncation;
mod unawaited;
