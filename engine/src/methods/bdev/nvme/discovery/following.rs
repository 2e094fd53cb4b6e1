//! The task of a discovery service: reads its log, attaches the paths that are new, and detaches
//! those that it lacks.

use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_nvmf::host::{ControllerState, DiscoveryWatch};
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, subtype};
use nacre_reactor::Clock;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{StartDiscovery, StartDiscoveryParams, find};
use crate::methods::bdev::nvme::{joins, undo_path};
use crate::rpc::{Method, RpcError};
use crate::services::engine::Engine;
use crate::services::nvme::options::Options;
use crate::services::nvme::{self, discovery_key};
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};
use crate::services::remotes::{self, RemotePlan};
use crate::store::Change;

/// Interval at which an idle service is polled for events.
const IDLE: Duration = Duration::from_millis(20);
/// The same while a connection is made, or a log read.
const ACTIVE: Duration = Duration::from_millis(1);
/// Pause before a service that refused this host is asked again.
const AGAIN: Duration = Duration::from_secs(5);

/// A discovery service on its task.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) engine: Rc<Engine>,
    pub(super) discovery: Rc<Discovery>,
    pub(super) params: StartDiscoveryParams,
}

pub(super) fn begin(plan: &RemotePlan) -> Result<DiscoveryWatch, RpcError> {
    let pool = plan.connector.memory(&DiscoveryWatch::MEMORY);
    let pool = pool.map_err(|error| RpcError::io("memory for a connection", &error))?;
    let (options, dial) = (plan.config.options.clone(), plan.connector.dialer());
    let now = Clock::real().now();
    Ok(DiscoveryWatch::new(options, dial, pool, now))
}

/// Follows a service until it is stopped.
pub(super) async fn follow(service: Service, plan: RemotePlan, mut watch: DiscoveryWatch) {
    let (clock, discovery) = (Clock::real(), Rc::clone(&service.discovery));
    let (mut latest, mut applying): (Option<Vec<DiscoveryRecord>>, Option<JoinHandle<()>>) =
        (None, None);
    let mut again = None;
    while !discovery.is_stopping.get() {
        match watch.poll(clock.now()) {
            Some(Ok(records)) => {
                discovery.error.replace(None);
                latest = Some(records);
            }
            Some(Err(error)) => {
                warn!(discovery = discovery.name, %error, "the discovery log was not read");
                discovery.error.replace(Some(error.to_string()));
            }
            None => {}
        }
        if *discovery.state.borrow() != *watch.state() {
            discovery.state.replace(watch.state().clone());
        }
        let is_free = applying.as_ref().is_none_or(JoinHandle::is_finished);
        if is_free && let Some(records) = latest.take() {
            applying = Some(tokio::task::spawn_local(apply(service.clone(), records)));
        }
        // A target that restarts refuses hosts until it is set up.
        if matches!(watch.state(), ControllerState::Failed(_)) {
            let at = *again.get_or_insert_with(|| Instant::now() + AGAIN);
            if Instant::now() >= at {
                again = None;
                match begin(&plan) {
                    Ok(new) => watch = new,
                    Err(error) => warn!(%error, "the discovery service is not connected"),
                }
            }
        }
        let nap = if watch.is_active() { ACTIVE } else { IDLE };
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(nap, changed).await;
    }
    watch.disconnect(clock.now());
    let deadline = remotes::close_deadline();
    let is_over = |state: &ControllerState| {
        matches!(state, ControllerState::Closed | ControllerState::Failed(_))
    };
    while !is_over(watch.state()) && tokio::time::Instant::now() < deadline {
        watch.poll(clock.now());
        tokio::time::sleep(ACTIVE).await;
    }
    if let Some(applying) = applying {
        let _ = applying.await;
    }
    discovery.has_ended.set(true);
    discovery.changed.notify_waiters();
}

/// Attaches the paths of a log that are new, then detaches those that it lacks: a device whose
/// paths are replaced keeps one.
async fn apply(service: Service, records: Vec<DiscoveryRecord>) {
    let Service {
        engine, discovery, ..
    } = &service;
    let _gate = engine.changing().await;
    if discovery.is_stopping.get() {
        return;
    }
    let of = |is: fn(u8) -> bool| -> Vec<SubsystemAddress> {
        let records = records.iter().filter(|record| is(record.subtype));
        records.filter_map(SubsystemAddress::of).collect()
    };
    let places = of(|kind| kind == subtype::NVM);
    discovery.referrals.replace(of(|kind| {
        kind == subtype::REFERRAL || kind == subtype::CURRENT_DISCOVERY
    }));
    discovery.refused.borrow_mut().clear();
    for place in &places {
        let is_known = |listed: &DiscoveredPath| listed.place == *place;
        if discovery.listed.borrow().iter().any(is_known) {
            continue;
        }
        let name = service.name(place).await;
        match service.attach(&name, place).await {
            Ok(()) => {
                info!(
                    discovery = discovery.name,
                    controller = name,
                    address = place.traddr,
                    subsystem = place.subnqn,
                    "discovered"
                );
                let place = place.clone();
                discovery
                    .listed
                    .borrow_mut()
                    .push(DiscoveredPath { name, place });
            }
            Err(error) => {
                warn!(discovery = discovery.name, address = place.traddr, subsystem = place.subnqn, %error, "not attached");
                let mut refused = discovery.refused.borrow_mut();
                refused.push((place.clone(), error.to_string()));
            }
        }
    }
    let listed = discovery.listed.take();
    let (stay, gone): (Vec<_>, Vec<_>) = listed
        .into_iter()
        .partition(|listed| places.contains(&listed.place));
    discovery.listed.replace(stay);
    for listed in gone {
        info!(
            discovery = discovery.name,
            controller = listed.name,
            address = listed.place.traddr,
            "not listed any more"
        );
        detach(engine, &listed).await;
    }
    discovery.is_complete.set(true);
    discovery.changed.notify_waiters();
}

impl Service {
    /// The name of the controller of a subsystem: its former one, that of the same subsystem of
    /// another service, or a new one, which is stored.
    async fn name(&self, place: &SubsystemAddress) -> String {
        let (engine, discovery) = (&self.engine, &self.discovery);
        let known = discovery.names.borrow().get(&place.subnqn).cloned();
        if let Some(name) = known.or_else(|| engine.remotes.discoveries.name_of(&place.subnqn)) {
            return name;
        }
        let mut names = discovery.names.borrow().clone();
        let is_free = |name: &String| {
            !names.values().any(|taken| taken == name)
                && engine.remotes.find(name).is_none()
                && engine.drives.find(name).is_none()
                && engine.journal.find(&nvme::key(name)).is_none()
        };
        let mut all = (0..).map(|at: u32| format!("{}{at}", discovery.name));
        let name = all.find(is_free).expect("numbers do not end");
        names.insert(place.subnqn.clone(), name.clone());
        discovery.names.replace(names.clone());
        let params = StartDiscoveryParams {
            controllers: names,
            ..self.params.clone()
        };
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let key = discovery_key(&discovery.name);
        let change = Change::put(key, StartDiscovery::NAME, record);
        if let Err(error) = engine.journal.commit(change).await {
            warn!(%error, controller = name, "its name may change at the next start");
        }
        name
    }

    /// Starts to connect a path; connecting goes on while its target is away.
    async fn attach(&self, name: &str, place: &SubsystemAddress) -> Result<(), RpcError> {
        let (engine, params) = (&self.engine, self.params.listed(name, place));
        let found = engine.remotes.find(name);
        if let Some(remote) = &found {
            if remote.paths().iter().any(|path| params.is_at(path)) {
                return Ok(());
            }
            joins(&params, remote)?;
        }
        let (remote, _) = nvme::begin(engine, params).await?;
        if let Some(options) = Options::of(engine)
            .multipath_opts
            .filter(|_| found.is_none())
        {
            remote.attachment.set_policy(options.policy()?);
        }
        Ok(())
    }
}

/// Detaches a path, and with the last one the devices, unless another service lists it.
pub(super) async fn detach(engine: &Rc<Engine>, listed: &DiscoveredPath) {
    let services = engine.remotes.discoveries.list();
    if services
        .iter()
        .any(|one| one.listed.borrow().contains(listed))
    {
        return;
    }
    if let Some((remote, path)) = find(engine, listed) {
        undo_path(engine, &listed.name, &remote, &path).await;
    }
}
