//! The parameters that attach an NVMe controller, and the options of all controllers.

pub mod options;
pub mod params;
