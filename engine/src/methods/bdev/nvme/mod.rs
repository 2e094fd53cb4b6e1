//! `bdev_nvme_*`: namespaces of remote targets and local drives as devices.
//!
//! An attached controller is one journal record, `nvme/ctrlr/<name>`, with the parameters of the
//! call. Options of all controllers are another record, `nvme/options`. The devices have no
//! records: they follow from the controller.

mod drive;
pub mod health;
mod hotplug;
pub mod list;
mod options;

use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_bdev::registry::DeleteTicket;
use nacre_nvmf::address::adrfam;
use nacre_nvmf::host::HostError;
use nacre_nvmf_remote::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::journal::{EntryState, is_declaring};
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::engine::Engine;
use crate::services::lifecycle::Phase;
use crate::services::nvme::{self, ATTACH, AttachParams, key};
use crate::services::remotes::{self, Remote};
use crate::store::{Change, Edit};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AttachController>()
        .add::<DetachController>()
        .add::<Reset>()
        .add::<SetKeys>();
    list::register(registry);
    options::register(registry);
    health::register(registry);
    hotplug::register(registry);
}

/// How long the first connection may hold the lock of changes. With a fast connection, the devices
/// exist for the next call; a slow one must not block other changes.
const LOCKED_WAIT: Duration = Duration::from_secs(1);
/// Time limit of the first connection for a client's call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The same at the start of the daemon. Slower controllers connect later.
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
        // A stored controller that is not live is restored, and a declared one is attached, also
        // while its target is away: the connection is retried later.
        let again = engine.journal.find(&key(&name)).is_some() || is_declaring();
        let change = || Change::put(key(&name), ATTACH, record);
        if engine.drives.find(&name).is_some() || engine.drives.is_coming(&name) {
            return Err(is_attached(&name));
        }
        if params.is_drive() {
            if engine.remotes.find(&name).is_some() {
                return Err(is_attached(&name));
            }
            return drive::attach(&params, &engine, gate, again, change()).await;
        }
        let remote = match engine.remotes.find(&name) {
            Some(remote) if again && is_begun(&engine, &name) => remote,
            Some(remote) if params.is_at(&remote) => {
                return Err(is_attached(&name).renumbered(Errno::EALREADY));
            }
            Some(_) => return Err(is_attached(&name)),
            None => nvme::begin(&engine, params).await?,
        };
        let patience = if again {
            CONNECT_TIMEOUT_AT_START
        } else {
            CONNECT_TIMEOUT
        };
        let now = Instant::now();
        let until = remote.begun.max(now - patience) + patience;
        let mut first = first_connection(&engine, &remote, until.min(now + LOCKED_WAIT)).await;
        if matches!(first, Ok(false)) {
            drop(gate);
            first = first_connection(&engine, &remote, until).await;
            gate = engine.changing().await;
            let here = engine.remotes.find(&name);
            if !here.is_some_and(|here| Rc::ptr_eq(&here, &remote)) {
                let cause = format!("\"{name}\" was detached before it was connected");
                return Err(RpcError::errno(Errno::ENODEV, cause).field("name"));
            }
            if again && is_live(&engine, &name) {
                // Another call attached the same controller meanwhile.
                return devices(&engine, &name, &remote, again);
            }
        }
        let outcome = match first {
            Ok(true) => devices(&engine, &name, &remote, again),
            // Retries continue; stacked devices appear with their bases.
            Ok(false) | Err(_) if again => Ok(Vec::new()),
            Err(refused) => Err(refused),
            Ok(false) => {
                let causes = remote.attachment.status().causes;
                let why = format!("no connection within {patience:?}; {causes}");
                let why = why.trim_end_matches("; ").to_owned();
                Err(not_connected(&remote, Errno::ETIMEDOUT, why))
            }
        };
        let outcome = match outcome {
            Ok(names) => engine.journal.commit(change()).await.map(|()| names),
            refused => refused,
        };
        if outcome.is_err() && !again {
            undo(&engine, &name).await;
        }
        drop(gate);
        outcome
    }
}

fn is_attached(name: &str) -> RpcError {
    let cause = format!("a controller is attached as \"{name}\" already");
    RpcError::errno(Errno::EEXIST, cause)
        .field("name")
        .remedy("detach it first, or choose another name: a controller has one path here")
}

/// True if the start of the daemon began to connect the controller, and no call has attached it
/// yet. Clients attach none before the daemon runs.
fn is_begun(engine: &Engine, name: &str) -> bool {
    match engine.journal.find(&key(name)) {
        Some(entry) => entry.state != EntryState::Live,
        None => engine.lifecycle.phase() == Phase::Starting,
    }
}

fn is_live(engine: &Engine, name: &str) -> bool {
    let entry = engine.journal.find(&key(name));
    entry.is_some_and(|entry| entry.state == EntryState::Live)
}

fn not_connected(remote: &Remote, errno: Errno, why: String) -> RpcError {
    let wanted = &remote.wanted;
    let cause = format!("{} at {}: {why}", wanted.subnqn, wanted.address);
    RpcError::errno(errno, cause).field("traddr").remedy(
        "see that a target listens there, has the subsystem and lets this host in: nacre discover",
    )
}

/// Waits for the first connection. Returns false on timeout, and an error if no connection is
/// possible.
async fn first_connection(
    engine: &Rc<Engine>,
    remote: &Remote,
    until: Instant,
) -> Result<bool, RpcError> {
    loop {
        let status = remote.attachment.status();
        let failed = |why: String| Err(not_connected(remote, Errno::EIO, why));
        match &status.state {
            State::Live => return Ok(true),
            State::Failed(error) => return failed(error.to_string()),
            State::Closed => return failed("it was detached".to_owned()),
            State::Waiting {
                refused: true,
                error,
            } => return failed(error.to_string()),
            State::Waiting { .. } if status.exhausted => return failed(status.causes),
            State::Waiting { .. } | State::Connecting => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let _ = tokio::time::timeout(
            left.min(Duration::from_millis(50)),
            engine.remotes.settled.notified(),
        )
        .await;
    }
}

/// Creates the controller's devices. Fails if there are none because of an error; the controller is
/// not attached then.
fn devices(
    engine: &Rc<Engine>,
    name: &str,
    remote: &Remote,
    again: bool,
) -> Result<Vec<String>, RpcError> {
    let plane = engine.plane()?;
    remote.sync(engine, &plane, name);
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

/// Waits until a controller's devices are gone. The wait is limited, because I/O may never end and
/// other changes wait.
async fn wait_until_gone(engine: &Engine, name: &str, tickets: Vec<DeleteTicket>) {
    let patience = super::patience(engine);
    if tokio::time::timeout(patience, join_all(tickets))
        .await
        .is_err()
    {
        warn!(name, "I/O is still under way on its devices");
    }
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
    remotes::closed(&remote.attachment, remotes::close_deadline()).await;
}

pub struct DetachController;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachControllerParams {
    pub name: String,
    /// These six must match the controller if given.
    pub trtype: Option<String>,
    pub traddr: Option<String>,
    pub adrfam: Option<String>,
    pub trsvcid: Option<String>,
    pub subnqn: Option<String>,
    pub hostaddr: Option<String>,
    /// Must be empty: a source port cannot be chosen.
    pub hostsvcid: Option<String>,
}

impl DetachControllerParams {
    /// Checks that the optional parameters match the attached controller.
    fn fits(&self, remote: &Remote) -> Result<(), RpcError> {
        let (wanted, status) = (&remote.wanted, remote.attachment.status());
        let family = adrfam(wanted.address.ip());
        let hostaddr = wanted.hostaddr.map(|ip| ip.to_string()).unwrap_or_default();
        let is = [
            ("trtype", &self.trtype, status.transport.to_string()),
            ("traddr", &self.traddr, wanted.host.clone()),
            ("adrfam", &self.adrfam, family.to_owned()),
            ("trsvcid", &self.trsvcid, wanted.address.port().to_string()),
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
                params.fits(&remote)?;
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
        let mut edits = vec![Edit::Remove(key(name))];
        edits.extend(super::forget(&engine, &going));
        // Remove the record first: after a crash in between, the controller must not return.
        engine.journal.commit(Change(edits)).await?;
        undo(&engine, name).await;
        drive::undo(&engine, name).await;
        Ok(true)
    }
}

struct Reset;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResetParams {
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
        engine.settled().await;
        if let Some(drive) = engine.drives.find(&params.name) {
            return drive::reset(&drive, params.cntlid, &params.name).await;
        }
        let remote = engine.remotes.find(&params.name);
        let remote = remote.ok_or_else(|| no_controller(&params.name))?;
        let cntlid = remote.attachment.status().info.cntlid;
        if params.cntlid.is_some_and(|asked| asked != cntlid) {
            let cause = format!("\"{}\" is controller {cntlid} there", params.name);
            return Err(RpcError::errno(Errno::ENODEV, cause).field("cntlid"));
        }
        reconnect(&engine, &params.name, &remote)
            .await
            .map(|()| true)
    }
}

/// Ends the connection and waits until it is back, or has failed for a known reason.
async fn reconnect(engine: &Engine, name: &str, remote: &Rc<Remote>) -> Result<(), RpcError> {
    let before = remote.attachment.status();
    remote.attachment.reset();
    let until = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let now = remote.attachment.status();
        if now.connects > before.connects {
            return Ok(());
        }
        let here = engine.remotes.find(name);
        if !here.is_some_and(|here| Rc::ptr_eq(&here, remote)) {
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
        let settled = engine.remotes.settled.notified();
        let _ = tokio::time::timeout(Duration::from_millis(20), settled).await;
    }
}

struct SetKeys;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetKeysParams {
    name: String,
    /// Name of the key with which this host authenticates itself from now on; left out: none.
    dhchap_key: Option<String>,
    /// Name of the key with which the target must authenticate itself; left out: it need not.
    dhchap_ctrlr_key: Option<String>,
}

impl Method<Engine> for SetKeys {
    const NAME: &'static str = "bdev_nvme_set_keys";
    const ABOUT: &'static str = "Replaces the keys for a remote controller and connects again, so that every queue authenticates itself with the new ones; I/O waits.";
    const CLASS: Class = Class::Secret;
    /// Locks changes itself, and releases the lock while it waits for the target.
    const ORDER: Order = Order::Free;
    type Params = SetKeysParams;
    type Reply = bool;

    async fn apply(params: SetKeysParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let gate = engine.changing().await;
        engine.refuse_overtaken()?;
        let name = &params.name;
        let remote = engine.remotes.find(name);
        let remote = remote.ok_or_else(|| no_controller(name))?;
        let entry = engine.journal.find(&key(name));
        let entry = entry.ok_or_else(|| no_controller(name))?;
        let stored = serde_json::from_value::<AttachParams>(entry.record.params);
        let mut stored = stored.map_err(|error| RpcError::internal(error.to_string()))?;
        stored.dhchap_key = params.dhchap_key;
        stored.dhchap_ctrlr_key = params.dhchap_ctrlr_key;
        let authentication = &remote.wanted.authentication;
        let keys = stored.keys(&engine, &authentication.helper)?;
        let record = serde_json::to_value(&stored).expect("parameters are plain data");
        engine
            .journal
            .commit(Change::put(key(name), ATTACH, record))
            .await?;
        authentication.keys.set(keys);
        drop(gate);
        reconnect(&engine, name, &remote).await.map(|()| true)
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
mod declared_tests;
#[cfg(test)]
pub(crate) mod drive_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;
