//! Reservations: how one who writes to a device keeps others from it who can reach it too.
//!
//! What is asked here is what a device needs that has one writer at a time, and no more: a registration under
//! a key, a Write Exclusive - All Registrants reservation, and the end of everybody else's registration
//! together with their commands. A module carries it out with whatever its device has for that (NVMe:
//! Reservation Register, Acquire, Report); what the answers mean is decided above.

use crate::io::Status;

/// A request to a device with [`crate::Bdev::reserves`]. Unlike an I/O it is not repeated by the module: when
/// its connection is lost it ends, and whoever asked looks again at how things stand.
pub struct Reserve {
    pub ask: Ask,
    /// Called once, on the queue's core; not at all if the queue is closed before.
    pub answer: Box<dyn FnOnce(Result<Standing, Status>) + Send>,
}

/// Keys are never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Who is registered, and what is held. Only this is answered with a [`Standing`] that says something.
    Report,
    /// Registers this host, or gives it another key: `current` is the one that it has.
    Register { current: Option<u64>, key: u64 },
    /// Ends this host's registration, and with the last one the reservation.
    Unregister { key: u64 },
    /// The reservation, for all who are registered.
    Acquire { key: u64 },
    /// The reservation for this host alone: ends the registrations of all others, and aborts what they have
    /// under way before it is answered.
    Preempt { key: u64 },
}

/// How the reservations of a device stand.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// The key under which this host is registered.
    pub own: Option<u64>,
    /// The keys of the others.
    pub others: Vec<u64>,
    pub held: Held,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Held {
    #[default]
    Nothing,
    /// A reservation of the sort that [`Ask::Acquire`] makes.
    ByRegistrants,
    /// One of another sort; its number.
    Otherwise(u8),
}

impl Status {
    /// The device is reserved by somebody else.
    pub const RESERVATION_CONFLICT: Status = Status::Nvme {
        sct: 0,
        sc: 0x83,
        dnr: true,
    };

    /// Whether the I/O was refused for the sake of somebody who has reserved the device.
    pub fn is_reservation_conflict(self) -> bool {
        matches!(
            self,
            Status::Nvme {
                sct: 0,
                sc: 0x83,
                ..
            }
        )
    }
}
