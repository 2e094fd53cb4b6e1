//! NVMe drives through VFIO: finding them, taking them from the kernel and giving them back, and the real
//! [`Function`](nacre_bdev_nvme::Function) that the driver works on.
//!
//! ```text
//!   pci        what sysfs says of each drive; what uses it; bind and unbind       files only, any machine in a folder
//!   Vfio       the process's one container: groups, addresses, memory known to all its drives
//!     └ VfioFunction   one drive: registers (bar), interrupts, reset, bus mastering
//!   Watch      tells which drives came and went
//! ```
//!
//! Unsafe code is in two files: `sys` (system calls) and `bar` (mapped registers, and what happens when they vanish).

#![deny(unsafe_code)]

mod bar;
mod container;
mod error;
mod function;
mod iova;
pub mod pci;
mod sys;
mod vfio;
mod watch;

pub use container::DmaError;
pub use error::VfioError;
pub use function::VfioFunction;
pub use vfio::Vfio;
pub use watch::{Change, Watch};
