//! Failover test of a listener: `nvmf_subsystem_test_failover`.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::address::IpTransport;
use nacre_nvmf::subsystems::{AnaStates, Association, Subsystem, SubsystemListener};
use nacre_nvmf::transport::{Address, ListenerId, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::address::{AddressReply, TransportAddress};
use super::any_subsystem;
use super::listener::{find, restore_states};
use crate::refusal::OrRefuse;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError, access};
use crate::services::Engine;

/// Longest test, in seconds.
const MAX_SECONDS: u32 = 3600;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<TestFailover>();
}

pub struct TestFailover;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TestFailoverParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The listener to take out of use.
    pub listen_address: TransportAddress,
    /// Duration of the test, at most 3600. 0 ends a running test at once.
    pub seconds: u32,
    /// Transport that must remain accessible: `tcp` or `rdma`. Left out: any.
    pub to: Option<String>,
    /// Test even if a connected host has no other accessible path: its I/O waits, or fails. Needs
    /// the role `admin`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct TestFailoverReply {
    /// The other accessible listeners of the subsystem.
    accessible: Vec<AddressReply>,
    /// Connected hosts without a path to one of them.
    hosts_without_path: Vec<String>,
}

impl Method<Engine> for TestFailover {
    const NAME: &'static str = "nvmf_subsystem_test_failover";
    const ABOUT: &'static str = "Makes a listener inaccessible (ANA) for a time, so that hosts move their I/O to another. Its states return by themselves, also if the caller is gone, and nothing is stored. Refused if no other listener is accessible.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = TestFailoverParams;
    type Reply = TestFailoverReply;

    async fn apply(
        params: TestFailoverParams,
        engine: Rc<Engine>,
    ) -> Result<TestFailoverReply, RpcError> {
        if params.force {
            access::require(Class::Admin, "force")?;
        }
        if params.seconds > MAX_SECONDS {
            let cause = format!("{} is more than {MAX_SECONDS}", params.seconds);
            return Err(RpcError::invalid_params(cause).field("seconds"));
        }
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (kind, address) = params.listen_address.parse("listen_address")?;
        let (nqn, address) = (subsystem.nqn().clone(), Address::Ip(address));
        let listener = find(&subsystem, kind, &address)?;
        let others = others(&subsystem, &listener);
        let reply = TestFailoverReply {
            accessible: others
                .iter()
                .map(|other| AddressReply::new(other.transport, &other.address))
                .collect(),
            hosts_without_path: hosts_without_path(&subsystem, &listener, &others),
        };
        if params.seconds == 0 {
            end(&engine, &nqn, listener.id, None);
            return Ok(reply);
        }
        let to = params.to.as_deref().map(str::parse::<IpTransport>);
        let to = to
            .transpose()
            .map_err(|error| RpcError::invalid_params(error.to_string()).field("to"))?;
        if let Some(to) = to
            && !others
                .iter()
                .any(|other| other.transport == TransportType::from(to))
        {
            let to = to.word();
            let cause = format!("no other listener of the subsystem is accessible over {to}");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("to")
                .remedy("add a listener, or see the states with nvmf_subsystem_get_listeners"));
        }
        if others.is_empty() {
            let cause = "no other listener of the subsystem is accessible";
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("listen_address")
                .remedy("add a listener, or see the states with nvmf_subsystem_get_listeners"));
        }
        if let (false, [first, ..]) = (params.force, &reply.hosts_without_path[..]) {
            let count = reply.hosts_without_path.len();
            let cause = format!(
                "{count} connected without a path to another accessible listener, such as {first}"
            );
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("listen_address")
                .remedy("connect every path of the host (nvme connect-all), or force"));
        }
        plane
            .target
            .set_ana_state(&nqn, kind, &address, None, AnaState::Inaccessible)
            .or_refuse()?;
        let number = engine
            .listeners
            .failover_tests
            .begin(&nqn, listener.id, &listener.ana);
        engine.notes.send("nvmf_ana_change", nqn.as_str());
        let time = Duration::from_secs(params.seconds.into());
        let timer = Rc::clone(&engine);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(time).await;
            end(&timer, &nqn, listener.id, Some(number));
        });
        Ok(reply)
    }
}

/// Ends the test of a listener, and restores its ANA states.
fn end(engine: &Engine, nqn: &Nqn, listener: ListenerId, number: Option<u64>) {
    let Some(before) = engine.listeners.failover_tests.end(nqn, listener, number) else {
        return;
    };
    let Ok(plane) = engine.plane() else { return };
    let Ok(subsystem) = plane.target.subsystem(nqn) else {
        return;
    };
    let same = |other: &SubsystemListener| other.id == listener;
    if let Some(found) = subsystem.listeners().into_iter().find(same) {
        let place = (found.transport, &found.address);
        restore_states(&plane.target, nqn, place, &before, None);
        engine.notes.send("nvmf_ana_change", nqn.as_str());
    }
}

/// The other listeners of the subsystem over which every namespace is accessible.
fn others(subsystem: &Subsystem, listener: &SubsystemListener) -> Vec<SubsystemListener> {
    let mut others = subsystem.listeners();
    others.retain(|other| {
        other.id != listener.id && other.withheld.is_none() && is_accessible(&other.ana)
    });
    others
}

fn is_accessible(states: &AnaStates) -> bool {
    let mut all = states.exceptions().map(|(_, state)| state);
    let is_one = |state| matches!(state, AnaState::Optimized | AnaState::NonOptimized);
    is_one(states.of_others()) && all.all(is_one)
}

/// Hosts that are connected over this listener, and over none of `others`.
fn hosts_without_path(
    subsystem: &Subsystem,
    listener: &SubsystemListener,
    others: &[SubsystemListener],
) -> Vec<String> {
    let controllers = subsystem.controllers();
    let host = |a: &Arc<Association>| (a.hostnqn.to_string(), a.hostid);
    let safe: BTreeSet<_> = controllers
        .iter()
        .filter(|a| others.iter().any(|other| other.id == a.listener))
        .map(host)
        .collect();
    let here = controllers.iter().filter(|a| a.listener == listener.id);
    let lonely: BTreeSet<_> = here.map(host).filter(|host| !safe.contains(host)).collect();
    lonely.into_iter().map(|(nqn, _)| nqn).collect()
}
