//! Why an operation failed.

use std::time::Duration;

use uuid::Uuid;

/// Most bytes of an error of a store: its server writes the text.
const MOST_TEXT: usize = 300;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Location(String),
    #[error("{0}")]
    Credentials(String),
    #[error("cannot {operation} {name}: {cause}")]
    Store {
        operation: &'static str,
        name: String,
        cause: String,
    },
    #[error("cannot {operation} {name}: no answer within {} s", limit.as_secs())]
    Late {
        operation: &'static str,
        name: String,
        limit: Duration,
    },
    #[error("{name} is damaged: {cause}")]
    Damaged { name: String, cause: Damage },
    #[error("{0} is no longer in the store")]
    Gone(String),
    #[error("{name} has too many entries: at most {most} are supported")]
    TooMany { name: String, most: usize },
    #[error("there is no backup {0}")]
    Unknown(Uuid),
    #[error("the volume has more than {most} objects of 4 MiB with data")]
    TooLarge { most: usize },
    #[error("cannot read the snapshot: {0}")]
    Source(String),
    #[error("cannot write the volume: {0}")]
    Target(String),
    #[error("cancelled")]
    Cancelled,
}

/// The damage of an object or a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("it is missing")]
    Missing,
    #[error("it has {found} bytes instead of {expected}")]
    Size { found: u64, expected: u64 },
    #[error("it has more than {most} bytes")]
    Large { most: u64 },
    #[error("it does not begin as one of this kind")]
    Magic,
    #[error("its data cannot be decompressed")]
    Compression,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("{0}")]
    Malformed(String),
    #[error("it has version {0} of the format: a newer version of Nacre is needed")]
    Version(u32),
}

impl Failure {
    pub(crate) fn store(operation: &'static str, name: &str, error: &object_store::Error) -> Self {
        Self::Store {
            operation,
            name: name.to_owned(),
            cause: cause_of(&chain(error)),
        }
    }

    pub(crate) fn damaged(name: impl ToString, cause: Damage) -> Self {
        Self::Damaged {
            name: name.to_string(),
            cause,
        }
    }
}

/// The innermost cause says most, and the outer ones repeat it.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) if !error.to_string().contains(&source.to_string()) => {
            format!("{error}: {}", chain(source))
        }
        _ => error.to_string(),
    }
}

/// The code and text of an S3 server, without its XML and the URL.
fn cause_of(text: &str) -> String {
    let within = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>"))
            .map(|(found, _)| found)
    };
    match (within("Code"), within("Message")) {
        (Some(code), Some(message)) => printable(&format!("the server says {code}: {message}")),
        _ => printable(text),
    }
}

/// One short line without control characters.
pub(crate) fn printable(text: &str) -> String {
    let mut line: String = text.chars().take(MOST_TEXT).collect();
    line = line.replace(char::is_control, " ");
    if text.chars().nth(MOST_TEXT).is_some() {
        line.push_str(" …");
    }
    line
}
