//! The controller's side of a DH-HMAC-CHAP transaction, as a state machine.
//!
//! ```text
//!              Send                          Receive
//!   Negotiate ──────▶ Preparing ─▶ Challenge ───────▶ Reply ─▶ Verifying ─▶ Success1
//!                     (job)                                    (job)           │ Receive
//!                                                          Completed ◀─────────┤ R2 not wanted
//!                                                          Completed ◀─ Success2 (Send)
//! ```
//!
//! An error of the host leads to Failure1, which the next Receive returns, and then to Error. The
//! completion of a Send never reports it. A transaction whose host sends no message in time ends in
//! Error.

use std::sync::Arc;
use std::time::Duration;

use nacre_reactor::Nanos;

use super::group::{Exponent, Group};
use super::hash::{Digest, Hash};
use super::job::{Answer, Job, KeySource, Keys};
use super::message::{
    Body, Challenge, FAILURE_BYTES, Failed, Message, MessageError, Negotiate, Reply,
};
use super::offer::Offer;
use super::response::{Basis, Names, Prover};
use super::{Agreed, ChannelPolicy, Concatenation, Progress, Random, Reason, sequence_number};

/// The answer to an Authentication Receive.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    Message(Vec<u8>),
    /// The answer depends on a job that has not returned.
    Wait,
    /// The host's buffer is too short even for Failure1.
    TooShort,
    /// The controller has no message to send.
    Unexpected,
}

pub struct ControllerEnd {
    names: Names,
    /// The sets of keys that the host may use: one, or two during a rotation. Without keys the
    /// transaction fails.
    keys: Vec<Arc<dyn KeySource>>,
    /// The set that the host used.
    used: Option<Arc<dyn KeySource>>,
    offer: Offer,
    policy: ChannelPolicy,
    /// The secure channel that the host asks for.
    channel: Concatenation,
    random: Box<dyn Random>,
    /// Time limit of each message of the host.
    patience: Duration,
    deadline: Nanos,
    state: ControllerEndState,
    transaction: u16,
    agreed: Option<Agreed>,
    /// The generated PSK (PSKg), if the host requests secure channel concatenation.
    generated: Option<Digest>,
    job: Option<Job>,
    failure: Option<Reason>,
}

enum ControllerEndState {
    Negotiate,
    Preparing(ChosenAlgorithms),
    /// The Challenge is ready, and is sent by the next Receive.
    Challenge(Issued),
    Reply(Issued),
    Verifying(Issued, ReplyContent),
    Success1 {
        hash: Hash,
        response: Option<Vec<u8>>,
    },
    Success2,
    Failure1(Failed),
    Completed,
    Error,
}

/// The choice of hash function and group, and the secret that belongs to it.
struct ChosenAlgorithms {
    hash: Hash,
    group: Group,
    exponent: Exponent,
}

/// A Challenge.
struct Issued {
    chosen: ChosenAlgorithms,
    /// The readable sets of keys, each with its source.
    keys: Vec<(Arc<dyn KeySource>, Keys)>,
    challenge: Vec<u8>,
    number: u32,
    public: Vec<u8>,
}

/// The content of a Reply of the host.
struct ReplyContent {
    response: Vec<u8>,
    challenge: Option<(Vec<u8>, u32)>,
}

impl ControllerEnd {
    pub fn new(
        names: Names,
        keys: impl IntoIterator<Item = Arc<dyn KeySource>>,
        offer: Offer,
        random: Box<dyn Random>,
        patience: Duration,
        now: Nanos,
    ) -> Self {
        Self {
            names,
            keys: keys.into_iter().collect(),
            used: None,
            offer,
            policy: ChannelPolicy::default(),
            channel: Concatenation::None,
            random,
            patience,
            deadline: now + patience,
            state: ControllerEndState::Negotiate,
            transaction: 0,
            agreed: None,
            generated: None,
            job: None,
            failure: None,
        }
    }

    /// Sets the supported secure channel concatenation; initially none.
    pub fn with_channel(mut self, policy: ChannelPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// The secure channel concatenation that the host requests.
    pub fn channel(&self) -> Concatenation {
        self.channel
    }

    /// Removes and returns the PSK that the completed transaction generated.
    pub fn take_generated(&mut self) -> Option<Digest> {
        match self.state {
            ControllerEndState::Completed => self.generated.take(),
            _ => None,
        }
    }

    pub fn progress(&self) -> Progress {
        match self.state {
            ControllerEndState::Negotiate | ControllerEndState::Preparing(_) => Progress::Negotiate,
            ControllerEndState::Challenge(_) => Progress::Challenge,
            ControllerEndState::Reply(_) | ControllerEndState::Verifying(..) => Progress::Reply,
            ControllerEndState::Success1 { .. } => Progress::Success1,
            ControllerEndState::Success2 => Progress::Success2,
            ControllerEndState::Failure1(_) => Progress::Failure1,
            ControllerEndState::Completed => Progress::Completed,
            ControllerEndState::Error => Progress::Error,
        }
    }

    /// The parameters, once hash function and group are chosen.
    pub fn agreed(&self) -> Option<Agreed> {
        self.agreed
    }

    /// The keys that the host used, once its response is verified.
    pub fn used_keys(&self) -> Option<&Arc<dyn KeySource>> {
        self.used.as_ref()
    }

    pub fn is_completed(&self) -> bool {
        matches!(self.state, ControllerEndState::Completed)
    }

    /// True if the transaction has failed, and the host has received Failure1 or will not receive
    /// it.
    pub fn is_over(&self) -> bool {
        matches!(self.state, ControllerEndState::Error)
    }

    /// Removes and returns the reason of the failure.
    pub fn take_failure(&mut self) -> Option<Reason> {
        self.failure.take()
    }

    /// Removes and returns the job for the helper thread. Its answer goes to
    /// [`ControllerEnd::answered`].
    pub fn take_job(&mut self) -> Option<Job> {
        self.job.take()
    }

    /// Checks the time limit of the host's next command. Returns true if it has expired, which ends
    /// the transaction.
    pub fn check_time(&mut self, now: Nanos) -> bool {
        let is_pending = !matches!(
            self.state,
            ControllerEndState::Completed | ControllerEndState::Error
        );
        let is_late = is_pending && now >= self.deadline;
        if is_late {
            self.failure.get_or_insert(Reason::TimedOut(self.patience));
            self.state = ControllerEndState::Error;
        }
        is_late
    }

    /// Fails the transaction for a reason other than its messages, such as an overloaded helper
    /// thread.
    pub fn abandon(&mut self, reason: Reason) {
        self.give_up(reason);
    }

    /// Handles an Authentication Send.
    pub fn send(&mut self, bytes: &[u8], now: Nanos) {
        // A host that goes on sending in place of fetching Failure1 gains no time.
        if !matches!(self.state, ControllerEndState::Failure1(_)) {
            self.deadline = now + self.patience;
        }
        if let Err(reason) = self.take_message(bytes) {
            self.give_up(reason);
        }
    }

    /// Handles an Authentication Receive; `room`: its allocation length in bytes.
    pub fn receive(&mut self, room: usize, now: Nanos) -> Received {
        if room < FAILURE_BYTES {
            self.give_up(Reason::Malformed(MessageError::Short {
                message: "Failure1",
                got: room,
                needed: FAILURE_BYTES,
            }));
            self.state = ControllerEndState::Error;
            return Received::TooShort;
        }
        let bytes = match &self.state {
            ControllerEndState::Preparing(_) | ControllerEndState::Verifying(..) => {
                return Received::Wait;
            }
            ControllerEndState::Challenge(issued) => self.message(Body::Challenge(Challenge {
                hash: issued.chosen.hash.id(),
                group: issued.chosen.group.id(),
                number: issued.number,
                challenge: &issued.challenge,
                public: &issued.public,
            })),
            ControllerEndState::Success1 { hash, response } => self.message(Body::Success1 {
                hash_bytes: hash.bytes() as u8,
                response: response.as_deref(),
            }),
            ControllerEndState::Failure1(failed) => self.message(Body::Failure1(*failed)),
            ControllerEndState::Negotiate
            | ControllerEndState::Reply(_)
            | ControllerEndState::Success2
            | ControllerEndState::Completed
            | ControllerEndState::Error => return Received::Unexpected,
        };
        if bytes.len() > room {
            let got = room;
            let error = MessageError::Short {
                message: "the message that the host fetches",
                got,
                needed: bytes.len(),
            };
            self.give_up(Reason::Malformed(error));
            self.state = ControllerEndState::Error;
            return Received::Message(self.message(Body::Failure1(Failed::IncorrectPayload)));
        }
        self.deadline = now + self.patience;
        self.state = match std::mem::replace(&mut self.state, ControllerEndState::Error) {
            ControllerEndState::Challenge(issued) => ControllerEndState::Reply(issued),
            ControllerEndState::Success1 { response, .. } if response.is_some() => {
                ControllerEndState::Success2
            }
            ControllerEndState::Success1 { .. } => ControllerEndState::Completed,
            _ => ControllerEndState::Error,
        };
        Received::Message(bytes)
    }

    /// Handles the answer of the job.
    pub fn answered(&mut self, answer: Answer, now: Nanos) {
        // The host's time does not run while this end computes.
        self.deadline = now + self.patience;
        let result = match std::mem::replace(&mut self.state, ControllerEndState::Error) {
            ControllerEndState::Preparing(chosen) => self.prepared(chosen, answer),
            ControllerEndState::Verifying(issued, proof) => self.verify(&issued, &proof, &answer),
            other => Ok(other),
        };
        match result {
            Ok(state) => self.state = state,
            Err(reason) => self.give_up(reason),
        }
    }

    fn message(&self, body: Body) -> Vec<u8> {
        let transaction = self.transaction;
        Message { transaction, body }.to_bytes()
    }

    fn give_up(&mut self, reason: Reason) {
        self.state = ControllerEndState::Failure1(reason.failed());
        self.job = None;
        self.failure.get_or_insert(reason);
    }

    fn take_message(&mut self, bytes: &[u8]) -> Result<(), Reason> {
        if matches!(self.state, ControllerEndState::Error) {
            return Ok(());
        }
        let message = Message::parse(bytes)?;
        let expected = match self.state {
            ControllerEndState::Negotiate => "Negotiate",
            ControllerEndState::Reply(_) => "Reply",
            ControllerEndState::Success2 => "Success2",
            _ => "Authentication Receive",
        };
        let got = message.body.name();
        if !matches!(self.state, ControllerEndState::Negotiate)
            && message.transaction != self.transaction
        {
            let got = "a message of another transaction";
            return Err(Reason::Unexpected { got, expected });
        }
        self.transaction = message.transaction;
        match (
            std::mem::replace(&mut self.state, ControllerEndState::Error),
            message.body,
        ) {
            (ControllerEndState::Negotiate, Body::Negotiate(negotiate)) => {
                self.state = ControllerEndState::Negotiate;
                self.choose(&negotiate)
            }
            (ControllerEndState::Reply(issued), Body::Reply(reply)) => {
                self.take_reply(issued, &reply)
            }
            (ControllerEndState::Success2, Body::Success2) => {
                self.state = ControllerEndState::Completed;
                Ok(())
            }
            (state, Body::Failure2(failed)) if !matches!(state, ControllerEndState::Negotiate) => {
                self.failure.get_or_insert(Reason::GivenUp(failed));
                Ok(())
            }
            (state, _) => {
                self.state = state;
                Err(Reason::Unexpected { got, expected })
            }
        }
    }

    fn choose(&mut self, negotiate: &Negotiate) -> Result<(), Reason> {
        let (hashes, groups) = negotiate.offer.ok_or(Reason::Protocol)?;
        let asked = negotiate.secure_channel;
        self.channel = match asked {
            0 if self.policy.required => return Err(Reason::SecureChannelRequired),
            0 => Concatenation::None,
            asked if asked == self.policy.possible.code() => self.policy.possible,
            asked => return Err(Reason::SecureChannel { asked }),
        };
        let usable = self.channel.usable(&self.offer);
        let hash = usable.hash_among(hashes).ok_or(Reason::Hash)?;
        let group = usable.group_among(groups).ok_or_else(|| {
            // The other groups are common to both ends.
            match self.offer.group_among(groups) {
                Some(_) => Reason::SecureChannelGroup,
                None => Reason::Group,
            }
        })?;
        if self.keys.is_empty() {
            return Err(Reason::NoKey);
        }
        let exponent = group.exponent(self.random.as_mut())?;
        self.agreed = Some(Agreed {
            hash,
            group,
            mutual: false,
        });
        self.job = Some(Job {
            keys: self.keys.clone(),
            public: true,
            peer: None,
            group,
            exponent: Some(exponent.clone()),
        });
        self.state = ControllerEndState::Preparing(ChosenAlgorithms {
            hash,
            group,
            exponent,
        });
        Ok(())
    }

    fn prepared(
        &mut self,
        chosen: ChosenAlgorithms,
        answer: Answer,
    ) -> Result<ControllerEndState, Reason> {
        // One set that expired or cannot be read leaves the other in force.
        let mut keys = Vec::with_capacity(self.keys.len());
        let mut unreadable = None;
        for (source, read) in self.keys.iter().zip(answer.keys) {
            match read {
                Ok(read) => keys.push((Arc::clone(source), read)),
                Err(error) => {
                    unreadable.get_or_insert(error);
                }
            }
        }
        if keys.is_empty() {
            return Err(unreadable.map_or(Reason::NoKey, Reason::Key));
        }
        let mut challenge = vec![0; chosen.hash.bytes()];
        self.random.fill(&mut challenge)?;
        let number = sequence_number(self.random.as_mut())?;
        Ok(ControllerEndState::Challenge(Issued {
            chosen,
            keys,
            challenge,
            number,
            public: answer.public,
        }))
    }

    fn take_reply(&mut self, issued: Issued, reply: &Reply) -> Result<(), Reason> {
        let (hash, group) = (issued.chosen.hash, issued.chosen.group);
        let lengths = [
            ("the length of the hash", reply.response.len(), hash.bytes()),
            (
                "the length of the DH value",
                reply.public.len(),
                group.bytes(),
            ),
        ];
        for (field, got, expected) in lengths {
            if got != expected {
                return Err(Reason::Malformed(MessageError::Field {
                    message: "Reply",
                    field,
                    value: got as u32,
                }));
            }
        }
        if !group.has(reply.public) {
            return Err(Reason::PublicValue);
        }
        let challenge = reply.challenge;
        let makes_psk = self.channel != Concatenation::None;
        let missing = |field, value| {
            Err(Reason::Malformed(MessageError::Field {
                message: "Reply",
                field,
                value,
            }))
        };
        match challenge {
            // C2 is a part of the PSK.
            None if makes_psk => return missing("CVALID", 0),
            Some((_, 0)) if !makes_psk => return missing("the sequence number", 0),
            _ => {}
        }
        if let Some((challenge, number)) = challenge {
            if challenge == issued.challenge {
                return Err(Reason::Reflected);
            }
            let has_controller_key = |(_, keys): &(_, Keys)| keys.controller.is_some();
            if number != 0 && !issued.keys.iter().any(has_controller_key) {
                return Err(Reason::NoControllerKey);
            }
        }
        let proof = ReplyContent {
            response: reply.response.to_vec(),
            challenge: challenge.map(|(bytes, number)| (bytes.to_vec(), number)),
        };
        if group == Group::Null {
            let no_answer = Answer {
                keys: Vec::new(),
                public: Vec::new(),
                shared: None,
            };
            self.state = self.verify(&issued, &proof, &no_answer)?;
            return Ok(());
        }
        self.job = Some(Job {
            keys: Vec::new(),
            public: false,
            peer: Some(reply.public.to_vec()),
            group,
            exponent: Some(issued.chosen.exponent.clone()),
        });
        self.state = ControllerEndState::Verifying(issued, proof);
        Ok(())
    }

    fn verify(
        &mut self,
        issued: &Issued,
        proof: &ReplyContent,
        answer: &Answer,
    ) -> Result<ControllerEndState, Reason> {
        let basis = Basis {
            hash: issued.chosen.hash,
            shared: answer.shared.as_ref().map(|shared| shared.as_slice()),
            transaction: self.transaction,
            channel: self.channel,
            names: &self.names,
        };
        let fits = |(_, keys): &&(_, Keys)| {
            let key = keys.host.key(&self.names.host);
            let expected = basis.response(Prover::Host, &key, &issued.challenge, issued.number);
            expected.equals(&proof.response)
        };
        let (source, keys) = issued.keys.iter().find(fits).ok_or(Reason::WrongResponse)?;
        self.used = Some(Arc::clone(source));
        let mut response = None;
        if let Some((challenge, _)) = &proof.challenge
            && self.channel != Concatenation::None
        {
            self.generated = basis.generated(&issued.challenge, challenge);
        }
        if let Some((challenge, number)) = &proof.challenge
            && *number != 0
        {
            // The host expects the controller key that belongs to its own.
            let secret = keys.controller.as_ref();
            let key = secret
                .ok_or(Reason::NoControllerKey)?
                .key(&self.names.subsystem);
            let own = basis.response(Prover::Controller, &key, challenge, *number);
            response = Some(own.to_vec());
        }
        if let Some(agreed) = &mut self.agreed {
            agreed.mutual = response.is_some();
        }
        Ok(ControllerEndState::Success1 {
            hash: issued.chosen.hash,
            response,
        })
    }
}

impl std::fmt::Debug for ControllerEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControllerEnd")
            .field("progress", &self.progress())
            .field("agreed", &self.agreed)
            .finish_non_exhaustive()
    }
}
