//! The reservations of a simulated disk, in runs whose holders have leases: the part of NVMe
//! reservations that volumes use (All Registrants types). They persist through power loss.
//!
//! A request takes effect 1 to 200 us after it was sent. Its outcome takes as long to arrive, or
//! one in eight up to 400 ms.

use std::collections::BTreeMap;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_bdev::reservation::{ActiveReservation, ReservationReport, ReservationRequest};
use nacre_random::Random;
use nacre_reactor::Nanos;

pub(crate) type Outcome = Result<ReservationReport, Status>;

pub(crate) struct Gate {
    random: Random,
    /// Registration keys by holder.
    keys: BTreeMap<u64, u64>,
    held: bool,
    /// Requests in flight, by the time at which they take effect and their number.
    asks: BTreeMap<(Nanos, u64), Ask>,
    /// Outcomes by the number of the request, and the times at which they arrive.
    outcomes: BTreeMap<u64, (Nanos, Outcome)>,
    numbers: u64,
    /// Some answers take long.
    pub slow: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    pub holder: u64,
    pub request: ReservationRequest,
}

impl Gate {
    pub(crate) fn new(random: Random) -> Self {
        Self {
            random,
            keys: BTreeMap::new(),
            held: false,
            asks: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            numbers: 0,
            slow: true,
        }
    }

    pub(crate) fn may_write(&self, holder: u64) -> bool {
        !self.held || self.keys.contains_key(&holder)
    }

    /// Sends a request. Returns its number.
    pub(crate) fn ask(&mut self, ask: Ask, now: Nanos) -> u64 {
        self.numbers += 1;
        let due = now + Duration::from_micros(self.random.within(1, 200));
        self.asks.insert((due, self.numbers), ask);
        self.numbers
    }

    /// The next time at which a request takes effect or an outcome arrives.
    pub(crate) fn next_due(&self, now: Nanos) -> Option<Nanos> {
        let asks = self.asks.first_key_value().map(|((due, _), _)| *due);
        // The holder of earlier outcomes may be stopped.
        let outcomes = self.outcomes.values().map(|(due, _)| *due);
        let outcomes = outcomes.filter(|due| *due > now);
        asks.into_iter().chain(outcomes).min()
    }

    /// The next request that takes effect by `now`.
    pub(crate) fn take_due(&mut self, now: Nanos) -> Option<(u64, Ask)> {
        let first = self.asks.first_entry()?;
        (first.key().0 <= now).then(|| {
            let number = first.key().1;
            (number, first.remove())
        })
    }

    /// Executes a request.
    pub(crate) fn execute(&mut self, ask: Ask) -> Outcome {
        let Ask { holder, request } = ask;
        let own = self.keys.get(&holder).copied();
        let granted = match request {
            ReservationRequest::Report => true,
            ReservationRequest::Register { current, .. } => own == current,
            ReservationRequest::Unregister { key }
            | ReservationRequest::Acquire { key }
            | ReservationRequest::Preempt { key } => own == Some(key),
        };
        if !granted {
            return Err(Status::RESERVATION_CONFLICT);
        }
        match request {
            ReservationRequest::Report => {
                let others = self.keys.iter().filter(|(other, _)| **other != holder);
                return Ok(ReservationReport {
                    own,
                    others: others.map(|(_, key)| *key).collect(),
                    held: if self.held {
                        ActiveReservation::AllRegistrants
                    } else {
                        ActiveReservation::NotReserved
                    },
                });
            }
            ReservationRequest::Register { key, .. } => drop(self.keys.insert(holder, key)),
            ReservationRequest::Unregister { .. } => drop(self.keys.remove(&holder)),
            ReservationRequest::Acquire { .. } => self.held = true,
            ReservationRequest::Preempt { .. } => self.keys.retain(|other, _| *other == holder),
        }
        self.held &= !self.keys.is_empty();
        Ok(ReservationReport::default())
    }

    /// The outcome of a request is on its way.
    pub(crate) fn answer(&mut self, number: u64, outcome: Outcome, now: Nanos) {
        let us = match self.random.below(8) {
            0 if self.slow => self.random.within(1, 400_000),
            _ => self.random.within(1, 200),
        };
        let due = now + Duration::from_micros(us);
        self.outcomes.insert(number, (due, outcome));
    }

    /// The outcome of a request, once it has arrived.
    pub(crate) fn arrived(&mut self, number: u64, now: Nanos) -> Option<Outcome> {
        let (due, _) = self.outcomes.get(&number)?;
        if *due > now {
            return None;
        }
        self.outcomes.remove(&number).map(|(_, outcome)| outcome)
    }

    /// The holder of this request waits for it no longer.
    pub(crate) fn forget(&mut self, number: u64) {
        self.outcomes.remove(&number);
    }
}
