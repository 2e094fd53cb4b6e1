//! The body of the fuzz target `authentication`. It is here, not in the target, so that an ordinary
//! test replays its corpus.
//!
//! ```text
//!   byte 0   bit 0: the bytes go to a controller's end, otherwise to a host's
//!            bit 1: the other end has another key
//!   then     messages: length[2] bytes, until the end; length 0: the other end's true message
//! ```
//!
//! It proves: no panic; an accepted message survives writing and reading; no end succeeds if the
//! other has another key.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::Nqn;
use nacre_reactor::Nanos;

use super::message::Message;
use super::{
    ControllerEnd, FixedKeys, Group, Hash, HostEnd, KeySource, Keys, Names, NoRandom, Offer,
    Random, Received, Secret, TransactionStep,
};

/// The same bytes in every run: a failing input has to fail again. The fuzzer found its corpus with
/// this sequence, so it stays as it is.
#[derive(Debug, Clone, Copy)]
pub struct Counter(pub u64);

impl Random for Counter {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandom> {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005) + 1;
            *byte = (self.0 >> 56) as u8;
        }
        Ok(())
    }
}

pub fn authentication(input: &[u8]) {
    let _ = Message::parse(input).map(|message| {
        let bytes = message.to_bytes();
        assert_eq!(Message::parse(&bytes).as_ref(), Ok(&message));
    });
    let [choice, rest @ ..] = input else { return };
    let same = choice & 2 == 0;
    let mut pair = Ends::new(same);
    let mut rest = rest;
    while let [low, high, tail @ ..] = rest {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        let (message, tail) = tail.split_at(length);
        rest = tail;
        if choice & 1 == 1 {
            pair.pass_to_controller(message);
        } else {
            pair.pass_to_host(message);
        }
    }
    let host_done = matches!(pair.host.step(), TransactionStep::Completed(_));
    let done = pair.controller.is_completed() || host_done;
    assert!(!done || same, "success with a wrong key");
}

struct Ends {
    controller: ControllerEnd,
    host: HostEnd,
}

impl Ends {
    fn new(same: bool) -> Self {
        let nqn = |text| Nqn::new(text).expect("a name");
        let names = Names {
            host: nqn("nqn.2026-01.io.nacre:fuzz-host"),
            subsystem: nqn("nqn.2026-01.io.nacre:fuzz"),
        };
        let secret = |seed| Secret::generate(None, &mut Counter(seed)).expect("it counts");
        let keys = |seed| -> Arc<dyn KeySource> {
            let keys = Keys {
                host: secret(seed),
                controller: Some(secret(3)),
            };
            Arc::new(FixedKeys(keys))
        };
        let offer = Offer {
            hashes: vec![Hash::Sha256],
            groups: vec![Group::Null],
        };
        let (host_keys, random) = (keys(if same { 1 } else { 2 }), Box::new(Counter(9)));
        Self {
            controller: ControllerEnd::new(
                names.clone(),
                Some(keys(1)),
                offer.clone(),
                Box::new(Counter(7)),
                Duration::from_secs(1),
                Nanos(1),
            ),
            host: HostEnd::new(names, host_keys, offer, 1, random),
        }
    }

    /// Gives the controller these bytes, or what its host sends.
    fn pass_to_controller(&mut self, bytes: &[u8]) {
        match self.host.step() {
            TransactionStep::Send(own) => {
                let bytes = if bytes.is_empty() { &own[..] } else { bytes };
                self.controller.send(bytes, Nanos(1));
                self.host.sent();
            }
            TransactionStep::Receive => self.fetch(None),
            TransactionStep::Compute(job) => self.host.answered(job.run()),
            _ => {}
        }
        self.compute();
    }

    /// Gives the host these bytes, or what its controller sends.
    fn pass_to_host(&mut self, bytes: &[u8]) {
        match self.host.step() {
            TransactionStep::Send(own) => {
                self.controller.send(&own, Nanos(1));
                self.host.sent();
            }
            TransactionStep::Receive => self.fetch((!bytes.is_empty()).then_some(bytes)),
            TransactionStep::Compute(job) => self.host.answered(job.run()),
            _ => {}
        }
        self.compute();
    }

    fn fetch(&mut self, instead: Option<&[u8]>) {
        let own = match self.controller.receive(4096, Nanos(1)) {
            Received::Message(bytes) => bytes,
            _ => Vec::new(),
        };
        self.host.received(instead.unwrap_or(&own));
    }

    fn compute(&mut self) {
        if let Some(job) = self.controller.take_job() {
            self.controller.answered(job.run(), Nanos(1));
        }
    }
}
