//! `nvmf_subsystem_*listener*`: where subsystems can be reached.

use std::rc::Rc;

use nacre_nvmf::target::{Subsystem, SubsystemError, SubsystemListener};
use nacre_nvmf::transport::{Address, TransportType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::address::{AddressReply, TransportAddress};
use super::{any_subsystem, key, transport};
use crate::engine::{Engine, Personality};
use crate::rpc::error::Errno;
use crate::rpc::{Effect, Method, Registry, RpcError};
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<Add>()
        .add::<Remove>()
        .add::<SetAnaState>()
        .add::<Get>();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum AnaState {
    Optimized,
    NonOptimized,
    Inaccessible,
}

impl AnaState {
    /// Every path through this target is an optimized one.
    fn check(self) -> Result<(), RpcError> {
        match self {
            AnaState::Optimized => Ok(()),
            AnaState::NonOptimized | AnaState::Inaccessible => Err(RpcError::errno(
                Errno::ENOTSUP,
                "listeners have no ANA state of their own: all are optimized",
            )
            .field("ana_state")
            .remedy("to take a path away, remove the listener")),
        }
    }
}

struct Add;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddParams {
    nqn: String,
    listen_address: TransportAddress,
    tgt_name: Option<String>,
    /// Must be false: TLS is not there.
    #[serde(default)]
    secure_channel: bool,
    /// Must be `optimized`.
    ana_state: Option<AnaState>,
    /// Accepted: `posix` or `uring`; there is one implementation.
    sock_impl: Option<String>,
    /// Accepted: for vfio-user only.
    #[allow(dead_code)]
    numa_id: Option<i32>,
}

impl Method<Engine> for Add {
    const NAME: &'static str = "nvmf_subsystem_add_listener";
    const ABOUT: &'static str =
        "Makes a subsystem reachable on an address; port 0 takes any free one.";
    const EFFECT: Effect = Effect::Changes;
    type Params = AddParams;
    type Reply = bool;

    async fn apply(params: AddParams, on: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = on.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        if params.secure_channel {
            return Err(
                RpcError::errno(Errno::ENOTSUP, "NVMe/TCP with TLS is not supported")
                    .field("secure_channel")
                    .remedy("leave it out, and use a network that is yours"),
            );
        }
        params.ana_state.unwrap_or(AnaState::Optimized).check()?;
        if let Some(other) = params
            .sock_impl
            .filter(|name| !["posix", "uring"].contains(&name.as_str()))
        {
            return Err(RpcError::errno(
                Errno::ENOTSUP,
                format!("there is no socket implementation \"{other}\""),
            )
            .field("sock_impl")
            .remedy("leave it out"));
        }
        if kind == TransportType::Tcp && on.personality == Personality::Nacre {
            transport::ensure_tcp(&on, &plane).await?;
        }
        let nqn = subsystem.nqn();
        let bound = plane
            .target
            .add_listener(nqn, kind, &Address::Ip(address))?;
        // The port as bound: hosts find it there again after a restart.
        let record = json!({
            "nqn": nqn.as_str(),
            "listen_address": AddressReply::new(kind, &bound),
            "secure_channel": false,
        });
        let stored = on
            .journal
            .commit(Change::put(
                key::listener(nqn, kind, &bound),
                Add::NAME,
                record,
            ))
            .await;
        if let Err(refused) = stored {
            plane.target.remove_listener(nqn, kind, &bound)?;
            return Err(refused);
        }
        on.notes.send("nvmf_listener_change", nqn.as_str());
        Ok(true)
    }
}

struct Remove;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListenerParams {
    nqn: String,
    listen_address: TransportAddress,
    tgt_name: Option<String>,
}

impl Method<Engine> for Remove {
    const NAME: &'static str = "nvmf_subsystem_remove_listener";
    const ABOUT: &'static str =
        "Takes an address from a subsystem, and disconnects the hosts that came through it.";
    const EFFECT: Effect = Effect::Changes;
    type Params = ListenerParams;
    type Reply = bool;

    async fn apply(params: ListenerParams, on: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = on.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        let (nqn, address) = (subsystem.nqn(), Address::Ip(address));
        let own = key::listener(nqn, kind, &address);
        let live = find(&subsystem, kind, &address);
        // One that could not be restored can be given up by removing it.
        if let (Err(refused), None) = (&live, on.journal.find(&own)) {
            return Err(refused.clone());
        }
        on.journal.commit(Change::remove(own)).await?;
        if live.is_ok() {
            plane.target.remove_listener(nqn, kind, &address)?;
            on.notes.send("nvmf_listener_change", nqn.as_str());
        }
        Ok(true)
    }
}

fn find(
    subsystem: &Subsystem,
    kind: TransportType,
    address: &Address,
) -> Result<SubsystemListener, RpcError> {
    let same = |l: &SubsystemListener| l.transport == kind && l.address == *address;
    subsystem.listeners().into_iter().find(same).ok_or_else(|| {
        SubsystemError::NoListener {
            nqn: subsystem.nqn().to_string(),
            address: address.to_string(),
        }
        .into()
    })
}

struct SetAnaState;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AnaParams {
    nqn: String,
    listen_address: TransportAddress,
    /// Must be `optimized`.
    ana_state: AnaState,
    /// All groups unless given.
    #[allow(dead_code)]
    anagrpid: Option<u32>,
    tgt_name: Option<String>,
}

impl Method<Engine> for SetAnaState {
    const NAME: &'static str = "nvmf_subsystem_listener_set_ana_state";
    const ABOUT: &'static str = "Sets the ANA state of a listener: optimized is what all are.";
    const EFFECT: Effect = Effect::Changes;
    type Params = AnaParams;
    type Reply = bool;

    async fn apply(params: AnaParams, on: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = on.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        find(&subsystem, kind, &Address::Ip(address))?;
        params.ana_state.check()?;
        Ok(true)
    }
}

struct Get;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetParams {
    nqn: String,
    tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListenerReply {
    address: AddressReply,
    /// Of subsystems with ANA reporting.
    #[serde(skip_serializing_if = "Option::is_none")]
    ana_states: Option<Vec<AnaStateReply>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AnaStateReply {
    ana_group: u32,
    ana_state: &'static str,
}

impl Method<Engine> for Get {
    const NAME: &'static str = "nvmf_subsystem_get_listeners";
    const ABOUT: &'static str = "Lists the addresses of a subsystem.";
    type Params = GetParams;
    type Reply = Vec<ListenerReply>;

    async fn apply(params: GetParams, on: Rc<Engine>) -> Result<Vec<ListenerReply>, RpcError> {
        let plane = on.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let config = &subsystem.config;
        let groups = || {
            (1..=config.max_namespaces).map(|ana_group| AnaStateReply {
                ana_group,
                ana_state: "optimized",
            })
        };
        let describe = |listener: SubsystemListener| ListenerReply {
            address: AddressReply::new(listener.transport, &listener.address),
            ana_states: config.ana_reporting.then(|| groups().collect()),
        };
        Ok(subsystem.listeners().into_iter().map(describe).collect())
    }
}
