//! The host's side of a DH-HMAC-CHAP transaction, as a state machine.
//!
//! ```text
//!   Negotiate ─▶ Challenge ─▶ (job) ─▶ Reply ─▶ Success1 ─▶ Success2 ─▶ Completed
//!     Send        Receive                Send     Receive     Send, after a proof
//! ```
//!
//! The caller executes [`HostEnd::step`] and reports with `sent`, `received` or `answered`. A
//! failure is sent to the controller as Failure2 if the protocol allows it.

use std::sync::Arc;

use super::group::Group;
use super::hash::{Digest, Hash};
use super::job::{Answer, Job, KeySource, Keys};
use super::message::{Body, Challenge, Failed, Message, MessageError, Negotiate, Reply};
use super::offer::Offer;
use super::response::{Basis, Names, Prover};
use super::{Agreed, Concatenation, Random, Reason, sequence_number};

/// The next step of the host.
#[derive(Debug)]
pub enum TransactionStep {
    /// Authentication Send of these bytes, then [`HostEnd::sent`].
    Send(Vec<u8>),
    /// Authentication Receive, then [`HostEnd::received`].
    Receive,
    /// A job for a helper thread, then [`HostEnd::answered`].
    Compute(Job),
    /// The previous step has not been reported yet.
    Wait,
    Completed(Agreed),
    Failed(Reason),
}

pub struct HostEnd {
    names: Names,
    keys: Arc<dyn KeySource>,
    offer: Offer,
    channel: Concatenation,
    /// The generated PSK (PSKg), if a secure channel is requested.
    generated: Option<Digest>,
    random: Box<dyn Random>,
    transaction: u16,
    state: HostEndState,
    /// The step of this state was returned.
    begun: bool,
}

enum HostEndState {
    Negotiate,
    Challenge,
    /// The job is pending, or in progress.
    Computing(Option<Job>, ReceivedChallenge),
    Reply(Vec<u8>, Expected),
    Success1(Expected),
    Success2(Agreed),
    /// Failure2 must be sent.
    Failure2(Reason),
    Completed(Agreed),
    Failed(Reason),
}

/// The received Challenge.
struct ReceivedChallenge {
    hash: Hash,
    group: Group,
    challenge: Vec<u8>,
    number: u32,
}

/// The parameters, and the expected R2 if the controller must prove that it has its key.
struct Expected {
    agreed: Agreed,
    response: Option<Digest>,
}

impl HostEnd {
    /// Starts a transaction. `transaction`: T_ID, different from that of recent ones on this queue.
    pub fn new(
        names: Names,
        keys: Arc<dyn KeySource>,
        offer: Offer,
        transaction: u16,
        random: Box<dyn Random>,
    ) -> Self {
        Self {
            names,
            keys,
            offer,
            channel: Concatenation::None,
            generated: None,
            random,
            transaction,
            state: HostEndState::Negotiate,
            begun: false,
        }
    }

    /// Requests secure channel concatenation.
    pub fn with_channel(mut self, channel: Concatenation) -> Self {
        self.offer = channel.usable(&self.offer);
        self.channel = channel;
        self
    }

    /// Removes and returns the PSK that the completed transaction generated.
    pub fn take_generated(&mut self) -> Option<Digest> {
        match self.state {
            HostEndState::Completed(_) => self.generated.take(),
            _ => None,
        }
    }

    pub fn step(&mut self) -> TransactionStep {
        match &self.state {
            HostEndState::Completed(agreed) => return TransactionStep::Completed(*agreed),
            HostEndState::Failed(reason) => return TransactionStep::Failed(reason.clone()),
            _ if self.begun => return TransactionStep::Wait,
            _ => {}
        }
        self.begun = true;
        match &mut self.state {
            HostEndState::Negotiate => TransactionStep::Send(self.negotiate()),
            HostEndState::Computing(job, _) => match job.take() {
                Some(job) => TransactionStep::Compute(job),
                None => TransactionStep::Wait,
            },
            HostEndState::Reply(bytes, _) => TransactionStep::Send(std::mem::take(bytes)),
            HostEndState::Success2(_) => TransactionStep::Send(self.message(Body::Success2)),
            HostEndState::Failure2(reason) => {
                let failed = reason.failed();
                TransactionStep::Send(self.message(Body::Failure2(failed)))
            }
            HostEndState::Challenge | HostEndState::Success1(_) => TransactionStep::Receive,
            HostEndState::Completed(_) | HostEndState::Failed(_) => TransactionStep::Wait,
        }
    }

    /// Handles the completion of an Authentication Send.
    pub fn sent(&mut self) {
        let next = match std::mem::replace(&mut self.state, HostEndState::Negotiate) {
            HostEndState::Negotiate => HostEndState::Challenge,
            HostEndState::Reply(_, expected) => HostEndState::Success1(expected),
            HostEndState::Success2(agreed) => HostEndState::Completed(agreed),
            HostEndState::Failure2(reason) => HostEndState::Failed(reason),
            other => other,
        };
        self.enter(next);
    }

    /// Handles the data of a completed Authentication Receive.
    pub fn received(&mut self, bytes: &[u8]) {
        let next = match std::mem::replace(&mut self.state, HostEndState::Negotiate) {
            HostEndState::Challenge => self.take_challenge(bytes),
            HostEndState::Success1(expected) => self.take_success(expected, bytes),
            other => Ok(other),
        };
        // A controller that gave up expects no message.
        let next = next.unwrap_or_else(|reason| match reason {
            Reason::GivenUp(_) => HostEndState::Failed(reason),
            reason => HostEndState::Failure2(reason),
        });
        self.enter(next);
    }

    /// Handles the answer of the job.
    pub fn answered(&mut self, answer: Answer) {
        let HostEndState::Computing(_, received) =
            std::mem::replace(&mut self.state, HostEndState::Negotiate)
        else {
            return;
        };
        let next = self.reply(&received, answer);
        let next = next.unwrap_or_else(HostEndState::Failure2);
        self.enter(next);
    }

    fn enter(&mut self, state: HostEndState) {
        self.state = state;
        self.begun = false;
    }

    fn message(&self, body: Body) -> Vec<u8> {
        let transaction = self.transaction;
        Message { transaction, body }.to_bytes()
    }

    fn negotiate(&self) -> Vec<u8> {
        let hashes: Vec<u8> = self.offer.hashes.iter().map(|hash| hash.id()).collect();
        let groups: Vec<u8> = self.offer.groups.iter().map(|group| group.id()).collect();
        self.message(Body::Negotiate(Negotiate {
            secure_channel: self.channel.code(),
            offer: Some((&hashes, &groups)),
        }))
    }

    fn parse<'a>(&self, bytes: &'a [u8], expected: &'static str) -> Result<Body<'a>, Reason> {
        let message = Message::parse(bytes)?;
        if message.transaction != self.transaction {
            let got = "a message of another transaction";
            return Err(Reason::Unexpected { got, expected });
        }
        match message.body {
            Body::Failure1(failed) => Err(Reason::GivenUp(failed)),
            body => Ok(body),
        }
    }

    fn take_challenge(&mut self, bytes: &[u8]) -> Result<HostEndState, Reason> {
        match self.parse(bytes, "Challenge")? {
            Body::Challenge(challenge) => self.accept(&challenge),
            other => Err(Reason::Unexpected {
                got: other.name(),
                expected: "Challenge",
            }),
        }
    }

    fn accept(&mut self, challenge: &Challenge) -> Result<HostEndState, Reason> {
        // A controller must not bring the host to something weaker than its configuration.
        let hash = Hash::from_id(challenge.hash).filter(|hash| self.offer.hashes.contains(hash));
        let hash = hash.ok_or(Reason::HashNotOffered { id: challenge.hash })?;
        let group =
            Group::from_id(challenge.group).filter(|group| self.offer.groups.contains(group));
        let group = group.ok_or(Reason::GroupNotOffered {
            id: challenge.group,
        })?;
        if challenge.challenge.len() != hash.bytes() {
            return Err(Reason::Malformed(MessageError::Field {
                message: "Challenge",
                field: "the length of the hash",
                value: challenge.challenge.len() as u32,
            }));
        }
        if !group.has(challenge.public) {
            return Err(Reason::PublicValue);
        }
        let exponent = group.exponent(self.random.as_mut())?;
        let job = Job {
            keys: vec![Arc::clone(&self.keys)],
            public: true,
            peer: Some(challenge.public.to_vec()),
            group,
            exponent: Some(exponent),
        };
        let received = ReceivedChallenge {
            hash,
            group,
            challenge: challenge.challenge.to_vec(),
            number: challenge.number,
        };
        Ok(HostEndState::Computing(Some(job), received))
    }

    fn reply(
        &mut self,
        received: &ReceivedChallenge,
        answer: Answer,
    ) -> Result<HostEndState, Reason> {
        let keys = answer.keys.into_iter().next();
        let Keys { host, controller } = keys.ok_or(Reason::NoKey)??;
        let hash = received.hash;
        let shared = answer.shared.as_ref().map(|shared| shared.as_slice());
        debug_assert_eq!(shared.is_some(), received.group != Group::Null);
        let basis = Basis {
            hash,
            shared,
            transaction: self.transaction,
            channel: self.channel,
            names: &self.names,
        };
        let key = host.key(&self.names.host);
        let response = basis.response(Prover::Host, &key, &received.challenge, received.number);
        let mut own = None;
        let mut expected = None;
        let makes_psk = self.channel != Concatenation::None;
        let mut challenge = vec![0; hash.bytes()];
        if makes_psk || controller.is_some() {
            self.random.fill(&mut challenge)?;
        }
        if makes_psk {
            self.generated = basis.generated(&received.challenge, &challenge);
            // S2 is 0 without a wish for the controller's proof.
            own = Some((challenge.clone(), 0));
        }
        if let Some(controller) = controller {
            let number = sequence_number(self.random.as_mut())?;
            let key = controller.key(&self.names.subsystem);
            expected = Some(basis.response(Prover::Controller, &key, &challenge, number));
            own = Some((challenge, number));
        }
        let bytes = self.message(Body::Reply(Reply {
            response: &response,
            challenge: own.as_ref().map(|(bytes, number)| (&bytes[..], *number)),
            public: &answer.public,
        }));
        let expected = Expected {
            agreed: Agreed {
                hash,
                group: received.group,
                mutual: expected.is_some(),
            },
            response: expected,
        };
        Ok(HostEndState::Reply(bytes, expected))
    }

    fn take_success(&mut self, expected: Expected, bytes: &[u8]) -> Result<HostEndState, Reason> {
        let (hash_bytes, response) = match self.parse(bytes, "Success1")? {
            Body::Success1 {
                hash_bytes,
                response,
            } => (hash_bytes, response),
            other => {
                let (got, expected) = (other.name(), "Success1");
                return Err(Reason::Unexpected { got, expected });
            }
        };
        let Expected {
            agreed,
            response: Some(own),
        } = expected
        else {
            return Ok(HostEndState::Completed(expected.agreed));
        };
        if usize::from(hash_bytes) != agreed.hash.bytes() {
            return Err(Reason::Malformed(MessageError::Field {
                message: "Success1",
                field: "the length of the hash",
                value: hash_bytes.into(),
            }));
        }
        match response {
            None => Err(Reason::NoControllerProof),
            Some(response) if own.equals(response) => Ok(HostEndState::Success2(agreed)),
            Some(_) => Err(Reason::WrongControllerResponse),
        }
    }
}

impl std::fmt::Debug for HostEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostEnd")
            .field("transaction", &self.transaction)
            .finish_non_exhaustive()
    }
}

impl Reason {
    /// False if a retry with the same keys may succeed: after a lack of resources, a timeout, or an
    /// unknown reason of the other end.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NoRandom(_) | Self::Overloaded | Self::TimedOut(_) => false,
            Self::GivenUp(failed) => !matches!(failed, Failed::Other(_)),
            _ => true,
        }
    }
}
