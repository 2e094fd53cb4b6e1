//! The phases of an NVMe/TCP connection up to its close, and the time limit of an incomplete PDU.
//! Shared by the connection machines of controller and host.
//!
//! ```text
//! Handshake ─▶ Running ─▶ Closing ─▶ Lingering ─▶ Finished
//!     └───────────┴──────────┴───── closed, peer gone, deadline ────▲
//! ```
//!
//! While a machine closes, it sends its last PDUs. Then it shuts the sending side down and waits
//! for the peer's end.

use std::time::Duration;

use nacre_reactor::Nanos;

use crate::transport::Closed;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    Handshake,
    Running,
    Closing,
    /// `shutdown`: the sending side is about to be shut down.
    Lingering {
        shutdown: bool,
    },
    Finished,
}

/// The phase of a connection, and the reason for its end.
pub(super) struct Lifecycle {
    phase: ConnectionPhase,
    /// Start of the phase `Closing`.
    closing: Nanos,
    why: Option<Closed>,
    /// The end was reported to the layer above.
    reported: bool,
}

impl Lifecycle {
    pub(super) fn new(now: Nanos) -> Self {
        Self {
            phase: ConnectionPhase::Handshake,
            closing: now,
            why: None,
            reported: false,
        }
    }

    #[inline]
    pub(super) fn phase(&self) -> ConnectionPhase {
        self.phase
    }

    /// True until the connection closes.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        matches!(
            self.phase,
            ConnectionPhase::Handshake | ConnectionPhase::Running
        )
    }

    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.phase == ConnectionPhase::Running
    }

    /// Both ends have exchanged ICReq and ICResp.
    pub(super) fn run(&mut self) {
        self.phase = ConnectionPhase::Running;
    }

    /// Records the reason for the end; only the first one counts.
    pub(super) fn record_cause(&mut self, why: Closed) {
        self.why.get_or_insert(why);
    }

    /// `has_left`: the socket has taken all data to send.
    pub(super) fn begin_closing(&mut self, now: Nanos, has_left: bool) {
        self.phase = ConnectionPhase::Closing;
        self.closing = now;
        if has_left {
            self.drained();
        }
    }

    /// The socket has taken all data to send.
    #[inline]
    pub(super) fn drained(&mut self) {
        if self.phase == ConnectionPhase::Closing {
            self.phase = ConnectionPhase::Lingering { shutdown: true };
        }
    }

    pub(super) fn finish(&mut self) {
        self.phase = ConnectionPhase::Finished;
    }

    #[inline]
    pub(super) fn is_finished(&self) -> bool {
        self.phase == ConnectionPhase::Finished
    }

    /// True if [`Lifecycle::takes_shutdown`] would return true.
    #[inline]
    pub(super) fn has_shutdown(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Lingering { shutdown: true })
    }

    /// True once, when the sending side of the socket must be shut down.
    pub(super) fn takes_shutdown(&mut self) -> bool {
        match &mut self.phase {
            ConnectionPhase::Lingering { shutdown } => std::mem::take(shutdown),
            _ => false,
        }
    }

    pub(super) fn is_reported(&self) -> bool {
        self.reported
    }

    /// True if [`Lifecycle::take_end`] would return the end.
    pub(super) fn has_end(&self) -> bool {
        !self.reported
            && matches!(
                self.phase,
                ConnectionPhase::Lingering { .. } | ConnectionPhase::Finished
            )
    }

    /// The reason for the end, once.
    pub(super) fn take_end(&mut self) -> Option<Closed> {
        if !self.has_end() {
            return None;
        }
        self.reported = true;
        Some(self.why.clone().unwrap_or(Closed::Local))
    }

    /// Time until which the peer may close its end; `None` if the connection is open or finished.
    pub(super) fn deadline(&self, linger: Duration) -> Option<Nanos> {
        match self.phase {
            ConnectionPhase::Closing | ConnectionPhase::Lingering { .. } => {
                Some(self.closing + linger)
            }
            ConnectionPhase::Handshake | ConnectionPhase::Running | ConnectionPhase::Finished => {
                None
            }
        }
    }
}

/// The arrival time of an incomplete PDU's first bytes.
#[derive(Default)]
pub(super) struct Partial {
    since: Option<Nanos>,
    /// Number of whole PDUs received before this one.
    pdus: u64,
}

impl Partial {
    /// `is_partial`: the connection waits for the rest of a PDU, after `pdus` whole ones.
    #[inline]
    pub(super) fn note(&mut self, is_partial: bool, pdus: u64, now: Nanos) {
        if !is_partial {
            self.since = None;
        } else if self.since.is_none() || self.pdus != pdus {
            self.since = Some(now);
            self.pdus = pdus;
        }
    }

    #[inline]
    pub(super) fn since(&self) -> Option<Nanos> {
        self.since
    }
}
