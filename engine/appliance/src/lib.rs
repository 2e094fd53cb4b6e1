//! The appliance: updates, rollback, backup, reset, network and console of a machine that runs
//! Nacre from its image.
//!
//! ```text
//!   bundle     a signed archive -> files of a version, or a typed refusal    parse
//!   slots      names of boot entries and partitions -> slots; rollback       decide, perform
//!   guard      volumes of the daemon -> reasons to wait                      decide
//!   update     bundle, then systemd-sysupdate                                perform
//!   acts       requests of the page, and the history of updates              decide, perform
//!   backup     state folder <-> one file; checked before anything changes   parse, perform
//!   reset      asks the next boot to erase the state                        perform
//!   network    settings of an interface, undone unless confirmed             decide, perform
//!   host       the name of the machine                                    parse, perform
//!   install    the system of a USB disk -> a disk, named by its serial     decide, perform
//!   console    the screen of the machine's own terminals: facts, keys -> actions
//!   place      paths below one root, so that tests have a machine of their own
//!   run        programs with a deadline
//!   timer      one command of systemd that runs unless this program stops it
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
