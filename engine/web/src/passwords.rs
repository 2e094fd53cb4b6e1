//! Hashes and verifies passwords with argon2id, on helper threads, two at a time.

use std::cell::Cell;
use std::sync::Arc;

use argon2::password_hash::{PasswordHasher, PasswordVerifier};
use argon2::{Algorithm, Argon2, Params, Version};
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

/// Shortest and longest password in bytes.
pub const MIN_BYTES: usize = 12;
pub const MAX_BYTES: usize = 256;
/// Most passwords that are hashed at a time; each takes memory and a processor.
const AT_ONCE: usize = 2;
/// Most requests that wait to be hashed.
const MAX_WAITING: usize = 32;

/// The cost parameters of argon2id.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    pub memory_kib: u32,
    pub passes: u32,
}

impl Default for Cost {
    /// OWASP's first recommendation for argon2id.
    fn default() -> Self {
        Self {
            memory_kib: 19 * 1024,
            passes: 2,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PasswordError {
    #[error("too many passwords are being verified")]
    Busy,
    #[error("the password has fewer than {MIN_BYTES} bytes")]
    Short,
    #[error("the password has more than {MAX_BYTES} bytes")]
    Long,
    #[error("the password is the name of the account")]
    Name,
    #[error("the password cannot be hashed")]
    Failed,
}

/// Checks a new password of the account `name`.
pub fn check(name: &str, password: &str) -> Result<(), PasswordError> {
    match password.len() {
        ..MIN_BYTES => Err(PasswordError::Short),
        bytes if bytes > MAX_BYTES => Err(PasswordError::Long),
        _ if password.eq_ignore_ascii_case(name) => Err(PasswordError::Name),
        _ => Ok(()),
    }
}

#[derive(Debug)]
pub struct Passwords {
    cost: Cost,
    turns: Arc<Semaphore>,
    waiting: Cell<usize>,
}

impl Passwords {
    pub fn new(cost: Cost) -> Self {
        Self {
            cost,
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            waiting: Cell::new(0),
        }
    }

    pub async fn hash(&self, password: Zeroizing<String>) -> Result<String, PasswordError> {
        let argon2 = argon2(self.cost)?;
        self.on_a_thread(move || {
            let mut salt = [0; 16];
            getrandom::fill(&mut salt).map_err(|_| PasswordError::Failed)?;
            let hash = argon2.hash_password_with_salt(password.as_bytes(), &salt);
            hash.map(|hash| hash.to_string())
                .map_err(|_| PasswordError::Failed)
        })
        .await?
    }

    /// True if the password has this hash. Takes the same time without a hash.
    pub async fn verify(
        &self,
        password: Zeroizing<String>,
        hash: Option<String>,
    ) -> Result<bool, PasswordError> {
        let argon2 = argon2(self.cost)?;
        let is_known = hash.is_some();
        let hash = hash.unwrap_or_else(|| self.unknown());
        let is_right = self
            .on_a_thread(move || {
                let verified = PasswordVerifier::<str>::verify_password(
                    &argon2,
                    password.as_bytes(),
                    hash.as_str(),
                );
                verified.is_ok()
            })
            .await?;
        Ok(is_known && is_right)
    }

    /// A hash that no password has, with the configured cost.
    fn unknown(&self) -> String {
        let Cost { memory_kib, passes } = self.cost;
        let (salt, hash) = ("A".repeat(22), "A".repeat(43));
        format!("$argon2id$v=19$m={memory_kib},t={passes},p=1${salt}${hash}")
    }

    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PasswordError> {
        let waiting = Waiting::enter(&self.waiting)?;
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.map_err(|_| PasswordError::Failed)?;
        drop(waiting);
        // The thread has the turn: it works on after its client is gone.
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        done.await.map_err(|_| PasswordError::Failed)
    }
}

fn argon2(cost: Cost) -> Result<Argon2<'static>, PasswordError> {
    let params = Params::new(cost.memory_kib, cost.passes, 1, None);
    let params = params.map_err(|_| PasswordError::Failed)?;
    Ok(Argon2::new(Algorithm::Argon2id, Version::V0x13, params))
}

/// A request that waits to be hashed; counts until it is dropped.
struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    fn enter(count: &'a Cell<usize>) -> Result<Self, PasswordError> {
        if count.get() >= MAX_WAITING {
            return Err(PasswordError::Busy);
        }
        count.set(count.get() + 1);
        Ok(Self(count))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
pub(crate) const CHEAP: Cost = Cost {
    memory_kib: 64,
    passes: 1,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    fn secret(text: &str) -> Zeroizing<String> {
        Zeroizing::new(text.to_owned())
    }

    #[test]
    fn a_password_has_its_hash_and_no_other() {
        run(async {
            let passwords = Passwords::new(CHEAP);
            let hash = passwords.hash(secret("correct horse")).await.unwrap();
            assert!(hash.starts_with("$argon2id$v=19$m=64,t=1,p=1$"), "{hash}");
            let again = passwords.hash(secret("correct horse")).await.unwrap();
            assert_ne!(hash, again, "each has its own salt");
            let verify = |text: &str, hash| passwords.verify(secret(text), hash);
            assert!(verify("correct horse", Some(hash.clone())).await.unwrap());
            assert!(!verify("correct horsf", Some(hash)).await.unwrap());
            // An unknown account has a hash that can be computed, so it costs the same.
            assert!(!verify("correct horse", None).await.unwrap());
            let argon2 = argon2(CHEAP).unwrap();
            let unknown = passwords.unknown();
            let refused = PasswordVerifier::<str>::verify_password(&argon2, b"x", unknown.as_str());
            assert_eq!(
                refused.unwrap_err(),
                argon2::password_hash::Error::PasswordInvalid
            );
        });
    }

    #[test]
    fn new_passwords_are_checked() {
        for (password, outcome) in [
            ("elevenbytes", Err(PasswordError::Short)),
            ("twelve bytes", Ok(())),
            ("Longer-than-12", Err(PasswordError::Name)),
            (&*"x".repeat(MAX_BYTES), Ok(())),
            (&*"x".repeat(MAX_BYTES + 1), Err(PasswordError::Long)),
        ] {
            assert_eq!(check("longer-than-12", password), outcome, "{password}");
        }
    }

    /// Goal: a flood of passwords takes no more than its share. Method: more requests than may
    /// wait, at once.
    #[test]
    fn waiting_requests_are_bounded() {
        run(async {
            let passwords = Passwords::new(CHEAP);
            let all = (0..MAX_WAITING + AT_ONCE + 5)
                .map(|_| Box::pin(passwords.verify(secret("x"), None)));
            let mut all: Vec<_> = all.collect();
            let mut outcomes = Vec::new();
            std::future::poll_fn(|context| {
                all.retain_mut(|one| match one.as_mut().poll(context) {
                    std::task::Poll::Ready(outcome) => {
                        outcomes.push(outcome);
                        false
                    }
                    std::task::Poll::Pending => true,
                });
                if all.is_empty() {
                    std::task::Poll::Ready(())
                } else {
                    std::task::Poll::Pending
                }
            })
            .await;
            let busy = |one: &&Result<bool, PasswordError>| **one == Err(PasswordError::Busy);
            assert_eq!(outcomes.iter().filter(busy).count(), 5);
        });
    }
}
