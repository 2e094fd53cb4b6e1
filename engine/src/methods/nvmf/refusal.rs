//! Maps target errors to SPDK's codes and messages; `data` holds the facts.

use nacre_nvmf::subsystems::{SubsystemError, TargetError};
use nacre_nvmf::transport::ListenError;

use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::{Errno, INTERNAL_ERROR};

/// SPDK's message with its code for a failed operation (internal error).
pub(super) fn failed(message: impl Into<String>, cause: impl Into<String>) -> RpcError {
    RpcError {
        code: INTERNAL_ERROR,
        message: message.into(),
        data: None,
    }
    .cause(cause)
}

pub(super) fn no_subsystem(nqn: &str) -> RpcError {
    RpcError::invalid_params_text(format!("Subsystem with NQN '{nqn}' not found"))
        .cause("there is no such subsystem")
        .field("nqn")
        .remedy("nvmf_get_subsystems lists them")
}

impl Refusal for TargetError {
    fn refusal(self) -> RpcError {
        let cause = self.to_string();
        match self {
            Self::SubsystemExists { nqn } => {
                failed(format!("Unable to create subsystem {nqn}"), cause).field("nqn")
            }
            Self::SubsystemsFull { .. } => failed("Unable to create subsystem", cause).remedy(
                "raise nvmf.max_subsystems, or call nvmf_set_max_subsystems before the start",
            ),
            Self::NoSubsystem { nqn } => no_subsystem(&nqn),
            Self::Invalid { field, .. } => RpcError::invalid_params(cause).field(field),
            Self::NoTransport { .. } => RpcError::invalid_params(cause)
                .field("listen_address.trtype")
                .remedy("call nvmf_create_transport first"),
            Self::TransportExists { kind } => {
                failed(format!("Transport type '{kind}' already exists"), cause).field("trtype")
            }
            Self::ReferralExists { .. } => RpcError::errno(Errno::EEXIST, cause)
                .field("secure_channel")
                .remedy("remove the referral first, then add it with other properties"),
            Self::DiscoveryName { nqn } => {
                failed(format!("Unable to create subsystem {nqn}"), cause)
                    .field("nqn")
                    .remedy(
                        "choose another name, or another one for discovery: nvmf_discovery_set_nqn",
                    )
            }
            Self::NoReferral { .. } => failed("Unable to remove a referral.", cause)
                .field("address")
                .remedy("nvmf_discovery_get_referrals lists them"),
            Self::OtherTls { .. } => RpcError::invalid_params(cause)
                .field("secure_channel")
                .remedy("give all subsystems on this address the same, or use another port"),
            Self::Helper(_) => RpcError::errno(Errno::EAGAIN, cause)
                .remedy("the machine has too many threads, or too little memory: try again"),
            Self::Subsystem(error) => error.refusal(),
            Self::Listen(ListenError::Option { option, .. }) => {
                RpcError::invalid_params(cause).field(format!("options.{option}"))
            }
            Self::Listen(_) => RpcError::invalid_params(cause).field("listen_address"),
        }
    }
}

impl Refusal for SubsystemError {
    fn refusal(self) -> RpcError {
        let cause = self.to_string();
        let refused = RpcError::invalid_params(&cause);
        match self {
            Self::NsidTaken { .. } => refused
                .field("namespace.nsid")
                .remedy("leave nsid out to get the lowest free one"),
            Self::NsidOutOfRange { .. } => refused
                .field("namespace.nsid")
                .remedy("create the subsystem with a larger max_namespaces"),
            Self::AnaGroupOutOfRange { .. } => refused
                .field("namespace.anagrpid")
                .remedy("leave it out, or create the subsystem with a larger max_namespaces"),
            Self::NamespacesFull { .. } => refused
                .field("nqn")
                .remedy("create the subsystem with a larger max_namespaces"),
            Self::NoNamespace { .. } => refused
                .field("nsid")
                .remedy("nvmf_get_subsystems lists the namespaces"),
            Self::UuidTaken { .. } => refused
                .field("namespace.uuid")
                .remedy("a device served twice needs a uuid of its own for each namespace"),
            Self::HostExists { .. } => failed("Internal error", cause).field("host"),
            Self::NoHost { .. } => failed("Internal error", cause)
                .field("host")
                .remedy("nvmf_get_subsystems lists the hosts"),
            Self::AutoVisible { .. } => refused.field("nsid"),
            Self::ListenerExists { .. } => refused.field("listen_address"),
            Self::NoListener { .. } => refused
                .field("listen_address")
                .remedy("nvmf_subsystem_get_listeners lists them"),
            Self::NoAnaReporting { .. } => refused
                .field("ana_state")
                .remedy("create the subsystem with ANA reporting (`ana_reporting`, on the command line `--ana`), or remove the listener to take the path away"),
            Self::Discovery => refused.field("nqn"),
        }
    }
}
