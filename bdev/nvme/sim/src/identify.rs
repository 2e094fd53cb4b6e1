//! Identify of the simulated controller (Base 5.17): builds its data structures from the
//! configuration.

use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::features::AsyncEvents;
use nacre_nvmf_wire::identify::controller::{Lpa, NvmController, Oacs, cntrltype, vwc};
use nacre_nvmf_wire::identify::namespace::{NSATTR_WRITE_PROTECTED, NSTAT_READY, Nsfeat, dlfeat};
use nacre_nvmf_wire::identify::{
    self, IdentifyController, IdentifyNamespace, IndependentNamespace, IoCommandSets,
    NamespaceList, NsIdDescriptor, NvmNamespace, cns, csi, descriptors, write_ascii,
};
use nacre_nvmf_wire::zerocopy::IntoBytes;
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::executor::Executor;
use crate::media::Namespace;

const INVALID_NAMESPACE: StatusCode = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
const INVALID_FIELD: StatusCode = StatusCode::INVALID_FIELD.with_dnr();

impl Executor {
    pub(crate) fn identify(&mut self, sqe: &Sqe) -> StatusCode {
        match self.identify_data(sqe) {
            Ok(data) => self.give_data(sqe, &data),
            Err(status) => status,
        }
    }

    fn identify_data(&self, sqe: &Sqe) -> Result<Vec<u8>, StatusCode> {
        let identify = Identify::parse(sqe);
        let nsid = sqe.nsid();
        if !matches!(identify.csi, csi::NVM) {
            return Err(INVALID_FIELD);
        }
        let bytes = |structure: &[u8]| structure.to_vec();
        let zeroes = || vec![0; identify::SIZE];
        Ok(match identify.cns {
            cns::NAMESPACE if nsid == identify::nsid::BROADCAST => {
                bytes(IdentifyNamespace::zeroed().as_bytes())
            }
            cns::NAMESPACE => match self.active(nsid)? {
                Some(namespace) => bytes(describe(namespace).as_bytes()),
                None => zeroes(),
            },
            cns::CONTROLLER => bytes(self.identify_controller().as_bytes()),
            cns::ACTIVE_NAMESPACES | cns::IO_ACTIVE_NAMESPACES => {
                if nsid >= identify::nsid::MAX {
                    return Err(INVALID_NAMESPACE);
                }
                let attached = self.namespaces.values().filter(|ns| ns.attached);
                let nsids = attached.map(|namespace| namespace.config.nsid);
                bytes(NamespaceList::above(nsid, nsids).as_bytes())
            }
            cns::NAMESPACE_DESCRIPTORS => {
                let namespace = self.active(nsid)?.ok_or(INVALID_FIELD)?;
                let config = &namespace.config;
                let mut list = Vec::new();
                if config.eui64 != [0; 8] {
                    list.push(NsIdDescriptor::Eui64(config.eui64));
                }
                if config.nguid != [0; 16] {
                    list.push(NsIdDescriptor::Nguid(config.nguid));
                }
                list.extend(config.uuid.map(NsIdDescriptor::Uuid));
                list.push(NsIdDescriptor::Csi(csi::NVM));
                let mut page = zeroes();
                descriptors::write(&list, &mut page).map_err(|_| StatusCode::INTERNAL_ERROR)?;
                page
            }
            cns::IO_NAMESPACE => match self.active(nsid)? {
                Some(_) => bytes(NvmNamespace::zeroed().as_bytes()),
                None => zeroes(),
            },
            cns::IO_CONTROLLER => bytes(self.identify_nvm().as_bytes()),
            cns::INDEPENDENT_NAMESPACE => match self.active(nsid)? {
                Some(namespace) => {
                    let mut page = IndependentNamespace::zeroed();
                    page.nstat = NSTAT_READY;
                    page.nsattr = write_protected(namespace);
                    bytes(page.as_bytes())
                }
                None => zeroes(),
            },
            cns::IO_COMMAND_SETS => bytes(IoCommandSets::nvm_only().as_bytes()),
            _ => return Err(INVALID_FIELD),
        })
    }

    /// The attached namespace `nsid`; `None` if it does not exist or is not attached, an error if
    /// `nsid` is 0 or above NN.
    fn active(&self, nsid: u32) -> Result<Option<&Namespace>, StatusCode> {
        if nsid == 0 || nsid > self.namespaces_max() {
            return Err(INVALID_NAMESPACE);
        }
        Ok(self.namespaces.get(&nsid).filter(|ns| ns.attached))
    }

    fn namespaces_max(&self) -> u32 {
        let highest = self.namespaces.keys().next_back().copied();
        highest.unwrap_or(0).max(64)
    }

    fn identify_controller(&self) -> IdentifyController {
        let config = &self.config;
        let mut page = IdentifyController::zeroed();
        page.vid.set(0x1b36);
        page.ssvid.set(0x1af4);
        write_ascii(&config.identity.serial, &mut page.sn);
        write_ascii(&config.identity.model, &mut page.mn);
        write_ascii(&config.identity.firmware, &mut page.fr);
        page.ieee = [0x52, 0x54, 0x00];
        page.mdts = config.mdts;
        page.cntlid.set(1);
        page.ver.set(config.identity.version.0);
        page.rtd3r.set(500_000);
        page.rtd3e.set(config.limits.rtd3e);
        page.oaes
            .set((AsyncEvents::NAMESPACE_ATTRIBUTE | AsyncEvents::FIRMWARE_ACTIVATION).bits());
        page.cntrltype = cntrltype::IO;
        page.crdt1.set(1);
        let oacs = [
            (config.shadow_doorbells, Oacs::DOORBELL_BUFFER),
            (config.limits.firmware_updates.is_some(), Oacs::FIRMWARE),
        ];
        let oacs = oacs.into_iter().filter(|(is_set, _)| *is_set);
        page.oacs
            .set(oacs.fold(0, |all, (_, bit)| all | bit.bits()));
        page.acl = config.limits.aborts - 1;
        page.aerl = config.limits.async_events - 1;
        // One slot, which is read only without the commands of a firmware update.
        page.frmw = 0b0010 | u8::from(config.limits.firmware_updates.is_none());
        page.fwug = config.limits.firmware_updates.unwrap_or(0);
        page.lpa = (Lpa::COMMAND_EFFECTS | Lpa::EXTENDED_DATA | Lpa::SUPPORTED_PAGES).bits();
        page.elpe = 63;
        page.wctemp.set(343);
        page.cctemp.set(353);
        page.sqes = 0x66;
        page.cqes = 0x44;
        page.nn.set(self.namespaces_max());
        page.oncs.set(config.oncs.bits());
        page.fuses.set(config.fused_compare_and_write.into());
        page.vwc = vwc::FLUSH_BROADCAST_YES;
        if config.volatile_cache {
            page.vwc |= vwc::PRESENT;
        }
        page.awun.set(config.limits.awun - 1);
        page.awupf.set(config.limits.awupf - 1);
        page.acwu.set(config.limits.acwu - 1);
        page.ocfs.set(1);
        page.sgls.set(config.sgls.bits());
        let nqn = format!("nqn.2014.08.org.nvmexpress:sim:{}", config.identity.serial);
        let len = nqn.len().min(page.subnqn.len() - 1);
        page.subnqn[..len].copy_from_slice(&nqn.as_bytes()[..len]);
        page.psd[0].mp.set(2500);
        page
    }

    fn identify_nvm(&self) -> NvmController {
        let config = &self.config;
        let mut page = NvmController::zeroed();
        page.vsl = config.limits.vsl;
        page.wzsl = config.limits.wzsl;
        page.dmrl = config.limits.dmrl;
        page.dmrsl.set(config.limits.dmrsl);
        page.dmsl.set(config.limits.dmsl);
        page
    }
}

fn write_protected(namespace: &Namespace) -> u8 {
    if namespace.config.write_protected {
        NSATTR_WRITE_PROTECTED
    } else {
        0
    }
}

fn describe(namespace: &Namespace) -> IdentifyNamespace {
    let config = &namespace.config;
    let mut page = IdentifyNamespace::zeroed();
    page.nsze.set(config.blocks);
    page.ncap.set(config.blocks);
    page.nuse.set(config.blocks);
    for (place, format) in page.lbaf.iter_mut().zip(&config.formats) {
        place.ms.set(format.metadata);
        place.lbads = format.block_size.checked_ilog2().unwrap_or(0) as u8;
    }
    page.nlbaf = (config.formats.len() - 1) as u8;
    let format = config.format as u8;
    page.flbas = format & 0xf | format >> 4 << 5 | u8::from(config.extended) << 4;
    page.mc = 0b11;
    page.dpc = 0b11111;
    page.dps = config.protection;
    page.dlfeat = if config.deallocated_zeroes {
        dlfeat::READ_ZEROES
    } else {
        dlfeat::READ_NOT_REPORTED
    };
    if config.deac {
        page.dlfeat |= dlfeat::WRITE_ZEROES_DEALLOCATES;
    }
    let mut features = Nsfeat::empty();
    if let Some(atomic) = config.nawupf {
        features |= Nsfeat::ATOMICITY;
        page.nawun.set(atomic - 1);
        page.nawupf.set(atomic - 1);
        page.nacwu.set(atomic - 1);
    }
    if config.nabspf > 0 {
        page.nabsn.set(config.nabspf - 1);
        page.nabspf.set(config.nabspf - 1);
        page.nabo.set(config.nabo);
    }
    page.noiob.set(config.noiob);
    if config.npwg > 0 || config.npdg > 0 {
        features |= Nsfeat::OPTIMAL_PERFORMANCE;
        page.npwg.set(config.npwg.max(1) - 1);
        page.npwa.set(config.npwg.max(1) - 1);
        page.npdg.set(config.npdg.max(1) - 1);
        page.npda.set(config.npdg.max(1) - 1);
    }
    page.nsfeat = features.bits();
    page.mssrl.set(config.mssrl);
    page.mcl.set(config.mcl);
    page.msrc = config.msrc.max(1).wrapping_sub(1) as u8;
    page.nsattr = write_protected(namespace);
    page.nguid = config.nguid;
    page.eui64 = config.eui64;
    page
}
