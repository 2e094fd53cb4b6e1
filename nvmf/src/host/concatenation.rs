//! Secure channel concatenation of a host (TP8018): it authenticates itself in clear, which makes a
//! PSK, and connects again over TLS with that PSK.
//!
//! ```text
//!   no PSK ─▶ admin queue in clear ─▶ authentication with SC_C 2 ─▶ PSK ─▶ all queues over TLS
//!      ▲                                                                          │
//!      └─────────────────── the association is lost, or the PSK is refused ◀──────┘
//! ```

use nacre_nvmf_wire::StatusCode;
use parking_lot::Mutex;

use super::error::HostError;
use crate::tls::Psk;

/// The PSK of a controller's connections. The controller sets and clears it; the transport reads it
/// for each connection.
#[derive(Debug, Default)]
pub struct GeneratedPsk(Mutex<Option<Psk>>);

impl GeneratedPsk {
    /// `None`: only the admin queue may connect, in clear.
    pub fn get(&self) -> Option<Psk> {
        self.0.lock().clone()
    }

    pub fn is_set(&self) -> bool {
        self.0.lock().is_some()
    }

    pub(super) fn set(&self, psk: Psk) {
        *self.0.lock() = Some(psk);
    }

    /// Forgets the PSK after a loss. While the target still tears down the association in clear, it
    /// stays.
    pub(super) fn lost(&self, error: &HostError) {
        let busy = StatusCode::CONNECT_CONTROLLER_BUSY;
        let is_busy = matches!(error, HostError::Refused { status, .. } if status.code() == busy);
        if !is_busy {
            *self.0.lock() = None;
        }
    }
}
