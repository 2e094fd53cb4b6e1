//! Reservation commands (Base 7.2 to 7.5) and their data structures (Base 8.19).

use zerocopy::little_endian::{U16, U32, U64};

use super::{CommandError, bit, bits};
use crate::layout::sized;
use crate::opcode::io;
use crate::sqe::Sqe;

/// Reservation types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 2,
    WriteExclusiveRegistrantsOnly = 3,
    ExclusiveAccessRegistrantsOnly = 4,
    WriteExclusiveAllRegistrants = 5,
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrantsOnly,
            4 => Self::ExclusiveAccessRegistrantsOnly,
            5 => Self::WriteExclusiveAllRegistrants,
            6 => Self::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterAction {
    Register,
    Unregister,
    Replace,
}

/// The change of the persist-through-power-loss state (CPTPL).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PersistChange {
    Keep,
    /// Released and unregistered by a power cycle.
    Clear,
    /// Kept across power cycles.
    Set,
}

/// Reservation Register; its data is [`RegisterData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register {
    pub action: RegisterAction,
    /// IEKEY: the current key is not checked.
    pub ignore_existing_key: bool,
    pub persist: PersistChange,
}

impl Register {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let cdw10 = sqe.cdw10.get();
        let reserved = |field, value: u32| CommandError::Reserved {
            command: "Reservation Register",
            field,
            value: value.into(),
        };
        Ok(Self {
            action: match bits(cdw10, 0, 3) {
                0 => RegisterAction::Register,
                1 => RegisterAction::Unregister,
                2 => RegisterAction::Replace,
                value => return Err(reserved("RREGA", value)),
            },
            ignore_existing_key: bit(cdw10, 3),
            persist: match bits(cdw10, 30, 2) {
                0 => PersistChange::Keep,
                2 => PersistChange::Clear,
                3 => PersistChange::Set,
                value => return Err(reserved("CPTPL", value)),
            },
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::RESERVATION_REGISTER, cid, nsid);
        let persist = match self.persist {
            PersistChange::Keep => 0u32,
            PersistChange::Clear => 2,
            PersistChange::Set => 3,
        };
        sqe.cdw10 =
            U32::new(self.action as u32 | u32::from(self.ignore_existing_key) << 3 | persist << 30);
        sqe
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AcquireAction {
    Acquire,
    Preempt,
    PreemptAndAbort,
}

/// Reservation Acquire; its data is [`AcquireData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acquire {
    pub action: AcquireAction,
    pub ignore_existing_key: bool,
    pub kind: ReservationType,
}

impl Acquire {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let cdw10 = sqe.cdw10.get();
        Ok(Self {
            action: match bits(cdw10, 0, 3) {
                0 => AcquireAction::Acquire,
                1 => AcquireAction::Preempt,
                2 => AcquireAction::PreemptAndAbort,
                value => {
                    return Err(CommandError::Reserved {
                        command: "Reservation Acquire",
                        field: "RACQA",
                        value: value.into(),
                    });
                }
            },
            ignore_existing_key: bit(cdw10, 3),
            kind: reservation_type("Reservation Acquire", cdw10)?,
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::RESERVATION_ACQUIRE, cid, nsid);
        sqe.cdw10 = U32::new(
            self.action as u32 | u32::from(self.ignore_existing_key) << 3 | (self.kind as u32) << 8,
        );
        sqe
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseAction {
    Release,
    Clear,
}

/// Reservation Release; its data is the current key, 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    pub action: ReleaseAction,
    pub ignore_existing_key: bool,
    /// The type of the released reservation. Clear ignores it; then it may be `None`.
    pub kind: Option<ReservationType>,
}

impl Release {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let cdw10 = sqe.cdw10.get();
        let (action, kind) = match bits(cdw10, 0, 3) {
            0 => (
                ReleaseAction::Release,
                Some(reservation_type("Reservation Release", cdw10)?),
            ),
            1 => (
                ReleaseAction::Clear,
                ReservationType::from_u8(bits(cdw10, 8, 8) as u8),
            ),
            value => {
                return Err(CommandError::Reserved {
                    command: "Reservation Release",
                    field: "RRELA",
                    value: value.into(),
                });
            }
        };
        Ok(Self {
            action,
            ignore_existing_key: bit(cdw10, 3),
            kind,
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::RESERVATION_RELEASE, cid, nsid);
        sqe.cdw10 = U32::new(
            self.action as u32
                | u32::from(self.ignore_existing_key) << 3
                | self.kind.map_or(0, |kind| kind as u32) << 8,
        );
        sqe
    }
}

fn reservation_type(command: &'static str, cdw10: u32) -> Result<ReservationType, CommandError> {
    let value = bits(cdw10, 8, 8);
    ReservationType::from_u8(value as u8).ok_or_else(|| CommandError::Reserved {
        command,
        field: "RTYPE",
        value: value.into(),
    })
}

/// Reservation Report: requests a [`ReportHeader`] and the registrants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Bytes of the host's buffer.
    pub bytes: u64,
    /// EDS: 128-bit host identifiers ([`RegistrantExtended`]); mandatory over fabrics.
    pub extended: bool,
}

impl Report {
    pub fn parse(sqe: &Sqe) -> Self {
        Self {
            bytes: (u64::from(sqe.cdw10.get()) + 1) * 4,
            extended: bit(sqe.cdw11.get(), 0),
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::RESERVATION_REPORT, cid, nsid);
        sqe.cdw10 = U32::new((self.bytes / 4).saturating_sub(1) as u32);
        sqe.cdw11 = U32::new(self.extended.into());
        sqe
    }
}

sized! {
    /// Current and new key of a Register.
    16 pub struct RegisterData {
        pub crkey: U64,
        pub nrkey: U64,
    }
}

sized! {
    /// Current key, and the key to preempt, of an Acquire.
    16 pub struct AcquireData {
        pub crkey: U64,
        pub prkey: U64,
    }
}

sized! {
    /// The beginning of the data of a Report. In the extended form 40 reserved bytes follow.
    24 pub struct ReportHeader {
        /// Counts changes of registrations.
        pub generation: U32,
        /// 0 for no reservation.
        pub rtype: u8,
        pub regctl: U16,
        pub reserved7: [u8; 2],
        pub ptpls: u8,
        pub reserved10: [u8; 14],
    }
}

impl ReportHeader {
    /// Size with the reserved bytes of the extended form.
    pub const EXTENDED_SIZE: usize = 64;
}

sized! {
    /// A registrant with a 64-bit host identifier.
    24 pub struct Registrant {
        pub cntlid: U16,
        /// Bit 0: holds the reservation.
        pub rcsts: u8,
        pub reserved3: [u8; 5],
        pub hostid: [u8; 8],
        pub rkey: U64,
    }
}

sized! {
    /// A registrant with a 128-bit host identifier.
    64 pub struct RegistrantExtended {
        pub cntlid: U16,
        pub rcsts: u8,
        pub reserved3: [u8; 5],
        pub rkey: U64,
        pub hostid: [u8; 16],
        pub reserved32: [u8; 32],
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout() {
        assert_eq!(offset_of!(RegisterData, nrkey), 8);
        assert_eq!(offset_of!(AcquireData, prkey), 8);
        assert_eq!(offset_of!(ReportHeader, generation), 0);
        assert_eq!(offset_of!(ReportHeader, rtype), 4);
        assert_eq!(offset_of!(ReportHeader, regctl), 5);
        assert_eq!(offset_of!(ReportHeader, ptpls), 9);
        assert_eq!(offset_of!(Registrant, rcsts), 2);
        assert_eq!(offset_of!(Registrant, hostid), 8);
        assert_eq!(offset_of!(Registrant, rkey), 16);
        assert_eq!(offset_of!(RegistrantExtended, rcsts), 2);
        assert_eq!(offset_of!(RegistrantExtended, rkey), 8);
        assert_eq!(offset_of!(RegistrantExtended, hostid), 16);
        assert_eq!(offset_of!(RegistrantExtended, reserved32), 32);
    }

    /// Known dwords, and the reserved values of each field.
    #[test]
    fn dwords() {
        let with = |opcode, cdw10| {
            let mut sqe = Sqe::for_namespace(opcode, 1, 1);
            sqe.cdw10 = U32::new(cdw10);
            sqe
        };
        assert_eq!(
            Register::parse(&with(io::RESERVATION_REGISTER, 0xc000_000a)),
            Ok(Register {
                action: RegisterAction::Replace,
                ignore_existing_key: true,
                persist: PersistChange::Set,
            })
        );
        assert_eq!(
            Acquire::parse(&with(io::RESERVATION_ACQUIRE, 0x0301)),
            Ok(Acquire {
                action: AcquireAction::Preempt,
                ignore_existing_key: false,
                kind: ReservationType::WriteExclusiveRegistrantsOnly,
            })
        );
        assert_eq!(
            Release::parse(&with(io::RESERVATION_RELEASE, 1)),
            Ok(Release {
                action: ReleaseAction::Clear,
                ignore_existing_key: false,
                kind: None
            })
        );
        for (cdw10, field) in [(3, "RREGA"), (0x4000_0000, "CPTPL")] {
            let error = Register::parse(&with(io::RESERVATION_REGISTER, cdw10)).unwrap_err();
            assert!(matches!(error, CommandError::Reserved { field: f, .. } if f == field));
        }
        for (cdw10, field) in [(0x0103, "RACQA"), (0x0000, "RTYPE"), (0x0700, "RTYPE")] {
            let error = Acquire::parse(&with(io::RESERVATION_ACQUIRE, cdw10)).unwrap_err();
            assert!(matches!(error, CommandError::Reserved { field: f, .. } if f == field));
        }
        for (cdw10, field) in [(0x0102, "RRELA"), (0x0000, "RTYPE")] {
            let error = Release::parse(&with(io::RESERVATION_RELEASE, cdw10)).unwrap_err();
            assert!(matches!(error, CommandError::Reserved { field: f, .. } if f == field));
        }
    }

    proptest! {
        /// Every accepted command is parsed completely: it builds the same dword.
        #[test]
        fn round_trips(cdw10 in any::<u32>(), cdw11 in 0u32..2) {
            let mut sqe = Sqe::for_namespace(io::RESERVATION_REGISTER, 1, 1);
            sqe.cdw10 = U32::new(cdw10);
            sqe.cdw11 = U32::new(cdw11);
            if let Ok(register) = Register::parse(&sqe) {
                prop_assert_eq!(register.to_sqe(1, 1).cdw10.get(), cdw10 & 0xc000_000f);
            }
            if let Ok(acquire) = Acquire::parse(&sqe) {
                prop_assert_eq!(acquire.to_sqe(1, 1).cdw10.get(), cdw10 & 0xff0f);
            }
            if let Ok(release) = Release::parse(&sqe) {
                prop_assert_eq!(Release::parse(&release.to_sqe(1, 1)), Ok(release));
            }
            let report = Report::parse(&sqe);
            prop_assert_eq!(report.to_sqe(1, 1).cdw10.get(), cdw10);
            prop_assert_eq!(report.to_sqe(1, 1).cdw11.get(), cdw11);
        }
    }
}
