//! The paths of remote bdevs: lists them, their I/O, and how I/O is divided among them.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::Bdev;
use nacre_nvmf::tls::Suite;
use nacre_nvmf_remote::{PathInfo, PathIo, RemoteBdev, State};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::no_controller;
use crate::attach::{PolicyName, SelectorName, policy};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::nvme::POLICIES;
use crate::services::remotes::{PathSecurity, RemotePath};
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<SetMultipathPolicy>()
        .add::<SetPreferredPath>()
        .add::<GetIoPaths>()
        .add::<GetPathIostat>()
        .add::<GetPaths>()
        .add::<EnableController>()
        .add::<DisableController>();
}

/// How long a call waits for a controller to disconnect or to connect.
const PATIENCE: Duration = Duration::from_secs(10);

/// The remote device with this name or UUID.
fn device(engine: &Engine, name: &str) -> Result<Arc<RemoteBdev>, RpcError> {
    let found = engine.remotes.list().into_iter().find_map(|(_, remote)| {
        let mut devices = remote.attachment.devices().into_iter();
        devices.find(|device| device.name() == name || device.uuid().to_string() == name)
    });
    found.ok_or_else(|| {
        RpcError::errno(Errno::ENODEV, format!("\"{name}\" is not a remote device"))
            .field("name")
            .remedy("bdev_nvme_get_controllers lists them")
    })
}

struct SetMultipathPolicy;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetMultipathPolicyParams {
    /// The device.
    name: String,
    /// `active_passive`: one path at a time. `active_active`: all paths of the best ANA state.
    policy: PolicyName,
    /// Default `round_robin`; with `active_active` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    selector: Option<SelectorName>,
    /// I/Os in a row on a path with `round_robin`; default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rr_min_io: Option<u32>,
}

impl Method<Engine> for SetMultipathPolicy {
    const NAME: &'static str = "bdev_nvme_set_multipath_policy";
    const ABOUT: &'static str = "Sets how the I/O of a remote device is divided among its paths.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = SetMultipathPolicyParams;
    type Reply = bool;

    async fn apply(params: SetMultipathPolicyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let min_io = ("rr_min_io", params.rr_min_io);
        let policy = policy(params.policy, params.selector, min_io)?;
        let device = device(&engine, &params.name)?;
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let key = format!("{POLICIES}{}", device.name());
        let change = Change::put(key, Self::NAME, record);
        engine.journal.commit(change).await?;
        device.set_policy(policy);
        Ok(true)
    }
}

struct SetPreferredPath;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPreferredPathParams {
    /// The device.
    name: String,
    /// The controller at the end of the path.
    cntlid: u16,
}

impl Method<Engine> for SetPreferredPath {
    const NAME: &'static str = "bdev_nvme_set_preferred_path";
    const ABOUT: &'static str = "Prefers a path of a remote device among those of the same ANA state, until the next start; with active_passive.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = SetPreferredPathParams;
    type Reply = bool;

    async fn apply(params: SetPreferredPathParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let device = device(&engine, &params.name)?;
        if device.prefer(params.cntlid) {
            return Ok(true);
        }
        let cause = format!("no path of \"{}\" is to it", params.name);
        Err(RpcError::errno(Errno::ENODEV, cause)
            .field("cntlid")
            .remedy("bdev_nvme_get_io_paths lists the paths that are connected"))
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct PathTransport {
    trtype: String,
    adrfam: &'static str,
    traddr: String,
    trsvcid: String,
}

impl PathTransport {
    fn of(path: &PathInfo) -> Self {
        let (traddr, trsvcid) = path.address.clone();
        Self {
            trtype: path.status.transport.to_string(),
            adrfam: if traddr.contains(':') { "IPv6" } else { "IPv4" },
            traddr,
            trsvcid,
        }
    }
}

struct GetIoPaths;

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetIoPathsParams {
    /// Default: all remote devices.
    name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct IoPaths {
    poll_groups: Vec<PathPollGroup>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PathPollGroup {
    /// The reactor. Only reactors with a queue to a device are listed.
    thread: String,
    io_paths: Vec<IoPath>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct IoPath {
    bdev_name: String,
    cntlid: u16,
    /// The reactor sends new I/O on this path.
    current: bool,
    connected: bool,
    /// The namespace can be used on this path.
    accessible: bool,
    transport: PathTransport,
    /// Nacre extension, as the next two: the ANA state, or `unknown`.
    ana_state: &'static str,
    preferred: bool,
    /// Why the namespace on this path is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl Method<Engine> for GetIoPaths {
    const NAME: &'static str = "bdev_nvme_get_io_paths";
    const ABOUT: &'static str =
        "Lists the paths of remote devices, for each reactor that uses them.";
    const CLASS: Class = Class::Read;
    type Params = GetIoPathsParams;
    type Reply = IoPaths;

    async fn apply(params: GetIoPathsParams, engine: Rc<Engine>) -> Result<IoPaths, RpcError> {
        let devices = match &params.name {
            Some(name) => vec![device(&engine, name)?],
            None => {
                let remotes = engine.remotes.list();
                let devices = remotes
                    .iter()
                    .map(|(_, remote)| remote.attachment.devices());
                devices.flatten().collect()
            }
        };
        let mut groups: BTreeMap<String, Vec<IoPath>> = BTreeMap::new();
        for device in devices {
            for path in device.paths() {
                for queue in &path.queues {
                    groups
                        .entry(queue.thread.clone())
                        .or_default()
                        .push(IoPath {
                            bdev_name: device.name().to_owned(),
                            cntlid: path.status.info.cntlid,
                            current: queue.is_current,
                            connected: path.status.state == State::Live,
                            accessible: path.is_accessible(),
                            transport: PathTransport::of(&path),
                            ana_state: path.access_word(),
                            preferred: path.is_preferred,
                            refused: path.refusal.clone(),
                        });
                }
            }
        }
        let group = |(thread, io_paths)| PathPollGroup { thread, io_paths };
        Ok(IoPaths {
            poll_groups: groups.into_iter().map(group).collect(),
        })
    }
}

struct GetPathIostat;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetPathIostatParams {
    /// The device.
    name: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PathIostat {
    name: String,
    stats: Vec<PathStat>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PathStat {
    trid: PathTransport,
    stat: PathIoStat,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PathIoStat {
    bytes_read: u64,
    num_read_ops: u64,
    bytes_written: u64,
    num_write_ops: u64,
    /// Nacre extension, as the next one: I/O that the target failed.
    failed_ops: u64,
    /// I/O of this path that was sent again, on this path or another.
    resent_ops: u64,
}

impl Method<Engine> for GetPathIostat {
    const NAME: &'static str = "bdev_nvme_get_path_iostat";
    const ABOUT: &'static str =
        "Counts the I/O of a remote device on each of its paths; at most 100 ms old.";
    const CLASS: Class = Class::Read;
    type Params = GetPathIostatParams;
    type Reply = PathIostat;

    async fn apply(
        params: GetPathIostatParams,
        engine: Rc<Engine>,
    ) -> Result<PathIostat, RpcError> {
        let device = device(&engine, &params.name)?;
        let stat = |path: &PathInfo| PathStat {
            trid: PathTransport::of(path),
            stat: PathIoStat {
                bytes_read: path.io.read_bytes,
                num_read_ops: path.io.reads,
                bytes_written: path.io.write_bytes,
                num_write_ops: path.io.writes,
                failed_ops: path.io.failed,
                resent_ops: path.io.resent,
            },
        };
        Ok(PathIostat {
            name: device.name().to_owned(),
            stats: device.paths().iter().map(stat).collect(),
        })
    }
}

pub struct GetPaths;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetPathsParams {
    /// Name or UUID of a device. Default: all remote devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct PathReply {
    bdev: String,
    controller: String,
    subnqn: String,
    trid: PathTransport,
    cntlid: u16,
    /// In the words of `bdev_nvme_get_controllers`.
    state: &'static str,
    /// The ANA state of the namespace, or `unknown`.
    ana_state: &'static str,
    /// A reactor sends new I/O on this path.
    current: bool,
    preferred: bool,
    /// Why the path is not connected, or the namespace on it is not used.
    why: Option<String>,
    /// The cipher suite of TLS; null: the path is in clear, or not connected.
    tls: Option<&'static str>,
    /// The name of the pre-shared key in use; null: none, or authentication generated it.
    psk: Option<String>,
    /// The name of the key with which this daemon authenticated itself; null: it did not.
    dhchap_key: Option<String>,
    /// Completed I/O; at most 100 ms old.
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    /// I/O that the target failed.
    failed: u64,
    /// I/O of this path that was sent again, on this path or another.
    resent: u64,
}

impl Method<Engine> for GetPaths {
    const NAME: &'static str = "remote_get_paths";
    const ABOUT: &'static str =
        "Lists the paths of remote devices: the state of each, whether I/O uses it, and its I/O.";
    const CLASS: Class = Class::Read;
    type Params = GetPathsParams;
    type Reply = Vec<PathReply>;

    async fn apply(params: GetPathsParams, engine: Rc<Engine>) -> Result<Vec<PathReply>, RpcError> {
        let wanted = match &params.name {
            Some(name) => Some(device(&engine, name)?.name().to_owned()),
            None => None,
        };
        let mut all = Vec::new();
        for (controller, remote) in engine.remotes.list() {
            let of_device =
                |one: &Arc<RemoteBdev>| wanted.as_deref().is_none_or(|w| w == one.name());
            for device in remote
                .attachment
                .devices()
                .iter()
                .filter(|one| of_device(one))
            {
                let named = |path: PathReply| PathReply {
                    bdev: device.name().to_owned(),
                    controller: controller.clone(),
                    ..path
                };
                let paths = remote.paths();
                let security = |info: &PathInfo| {
                    let mut found = paths.iter().filter(|path| path.path == info.path);
                    let found = found.next().map(|path| path.security());
                    found.unwrap_or_default()
                };
                let used = device.paths();
                let used = used.iter();
                all.extend(used.map(|info| named(PathReply::of(info, security(info)))));
                // Paths that were never connected, or never had the namespace.
                let unused = paths.iter();
                let unused = unused.filter(|path| !device.has_path(&path.path));
                all.extend(unused.map(|path| {
                    let refused = remote.attachment.refusals_of(&path.path).into_iter();
                    let mut refused = refused.filter(|(name, _)| name == device.name());
                    named(PathReply::unused(path, refused.next().map(|(_, why)| why)))
                }));
            }
        }
        Ok(all)
    }
}

impl PathReply {
    /// A path of a device. The caller fills in the names.
    fn of(path: &PathInfo, security: PathSecurity) -> Self {
        let problem = path.status.state.error().map(ToString::to_string);
        Self {
            bdev: String::new(),
            controller: String::new(),
            subnqn: path.subnqn.clone(),
            trid: PathTransport::of(path),
            cntlid: path.status.info.cntlid,
            state: path.status.state.word(),
            ana_state: path.access_word(),
            current: path.io.current > 0,
            preferred: path.is_preferred,
            why: path.refusal.clone().or(problem),
            tls: security.suite.map(Suite::name),
            psk: security.psk,
            dhchap_key: security.dhchap_key,
            reads: path.io.reads,
            read_bytes: path.io.read_bytes,
            writes: path.io.writes,
            write_bytes: path.io.write_bytes,
            failed: path.io.failed,
            resent: path.io.resent,
        }
    }

    /// A path over which the bdev's namespace was never found.
    fn unused(path: &RemotePath, refused: Option<String>) -> Self {
        let info = PathInfo {
            path: path.path.clone(),
            address: path.path.config().address.clone(),
            subnqn: path.wanted.subnqn.to_string(),
            status: path.path.status(),
            access: None,
            is_preferred: false,
            refusal: refused,
            io: PathIo::default(),
            queues: Vec::new(),
        };
        Self::of(&info, path.security())
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ControllerParams {
    /// The remote controller, by name.
    name: String,
    /// Default: every path of the controller.
    cntlid: Option<u16>,
}

impl ControllerParams {
    fn paths(&self, engine: &Engine) -> Result<Vec<Rc<RemotePath>>, RpcError> {
        let remote = engine.remotes.find(&self.name);
        let remote = remote.ok_or_else(|| match engine.drives.find(&self.name) {
            Some(_) => {
                let cause = format!("\"{}\" is a drive of this machine", self.name);
                RpcError::errno(Errno::ENOTSUP, cause)
                    .field("name")
                    .remedy("detach it, or reset it: bdev_nvme_reset_controller")
            }
            None => no_controller(&self.name),
        })?;
        super::paths_to(&self.name, &remote, self.cntlid)
    }
}

/// Waits until each path is enabled or disabled.
async fn wait(
    engine: &Engine,
    paths: &[Rc<RemotePath>],
    done: impl Fn(&State) -> bool,
) -> Result<bool, RpcError> {
    let until = Instant::now() + PATIENCE;
    while !paths.iter().all(|path| done(&path.path.status().state)) {
        if Instant::now() >= until {
            return Err(RpcError::errno(
                Errno::ETIMEDOUT,
                format!("it takes longer than {PATIENCE:?}"),
            )
            .remedy("it goes on: bdev_nvme_get_controllers shows its state"));
        }
        let handled = engine.remotes.handled.notified();
        let _ = tokio::time::timeout(Duration::from_millis(20), handled).await;
    }
    Ok(true)
}

struct EnableController;

impl Method<Engine> for EnableController {
    const NAME: &'static str = "bdev_nvme_enable_controller";
    const ABOUT: &'static str = "Connects a disabled controller, or one path to it, again.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = ControllerParams;
    type Reply = bool;

    async fn apply(params: ControllerParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let paths = params.paths(&engine)?;
        if paths.iter().all(|path| path.path.is_enabled()) {
            let cause = format!("\"{}\" is enabled", params.name);
            return Err(RpcError::errno(Errno::EALREADY, cause).field("name"));
        }
        for path in &paths {
            path.path.set_enabled(true);
        }
        wait(&engine, &paths, |state| *state == State::Live).await
    }
}

struct DisableController;

impl Method<Engine> for DisableController {
    const NAME: &'static str = "bdev_nvme_disable_controller";
    const ABOUT: &'static str = "Disconnects a remote controller, or one path to it, until it is enabled or the daemon starts again. I/O uses the other paths, or fails.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ControllerParams;
    type Reply = bool;

    async fn apply(params: ControllerParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let paths = params.paths(&engine)?;
        if paths.iter().all(|path| !path.path.is_enabled()) {
            let cause = format!("\"{}\" is disabled", params.name);
            return Err(RpcError::errno(Errno::EALREADY, cause).field("name"));
        }
        for path in &paths {
            path.path.set_enabled(false);
        }
        wait(&engine, &paths, |state| *state == State::Disabled).await
    }
}
