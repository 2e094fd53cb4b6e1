//! Identify (Base 5.17, NVM 4.1.5): builds the data structures of the controller and its
//! namespaces.
//!
//! The announced limits are those of [`IoLimits`], which I/O queues enforce. Sizes and features are
//! those of the bdev's present state.

use std::sync::Arc;

use nacre_bdev::{Op, Support};
use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::identify::controller::{
    Anacap, Aocs, Cmic, Ctratt, FCATT_STATIC, FUSES_COMPARE_AND_WRITE, Lpa, OFCS_DISCONNECT, Oncs,
    Sgls, cntrltype, vwc,
};
use nacre_nvmf_wire::identify::namespace::{
    NMIC_SHARED, NSATTR_WRITE_PROTECTED, NSTAT_READY, Nsfeat, Rescap, dlfeat,
};
use nacre_nvmf_wire::identify::{
    ControllerList, IdentifyController, IdentifyNamespace, IndependentNamespace, IoCommandSets,
    LbaFormat, NamespaceList, NsIdDescriptor, NvmController, NvmNamespace, cns, csi, descriptors,
    nsid, write_ascii,
};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_nvmf_wire::{Sqe, StatusCode};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::{Controller, events, registers};
use crate::subsystems::config::IoLimits;
use crate::subsystems::namespace::Namespace;
use crate::subsystems::subsystem_config::ControllerModel;

/// WCTEMP, a usual value for a drive. There is no sensor, but the field must not be zero (Base
/// figure 276).
pub(super) const WARNING_TEMPERATURE_KELVIN: u16 = 343;
const CRITICAL_TEMPERATURE_KELVIN: u16 = 373;

/// ANATT: longest time in the ANA Change state, in seconds. Hosts fail the path after it.
const ANA_TRANSITION_SECONDS: u8 = 10;

/// CNS 08h, NSFEAT: this namespace has no volatile write cache, although VWC reports one for the
/// controller.
const NO_VOLATILE_CACHE: u8 = 1 << 5;

const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: StatusCode = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// Copies a structure to the start of the host's data.
pub(super) fn put(structure: &(impl IntoBytes + Immutable + ?Sized), data: &mut [u8]) {
    for (to, from) in data.iter_mut().zip(structure.as_bytes()) {
        *to = *from;
    }
}

impl Controller {
    pub(super) fn identify(&self, sqe: &Sqe, data: &mut [u8]) -> Result<(), StatusCode> {
        let command = Identify::parse(sqe);
        let nsid = sqe.nsid();
        if command.cns == cns::CONTROLLER {
            put(&self.controller(), data);
            return Ok(());
        }
        if self.is_discovery() {
            return Err(INVALID);
        }
        let for_command_set = matches!(
            command.cns,
            cns::IO_NAMESPACE | cns::IO_CONTROLLER | cns::IO_ACTIVE_NAMESPACES
        );
        if for_command_set && command.csi != csi::NVM {
            return Err(StatusCode::INVALID_IO_COMMAND_SET.with_dnr());
        }
        match command.cns {
            cns::NAMESPACE | cns::ALLOCATED_NAMESPACE => {
                if let Some(namespace) = self.namespace(nsid)? {
                    put(&self.nvm_namespace(&namespace), data);
                }
            }
            // Every namespace that this host may access is attached to its controller.
            cns::ACTIVE_NAMESPACES | cns::IO_ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES => {
                put(&self.namespace_list(nsid)?, data);
            }
            cns::NAMESPACE_DESCRIPTORS => {
                let namespace = self.namespace(nsid)?.ok_or(INVALID_NAMESPACE)?;
                write_descriptors(&namespace, data);
            }
            cns::IO_NAMESPACE => {
                // The target supports no feature of this structure, so all its fields are zero.
                self.namespace(nsid)?;
                put(&NvmNamespace::zeroed(), data);
            }
            cns::IO_CONTROLLER => put(&io_controller(&self.limits), data),
            cns::INDEPENDENT_NAMESPACE => {
                if let Some(namespace) = self.namespace(nsid)? {
                    let ana = self.ana_reporting();
                    put(&independent_namespace(&namespace, ana), data);
                }
            }
            cns::ATTACHED_CONTROLLERS => {
                self.namespace(nsid)?.ok_or(INVALID_NAMESPACE)?;
                let controllers = self.subsystem.controllers();
                let attached = controllers.iter().filter(|c| c.view().get(nsid).is_some());
                let list = ControllerList::from_id(command.cntid, attached.map(|c| c.cntlid));
                put(&list, data);
            }
            cns::CONTROLLERS => put(&self.controllers(command.cntid), data),
            cns::IO_COMMAND_SETS => put(&IoCommandSets::nvm_only(), data),
            _ => return Err(INVALID),
        }
        Ok(())
    }

    /// The controller list (CNS 13h), including static controllers without an association.
    fn controllers(&self, from: u16) -> ControllerList {
        let subsystem = &self.subsystem;
        let config = &subsystem.config;
        match config.controller_model {
            ControllerModel::Static => {
                ControllerList::from_id(from, config.min_cntlid..=config.max_cntlid)
            }
            ControllerModel::Dynamic => {
                let controllers = subsystem.controllers();
                ControllerList::from_id(from, controllers.iter().map(|c| c.cntlid))
            }
        }
    }

    fn nvm_namespace(&self, namespace: &Namespace) -> IdentifyNamespace {
        let mut id = nvm_namespace(namespace, &self.limits, self.ana_reporting());
        let access = self.association.view().access(namespace.nsid);
        if matches!(
            access,
            Some(AnaState::Inaccessible | AnaState::PersistentLoss)
        ) {
            // The number of used blocks is unknown. Report size and capacity: a host ignores a
            // namespace of size zero.
            id.nuse = U64::new(0);
        }
        id
    }

    fn ana_reporting(&self) -> bool {
        self.subsystem.config.ana_reporting
    }

    /// The active namespace with this NSID; `None`: the NSID is valid but inactive. The error: the
    /// NSID is invalid.
    fn namespace(&self, nsid: u32) -> Result<Option<Arc<Namespace>>, StatusCode> {
        if nsid == 0 || nsid > self.subsystem.config.max_namespaces {
            return Err(INVALID_NAMESPACE);
        }
        Ok(self.association.view().get(nsid).cloned())
    }

    fn namespace_list(&self, after: u32) -> Result<NamespaceList, StatusCode> {
        if after >= nsid::MAX {
            return Err(INVALID_NAMESPACE);
        }
        let view = self.association.view();
        Ok(NamespaceList::above(after, view.iter().map(|n| n.nsid)))
    }

    /// Identify Controller (CNS 01h).
    fn controller(&self) -> IdentifyController {
        let (config, subsystem) = (&self.target.config, &self.subsystem);
        let mut id = IdentifyController::zeroed();
        id.vid = U16::new(config.vendor_id);
        id.ssvid = U16::new(config.vendor_id);
        write_ascii(&subsystem.config.serial_number, &mut id.sn);
        write_ascii(&subsystem.config.model_number, &mut id.mn);
        write_ascii(&config.firmware_revision, &mut id.fr);
        id.mdts = IdentifyController::mdts_for(u64::from(self.limits.max_transfer_bytes), 4096);
        id.cntlid = U16::new(self.association.cntlid);
        id.ver = U32::new(registers::VERSION.0);
        id.oaes = U32::new(self.events.optional().bits());
        id.ctratt = U32::new((Ctratt::HOST_ID_128 | Ctratt::TRAFFIC_BASED_KEEP_ALIVE).bits());
        id.acl = config.aborts.max(1) - 1;
        id.aerl = events::limit_of(config.async_event_requests) as u8 - 1;
        // One slot, read only.
        id.frmw = 1 << 1 | 1;
        id.lpa = (Lpa::COMMAND_EFFECTS | Lpa::EXTENDED_DATA | Lpa::SUPPORTED_PAGES).bits();
        id.elpe = config.error_log_entries.max(1) - 1;
        let limits = self
            .target
            .listener_limits(self.caps.kind, self.association.listener);
        id.kas = U16::new(limits.keep_alive_granularity.max(1));
        id.maxcmd = U16::new(limits.max_io_entries);
        id.subnqn = if self.is_discovery() {
            self.target.discovery_nqn().to_field()
        } else {
            subsystem.nqn().to_field()
        };
        id.sgls = U32::new(self.sgls().bits());
        id.set_in_capsule_bytes(self.caps.in_capsule_bytes);
        id.msdbd = self.caps.max_sgl_descriptors;
        if self.is_discovery() {
            id.cntrltype = cntrltype::DISCOVERY;
            // DCTYPE 1: a direct discovery controller.
            id.dctype = 1;
            return id;
        }
        id.cntrltype = cntrltype::IO;
        id.lpa |= Lpa::TELEMETRY.bits();
        self.io_controller_fields(&mut id);
        id
    }

    /// The fields of Identify Controller that only I/O controllers have.
    fn io_controller_fields(&self, id: &mut IdentifyController) {
        let (config, subsystem) = (&self.target.config, &self.subsystem);
        let [first, second, third] = config.command_retry_delay;
        (id.crdt1, id.crdt2, id.crdt3) = (U16::new(first), U16::new(second), U16::new(third));
        // The same value as Linux's target.
        id.rab = 6;
        let mut cmic = Cmic::MULTIPLE_PORTS | Cmic::MULTIPLE_CONTROLLERS;
        cmic.set(Cmic::ANA_REPORTING, self.ana_reporting());
        id.cmic = cmic.bits();
        id.wctemp = U16::new(WARNING_TEMPERATURE_KELVIN);
        id.cctemp = U16::new(CRITICAL_TEMPERATURE_KELVIN);
        id.ofcs = U16::new(OFCS_DISCONNECT);
        if subsystem.config.controller_model == ControllerModel::Static {
            id.fcatt = FCATT_STATIC;
        }
        id.sqes = 0x66;
        id.cqes = 0x44;
        let namespaces = subsystem.config.max_namespaces;
        id.nn = U32::new(namespaces);
        id.mnan = U32::new(namespaces);
        if self.ana_reporting() {
            let states = Anacap::OPTIMIZED
                | Anacap::NON_OPTIMIZED
                | Anacap::INACCESSIBLE
                | Anacap::PERSISTENT_LOSS
                | Anacap::CHANGE;
            id.anacap = states.bits();
            id.anatt = ANA_TRANSITION_SECONDS;
            id.anagrpmax = U32::new(namespaces);
            id.nanagrpid = U32::new(namespaces);
        }
        let oncs = Oncs::COMPARE
            | Oncs::DATASET_MANAGEMENT
            | Oncs::WRITE_ZEROES
            | Oncs::SAVE_SELECT
            | Oncs::RESERVATIONS
            | Oncs::VERIFY
            | Oncs::COPY;
        id.oncs = U16::new(oncs.bits());
        id.fuses = U16::new(FUSES_COMPARE_AND_WRITE);
        // One block (0's based), which every supporting device allows. Namespaces are added later,
        // so larger values are only in NACWU.
        id.acwu = U16::new(0);
        // Hosts read VWC once, to decide whether to send Flush. A namespace with a volatile cache
        // may be added later, so always report one. CNS 08h identifies namespaces without a cache.
        id.vwc = vwc::PRESENT | vwc::FLUSH_BROADCAST_YES;
        // Copy descriptor format 0h.
        id.ocfs = U16::new(1);
    }

    fn sgls(&self) -> Sgls {
        let mut sgls = Sgls::SUPPORTED;
        sgls.set(Sgls::OFFSET, self.caps.in_capsule_bytes > 0);
        sgls.set(Sgls::KEYED_DATA_BLOCK, self.caps.keyed_sgl);
        sgls.set(Sgls::TRANSPORT_DATA_BLOCK, !self.caps.keyed_sgl);
        sgls
    }
}

/// Identify Controller for the NVM command set (CNS 06h).
fn io_controller(limits: &IoLimits) -> NvmController {
    let mut id = NvmController::zeroed();
    id.vsl = IdentifyController::mdts_for(limits.verify_bytes, 4096);
    id.wzsl = IdentifyController::mdts_for(limits.write_zeroes_bytes, 4096);
    // OACS bit 9 stays clear: it announces the other actions of Get LBA Status, too.
    id.aocs = U16::new(Aocs::ALLOCATED_BLOCKS.bits());
    // DMRSL and DMSL are 0, no limit: ranges may have any 32-bit length.
    id.dmrl = limits.dsm_ranges as u8;
    id
}

/// Identify Namespace (CNS 00h).
fn nvm_namespace(namespace: &Namespace, copy: &IoLimits, ana: bool) -> IdentifyNamespace {
    let (geometry, limits) = (namespace.geometry(), namespace.limits());
    let mut id = IdentifyNamespace::zeroed();
    let mut nsfeat = Nsfeat::OPTIMAL_PERFORMANCE;
    id.nmic = NMIC_SHARED;
    id.mssrl = U16::new(copy.copy_blocks as u16);
    id.mcl = U32::new(copy.copy_blocks);
    id.msrc = copy.copy_ranges as u8 - 1;
    id.nsze = U64::new(geometry.blocks);
    id.ncap = U64::new(geometry.blocks);
    // A device that has space for all its blocks, or does not know, uses all of them. The capacity
    // of a thin one is its size, too: hosts may write each block.
    let allocated = namespace.backing.bdev.allocated_blocks();
    let nuse = allocated.unwrap_or(geometry.blocks).min(geometry.blocks);
    id.nuse = U64::new(nuse);
    nsfeat.set(Nsfeat::THIN_PROVISIONING, allocated.is_some());
    id.nvmcap[0] = U64::new(geometry.bytes());
    id.lbaf[0] = LbaFormat::new(geometry.block_size, 0);

    let can = |op| namespace.backing.bdev.supports(op) != Support::No;
    if (limits.unmap_zeroes || limits.zeroes_deallocate) && can(Op::Unmap) {
        id.dlfeat = dlfeat::READ_ZEROES;
        if can(Op::WriteZeroes) {
            id.dlfeat |= dlfeat::WRITE_ZEROES_DEALLOCATES;
        }
    }
    if limits.atomic_blocks > 1 || limits.compare_and_write_blocks > 1 {
        nsfeat |= Nsfeat::ATOMICITY;
        let atomic = less_one(limits.atomic_blocks);
        (id.nawun, id.nawupf) = (atomic, atomic);
        id.nacwu = less_one(limits.compare_and_write_blocks);
    }
    id.nsfeat = nsfeat.bits();

    let physical = (geometry.physical_block_size / geometry.block_size).max(1);
    (id.npwg, id.npwa) = (less_one(physical), less_one(physical));
    id.npdg = less_one(limits.unmap_granularity_blocks);
    id.npda = less_one(limits.unmap_alignment_blocks);
    let boundary = limits.optimal_boundary_blocks;
    let wishes = [limits.optimal_write_blocks, boundary];
    let fits = |blocks: &u32| *blocks != 0 && blocks.is_multiple_of(physical);
    let optimal = wishes.into_iter().find(fits).unwrap_or(physical);
    id.nows = less_one(optimal);
    // Report 0 (none) for a value that does not fit the field.
    id.noiob = U16::new(u16::try_from(boundary).unwrap_or(0));

    id.rescap = reservation_capabilities(namespace);
    id.nguid = namespace.ids.nguid;
    id.eui64 = namespace.ids.eui64;
    id.anagrpid = U32::new(if ana { namespace.ana_group() } else { 0 });
    id.nsattr = if limits.read_only {
        NSATTR_WRITE_PROTECTED
    } else {
        0
    };
    id
}

/// RESCAP: all six reservation types, and Ignore Existing Key for Register only. Persist Through
/// Power Loss depends on the namespace.
const EVERY_RESERVATION: Rescap = Rescap::all().difference(Rescap::PERSIST_THROUGH_POWER_LOSS);

fn reservation_capabilities(namespace: &Namespace) -> u8 {
    let mut rescap = EVERY_RESERVATION;
    let persists = namespace.reservation.can_persist();
    rescap.set(Rescap::PERSIST_THROUGH_POWER_LOSS, persists);
    rescap.bits()
}

/// A 0's based block count, limited to the field's maximum.
fn less_one(blocks: u32) -> U16 {
    U16::new(u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX))
}

/// I/O Command Set Independent Identify Namespace (CNS 08h).
fn independent_namespace(namespace: &Namespace, ana: bool) -> IndependentNamespace {
    let limits = namespace.limits();
    let mut id = IndependentNamespace::zeroed();
    id.nsfeat = if limits.volatile_cache {
        0
    } else {
        NO_VOLATILE_CACHE
    };
    id.nmic = NMIC_SHARED;
    id.rescap = reservation_capabilities(namespace);
    id.anagrpid = U32::new(if ana { namespace.ana_group() } else { 0 });
    id.nsattr = if limits.read_only {
        NSATTR_WRITE_PROTECTED
    } else {
        0
    };
    id.nstat = NSTAT_READY;
    id
}

/// Namespace identification descriptors (CNS 03h).
fn write_descriptors(namespace: &Namespace, data: &mut [u8]) {
    let ids = &namespace.ids;
    let mut names = arrayvec::ArrayVec::<NsIdDescriptor, 4>::new();
    if ids.eui64 != [0; 8] {
        names.push(NsIdDescriptor::Eui64(ids.eui64));
    }
    if ids.nguid != [0; 16] {
        names.push(NsIdDescriptor::Nguid(ids.nguid));
    }
    names.push(NsIdDescriptor::Uuid(ids.uuid));
    names.push(NsIdDescriptor::Csi(csi::NVM));
    let fits = descriptors::write(&names, data);
    debug_assert!(fits.is_ok(), "four names fit in 4096 bytes");
}
