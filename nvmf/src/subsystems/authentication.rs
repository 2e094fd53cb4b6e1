//! The target-wide state of DH-HMAC-CHAP authentication: the offered hash functions and groups, the
//! recent failures of each host, and the helper thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nacre_nvmf_wire::Nqn;
use nacre_reactor::{Helper, Nanos, Origin};
use parking_lot::Mutex;

use crate::auth::{Agreed, Group, Hash, KeySource, Offer, Progress, Reason, ReasonKind};
use crate::subsystems::generated::GeneratedPsks;
use crate::tls::TlsFailure;
use crate::transport::Address;

/// Most jobs that wait for the helper thread. Further transactions fail.
const MAX_JOBS: usize = 4096;
/// Most failures that wait for management, which sends events for them.
const MAX_FAILURES: usize = 256;
/// Most pairs of host and address whose failures are counted.
const MAX_COUNTED: usize = 4096;
/// Number of failures per [`WINDOW`] without a delay.
const FREE_FAILURES: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(10);

/// The authentication state of a target.
pub struct Authentication {
    helper: Arc<Helper>,
    offer: Mutex<Offer>,
    /// The PSKs of hosts that asked for secure channel concatenation.
    pub generated: GeneratedPsks,
    failures: Mutex<VecDeque<AuthFailure>>,
    tls_failures: Mutex<VecDeque<TlsFailure>>,
    counted: Mutex<BTreeMap<(String, Nqn), Counted>>,
    /// The latest proof of a key, by subsystem and host.
    accesses: Mutex<BTreeMap<(Nqn, Nqn), Access>>,
    succeeded: AtomicU64,
    /// By [`ReasonKind`].
    failed: [AtomicU64; ReasonKind::ALL.len()],
}

/// A host that failed to authenticate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthFailure {
    pub subsystem: Nqn,
    pub host: Nqn,
    pub peer: Address,
    pub qid: u16,
    pub reason: Reason,
    /// Number of failures: this one, and suppressed ones with the same reason.
    pub times: u64,
}

/// The latest proof of a host that it has its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub at: SystemTime,
    pub peer: Address,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    since: Nanos,
    failures: u32,
}

impl Default for Authentication {
    fn default() -> Self {
        Self::with_helper(Arc::new(Helper::new("nacre-auth", MAX_JOBS)))
    }
}

impl Authentication {
    /// Creates the state with this helper thread. Tests in virtual time pass their own.
    pub fn with_helper(helper: Arc<Helper>) -> Self {
        Self {
            helper,
            offer: Mutex::new(Offer::default()),
            generated: GeneratedPsks::default(),
            failures: Mutex::default(),
            tls_failures: Mutex::default(),
            counted: Mutex::default(),
            accesses: Mutex::default(),
            succeeded: AtomicU64::new(0),
            failed: Default::default(),
        }
    }

    /// The thread that reads keys and computes exponentiations.
    pub fn helper(&self) -> &Arc<Helper> {
        &self.helper
    }

    pub fn offer(&self) -> Offer {
        self.offer.lock().clone()
    }

    /// Sets the hash functions and groups for future transactions.
    pub fn set_offer(&self, offer: Offer) {
        *self.offer.lock() = offer;
    }

    /// Numbers of successful and of failed transactions.
    pub fn counts(&self) -> (u64, u64) {
        let failed = self.failures().map(|(_, count)| count);
        (self.succeeded.load(Ordering::Relaxed), failed.sum())
    }

    /// Numbers of failed transactions, by the reason.
    pub fn failures(&self) -> impl Iterator<Item = (ReasonKind, u64)> + '_ {
        let of = |kind| self.failed[kind as usize].load(Ordering::Relaxed);
        ReasonKind::ALL
            .into_iter()
            .map(move |kind| (kind, of(kind)))
    }

    /// Failures since the last call, oldest first.
    pub fn take_failures(&self) -> Vec<AuthFailure> {
        self.failures.lock().drain(..).collect()
    }

    /// TLS connections that failed since the last call, oldest first.
    pub fn take_tls_failures(&self) -> Vec<TlsFailure> {
        self.tls_failures.lock().drain(..).collect()
    }

    pub(crate) fn note_success(&self, host: &Nqn, peer: &Address) {
        self.succeeded.fetch_add(1, Ordering::Relaxed);
        self.counted.lock().remove(&(origin(peer), host.clone()));
    }

    /// Records that a host proved on a queue that it has its key. A new host is not recorded if the
    /// limit of [`MAX_COUNTED`] is reached.
    pub(crate) fn note_access(&self, subsystem: &Nqn, host: &Nqn, peer: &Address) {
        let mut accesses = self.accesses.lock();
        let names = (subsystem.clone(), host.clone());
        if accesses.len() >= MAX_COUNTED && !accesses.contains_key(&names) {
            return;
        }
        let access = Access {
            at: SystemTime::now(),
            peer: peer.clone(),
        };
        accesses.insert(names, access);
    }

    /// The latest proof of a host that it has its key.
    pub fn last_access(&self, subsystem: &Nqn, host: &Nqn) -> Option<Access> {
        let names = (subsystem.clone(), host.clone());
        self.accesses.lock().get(&names).cloned()
    }

    /// Counts a failure. Returns the delay before the controller reports it to the host, which only
    /// wrong keys have. They count per host and origin, so that guesses from one machine do not
    /// delay the host at other addresses.
    pub(crate) fn note_failure(
        &self,
        host: &Nqn,
        peer: &Address,
        reason: &Reason,
        now: Nanos,
    ) -> Duration {
        self.failed[reason.kind() as usize].fetch_add(1, Ordering::Relaxed);
        if !reason.is_guess() {
            return Duration::ZERO;
        }
        let mut counted = self.counted.lock();
        let key = (origin(peer), host.clone());
        if counted.len() >= MAX_COUNTED && !counted.contains_key(&key) {
            counted.retain(|_, one| now.since(one.since) < WINDOW);
            if counted.len() >= MAX_COUNTED {
                let oldest = counted.iter().min_by_key(|(_, one)| one.since);
                let oldest = oldest.map(|(key, _)| key.clone());
                oldest.map(|key| counted.remove(&key));
            }
        }
        let fresh = Counted {
            since: now,
            failures: 0,
        };
        let one = counted.entry(key).or_insert(fresh);
        if now.since(one.since) >= WINDOW {
            *one = fresh;
        }
        one.failures = one.failures.saturating_add(1);
        match one.failures.checked_sub(FREE_FAILURES + 1) {
            None => Duration::ZERO,
            Some(doublings) => (FIRST_DELAY * (1 << doublings.min(10))).min(LONGEST_DELAY),
        }
    }

    /// Stores a failure for [`Authentication::take_failures`].
    pub(crate) fn report(&self, failure: AuthFailure) {
        push_bounded(&mut self.failures.lock(), failure);
    }

    /// Stores a failure for [`Authentication::take_tls_failures`].
    pub(crate) fn report_tls(&self, failure: TlsFailure) {
        push_bounded(&mut self.tls_failures.lock(), failure);
    }
}

/// Adds a failure. A full list drops its oldest one.
fn push_bounded<T>(failures: &mut VecDeque<T>, failure: T) {
    if failures.len() >= MAX_FAILURES {
        failures.pop_front();
    }
    failures.push_back(failure);
}

/// The address without the port, which differs between connections.
pub(crate) fn of_peer(peer: &Address) -> String {
    match peer {
        Address::Ip(address) => address.ip().to_string(),
        Address::Loopback(name) => name.clone(),
    }
}

/// The address to which limits of failures and unauthenticated queues apply.
pub(crate) fn origin(peer: &Address) -> String {
    match peer {
        Address::Ip(address) => Origin::from(address.ip()).to_string(),
        Address::Loopback(name) => name.clone(),
    }
}

/// The authentication state of one queue for management, written by the queue's core.
#[derive(Debug, Default)]
pub struct QueueAuthState(AtomicU32, AtomicBool, Mutex<Option<Arc<dyn KeySource>>>);

impl QueueAuthState {
    /// The progress of the latest transaction; `None`: there was none.
    pub fn load(&self) -> Option<(Progress, Option<(Hash, Group)>)> {
        let [progress, hash, group, _] = self.0.load(Ordering::Relaxed).to_le_bytes();
        let progress = *Progress::ALL.get(usize::from(progress.checked_sub(1)?))?;
        Some((progress, Hash::from_id(hash).zip(Group::from_id(group))))
    }

    /// True while the host must still authenticate itself on this queue.
    pub fn is_pending(&self) -> bool {
        self.1.load(Ordering::Relaxed)
    }

    /// The keys with which the host authenticated itself last.
    pub fn keys(&self) -> Option<Arc<dyn KeySource>> {
        self.2.lock().clone()
    }

    pub(crate) fn set_keys(&self, keys: Option<Arc<dyn KeySource>>) {
        *self.2.lock() = keys;
    }

    pub(crate) fn set_pending(&self, pending: bool) {
        self.1.store(pending, Ordering::Relaxed);
    }

    pub(crate) fn store(&self, progress: Progress, agreed: Option<Agreed>) {
        let place = Progress::ALL.iter().position(|one| *one == progress);
        let place = place.map_or(0, |place| place as u8 + 1);
        let (hash, group) = agreed.map_or((0, 0), |a| (a.hash.id(), a.group.id()));
        let packed = u32::from_le_bytes([place, hash, group, 0]);
        self.0.store(packed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: guesses of one address are slowed down, and nothing else is.
    #[test]
    fn delays() {
        let auth = Authentication::default();
        let host = Nqn::new("nqn.2026-01.io.nacre:host").unwrap();
        let other = Nqn::new("nqn.2026-01.io.nacre:other").unwrap();
        let at = |name: &str| Address::Loopback(name.into());
        let (here, there) = (at("here"), at("there"));
        let mut now = Nanos(1);
        let wrong = Reason::WrongResponse;
        let ms = Duration::from_millis;
        let mut delays = Vec::new();
        for _ in 0..15 {
            delays.push(auth.note_failure(&host, &here, &wrong, now));
            now = now + ms(1);
        }
        let expected = [0, 0, 0, 0, 0, 100, 200, 400, 800, 1600, 3200, 6400];
        assert_eq!(delays[..12], expected.map(ms));
        assert_eq!(delays[12..], [LONGEST_DELAY; 3]);
        let none = Duration::ZERO;
        assert_eq!(auth.note_failure(&host, &there, &wrong, now), none);
        assert_eq!(auth.note_failure(&other, &here, &wrong, now), none);
        assert_eq!(auth.note_failure(&host, &here, &Reason::Hash, now), none);
        assert_eq!(auth.counts(), (0, 18));
        let later = now + WINDOW;
        assert_eq!(auth.note_failure(&host, &here, &wrong, later), none);
        for _ in 0..9 {
            auth.note_failure(&host, &here, &wrong, later);
        }
        auth.note_success(&host, &here);
        assert_eq!(auth.note_failure(&host, &here, &wrong, later), none);
        assert_eq!(auth.counts(), (1, 29));
        let failures = auth.failures().filter(|(_, count)| *count > 0);
        let failures: Vec<_> = failures.map(|(kind, n)| (kind.name(), n)).collect();
        assert_eq!(failures, [("wrong_key", 28), ("unusable", 1)]);
        for (at, kind) in ReasonKind::ALL.into_iter().enumerate() {
            assert_eq!(at, kind as usize, "{kind:?}");
        }
    }

    /// Goal: lists have bounds. Method: more hosts, and more failures, than they hold.
    #[test]
    fn bounds() {
        let auth = Authentication::default();
        let host = Nqn::new("nqn.2026-01.io.nacre:host").unwrap();
        for n in 0..MAX_COUNTED as u64 + 10 {
            let peer = Address::Loopback(n.to_string());
            auth.note_failure(&host, &peer, &Reason::NoKey, Nanos(n + 1));
            auth.report(AuthFailure {
                subsystem: host.clone(),
                host: host.clone(),
                peer,
                qid: 0,
                reason: Reason::NoKey,
                times: n,
            });
        }
        assert_eq!(auth.counted.lock().len(), MAX_COUNTED);
        let failures = auth.take_failures();
        assert_eq!(failures.len(), MAX_FAILURES);
        assert_eq!(failures.last().unwrap().times, MAX_COUNTED as u64 + 9);
        assert_eq!(auth.take_failures(), []);
    }

    #[test]
    fn state_in_one_word() {
        let state = QueueAuthState::default();
        assert_eq!(state.load(), None);
        for progress in Progress::ALL {
            state.store(progress, None);
            assert_eq!(state.load(), Some((progress, None)));
            let agreed = Agreed {
                hash: Hash::Sha384,
                group: Group::Ffdhe8192,
                mutual: true,
            };
            state.store(progress, Some(agreed));
            let expected = Some((Hash::Sha384, Group::Ffdhe8192));
            assert_eq!(state.load(), Some((progress, expected)));
        }
    }
}
