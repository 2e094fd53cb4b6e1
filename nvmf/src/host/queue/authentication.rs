//! DH-HMAC-CHAP authentication of one queue (Base 8.13): after Connect, before any other command.
//! [`CommandQueue`] runs the transaction; the protocol itself is in [`crate::auth`].

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use nacre_hugepages::Pool;
use nacre_nvmf_wire::fabrics::{AuthRequirements, Authentication};
use nacre_nvmf_wire::{Nqn, Sgl, StatusCode};
use nacre_reactor::{Helper, Idle, Nanos};

use super::super::concatenation::GeneratedPsk;
use super::super::error::HostError;
use super::super::options::HostOptions;
use super::{CommandQueue, Finished};
use crate::auth::{
    Answer, Concatenation, HostEnd, Job, Names, Reason, SystemRandom, TransactionStep,
};
use crate::tls::Psk;

/// Interval at which a sleeping core checks for the result of the helper thread.
const LOOK: Duration = Duration::from_millis(1);

/// Allocation length of Authentication Receive: enough for every message of a controller.
const RECEIVE_BYTES: u32 = 4096;

/// The result of a completed transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// Both ends are authenticated as required.
    Alone,
    /// The transaction also generated a PSK, for connections over TLS.
    WithPsk,
}

/// The authentication transaction of one queue.
pub(super) struct Transaction {
    end: HostEnd,
    /// Receives the PSK that the transaction generates (secure channel concatenation).
    generated: Option<Arc<GeneratedPsk>>,
    helper: Arc<Helper>,
    subsystem: Nqn,
    /// The next event of the transaction.
    wait: Wait,
}

enum Wait {
    Nothing,
    /// A buffer and a free entry, to send this message.
    Unsent(Vec<u8>),
    /// A buffer and a free entry, to send Authentication Receive.
    Unfetched,
    /// The completion of Authentication Send.
    Sent,
    /// The completion of Authentication Receive.
    Fetching,
    Answer(Receiver<Answer>),
    /// The target refused a command.
    Refused(StatusCode),
}

/// Starts the transaction after a Connect. `None`: neither end requires authentication.
pub(super) fn after_connect(
    options: &HostOptions,
    required: AuthRequirements,
    qid: u16,
) -> Result<Option<Transaction>, HostError> {
    let generated = options.concatenation.as_ref();
    if required.contains(AuthRequirements::SECURE_CHANNEL) && generated.is_none() {
        return Err(HostError::SecureChannelRequired);
    }
    // The connection is in clear: the transaction makes the PSK.
    let makes_psk = generated.filter(|psk| qid == 0 && !psk.is_set());
    let is_required = makes_psk.is_some() || required.contains(AuthRequirements::AUTHENTICATION);
    let auth = options.authentication.as_ref();
    let Some(auth) = auth.filter(|auth| auth.keys.has_host_key()) else {
        return if makes_psk.is_some() {
            Err(HostError::ConcatenationKey)
        } else if is_required {
            Err(HostError::KeyRequired)
        } else {
            Ok(None)
        };
    };
    // A host with a key for the controller requires its proof, even if the controller requests
    // none. With a generated PSK the controller has given it.
    let has_proof = generated.is_some_and(|psk| psk.is_set());
    if !is_required && (has_proof || !auth.keys.has_controller_key()) {
        return Ok(None);
    }
    let names = Names {
        host: options.hostnqn.clone(),
        subsystem: options.subnqn.clone(),
    };
    let (keys, offer) = (Arc::clone(&auth.keys), auth.offer.clone());
    // A transaction identifier needs to be unique within its queue only.
    let mut end = HostEnd::new(names, keys, offer, qid, Box::new(SystemRandom));
    if makes_psk.is_some() {
        end = end.with_channel(Concatenation::New);
    }
    Ok(Some(Transaction {
        generated: makes_psk.cloned(),
        end,
        helper: Arc::clone(&auth.helper),
        subsystem: options.subnqn.clone(),
        wait: Wait::Nothing,
    }))
}

impl Transaction {
    /// Executes the next step. `Some`: the result of the completed transaction.
    pub(super) fn drive(
        &mut self,
        queue: &mut CommandQueue,
        pool: &Pool,
        token: u64,
        now: Nanos,
    ) -> Option<Result<Proof, HostError>> {
        loop {
            match &mut self.wait {
                Wait::Nothing => match self.end.step() {
                    TransactionStep::Send(bytes) => self.wait = Wait::Unsent(bytes),
                    TransactionStep::Receive => self.wait = Wait::Unfetched,
                    TransactionStep::Compute(job) => match self.compute(job) {
                        Ok(answer) => self.wait = Wait::Answer(answer),
                        Err(reason) => return Some(Err(HostError::Authentication(reason))),
                    },
                    TransactionStep::Wait => return None,
                    TransactionStep::Completed(_) => {
                        let psk = self.end.take_generated();
                        let Some((kept, psk)) = self.generated.as_ref().zip(psk) else {
                            return Some(Ok(Proof::Alone));
                        };
                        kept.set(Psk::generated(&psk));
                        return Some(Ok(Proof::WithPsk));
                    }
                    TransactionStep::Failed(reason) => {
                        return Some(Err(HostError::Authentication(reason)));
                    }
                },
                Wait::Unsent(bytes) => {
                    let length = bytes.len();
                    let mut buf = pool.acquire(length).filter(|_| queue.has_room())?;
                    buf.bytes_mut()?.copy_from_slice(bytes);
                    let length = length as u32;
                    let sqe = command(length).to_send(0, Sgl::Transport { length });
                    queue.submit(sqe, Some(buf), None, token, now);
                    self.wait = Wait::Sent;
                }
                Wait::Unfetched => {
                    let length = RECEIVE_BYTES;
                    let buf = pool.acquire(length as usize);
                    let buf = buf.filter(|_| queue.has_room())?;
                    let sqe = command(length).to_receive(0, Sgl::Transport { length });
                    queue.submit(sqe, None, Some(buf), token, now);
                    self.wait = Wait::Fetching;
                }
                Wait::Answer(answer) => match answer.try_recv() {
                    Ok(answer) => {
                        self.wait = Wait::Nothing;
                        self.end.answered(answer);
                    }
                    Err(TryRecvError::Empty) => return None,
                    Err(TryRecvError::Disconnected) => {
                        let reason = Reason::Overloaded;
                        return Some(Err(HostError::Authentication(reason)));
                    }
                },
                Wait::Sent | Wait::Fetching => return None,
                Wait::Refused(status) => {
                    return Some(Err(HostError::Refused {
                        step: "authenticate",
                        status: *status,
                        fabrics: true,
                    }));
                }
            }
        }
    }

    /// Handles the completion of a command of this transaction.
    pub(super) fn finished(&mut self, one: &Finished) {
        let status = one.cqe.status();
        if !status.is_success() {
            self.wait = Wait::Refused(status);
            return;
        }
        match std::mem::replace(&mut self.wait, Wait::Nothing) {
            Wait::Sent => self.end.sent(),
            Wait::Fetching => {
                let read: &[u8] = one.read.as_deref().unwrap_or(&[]);
                let bytes = read.len().min(one.transferred as usize);
                self.end.received(&read[..bytes]);
            }
            other => self.wait = other,
        }
    }

    /// See [`nacre_reactor::Poller::arm`].
    pub(super) fn idle(&self, now: Nanos) -> Idle {
        match self.wait {
            Wait::Sent | Wait::Fetching => Idle::Quiet,
            Wait::Unsent(_) | Wait::Unfetched | Wait::Answer(_) => Idle::Until(now + LOOK),
            Wait::Nothing | Wait::Refused(_) => Idle::Busy,
        }
    }

    fn compute(&self, job: Job) -> Result<Receiver<Answer>, Reason> {
        let (done, answer) = channel();
        // Sending fails if the queue was dropped in the meantime.
        let run = move || drop(done.send(job.run()));
        let submitted = self.helper.submit(self.subsystem.as_str(), run);
        submitted.map_err(|_| Reason::Overloaded)?;
        Ok(answer)
    }
}

fn command(length: u32) -> Authentication {
    Authentication {
        secp: Authentication::SECP_NVME,
        spsp0: 1,
        spsp1: 1,
        length,
    }
}
