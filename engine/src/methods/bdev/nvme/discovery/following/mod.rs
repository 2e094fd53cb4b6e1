//! The task of a discovery service: attaches the new paths of its discovery log, and detaches paths
//! that the log has not listed for [`GRACE`].

use std::collections::{BTreeMap, HashSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nacre_nvmf::host::{ControllerState, DiscoveryLog, DiscoveryWatch, MAX_DISCOVERY_RECORDS};
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, subtype};
use nacre_reactor::{Clock, Idle};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::RwLockWriteGuard;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{StartDiscovery, StartDiscoveryParams, devices_of, find};
use crate::methods::bdev;
use crate::methods::bdev::nvme::{joins, undo_path};
use crate::rpc::error::Errno;
use crate::rpc::{Method, RpcError};
use crate::services::Engine;
use crate::services::nvme::options::Options;
use crate::services::nvme::{self, discovery_key};
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};
use crate::services::remotes::{self, Remote, RemotePath, RemotePlan};
use crate::store::Change;
use crate::values::address::{AddressError, ScopedIp};

/// Polling interval while a connection is being made, or a log is being read.
const ACTIVE: Duration = Duration::from_millis(1);
/// Polling interval of an idle connection whose file descriptor cannot be watched.
const UNWATCHED: Duration = Duration::from_millis(20);
/// Pause before connecting again to a service that refused this host, and before the first retry of
/// refused paths.
const AGAIN: Duration = Duration::from_secs(5);
/// Most doublings of [`AGAIN`] while paths are refused: the longest pause is 80 s.
const MAX_DOUBLINGS: u32 = 4;
/// Time for which a log may lack a path before the path is detached. A target that is set up again
/// lists its paths one by one.
const GRACE: Duration = Duration::from_secs(5);
/// Number of paths after which the lock of changes is released for other calls.
const BATCH: usize = 16;
/// Most paths of a service.
const MAX_PATHS: usize = MAX_DISCOVERY_RECORDS;
/// Number of stored names above which the names of unlisted subsystems are dropped.
const MAX_NAMES: usize = 4 * MAX_PATHS;

/// The state of a service's task.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) engine: Rc<Engine>,
    pub(super) discovery: Rc<Discovery>,
    pub(super) params: StartDiscoveryParams,
}

/// The contents of a discovery log.
struct DiscoveryLogPage {
    /// Paths to subsystems, each once.
    places: Vec<SubsystemAddress>,
    referrals: Vec<SubsystemAddress>,
}

impl DiscoveryLogPage {
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
    let mut log: Option<Rc<DiscoveryLogPage>> = None;
    let mut applying: Option<JoinHandle<Option<Instant>>> = None;
    // When the log must be applied, and a failed service asked again.
    let (mut due, mut again): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        // A change after this line ends the sleep.
        let changed = discovery.changed.notified();
        if discovery.is_stopping.get() {
            break;
        }
        match watch.poll(clock.now()) {
            Some(Ok(read)) => {
                discovery.error.replace(None);
                discovery.log_was_read();
                service.report_left_out(&read);
                (log, due) = (
                    Some(Rc::new(DiscoveryLogPage::of(&read.records))),
                    Some(Instant::now()),
                );
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
                continue;
            }
        }
        let due_at = due.filter(|_| applying.is_none());
        tokio::select! {
            () = has_work(&mut watch, &clock) => {}
            () = changed => {}
            () = until(due_at) => {}
            () = until(again) => {}
            next = ended(&mut applying) => {
                applying = None;
                due = due.into_iter().chain(next).min();
            }
        }
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

/// Resolves when the watch has to be polled.
async fn has_work(watch: &mut DiscoveryWatch, clock: &Clock) {
    let now = clock.now();
    let pause = match watch.arm(now) {
        Idle::Busy => return tokio::time::sleep(ACTIVE).await,
        Idle::Until(at) => Some(at.since(now)),
        Idle::Quiet => None,
    };
    let timer = async {
        match pause {
            Some(pause) => tokio::time::sleep(pause.max(ACTIVE)).await,
            None => std::future::pending().await,
        }
    };
    // A descriptor of its own: the connection may end during the sleep.
    let fd = watch.wake_fd().map(|fd| fd.try_clone_to_owned());
    let Ok(socket) = fd.map(|fd| fd.and_then(watched)).transpose() else {
        return tokio::time::sleep(UNWATCHED).await;
    };
    let readable = async {
        match &socket {
            Some(socket) => drop(socket.readable().await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = timer => {}
        () = readable => {}
    }
}

#[expect(
    deprecated,
    reason = "an OwnedFd stays open, which the replacement, an unsafe function, cannot check"
)]
fn watched(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

/// Resolves at `at`; never for `None`.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Resolves with the time of the next attempt when the log was applied.
async fn ended(applying: &mut Option<JoinHandle<Option<Instant>>>) -> Option<Instant> {
    match applying {
        Some(task) => task.await.ok().flatten(),
        None => std::future::pending().await,
    }
}

/// The differences between the attached paths and a log.
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

/// Compares the attached paths with a log's. While the service is away, no path counts as gone.
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

/// Attaches the new paths of a log, then detaches paths that it has lacked for too long. In this
/// order, a bdev whose paths are replaced keeps one. Returns when to apply the log again.
async fn apply(service: Service, log: Rc<DiscoveryLogPage>) -> Option<Instant> {
    let Service {
        engine, discovery, ..
    } = &service;
    let mut gate = service.gate().await?;
    discovery.referrals.replace(log.referrals.clone());
    let (attached, detached): (Vec<_>, Vec<_>) = discovery
        .listed
        .take()
        .into_iter()
        .partition(|one| find(engine, one).is_some());
    let is_away = !discovery.is_current.get();
    let places: Vec<SubsystemAddress> = {
        let mut by_hand = discovery.detached_by_hand.borrow_mut();
        by_hand.update(&log.places, detached.into_iter().map(|one| one.place));
        let wanted = log.places.iter().filter(|place| !by_hand.has(place));
        wanted.cloned().collect()
    };
    let mut found = compare(attached, &places, is_away, Instant::now());
    let both = found.stay.iter().chain(&found.gone);
    discovery.listed.replace(both.cloned().collect());

    let names = service.names(&found.new, &log.places).await;
    let mut refused = Vec::new();
    for batch in found.new.chunks(BATCH) {
        for place in batch {
            if discovery.is_stopping.get() {
                return None;
            }
            let name = names[&place.subnqn].clone();
            match service.attach(&name, place).await {
                Ok(()) => service.attached(name, place.clone()),
                Err(error) => refused.push((place.clone(), error.to_string())),
            }
        }
        // Calls that wait for the lock get it before the next batch.
        drop(gate);
        gate = service.gate().await?;
    }
    if let Some(place) = found.excess.first() {
        let count = found.excess.len();
        let why = format!("{count} paths are more than the {MAX_PATHS} of a discovery service");
        refused.push((place.clone(), why));
    }
    if !discovery.is_current.get() {
        // The service went away meanwhile: its next log decides.
        found.gone.clear();
    }
    refused.extend(service.detach_missing(found.gone).await);
    drop(gate);
    service.refuse(refused);
    discovery.is_complete.set(true);
    discovery.changed.notify_waiters();
    found.due.into_iter().chain(service.next_attempt()).min()
}

impl Service {
    /// Waits for the lock of changes; `None` if the service is being stopped.
    async fn gate(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        let gate = tokio::select! {
            gate = self.engine.changing() => gate,
            () = self.discovery.stopping() => return None,
        };
        (!self.discovery.is_stopping.get()).then_some(gate)
    }

    /// Reports records that were left out, once for each different number.
    fn report_left_out(&self, log: &DiscoveryLog) {
        let discovery = &self.discovery;
        discovery.attempts.set(0);
        let malformed = (log.malformed, log.first_error.clone());
        let before = discovery.malformed.replace(malformed);
        if let Some(error) = log
            .first_error
            .as_ref()
            .filter(|_| before.0 != log.malformed)
        {
            warn!(
                discovery = discovery.name,
                records = log.malformed,
                %error,
                "the discovery log has malformed records, which are skipped"
            );
        }
        let before = discovery.unread.replace(log.unread);
        if log.unread > 0 && log.unread != before {
            warn!(
                discovery = discovery.name,
                records = log.unread,
                limit = MAX_DISCOVERY_RECORDS,
                "the discovery log is too long; the records after the limit are not read"
            );
        }
    }

    fn attached(&self, name: String, place: SubsystemAddress) {
        let discovery = &self.discovery;
        info!(
            discovery = discovery.name,
            controller = name,
            address = place.traddr,
            subsystem = place.subnqn,
            "discovered"
        );
        discovery.listed.borrow_mut().push(DiscoveredPath {
            name,
            place,
            missing_since: None,
        });
    }

    /// Detaches paths, except for those with the last copy of a volume. Returns the kept paths with
    /// the reasons.
    async fn detach_missing(&self, gone: Vec<DiscoveredPath>) -> Vec<(SubsystemAddress, String)> {
        let (engine, discovery) = (&self.engine, &self.discovery);
        let Ok(plane) = engine.plane() else {
            return Vec::new();
        };
        let mut by_name = BTreeMap::<String, Vec<Ending>>::new();
        for one in only_listed_here(engine, discovery, &gone) {
            by_name.entry(one.0.clone()).or_default().push(one);
        }
        let (mut going, mut ending) = (Vec::new(), Vec::new());
        let mut kept = BTreeMap::new();
        for (name, paths) in by_name {
            let mut more = going.clone();
            for device in devices_of(&paths) {
                more.extend(bdev::with_dependents(&plane, &device));
            }
            match bdev::refuse_last_copies(engine, &more) {
                Ok(()) => {
                    going = more;
                    ending.extend(paths);
                }
                Err(error) => {
                    let why = error.data.map_or(error.message, |facts| facts.cause);
                    kept.insert(name, why);
                }
            }
        }
        let (stay, gone): (Vec<_>, Vec<_>) = gone
            .into_iter()
            .partition(|one| kept.contains_key(&one.name));
        let is_gone = |one: &DiscoveredPath| gone.iter().any(|gone| gone.is_same(one));
        discovery.listed.borrow_mut().retain(|one| !is_gone(one));
        for listed in &gone {
            info!(
                discovery = discovery.name,
                controller = listed.name,
                address = listed.place.traddr,
                "not listed any more"
            );
        }
        detach(engine, ending).await;
        let why = |one: DiscoveredPath| {
            let why = &kept[&one.name];
            (one.place, format!("not listed, but stays attached: {why}"))
        };
        stay.into_iter().map(why).collect()
    }

    /// The time at which to apply an unchanged log again; `None`: not needed.
    fn next_attempt(&self) -> Option<Instant> {
        let discovery = &self.discovery;
        if discovery.refused.borrow().is_empty() && !discovery.has_unstored_names.get() {
            discovery.attempts.set(0);
            return None;
        }
        let attempts = discovery.attempts.get();
        discovery.attempts.set(attempts.saturating_add(1));
        Some(Instant::now() + AGAIN * (1 << attempts.min(MAX_DOUBLINGS)))
    }

    /// The names of the controllers of subsystems, by NQN: a subsystem's former name, else that of
    /// another service, else a new one. Stores the names if they have changed.
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
        if *discovery.names.borrow() == names && !discovery.has_unstored_names.get() {
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
        let stored = engine.journal.commit(change).await;
        let had_failed = discovery.has_unstored_names.replace(stored.is_err());
        if let Some(error) = stored.err().filter(|_| !had_failed) {
            let discovery = &discovery.name;
            warn!(%error, discovery, "cannot store the names of controllers; retrying");
        }
        names
    }

    /// Begins to connect a path. Connecting is retried while the target is away.
    async fn attach(&self, name: &str, place: &SubsystemAddress) -> Result<(), RpcError> {
        let (engine, params) = (&self.engine, self.params.listed(name, place));
        // A log decides neither which names this machine looks up, nor how long that takes.
        if let Err(AddressError::Name { .. }) = place.traddr.parse::<ScopedIp>() {
            let cause = format!("\"{}\" is not an IP address", place.traddr);
            return Err(RpcError::errno(Errno::EINVAL, cause).field("traddr"));
        }
        let found = engine.remotes.find(name);
        if let Some(remote) = &found {
            joins(&params, remote)?;
            if remote.paths().iter().any(|path| params.is_at(path)) {
                return Ok(());
            }
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

    /// Replaces the list of refused paths, and logs those that were not refused for the same reason
    /// before.
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
                "cannot attach or detach the path; retrying"
            );
        }
        discovery.refused.replace(refused);
    }
}

/// An attached path, with the name of its controller.
pub(super) type Ending = (String, Rc<Remote>, Rc<RemotePath>);

/// The attached paths of a service that no other service lists, and that no call attached.
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
        let records = nvme::records_of(engine, &path.name, std::slice::from_ref(&found));
        records
            .is_empty()
            .then(|| (path.name.clone(), remote, found))
    });
    ending.collect()
}

/// Detaches paths, and with the last path of a controller its bdevs.
pub(super) async fn detach(engine: &Rc<Engine>, ending: Vec<Ending>) {
    let undone = ending
        .iter()
        .map(|(name, remote, path)| undo_path(engine, name, remote, path));
    join_all(undone).await;
}

#[cfg(test)]
mod tests;
