//! The paths of a published volume: the admitted transports (`transport_policy`), and the ANA
//! states, which by default make hosts prefer RDMA to TCP.
//!
//! Both apply to every listener of the volume's subsystem: those of `volume_publish`, those of the
//! configuration file, and those added later.

use std::collections::BTreeSet;
use std::rc::Rc;

use nacre_bdev_replica::model::TransportPolicy;
use nacre_nvmf::subsystems::{SubsystemListener, Withheld};
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use uuid::Uuid;

use super::published::{Published, published, published_as};
use crate::config::listener::AnaSetting;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::subsystems;

impl Published {
    /// The reason that hosts are refused over `trtype`; `None`: they are admitted.
    pub fn withheld(&self, trtype: &str) -> Option<Withheld> {
        (!admits(self.policy, trtype)).then_some(Withheld::TransportPolicy)
    }

    /// The ANA state of a listener; `None` if the subsystem reports no ANA states.
    pub fn ana_state(&self, trtype: &str) -> Option<AnaState> {
        Some(self.ana.as_ref()?.of(trtype))
    }

    /// As [`Published::ana_state`], for a listener of the configuration file with its own `ana`
    /// setting.
    pub fn ana_state_of(&self, trtype: &str, setting: AnaSetting) -> Option<AnaState> {
        let ana = self.ana.as_ref()?;
        let wished = match setting {
            AnaSetting::Auto => None,
            AnaSetting::Optimized => Some(AnaState::Optimized),
            AnaSetting::NonOptimized => Some(AnaState::NonOptimized),
            AnaSetting::Inaccessible => Some(AnaState::Inaccessible),
        };
        Some(
            ana.given(trtype)
                .or(wished)
                .unwrap_or_else(|| ana.of(trtype)),
        )
    }
}

/// True if the policy admits hosts over `trtype`.
pub fn admits(policy: TransportPolicy, trtype: &str) -> bool {
    match policy {
        TransportPolicy::Inherit | TransportPolicy::Any => true,
        TransportPolicy::RdmaOnly => trtype.eq_ignore_ascii_case("RDMA"),
        TransportPolicy::TcpOnly => trtype.eq_ignore_ascii_case("TCP"),
    }
}

/// The default ANA state of a listener added to a published volume, and the reason to withhold it.
pub fn of_listener(
    engine: &Engine,
    nqn: &Nqn,
    kind: TransportType,
) -> Option<(Option<AnaState>, Option<Withheld>)> {
    let named = published_as(engine, |params| params["nqn"] == nqn.as_str());
    let volume = named.into_iter().next()?;
    let trtype = kind.to_string();
    Some((volume.ana_state(&trtype), volume.withheld(&trtype)))
}

/// Refuses a policy under which no host could reach a published volume.
pub fn check_policy(engine: &Engine, id: Uuid, policy: TransportPolicy) -> Result<(), RpcError> {
    let Some(volume) = published(engine).into_iter().find(|p| p.volume == id) else {
        return Ok(());
    };
    let nqn = Nqn::new(&volume.nqn).map_err(|e| RpcError::internal(e.to_string()))?;
    let listeners = engine
        .plane()?
        .target
        .subsystem(&nqn)
        .or_refuse()?
        .listeners();
    let mut used: BTreeSet<String> = listeners.iter().map(|l| l.transport.to_string()).collect();
    if volume.on_declared {
        used.extend(of_the_file(engine));
    }
    check(&used, policy).map_err(|refused| {
        refused
            .field("settings.transport_policy")
            .remedy(format!(
                "add a listener of the other transport first (`nacre listener add {nqn} …`), or keep the policy"
            ))
    })
}

/// Refuses to publish a volume that no host could reach. `named`: the transports of the call's
/// listeners; if empty, those of the configuration file count.
pub fn check_listeners<'a>(
    engine: &Engine,
    named: impl Iterator<Item = &'a str>,
    policy: TransportPolicy,
) -> Result<(), RpcError> {
    let mut used: BTreeSet<String> = named.map(str::to_uppercase).collect();
    if used.is_empty() {
        used = of_the_file(engine);
    }
    check(&used, policy).map_err(|refused| {
        refused
            .field("listeners")
            .remedy("add one of the other transport, or change the policy with `nacre volume set`")
    })
}

/// The transports of the listeners in the configuration file.
fn of_the_file(engine: &Engine) -> BTreeSet<String> {
    let statuses = engine.listeners.statuses(engine).into_iter();
    statuses
        .map(|s| s.path.transport.trtype().to_owned())
        .collect()
}

/// Refuses a policy that excludes all used transports. Without any listener it passes, because one
/// may be added later.
fn check(used: &BTreeSet<String>, policy: TransportPolicy) -> Result<(), RpcError> {
    if used.is_empty() || used.iter().any(|trtype| admits(policy, trtype)) {
        return Ok(());
    }
    let used: Vec<&str> = used.iter().map(String::as_str).collect();
    let only = match policy {
        TransportPolicy::RdmaOnly => "RDMA",
        _ => "TCP",
    };
    Err(RpcError::errno(
        Errno::EINVAL,
        format!(
            "no host could reach the volume: transport_policy admits {only} only, and its listeners use {}",
            used.join(" and ")
        ),
    ))
}

/// Applies a changed policy to the listeners of a published volume. The listeners stay open.
pub async fn policy_changed(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    let Some(volume) = published(engine).into_iter().find(|p| p.volume == id) else {
        return Ok(());
    };
    let nqn = Nqn::new(&volume.nqn).map_err(|e| RpcError::internal(e.to_string()))?;
    for listener in engine
        .plane()?
        .target
        .subsystem(&nqn)
        .or_refuse()?
        .listeners()
    {
        let SubsystemListener {
            transport, address, ..
        } = listener;
        let why = volume.withheld(&transport.to_string());
        // Listeners of the file may also be withheld for other reasons, so `look_again` decides.
        if subsystems::is_stored_listener(engine, &nqn, transport, &address) {
            subsystems::withhold(engine, &nqn, transport, &address, why).await?;
        }
    }
    engine.listeners.look_again(engine).await;
    Ok(())
}
