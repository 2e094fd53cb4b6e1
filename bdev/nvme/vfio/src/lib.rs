//! VFIO access to NVMe drives: finds them, binds them to vfio-pci and back to the kernel's driver,
//! and implements the driver's [`Function`](nacre_bdev_nvme::Function).
//!
//! ```text
//! pci        each drive in sysfs; its users; bind and unbind       files only
//! Vfio       the process's one container: groups, addresses, memory of all its drives
//! └ VfioFunction   one drive: registers (bar), interrupts, reset, bus mastering
//! Watch      reports added and removed drives
//! ```
//!
//! Unsafe code is in two files: `sys` (system calls) and `bar` (mapped registers).

#![deny(unsafe_code)]

mod bar;
mod container;
mod drive_watch;
mod error;
mod function;
mod iova;
mod memory;
pub mod pci;
mod sys;
mod vfio;

pub use container::DmaError;
pub use drive_watch::{Change, Watch};
pub use error::VfioError;
pub use function::VfioFunction;
pub use vfio::Vfio;
