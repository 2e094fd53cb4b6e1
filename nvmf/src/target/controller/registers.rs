//! The controller's registers, reached through Property Get and Set.

use nacre_nvmf_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use nacre_nvmf_wire::registers::{Cap, Cc, Csts, Shutdown, Version, offset};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};

use crate::target::association::{Association, Phase};
use crate::target::config::TargetConfig;
use crate::target::subsystem::SubsystemKind;

/// CAP.TO: enabling takes no time, but a host divides by it; 500 ms units.
const READY_TIMEOUT: u64 = 30;

pub(crate) struct Registers {
    cap: Cap,
    cc: Cc,
    csts: Csts,
}

impl Registers {
    pub fn new(config: &TargetConfig, association: &Association) -> Registers {
        let css = match association.subsystem.kind {
            SubsystemKind::Nvm => Cap::CSS_NVM | Cap::CSS_IO_COMMAND_SETS,
            SubsystemKind::Discovery => Cap::CSS_NVM,
        };
        let cap = Cap(0)
            .with_mqes(u64::from(config.max_io_entries) - 1)
            .with_cqr(1)
            .with_to(READY_TIMEOUT)
            .with_css(css);
        Registers {
            cap,
            cc: Cc(0),
            csts: Csts(0),
        }
    }

    pub fn get(&self, sqe: &Sqe) -> Cqe {
        let cid = sqe.cid();
        let invalid = Cqe::new(cid, StatusCode::INVALID_FIELD.with_dnr());
        let Ok(get) = PropertyGet::parse(sqe) else {
            return invalid;
        };
        let value = match (get.offset, get.size) {
            (offset::CAP, PropertySize::Eight) => self.cap.0,
            (offset::VS, PropertySize::Four) => u64::from(Version::V2_0.0),
            (offset::CC, PropertySize::Four) => u64::from(self.cc.0),
            (offset::CSTS, PropertySize::Four) => u64::from(self.csts.0),
            (offset::NSSR, PropertySize::Four) => 0,
            _ => return invalid,
        };
        Cqe::success(cid).with_result(value)
    }

    /// The only register that a host writes is CC (Base 3.1.3.5).
    pub fn set(&mut self, sqe: &Sqe, association: &Association) -> Cqe {
        let cid = sqe.cid();
        let invalid = Cqe::new(cid, StatusCode::INVALID_FIELD.with_dnr());
        let Ok(set) = PropertySet::parse(sqe) else {
            return invalid;
        };
        if set.offset != offset::CC || set.size != PropertySize::Four {
            return invalid;
        }
        let new = Cc(set.value as u32);
        if new.is_enabled() && !self.cc.is_enabled() {
            if !acceptable(new) {
                tracing::warn!(
                    cntlid = association.cntlid,
                    cc = format_args!("{:#010x}", new.0),
                    "controller not enabled: CC asks for an unsupported command set, page or entry size"
                );
                self.csts = self.csts.with_cfs(1);
                return invalid;
            }
            self.csts = Csts(0).with_rdy(1);
            association.set_ready(true);
        } else if !new.is_enabled() && self.cc.is_enabled() {
            // A controller level reset: I/O queues go, the association stays.
            self.csts = Csts(0);
            association.set_ready(false);
        }
        if new.shutdown() != Shutdown::None && self.cc.shutdown() == Shutdown::None {
            // Completed commands are in the devices' care already; what is cached is flushed by the
            // host's own Flush, so shutting down has nothing to wait for.
            self.csts = self.csts.with_shst(Csts::SHST_COMPLETE);
        }
        self.cc = new;
        debug_assert!(association.phase() != Phase::Ready || self.csts.is_ready());
        Cqe::success(cid)
    }

    pub fn cc(&self) -> Cc {
        self.cc
    }
}

/// Entry sizes of zero are what a host writes that enables an admin-only (discovery) controller.
fn acceptable(cc: Cc) -> bool {
    let css = cc.css() == Cc::CSS_NVM
        || cc.css() == Cc::CSS_ALL_IO_COMMAND_SETS
        || cc.css() == Cc::CSS_ADMIN_ONLY;
    css && cc.mps() == 0
        && (cc.iosqes() == 6 || cc.iosqes() == 0)
        && (cc.iocqes() == 4 || cc.iocqes() == 0)
}
