//! The task of a discovery service: attaches the paths of its log that are new, and detaches those
//! that the log lacks for a time.

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nacre_nvmf::host::{ControllerState, DiscoveryWatch};
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, subtype};
use nacre_reactor::Clock;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{StartDiscovery, StartDiscoveryParams, find};
use crate::methods::bdev::nvme::{joins, undo_path};
use crate::rpc::error::Errno;
use crate::rpc::{Method, RpcError};
use crate::services::engine::Engine;
use crate::services::nvme::options::Options;
use crate::services::nvme::{self, discovery_key};
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};
use crate::services::remotes::{self, Remote, RemotePath, RemotePlan};
use crate::store::Change;
use crate::values::address::{AddressError, ScopedIp};

/// Interval at which the connection of an idle service is polled.
const IDLE: Duration = Duration::from_millis(20);
/// The same while a connection is made, or a log read.
const ACTIVE: Duration = Duration::from_millis(1);
/// Pause before a service that refused this host is asked again, and before refused paths are
/// attached again.
const AGAIN: Duration = Duration::from_secs(5);
/// How long a log may lack a path before the path is detached: a target that is set up anew lists
/// its paths one by one, and I/O goes on meanwhile.
const GRACE: Duration = Duration::from_secs(5);
/// Most paths of a service.
const MAX_PATHS: usize = 1024;
/// Number of stored names from which those of subsystems that are not listed are forgotten.
const MAX_NAMES: usize = 4 * MAX_PATHS;

/// A discovery service on its task.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) engine: Rc<Engine>,
    pub(super) discovery: Rc<Discovery>,
    pub(super) params: StartDiscoveryParams,
}

/// A discovery log.
struct Log {
    /// Paths to subsystems, each once.
    places: Vec<SubsystemAddress>,
    referrals: Vec<SubsystemAddress>,
}

impl Log {
    fn of(records: &[DiscoveryRecord]) -> Self {
        let of = |is: fn(u8) -> bool| {
            let records = records.iter().filter(move |record| is(record.subtype));
            records.filter_map(SubsystemAddress::of)
        };
        let mut known = HashSet::new();
        let is_referral = |kind| kind == subtype::REFERRAL || kind == subtype::CURRENT_DISCOVERY;
        Self {
            places: of(|kind| kind == subtype::NVM)
                .filter(|place| known.insert(place.clone()))
                .collect(),
            referrals: of(is_referral).take(MAX_PATHS).collect(),
        }
    }
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
    let mut log: Option<Rc<Log>> = None;
    let mut applying: Option<JoinHandle<Option<Instant>>> = None;
    // When the log must be applied, and a failed service asked again.
    let (mut due, mut again): (Option<Instant>, Option<Instant>) = (None, None);
    while !discovery.is_stopping.get() {
        match watch.poll(clock.now()) {
            Some(Ok(records)) => {
                discovery.error.replace(None);
                discovery.log_was_read();
                (log, due) = (Some(Rc::new(Log::of(&records))), Some(Instant::now()));
            }
            Some(Err(error)) => {
                let error = Some(error.to_string());
                if *discovery.error.borrow() != error {
                    let error = error.as_deref().unwrap_or_default();
                    warn!(
                        discovery = discovery.name,
                        error, "cannot read the discovery log; retrying in 5 s"
                    );
                }
                discovery.error.replace(error);
                discovery.is_current.set(false);
            }
            None => {}
        }
        if *watch.state() != ControllerState::Live {
            discovery.is_current.set(false);
        }
        if *discovery.state.borrow() != *watch.state() {
            discovery.state.replace(watch.state().clone());
        }
        if let Some(ended) = applying.take_if(|task| task.is_finished()) {
            let next = ended.await.ok().flatten();
            due = due.into_iter().chain(next).min();
        }
        let is_due = due.is_some_and(|at| Instant::now() >= at);
        if let Some(log) = log.as_ref().filter(|_| is_due && applying.is_none()) {
            due = None;
            let task = apply(service.clone(), Rc::clone(log));
            applying = Some(tokio::task::spawn_local(task));
        }
        // A target that restarts refuses hosts until it is set up.
        if matches!(watch.state(), ControllerState::Failed(_)) {
            let at = *again.get_or_insert_with(|| Instant::now() + AGAIN);
            if Instant::now() >= at {
                again = None;
                match begin(&plan) {
                    Ok(new) => watch = new,
                    Err(error) => warn!(
                        discovery = discovery.name,
                        %error, "the discovery service is not connected"
                    ),
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

/// What a log changes.
#[derive(Debug, Default, PartialEq)]
struct Differences {
    /// Attached paths that stay attached.
    stay: Vec<DiscoveredPath>,
    /// Attached paths that the log lacks for too long.
    gone: Vec<DiscoveredPath>,
    new: Vec<SubsystemAddress>,
    /// Paths above the limit.
    excess: Vec<SubsystemAddress>,
    /// When the next path has been missing for too long.
    due: Option<Instant>,
}

/// Compares attached paths with those of a log. No path is gone while the service is away.
fn compare(
    attached: Vec<DiscoveredPath>,
    places: &[SubsystemAddress],
    is_away: bool,
    now: Instant,
) -> Differences {
    let mut found = Differences::default();
    let known: HashSet<SubsystemAddress> = attached.iter().map(|one| one.place.clone()).collect();
    let listed: HashSet<&SubsystemAddress> = places.iter().collect();
    for mut path in attached {
        let is_missing = !listed.contains(&path.place);
        path.missing_since =
            is_missing.then(|| path.missing_since.filter(|_| !is_away).unwrap_or(now));
        match path.missing_since.map(|since| since + GRACE) {
            Some(end) if end <= now => found.gone.push(path),
            end => {
                found.due = found.due.into_iter().chain(end).min();
                found.stay.push(path);
            }
        }
    }
    let new = places.iter().filter(|place| !known.contains(place));
    found.new = new.cloned().collect();
    let room = MAX_PATHS
        .saturating_sub(found.stay.len())
        .min(found.new.len());
    found.excess = found.new.split_off(room);
    found
}

/// Attaches the paths of a log that are new, then detaches those that it lacks for too long: a
/// device whose paths are replaced keeps one. Returns when the log must be applied again.
async fn apply(service: Service, log: Rc<Log>) -> Option<Instant> {
    let Service {
        engine, discovery, ..
    } = &service;
    let _gate = tokio::select! {
        gate = engine.changing() => gate,
        () = discovery.stopping() => return None,
    };
    if discovery.is_stopping.get() {
        return None;
    }
    discovery.referrals.replace(log.referrals.clone());
    // A path that another call detached is attached again if it is listed.
    let mut attached = discovery.listed.take();
    attached.retain(|one| find(engine, one).is_some());
    let is_away = !discovery.is_current.get();
    let mut found = compare(attached, &log.places, is_away, Instant::now());
    let both = found.stay.iter().chain(&found.gone);
    discovery.listed.replace(both.cloned().collect());

    let names = service.names(&found.new, &log.places).await;
    let mut refused = Vec::new();
    for place in &found.new {
        if discovery.is_stopping.get() {
            return None;
        }
        let name = names[&place.subnqn].clone();
        match service.attach(&name, place).await {
            Ok(()) => {
                info!(
                    discovery = discovery.name,
                    controller = name,
                    address = place.traddr,
                    subsystem = place.subnqn,
                    "discovered"
                );
                discovery.listed.borrow_mut().push(DiscoveredPath {
                    name,
                    place: place.clone(),
                    missing_since: None,
                });
            }
            Err(error) => refused.push((place.clone(), error.to_string())),
        }
    }
    if let Some(place) = found.excess.first() {
        let count = found.excess.len();
        let why = format!("{count} paths are more than the {MAX_PATHS} of a discovery service");
        refused.push((place.clone(), why));
    }
    service.refuse(refused);
    if !discovery.is_current.get() {
        // The service went away meanwhile: its next log decides.
        found.gone.clear();
    }
    let is_gone = |one: &DiscoveredPath| found.gone.iter().any(|gone| gone.is_same(one));
    discovery.listed.borrow_mut().retain(|one| !is_gone(one));
    for listed in &found.gone {
        info!(
            discovery = discovery.name,
            controller = listed.name,
            address = listed.place.traddr,
            "not listed any more"
        );
    }
    detach(engine, only_listed_here(engine, discovery, &found.gone)).await;
    discovery.is_complete.set(true);
    discovery.changed.notify_waiters();
    let is_refused = !discovery.refused.borrow().is_empty();
    let again = is_refused.then(|| Instant::now() + AGAIN);
    found.due.into_iter().chain(again).min()
}

impl Service {
    /// The names of the controllers of subsystems, by NQN: the former one of each, that of the same
    /// subsystem of another service, or a new one. Those that are new here are stored.
    async fn names(
        &self,
        new: &[SubsystemAddress],
        listed: &[SubsystemAddress],
    ) -> BTreeMap<String, String> {
        let (engine, discovery) = (&self.engine, &self.discovery);
        let services = &engine.remotes.discoveries;
        let mut names = discovery.names.borrow().clone();
        if names.len() > MAX_NAMES {
            let listed: HashSet<&String> = listed.iter().map(|place| &place.subnqn).collect();
            names.retain(|subnqn, _| listed.contains(subnqn));
        }
        let taken = services.names();
        let is_free = |name: &String| {
            !taken.contains(name)
                && engine.remotes.find(name).is_none()
                && engine.drives.find(name).is_none()
                && engine.journal.find(&nvme::key(name)).is_none()
        };
        let mut free = (0..)
            .map(|at: u32| format!("{}{at}", discovery.name))
            .filter(is_free);
        for place in new {
            if !names.contains_key(&place.subnqn) {
                let borrowed = services.name_of(&place.subnqn);
                let name = borrowed.unwrap_or_else(|| free.next().expect("numbers do not end"));
                names.insert(place.subnqn.clone(), name);
            }
        }
        if *discovery.names.borrow() == names {
            return names;
        }
        discovery.names.replace(names.clone());
        let params = StartDiscoveryParams {
            controllers: names.clone(),
            ..self.params.clone()
        };
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let key = discovery_key(&discovery.name);
        let change = Change::put(key, StartDiscovery::NAME, record);
        if let Err(error) = engine.journal.commit(change).await {
            let discovery = &discovery.name;
            warn!(%error, discovery, "names of controllers may change at the next start");
        }
        names
    }

    /// Starts to connect a path; connecting goes on while its target is away.
    async fn attach(&self, name: &str, place: &SubsystemAddress) -> Result<(), RpcError> {
        let (engine, params) = (&self.engine, self.params.listed(name, place));
        // A log decides neither which names this machine looks up, nor how long that takes.
        if let Err(AddressError::Name { .. }) = place.traddr.parse::<ScopedIp>() {
            let cause = format!("\"{}\" is not an IP address", place.traddr);
            return Err(RpcError::errno(Errno::EINVAL, cause).field("traddr"));
        }
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

    /// Shows refused paths, and reports those that were not refused for the same reason before.
    fn refuse(&self, refused: Vec<(SubsystemAddress, String)>) {
        let discovery = &self.discovery;
        let before: HashSet<_> = discovery.refused.take().into_iter().collect();
        for one in refused.iter().filter(|one| !before.contains(one)) {
            let (place, why) = one;
            warn!(
                discovery = discovery.name,
                address = place.traddr,
                subsystem = place.subnqn,
                why,
                "not attached; it is tried again"
            );
        }
        discovery.refused.replace(refused);
    }
}

/// An attached path, with the name of its controller.
pub(super) type Ending = (String, Rc<Remote>, Rc<RemotePath>);

/// The attached paths of a service that no other service lists.
pub(super) fn only_listed_here(
    engine: &Engine,
    discovery: &Discovery,
    paths: &[DiscoveredPath],
) -> Vec<Ending> {
    let services = engine.remotes.discoveries.list();
    let others: Vec<DiscoveredPath> = services
        .iter()
        .filter(|one| one.name != discovery.name)
        .flat_map(|one| one.listed.borrow().clone())
        .collect();
    let is_shared = |path: &&DiscoveredPath| others.iter().any(|other| other.is_same(path));
    let ours = paths.iter().filter(|path| !is_shared(path));
    let ending = ours.filter_map(|path| {
        let (remote, found) = find(engine, path)?;
        Some((path.name.clone(), remote, found))
    });
    ending.collect()
}

/// Detaches paths, and with the last one of a controller the devices.
pub(super) async fn detach(engine: &Rc<Engine>, ending: Vec<Ending>) {
    let undone = ending
        .iter()
        .map(|(name, remote, path)| undo_path(engine, name, remote, path));
    join_all(undone).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::bdev::nvme::tests::start;

    fn place(at: usize) -> SubsystemAddress {
        SubsystemAddress {
            trtype: "TCP",
            adrfam: "IPv4",
            traddr: "127.0.0.1".into(),
            trsvcid: "1".into(),
            subnqn: format!("nqn.2026-01.org.example:{at}"),
        }
    }

    fn path(at: usize) -> DiscoveredPath {
        DiscoveredPath {
            name: format!("d{at}"),
            place: place(at),
            missing_since: None,
        }
    }

    /// Goal: a path is gone after the grace, unless it returns or the service is away; attached
    /// paths have priority within the limit.
    #[test]
    fn logs_are_compared() {
        let start = Instant::now();
        let after = |part: f64| start + GRACE.mul_f64(part);
        let attached = || vec![path(0), path(1)];
        let first = compare(attached(), &[place(1), place(2)], false, start);
        assert_eq!((first.new, first.gone), (vec![place(2)], vec![]));
        assert_eq!(first.due, Some(after(1.0)));
        let missing = first.stay;
        assert_eq!(missing[0].missing_since, Some(start));
        let back = compare(missing.clone(), &[place(0), place(1)], false, after(0.9));
        assert_eq!((back.stay, back.due), (attached(), None));
        let away = compare(missing.clone(), &[place(1)], true, after(9.0));
        assert_eq!((away.gone.len(), away.due), (0, Some(after(10.0))));
        let gone = compare(missing.clone(), &[place(1)], false, after(1.0));
        assert_eq!((gone.gone, gone.due), (vec![missing[0].clone()], None));
        let many: Vec<SubsystemAddress> = (2..2 * MAX_PATHS).map(place).collect();
        let full = compare(attached(), &many, false, start);
        assert_eq!(full.stay.len() + full.new.len(), MAX_PATHS);
        assert_eq!(full.new.len() + full.excess.len(), many.len());
    }

    /// Goal: the grace begins again with the first log of a connection, and only with that one.
    #[test]
    fn a_connection_begins_the_grace_again() {
        let discovery = Discovery::new("d".into(), place(9), BTreeMap::new());
        let missing = || DiscoveredPath {
            missing_since: Some(Instant::now()),
            ..path(0)
        };
        discovery.listed.borrow_mut().push(missing());
        discovery.log_was_read();
        assert_eq!(*discovery.listed.borrow(), [path(0)]);
        let since = missing();
        discovery.listed.replace(vec![since.clone()]);
        discovery.log_was_read();
        assert_eq!(*discovery.listed.borrow(), std::slice::from_ref(&since));
        discovery.is_current.set(false);
        discovery.log_was_read();
        assert_eq!(*discovery.listed.borrow(), [path(0)]);
    }

    /// Goal: each of many subsystems gets a name of its own in little time, by one change of the
    /// state; the address of a log is never looked up as a name.
    #[test]
    fn names_and_addresses() {
        let folder = tempfile::tempdir().unwrap();
        let daemon = start(folder.path());
        let place_of_service = place(0);
        let discovery = Discovery::new("d".into(), place_of_service, BTreeMap::new());
        let service = Service {
            engine: Rc::clone(&daemon.engine),
            discovery: Rc::new(discovery),
            params: StartDiscoveryParams::default(),
        };
        let places: Vec<SubsystemAddress> = (0..MAX_PATHS).map(place).collect();
        let begun = Instant::now();
        let names = daemon.run(service.names(&places, &places));
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        let names: HashSet<&String> = names.values().collect();
        assert_eq!(names.len(), MAX_PATHS);

        let mut named = place(0);
        named.traddr = "localhost".into();
        let refused = daemon.run(service.attach("d0", &named)).unwrap_err();
        assert_eq!(refused.code, -22, "{refused}");
        assert!(daemon.engine.remotes.find("d0").is_none());
    }
}
