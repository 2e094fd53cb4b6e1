//! Parses the data of each step: Connect response, Identify data, namespace lists. The results go
//! to the controller and to [`super::scan`].

use crate::host::error::HostError;
use crate::host::namespace::NamespaceInfo;
use crate::host::options::ControllerId;
use crate::host::step::HostStep;
use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::fabrics::{AuthRequirements, ConnectResponse};
use nacre_nvmf_wire::identify::controller::{FUSES_COMPARE_AND_WRITE, vwc};
use nacre_nvmf_wire::identify::{IdentifyController, NamespaceList, NvmController, nsid};
use zerocopy::FromBytes;

use super::{HostController, MAX_NAMESPACES, short};

impl HostController {
    /// The CNTLID to request in the admin queue's Connect.
    pub(super) fn asked(&self) -> u16 {
        self.had.unwrap_or_else(|| self.options.controller.asked())
    }

    /// Handles the response to Connect. Returns the authentication that the target requires.
    pub(super) fn take_connect(&mut self, cqe: &Cqe) -> Result<AuthRequirements, HostError> {
        let ConnectResponse { cntlid, auth } = ConnectResponse::from_cqe(cqe);
        if cntlid >= 0xfff0 {
            let what = format!("Connect answers with controller identifier {cntlid:#x}");
            return Err(HostError::Misbehaved { what });
        }
        let asked = self.asked();
        if asked < 0xfff0 && cntlid != asked {
            let what = format!("controller {asked} was asked for, and {cntlid} given");
            return Err(HostError::Misbehaved { what });
        }
        self.given(cntlid);
        let generated = self.options.concatenation.as_ref();
        let has_generated = generated.is_some_and(|psk| psk.is_set());
        self.link
            .change(|state| state.is_authenticated = has_generated);
        Ok(auth)
    }

    pub(super) fn given(&mut self, cntlid: u16) {
        self.link.change(|state| state.cntlid = cntlid);
        if self.options.controller == ControllerId::AnyStatic {
            self.had = Some(cntlid);
        }
    }

    pub(super) fn start_listing(&mut self) -> HostStep {
        self.scan.forget_namespaces();
        HostStep::ListNamespaces(0)
    }

    pub(super) fn take_list(&mut self, after: u32, data: &[u8]) -> Result<HostStep, HostError> {
        let (list, _) =
            NamespaceList::ref_from_prefix(data).map_err(|_| short("namespace list", data))?;
        let (mut last, mut count) = (after, 0);
        for nsid in list.iter() {
            if nsid <= last || nsid > nsid::MAX {
                let what = format!("a namespace list has {nsid} after {last}");
                return Err(HostError::Misbehaved { what });
            }
            (last, count) = (nsid, count + 1);
            self.scan.to_identify.push_back(nsid);
        }
        if self.scan.to_identify.len() > MAX_NAMESPACES {
            let what = format!("more than {MAX_NAMESPACES} namespaces");
            return Err(HostError::Misbehaved { what });
        }
        // After a full list, more entries may follow.
        Ok(if count == NamespaceList::MAX_ENTRIES {
            HostStep::ListNamespaces(last)
        } else {
            self.next_namespace()
        })
    }

    pub(super) fn take_namespace(&mut self, nsid: u32, data: &[u8]) -> Result<HostStep, HostError> {
        if data.len() < crate::host::step::PAGE {
            return Err(short("Identify Namespace data", data));
        }
        self.scan.found.remove(&nsid);
        Ok(
            match NamespaceInfo::parse(nsid, data, self.link.state().acwu) {
                // The namespace was removed after it was listed.
                Ok(info) if info.blocks == 0 => self.next_namespace(),
                Ok(info) => {
                    self.scan.found.insert(nsid, info);
                    HostStep::DescribeNamespace(nsid)
                }
                Err(_) if data.iter().all(|byte| *byte == 0) => self.next_namespace(),
                Err(error) => {
                    tracing::warn!(nsid, %error, "a namespace cannot be used");
                    self.next_namespace()
                }
            },
        )
    }

    /// Handles the Changed Namespace List. FFFFFFFFh as the first entry means: more namespaces
    /// changed than the list holds, so all are read again.
    pub(super) fn take_changed(&mut self, data: &[u8]) -> Result<HostStep, HostError> {
        let (list, _) = NamespaceList::ref_from_prefix(data)
            .map_err(|_| short("changed namespace list", data))?;
        let mut changed = list.iter().peekable();
        if changed.peek() == Some(&nsid::BROADCAST) {
            return Ok(self.start_listing());
        }
        self.scan.found = self.link.state().namespaces;
        self.scan.to_identify.clear();
        self.scan.to_identify.extend(changed);
        Ok(self.next_namespace())
    }

    pub(super) fn next_namespace(&mut self) -> HostStep {
        match self.scan.to_identify.pop_front() {
            Some(nsid) => HostStep::IdentifyNamespace(nsid),
            None => self.after_namespaces(),
        }
    }

    pub(super) fn take_identify(&mut self, data: &[u8]) -> Result<(), HostError> {
        let (identify, _) = IdentifyController::read_from_prefix(data)
            .map_err(|_| short("Identify Controller data", data))?;
        let (said, is) = (self.link.state().cntlid, identify.cntlid.get());
        if is != said {
            let what = format!("Identify says controller {is}, Connect said {said}");
            return Err(HostError::Misbehaved { what });
        }
        let wanted = u32::from(self.options.queue_entries);
        let entries = self.cap.queue_entries_max().min(wanted) as u16;
        let commands = match identify.maxcmd.get() {
            0 => u16::MAX,
            n => n,
        };
        let page = self.cap.page_bytes_min();
        let max = identify.max_transfer_bytes(page).unwrap_or(1 << 20);
        let in_capsule = u32::try_from(identify.in_capsule_bytes()).unwrap_or(u32::MAX);
        self.link.change(|state| {
            state.queue_entries = entries.min(commands.saturating_add(1)).max(2);
            state.in_capsule_bytes = in_capsule;
            state.max_transfer_bytes = u32::try_from(max).unwrap_or(u32::MAX);
            state.oncs = identify.oncs.get();
            state.fused_compare_and_write = identify.fuses.get() & FUSES_COMPARE_AND_WRITE != 0;
            state.acwu = identify.acwu.get();
            state.volatile_cache = identify.vwc & vwc::PRESENT != 0;
            state.max_dsm_ranges = 256;
            state.write_zeroes_bytes = max;
            state.verify_bytes = max;
            state.io_queues = 0;
        });
        self.identify = Some(Box::new(identify));
        Ok(())
    }

    pub(super) fn take_nvm(&mut self, data: &[u8]) {
        let Ok((nvm, _)) = NvmController::ref_from_prefix(data) else {
            return;
        };
        let page = self.cap.page_bytes_min();
        self.link.change(|state| {
            let limit = |exponent: u8| {
                let bytes = page.checked_shl(exponent.into()).unwrap_or(u64::MAX);
                (exponent != 0).then_some(bytes)
            };
            if let Some(bytes) = limit(nvm.wzsl) {
                state.write_zeroes_bytes = bytes;
            }
            if let Some(bytes) = limit(nvm.vsl) {
                state.verify_bytes = bytes;
            }
            if nvm.dmrl != 0 {
                state.max_dsm_ranges = u32::from(nvm.dmrl);
            }
        });
    }
}
