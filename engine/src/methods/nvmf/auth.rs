//! `host_auth_status`, a Nacre extension: how the hosts of a subsystem authenticate themselves.

use std::rc::Rc;

use nacre_nvmf::subsystems::{Phase, SecretKind, Subsystem};
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{host_nqn, nvm_subsystem};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::values::time;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Status>();
}

struct Status;

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StatusParams {
    /// Only this subsystem.
    nqn: Option<String>,
    /// Only this host.
    host: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AuthStatusReply {
    subsystem: String,
    host: String,
    #[serde(flatten)]
    keys: HostKeysReply,
    /// The rotations that have not ended.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rotations: Vec<RotationReply>,
    /// Controllers of the host, and its queues by the key that they proved.
    controllers: usize,
    queues: Vec<QueuesReply>,
    /// When the host proved last that it has its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_success: Option<SuccessReply>,
    /// When it failed to last, within 10 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<FailureReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct HostKeysReply {
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_ctrlr_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RotationReply {
    /// `dhchap` or `tls`.
    kind: &'static str,
    former_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    former_ctrlr_key: Option<String>,
    /// When the former key ends at the latest.
    until: String,
}

/// Queues that proved the same keys in the same way.
#[derive(Debug, Serialize, JsonSchema)]
struct QueuesReply {
    count: usize,
    #[serde(flatten)]
    of: ProofReply,
}

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct ProofReply {
    /// The key for authentication that the host used; left out: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    /// The TLS key that the host used; left out: none with a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
    /// Authentication generated the TLS key (secure channel concatenation), which has no name.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    generated: bool,
    /// How the host derived the TLS key: `standard`, or `libnvme` and `libnvme-1.8` as libnvme
    /// before 1.16 did.
    #[serde(skip_serializing_if = "Option::is_none")]
    derivation: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cipher: Option<&'static str>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct SuccessReply {
    at: String,
    peer: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct FailureReply {
    at: String,
    peer: String,
    reason: String,
}

impl Method<Engine> for Status {
    const NAME: &'static str = "host_auth_status";
    const ABOUT: &'static str = "Shows how allowed hosts prove themselves: keys, rotations, keys in use, the last success and the last failure.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Read;
    type Params = StatusParams;
    type Reply = Vec<AuthStatusReply>;

    async fn apply(
        params: StatusParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<AuthStatusReply>, RpcError> {
        let plane = engine.plane()?;
        let only = params.host.as_deref().map(host_nqn).transpose()?;
        let subsystems = match &params.nqn {
            Some(nqn) => vec![nvm_subsystem(&plane, None, nqn)?],
            None => plane.target.subsystems(),
        };
        let mut replies = Vec::new();
        for subsystem in subsystems {
            let hosts = subsystem.hosts().into_iter();
            for host in hosts.filter(|host| only.as_ref().is_none_or(|only| only == host)) {
                let nqn = subsystem.nqn();
                let access = plane.target.authentication.last_access(nqn, &host);
                replies.push(AuthStatusReply {
                    last_success: access.map(|access| SuccessReply {
                        at: time::moment(access.at),
                        peer: access.peer.to_string(),
                    }),
                    ..status(&engine, &subsystem, &host)
                });
            }
        }
        Ok(replies)
    }
}

fn status(engine: &Engine, subsystem: &Subsystem, host: &Nqn) -> AuthStatusReply {
    let nqn = subsystem.nqn();
    let keys = subsystem.host_keys(host);
    let (dhchap_key, dhchap_ctrlr_key) = keys.map_or((None, None), |keys| keys.names());
    let rotations = [(SecretKind::Keys, "dhchap"), (SecretKind::Psk, "tls")];
    let rotations = rotations.into_iter().filter_map(|(secret, kind)| {
        let place = (nqn.clone(), host.clone(), secret);
        let rotation = engine.keyring.rotations.find(&place)?;
        Some(RotationReply {
            kind,
            former_key: rotation.former.0,
            former_ctrlr_key: rotation.former.1,
            until: time::moment(rotation.until),
        })
    });
    let (mut controllers, mut queues) = (0, Vec::<QueuesReply>::new());
    for association in subsystem.controllers() {
        if association.hostnqn != *host || association.phase() == Phase::Closing {
            continue;
        }
        controllers += 1;
        for queue in association.queues() {
            let secure = queue.secure.as_deref();
            let one = ProofReply {
                dhchap_key: queue.auth.keys().and_then(|keys| keys.names().0),
                psk: secure.and_then(|channel| channel.psk.name()),
                generated: secure.is_some_and(|channel| channel.identity.is_generated),
                derivation: secure.map(|channel| channel.derivation.name()),
                cipher: secure.map(|channel| channel.suite.name()),
            };
            match queues.iter_mut().find(|other| other.of == one) {
                Some(other) => other.count += 1,
                None => queues.push(QueuesReply { count: 1, of: one }),
            }
        }
    }
    let failure = engine.keyring.last_failure(nqn, host);
    AuthStatusReply {
        subsystem: nqn.to_string(),
        host: host.to_string(),
        keys: HostKeysReply {
            dhchap_key,
            dhchap_ctrlr_key,
            psk: subsystem.host_psk(host).and_then(|psk| psk.name()),
        },
        rotations: rotations.collect(),
        controllers,
        queues,
        last_success: None,
        last_failure: failure.map(|failure| FailureReply {
            at: time::moment(failure.at),
            peer: failure.peer,
            reason: failure.reason,
        }),
    }
}
