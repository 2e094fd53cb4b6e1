//! The structures of log pages (Base 5.16): error information, SMART / health, firmware slots and
//! others.

pub mod ana;
pub mod discovery;

use zerocopy::little_endian::{U16, U32, U64};

use crate::layout::wire;
use crate::status::StatusCode;

/// Log page identifiers.
pub mod lid {
    pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
    pub const ERROR_INFORMATION: u8 = 0x01;
    pub const SMART_HEALTH: u8 = 0x02;
    pub const FIRMWARE_SLOT: u8 = 0x03;
    pub const CHANGED_NAMESPACE_LIST: u8 = 0x04;
    pub const COMMANDS_SUPPORTED_AND_EFFECTS: u8 = 0x05;
    pub const DEVICE_SELF_TEST: u8 = 0x06;
    pub const TELEMETRY_HOST: u8 = 0x07;
    pub const TELEMETRY_CONTROLLER: u8 = 0x08;
    pub const ENDURANCE_GROUP: u8 = 0x09;
    pub const ASYMMETRIC_NAMESPACE_ACCESS: u8 = 0x0c;
    pub const PERSISTENT_EVENT: u8 = 0x0d;
    pub const FEATURE_IDENTIFIERS_EFFECTS: u8 = 0x12;
    pub const DISCOVERY: u8 = 0x70;
    pub const RESERVATION_NOTIFICATION: u8 = 0x80;
    pub const SANITIZE_STATUS: u8 = 0x81;
}

wire! {
    /// Supported Log Pages (00h): the supported operations of each log page identifier.
    1024 bytes: pub struct SupportedLogPages {
        0 lids: [U32; 256],
    }
}

impl SupportedLogPages {
    /// The page is supported.
    pub const LSUPP: u32 = 1 << 0;
    /// An offset in the page may be given as an index.
    pub const IOS: u32 = 1 << 1;

    pub fn supporting(lids: &[u8]) -> Self {
        let mut page = Self::zeroed();
        for &lid in lids {
            page.lids[usize::from(lid)] = U32::new(Self::LSUPP);
        }
        page
    }

    pub fn is_supported(&self, lid: u8) -> bool {
        self.lids[usize::from(lid)].get() & Self::LSUPP != 0
    }
}

wire! {
    /// An entry of the Error Information log (01h), the newest first.
    64 bytes: pub struct ErrorInformation {
        /// Counts errors over the life of the controller; 0 in an entry that is not used.
        0 error_count: U64,
        8 sqid: U16,
        10 cid: U16,
        /// Status as in a completion: bit 0 is the phase tag.
        12 status_phase: U16,
        /// The byte (bits 7:0) and bit (bits 10:8) of the command at fault; FFFFh for none.
        14 parameter_error_location: U16,
        16 lba: U64,
        24 nsid: U32,
        28 vendor_specific: u8,
        29 trtype: u8,
        30 csi: u8,
        31 opcode: u8,
        32 command_specific: U64,
        40 trtype_specific: U16,
        42 reserved42: [u8; 21],
        63 log_page_version: u8,
    }
}

impl ErrorInformation {
    pub fn status(&self) -> StatusCode {
        StatusCode::from_field(self.status_phase.get() >> 1)
    }
}

wire! {
    /// SMART / Health Information (02h).
    512 bytes: pub struct SmartHealth {
        0 critical_warning: u8,
        /// Kelvin.
        1 composite_temperature: U16,
        /// Percent, like the threshold and `percentage_used`.
        3 available_spare: u8,
        4 available_spare_threshold: u8,
        5 percentage_used: u8,
        6 endurance_group_critical_warning: u8,
        7 reserved7: [u8; 25],
        /// Data units of 1000 * 512 bytes, rounded up. This counter and those that follow have
        /// 128 bits.
        32 data_units_read: [U64; 2],
        48 data_units_written: [U64; 2],
        64 host_read_commands: [U64; 2],
        80 host_write_commands: [U64; 2],
        /// Minutes.
        96 controller_busy_time: [U64; 2],
        112 power_cycles: [U64; 2],
        128 power_on_hours: [U64; 2],
        144 unsafe_shutdowns: [U64; 2],
        160 media_errors: [U64; 2],
        176 error_log_entries: [U64; 2],
        /// Minutes.
        192 warning_temperature_time: U32,
        196 critical_temperature_time: U32,
        /// Kelvin; 0 for a sensor that is not there.
        200 temperature_sensors: [U16; 8],
        216 thermal_transition_count1: U32,
        220 thermal_transition_count2: U32,
        224 thermal_time1: U32,
        228 thermal_time2: U32,
        232 reserved232: [u8; 280],
    }
}

bitflags::bitflags! {
    /// Critical warnings, in [`SmartHealth`] and in the asynchronous event configuration.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct CriticalWarning: u8 {
        const SPARE_LOW = 1 << 0;
        const TEMPERATURE = 1 << 1;
        const RELIABILITY_DEGRADED = 1 << 2;
        const READ_ONLY = 1 << 3;
        const VOLATILE_BACKUP_FAILED = 1 << 4;
        const PERSISTENT_MEMORY_UNRELIABLE = 1 << 5;
    }
}

impl SmartHealth {
    /// A 128-bit counter.
    pub fn counter(value: u128) -> [U64; 2] {
        [U64::new(value as u64), U64::new((value >> 64) as u64)]
    }

    /// A data-units counter: thousands of 512 bytes, rounded up.
    pub fn data_units(bytes: u128) -> [U64; 2] {
        Self::counter(bytes.div_ceil(512_000))
    }

    pub fn counter_value(counter: &[U64; 2]) -> u128 {
        u128::from(counter[0].get()) | u128::from(counter[1].get()) << 64
    }
}

wire! {
    /// Firmware Slot Information (03h).
    512 bytes: pub struct FirmwareSlots {
        /// Bits 2:0 the active slot, bits 6:4 the one after the next reset (0 for no change).
        0 afi: u8,
        1 reserved1: [u8; 7],
        /// Revision of slots 1 to 7, in ASCII; zeroes for an empty one.
        8 frs: [[u8; 8]; 7],
        64 reserved64: [u8; 448],
    }
}

/// Changed Namespace List (04h): up to 1024 identifiers in increasing order.
pub mod changed_namespaces {
    pub const SIZE: usize = 4096;
    pub const MAX_ENTRIES: usize = 1024;
    /// The only entry when more than 1024 namespaces changed.
    pub const TOO_MANY: u32 = 0xffff_ffff;
}

wire! {
    /// Commands Supported and Effects (05h).
    4096 bytes: pub struct CommandEffects {
        0 admin: [U32; 256],
        1024 io: [U32; 256],
        2048 reserved2048: [u8; 2048],
    }
}

bitflags::bitflags! {
    /// The possible effects of a command.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Effects: u32 {
        const CSUPP = 1 << 0;
        /// Logical block content change.
        const LBCC = 1 << 1;
        /// Namespace capability change.
        const NCC = 1 << 2;
        /// Namespace inventory change.
        const NIC = 1 << 3;
        /// Controller capability change.
        const CCC = 1 << 4;
        const UUID_SELECTION = 1 << 19;
        /// Scope: one namespace.
        const NAMESPACE_SCOPE = 1 << 20;
        const CONTROLLER_SCOPE = 1 << 21;
    }
}

wire! {
    /// The header of the Telemetry Host-Initiated (07h) and Controller-Initiated (08h) logs. Blocks
    /// of 512 bytes follow, numbered from 1.
    512 bytes: pub struct TelemetryHeader {
        0 lid: u8,
        1 reserved1: [u8; 4],
        5 ieee: [u8; 3],
        /// The last block of the areas 1 to 3, which all begin at block 1; 0: no data.
        8 last_blocks: [U16; 3],
        14 reserved14: [u8; 2],
        16 area4_last_block: U32,
        20 reserved20: [u8; 360],
        /// Page 07h: its scope.
        380 host_scope: u8,
        /// Page 07h: counts captures. Page 08h: its scope.
        381 captures: u8,
        382 controller_data_available: u8,
        383 controller_captures: u8,
        384 reason: [u8; 128],
    }
}

impl TelemetryHeader {
    pub const BLOCK: usize = 512;
    /// Log specific parameter of page 07h: capture new data.
    pub const LSP_CREATE: u8 = 1 << 0;
    pub const SCOPE_CONTROLLER: u8 = 1;
}

wire! {
    /// Reservation Notification (80h).
    64 bytes: pub struct ReservationNotification {
        /// Counts pages since the last reset; 0 when there is none.
        0 log_page_count: U64,
        /// The notification type, such as [`ReservationNotification::PREEMPTED`].
        8 log_page_type: u8,
        /// Pages not yet read, not counting this one; 255 for that or more.
        9 available: u8,
        10 reserved10: [u8; 2],
        12 nsid: U32,
        16 reserved16: [u8; 48],
    }
}

impl ReservationNotification {
    pub const EMPTY: u8 = 0;
    pub const REGISTRATION_PREEMPTED: u8 = 1;
    pub const RELEASED: u8 = 2;
    pub const PREEMPTED: u8 = 3;
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn supported_pages() {
        let page = SupportedLogPages::supporting(&[lid::DISCOVERY, lid::SMART_HEALTH]);
        assert_eq!(page.as_bytes()[0x70 * 4..][..4], [1, 0, 0, 0]);
        assert!(page.is_supported(lid::SMART_HEALTH));
        assert!(!page.is_supported(lid::ERROR_INFORMATION));
    }

    #[test]
    fn counters() {
        assert_eq!(
            SmartHealth::counter_value(&SmartHealth::data_units(512_001)),
            2
        );
        let large = u128::MAX - 5;
        assert_eq!(
            SmartHealth::counter_value(&SmartHealth::counter(large)),
            large
        );
        assert_eq!(SmartHealth::counter(1 << 64).as_bytes()[8], 1);
    }

    #[test]
    fn error_status() {
        let mut entry = ErrorInformation::zeroed();
        entry.status_phase = U16::new(StatusCode::INVALID_FIELD.with_dnr().field() << 1 | 1);
        assert_eq!(entry.status(), StatusCode::INVALID_FIELD.with_dnr());
    }
}
