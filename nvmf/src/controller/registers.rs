//! The controller's registers (CAP, VS, CC, CSTS, CRTO; NSSR reads as zero), accessed with Property
//! Get and Property Set (Base 3.1.3, 6.5, 6.6).

use nacre_nvmf_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use nacre_nvmf_wire::registers::{Cap, Cc, Crto, Csts, Shutdown, Version, offset};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};

use crate::subsystems::association::{Association, Phase};
use crate::subsystems::config::QueueLimits;
use crate::subsystems::subsystem_config::SubsystemKind;

/// CAP.TO in units of 500 ms. Disabling waits for I/O in the devices; enabling is immediate.
const READY_TIMEOUT: u64 = 30;

/// The version in VS and Identify Controller.
pub(super) const VERSION: Version = Version::V2_0;

pub(crate) struct Registers {
    cap: Cap,
    cc: Cc,
    csts: Csts,
    /// CC.EN is 0, but CSTS.RDY is still 1 because I/O queues are being deleted.
    disabling: bool,
}

/// The work that a register write causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Nothing,
    /// CC.EN changed to 0: a Controller Level Reset.
    Disabled,
}

impl Registers {
    pub(super) fn new(limits: &QueueLimits, kind: SubsystemKind) -> Self {
        let css = match kind {
            SubsystemKind::Nvm => Cap::CSS_NVM | Cap::CSS_IO_COMMAND_SETS,
            SubsystemKind::Discovery => Cap::CSS_NVM,
        };
        let cap = Cap(0)
            .with_mqes(u64::from(limits.max_io_entries) - 1)
            .with_cqr(1)
            .with_to(READY_TIMEOUT)
            .with_css(css)
            .with_crwms(1);
        Self {
            cap,
            cc: Cc(0),
            csts: Csts(0),
            disabling: false,
        }
    }

    pub(super) fn get(&mut self, sqe: &Sqe, association: &Association) -> Cqe {
        let cid = sqe.cid();
        let invalid = Cqe::new(cid, StatusCode::INVALID_FIELD.with_dnr());
        let Ok(get) = PropertyGet::parse(sqe) else {
            return invalid;
        };
        self.finish_disabling(association);
        let value = match (get.offset, get.size) {
            (offset::CAP, PropertySize::Eight) => self.cap.0,
            (offset::VS, PropertySize::Four) => u64::from(VERSION.0),
            (offset::CC, PropertySize::Four) => u64::from(self.cc.0),
            (offset::CSTS, PropertySize::Four) => u64::from(self.csts.0),
            (offset::NSSR, PropertySize::Four) => 0,
            (offset::CRTO, PropertySize::Four) => {
                u64::from(Crto(0).with_crwmt(READY_TIMEOUT as u32).0)
            }
            _ => return invalid,
        };
        Cqe::success(cid).with_result(value)
    }

    /// Executes Property Set. Only CC can be written (Base 3.1.3.5).
    pub(super) fn set(
        &mut self,
        sqe: &Sqe,
        association: &Association,
    ) -> Result<Written, StatusCode> {
        let invalid = StatusCode::INVALID_FIELD.with_dnr();
        let set = PropertySet::parse(sqe).map_err(|_| invalid)?;
        if set.offset != offset::CC || set.size != PropertySize::Four {
            return Err(invalid);
        }
        let new = Cc(set.value as u32);
        let mut written = Written::Nothing;
        self.finish_disabling(association);
        if new.is_enabled() && !self.cc.is_enabled() {
            if self.disabling {
                // The old I/O queues still have commands in devices. Hosts must wait for CSTS.RDY
                // 0.
                return Err(StatusCode::COMMAND_SEQUENCE_ERROR);
            }
            if !self.acceptable(new) {
                tracing::warn!(
                    cntlid = association.cntlid,
                    cc = format_args!("{:#010x}", new.0),
                    "controller not enabled: CC asks for an unsupported command set, page or entry size"
                );
                self.csts = self.csts.with_cfs(1);
                return Err(invalid);
            }
            self.csts = Csts(0).with_rdy(1);
            association.set_ready(true);
        } else if !new.is_enabled() && self.cc.is_enabled() {
            // A Controller Level Reset deletes the I/O queues; the association stays.
            association.set_ready(false);
            self.csts = Csts(0).with_rdy(1);
            self.disabling = true;
            self.finish_disabling(association);
            written = Written::Disabled;
        }
        if new.shutdown() != Shutdown::None && self.cc.shutdown() == Shutdown::None {
            // A shutdown completes immediately: completed writes are in the devices, and hosts
            // flush caches with Flush.
            self.csts = self.csts.with_shst(Csts::SHST_COMPLETE);
        }
        self.cc = new;
        Ok(written)
    }

    /// Clears CSTS.RDY once the I/O queues are deleted and the devices have completed their
    /// commands. So an old write cannot take effect after a write of a new queue.
    fn finish_disabling(&mut self, association: &Association) {
        let admin_only = || association.queues().iter().all(|queue| queue.qid == 0);
        if self.disabling && admin_only() {
            self.disabling = false;
            self.csts = self.csts.with_rdy(0);
        }
        debug_assert!(association.phase() != Phase::Ready || self.csts.is_ready());
    }

    /// True if CC is valid. Entry sizes of zero are accepted, because hosts of discovery
    /// controllers may write them.
    fn acceptable(&self, cc: Cc) -> bool {
        let css = match cc.css() {
            Cc::CSS_NVM => self.cap.css() & Cap::CSS_NVM != 0,
            Cc::CSS_ALL_IO_COMMAND_SETS => self.cap.css() & Cap::CSS_IO_COMMAND_SETS != 0,
            // A host may use only the admin command set of an I/O controller.
            Cc::CSS_ADMIN_ONLY => true,
            _ => false,
        };
        css && cc.mps() == 0
            && cc.ams() == 0
            && (cc.iosqes() == 6 || cc.iosqes() == 0)
            && (cc.iocqes() == 4 || cc.iocqes() == 0)
    }
}
