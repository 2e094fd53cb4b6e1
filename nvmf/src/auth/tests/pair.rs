//! Host and controller in one thread and in virtual time.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::Nqn;
use nacre_reactor::Nanos;

use crate::auth::fuzzing::Counter;
use crate::auth::message::{Body, Failed, Message};
use crate::auth::{
    Agreed, ChannelPolicy, Concatenation, ControllerEnd, FixedKeys, Group, Hash, HostEnd, KeyError,
    KeySource, Keys, Names, Offer, Progress, Reason, Received, Secret, TransactionStep,
};

const PATIENCE: Duration = Duration::from_secs(120);
const TRANSACTION: u16 = 0x1234;

fn secret(seed: u64, hash: Option<Hash>) -> Secret {
    Secret::generate(hash, &mut Counter(seed)).unwrap()
}

pub(super) fn keys(host: u64, controller: Option<u64>) -> Keys {
    Keys {
        host: secret(host, Some(Hash::Sha256)),
        controller: controller.map(|seed| secret(seed, Some(Hash::Sha384))),
    }
}

fn names() -> Names {
    let nqn = |text| Nqn::new(text).unwrap();
    Names {
        host: nqn("nqn.2026-01.io.nacre:host"),
        subsystem: nqn("nqn.2026-01.io.nacre:subsystem"),
    }
}

pub(super) fn only(hash: Hash, group: Group) -> Offer {
    Offer {
        hashes: vec![hash],
        groups: vec![group],
    }
}

/// Keys in a file that is gone.
#[derive(Debug)]
struct UnreadableKeys;

impl KeySource for UnreadableKeys {
    fn keys(&self) -> Result<Keys, KeyError> {
        Err(KeyError::Unreadable {
            name: "key0".into(),
            why: "no such file".into(),
        })
    }

    fn has_controller_key(&self) -> bool {
        false
    }
}

type Meddle = dyn FnMut(usize, &mut Vec<u8>);

pub(super) struct Pair {
    pub host: HostEnd,
    pub controller: ControllerEnd,
    now: Nanos,
    /// Sees, and may change, each message: its number, and its bytes.
    meddle: Box<Meddle>,
    pub messages: usize,
    /// Receives that had to wait for a job of the controller.
    waits: usize,
}

impl Pair {
    pub(super) fn new(
        host: Keys,
        controller: Option<Keys>,
        host_offer: Offer,
        offer: Offer,
    ) -> Self {
        let source = controller.map(|keys| Arc::new(FixedKeys(keys)) as Arc<dyn KeySource>);
        Self::with_source(Arc::new(FixedKeys(host)), source, host_offer, offer)
    }

    fn with_source(
        host: Arc<dyn KeySource>,
        controller: Option<Arc<dyn KeySource>>,
        host_offer: Offer,
        offer: Offer,
    ) -> Self {
        let now = Nanos(1);
        let random = || Box::new(Counter(7));
        Self {
            host: HostEnd::new(names(), host, host_offer, TRANSACTION, Box::new(Counter(8))),
            controller: ControllerEnd::new(names(), controller, offer, random(), PATIENCE, now),
            now,
            meddle: Box::new(|_, _| {}),
            messages: 0,
            waits: 0,
        }
    }

    /// The controller has these sets of keys.
    pub(super) fn with_sets(self, sets: Vec<Arc<dyn KeySource>>, offer: Offer) -> Self {
        let random = Box::new(Counter(7));
        Self {
            controller: ControllerEnd::new(names(), sets, offer, random, PATIENCE, self.now),
            ..self
        }
    }

    pub(super) fn with_channel(self, wanted: Concatenation, policy: ChannelPolicy) -> Self {
        Self {
            host: self.host.with_channel(wanted),
            controller: self.controller.with_channel(policy),
            ..self
        }
    }

    pub(super) fn meddling(mut self, meddle: impl FnMut(usize, &mut Vec<u8>) + 'static) -> Self {
        self.meddle = Box::new(meddle);
        self
    }

    fn pass(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        (self.meddle)(self.messages, &mut bytes);
        self.messages += 1;
        bytes
    }

    /// Runs both ends to their end.
    pub(super) fn run(&mut self) -> Result<Agreed, Reason> {
        for _ in 0..32 {
            match self.host.step() {
                TransactionStep::Send(bytes) => {
                    let bytes = self.pass(bytes);
                    self.controller.send(&bytes, self.now);
                    self.host.sent();
                }
                TransactionStep::Receive => {
                    let bytes = self.receive();
                    let bytes = self.pass(bytes);
                    self.host.received(&bytes);
                }
                TransactionStep::Compute(job) => self.host.answered(job.run()),
                TransactionStep::Wait => panic!("every step was reported"),
                TransactionStep::Completed(agreed) => return Ok(agreed),
                TransactionStep::Failed(reason) => return Err(reason),
            }
        }
        panic!("no end");
    }

    fn receive(&mut self) -> Vec<u8> {
        loop {
            match self.controller.receive(4096, self.now) {
                Received::Message(bytes) => return bytes,
                Received::Wait => {
                    self.waits += 1;
                    let job = self.controller.take_job().expect("it waits for a job");
                    self.controller.answered(job.run(), self.now);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Goal: both ends succeed and agree, for every hash, group and direction.
#[test]
fn every_hash_and_group() {
    for hash in Hash::ALL {
        for group in Group::ALL {
            for mutual in [false, true] {
                let keys = keys(1, mutual.then_some(2));
                let (all, one) = (Offer::default(), only(hash, group));
                let mut pair = Pair::new(keys.clone(), Some(keys), all, one);
                let agreed = Agreed {
                    hash,
                    group,
                    mutual,
                };
                assert_eq!(pair.run(), Ok(agreed));
                assert_eq!(pair.controller.progress(), Progress::Completed);
                assert_eq!(pair.controller.agreed(), Some(agreed));
                assert_eq!(pair.controller.take_failure(), None);
                assert_eq!(pair.messages, if mutual { 5 } else { 4 });
                let jobs = if group == Group::Null { 1 } else { 2 };
                assert_eq!(pair.waits, jobs);
            }
        }
    }
}

/// Goal: secrets of every length and transformation work with every hash.
#[test]
fn every_kind_of_secret() {
    let kinds = [
        None,
        Some(Hash::Sha256),
        Some(Hash::Sha384),
        Some(Hash::Sha512),
    ];
    for transform in kinds {
        for hash in Hash::ALL {
            let keys = Keys {
                host: secret(1, transform),
                controller: Some(secret(2, transform)),
            };
            let offer = only(hash, Group::Null);
            let mut pair = Pair::new(keys.clone(), Some(keys), offer.clone(), offer);
            assert!(pair.run().unwrap().mutual, "{transform:?} {hash}");
        }
    }
}

/// Goal: the controller takes its first choice among the host's, and SPDK's rule the strongest.
#[test]
fn choices() {
    let host = Offer {
        hashes: vec![Hash::Sha512, Hash::Sha384],
        groups: vec![Group::Null, Group::Ffdhe2048, Group::Ffdhe4096],
    };
    let table = [
        (Offer::default(), (Hash::Sha384, Group::Ffdhe4096)),
        (Offer::strongest(), (Hash::Sha512, Group::Ffdhe4096)),
        (
            Offer {
                hashes: vec![Hash::Sha256, Hash::Sha512],
                groups: vec![Group::Ffdhe8192, Group::Null],
            },
            (Hash::Sha512, Group::Null),
        ),
    ];
    for (offer, expected) in table {
        let mut pair = Pair::new(keys(1, None), Some(keys(1, None)), host.clone(), offer);
        let agreed = pair.run().unwrap();
        assert_eq!((agreed.hash, agreed.group), expected);
    }
}

/// Goal: each way to fail ends both ends, with the reason of each and the code on the wire.
#[test]
fn failures() {
    let null = || only(Hash::Sha256, Group::Null);
    let given_up = Reason::GivenUp;
    let table = [
        (
            "wrong key",
            Pair::new(keys(1, None), Some(keys(2, None)), null(), null()),
            given_up(Failed::Authentication),
            Reason::WrongResponse,
        ),
        (
            "wrong key, with a group",
            Pair::new(
                keys(1, None),
                Some(keys(2, None)),
                only(Hash::Sha512, Group::Ffdhe2048),
                Offer::default(),
            ),
            given_up(Failed::Authentication),
            Reason::WrongResponse,
        ),
        (
            "no key at the controller",
            Pair::new(keys(1, None), None, null(), null()),
            given_up(Failed::Authentication),
            Reason::NoKey,
        ),
        (
            "wrong controller key",
            Pair::new(keys(1, Some(2)), Some(keys(1, Some(3))), null(), null()),
            Reason::WrongControllerResponse,
            given_up(Failed::Authentication),
        ),
        (
            "no controller key",
            Pair::new(keys(1, Some(2)), Some(keys(1, None)), null(), null()),
            given_up(Failed::Authentication),
            Reason::NoControllerKey,
        ),
        (
            "no common hash",
            Pair::new(
                keys(1, None),
                Some(keys(1, None)),
                null(),
                only(Hash::Sha384, Group::Null),
            ),
            given_up(Failed::HashUnusable),
            Reason::Hash,
        ),
        (
            "no common group",
            Pair::new(
                keys(1, None),
                Some(keys(1, None)),
                null(),
                only(Hash::Sha256, Group::Ffdhe2048),
            ),
            given_up(Failed::GroupUnusable),
            Reason::Group,
        ),
        (
            "the key file is gone",
            Pair::with_source(
                Arc::new(FixedKeys(keys(1, None))),
                Some(Arc::new(UnreadableKeys)),
                null(),
                null(),
            ),
            given_up(Failed::Authentication),
            Reason::Key(UnreadableKeys.keys().unwrap_err()),
        ),
        (
            "the host's key file is gone",
            Pair::with_source(
                Arc::new(UnreadableKeys),
                Some(Arc::new(FixedKeys(keys(1, None)))),
                null(),
                null(),
            ),
            Reason::Key(UnreadableKeys.keys().unwrap_err()),
            given_up(Failed::Authentication),
        ),
    ];
    for (name, mut pair, of_host, of_controller) in table {
        assert_eq!(pair.run(), Err(of_host), "{name}");
        assert!(pair.controller.is_over(), "{name}");
        assert_eq!(
            pair.controller.take_failure(),
            Some(of_controller),
            "{name}"
        );
        assert_eq!(pair.controller.take_failure(), None, "once");
    }
}

/// Goal: during a rotation either set of keys is good, each with its own controller key, and a set
/// that cannot be read takes nothing from the other.
#[test]
fn two_sets_of_keys() {
    let source = |host, controller| -> Arc<dyn KeySource> {
        Arc::new(FixedKeys(keys(host, Some(controller))))
    };
    let unreadable: Arc<dyn KeySource> = Arc::new(UnreadableKeys);
    let (new, former) = (source(1, 2), source(3, 4));
    let run = |host: Keys, sets: Vec<Arc<dyn KeySource>>| {
        let null = || only(Hash::Sha256, Group::Null);
        let mut pair = Pair::new(host, None, null(), null()).with_sets(sets, null());
        let result = pair.run().map(|agreed| agreed.mutual);
        (result, pair.controller.used_keys().cloned())
    };
    let both = vec![Arc::clone(&new), Arc::clone(&former)];
    let cases = [
        (keys(1, Some(2)), both.clone(), Ok(Some(&new))),
        (keys(3, Some(4)), both.clone(), Ok(Some(&former))),
        (
            keys(3, Some(4)),
            vec![Arc::clone(&unreadable), Arc::clone(&former)],
            Ok(Some(&former)),
        ),
        (
            keys(3, Some(2)),
            both.clone(),
            Err(Reason::WrongControllerResponse),
        ),
        (
            keys(5, None),
            both.clone(),
            Err(Reason::GivenUp(Failed::Authentication)),
        ),
        (
            keys(3, None),
            vec![new.clone(), unreadable],
            Err(Reason::GivenUp(Failed::Authentication)),
        ),
    ];
    for (at, (host, sets, expected)) in cases.into_iter().enumerate() {
        let (result, used) = run(host, sets);
        match expected {
            Ok(source) => {
                assert_eq!(result, Ok(true), "case {at}");
                let is_same = source.zip(used.as_ref()).map(|(a, b)| Arc::ptr_eq(a, b));
                assert_eq!(is_same, Some(true), "case {at}");
            }
            Err(reason) => assert_eq!(result, Err(reason), "case {at}"),
        }
    }
}

/// Goal: neither end takes a changed message. Method: each message of a mutual transaction, changed
/// byte by byte; only reserved bytes may change without a failure.
#[test]
fn every_byte_counts() {
    let offer = || only(Hash::Sha256, Group::Null);
    // AUTH_TYPE .. T_ID are 6 bytes; in all messages bytes 2 and 3 are reserved.
    let reserved: [&[usize]; 5] = [&[2, 3, 9], &[2, 3, 7], &[2, 3, 7, 9], &[2, 3, 7], &[2, 3]];
    let lengths = [8 + 64, 16 + 32, 16 + 64, 16 + 32, 16];
    for message in 0..5 {
        for at in 0..lengths[message] {
            let is_padding = match message {
                // Places of identifiers that the lists do not have.
                0 => at > 12 && at != 42,
                3 => (9..16).contains(&at),
                4 => at > 5,
                _ => false,
            };
            let keys = keys(1, Some(2));
            let pair = Pair::new(keys.clone(), Some(keys), offer(), offer());
            let mut pair = pair.meddling(move |number, bytes| {
                if number == message {
                    bytes[at] ^= 0x80;
                }
            });
            let result = pair.run();
            let failed = result.is_err() || pair.controller.take_failure().is_some();
            let may_change = is_padding || reserved[message].contains(&at);
            assert_eq!(
                failed, !may_change,
                "byte {at} of message {message}: {result:?}"
            );
        }
    }
}

/// Goal: the host takes nothing that it did not offer. Method: a Challenge with another hash
/// function or group, as the inverted test of some targets produces.
#[test]
fn choices_that_were_not_offered() {
    let offer = || only(Hash::Sha256, Group::Null);
    for (at, value, expected) in [
        (8, 2, Reason::HashNotOffered { id: 2 }),
        (8, 9, Reason::HashNotOffered { id: 9 }),
        (9, 1, Reason::GroupNotOffered { id: 1 }),
        (9, 0x10, Reason::GroupNotOffered { id: 0x10 }),
    ] {
        let pair = Pair::new(keys(1, None), Some(keys(1, None)), offer(), offer());
        let mut pair = pair.meddling(move |number, bytes| {
            if number == 1 {
                bytes[at] = value;
            }
        });
        let code = expected.failed();
        assert_eq!(pair.run(), Err(expected));
        let failure = pair.controller.take_failure();
        assert_eq!(failure, Some(Reason::GivenUp(code)));
    }
}

/// Goal: a host that returns the controller's own challenge as its C2 gets no R2.
#[test]
fn reflection() {
    let keys = keys(1, Some(1));
    let offer = || only(Hash::Sha256, Group::Null);
    let pair = Pair::new(keys.clone(), Some(keys), offer(), offer());
    let mut challenge = Vec::new();
    let mut pair = pair.meddling(move |number, bytes| match number {
        1 => challenge = bytes[16..48].to_vec(),
        2 => bytes[48..80].copy_from_slice(&challenge),
        _ => {}
    });
    assert!(pair.run().is_err());
    assert_eq!(pair.controller.take_failure(), Some(Reason::Reflected));
}

/// Goal: a controller that leaves out its proof fails where the host has a controller key.
#[test]
fn a_proof_that_is_left_out() {
    let offer = || only(Hash::Sha256, Group::Null);
    let keys = keys(1, Some(2));
    let pair = Pair::new(keys.clone(), Some(keys), offer(), offer());
    let mut pair = pair.meddling(|number, bytes| {
        if number == 3 {
            bytes[8] = 0;
        }
    });
    assert_eq!(pair.run(), Err(Reason::NoControllerProof));
}

/// Goal: public values that make the shared secret known are refused by both ends.
#[test]
fn degenerate_public_values() {
    for message in [1, 2] {
        let offer = || only(Hash::Sha256, Group::Ffdhe2048);
        let pair = Pair::new(keys(1, None), Some(keys(1, None)), offer(), offer());
        let mut pair = pair.meddling(move |number, bytes| {
            if number == message {
                let from = bytes.len() - 256;
                bytes[from..].fill(0);
                *bytes.last_mut().unwrap() = 1;
            }
        });
        let refused = Reason::GivenUp(Failed::GroupUnusable);
        let expected = if message == 1 {
            (Reason::PublicValue, refused)
        } else {
            (refused, Reason::PublicValue)
        };
        let result = pair.run().unwrap_err();
        assert_eq!((result, pair.controller.take_failure().unwrap()), expected);
    }
}

/// Goal: a host that stays silent is given up, wherever it stops.
#[test]
fn silence() {
    for steps in 0..5 {
        let keys = keys(1, Some(2));
        let offer = || only(Hash::Sha256, Group::Null);
        let mut pair = Pair::new(keys.clone(), Some(keys), offer(), offer());
        pair.now = Nanos(1) + PATIENCE / 2;
        let mut done = 0;
        while done < steps {
            match pair.host.step() {
                TransactionStep::Send(bytes) => {
                    pair.controller.send(&bytes, pair.now);
                    pair.host.sent();
                    done += 1;
                }
                TransactionStep::Receive => {
                    let bytes = pair.receive();
                    pair.host.received(&bytes);
                    done += 1;
                }
                TransactionStep::Compute(job) => pair.host.answered(job.run()),
                other => panic!("{other:?}"),
            }
        }
        let since = if steps == 0 { Nanos(1) } else { pair.now };
        let controller = &mut pair.controller;
        if controller.is_completed() {
            assert!(!controller.check_time(since + PATIENCE * 2));
            continue;
        }
        let just_before = since + PATIENCE - Duration::from_nanos(1);
        assert!(
            !controller.check_time(just_before),
            "after {steps} messages"
        );
        assert!(controller.check_time(since + PATIENCE));
        assert!(controller.is_over());
        let reason = controller.take_failure();
        assert_eq!(reason, Some(Reason::TimedOut(PATIENCE)));
        assert!(!controller.check_time(since + PATIENCE * 2), "once");
    }
}

/// Goal: messages and commands out of turn are refused. Method: each state gets those of other
/// states.
#[test]
fn out_of_turn() {
    let keys = keys(1, None);
    let offer = || only(Hash::Sha256, Group::Null);
    let new = || Pair::new(keys.clone(), Some(keys.clone()), offer(), offer());
    let message = |body| {
        let transaction = TRANSACTION;
        Message { transaction, body }.to_bytes()
    };
    // A Receive before there is anything.
    let mut pair = new();
    let received = pair.controller.receive(4096, pair.now);
    assert_eq!(received, Received::Unexpected);
    // A first message that is no Negotiate.
    for body in [Body::Success2, Body::Failure2(Failed::Authentication)] {
        let mut pair = new();
        pair.controller.send(&message(body), pair.now);
        let refused = message(Body::Failure1(Failed::IncorrectMessage));
        assert_eq!(pair.receive(), refused);
    }
    // A second Negotiate, and a buffer that is too short.
    let mut pair = new();
    let TransactionStep::Send(negotiate) = pair.host.step() else {
        panic!("no Negotiate");
    };
    pair.controller.send(&negotiate, pair.now);
    pair.controller.send(&negotiate, pair.now);
    let refused = message(Body::Failure1(Failed::IncorrectMessage));
    assert_eq!(pair.receive(), refused);
    for (room, expected) in [
        (7, Received::TooShort),
        (
            20,
            Received::Message(message(Body::Failure1(Failed::IncorrectPayload))),
        ),
    ] {
        let mut pair = new();
        pair.controller.send(&negotiate, pair.now);
        let job = pair.controller.take_job().unwrap();
        pair.controller.answered(job.run(), pair.now);
        assert_eq!(pair.controller.receive(room, pair.now), expected);
        assert!(pair.controller.is_over());
    }
    // Garbage is a payload error.
    let mut pair = new();
    pair.controller.send(&[0, 0, 0], pair.now);
    let header = [0, 0xf1, 0, 0, 0, 0, 1, 6];
    assert_eq!(pair.receive(), header);
}
