//! Delays after wrong passwords, per origin (an IPv4 address or an IPv6 network), and per account
//! and origin. A delay ends by itself, so no account is locked; wrong passwords from one origin do
//! not delay others.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::Duration;

use nacre_reactor::{Nanos, Origin};

/// Number of wrong passwords before the first delay: for one account from one origin, and from one
/// origin.
const FREE: u32 = 5;
const FREE_ADDRESS: u32 = 20;
/// Longest delay; delays double from 1 s on.
const LONGEST: Duration = Duration::from_secs(60);
/// Wrong passwords are forgotten after this time without another one.
const FORGOTTEN: Duration = Duration::from_secs(15 * 60);
/// Most entries of each table; the entry that was unused for longest is replaced.
const MAX_ENTRIES: usize = 1024;

#[derive(Debug, Clone, Copy)]
struct Tries {
    wrong: u32,
    last: Nanos,
}

impl Tries {
    fn delay(self, free: u32, now: Nanos) -> Duration {
        if self.wrong < free {
            return Duration::ZERO;
        }
        let doubled = 1_u64.checked_shl(self.wrong - free).unwrap_or(u64::MAX);
        let delay = Duration::from_secs(doubled).min(LONGEST);
        delay.saturating_sub(now.since(self.last))
    }
}

/// The counts of wrong passwords.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    accounts: HashMap<(String, Origin), Tries>,
    addresses: HashMap<Origin, Tries>,
}

impl Delays {
    /// Counts an attempt as wrong until [`Delays::succeed`], so that concurrent attempts count. The
    /// error is the remaining delay.
    pub(crate) fn begin(
        &mut self,
        name: &str,
        address: IpAddr,
        now: Nanos,
    ) -> Result<(), Duration> {
        let origin = Origin::from(address);
        let key = (name.to_owned(), origin);
        let known = |tries: Option<&Tries>, free| {
            let tries = tries.filter(|tries| now.since(tries.last) < FORGOTTEN);
            tries.map_or(Duration::ZERO, |tries| tries.delay(free, now))
        };
        let delay = known(self.accounts.get(&key), FREE)
            .max(known(self.addresses.get(&origin), FREE_ADDRESS));
        if !delay.is_zero() {
            return Err(delay);
        }
        add(&mut self.accounts, key, now);
        add(&mut self.addresses, origin, now);
        Ok(())
    }

    /// The delay before the next attempt.
    pub(crate) fn next(&self, name: &str, address: IpAddr, now: Nanos) -> Duration {
        let origin = Origin::from(address);
        let account = self.accounts.get(&(name.to_owned(), origin));
        let of = |tries: Option<&Tries>, free| {
            tries.map_or(Duration::ZERO, |tries| tries.delay(free, now))
        };
        of(account, FREE).max(of(self.addresses.get(&origin), FREE_ADDRESS))
    }

    /// Undoes [`Delays::begin`] for an attempt whose password was not checked.
    pub(crate) fn take_back(&mut self, name: &str, address: IpAddr) {
        let origin = Origin::from(address);
        let account = self.accounts.get_mut(&(name.to_owned(), origin));
        for tries in account.into_iter().chain(self.addresses.get_mut(&origin)) {
            tries.wrong = tries.wrong.saturating_sub(1);
        }
    }

    /// Undoes [`Delays::begin`] for an attempt with the right password, and forgets the account's
    /// wrong ones from this origin.
    pub(crate) fn succeed(&mut self, name: &str, address: IpAddr) {
        let origin = Origin::from(address);
        self.accounts.remove(&(name.to_owned(), origin));
        if let Some(tries) = self.addresses.get_mut(&origin) {
            tries.wrong = tries.wrong.saturating_sub(1);
        }
    }
}

fn add<K: Eq + Hash + Clone>(table: &mut HashMap<K, Tries>, key: K, now: Nanos) {
    if table.len() >= MAX_ENTRIES && !table.contains_key(&key) {
        let oldest = table.iter().min_by_key(|(_, tries)| tries.last);
        if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
            table.remove(&oldest);
        }
    }
    let tries = table.entry(key).or_insert(Tries {
        wrong: 0,
        last: now,
    });
    if now.since(tries.last) >= FORGOTTEN {
        tries.wrong = 0;
    }
    tries.wrong = tries.wrong.saturating_add(1);
    tries.last = now;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(n: u64) -> Nanos {
        Nanos(n * 1_000_000_000)
    }

    #[test]
    fn wrong_passwords_delay_their_account_and_address() {
        let mut delays = Delays::default();
        let [here, there]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|a| a.parse().unwrap());
        for _ in 0..FREE {
            assert_eq!(delays.begin("ann", here, seconds(0)), Ok(()));
        }
        let second = Duration::from_secs(1);
        assert_eq!(delays.begin("ann", here, seconds(0)), Err(second));
        assert_eq!(delays.next("ann", here, seconds(0)), second);
        // Neither another address nor another account has to wait.
        assert_eq!(delays.begin("ann", there, seconds(0)), Ok(()));
        assert_eq!(delays.begin("bob", here, seconds(0)), Ok(()));
        // A refused try does not prolong the delay, which doubles up to its limit.
        let mut now = 1;
        for delay in [2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(delays.begin("ann", here, seconds(now)), Ok(()));
            let refused = delays.begin("ann", here, seconds(now));
            assert_eq!(refused, Err(Duration::from_secs(delay)));
            now += delay;
        }
        assert_eq!(delays.begin("ann", here, seconds(now)), Ok(()));
        delays.take_back("ann", here);
        let last = Err(Duration::from_secs(60));
        assert_eq!(delays.begin("ann", here, seconds(now)), last);
        delays.succeed("ann", here);
        assert_eq!(delays.begin("ann", here, seconds(now)), Ok(()));
        // Time forgives.
        for _ in 0..10 {
            let _ = delays.begin("cid", there, seconds(now));
        }
        assert!(delays.begin("cid", there, seconds(now)).is_err());
        assert_eq!(delays.begin("cid", there, seconds(now + 900)), Ok(()));
        assert_eq!(delays.begin("cid", there, seconds(now + 900)), Ok(()));
    }

    #[test]
    fn one_address_cannot_try_many_names_and_tables_are_bounded() {
        let mut delays = Delays::default();
        let address = |n: u32| IpAddr::from(n.to_be_bytes());
        let many = (0..100).map(|n| delays.begin(&format!("n{n}"), address(1), seconds(0)));
        let free = many.filter(Result::is_ok).count();
        assert_eq!(free, FREE_ADDRESS as usize);
        for n in 0..3000 {
            let _ = delays.begin("x", address(n), seconds(u64::from(n)));
        }
        assert_eq!(delays.accounts.len(), MAX_ENTRIES);
        assert_eq!(delays.addresses.len(), MAX_ENTRIES);
    }
}
