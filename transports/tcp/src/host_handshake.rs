//! The TLS handshake of a host's connection. A helper thread computes each step, because a step
//! takes too long for the reactor.
//!
//! ```text
//!   begin, received ─▶ job ─▶ Turn, and the descriptor is readable ─▶ take
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nacre_nvmf::tls::{Derivation, Identity, Psk};
use nacre_reactor::{Helper, HelperFull};
use nacre_transport_tls::{Failure, Handshake, Outcome, Role};
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

/// The PSK of a TLS connection, its PSK identity, and the derivation of the TLS key from the PSK.
#[derive(Debug, Clone)]
pub struct HostTls {
    pub psk: Psk,
    pub identity: Identity,
    pub derivation: Derivation,
    /// The thread that computes the steps of the handshake; `None`: the thread that polls the
    /// connection computes them.
    pub helper: Option<Arc<Helper>>,
}

/// The result of a job.
pub(crate) struct Turn {
    /// Bytes to send to the controller; after a failure, possibly an alert.
    pub output: Vec<u8>,
    /// `Ok(None)`: the handshake waits for bytes of the controller.
    pub result: Result<Option<Outcome>, Failure>,
}

enum HandshakeSlot {
    /// A job has the handshake.
    Busy,
    Done(Box<Turn>, Option<Box<Handshake>>),
    /// Waits for bytes.
    Idle(Box<Handshake>),
    Over,
}

struct HandshakeShared {
    slot: Mutex<HandshakeSlot>,
    /// Readable after a job.
    done: OwnedFd,
}

pub(crate) struct HostHandshake {
    shared: Arc<HandshakeShared>,
    helper: Option<Arc<Helper>>,
    /// The name of the controller. Handshakes of one controller run one after the other.
    owner: String,
}

/// The reason why a handshake cannot begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeStartError {
    #[error(transparent)]
    Full(#[from] HelperFull),
    #[error(transparent)]
    Descriptor(#[from] rustix::io::Errno),
}

impl HostHandshake {
    /// Begins the handshake. The output of the first [`Turn`] is the ClientHello.
    pub(crate) fn begin(tls: HostTls, owner: String) -> Result<Self, HandshakeStartError> {
        let done = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let handshake = Self {
            shared: Arc::new(HandshakeShared {
                slot: Mutex::new(HandshakeSlot::Busy),
                done,
            }),
            helper: tls.helper,
            owner,
        };
        let role = Role::Host {
            identity: tls.identity,
            psk: tls.psk,
            derivation: tls.derivation,
        };
        handshake.run(move || match Handshake::new(role) {
            Ok(handshake) => (Some(Box::new(handshake)), Ok(None)),
            Err(failure) => (None, Err(failure)),
        })?;
        Ok(handshake)
    }

    /// Has the helper thread process bytes of the controller. Ignored while a job runs, or after
    /// the end of the handshake.
    pub(crate) fn received(&mut self, bytes: Vec<u8>) -> Result<(), HelperFull> {
        let taken = std::mem::replace(&mut *self.shared.slot.lock(), HandshakeSlot::Busy);
        let HandshakeSlot::Idle(mut handshake) = taken else {
            *self.shared.slot.lock() = taken;
            return Ok(());
        };
        self.run(move || {
            let result = handshake.received(&bytes);
            (Some(handshake), result)
        })
    }

    fn run(
        &self,
        job: impl FnOnce() -> (Option<Box<Handshake>>, Result<Option<Outcome>, Failure>)
        + Send
        + 'static,
    ) -> Result<(), HelperFull> {
        let shared = Arc::clone(&self.shared);
        let work = move || {
            let (mut handshake, result) = job();
            let output = handshake.as_mut().map(|handshake| handshake.take_output());
            let turn = Box::new(Turn {
                output: output.unwrap_or_default(),
                result,
            });
            // With the lock held: `take` finds either neither or both.
            let mut slot = shared.slot.lock();
            *slot = HandshakeSlot::Done(turn, handshake);
            let _ = rustix::io::write(&shared.done, &1u64.to_ne_bytes());
        };
        match &self.helper {
            Some(helper) => helper.submit(&self.owner, work),
            None => {
                work();
                Ok(())
            }
        }
    }

    /// The result of the last job, once. `None`: a job runs, or its result was taken.
    pub(crate) fn take(&mut self) -> Option<Box<Turn>> {
        let mut slot = self.shared.slot.lock();
        match std::mem::replace(&mut *slot, HandshakeSlot::Over) {
            HandshakeSlot::Done(turn, handshake) => {
                if let (Some(handshake), Ok(None)) = (handshake, &turn.result) {
                    *slot = HandshakeSlot::Idle(handshake);
                }
                let _ = rustix::io::read(&self.shared.done, &mut [0; 8]);
                Some(turn)
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    /// True while a job runs or waits.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(*self.shared.slot.lock(), HandshakeSlot::Busy)
    }

    /// Readable when [`HostHandshake::take`] has a result.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.done.as_fd()
    }
}
