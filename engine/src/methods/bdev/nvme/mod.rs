//! `bdev_nvme_*`: namespaces of remote targets and local drives as devices.
//!
//! An attached controller is one journal record, `nvme/ctrlr/<name>`, with the parameters of the
//! call. Each further path to it is a record of its own, `nvme/path/<name>/…`. Options of all
//! controllers are another record, `nvme/options`. The bdevs of namespaces have no records.

pub mod commands;
mod discovery;
mod drive;
pub mod health;
mod hotplug;
mod injection;
pub mod list;
mod options;
pub mod paths;
mod statistics;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_bdev::registry::DeleteTicket;
use nacre_nvmf::address::adrfam;
use nacre_nvmf::host::HostError;
use nacre_nvmf_remote::{State, Status};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::journal::{EntryState, JournalEntry, is_declaring};
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::services::lifecycle::Phase;
use crate::services::nvme::options::Options;
use crate::services::nvme::{self, ATTACH, AttachParams, Multipath, POLICIES, key};
use crate::services::remotes::{self, Remote, RemotePath};
use crate::store::{Change, Edit};
use crate::values::address::{canonical_host, canonical_port};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AttachController>()
        .add::<DetachController>()
        .add::<Reset>()
        .add::<SetControllerKeys>();
    list::register(registry);
    options::register(registry);
    health::register(registry);
    commands::register(registry);
    hotplug::register(registry);
    injection::register(registry);
    paths::register(registry);
    statistics::register(registry);
    discovery::register(registry);
}

/// Longest time for which the first connection holds the lock of changes. After a fast connection,
/// the bdevs exist for the next call; a slow one must not block other changes.
const LOCKED_WAIT: Duration = Duration::from_secs(1);
/// Time limit of the first connection in a client's call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit of the first connection at the start of the daemon. Slower controllers connect later.
const CONNECT_TIMEOUT_AT_START: Duration = Duration::from_millis(1500);

pub struct AttachController;

impl Method<Engine> for AttachController {
    const NAME: &'static str = ATTACH;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Connects to a subsystem of another target; its namespaces become devices, whose names it answers.";
    const CLASS: Class = Class::Admin;
    /// Locks changes itself, and releases the lock while it waits for a target.
    const ORDER: Order = Order::Free;
    type Params = AttachParams;
    type Reply = Vec<String>;

    async fn apply(params: AttachParams, engine: Rc<Engine>) -> Result<Vec<String>, RpcError> {
        let mut gate = engine.changing().await;
        engine.refuse_overtaken()?;
        let name = params.name.clone();
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let record_key = if params.is_drive() {
            key(&name)
        } else {
            nvme::record_key(&engine, &params)
        };
        // A stored controller that is not live is restored, and a declared one is attached, also
        // while its target is away: the connection is retried later.
        let again = engine.journal.find(&record_key).is_some() || is_declaring();
        let change = || Change::put(record_key.clone(), ATTACH, record);
        if engine.drives.find(&name).is_some() || engine.drives.is_coming(&name) {
            return Err(is_attached(&name));
        }
        if params.is_drive() {
            if engine.remotes.find(&name).is_some() {
                return Err(is_attached(&name));
            }
            return drive::attach(&params, &engine, gate, again).await;
        }
        let found = engine.remotes.find(&name);
        let known = found.as_ref().and_then(|remote| {
            let mut paths = remote.paths().into_iter();
            paths.find(|path| params.is_at(path))
        });
        let (multipath, mut options) = (params.multipath, params.multipath_opts.clone());
        if options.is_none() && record_key == key(&name) {
            options = Options::of(&engine).multipath_opts;
        }
        let (remote, path) = match (found, known) {
            (Some(remote), Some(path)) if again && is_begun(&engine, &record_key) => (remote, path),
            (Some(_), Some(_)) => return Err(is_attached(&name).renumbered(Errno::EALREADY)),
            (Some(remote), None) => {
                joins(&params, &remote)?;
                nvme::begin(&engine, params).await?
            }
            (None, _) => nvme::begin(&engine, params).await?,
        };
        if let Some(options) = options {
            remote.attachment.set_policy(options.policy()?);
        }
        if multipath == Some(Multipath::Failover) {
            remote.attachment.set_stays(true);
        }
        let patience = if again {
            CONNECT_TIMEOUT_AT_START
        } else {
            CONNECT_TIMEOUT
        };
        let now = Instant::now();
        let until = path.begun.max(now - patience) + patience;
        let mut first = first_connection(&engine, &path, until.min(now + LOCKED_WAIT)).await;
        if matches!(first, Ok(false)) {
            drop(gate);
            first = first_connection(&engine, &path, until).await;
            gate = engine.changing().await;
            let here = engine.remotes.find(&name);
            if !here.is_some_and(|here| here.paths().iter().any(|one| Rc::ptr_eq(one, &path))) {
                let cause = format!("\"{name}\" was detached before it was connected");
                return Err(RpcError::errno(Errno::ENODEV, cause).field("name"));
            }
            if again && is_live(&engine, &record_key) {
                // Another call attached the same controller meanwhile.
                return devices(&engine, &name, &remote, &path, again);
            }
        }
        let outcome = match first {
            Ok(true) => devices(&engine, &name, &remote, &path, again),
            // Retries continue; stacked devices appear with their bases.
            Ok(false) | Err(_) if again => Ok(Vec::new()),
            Err(refused) => Err(refused),
            Ok(false) => {
                let causes = path.path.status().causes;
                let why = format!("no connection within {patience:?}; {causes}");
                let why = why.trim_end_matches("; ").to_owned();
                Err(not_connected(&path, Errno::ETIMEDOUT, why))
            }
        };
        let outcome = match outcome {
            Ok(names) => engine.journal.commit(change()).await.map(|()| names),
            refused => refused,
        };
        if outcome.is_err() && !again {
            undo_path(&engine, &name, &remote, &path).await;
        }
        drop(gate);
        outcome
    }
}

/// Refuses a further path that SPDK refuses too: to another subsystem, as another host, or if
/// multipath is disabled.
fn joins(params: &AttachParams, remote: &Remote) -> Result<(), RpcError> {
    let (name, first) = (&params.name, remote.path());
    if params.multipath == Some(Multipath::Disable) {
        return Err(is_attached(name).renumbered(Errno::EALREADY));
    }
    let subnqn = first.wanted.subnqn.to_string();
    if params.subnqn.as_deref() != Some(subnqn.as_str()) {
        let cause = format!("\"{name}\" is attached with another subsystem, {subnqn}");
        return Err(RpcError::errno(Errno::EINVAL, cause).field("subnqn"));
    }
    let hostnqn = first.path.config().options.hostnqn.to_string();
    let given = params.hostnqn.as_deref().filter(|nqn| !nqn.is_empty());
    if given.is_some_and(|given| given != hostnqn) {
        let cause = format!("\"{name}\" is attached as another host, {hostnqn}");
        return Err(RpcError::errno(Errno::EINVAL, cause).field("hostnqn"));
    }
    Ok(())
}

fn is_attached(name: &str) -> RpcError {
    let cause = format!("a controller is attached as \"{name}\" already");
    RpcError::errno(Errno::EEXIST, cause)
        .field("name")
        .remedy("detach it first, or choose another name")
}

/// True if the start of the daemon began to connect the controller, and its record or declaration
/// was not executed yet. Clients cannot attach controllers before that.
fn is_begun(engine: &Engine, key: &str) -> bool {
    match engine.journal.find(key) {
        Some(entry) => entry.state != EntryState::Live,
        None => engine.lifecycle.phase() == Phase::Starting,
    }
}

fn is_live(engine: &Engine, key: &str) -> bool {
    let entry = engine.journal.find(key);
    entry.is_some_and(|entry| entry.state == EntryState::Live)
}

fn not_connected(path: &RemotePath, errno: Errno, why: String) -> RpcError {
    let wanted = &path.wanted;
    let cause = format!("{} at {}: {why}", wanted.subnqn, wanted.address);
    RpcError::errno(errno, cause).field("traddr").remedy(
        "see that a target listens there, has the subsystem and lets this host in: nacre discover",
    )
}

/// Waits for the first connection. Returns false on timeout, and an error if no connection is
/// possible.
async fn first_connection(
    engine: &Rc<Engine>,
    path: &RemotePath,
    until: Instant,
) -> Result<bool, RpcError> {
    loop {
        let status = path.path.status();
        let failed = |why: String| Err(not_connected(path, Errno::EIO, why));
        match &status.state {
            State::Live => return Ok(true),
            State::Failed(error) => return failed(error.to_string()),
            State::Closed => return failed("it was detached".to_owned()),
            State::Waiting {
                refused: true,
                error,
            } => return failed(error.to_string()),
            State::Waiting { .. } if status.exhausted => return failed(status.causes),
            State::Waiting { .. } | State::Connecting | State::Disabled => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let _ = tokio::time::timeout(
            left.min(Duration::from_millis(50)),
            engine.remotes.handled.notified(),
        )
        .await;
    }
}

/// Creates the bdevs of the controller. Detaches the path and returns an error if an error left
/// none, or if the path shows other namespaces than the earlier paths.
fn devices(
    engine: &Rc<Engine>,
    name: &str,
    remote: &Remote,
    path: &RemotePath,
    again: bool,
) -> Result<Vec<String>, RpcError> {
    let plane = engine.plane()?;
    remote.sync(engine, &plane, name);
    if !again && remote.paths().len() > 1 {
        check_path(remote, path)?;
    }
    let devices = remote.attachment.devices();
    let names: Vec<String> = devices.iter().map(|d| d.name().to_owned()).collect();
    let refused = remote.attachment.refusals();
    match refused.first() {
        Some((device, why)) if names.is_empty() && !again => {
            let cause = format!("{device}: {why}");
            Err(RpcError::errno(Errno::EEXIST, cause).field("name"))
        }
        _ => Ok(names),
    }
}

/// Waits until the bdevs of a controller are gone, with a time limit: I/O may never end, and other
/// changes wait.
async fn wait_until_gone(engine: &Engine, name: &str, tickets: Vec<DeleteTicket>) {
    let patience = super::patience(engine);
    if tokio::time::timeout(patience, join_all(tickets))
        .await
        .is_err()
    {
        warn!(name, "I/O is still under way on its devices");
    }
}

/// Refuses a further path that does not lead to the same namespaces.
fn check_path(remote: &Remote, path: &RemotePath) -> Result<(), RpcError> {
    if let Some((device, why)) = remote.attachment.refusals_of(&path.path).into_iter().next() {
        let cause = format!("it shows another namespace than {device}: {why}");
        return Err(RpcError::errno(Errno::EINVAL, cause).field("traddr"));
    }
    let cntlid = path.path.status().info.cntlid;
    let other = remote.paths().into_iter().find(|other| {
        other.path != path.path
            && other.path.status().state == State::Live
            && other.path.status().info.cntlid == cntlid
    });
    match other {
        Some(other) => {
            let there = other.wanted.address;
            let cause = format!("it leads to controller {cntlid}, as the path by {there} does");
            Err(RpcError::errno(Errno::EINVAL, cause)
                .field("traddr")
                .remedy("controllers of one subsystem have different ids: see min_cntlid"))
        }
        None => Ok(()),
    }
}

/// Detaches a path, and with the last one the controller.
async fn undo_path(engine: &Rc<Engine>, name: &str, remote: &Remote, path: &Rc<RemotePath>) {
    if !remote.remove(path) {
        return undo(engine, name).await;
    }
    // I/O in flight completes on it.
    let deadline = remotes::close_deadline();
    while path.path.is_in_use() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    path.path.close();
    remotes::closed(&path.path, remotes::close_deadline()).await;
}

async fn undo(engine: &Rc<Engine>, name: &str) {
    let Some(remote) = engine.remotes.take(name) else {
        return;
    };
    if let Ok(plane) = engine.plane() {
        let tickets = remote.attachment.remove_devices(&plane.bdevs);
        wait_until_gone(engine, name, tickets).await;
    }
    remote.attachment.close();
    for path in remote.paths() {
        remotes::closed(&path.path, remotes::close_deadline()).await;
    }
}

pub struct DetachController;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachControllerParams {
    /// Name of the controller, as it was attached.
    pub name: String,
    /// These six select paths. The controller stays while it has others.
    pub trtype: Option<String>,
    /// Address of the target, or a drive's PCI address.
    pub traddr: Option<String>,
    /// Address family: `IPv4` or `IPv6`.
    pub adrfam: Option<String>,
    /// Port of the target.
    pub trsvcid: Option<String>,
    /// NQN of the subsystem.
    pub subnqn: Option<String>,
    /// Source address of the path.
    pub hostaddr: Option<String>,
    /// Must be empty: a source port cannot be chosen.
    pub hostsvcid: Option<String>,
}

impl DetachControllerParams {
    /// The paths that match the optional parameters.
    fn paths(&self, remote: &Remote) -> Result<Vec<Rc<RemotePath>>, RpcError> {
        let all = remote.paths();
        let fits = |path: &&Rc<RemotePath>| self.fits(path).is_ok();
        let fitting: Vec<_> = all.iter().filter(fits).cloned().collect();
        match &fitting[..] {
            [] => self.fits(&all[0]).map(|()| fitting),
            _ => Ok(fitting),
        }
    }

    /// Checks that the optional parameters match the path.
    fn fits(&self, path: &RemotePath) -> Result<(), RpcError> {
        let (wanted, status) = (&path.wanted, path.path.status());
        let traddr = self.traddr.as_deref().map(canonical_host);
        let trsvcid = self.trsvcid.as_deref().map(canonical_port);
        let family = adrfam(wanted.address.ip());
        let hostaddr = wanted.hostaddr.map(|ip| ip.to_string()).unwrap_or_default();
        let is = [
            ("trtype", &self.trtype, status.transport.to_string()),
            ("traddr", &traddr, wanted.host.clone()),
            ("adrfam", &self.adrfam, family.to_owned()),
            ("trsvcid", &trsvcid, wanted.address.port().to_string()),
            ("subnqn", &self.subnqn, wanted.subnqn.to_string()),
            ("hostaddr", &self.hostaddr, hostaddr),
            ("hostsvcid", &self.hostsvcid, String::new()),
        ];
        for (field, asked, is) in is {
            if asked
                .as_ref()
                .is_some_and(|asked| !asked.eq_ignore_ascii_case(&is))
            {
                let cause = format!("\"{}\" is attached with \"{is}\" for {field}", self.name);
                return Err(RpcError::errno(Errno::ENODEV, cause).field(field));
            }
        }
        Ok(())
    }
}

impl Method<Engine> for DetachController {
    const NAME: &'static str = "bdev_nvme_detach_controller";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Disconnects a controller, and deletes its devices and the devices stacked on them.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = DetachControllerParams;
    type Reply = bool;

    async fn apply(params: DetachControllerParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let (name, plane) = (&params.name, engine.plane()?);
        let devices: Vec<String> = match (engine.remotes.find(name), engine.drives.find(name)) {
            (Some(remote), _) => {
                let paths = params.paths(&remote)?;
                if paths.len() < remote.paths().len() {
                    return detach_paths(&engine, name, &remote, paths).await;
                }
                let devices = remote.attachment.devices();
                devices.iter().map(|d| d.name().to_owned()).collect()
            }
            (None, Some(drive)) => {
                let (trtype, traddr) = (params.trtype.as_deref(), params.traddr.as_deref());
                drive::fits(name, &drive, trtype, traddr)?;
                drive
                    .devices()
                    .iter()
                    .map(|d| d.name().to_owned())
                    .collect()
            }
            (None, None)
                if engine.drives.is_coming(name) && engine.journal.find(&key(name)).is_none() =>
            {
                let cause = format!("\"{name}\" is being attached");
                return Err(RpcError::errno(Errno::EBUSY, cause)
                    .field("name")
                    .remedy("ask again when bdev_nvme_attach_controller has answered"));
            }
            // A controller that could not be restored can be detached.
            (None, None) => {
                return match engine.journal.find(&key(name)) {
                    Some(_) => {
                        let edits = vec![Edit::Remove(key(name))];
                        engine.journal.commit(Change(edits)).await.map(|()| true)
                    }
                    None => Err(no_controller(name)),
                };
            }
        };
        let mut going = Vec::new();
        for device in &devices {
            going.extend(super::with_dependents(&plane, device));
        }
        super::refuse_last_copies(&engine, &going)?;
        let mut edits = vec![
            Edit::Remove(key(name)),
            Edit::RemoveAll(format!("{}{name}/", nvme::PATHS)),
        ];
        let policies = devices.iter().map(|d| format!("{POLICIES}{d}"));
        edits.extend(policies.map(Edit::Remove));
        edits.extend(super::forget(&engine, &going));
        // Remove the record first: after a crash in between, the controller must not return.
        engine.journal.commit(Change(edits)).await?;
        undo(&engine, name).await;
        drive::undo(&engine, name).await;
        Ok(true)
    }
}

/// Detaches some paths of a controller that keeps others.
async fn detach_paths(
    engine: &Rc<Engine>,
    name: &str,
    remote: &Remote,
    paths: Vec<Rc<RemotePath>>,
) -> Result<bool, RpcError> {
    let entries = nvme::records_of(engine, name, &paths);
    let edits = entries.into_iter().map(|e| Edit::Remove(e.record.key));
    engine.journal.commit(Change(edits.collect())).await?;
    for path in paths {
        undo_path(engine, name, remote, &path).await;
    }
    Ok(true)
}

struct Reset;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResetParams {
    /// The controller of a target or of a drive, by name.
    name: String,
    /// Must match the controller if given.
    cntlid: Option<u16>,
}

impl Method<Engine> for Reset {
    const NAME: &'static str = "bdev_nvme_reset_controller";
    const ABOUT: &'static str = "Ends the connection to a controller and connects again, also when it was given up; I/O waits.";
    const CLASS: Class = Class::Operate;
    /// May take long, and changes nothing that other calls could change.
    const ORDER: Order = Order::Free;
    type Params = ResetParams;
    type Reply = bool;

    async fn apply(params: ResetParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        if let Some(drive) = engine.drives.find(&params.name) {
            return drive::reset(&drive, params.cntlid, &params.name).await;
        }
        let remote = engine.remotes.find(&params.name);
        let remote = remote.ok_or_else(|| no_controller(&params.name))?;
        let paths = paths_to(&params.name, &remote, params.cntlid)?;
        reconnect(&engine, &params.name, &paths)
            .await
            .map(|()| true)
    }
}

/// The paths to controller `cntlid`; `None`: all.
fn paths_to(
    name: &str,
    remote: &Remote,
    cntlid: Option<u16>,
) -> Result<Vec<Rc<RemotePath>>, RpcError> {
    let mut paths = remote.paths();
    let Some(cntlid) = cntlid else {
        return Ok(paths);
    };
    let id = |path: &Rc<RemotePath>| path.path.status().info.cntlid;
    let all: Vec<String> = paths.iter().map(|path| id(path).to_string()).collect();
    paths.retain(|path| id(path) == cntlid);
    if paths.is_empty() {
        let cause = format!("\"{name}\" is controller {} there", all.join(", "));
        return Err(RpcError::errno(Errno::ENODEV, cause).field("cntlid"));
    }
    Ok(paths)
}

/// Disconnects paths and waits until each is connected again, or has failed for a known reason.
async fn reconnect(engine: &Engine, name: &str, paths: &[Rc<RemotePath>]) -> Result<(), RpcError> {
    let before: Vec<Status> = paths.iter().map(|path| path.path.status()).collect();
    for path in paths {
        path.path.reset();
    }
    let until = Instant::now() + CONNECT_TIMEOUT;
    for (path, before) in paths.iter().zip(before) {
        reconnected(engine, name, path, &before, until).await?;
    }
    Ok(())
}

async fn reconnected(
    engine: &Engine,
    name: &str,
    path: &Rc<RemotePath>,
    before: &Status,
    until: Instant,
) -> Result<(), RpcError> {
    loop {
        let now = path.path.status();
        if now.connects > before.connects {
            return Ok(());
        }
        let here = engine.remotes.find(name);
        if !here.is_some_and(|here| here.paths().iter().any(|one| Rc::ptr_eq(one, path))) {
            let cause = format!("\"{name}\" was detached before it was connected");
            return Err(RpcError::errno(Errno::ENODEV, cause).field("name"));
        }
        // Ignores failures and losses from before this reset.
        let begun = now.resets > before.resets;
        let ended = begun && (before.state != State::Live || now.losses > before.losses);
        let error = now.state.error().filter(|_| ended);
        // The requested disconnect is not a failed attempt.
        let error = error.filter(|error| **error != HostError::Reset);
        if let Some(error) = error.filter(|_| now.exhausted || Instant::now() >= until) {
            return Err(RpcError::errno(Errno::EIO, error.to_string())
                .remedy("it goes on trying: bdev_nvme_get_controllers shows its state"));
        }
        if Instant::now() >= until {
            let cause = format!("no connection within {CONNECT_TIMEOUT:?}");
            return Err(RpcError::errno(Errno::ETIMEDOUT, cause));
        }
        let handled = engine.remotes.handled.notified();
        let _ = tokio::time::timeout(Duration::from_millis(20), handled).await;
    }
}

struct SetControllerKeys;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetControllerKeysParams {
    /// The remote controller, by name.
    name: String,
    /// Name of the key with which this host authenticates itself from now on; left out: none.
    dhchap_key: Option<String>,
    /// Name of the key with which the target must authenticate itself; left out: it need not.
    dhchap_ctrlr_key: Option<String>,
}

impl Method<Engine> for SetControllerKeys {
    const NAME: &'static str = "bdev_nvme_set_keys";
    const ABOUT: &'static str = "Replaces the keys for a remote controller and connects again, so that every queue authenticates itself with the new ones; I/O waits.";
    const CLASS: Class = Class::Secret;
    /// Locks changes itself, and releases the lock while it waits for the target.
    const ORDER: Order = Order::Free;
    type Params = SetControllerKeysParams;
    type Reply = bool;

    async fn apply(params: SetControllerKeysParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let gate = engine.changing().await;
        engine.refuse_overtaken()?;
        let name = &params.name;
        let remote = engine.remotes.find(name);
        let remote = remote.ok_or_else(|| no_controller(name))?;
        cluster::refuse_keys_by_hand(&engine.settings.cluster, name)?;
        let of_name = |entry: &JournalEntry| {
            let further = format!("{}{name}/", nvme::PATHS);
            entry.record.key == key(name) || entry.record.key.starts_with(&further)
        };
        let (mut edits, mut keys) = (Vec::new(), None);
        let helper = Arc::clone(&remote.path().wanted.authentication.helper);
        for mut entry in engine.journal.select(of_name) {
            let stored = serde_json::from_value::<AttachParams>(entry.record.params);
            let mut stored = stored.map_err(|error| RpcError::internal(error.to_string()))?;
            stored.dhchap_key = params.dhchap_key.clone();
            stored.dhchap_ctrlr_key = params.dhchap_ctrlr_key.clone();
            keys = stored.keys(&engine, &helper)?;
            entry.record.params = serde_json::to_value(&stored).expect("parameters are plain data");
            edits.push(Edit::Put(entry.record));
        }
        if edits.is_empty() {
            return Err(discovery::keys_of_discovered(&engine, name));
        }
        engine.journal.commit(Change(edits)).await?;
        let paths = remote.paths();
        for path in &paths {
            path.wanted.authentication.keys.set(keys.clone());
        }
        drop(gate);
        reconnect(&engine, name, &paths).await.map(|()| true)
    }
}

fn no_controller(name: &str) -> RpcError {
    RpcError::errno(
        Errno::ENODEV,
        format!("no controller is attached as \"{name}\""),
    )
    .field("name")
    .remedy("bdev_nvme_get_controllers lists them")
}

#[cfg(test)]
pub(crate) mod tests;
