//! The userspace NVMe driver. It reaches a drive through the trait [`Function`], which VFIO
//! implements for real drives and a simulator for tests.
//!
//! ```text
//!   Function    one PCI function: registers, interrupts, addresses of memory      (function.rs)
//!   DmaMemory   memory that the driver and the controller share: rings and lists  (memory.rs)
//!
//!   Controller  the handle of one drive; one reactor manages the drive        (controller/mod.rs)
//!     ├ tasks       recovery, events, health, detach                          (controller/)
//!     ├ Commands    sequences of admin commands: initialise, queues, logs     (controller/)
//!     │   └ Admin       the admin queue                                       (admin.rs)
//!     └ NvmeBdev    a namespace as a block device                             (device.rs)
//!         └ Channel     one core's queue to it: a lane of                     (channel.rs)
//!             └ Pair        the core's NVMe queue pair: the data path         (queue_pair/)
//!
//!   Shared      the state of a controller that all cores use                  (shared.rs)
//!   Namespace   the attributes of a namespace that all cores use              (namespace.rs)
//!   Link        the state that a Pair and the controller's tasks share        (link.rs)
//!   Phase       the permission to write doorbells                             (phase.rs)
//! ```

#![forbid(unsafe_code)]

mod activity;
mod admin;
mod channel;
mod command;
mod controller;
mod data;
mod device;
mod error;
mod event;
mod function;
mod info;
mod link;
mod memory;
mod namespace;
mod options;
mod phase;
mod properties;
mod queue_pair;
mod ring;
mod shared;
mod table;

pub use controller::{AdminData, AdminReply, Controller, FirmwareUpdate, IMAGE_MAX};
pub use device::NvmeBdev;
pub use error::{AttachError, ControlError, FirmwareError, chain};
pub use event::{Event, HealthAlert, HealthEvent, Observer, ResetReason, Timeout, TimeoutAction};
pub use function::{Function, FunctionError, GONE};
pub use info::{
    ControllerInfo, DriveIdentity, ErrorEntry, FirmwareInfo, Health, QueuePairActivity, State,
    Status, UnusableNamespace,
};
pub use memory::{DmaMemory, MemoryError};
pub use options::{ActionOnTimeout, DriveOptions, HealthThresholds};
