//! Asynchronous events (Base 5.2.1): their types and codes in dword 0 of the completion of an
//! Asynchronous Event Request.

use crate::log::lid;

/// Event types (bits 2:0).
pub mod event_type {
    pub const ERROR: u8 = 0;
    pub const SMART_HEALTH: u8 = 1;
    pub const NOTICE: u8 = 2;
    pub const IMMEDIATE: u8 = 3;
    pub const ONE_SHOT: u8 = 4;
    pub const IO_COMMAND_SPECIFIC: u8 = 6;
    pub const VENDOR: u8 = 7;
}

/// An event: its type, its information code, and the log page with details. Reading that page
/// enables further events of the type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AsyncEvent {
    pub event_type: u8,
    pub info: u8,
    pub log_page: u8,
}

impl AsyncEvent {
    const fn new(event_type: u8, info: u8, log_page: u8) -> Self {
        Self {
            event_type,
            info,
            log_page,
        }
    }

    pub const PERSISTENT_INTERNAL_ERROR: Self =
        Self::new(event_type::ERROR, 0x03, lid::ERROR_INFORMATION);
    pub const TRANSIENT_INTERNAL_ERROR: Self =
        Self::new(event_type::ERROR, 0x04, lid::ERROR_INFORMATION);
    pub const SUBSYSTEM_RELIABILITY: Self =
        Self::new(event_type::SMART_HEALTH, 0x00, lid::SMART_HEALTH);
    pub const TEMPERATURE_THRESHOLD: Self =
        Self::new(event_type::SMART_HEALTH, 0x01, lid::SMART_HEALTH);
    pub const SPARE_BELOW_THRESHOLD: Self =
        Self::new(event_type::SMART_HEALTH, 0x02, lid::SMART_HEALTH);
    /// Namespaces were attached, detached or changed.
    pub const NAMESPACE_ATTRIBUTE_CHANGED: Self =
        Self::new(event_type::NOTICE, 0x00, lid::CHANGED_NAMESPACE_LIST);
    pub const FIRMWARE_ACTIVATION_STARTING: Self =
        Self::new(event_type::NOTICE, 0x01, lid::FIRMWARE_SLOT);
    pub const ANA_CHANGE: Self =
        Self::new(event_type::NOTICE, 0x03, lid::ASYMMETRIC_NAMESPACE_ACCESS);
    /// Discovery log page change, a notice of discovery controllers.
    pub const DISCOVERY_LOG_CHANGE: Self = Self::new(event_type::NOTICE, 0xf0, lid::DISCOVERY);
    pub const RESERVATION_LOG_AVAILABLE: Self = Self::new(
        event_type::IO_COMMAND_SPECIFIC,
        0x00,
        lid::RESERVATION_NOTIFICATION,
    );

    pub const fn from_dword0(dword0: u32) -> Self {
        Self::new(
            dword0 as u8 & 0b111,
            (dword0 >> 8) as u8,
            (dword0 >> 16) as u8,
        )
    }

    pub const fn dword0(self) -> u32 {
        (self.event_type & 0b111) as u32 | (self.info as u32) << 8 | (self.log_page as u32) << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event numbers that Linux distinguishes.
    #[test]
    fn dwords() {
        for (event, dword0) in [
            (AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED, 0x0004_0002),
            (AsyncEvent::ANA_CHANGE, 0x000c_0302),
            (AsyncEvent::DISCOVERY_LOG_CHANGE, 0x0070_f002),
            (AsyncEvent::RESERVATION_LOG_AVAILABLE, 0x0080_0006),
            (AsyncEvent::SPARE_BELOW_THRESHOLD, 0x0002_0201),
        ] {
            assert_eq!(event.dword0(), dword0);
            assert_eq!(AsyncEvent::from_dword0(dword0), event);
        }
    }
}
