//! `nvmf_*`: what the NVMe-oF target serves, to whom, and where.

use crate::engine::Engine;
use crate::rpc::Registry;

/// Adds every method of the family.
pub fn register(_registry: &mut Registry<Engine>) {}
