//! Error injection into the I/O of a queue pair. While there are rules, all I/O takes the path of
//! unusual I/O, so the usual path has no check.

use nacre_bdev::injection::{Injection, Injections};
use nacre_bdev::{Completion, Io, Op, Status};
use nacre_nvmf_wire::StatusCode;
use nacre_reactor::Nanos;

use super::Pair;
use super::slot::Slot;
use crate::command::{self, Verdict};
use crate::ring::Answer;

#[derive(Default)]
pub(super) struct Injector {
    rules: Injections,
    held: Vec<Held>,
}

/// An I/O that is not sent.
struct Held {
    lane: usize,
    io: Io,
    status: StatusCode,
    due: Nanos,
}

impl Injector {
    fn is_idle(&self) -> bool {
        self.rules.is_empty() && self.held.is_empty()
    }

    /// Takes an I/O that is not to be sent, and returns its due time. A fused pair is always sent.
    fn hold(&mut self, lane: usize, io: Io, now: Nanos) -> Result<Nanos, Io> {
        let opcode = command::opcode_of(io.op);
        let single = (io.op != Op::CompareAndWrite).then_some(opcode);
        let Some((sct, sc, delay)) = single.and_then(|opcode| self.rules.withhold(opcode)) else {
            return Err(io);
        };
        let due = now + delay;
        self.held.push(Held {
            lane,
            io,
            status: StatusCode::new(sct, sc),
            due,
        });
        Ok(due)
    }

    /// Replaces the success of a command by the status of its rule.
    #[cold]
    fn replaced(&mut self, slot: Option<&Slot>, mut answer: Answer) -> Answer {
        if let Some(slot) = slot.filter(|slot| slot.cid == answer.cid)
            && let Some(io) = slot.io.as_ref().filter(|_| answer.status == 0)
            && let Some((sct, sc)) = self.rules.fail(command::opcode_of(io.op))
        {
            answer.status = StatusCode::new(sct, sc).field();
        }
        answer
    }

    /// Ends the I/O that is due. Returns the completions with their lanes.
    fn ended(&mut self, now: Nanos) -> Vec<(usize, Completion)> {
        let ended = self.held.extract_if(.., |held| held.due <= now);
        let completion = |Held {
                              lane, io, status, ..
                          }: Held| {
            let status = match command::verdict(status.field(), io.op) {
                Verdict::Done(status) => status,
                Verdict::Aborted => Status::Aborted,
                Verdict::Again { .. } => Status::Retry,
            };
            (lane, io.complete(status))
        };
        ended.map(completion).collect()
    }
}

/// Sets the rule of a queue pair for an opcode; `None` removes it.
pub(crate) fn inject(pair: &mut Pair, opcode: u8, injection: Option<Injection>) {
    let injector = pair.injector.get_or_insert_default();
    injector.rules.set(opcode, injection);
    set_usual(pair);
}

/// Sets whether I/O can take the usual path.
pub(super) fn set_usual(pair: &mut Pair) {
    pair.injector.take_if(|injector| injector.is_idle());
    pair.usual = pair.live && pair.injector.is_none();
}

/// Holds an I/O that is not to be sent.
pub(super) fn hold(pair: &mut Pair, lane: usize, io: Io) -> Result<(), Io> {
    let Some(injector) = &mut pair.injector else {
        return Err(io);
    };
    let due = injector.hold(lane, io, pair.now)?;
    pair.next_scan = pair.next_scan.min(due);
    Ok(())
}

/// Completes held I/O that is due, and requests the scan for the next one.
pub(super) fn end_held(pair: &mut Pair) {
    let Some(injector) = &mut pair.injector else {
        return;
    };
    for (lane, completion) in injector.ended(pair.now) {
        if let Some(lane) = pair.lanes.find_mut(lane) {
            lane.ready.push_back(completion);
        }
    }
    let next = injector.held.iter().map(|held| held.due).min();
    pair.next_scan = next.map_or(pair.next_scan, |due| pair.next_scan.min(due));
    set_usual(pair);
}

/// Replaces the success of a command by the status of its rule.
#[inline]
pub(super) fn replaced(pair: &mut Pair, answer: Answer) -> Answer {
    match &mut pair.injector {
        None => answer,
        Some(injector) => {
            let index = usize::from(pair.cids.index(answer.cid));
            injector.replaced(pair.slots.get(index), answer)
        }
    }
}

/// Drops the held I/O of a closed lane.
pub(super) fn drop_held(pair: &mut Pair, lane: usize) {
    if let Some(injector) = &mut pair.injector {
        injector.held.retain(|held| held.lane != lane);
    }
}
