//! `nvmf_get_listeners`: requested and actual state of every listener, and the reason for any
//! difference.

use std::rc::Rc;

use nacre_nvmf::transport::{Address, TransportType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::address::AddressReply;
use super::check_target;
use crate::plane::Plane;
use crate::rpc::{Class, Method, Registry, RpcError};
use crate::services::Engine;
use crate::services::listeners::{self, Actual, PathStatus};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetListeners>();
}

pub struct GetListeners;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetListenersParams {
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListenerReply {
    /// Name in the configuration file; null if added by RPC.
    listener: Option<String>,
    /// The interface of the address; `*` means all.
    iface: Option<String>,
    address: AddressReply,
    /// `listen`, `prefer`, `require`, or `withheld` (hosts are refused: tcp_fallback is false).
    wanted: &'static str,
    /// `listening`, `idle` (no subsystem uses the listener) or `absent`.
    actual: &'static str,
    /// Why the listener is not listening: `no_rdma_dev`, `port_down`, `no_gid_for_ip`,
    /// `unsupported_link`, `no_uverbs`, `no_rdma_cm`, `memlock`, `no_subsystem` or `refused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evidence: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// The RDMA device of the listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma: Option<RdmaReply>,
    subsystems: Vec<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RdmaReply {
    device: String,
    port: u8,
    gid_index: u16,
    /// soft-RoCE or soft-iWARP.
    software: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ListenersReply {
    listeners: Vec<ListenerReply>,
    /// Interfaces and addresses that the configuration file selects and the machine lacks at
    /// present.
    unmatched: Vec<String>,
}

impl Method<Engine> for GetListeners {
    const NAME: &'static str = "nvmf_get_listeners";
    const ABOUT: &'static str =
        "Lists listeners with requested state, actual state, and the reason for any difference.";
    const CLASS: Class = Class::Read;
    type Params = GetListenersParams;
    type Reply = ListenersReply;

    async fn apply(
        params: GetListenersParams,
        engine: Rc<Engine>,
    ) -> Result<ListenersReply, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let plane = engine.plane()?;
        let statuses = engine.listeners.statuses(&engine);
        let by_rpc = added_by_rpc(&engine, &plane, &statuses);
        let unmatched = engine.listeners.unmatched();
        Ok(ListenersReply {
            listeners: statuses.into_iter().map(describe).chain(by_rpc).collect(),
            unmatched: unmatched.iter().map(ToString::to_string).collect(),
        })
    }
}

fn describe(status: PathStatus) -> ListenerReply {
    let PathStatus {
        path,
        actual,
        subsystems,
    } = status;
    let address = Address::Ip(path.address());
    let kind = path.transport.into();
    let (word, reason, evidence, remedy) = in_words(actual);
    ListenerReply {
        wanted: listeners::wanted(&path),
        listener: Some(path.listener),
        iface: Some(path.iface),
        address: AddressReply::new(kind, &address),
        actual: word,
        reason,
        evidence,
        remedy,
        rdma: path.verdict.ok().flatten().map(|chosen| RdmaReply {
            device: chosen.device,
            port: chosen.port,
            gid_index: chosen.gid_index,
            software: chosen.software,
        }),
        subsystems,
    }
}

type StateWords = (
    &'static str,
    Option<&'static str>,
    Option<String>,
    Option<String>,
);

/// The state's name, reason, evidence and remedy.
fn in_words(actual: Actual) -> StateWords {
    let reason = Some(actual.reason()).filter(|reason| !reason.is_empty());
    let word = actual.word();
    let (evidence, remedy) = match actual {
        Actual::Not(lack) => (Some(lack.evidence), Some(lack.remedy)),
        Actual::Listening | Actual::Idle => (None, None),
    };
    (word, reason, evidence, remedy)
}

/// Listening addresses of subsystems that do not come from the configuration file.
fn added_by_rpc(engine: &Engine, plane: &Plane, statuses: &[PathStatus]) -> Vec<ListenerReply> {
    let declared = |kind: &str, address: &Address| {
        statuses.iter().any(|s| {
            let place = Address::Ip(s.path.address());
            s.path.transport.trtype() == kind && place == *address
        })
    };
    let mut all: Vec<ListenerReply> = Vec::new();
    for subsystem in plane.target.subsystems() {
        let nqn = subsystem.nqn().to_string();
        for listener in subsystem.listeners() {
            if declared(&listener.transport.to_string(), &listener.address) {
                continue;
            }
            let address = AddressReply::new(listener.transport, &listener.address);
            match all.iter_mut().find(|l| l.address == address) {
                Some(known) => known.subsystems.push(nqn.clone()),
                None => {
                    let actual = match (listener.transport, &listener.address) {
                        (TransportType::Rdma, Address::Ip(address)) => {
                            listeners::of_rdma(engine, *address)
                        }
                        _ => Actual::Listening,
                    };
                    let (actual, reason, evidence, remedy) = in_words(actual);
                    all.push(ListenerReply {
                        listener: None,
                        iface: None,
                        address,
                        wanted: "listen",
                        actual,
                        reason,
                        evidence,
                        remedy,
                        rdma: None,
                        subsystems: vec![nqn.clone()],
                    });
                }
            }
        }
    }
    all
}
