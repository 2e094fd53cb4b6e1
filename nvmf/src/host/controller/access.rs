//! Reads the ANA log page (Base 5.16.1.13), which gives the access state of each namespace on this
//! path.
//!
//! The host reads it after the namespaces, and after each ANA change event. A command's status
//! shows whether the target executed it; the log shows when a retry is useful.

use std::collections::BTreeMap;

use nacre_nvmf_wire::identify::controller::Cmic;
use nacre_nvmf_wire::log::ana::{AnaGroup, AnaHeader, AnaState, groups};
use zerocopy::FromBytes;

use super::HostController;
use crate::host::step::{HostStep, PAGE};

/// Most bytes of the log that are read, so that a target cannot cause endless requests.
const MAX_LOG: usize = 64 << 10;

impl HostController {
    /// The step after all namespaces were identified.
    pub(super) fn after_namespaces(&mut self) -> HostStep {
        self.scan.access_log.clear();
        if self.reports_access() {
            HostStep::ReadAccess(0)
        } else {
            HostStep::Idle
        }
    }

    fn reports_access(&self) -> bool {
        self.identify
            .as_ref()
            .is_some_and(|i| Cmic::from_bits_retain(i.cmic).contains(Cmic::ANA_REPORTING))
    }

    /// Handles a part of the log. The header's number of groups shows whether more follows.
    pub(super) fn take_access(&mut self, data: &[u8]) -> HostStep {
        self.scan.access_log.extend_from_slice(data);
        let whole = match AnaHeader::ref_from_prefix(&self.scan.access_log) {
            Ok((header, _)) => {
                size_of::<AnaHeader>() + usize::from(header.groups.get()) * size_of::<AnaGroup>()
            }
            Err(_) => 0,
        };
        let so_far = self.scan.access_log.len();
        if so_far < whole && data.len() == PAGE && so_far < MAX_LOG {
            return HostStep::ReadAccess(so_far as u32);
        }
        self.scan.access = states(&self.scan.access_log);
        self.scan.access_log = Vec::new();
        HostStep::Idle
    }

    /// Handles a controller without the log: all namespaces count as accessible, and the status of
    /// each command decides.
    pub(super) fn no_access(&mut self) -> HostStep {
        self.scan.access_log = Vec::new();
        self.scan.access = BTreeMap::new();
        HostStep::Idle
    }
}

/// The ANA state of each group that the data contain completely.
fn states(log: &[u8]) -> BTreeMap<u32, AnaState> {
    let mut states = BTreeMap::new();
    for group in groups(log) {
        match group {
            Ok((group, _)) => {
                // Do not wait because of an unknown state.
                let state = group.state().unwrap_or(AnaState::Optimized);
                states.insert(group.anagrpid.get(), state);
            }
            Err(error) => tracing::warn!(%error, "the rest of the ANA log is ignored"),
        }
    }
    states
}
