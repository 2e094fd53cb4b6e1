//! The sessions of the page's users. They are in memory only, so they end with the daemon.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use nacre_reactor::Nanos;
use zeroize::Zeroizing;

/// Longest duration of a session.
pub const LONGEST: Duration = Duration::from_secs(12 * 3600);
/// A session without an act of its user for this time ends.
pub const IDLE: Duration = Duration::from_secs(30 * 60);
/// Most sessions of one account. A further one replaces the one that was idle for longest.
pub const MAX_OF_ACCOUNT: usize = 16;

/// The secret of a session or of an API token: 256 random bits, written as 64 hexadecimal digits.
pub struct Token(Zeroizing<String>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(&mut *bytes)?;
        Ok(Self(hexadecimal(&bytes)))
    }

    /// Parses a token. `None`: the text does not have its form.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_token = text.len() == 64 && text.bytes().all(is_digit);
        is_token.then(|| Self(Zeroizing::new(text.to_owned())))
    }

    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The digest of the token, which is not secret.
    pub fn id(&self) -> TokenId {
        let digest = digest(&SHA256, self.0.as_bytes());
        TokenId(digest.as_ref().try_into().expect("32 bytes"))
    }
}

/// 64 hexadecimal digits.
fn hexadecimal(bytes: &[u8; 32]) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(64));
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(digit.into(), 16).expect("a hexadecimal digit"));
        }
    }
    text
}

/// The SHA-256 digest of a token, by which the daemon searches. So the time of a search reveals
/// nothing about the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenId([u8; 32]);

impl TokenId {
    pub(crate) fn digits(&self) -> String {
        hexadecimal(&self.0).to_string()
    }

    #[cfg(test)]
    pub(crate) fn of(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

#[derive(Debug)]
struct Session {
    name: String,
    began: Nanos,
    active: Nanos,
}

impl Session {
    fn is_over(&self, now: Nanos) -> bool {
        now.since(self.began) >= LONGEST || now.since(self.active) >= IDLE
    }
}

#[derive(Debug, Default)]
pub struct Sessions(HashMap<TokenId, Session>);

impl Sessions {
    /// Opens a session of this account.
    pub fn open(&mut self, name: &str, now: Nanos) -> Result<Token, getrandom::Error> {
        self.0.retain(|_, session| !session.is_over(now));
        let of_account = self.0.iter().filter(|(_, session)| session.name == name);
        if of_account.clone().count() >= MAX_OF_ACCOUNT {
            let idle = of_account.min_by_key(|(_, session)| session.active);
            if let Some(id) = idle.map(|(id, _)| *id) {
                self.0.remove(&id);
            }
        }
        let token = Token::random()?;
        let session = Session {
            name: name.to_owned(),
            began: now,
            active: now,
        };
        self.0.insert(token.id(), session);
        Ok(token)
    }

    /// The account of a session. `None`: there is no such session, or it has ended.
    pub fn account(&self, id: TokenId, now: Nanos) -> Option<&str> {
        let session = self.0.get(&id).filter(|session| !session.is_over(now))?;
        Some(&session.name)
    }

    /// Resets the idle time of a session, after an act of the user.
    pub fn touch(&mut self, id: TokenId, now: Nanos) {
        if let Some(session) = self.0.get_mut(&id)
            && !session.is_over(now)
        {
            session.active = now;
        }
    }

    pub fn close(&mut self, id: TokenId) {
        self.0.remove(&id);
    }

    /// Ends the sessions of an account that was changed or deleted.
    pub fn close_of(&mut self, name: &str) {
        self.0.retain(|_, session| session.name != name);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minutes(n: u64) -> Nanos {
        Nanos(n * 60 * 1_000_000_000)
    }

    #[test]
    fn sessions_end_by_time_and_with_their_account() {
        let mut sessions = Sessions::default();
        let token = sessions.open("ann", minutes(0)).unwrap();
        assert_eq!(format!("{token:?}"), "Token");
        let id = Token::parse(token.reveal()).unwrap().id();
        assert_eq!(sessions.account(id, minutes(29)), Some("ann"));
        assert_eq!(sessions.account(id, minutes(30)), None, "idle");
        // Only a request prolongs it, and none does for more than 12 hours.
        for n in 0..30 {
            sessions.touch(id, minutes(n * 25));
        }
        assert_eq!(sessions.account(id, minutes(719)), Some("ann"));
        assert_eq!(sessions.account(id, minutes(720)), None, "12 hours");
        let [one, two] = ["ann", "bob"].map(|name| sessions.open(name, minutes(720)).unwrap());
        assert_eq!(sessions.len(), 2, "the one that is over is gone");
        sessions.close_of("ann");
        assert_eq!(sessions.account(one.id(), minutes(720)), None);
        assert_eq!(sessions.account(two.id(), minutes(720)), Some("bob"));
        sessions.close(two.id());
        assert_eq!(sessions.len(), 0);
    }

    #[test]
    fn an_account_has_few_sessions_and_tokens_are_strict() {
        let mut sessions = Sessions::default();
        let open = |sessions: &mut Sessions, at| sessions.open("ann", Nanos(at)).unwrap().id();
        let first = open(&mut sessions, 0);
        let second = open(&mut sessions, 1);
        sessions.touch(first, Nanos(2));
        for at in 3..=MAX_OF_ACCOUNT as u64 + 1 {
            open(&mut sessions, at);
        }
        assert_eq!(sessions.len(), MAX_OF_ACCOUNT);
        assert_eq!(sessions.account(first, Nanos(20)), Some("ann"));
        assert_eq!(sessions.account(second, Nanos(20)), None, "idle longest");
        let good = "0123456789abcdef".repeat(4);
        assert!(Token::parse(&good).is_some());
        for bad in [&good[1..], &format!("{good}0"), &good.to_uppercase(), ""] {
            assert!(Token::parse(bad).is_none(), "{bad}");
        }
    }
}
