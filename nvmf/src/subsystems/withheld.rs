//! [`Withheld`]: why a subsystem is withheld from a listener. The subsystem's discovery log entries
//! omit the listener, and hosts that connect there are refused.
//!
//! A refused host gets the status of a listener without the subsystem, so that it tries another
//! path. The log names the setting that is the cause.

use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::transport::TransportType;

/// The reason why a subsystem refuses hosts on one of its listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Withheld {
    /// The listener has tcp_fallback = false.
    TcpFallback,
    /// The volume allows other transports only.
    TransportPolicy,
    /// An operator withheld the listener and gave no reason. Calls have no word for it.
    #[serde(skip)]
    ByRequest,
}

impl Withheld {
    /// Returns the text for the log: why a host is refused, and the remedy.
    pub(crate) fn refusal(self, nqn: &Nqn, host: &Nqn, kind: TransportType) -> String {
        let (setting, remedy) = match self {
            Self::TcpFallback => (
                "tcp_fallback = false of the listener",
                "set tcp_fallback = true, or move what uses the volume to a host with RDMA",
            ),
            Self::TransportPolicy => (
                "the transport_policy of the volume",
                "connect over the other transport, or change the policy with `nacre volume set \
                 --transport-policy`",
            ),
            Self::ByRequest => (
                "withheld = true of the listener",
                "connect over another transport, or add the listener again without withheld",
            ),
        };
        format!("{host} came to {nqn} over {kind}, which {setting} excludes; {remedy}")
    }
}
