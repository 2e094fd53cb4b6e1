//! The API tokens of programs, in a small file in the data directory. Each token has a name, a
//! role, and the digest of its secret.

use std::time::Duration;

use nacre_engine_rpc::Role;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::accounts::{NameError, check_name};
use crate::list_file::{Entry, ListFile, StoreError};
use crate::sessions::{Token, TokenId};

pub const MAX_TOKENS: usize = 64;
/// Shortest and longest validity of a token.
pub const MIN_VALIDITY: Duration = Duration::from_secs(60);
pub const MAX_VALIDITY: Duration = Duration::from_secs(10 * 366 * 86_400);
/// The prefix of each secret, by which scanners for published secrets recognise it.
const PREFIX: &str = "nacre_";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiToken {
    pub name: String,
    pub role: Role,
    /// SHA-256 of the secret, in hexadecimal digits.
    pub(crate) digest: String,
    /// Unix time in milliseconds.
    pub created_ms: u64,
    /// Unix time in milliseconds; `None`: valid until the token is deleted.
    pub expires_ms: Option<u64>,
}

impl Entry for ApiToken {
    const FILE: &'static str = "web-tokens.json";
    const KEY: &'static str = "tokens";
    const MAX_ENTRIES: usize = MAX_TOKENS;
    /// Most bytes of the file; a token takes fewer than 300.
    const MAX_BYTES: u64 = 64 * 1024;
}

impl ApiToken {
    pub fn is_valid(&self, now_ms: u64) -> bool {
        self.expires_ms.is_none_or(|end| now_ms < end)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("there is an API token \"{0}\" already")]
    Exists(String),
    #[error("there is no API token \"{0}\"")]
    Unknown(String),
    #[error("there are {MAX_TOKENS} API tokens already")]
    Full,
    #[error(
        "a token is valid for {} s to {} s, not for {} s",
        MIN_VALIDITY.as_secs(), MAX_VALIDITY.as_secs(), .0.as_secs()
    )]
    Validity(Duration),
    #[error("no random numbers: {0}")]
    Random(#[from] getrandom::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(crate) type ApiTokens = ListFile<ApiToken>;

impl ApiTokens {
    /// Creates a token and returns its secret, which is not stored.
    pub(crate) async fn create(
        &self,
        name: &str,
        role: Role,
        validity: Option<Duration>,
        now_ms: u64,
    ) -> Result<Zeroizing<String>, TokenError> {
        check_name(name)?;
        if let Some(validity) = validity
            && !(MIN_VALIDITY..=MAX_VALIDITY).contains(&validity)
        {
            return Err(TokenError::Validity(validity));
        }
        let secret = Token::random()?;
        let validity_ms = validity.map(|validity| validity.as_secs() * 1000);
        let token = ApiToken {
            name: name.to_owned(),
            role,
            digest: secret.id().digits(),
            created_ms: now_ms,
            expires_ms: validity_ms.map(|validity_ms| now_ms.saturating_add(validity_ms)),
        };
        let added = self.change(|list| {
            if list.iter().any(|other| other.name == token.name) {
                return Err(TokenError::Exists(token.name));
            }
            if list.len() >= MAX_TOKENS {
                return Err(TokenError::Full);
            }
            list.push(token);
            Ok(())
        });
        added.await?;
        Ok(Zeroizing::new(format!("{PREFIX}{}", secret.reveal())))
    }

    pub(crate) async fn delete(&self, name: &str) -> Result<(), TokenError> {
        let deleted = self.change(|list| {
            let before = list.len();
            list.retain(|token| token.name != name);
            if list.len() == before {
                return Err(TokenError::Unknown(name.to_owned()));
            }
            Ok(())
        });
        deleted.await
    }

    /// The token with this digest, unless it has expired.
    pub(crate) fn valid(&self, id: TokenId, now_ms: u64) -> Option<ApiToken> {
        let digest = id.digits();
        self.find(|token| token.digest == digest)
            .filter(|token| token.is_valid(now_ms))
    }
}

/// The digest of a secret that a program sends. `None`: the text cannot be one.
pub(crate) fn id_of(secret: &str) -> Option<TokenId> {
    Some(Token::parse(secret.strip_prefix(PREFIX)?)?.id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    const NOW: u64 = 1_800_000_000_000;

    /// Goal: a secret opens its token and no other, until its end; the file has no secret.
    #[test]
    fn secrets_belong_to_their_tokens() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let tokens = ApiTokens::open(Some(folder.path())).unwrap();
            let hour = Some(Duration::from_secs(3600));
            let one = tokens.create("one", Role::Viewer, hour, NOW).await.unwrap();
            let two = tokens.create("two", Role::Admin, None, NOW).await.unwrap();
            assert_eq!((one.len(), &one[..6]), (70, "nacre_"));
            let [one_id, two_id] = [&one, &two].map(|secret| id_of(secret).unwrap());
            let again = ApiTokens::open(Some(folder.path())).unwrap();
            for tokens in [&tokens, &again] {
                let valid = |id, now| tokens.valid(id, now).map(|token| token.name);
                assert_eq!(valid(one_id, NOW + 3_599_999).as_deref(), Some("one"));
                assert_eq!(valid(one_id, NOW + 3_600_000), None);
                assert_eq!(valid(two_id, u64::MAX).as_deref(), Some("two"));
                assert_eq!(valid(TokenId::of([7; 32]), NOW), None);
            }
            let stored = std::fs::read_to_string(folder.path().join(ApiToken::FILE)).unwrap();
            for secret in [&one, &two] {
                assert!(!stored.contains(&secret[6..]), "{stored}");
                assert!(id_of(&secret[6..]).is_none(), "without its beginning");
                assert!(id_of(&secret[..69]).is_none(), "not whole");
            }
            tokens.delete("one").await.unwrap();
            assert!(tokens.valid(one_id, NOW).is_none());
            let gone = tokens.delete("one").await;
            assert!(matches!(gone, Err(TokenError::Unknown(_))));
        });
    }

    #[test]
    fn tokens_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        run(async {
            let tokens = ApiTokens::open(Some(folder.path())).unwrap();
            let create = |name: String, seconds: u64| {
                let tokens = &tokens;
                async move {
                    let validity = Some(Duration::from_secs(seconds));
                    tokens.create(&name, Role::Operator, validity, NOW).await
                }
            };
            for seconds in [0, 59, MAX_VALIDITY.as_secs() + 1] {
                let refused = create("a".into(), seconds).await;
                assert!(matches!(refused, Err(TokenError::Validity(_))), "{seconds}");
            }
            let refused = create("A".into(), 60).await;
            assert!(matches!(refused, Err(TokenError::Name(_))));
            for n in 0..MAX_TOKENS {
                let name = format!("a{n:02}{}", "x".repeat(29));
                create(name, MAX_VALIDITY.as_secs()).await.unwrap();
            }
            let refused = create("b".into(), 60).await;
            assert!(matches!(refused, Err(TokenError::Full)));
            tokens
                .delete(&format!("a00{}", "x".repeat(29)))
                .await
                .unwrap();
            let refused = create(format!("a01{}", "x".repeat(29)), 60).await;
            assert!(matches!(refused, Err(TokenError::Exists(_))));
        });
        let file = std::fs::metadata(folder.path().join(ApiToken::FILE)).unwrap();
        assert!(file.len() < ApiToken::MAX_BYTES, "the bound holds the most");
    }
}
