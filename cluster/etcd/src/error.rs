//! Errors of requests to etcd, and their classification from gRPC statuses.

use tonic::{Code, Status};
use uuid::Uuid;

use crate::node::DaemonIdentity;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("etcd endpoint \"{endpoint}\": {why}")]
    Endpoint { endpoint: String, why: String },
    #[error("certificates for etcd: {why}")]
    Certificates { why: String },
    /// No endpoint answered in time. A change may have been executed.
    #[error("no answer from etcd within {after_ms} ms{}", in_brackets(.said))]
    Unanswered {
        after_ms: u64,
        /// The errors of failed attempts; empty if none failed.
        said: String,
    },
    #[error("etcd has no space left (its quota): compact and defragment it, or raise the quota")]
    Full,
    #[error("a request of {bytes} bytes is larger than etcd accepts")]
    TooLarge { bytes: usize },
    /// etcd has compacted the history of this revision.
    #[error("etcd has compacted revision {revision}")]
    Compacted { revision: i64 },
    #[error("etcd refuses access: {why}")]
    Denied { why: String },
    #[error("etcd {found} loses data or changes: upgrade it to 3.4.42, 3.5.28, 3.6.9 or later")]
    Version { found: String },
    #[error("etcd refuses the request ({code:?}): {why}")]
    Rejected { code: Code, why: String },
    #[error("key \"{key}\" of etcd: {what}")]
    Damaged { key: String, what: String },
    /// Another daemon owns the prefix.
    #[error(
        "{prefix} in etcd belongs to another daemon: {owner}. If that daemon never runs again, \
         `take_over = \"{claim}\"` takes its volumes"
    )]
    Owned {
        prefix: String,
        owner: DaemonIdentity,
        claim: Uuid,
    },
    /// This daemon owned the prefix, and etcd has no owner of it.
    #[error(
        "{prefix} has no owner in etcd, although this daemon owned it: this is another etcd, or it has lost its data"
    )]
    Forgotten { prefix: String },
    #[error("{prefix} has a cluster in etcd: choose another prefix in [store]")]
    OfCluster { prefix: String },
    #[error(
        "key \"{key}\" of etcd has format {found}, and this program knows {known}: start the newer program"
    )]
    Newer { key: String, found: u64, known: u64 },
    #[error("the thread of the etcd client: {why}")]
    Thread { why: String },
}

fn in_brackets(said: &str) -> String {
    match said {
        "" => String::new(),
        said => format!(" ({said})"),
    }
}

impl Error {
    /// True if the same call may succeed later without a change of its parameters.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Unanswered { .. } | Self::Full)
    }
}

/// The failure of an attempt on one endpoint.
pub(crate) enum Failure {
    /// Another endpoint, or a later attempt, may succeed.
    Passing(String),
    Final(Error),
}

/// The failure that a gRPC status stands for. `revision` is that of the request, and `bytes` its
/// size.
pub(crate) fn classify(status: &Status, revision: i64, bytes: usize) -> Failure {
    let why = described(status);
    let said = status.message();
    let error = match status.code() {
        Code::OutOfRange if said.contains("compacted") => Error::Compacted { revision },
        Code::ResourceExhausted if said.contains("database space exceeded") => Error::Full,
        Code::InvalidArgument if said.contains("request is too large") => Error::TooLarge { bytes },
        Code::ResourceExhausted if said.contains("larger than max") => Error::TooLarge { bytes },
        Code::PermissionDenied | Code::Unauthenticated => Error::Denied { why },
        Code::InvalidArgument if said.contains("user name is empty") => Error::Denied { why },
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Aborted
        | Code::Unknown
        | Code::Internal
        | Code::ResourceExhausted => return Failure::Passing(why),
        code => Error::Rejected { code, why },
    };
    Failure::Final(error)
}

/// The status with its causes: a refused certificate is several causes away.
pub(crate) fn described(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let line = error.to_string();
        if !text.contains(&line) {
            text = format!("{text}: {line}");
        }
        cause = error.source();
    }
    text
}
