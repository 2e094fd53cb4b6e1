//! Limits the TLS handshakes of each peer ([`Origin`]: an IPv4 address or an IPv6 /64). The limits
//! apply to handshakes in flight, those that wait for one in flight to end, and those that failed
//! within a second.
//!
//! A handshake costs the accepting thread 0.2 ms, and all hosts share that thread.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use nacre_reactor::{Nanos, Origin};

/// Handshakes in flight of one origin: at most `max_pending_connections` / `PART`, rounded up.
const PART: usize = 4;
/// Connections of one origin that wait for a handshake of it to end: at most
/// `max_pending_connections` / `WAITING_PART`, rounded up.
const WAITING_PART: usize = 2;
/// Most failures of one origin in [`WINDOW`].
const MAX_FAILURES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);
/// Most origins whose failures are counted. Beyond it the count of the oldest is lost.
const MAX_ORIGINS: usize = 4096;

/// The reason why a handshake does not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "{most} connections of this address wait for their TLS handshake, as many as half of [nvmf] max_pending_connections allows"
    )]
    Waiting { most: usize },
    #[error(
        "{most} TLS handshakes of this address have failed within a second; later ones are served"
    )]
    Failures { most: u32 },
}

/// When the handshake of a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    Now,
    /// The connection waits: [`Limits::end`] returns it when its handshake begins.
    Later,
}

#[derive(Default)]
struct Handshakes {
    in_flight: usize,
    /// Connections in the order of their turns.
    waiting: VecDeque<u64>,
    failures: u32,
    /// Start of the window of `failures`.
    since: Nanos,
}

/// The handshakes of all origins.
pub(crate) struct Limits {
    most_in_flight: usize,
    most_waiting: usize,
    origins: HashMap<Origin, Handshakes>,
}

impl Limits {
    pub(crate) fn new(max_pending: usize) -> Self {
        Self {
            most_in_flight: max_pending.div_ceil(PART),
            most_waiting: max_pending.div_ceil(WAITING_PART),
            origins: HashMap::new(),
        }
    }

    /// Begins the handshake of a connection (an id of the caller), now or after others of its
    /// origin have ended. The caller calls [`Limits::end`] for each handshake that has begun, and
    /// [`Limits::leave`] for a waiting connection that ends.
    pub(crate) fn begin(
        &mut self,
        peer: IpAddr,
        connection: u64,
        now: Nanos,
    ) -> Result<Admission, Refusal> {
        let origin = Origin::from(peer);
        if !self.origins.contains_key(&origin) {
            self.make_room(now);
        }
        self.check_failures(peer, now)?;
        let of_origin = self.origins.entry(origin).or_default();
        if of_origin.in_flight < self.most_in_flight && of_origin.waiting.is_empty() {
            of_origin.in_flight += 1;
            return Ok(Admission::Now);
        }
        let most = self.most_waiting;
        if of_origin.waiting.len() >= most {
            return Err(Refusal::Waiting { most });
        }
        of_origin.waiting.push_back(connection);
        Ok(Admission::Later)
    }

    /// An error if the origin of `peer` has [`MAX_FAILURES`] failed handshakes within [`WINDOW`].
    pub(crate) fn check_failures(&self, peer: IpAddr, now: Nanos) -> Result<(), Refusal> {
        let failing = self.origins.get(&peer.into());
        let failing = failing.filter(|one| one.failures >= MAX_FAILURES);
        match failing {
            Some(of_origin) if now.since(of_origin.since) < WINDOW => {
                let most = MAX_FAILURES;
                Err(Refusal::Failures { most })
            }
            _ => Ok(()),
        }
    }

    /// Ends a handshake of this peer. Returns the waiting connection of the same origin whose
    /// handshake begins now, if there is one; it counts as in flight.
    pub(crate) fn end(&mut self, peer: IpAddr, failed: bool, now: Nanos) -> Option<u64> {
        let origin = Origin::from(peer);
        let of_origin = self.origins.entry(origin).or_default();
        of_origin.in_flight = of_origin.in_flight.saturating_sub(1);
        if now.since(of_origin.since) >= WINDOW {
            (of_origin.since, of_origin.failures) = (now, 0);
        }
        of_origin.failures += u32::from(failed);
        let next = of_origin.waiting.pop_front();
        of_origin.in_flight += usize::from(next.is_some());
        if of_origin.in_flight == 0 && of_origin.failures == 0 {
            self.origins.remove(&origin);
        }
        next
    }

    /// Removes a waiting connection, which has ended.
    pub(crate) fn leave(&mut self, peer: IpAddr, connection: u64) {
        if let Some(of_origin) = self.origins.get_mut(&peer.into()) {
            of_origin.waiting.retain(|waiting| *waiting != connection);
        }
    }

    /// At [`MAX_ORIGINS`], forgets failures older than [`WINDOW`]; without any, those of the oldest
    /// origin. Origins with handshakes in flight stay: `max_pending_connections` bounds them.
    fn make_room(&mut self, now: Nanos) {
        if self.origins.len() < MAX_ORIGINS {
            return;
        }
        let counts = |one: &Handshakes| now.since(one.since) < WINDOW;
        self.origins
            .retain(|_, of_origin| of_origin.in_flight > 0 || counts(of_origin));
        if self.origins.len() >= MAX_ORIGINS {
            let idle = self.origins.iter().filter(|(_, one)| one.in_flight == 0);
            let oldest = idle.min_by_key(|(_, one)| one.since).map(|(peer, _)| *peer);
            oldest.map(|peer| self.origins.remove(&peer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    fn at(ms: u64) -> Nanos {
        Nanos::ZERO + Duration::from_secs(100) + Duration::from_millis(ms)
    }

    #[test]
    fn handshakes_wait_for_their_turn() {
        let mut limits = Limits::new(10);
        for connection in 0..3 {
            assert_eq!(limits.begin(peer(1), connection, at(0)), Ok(Admission::Now));
        }
        for connection in 3..8 {
            assert_eq!(
                limits.begin(peer(1), connection, at(0)),
                Ok(Admission::Later)
            );
        }
        let refused = Err(Refusal::Waiting { most: 5 });
        assert_eq!(limits.begin(peer(1), 8, at(0)), refused);
        assert_eq!(limits.begin(peer(2), 9, at(0)), Ok(Admission::Now));
        assert_eq!(limits.end(peer(1), false, at(1)), Some(3));
        limits.leave(peer(1), 4);
        // A new one does not overtake those that wait.
        assert_eq!(limits.begin(peer(1), 10, at(1)), Ok(Admission::Later));
        let order: Vec<_> = (0..7).map(|_| limits.end(peer(1), false, at(1))).collect();
        let expected = [Some(5), Some(6), Some(7), Some(10), None, None, None];
        assert_eq!(order, expected);
        assert_eq!(limits.end(peer(2), false, at(1)), None);
        assert!(limits.origins.is_empty());
    }

    #[test]
    fn failures_in_a_second() {
        let mut limits = Limits::new(1000);
        let mut failed = 0;
        for ms in 0..30 {
            if limits.begin(peer(1), ms, at(ms)).is_ok() {
                limits.end(peer(1), true, at(ms));
                failed += 1;
            }
        }
        assert_eq!(failed, MAX_FAILURES);
        let refused = Err(Refusal::Failures { most: MAX_FAILURES });
        assert_eq!(limits.begin(peer(1), 0, at(999)), refused);
        assert_eq!(limits.begin(peer(2), 0, at(999)), Ok(Admission::Now));
        assert_eq!(limits.begin(peer(1), 0, at(1000)), Ok(Admission::Now));
        limits.end(peer(1), true, at(1000));
        assert_eq!(limits.begin(peer(1), 0, at(1001)), Ok(Admission::Now));
    }

    #[test]
    fn origins_have_a_bound() {
        let mut limits = Limits::new(40_000);
        assert_eq!(limits.begin(peer(0), 0, at(0)), Ok(Admission::Now));
        for n in 1..=5000 {
            assert_eq!(limits.begin(peer(n), 0, at(0)), Ok(Admission::Now));
            limits.end(peer(n), true, at(u64::from(n / 100)));
        }
        assert_eq!(limits.origins.len(), MAX_ORIGINS);
        assert_eq!(limits.origins[&peer(0).into()].in_flight, 1);
        for n in 0..=5000 {
            assert_eq!(limits.begin(peer(n), 0, at(2000)), Ok(Admission::Now));
            limits.end(peer(n), false, at(2000));
        }
        // Those without a failure are not kept.
        let mut limits = Limits::new(8);
        assert_eq!(limits.begin(peer(1), 0, at(0)), Ok(Admission::Now));
        limits.end(peer(1), false, at(0));
        assert!(limits.origins.is_empty());
    }
}
