//! The errors of the delivery of an alert.

use std::path::PathBuf;
use std::time::Duration;

use lettre::transport::smtp;

use crate::one_line;

/// The error of one attempt to deliver a message, or of the settings of its receiver.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("cannot connect to {server}: {source}")]
    Connect {
        server: String,
        source: std::io::Error,
    },
    #[error("TLS with {server}: {source}")]
    Tls {
        server: String,
        source: std::io::Error,
    },
    #[error("\"{0}\" is no name of a server: TLS needs one to compare with its certificate")]
    ServerName(String),
    #[error("the token would cross the network in clear: the URL must have https://")]
    TokenInClear,
    #[error("the URL is a secret and would cross the network in clear: it must have https://")]
    UrlInClear,
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    #[error("the request cannot be made: {0}")]
    Request(#[from] hyper::http::Error),
    #[error("the webhook answered {status}")]
    Status {
        status: u16,
        /// The pause before another attempt that the webhook asks for (`Retry-After`).
        retry_after: Option<Duration>,
    },
    #[error("no answer within {} s", .0.as_secs_f32())]
    Late(Duration),
    #[error("mail: {}", chain(.0))]
    Smtp(#[from] smtp::Error),
    #[error("mail to {recipient}: {}", chain(source))]
    Recipient {
        recipient: String,
        source: smtp::Error,
    },
    #[error("{address:?} has letters that the mail server does not accept (no SMTPUTF8)")]
    International { address: String },
    #[error("the mail cannot be made: {0}")]
    Mail(#[from] lettre::error::Error),
    #[error("{path}: {cause}", path = path.display())]
    Authorities { path: PathBuf, cause: String },
    #[error("certificates of the system: {0}; install ca-certificates, or name a PEM file in ca")]
    SystemAuthorities(String),
    #[error("{0}")]
    Address(#[from] super::AddressError),
    /// A secret of the receiver cannot be read.
    #[error("{setting} {place}: {cause}")]
    Secret {
        setting: &'static str,
        /// A file, or the name of a key.
        place: String,
        cause: String,
    },
}

impl Failure {
    /// The error as one line for logs and terminals, without control characters: parts of it come
    /// from servers.
    pub fn cause(&self) -> String {
        one_line(&self.to_string(), 500)
    }

    /// True if another attempt would fail, too: the receiver refuses this message for good, or its
    /// settings do not allow to send it. No other attempt is made.
    pub fn is_final(&self) -> bool {
        match self {
            // RFC 9110: 408, 425 and 429 ask for another attempt.
            Self::Status { status, .. } => {
                (300..500).contains(status) && ![408, 425, 429].contains(status)
            }
            Self::Smtp(error) => error.is_permanent(),
            Self::Recipient { .. }
            | Self::International { .. }
            | Self::Mail(_)
            | Self::Request(_)
            | Self::TokenInClear
            | Self::UrlInClear => true,
            _ => false,
        }
    }

    /// The pause that a webhook asks for (`Retry-After` in seconds).
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// The error and its causes. lettre's own text names only the first.
fn chain(error: &smtp::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text += &format!(": {said}");
        }
        cause = error.source();
    }
    text
}
