//! The appliance: updates, rollback, backup, reset, network and console of a machine that runs
//! Nacre from its disk image.
//!
//! The disk has two *slots*: each is a set of partitions and a boot entry for one version of the
//! system. An update writes the slot that is not running; a rollback boots the other one. The third
//! column says what a module does: it parses input, decides without I/O, or performs I/O.
//!
//! ```text
//!   bundle     a signed archive -> files of a version, or a typed refusal    parse
//!   slots      names of boot entries and partitions -> slots; rollback       decide, perform
//!   guard      volumes of the daemon -> reasons to delay an update           decide
//!   update     checks a bundle, then runs systemd-sysupdate                  perform
//!   acts       requests of the administration page, and their history        decide, perform
//!   backup     state folder <-> one file; checked before anything changes   parse, perform
//!   reset      asks the next boot to erase the state                        perform
//!   network    settings of an interface, undone unless confirmed             decide, perform
//!   drives     NVMe drives for the daemon: bound to vfio-pci at each start   decide, perform
//!   host       the name of the machine                                    parse, perform
//!   install    copies the system of a USB disk to a disk of the machine    decide, perform
//!   console    the text screen on the machine's terminals: facts, keys -> actions
//!   place      all paths, below a root that tests replace
//!   run        runs programs with a deadline
//!   timer      has systemd run a command later, unless this program stops it
//! ```
//!
//! The crate does not call the daemon: its callers pass in the daemon's answers. It changes no
//! partition of the running system itself: systemd-sysupdate and systemd-repart do.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod acts;
pub mod backup;
pub mod bundle;
pub mod console;
pub mod digest;
pub mod drives;
pub mod guard;
pub mod host;
pub mod install;
pub mod lock;
pub mod network;
pub mod place;
pub mod reset;
pub mod run;
pub mod slots;
pub mod status;
mod timer;
pub mod update;
pub mod version;
