//! The errors of backup operations.

use std::time::Duration;

use uuid::Uuid;

/// Most characters of an error text from an object store, which its server writes.
const MOST_TEXT: usize = 300;
const MOST_CAUSES: usize = 10;
/// The words of the crate `object_store` before and after its description of a request.
const REQUEST: &str = "Error performing ";
const REQUEST_END: &str = " - ";

/// The error of a backup operation. `name` is a path in the store, `operation` a verb such as
/// `read`.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The location or the endpoint is not valid.
    #[error("{0}")]
    Location(String),
    /// The credentials of the object store are missing or incomplete.
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
    /// A file that this operation found or wrote before: another daemon deleted it, or the store is
    /// not mounted.
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

/// The defect of an object or a manifest in the store.
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

/// The text of an error and its causes. Outer errors often repeat the inner ones.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let causes = std::iter::successors(error.source(), |error| error.source());
    for cause in causes.take(MOST_CAUSES) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Shortens an error text: of the XML of an S3 server, its code and message; of other texts, all
/// but the description of the request, which the error names already.
fn cause_of(text: &str) -> String {
    let text = match text.split_once(REQUEST) {
        Some((_, rest)) => rest.split_once(REQUEST_END).map_or(text, |(_, end)| end),
        None => text,
    };
    let within = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>"))
            .map(|(found, _)| found)
    };
    match (within("Code"), within("Message")) {
        (Some(code), Some(message)) => printable(&format!("the server answers {code}: {message}")),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_servers_are_short() {
        let text = "Generic S3 error: Error performing GET http://127.0.0.1:9/b/x in 1.2s, after 6 \
                    retries, max_retries: 6, retry_timeout: 90s  - HTTP error: error sending \
                    request: Connection refused";
        let expected = "HTTP error: error sending request: Connection refused";
        assert_eq!(cause_of(text), expected);
        let text = "Error performing PUT http://h/ in 1s - Server returned non-2xx status code: \
                    403 Forbidden: <Error><Code>AccessDenied</Code><Message>no\n</Message></Error>";
        assert_eq!(cause_of(text), "the server answers AccessDenied: no ");
        assert_eq!(cause_of("No space left"), "No space left");
    }
}
