//! The path to a namespace: the part of the ANA log that a host with one path needs.
//!
//! The host reads it after the namespaces, and whenever the target reports a change. The status of
//! a command says whether the target executed it; the log says when to retry.

use std::collections::BTreeMap;

use nacre_nvmf_wire::identify::controller::Cmic;
use nacre_nvmf_wire::log::ana::{AnaGroup, AnaHeader, AnaState, groups};
use zerocopy::FromBytes;

use super::Controller;
use crate::host::step::{PAGE, Step};

/// Most bytes of the log; bounds the requests that a target can cause.
const MAX_LOG: usize = 64 << 10;

impl Controller {
    /// What follows when all namespaces are known.
    pub(super) fn after_namespaces(&mut self) -> Step {
        self.scan.access_log.clear();
        if self.reports_access() {
            Step::ReadAccess(0)
        } else {
            Step::Idle
        }
    }

    fn reports_access(&self) -> bool {
        self.identify
            .as_ref()
            .is_some_and(|i| Cmic::from_bits_retain(i.cmic).contains(Cmic::ANA_REPORTING))
    }

    /// A part of the log. A page that does not hold all of it says so by its number of groups.
    pub(super) fn take_access(&mut self, data: &[u8]) -> Step {
        self.scan.access_log.extend_from_slice(data);
        let whole = match AnaHeader::ref_from_prefix(&self.scan.access_log) {
            Ok((header, _)) => {
                size_of::<AnaHeader>() + usize::from(header.groups.get()) * size_of::<AnaGroup>()
            }
            Err(_) => 0,
        };
        let so_far = self.scan.access_log.len();
        if so_far < whole && data.len() == PAGE && so_far < MAX_LOG {
            return Step::ReadAccess(so_far as u32);
        }
        self.scan.access = states(&self.scan.access_log);
        self.scan.access_log = Vec::new();
        Step::Idle
    }

    /// Without the log every command says by itself how it is.
    pub(super) fn no_access(&mut self) -> Step {
        self.scan.access_log = Vec::new();
        self.scan.access = BTreeMap::new();
        Step::Idle
    }
}

/// Returns the ANA state of each group, as far as the log can be read.
fn states(log: &[u8]) -> BTreeMap<u32, AnaState> {
    let mut states = BTreeMap::new();
    for group in groups(log) {
        match group {
            Ok((group, _)) => {
                // A state that is not known is no reason to wait.
                let state = group.state().unwrap_or(AnaState::Optimized);
                states.insert(group.anagrpid.get(), state);
            }
            Err(error) => tracing::warn!(%error, "the rest of the ANA log is ignored"),
        }
    }
    states
}
