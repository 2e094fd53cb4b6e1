//! Listeners of one subsystem: `nvmf_subsystem_*listener*`.

use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::{
    AnaStates, ListenOptions, Subsystem, SubsystemError, SubsystemListener, Target, TargetError,
    Withheld,
};
use nacre_nvmf::transport::{Address, ListenerOptions, TlsPolicy, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::address::{AddressReply, TransportAddress};
use super::{any_subsystem, key, transport};
use crate::config::Personality;
use crate::journal::{is_declaring, is_replaying};
use crate::plane::Plane;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::subsystems::{ADD_LISTENER, note_withheld, place};
use crate::services::volumes;
use crate::store::{Change, Edit};
use crate::values::address::with_port;

/// Replayed after all listeners are restored.
const SET_ANA_STATE: &str = "nvmf_subsystem_listener_set_ana_state";

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AddListener>()
        .add::<RemoveListener>()
        .add::<SetAnaState>()
        .add::<GetSubsystemListeners>();
}

/// Refuses an option out of its range. Transports refuse values that they do not support.
fn checked(options: ListenerOptions) -> Result<ListenerOptions, RpcError> {
    let given = json!(options);
    for (name, least, most) in ListenerOptions::RANGES {
        let out_of_range = |number: &u64| !(*least..=*most).contains(number);
        if let Some(number) = given[name].as_u64().filter(out_of_range) {
            let cause = format!("{number} is not in {least}..={most}");
            return Err(RpcError::invalid_params(cause).field(format!("options.{name}")));
        }
    }
    Ok(options)
}

pub struct AddListener;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddListenerParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Address on which the subsystem accepts connections.
    pub listen_address: TransportAddress,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// Hosts must use TLS at this address: the same as `tls` = `require` in the options.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub secure_channel: bool,
    /// Initial state of all ANA groups. Default `optimized`; for a published volume, the state that
    /// volume_publish set. Other states need ana_reporting.
    pub ana_state: Option<AnaState>,
    /// The discovery log omits this address, and hosts that connect to it are refused, with the
    /// reason in the log. Use it to keep the subsystem on another transport.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withheld: bool,
    /// Reason for withholding.
    pub withheld_reason: Option<Withheld>,
    /// Options of this address that override the transport's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub options: ListenerOptions,
    /// Accepted: `posix` or `uring`, which select the same implementation, and `ssl`, which is the
    /// same as `secure_channel`.
    pub sock_impl: Option<String>,
    /// Accepted: for vfio-user only.
    #[allow(dead_code)]
    pub numa_id: Option<i32>,
}

fn is_default(options: &ListenerOptions) -> bool {
    *options == ListenerOptions::default()
}

impl Method<Engine> for AddListener {
    const NAME: &'static str = ADD_LISTENER;
    const ABOUT: &'static str =
        "Makes a subsystem reachable on an address; port 0 takes any free one.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AddListenerParams;
    type Reply = bool;

    async fn apply(params: AddListenerParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        let mut given = checked(params.options)?;
        // SPDK's way to say it by the implementation of sockets.
        let over_ssl = params.sock_impl.as_deref() == Some("ssl");
        if params.secure_channel || over_ssl {
            let other = given.tls.replace(TlsPolicy::Require);
            if other.is_some_and(|tls| tls != TlsPolicy::Require) {
                let cause = "secure_channel requires TLS, and tls in the options does not";
                return Err(RpcError::invalid_params(cause).field("options.tls"));
            }
        }
        if let Some(other) = params
            .sock_impl
            .filter(|name| !["posix", "uring", "ssl"].contains(&name.as_str()))
        {
            return Err(RpcError::errno(
                Errno::ENOTSUP,
                format!("there is no socket implementation \"{other}\""),
            )
            .field("sock_impl")
            .remedy("leave it out"));
        }
        if engine.personality == Personality::Nacre {
            transport::ensure(&engine, &plane, kind).await?;
        }
        let (nqn, address) = (subsystem.nqn(), Address::Ip(address));
        // Calls from the configuration file and from the store are complete: no defaults apply.
        let usual = if is_declaring() || is_replaying() {
            None
        } else {
            volumes::of_listener(&engine, nqn, kind)
        };
        let (usual_state, usually_withheld) = usual.unwrap_or_default();
        let ana_state = params.ana_state.or(usual_state);
        let ana_state = ana_state.unwrap_or(AnaState::Optimized);
        let asked = params
            .withheld
            .then(|| params.withheld_reason.unwrap_or(Withheld::ByRequest));
        let withheld = asked.or(usually_withheld);
        let options = ListenOptions {
            ana: kept_states(
                &engine,
                &key::listener(nqn, kind, &place(&address)),
                ana_state,
            ),
            withheld,
            listener: given,
        };
        let bound = listen(&plane, nqn, kind, &address, options).await?;
        // Records the port as bound, so that hosts find it again after a restart.
        let mut record = json!({
            "nqn": nqn.as_str(),
            "listen_address": AddressReply::new(kind, &bound),
            "secure_channel": given.tls() == TlsPolicy::Require,
        });
        if ana_state != AnaState::Optimized {
            record["ana_state"] = json!(ana_state);
        }
        note_withheld(&mut record, withheld);
        // `secure_channel` says it already, and SPDK's daemon knows no other way.
        given.tls = given.tls.filter(|tls| *tls != TlsPolicy::Require);
        if given != ListenerOptions::default() {
            record["options"] = json!(given);
        }
        let stored = engine
            .journal
            .commit(Change::put(
                key::listener(nqn, kind, &place(&bound)),
                Self::NAME,
                record,
            ))
            .await;
        if let Err(refused) = stored {
            plane
                .target
                .remove_listener(nqn, kind, &bound)
                .or_refuse()?;
            return Err(refused);
        }
        engine.notes.send("nvmf_listener_change", nqn.as_str());
        Ok(true)
    }
}

/// Opens the listener. This may be slow: the first RDMA listener of a device registers all memory
/// with it.
/// be slow.
async fn listen(
    plane: &Plane,
    nqn: &Nqn,
    kind: TransportType,
    address: &Address,
    options: ListenOptions,
) -> Result<Address, RpcError> {
    let target = Arc::clone(&plane.target);
    let (nqn, address) = (nqn.clone(), address.clone());
    let listening = tokio::task::spawn_blocking(move || {
        target.add_listener_with(&nqn, kind, &address, options)
    });
    match listening.await {
        Ok(outcome) => Ok(outcome.or_refuse()?),
        Err(error) => Err(RpcError::internal(error.to_string())),
    }
}

pub struct RemoveListener;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListenerParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Address of the listener.
    pub listen_address: TransportAddress,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

impl Method<Engine> for RemoveListener {
    const NAME: &'static str = "nvmf_subsystem_remove_listener";
    const ABOUT: &'static str =
        "Takes an address from a subsystem, and disconnects the hosts that came through it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ListenerParams;
    type Reply = bool;

    async fn apply(params: ListenerParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, ip, port) = params.listen_address.read("listen_address")?;
        let nqn = subsystem.nqn();
        let own = key::listener(nqn, kind, &with_port(&ip, port));
        let live = params
            .listen_address
            .parse("listen_address")
            .and_then(|(_, address)| find(&subsystem, kind, &Address::Ip(address)));
        // A listener that could not be restored can be removed.
        if let (Err(refused), None) = (&live, engine.journal.find(&own)) {
            return Err(refused.clone());
        }
        // A listener of the configuration file comes and goes with its interface. Keep the settings
        // that RPC made about it.
        let change = if is_declaring() {
            Change::remove(own)
        } else {
            let below = Change(vec![Edit::RemoveAll(key::below(&own))]);
            Change::remove(own).and(below)
        };
        engine.journal.commit(change).await?;
        if let Ok(live) = live {
            plane
                .target
                .remove_listener(nqn, kind, &live.address)
                .or_refuse()?;
            // A listener that comes back has its own states.
            engine.listeners.failover_tests.end(nqn, live.id, None);
            engine.notes.send("nvmf_listener_change", nqn.as_str());
        }
        Ok(true)
    }
}

pub(super) fn find(
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
        .refusal()
    })
}

/// Initial ANA states of a listener: the state with which it is added, then stored changes.
fn kept_states(engine: &Engine, own: &str, ana_state: AnaState) -> AnaStates {
    let mut states = AnaStates::new(ana_state);
    let below = key::ana(own, None);
    for entry in engine.journal.below(&below) {
        if entry.record.key != below && !entry.record.key.starts_with(&key::below(&below)) {
            continue;
        }
        if let Ok(kept) = serde_json::from_value::<AnaParams>(entry.record.params) {
            states.set(kept.anagrpid, kept.ana_state);
        }
    }
    states
}

pub struct SetAnaState;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AnaParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Address of the listener.
    pub listen_address: TransportAddress,
    /// `persistent_loss`: the namespaces never return on this listener. `change`: hosts wait, at
    /// most ten seconds.
    pub ana_state: AnaState,
    /// Left out: all groups.
    pub anagrpid: Option<u32>,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

impl Method<Engine> for SetAnaState {
    const NAME: &'static str = SET_ANA_STATE;
    const ABOUT: &'static str = "Sets the ANA state of a listener, for all of a subsystem's ANA groups or for one. Hosts are notified, and move their I/O.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = AnaParams;
    type Reply = bool;

    async fn apply(params: AnaParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        let (nqn, address) = (subsystem.nqn(), Address::Ip(address));
        let listener = find(&subsystem, kind, &address).map_err(not_set)?;
        let before = listener.ana;
        let (group, state) = (params.anagrpid, params.ana_state);
        let set = plane
            .target
            .set_ana_state(nqn, kind, &address, group, state);
        set.map_err(|error| match error {
            TargetError::Subsystem(SubsystemError::AnaGroupOutOfRange { .. }) => {
                not_set(error.refusal().field("anagrpid"))
            }
            other => not_set(other.refusal()),
        })?;
        let mut record = json!({
            "nqn": nqn.as_str(),
            "listen_address": AddressReply::new(kind, &address),
            "ana_state": params.ana_state,
        });
        if let Some(group) = group {
            record["anagrpid"] = group.into();
        }
        let own = key::listener(nqn, kind, &place(&address));
        let all = key::ana(&own, None);
        let change = match group {
            Some(group) => Change::put(key::ana(&own, Some(group)), Self::NAME, record),
            // Records of single groups are replayed after this one; keep them.
            None if is_replaying() => Change::put(all, Self::NAME, record),
            // Setting all groups replaces the records of single groups.
            None => Change(vec![Edit::RemoveAll(key::below(&all))]).and(Change::put(
                all,
                Self::NAME,
                record,
            )),
        };
        if let Err(refused) = engine.journal.commit(change).await {
            restore_states(&plane.target, nqn, (kind, &address), &before, group);
            return Err(refused);
        }
        // This state stays: a failover test does not restore an earlier one. The other groups still
        // return after the test.
        let tests = &engine.listeners.failover_tests;
        match group {
            Some(group) => tests.change(nqn, listener.id, group, state),
            None => drop(tests.end(nqn, listener.id, None)),
        }
        engine.notes.send("nvmf_ana_change", nqn.as_str());
        Ok(true)
    }
}

/// SPDK uses one code and text for every failure to set a state.
fn not_set(refused: RpcError) -> RpcError {
    RpcError {
        code: INTERNAL_ERROR,
        message: format!("error setting ANA state: -{}", Errno::EINVAL as i32),
        ..refused
    }
}

/// Restores a listener's states, of all groups or of one, after a test or after a change that could
/// not be stored.
pub(super) fn restore_states(
    target: &Target,
    nqn: &Nqn,
    (kind, address): (TransportType, &Address),
    before: &AnaStates,
    group: Option<u32>,
) {
    let set = |group: Option<u32>, state| {
        // The same states were valid before the change. Setting them fails only if the listener is
        // gone.
        if let Err(error) = target.set_ana_state(nqn, kind, address, group, state) {
            tracing::debug!(%error, "an ANA state was not set back");
        }
    };
    match group {
        Some(group) => set(Some(group), before.of(group)),
        None => {
            set(None, before.of_others());
            for (group, state) in before.exceptions() {
                set(Some(group), state);
            }
        }
    }
}

pub struct GetSubsystemListeners;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SubsystemListenersParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct SubsystemListenerReply {
    pub address: AddressReply,
    /// Present for subsystems with ANA reporting.
    #[serde(skip_serializing_if = "Option::is_none")]
    ana_states: Option<Vec<AnaStateReply>>,
    /// Hosts are refused here; present only when true.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    withheld: bool,
    /// Reason for withholding.
    #[serde(skip_serializing_if = "Option::is_none")]
    withheld_reason: Option<Withheld>,
    /// Options in effect at this address; left out if there are none. The first subsystem at an
    /// address determines them.
    #[serde(skip_serializing_if = "Option::is_none")]
    options: Option<ListenerOptions>,
    /// Bytes of in-capsule data that hosts may send per command. Present if the listener has its
    /// own setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_capsule_data_size: Option<u32>,
    /// Why the size differs from the requested one.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_capsule_reason: Option<String>,
}

/// The in-capsule data size that hosts see, if the listener requested one, with the reason for
/// any difference.
fn in_capsule(target: &Target, listener: &SubsystemListener) -> Option<(u32, Option<String>)> {
    let asked = listener.options.in_capsule_data_size?;
    let is = target.in_capsule_data_size(listener.transport, listener.id)?;
    let reason = match listener.transport {
        _ if is == asked => None,
        TransportType::Rdma if is < asked => Some(format!(
            "{asked} bytes do not fit the receive buffers of the transport; raise rdma.in_capsule_data_size, or \
             declare the listener in the configuration file"
        )),
        _ => Some(format!(
            "another subsystem listened here first, with {is} bytes instead of {asked}"
        )),
    };
    Some((is, reason))
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct AnaStateReply {
    ana_group: u32,
    ana_state: AnaState,
}

impl Method<Engine> for GetSubsystemListeners {
    const NAME: &'static str = "nvmf_subsystem_get_listeners";
    const ABOUT: &'static str = "Lists the addresses of a subsystem.";
    const CLASS: Class = Class::Read;
    type Params = SubsystemListenersParams;
    type Reply = Vec<SubsystemListenerReply>;

    async fn apply(
        params: SubsystemListenersParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<SubsystemListenerReply>, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let config = &subsystem.config;
        let groups = |ana: &AnaStates| {
            let state = |ana_group| AnaStateReply {
                ana_group,
                ana_state: ana.of(ana_group),
            };
            (1..=config.max_namespaces).map(state).collect()
        };
        let describe = |listener: SubsystemListener| {
            let (size, reason) = in_capsule(&plane.target, &listener).unzip();
            let options = plane.target.listener_options(listener.id);
            SubsystemListenerReply {
                address: AddressReply::new(listener.transport, &listener.address),
                ana_states: config.ana_reporting.then(|| groups(&listener.ana)),
                withheld: listener.withheld.is_some(),
                withheld_reason: listener.withheld.filter(|why| *why != Withheld::ByRequest),
                options: Some(options).filter(|options| *options != ListenerOptions::default()),
                in_capsule_data_size: size,
                in_capsule_reason: reason.flatten(),
            }
        };
        Ok(subsystem.listeners().into_iter().map(describe).collect())
    }
}
