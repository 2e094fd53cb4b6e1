//! Reservation requests to a shared device: with them one host excludes the others from writing.
//! Replicated volumes use them to fence a former holder.
//!
//! The requests here cover the needs of a device with one writer at a time, and no more: a
//! registration under a key, a Write Exclusive - All Registrants reservation, and the end of all
//! other registrations together with their commands. A module executes them by its device's means
//! (NVMe: Reservation Register, Acquire, Report); the caller interprets the results.

use crate::io::Status;

/// A request to a device with [`crate::Bdev::reserves`]. Unlike an I/O, the module does not repeat
/// it: the request ends when its connection is lost, and the caller reads the state again.
pub struct Reserve {
    pub ask: ReservationRequest,
    /// Called once, on the queue's core; not at all if the queue is closed before.
    pub answer: Box<dyn FnOnce(Result<ReservationReport, Status>) + Send>,
}

/// A reservation command. Keys are never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservationRequest {
    /// The registrants and the reservation. Only this request returns a filled
    /// [`ReservationReport`].
    Report,
    /// Registers this host under `key`, or replaces its key `current`.
    Register { current: Option<u64>, key: u64 },
    /// Ends this host's registration, and with the last one the reservation.
    Unregister { key: u64 },
    /// Acquires a Write Exclusive - All Registrants reservation (RTYPE 5h).
    Acquire { key: u64 },
    /// Preempt and Abort: removes all other registrations, and aborts their commands in flight
    /// before it completes.
    Preempt { key: u64 },
}

/// The registrations and the reservation of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReservationReport {
    /// This host's registration key.
    pub own: Option<u64>,
    /// The registration keys of other hosts.
    pub others: Vec<u64>,
    pub held: ActiveReservation,
}

/// The reservation of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActiveReservation {
    #[default]
    NotReserved,
    /// The type that [`ReservationRequest::Acquire`] makes: Write Exclusive, All Registrants.
    AllRegistrants,
    /// Another type, by its number (RTYPE).
    Other(u8),
}

impl Status {
    /// Reservation Conflict (SCT 0h, SC 83h, DNR): another host has reserved the device.
    pub const RESERVATION_CONFLICT: Self = Self::Nvme {
        sct: 0,
        sc: 0x83,
        dnr: true,
    };

    /// True if the I/O was refused because another host has reserved the device.
    pub fn is_reservation_conflict(self) -> bool {
        matches!(
            self,
            Self::Nvme {
                sct: 0,
                sc: 0x83,
                ..
            }
        )
    }
}
