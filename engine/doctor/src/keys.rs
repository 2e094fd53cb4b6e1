//! The checks of `nacre doctor` of the daemon's keys: they can be read, do not expire soon, and
//! their store key is not beside them.

use std::path::PathBuf;

use super::{Finding, Scope};

/// A key that expires within this time gets a warning.
const SOON_DAYS: f64 = 14.0;
const DAY_S: f64 = 86_400.0;

/// A key with which a host or controller authenticates itself, or a TLS key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Key {
    pub name: String,
    /// The reason why its secret cannot be read.
    pub problem: Option<String>,
    /// Seconds until it expires, negative afterwards; `None`: it never expires.
    pub expires_in_s: Option<f64>,
}

/// The location of the store key, which encrypts the secrets that the daemon stores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreKey {
    Credential,
    /// A file beside the state that it encrypts.
    File(PathBuf),
    /// It cannot be used, with the reason.
    Missing(String),
}

pub fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    findings.extend(scope.keys.iter().map(check));
    findings.extend(scope.store_key.as_ref().map(check_store));
}

fn check_store(store: &StoreKey) -> Finding {
    const ID: &str = "keys.store";
    match store {
        StoreKey::Credential => Finding::pass(ID, "the store key is a credential"),
        StoreKey::File(path) => {
            let path = path.display();
            let evidence = format!(
                "the store key is {path}, beside the keys that it seals: a copy of that folder \
                 has both"
            );
            let remedy = "give the daemon the credential nacre-store-key, restart it, and call \
                          `nacre key rotate-store`";
            Finding::warn(ID, evidence, remedy)
        }
        StoreKey::Missing(why) => {
            let remedy = "restore the store key; until then hosts with sealed keys are refused";
            Finding::fail(ID, why.clone(), remedy)
        }
    }
}

fn check(key: &Key) -> Finding {
    const ID: &str = "keys.valid";
    const ROTATE: &str = "`nacre key rotate` gives its hosts a new key and accepts both for a while; `nacre key expire` \
                          sets another date";
    let finding = match (&key.problem, key.expires_in_s) {
        (Some(problem), _) => {
            let remedy = "restore its secret; until then its hosts are refused";
            Finding::fail(ID, problem.clone(), remedy)
        }
        (None, Some(left)) if left <= 0.0 => {
            let evidence = "it has expired: hosts that use it are refused";
            Finding::fail(ID, evidence, ROTATE)
        }
        (None, Some(left)) if left < SOON_DAYS * DAY_S => {
            let days = (left / DAY_S).floor();
            let evidence = match days {
                0.0 => "it expires within a day".to_owned(),
                1.0 => "it expires in 1 day".to_owned(),
                days => format!("it expires in {days} days"),
            };
            Finding::warn(ID, evidence, ROTATE)
        }
        (None, Some(left)) => {
            Finding::pass(ID, format!("it expires in {} days", (left / DAY_S).floor()))
        }
        (None, None) => Finding::pass(ID, "its secret can be read; it never expires"),
    };
    finding.of(key.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn places_of_the_store_key() {
        let of = |store| check_store(&store).status;
        assert_eq!(of(StoreKey::Credential), Status::Pass);
        assert_eq!(of(StoreKey::File("/k".into())), Status::Warn);
        assert_eq!(of(StoreKey::Missing("gone".into())), Status::Fail);
    }

    #[test]
    fn keys_that_end() {
        let of = |problem: Option<&str>, days: Option<f64>| {
            let finding = check(&Key {
                name: "k".into(),
                problem: problem.map(str::to_owned),
                expires_in_s: days.map(|days| days * DAY_S),
            });
            assert_eq!(finding.subject.as_deref(), Some("k"));
            (finding.status, finding.evidence)
        };
        assert_eq!(of(None, None).0, Status::Pass);
        assert_eq!(of(None, Some(14.5)).0, Status::Pass);
        let soon = (Status::Warn, "it expires in 13 days".to_owned());
        assert_eq!(of(None, Some(13.9)), soon);
        assert_eq!(of(None, Some(0.5)).0, Status::Warn);
        assert_eq!(of(None, Some(-1.0)).0, Status::Fail);
        let damaged = (Status::Fail, "damaged".to_owned());
        assert_eq!(of(Some("damaged"), Some(100.0)), damaged);
    }
}
