//! The TLS handshakes that one address may have: in flight at a time, and failed in a second. A
//! handshake costs the accepting thread 0.2 ms, and all hosts share that thread.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use nacre_reactor::Nanos;

/// Of all pending connections, the handshakes of one address are at most one in so many.
const PART: usize = 4;
/// Most failures of one address in [`WINDOW`].
const MAX_FAILURES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);
/// Addresses whose failures are counted. Beyond it the count of the oldest is lost.
const MAX_ADDRESSES: usize = 4096;

/// Why a handshake is not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "{most} TLS handshakes of this address are in flight, as many as a quarter of [nvmf] max_pending_connections allows"
    )]
    InFlight { most: usize },
    #[error(
        "{most} TLS handshakes of this address have failed within a second; later ones are served"
    )]
    Failures { most: u32 },
}

#[derive(Default)]
struct Address {
    in_flight: usize,
    failures: u32,
    /// Start of the window of `failures`.
    since: Nanos,
}

/// The handshakes of all addresses.
pub(crate) struct Limits {
    most_in_flight: usize,
    addresses: HashMap<IpAddr, Address>,
}

impl Limits {
    pub fn new(max_pending: usize) -> Limits {
        Limits {
            most_in_flight: max_pending.div_ceil(PART),
            addresses: HashMap::new(),
        }
    }

    /// Begins a handshake. Each one begun must be ended.
    pub fn begin(&mut self, peer: IpAddr, now: Nanos) -> Result<(), Refusal> {
        if !self.addresses.contains_key(&peer) {
            self.make_room(now);
        }
        let most = self.most_in_flight;
        let address = self.addresses.entry(peer).or_default();
        if address.failures >= MAX_FAILURES && now.since(address.since) < WINDOW {
            let most = MAX_FAILURES;
            return Err(Refusal::Failures { most });
        }
        if address.in_flight >= most {
            return Err(Refusal::InFlight { most });
        }
        address.in_flight += 1;
        Ok(())
    }

    /// Ends a handshake.
    pub fn end(&mut self, peer: IpAddr, failed: bool, now: Nanos) {
        let address = self.addresses.entry(peer).or_default();
        address.in_flight = address.in_flight.saturating_sub(1);
        if now.since(address.since) >= WINDOW {
            (address.since, address.failures) = (now, 0);
        }
        address.failures += u32::from(failed);
        if address.in_flight == 0 && address.failures == 0 {
            self.addresses.remove(&peer);
        }
    }

    /// Forgets failures that are over; if these are not enough, the oldest. Handshakes in flight
    /// are bounded elsewhere and stay.
    fn make_room(&mut self, now: Nanos) {
        if self.addresses.len() < MAX_ADDRESSES {
            return;
        }
        let counts = |address: &Address| now.since(address.since) < WINDOW;
        self.addresses
            .retain(|_, address| address.in_flight > 0 || counts(address));
        if self.addresses.len() >= MAX_ADDRESSES {
            let idle = self.addresses.iter().filter(|(_, one)| one.in_flight == 0);
            let oldest = idle.min_by_key(|(_, one)| one.since).map(|(peer, _)| *peer);
            oldest.map(|peer| self.addresses.remove(&peer));
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
    fn handshakes_in_flight() {
        let mut limits = Limits::new(10);
        for _ in 0..3 {
            assert_eq!(limits.begin(peer(1), at(0)), Ok(()));
        }
        let refused = Err(Refusal::InFlight { most: 3 });
        assert_eq!(limits.begin(peer(1), at(0)), refused);
        assert_eq!(limits.begin(peer(2), at(0)), Ok(()));
        limits.end(peer(1), false, at(1));
        assert_eq!(limits.begin(peer(1), at(1)), Ok(()));
    }

    #[test]
    fn failures_in_a_second() {
        let mut limits = Limits::new(1000);
        let mut failed = 0;
        for ms in 0..30 {
            if limits.begin(peer(1), at(ms)).is_ok() {
                limits.end(peer(1), true, at(ms));
                failed += 1;
            }
        }
        assert_eq!(failed, MAX_FAILURES);
        let refused = Err(Refusal::Failures { most: MAX_FAILURES });
        assert_eq!(limits.begin(peer(1), at(999)), refused);
        assert_eq!(limits.begin(peer(2), at(999)), Ok(()));
        assert_eq!(limits.begin(peer(1), at(1000)), Ok(()));
        limits.end(peer(1), true, at(1000));
        assert_eq!(limits.begin(peer(1), at(1001)), Ok(()));
    }

    #[test]
    fn addresses_have_a_bound() {
        let mut limits = Limits::new(40_000);
        assert_eq!(limits.begin(peer(0), at(0)), Ok(()));
        for n in 1..=5000 {
            assert_eq!(limits.begin(peer(n), at(0)), Ok(()));
            limits.end(peer(n), true, at(u64::from(n / 100)));
        }
        assert_eq!(limits.addresses.len(), MAX_ADDRESSES);
        assert_eq!(limits.addresses[&peer(0)].in_flight, 1);
        for n in 0..=5000 {
            assert_eq!(limits.begin(peer(n), at(2000)), Ok(()));
            limits.end(peer(n), false, at(2000));
        }
        // Those without a failure are not kept.
        let mut limits = Limits::new(8);
        assert_eq!(limits.begin(peer(1), at(0)), Ok(()));
        limits.end(peer(1), false, at(0));
        assert!(limits.addresses.is_empty());
    }
}
