//! The namespaces of the controller while they are being read, and their ANA states.

use std::collections::{BTreeMap, VecDeque};

use nacre_nvmf_wire::log::ana::AnaState;

use crate::host::namespace::NamespaceInfo;

/// Results so far; [`super::Controller`] publishes them when the last step has ended.
#[derive(Default)]
pub(super) struct NamespaceScan {
    pub found: BTreeMap<u32, NamespaceInfo>,
    pub to_identify: VecDeque<u32>,
    /// The parts of the ANA log so far.
    pub access_log: Vec<u8>,
    /// The ANA states of the whole log, by group.
    pub access: BTreeMap<u32, AnaState>,
    /// The namespaces are known, and only their ANA states are being read.
    pub access_only: bool,
}

impl NamespaceScan {
    /// Drops the namespaces found so far: the list is read from its start, or the connection ended.
    pub fn forget_namespaces(&mut self) {
        self.found.clear();
        self.to_identify.clear();
    }
}
