//! The token file of the HTTP endpoints: reads it, and checks the tokens of requests.

use std::fmt;
use std::path::{Path, PathBuf};

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::services::keyring;

/// The token that a client must send: `Authorization: Bearer TOKEN`.
#[derive(Clone)]
pub struct Token(Zeroizing<String>);

#[derive(Debug, thiserror::Error)]
#[error("[metrics] token_file {path}: {cause}", path = path.display())]
pub struct TokenError {
    path: PathBuf,
    cause: String,
}

impl Token {
    /// Least bytes of a token: 16 random letters cannot be guessed.
    const SHORTEST: usize = 16;

    /// Reads the file. It must not be readable by other users, as with key files.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let refuse = |cause: String| TokenError {
            path: path.to_owned(),
            cause,
        };
        let text = keyring::read(path).map_err(|error| refuse(error.to_string()))?;
        let token = Zeroizing::new(text.trim().to_owned());
        if token.len() < Self::SHORTEST || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let least = Self::SHORTEST;
            return Err(refuse(format!(
                "a line of at least {least} letters and digits is needed: `openssl rand -hex 32` makes one"
            )));
        }
        Ok(Self(token))
    }

    /// True if the request has the token. The time of the comparison does not depend on where a
    /// wrong token of the same length differs.
    pub fn is_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(AUTHORIZATION);
        let given = given.map_or(&b""[..], HeaderValue::as_bytes);
        let Some((scheme, given)) = given.split_at_checked(SCHEME.len()) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(SCHEME) && given.ct_eq(self.0.as_bytes()).into()
    }
}

/// The authentication scheme: RFC 6750, section 2.1.
const SCHEME: &[u8] = b"Bearer ";

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}
