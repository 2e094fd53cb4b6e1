//! The PSKs that authentication generated (secure channel concatenation, TP8018), in memory only.
//!
//! ```text
//!   transaction with SC_C ─▶ add ─▶ in use by associations ─▶ unused for LIFETIME ─▶ forgotten
//!                                     ▲ find: a TLS handshake with its identity, up to MAX_AGE
//! ```
//!
//! The association that generated a PSK, and those over TLS with it, hold a reference to it. A host
//! ends the first one and connects again over TLS, so the PSK outlives it.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::Nqn;
use nacre_reactor::Nanos;
use parking_lot::Mutex;

use crate::auth::{KeySource, Names};
use crate::tls::{Derivation, Identity, Psk, PskKey, Version};

/// Time for which an unused PSK stays usable.
pub const LIFETIME: Duration = Duration::from_secs(60);
/// The greatest age of a PSK at a TLS handshake. The secret that made it may have been replaced in
/// its file since, which shows only when the host authenticates itself again. Linux hosts need a
/// PSK only while they connect; after a loss they authenticate themselves again.
pub const MAX_AGE: Duration = Duration::from_secs(3600);
/// Most PSKs of one host and subsystem. One more replaces the oldest that is unused, or else the
/// oldest.
pub const MAX_OF_PAIR: usize = 4;
/// Most PSKs of all hosts. Beyond it the one unused for longest is dropped, or else the oldest.
const MAX: usize = 16_384;

/// The generated PSKs of a target.
#[derive(Debug, Default)]
pub struct GeneratedPsks {
    /// The oldest first.
    entries: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    host: Nqn,
    subsystem: Nqn,
    psk: Arc<Psk>,
    /// The keys with which its host authenticated itself; `None`: not recorded yet.
    keys: Option<Arc<dyn KeySource>>,
    made: Nanos,
    /// The time since which no association uses it, as far as known; `None`: it is in use.
    unused_since: Option<Nanos>,
}

impl Entry {
    fn is_used(&self) -> bool {
        Arc::strong_count(&self.psk) > 1
    }
}

impl GeneratedPsks {
    /// Adds a PSK. `replaced`: the PSK that the transaction replaced, which is dropped.
    pub(crate) fn add(
        &self,
        names: &Names,
        psk: &Arc<Psk>,
        replaced: Option<&Arc<dyn PskKey>>,
        now: Nanos,
    ) {
        self.sweep(now);
        let mut entries = self.entries.lock();
        if let Some(replaced) = replaced {
            entries.retain(|one| !is_same(&one.psk, replaced));
        }
        let is_of_pair = |one: &Entry| one.host == names.host && one.subsystem == names.subsystem;
        let of_pair = || {
            entries
                .iter()
                .enumerate()
                .filter(|(_, one)| is_of_pair(one))
        };
        if of_pair().count() >= MAX_OF_PAIR {
            let unused = of_pair().find(|(_, one)| !one.is_used());
            let oldest = unused.or_else(|| of_pair().next());
            if let Some(oldest) = oldest.map(|(index, _)| index) {
                entries.remove(oldest);
            }
        }
        if entries.len() >= MAX {
            let unused = entries.iter().filter(|one| !one.is_used());
            let unused = unused.filter_map(|one| one.unused_since).min();
            let oldest = entries.iter().position(|one| one.unused_since == unused);
            entries.remove(oldest.unwrap_or(0));
        }
        entries.push(Entry {
            host: names.host.clone(),
            subsystem: names.subsystem.clone(),
            psk: Arc::clone(psk),
            keys: None,
            made: now,
            unused_since: None,
        });
    }

    /// Forgets a PSK that another one has replaced.
    pub(crate) fn remove(&self, psk: &Arc<Psk>) {
        let mut entries = self.entries.lock();
        entries.retain(|one| !Arc::ptr_eq(&one.psk, psk));
    }

    /// Records the keys with which the host of a PSK authenticated itself.
    pub(crate) fn note_keys(&self, psk: &Arc<Psk>, keys: Arc<dyn KeySource>) {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.iter_mut().find(|one| Arc::ptr_eq(&one.psk, psk)) {
            entry.keys = Some(keys);
        }
    }

    /// Drops the PSKs of a host that were not proved with one of these keys. Connections that use
    /// one continue.
    pub(crate) fn keep_those_of(
        &self,
        subsystem: &Nqn,
        host: &Nqn,
        in_force: &[Arc<dyn KeySource>],
    ) {
        let is_in_force = |one: &Entry| {
            let keys = one.keys.as_ref();
            keys.is_some_and(|keys| in_force.iter().any(|other| Arc::ptr_eq(keys, other)))
        };
        let mut entries = self.entries.lock();
        entries.retain(|one| one.subsystem != *subsystem || one.host != *host || is_in_force(one));
    }

    /// Drops the PSKs of a subsystem, or of one host of it, because its keys have changed.
    /// Connections that use one continue.
    pub(crate) fn forget(&self, subsystem: &Nqn, host: Option<&Nqn>) {
        let is_of_host = |one: &Entry| host.is_none_or(|host| one.host == *host);
        let mut entries = self.entries.lock();
        entries.retain(|one| one.subsystem != *subsystem || !is_of_host(one));
    }

    /// The PSK with this identity.
    pub fn find(&self, identity: &Identity, now: Nanos) -> Option<Arc<Psk>> {
        self.sweep(now);
        let entries = self.entries.lock();
        let mut of_pair = entries
            .iter()
            .filter(|one| one.host == identity.host && one.subsystem == identity.subsystem);
        let is_it = |one: &&Entry| {
            let (host, subsystem) = (&one.host, &one.subsystem);
            one.psk
                .identity(Version::One, host, subsystem, Derivation::Standard)
                == *identity
        };
        of_pair.find(is_it).map(|one| Arc::clone(&one.psk))
    }

    /// Drops all PSKs, because key files may have other contents. Connections that use one
    /// continue.
    pub fn forget_all(&self) {
        self.entries.lock().clear();
    }

    /// Drops the PSKs that were unused for [`LIFETIME`] or are older than [`MAX_AGE`]. Called
    /// regularly, and before each use.
    pub fn sweep(&self, now: Nanos) {
        self.entries.lock().retain_mut(|one| {
            if now.since(one.made) >= MAX_AGE {
                return false;
            }
            if one.is_used() {
                one.unused_since = None;
                return true;
            }
            let since = *one.unused_since.get_or_insert(now);
            now.since(since) < LIFETIME
        });
    }

    pub fn count(&self) -> usize {
        self.entries.lock().len()
    }
}

/// True if both are the same PSK object.
pub(crate) fn is_same(psk: &Arc<Psk>, key: &Arc<dyn PskKey>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(psk), Arc::as_ptr(key))
}

#[cfg(test)]
mod tests {
    //! Goal: a PSK outlives its association by a minute, and their number is bounded. Method:
    //! virtual time.

    use super::*;

    fn names(host: u32) -> Names {
        let nqn = |text: &str| Nqn::new(text).unwrap();
        Names {
            host: nqn(&format!("nqn.2026-01.io.nacre:host{host}")),
            subsystem: nqn("nqn.2026-01.io.nacre:s1"),
        }
    }

    fn psk(byte: u8) -> Arc<Psk> {
        Arc::new(Psk::generated(&[byte; 32]))
    }

    fn identity(names: &Names, psk: &Psk) -> Identity {
        psk.offer(&names.host, &names.subsystem)
    }

    fn at(s: u64) -> Nanos {
        Nanos::ZERO + Duration::from_secs(1000 + s)
    }

    #[test]
    fn a_psk_outlives_its_association() {
        let (psks, names, psk) = (GeneratedPsks::default(), names(1), psk(1));
        let identity = identity(&names, &psk);
        psks.add(&names, &psk, None, at(0));
        psks.sweep(at(500));
        assert!(psks.find(&identity, at(1000)).is_some(), "it is in use");
        drop(psk);
        psks.sweep(at(1000));
        assert!(psks.find(&identity, at(1059)).is_some());
        let used = psks.find(&identity, at(1059)).unwrap();
        psks.sweep(at(1100));
        drop(used);
        psks.sweep(at(1200));
        assert!(psks.find(&identity, at(1259)).is_some());
        assert!(psks.find(&identity, at(1260)).is_none());
        assert_eq!(psks.count(), 0);
    }

    #[test]
    fn a_psk_has_a_greatest_age() {
        let (psks, names, psk) = (GeneratedPsks::default(), names(1), psk(1));
        let identity = identity(&names, &psk);
        psks.add(&names, &psk, None, at(0));
        assert!(psks.find(&identity, at(3599)).is_some());
        assert!(psks.find(&identity, at(3600)).is_none(), "though in use");
        psks.add(&names, &psk, None, at(4000));
        assert!(psks.find(&identity, at(4000)).is_some());
        psks.forget_all();
        assert!(psks.find(&identity, at(4000)).is_none());
    }

    /// Goal: one more controller of a host does not end the PSK of a connected one.
    #[test]
    fn an_unused_psk_makes_room_first() {
        let psks = GeneratedPsks::default();
        let mut all: Vec<_> = (0..4).map(psk).collect();
        for psk in &all {
            psks.add(&names(1), psk, None, at(0));
        }
        let unused = identity(&names(1), &all.remove(2));
        psks.add(&names(1), &psk(4), None, at(1));
        assert!(psks.find(&unused, at(1)).is_none());
        for psk in &all {
            assert!(psks.find(&identity(&names(1), psk), at(1)).is_some());
        }
    }

    #[test]
    fn the_number_is_bounded_and_a_replaced_one_is_gone() {
        let psks = GeneratedPsks::default();
        let all: Vec<_> = (0..6).map(psk).collect();
        let found = |names: &Names| -> Vec<bool> {
            let find = |psk: &Arc<Psk>| psks.find(&identity(names, psk), at(1)).is_some();
            all.iter().map(find).collect()
        };
        for psk in &all {
            psks.add(&names(1), psk, None, at(0));
        }
        psks.add(&names(2), &all[0], None, at(0));
        assert_eq!(found(&names(1)), [false, false, true, true, true, true]);
        assert_eq!(found(&names(2)), [true, false, false, false, false, false]);
        psks.remove(&all[4]);
        psks.add(&names(1), &all[4], None, at(0));
        psks.forget(&names(2).subsystem, Some(&names(2).host));
        assert_eq!(found(&names(2)), [false; 6], "its keys changed");
        assert_eq!(found(&names(1)), [false, false, true, true, true, true]);
        let replaced = Arc::clone(&all[5]) as Arc<dyn PskKey>;
        psks.add(&names(1), &all[0], Some(&replaced), at(0));
        assert_eq!(found(&names(1)), [true, false, true, true, true, false]);
        psks.forget(&names(1).subsystem, None);
        assert_eq!(psks.count(), 0);
        drop(all);
        for host in 0..MAX as u32 + 10 {
            psks.add(&names(host), &psk(9), None, at(0));
        }
        assert_eq!(psks.count(), MAX);
    }
}
