//! NVMe drives in userspace: the driver, over a seam that hides whether the drive is real or
//! simulated.
//!
//! ```text
//!   Function    one PCI function: registers, interrupts, addresses of memory      (function.rs)
//!   DmaMemory   memory that the driver and the controller share: rings and lists  (memory.rs)
//!
//!   Controller  the handle on one drive; its control lives on one reactor         (controller.rs)
//!     ├ control     bring-up, namespaces, recovery, health, shutdown              (control/)
//!     │   └ Admin       the admin queue                                           (admin.rs)
//!     └ NvmeBdev    a namespace                                                   (device.rs)
//!         └ Channel     one core's queue to it: a lane of                         (channel.rs)
//!             └ Pair        the core's queue pair: the data path        (pair/, ring.rs, data.rs)
//!
//!   Link        the state that a Pair and the control share                   (link.rs)
//!   Phase       the permission to write doorbells                             (phase.rs)
//! ```

#![forbid(unsafe_code)]

mod admin;
mod channel;
mod command;
mod control;
mod controller;
mod data;
mod device;
mod error;
mod event;
mod function;
mod info;
mod link;
mod memory;
mod options;
mod pair;
mod phase;
mod ring;
mod table;

pub use controller::{AdminData, AdminReply, Controller};
pub use device::NvmeBdev;
pub use error::{AttachError, ControlError, chain};
pub use event::{Event, HealthAlert, HealthEvent, Observer, ResetReason, Timeout, TimeoutAction};
pub use function::{Function, FunctionError, GONE};
pub use info::{
    ControllerInfo, DriveIdentity, ErrorEntry, FirmwareInfo, Health, State, Status,
    UnusableNamespace,
};
pub use memory::{DmaMemory, MemoryError};
pub use options::{ActionOnTimeout, HealthThresholds, Options};
