//! NVMe drives in userspace: the driver, over a seam that a real drive and a simulated one stand behind.
//!
//! ```text
//!   Function    one PCI function: registers, interrupts, addresses of memory      (function.rs)
//!   DmaMemory   memory that the driver and the controller share: rings and lists  (memory.rs)
//! ```

#![forbid(unsafe_code)]

mod function;
mod memory;

pub use function::{Function, FunctionError, GONE};
pub use memory::{DmaMemory, MemoryError};
