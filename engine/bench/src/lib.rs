//! The results of `nacre bench`: medians of the rounds and ratios between the sides, as a table and
//! as an HTML page.
//!
//! ```text
//!   workload.rs     the workloads: pattern, block size, queue depth
//!   processor.rs    parses processor times of /proc
//!   comparison.rs   measurements by line and side; medians and ratios
//!     median.rs
//!   table.rs        for a terminal
//!   page.rs         HTML that needs no network
//!     plot.rs         its drawings (SVG)
//! ```
//!
//! Nothing here measures, reads a file or opens a connection.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

mod comparison;
mod median;
mod page;
mod plot;
mod processor;
mod table;
mod workload;

pub use comparison::{
    Comparison, Figures, Latency, LineResult, Machine, Measurement, Outcome, Ratio, SCHEMA,
    Setting, Side, SideResult,
};
pub use median::median;
pub use page::page;
pub use processor::{machine_ticks, process_ticks};
pub use table::{failed_runs, table};
pub use workload::Workload;
