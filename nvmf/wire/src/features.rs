//! Features (Base 5.27): identifiers, and the layout of their values.

use zerocopy::little_endian::U32;

use crate::layout::wire;

/// Feature identifiers.
pub mod fid {
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const LBA_RANGE_TYPE: u8 = 0x03;
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    pub const INTERRUPT_VECTOR_CONFIGURATION: u8 = 0x09;
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    pub const ASYNC_EVENT_CONFIGURATION: u8 = 0x0b;
    pub const AUTONOMOUS_POWER_STATE_TRANSITION: u8 = 0x0c;
    pub const HOST_MEMORY_BUFFER: u8 = 0x0d;
    pub const TIMESTAMP: u8 = 0x0e;
    pub const KEEP_ALIVE_TIMER: u8 = 0x0f;
    pub const HOST_BEHAVIOR_SUPPORT: u8 = 0x16;
    pub const IO_COMMAND_SET_PROFILE: u8 = 0x19;
    pub const SOFTWARE_PROGRESS_MARKER: u8 = 0x80;
    pub const HOST_IDENTIFIER: u8 = 0x81;
    pub const RESERVATION_NOTIFICATION_MASK: u8 = 0x82;
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
    pub const NAMESPACE_WRITE_PROTECTION: u8 = 0x84;
}

bitflags::bitflags! {
    /// The result of Get Features with SEL "supported capabilities".
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Capabilities: u32 {
        const SAVEABLE = 1 << 0;
        const NAMESPACE_SPECIFIC = 1 << 1;
        const CHANGEABLE = 1 << 2;
    }
}

/// Arbitration (01h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Arbitration {
    /// Commands per turn, as a power of two; 7: no limit.
    pub burst: u8,
    /// Weights of the priority classes, 0's based.
    pub low: u8,
    pub medium: u8,
    pub high: u8,
}

impl Arbitration {
    pub const fn from_dword(dword: u32) -> Self {
        let [burst, low, medium, high] = dword.to_le_bytes();
        Self {
            burst: burst & 0b111,
            low,
            medium,
            high,
        }
    }

    pub const fn dword(self) -> u32 {
        u32::from_le_bytes([self.burst & 0b111, self.low, self.medium, self.high])
    }
}

/// Power Management (02h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PowerManagement {
    pub power_state: u8,
    pub workload_hint: u8,
}

impl PowerManagement {
    pub const fn from_dword(dword: u32) -> Self {
        let low = dword as u8;
        Self {
            power_state: low & 0x1f,
            workload_hint: low >> 5,
        }
    }

    pub const fn dword(self) -> u32 {
        (self.power_state & 0x1f | self.workload_hint << 5) as u32
    }
}

/// Temperature Threshold (04h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TemperatureThreshold {
    pub kelvin: u16,
    /// 0 composite, 1 to 8 a sensor, Fh all of them (Set Features).
    pub sensor: u8,
    /// THSEL: an under-temperature threshold instead of an over-temperature threshold.
    pub under: bool,
}

impl TemperatureThreshold {
    pub const fn from_dword(dword: u32) -> Self {
        Self {
            kelvin: dword as u16,
            sensor: (dword >> 16) as u8 & 0xf,
            under: dword >> 20 & 0b11 == 1,
        }
    }

    pub const fn dword(self) -> u32 {
        self.kelvin as u32 | ((self.sensor & 0xf) as u32) << 16 | (self.under as u32) << 20
    }
}

/// Error Recovery (05h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ErrorRecovery {
    /// TLER, in units of 100 ms; 0: no limit.
    pub time_limit: u16,
    /// DULBE: reading a deallocated block is an error.
    pub deallocated_error: bool,
}

impl ErrorRecovery {
    pub const fn from_dword(dword: u32) -> Self {
        Self {
            time_limit: dword as u16,
            deallocated_error: dword >> 16 & 1 != 0,
        }
    }

    pub const fn dword(self) -> u32 {
        self.time_limit as u32 | (self.deallocated_error as u32) << 16
    }
}

/// Volatile Write Cache (06h): bit 0 enables it.
pub const VOLATILE_WRITE_CACHE_ENABLE: u32 = 1;

/// Number of Queues (07h): the requested number, or the granted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NumberOfQueues {
    /// Counts, 1 to 65535; 0's based in the dword.
    pub submission: u32,
    pub completion: u32,
}

impl NumberOfQueues {
    /// `None` for the reserved FFFFh, which a controller refuses with Invalid Field.
    pub const fn from_dword(dword: u32) -> Option<Self> {
        let (submission, completion) = (dword & 0xffff, dword >> 16);
        if submission == 0xffff || completion == 0xffff {
            return None;
        }
        Some(Self {
            submission: submission + 1,
            completion: completion + 1,
        })
    }

    pub const fn dword(self) -> u32 {
        let submission = self.submission.saturating_sub(1) & 0xffff;
        submission | self.completion.saturating_sub(1) << 16
    }
}

/// Interrupt Coalescing (08h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct InterruptCoalescing {
    /// Completions, 0's based.
    pub threshold: u8,
    /// Aggregation time in units of 100 us.
    pub time: u8,
}

impl InterruptCoalescing {
    pub const fn from_dword(dword: u32) -> Self {
        Self {
            threshold: dword as u8,
            time: (dword >> 8) as u8,
        }
    }

    pub const fn dword(self) -> u32 {
        self.threshold as u32 | (self.time as u32) << 8
    }
}

/// Write Atomicity Normal (0Ah): bit 0: the host needs no more than AWUPF.
pub const WRITE_ATOMICITY_DISABLE_NORMAL: u32 = 1;

bitflags::bitflags! {
    /// Asynchronous Event Configuration (0Bh): the events that the host enables. OAES of Identify
    /// Controller has the same bits, from 8 up, for the events that the controller can report.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct AsyncEvents: u32 {
        /// The critical warnings of the SMART log.
        const SMART_SPARE = 1 << 0;
        const SMART_TEMPERATURE = 1 << 1;
        const SMART_RELIABILITY = 1 << 2;
        const SMART_READ_ONLY = 1 << 3;
        const SMART_VOLATILE_BACKUP = 1 << 4;
        const SMART_PERSISTENT_MEMORY = 1 << 5;
        const NAMESPACE_ATTRIBUTE = 1 << 8;
        const FIRMWARE_ACTIVATION = 1 << 9;
        const TELEMETRY_LOG = 1 << 10;
        const ANA_CHANGE = 1 << 11;
        const PREDICTABLE_LATENCY = 1 << 12;
        const LBA_STATUS = 1 << 13;
        const ENDURANCE_GROUP = 1 << 14;
        const NORMAL_SUBSYSTEM_SHUTDOWN = 1 << 15;
        const ZONE_DESCRIPTOR = 1 << 27;
        const DISCOVERY_LOG = 1 << 31;
    }
}

wire! {
    /// Host Behavior Support (16h): its data.
    512 bytes: pub struct HostBehavior {
        /// Advanced command retry enable: the host honours CRD, and takes Command Interrupted.
        0 acre: u8,
        1 etdas: u8,
        /// LBA format extension enable: more than 16 formats.
        2 lbafee: u8,
        3 hdisns: u8,
        /// Copy descriptor formats enable: bits for formats 2h to 4h.
        4 cdfe: [u8; 2],
        6 reserved6: [u8; 506],
    }
}

/// Host Identifier (81h): bit 0 of dword 11 selects 16 bytes, mandatory over fabrics, instead of 8.
pub const HOST_IDENTIFIER_EXTENDED: u32 = 1;
pub const HOST_IDENTIFIER_BYTES: usize = 8;
pub const HOST_IDENTIFIER_EXTENDED_BYTES: usize = 16;

bitflags::bitflags! {
    /// Reservation Notification Mask (82h): the notifications to suppress.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct ReservationMask: u32 {
        const REGISTRATION_PREEMPTED = 1 << 1;
        const RELEASED = 1 << 2;
        const PREEMPTED = 1 << 3;
    }
}

/// Reservation Persistence (83h): bit 0 is persist through power loss.
pub const RESERVATION_PERSISTENCE_PTPL: u32 = 1;

/// Namespace Write Protection (84h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WriteProtection {
    None = 0,
    Protected = 1,
    UntilPowerCycle = 2,
    Permanent = 3,
}

impl WriteProtection {
    pub const fn from_dword(dword: u32) -> Option<Self> {
        Some(match dword & 0b111 {
            0 => Self::None,
            1 => Self::Protected,
            2 => Self::UntilPowerCycle,
            3 => Self::Permanent,
            _ => return None,
        })
    }

    pub const fn dword(self) -> u32 {
        self as u32
    }
}

wire! {
    /// Timestamp (0Eh): its data.
    8 bytes: pub struct Timestamp {
        /// Milliseconds since 1970, 48 bits.
        0 milliseconds: [u8; 6],
        /// Bit 0: the clock stopped at times; bits 3:1: where it comes from (1: Set Features).
        6 attributes: u8,
        7 reserved7: u8,
    }
}

wire! {
    /// One entry of LBA Range Type (03h).
    64 bytes: pub struct LbaRangeType {
        0 range_type: u8,
        1 attributes: u8,
        2 reserved2: [u8; 14],
        16 slba: [U32; 2],
        24 nlb: [U32; 2],
        32 guid: [u8; 16],
        48 reserved48: [u8; 16],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_values() {
        let queues = NumberOfQueues {
            submission: 4,
            completion: 4,
        };
        assert_eq!(queues.dword(), 0x0003_0003);
        assert_eq!(NumberOfQueues::from_dword(0xffff_0001), None);
        assert_eq!(NumberOfQueues::from_dword(0x0001_ffff), None);
        // What Linux sets on an I/O controller with ANA, and on a discovery controller.
        let linux = AsyncEvents::NAMESPACE_ATTRIBUTE
            | AsyncEvents::FIRMWARE_ACTIVATION
            | AsyncEvents::ANA_CHANGE;
        assert_eq!(linux.bits(), 0xb00);
        assert_eq!(AsyncEvents::DISCOVERY_LOG.bits(), 0x8000_0000);
        assert_eq!(WriteProtection::from_dword(4), None);
        let threshold = TemperatureThreshold {
            kelvin: 343,
            sensor: 0,
            under: true,
        };
        assert_eq!(threshold.dword(), 0x0010_0157);
        assert_eq!(
            ErrorRecovery {
                time_limit: 5,
                deallocated_error: true
            }
            .dword(),
            0x1_0005
        );
    }

    proptest! {
        /// A value read from a dword writes the bits that it knows of that dword.
        #[test]
        fn round_trips(dword in any::<u32>()) {
            prop_assert_eq!(Arbitration::from_dword(dword).dword(), dword & 0xffff_ff07);
            prop_assert_eq!(PowerManagement::from_dword(dword).dword(), dword & 0xff);
            prop_assert_eq!(ErrorRecovery::from_dword(dword).dword(), dword & 0x1_ffff);
            prop_assert_eq!(InterruptCoalescing::from_dword(dword).dword(), dword & 0xffff);
            let threshold = TemperatureThreshold::from_dword(dword);
            prop_assert_eq!(TemperatureThreshold::from_dword(threshold.dword()), threshold);
            if let Some(queues) = NumberOfQueues::from_dword(dword) {
                prop_assert_eq!(queues.dword(), dword);
            }
        }
    }
}
