//! The reasons why a connection of a host fails.

use std::time::Duration;

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::fabrics::InvalidParameter;

use crate::auth::Reason;
use crate::transport::Closed;

/// The reason why a connection failed or was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("cannot connect: {0}")]
    Dial(String),
    #[error("{}", lost(.0))]
    Lost(Closed),
    /// Lost during authentication. Over RDMA, Linux targets report a wrong key in this way, because
    /// they disconnect before their message arrives.
    #[error("{}, during authentication", lost(.0))]
    LostInAuthentication(Closed),
    #[error("{step} was refused: {}", shown(*status, *fabrics))]
    Refused {
        step: &'static str,
        status: StatusCode,
        /// The status belongs to a fabrics command, which gives some codes another meaning.
        fabrics: bool,
    },
    #[error("connect was refused: invalid {parameter}")]
    InvalidParameter {
        parameter: InvalidParameter,
        dnr: bool,
    },
    #[error("{step} took longer than {limit:?}")]
    TimedOut { step: &'static str, limit: Duration },
    #[error("reset by this host")]
    Reset,
    #[error("no I/O queue comes up: {why}")]
    IoQueues { why: String },
    #[error("I/O under way was not answered within {limit:?}")]
    NotDrained { limit: Duration },
    #[error("the target requires authentication, and this host has no key for it (dhchap_key)")]
    KeyRequired,
    #[error("the target requires secure channel concatenation, which is not on for it (concat)")]
    SecureChannelRequired,
    #[error("secure channel concatenation (concat) needs a key of this host (dhchap_key)")]
    ConcatenationKey,
    #[error("authentication failed: {0}")]
    Authentication(Reason),
    #[error("the target misbehaved: {what}")]
    Misbehaved { what: String },
}

fn shown(status: StatusCode, fabrics: bool) -> String {
    if fabrics {
        status.of_fabrics().to_string()
    } else {
        status.to_string()
    }
}

fn lost(why: &Closed) -> String {
    match why {
        Closed::Broken(why) | Closed::Refused(why) => why.clone(),
        Closed::Protocol(what) => format!("connection lost: {what}"),
        Closed::Peer => "connection lost: closed by the target".into(),
        Closed::TimedOut => "no answer in time".into(),
        Closed::Local => "connection lost: closed by this host".into(),
    }
}

impl HostError {
    pub(super) fn closed(why: Closed, authenticating: bool) -> Self {
        if authenticating {
            Self::LostInAuthentication(why)
        } else {
            Self::Lost(why)
        }
    }

    /// True if retries are useless: the target refused with DNR, or this host lacks a valid key.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused { status, .. } => status.dnr(),
            Self::InvalidParameter { dnr, .. } => *dnr,
            Self::KeyRequired | Self::SecureChannelRequired | Self::ConcatenationKey => true,
            // The same keys would fail again.
            Self::Authentication(reason) => reason.is_final(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that never answered was not connected.
    #[test]
    fn silence_is_no_lost_connection() {
        let silent = HostError::Lost(Closed::TimedOut);
        assert_eq!(silent.to_string(), "no answer in time");
    }

    /// 181h is "busy" as the answer to Connect, and something about data as the answer to a read.
    #[test]
    fn a_status_is_named_by_its_command() {
        let refused = |step, fabrics| HostError::Refused {
            step,
            status: StatusCode::CONNECT_CONTROLLER_BUSY,
            fabrics,
        };
        assert_eq!(
            refused("connect", true).to_string(),
            "connect was refused: Connect Controller Busy (sct 0x1, sc 0x81)"
        );
        assert_eq!(
            refused("list namespaces", false).to_string(),
            "list namespaces was refused: Invalid Protection Information (sct 0x1, sc 0x81)"
        );
    }
}
