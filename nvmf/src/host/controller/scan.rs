//! The partial results of reading the controller's namespaces and ANA log.

use std::collections::{BTreeMap, VecDeque};

use nacre_nvmf_wire::log::ana::AnaState;

use crate::host::namespace::NamespaceInfo;

/// The results so far. [`super::HostController`] publishes them after the last step.
#[derive(Default)]
pub(super) struct NamespaceScan {
    pub found: BTreeMap<u32, NamespaceInfo>,
    pub to_identify: VecDeque<u32>,
    /// The ANA log up to the last part read.
    pub access_log: Vec<u8>,
    /// The ANA state of each group.
    pub access: BTreeMap<u32, AnaState>,
    /// Only the ANA log is being read, not the namespaces.
    pub access_only: bool,
}

impl NamespaceScan {
    /// Drops the namespaces found so far, before the list is read from its start.
    pub(super) fn forget_namespaces(&mut self) {
        self.found.clear();
        self.to_identify.clear();
    }
}
