//! The phases of `nacre serve`: start, initialise, run, drain, end.
//!
//! ```text
//!   serve   settings, capabilities, logs, locks (socket, data directory), the runtime
//!     ├ socket answers from here on (with --wait-for-rpc: startup methods only)
//!     ├ init    data plane ▸ replay of the store ▸ declared objects ▸ stored objects that depend
//!     │         on them ▸ hosts are admitted                                     phase Runtime
//!     ├ -c JSON the calls of an SPDK configuration, in its order
//!     ├ sandbox the filter of system calls, on all threads
//!     ├ ready   sd_notify READY=1, one log line with sockets, listeners and paths
//!     ├ …       RPC, metrics, retries of failed replays, watchdog pings, SIGHUP
//!     └ stop    SIGTERM, SIGINT or spdk_kill_instance: fini, STOPPING=1, exit 0; a second signal
//!               ends at once
//! ```
//!
//! Everything here runs on one thread with a tokio current-thread runtime, so no future needs to be
//! `Send`. Slow work, such as that of the store, has helper threads. The data path has its
//! reactors, which are reached by messages only.

mod failures;
pub mod machine_check;
pub mod reload;
mod sandbox;
pub mod spdk_file;

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use futures_util::FutureExt;
use nacre_nvmf::auth::Offer;
use nacre_nvmf::subsystems::{QueueLimits, TargetConfig};
use serde_json::Value;
use tracing::{error, info, warn};

use crate::audit::AuditLog;
use crate::audit::file::AuditFile;
use crate::config::Personality;
use crate::config::source::{COMMANDS_SOCKET, variable};
use crate::config::{Loaded, Settings, default_socket};
use crate::journal::Journal;
use crate::logs::Logs;
use crate::metrics::http;
use crate::plane::{Plane, PlaneConfig};
use crate::rpc::socket::Socket;
use crate::rpc::tls::listen::TlsListener;
use crate::rpc::{Registry, When};
use crate::services::Engine;
use crate::services::keyring;
use crate::services::lifecycle::Phase;
use crate::services::startup::{DiscoveryFilter, NvmfOptions};
use crate::services::subsystems::configured_nqn;
use crate::signals::{Hangups, Stops};
use crate::store::{Record, Store};
use crate::values::files::{self, Inode};

/// Interval of [`periodic_work`].
const PERIODIC_WORK_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit for disconnecting the hosts, and for the reactors to end.
const HOST_PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for which connecting hosts are held until volumes are open.
const VOLUME_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit of the drain. The process ends after it in any case.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct ServeOptions {
    pub personality: Personality,
    pub loaded: Loaded,
    /// Reads `loaded` again for a reload.
    pub source: reload::Source,
    /// Path and content of an SPDK configuration to execute.
    pub json_config: Option<(PathBuf, Value)>,
    pub ignore_json_errors: bool,
    pub wait_for_rpc: bool,
    pub pid_file: Option<PathBuf>,
}

/// Runs a daemon with these RPC methods until it is asked to stop.
pub fn serve(options: ServeOptions, methods: Registry<Engine>) -> anyhow::Result<()> {
    let settings = &options.loaded.settings;
    let restricted = sandbox::restrict(settings);
    let logs = Logs::install(&settings.log)?;
    crate::core_dumps::limit(&settings.security);
    crate::descriptors::raise();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = tokio::task::LocalSet::new()
        .block_on(&runtime, run(&options, methods, logs.clone(), restricted));
    // A stuck helper thread must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let (Err(error), Some(_)) = (&outcome, &settings.log.file) {
        // The command line prints the error to stderr.
        error!("{}", crate::rpc::error::causes(error));
    }
    logs.flush();
    outcome
}

async fn run(
    options: &ServeOptions,
    methods: Registry<Engine>,
    logs: Logs,
    restricted: sandbox::Restricted,
) -> anyhow::Result<()> {
    // First of all: a signal may arrive at any time.
    let (stops, hangups) = (Stops::new()?, Hangups::new()?);
    let settings = options.loaded.settings.clone();
    let socket_path = socket_path(&settings, options.personality);
    let socket = if settings.rpc.enabled {
        Some(Socket::bind(&socket_path)?)
    } else {
        None
    };
    let commands = std::env::var_os(COMMANDS_SOCKET).map(PathBuf::from);
    if let Some(path) = commands.filter(|path| *path != socket_path) {
        warn!(
            "{COMMANDS_SOCKET} is {} and the daemon serves {}: that variable is for the commands, {} moves the daemon",
            path.display(),
            socket_path.display(),
            variable("rpc.socket")
        );
    }
    let store = open_store(&settings, options.personality)?;
    // Only now: if another daemon holds the state, the pid file belongs to that daemon.
    let _pid_file = options
        .pid_file
        .as_deref()
        .map(PidFile::write)
        .transpose()?;
    let listener = match settings.metrics.listen {
        Some(address) => Some(http::bind(address).await?),
        None => None,
    };
    let remote = match settings.rpc.tls.listen {
        Some(address) => Some(TlsListener::bind(address).await?),
        None => None,
    };
    let audit = audit_log(&settings, options.personality);
    let engine = Rc::new(Engine::new(
        options.personality,
        settings,
        logs,
        Journal::new(store),
        methods,
        audit,
    ));
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY");
    engine
        .keyring
        .use_credentials(credentials.map(PathBuf::from));
    sandbox::report(&engine, restricted);
    let refused = reload::Files::read(&engine.settings).await.apply(&engine);
    if let Some(error) = refused.token {
        return Err(error.into());
    }
    if let Some(error) = refused.certificates.all().next() {
        return Err(error.into());
    }
    let folder = state_dir(&engine.settings, options.personality);
    crate::services::web::start(&engine, folder.as_deref()).await?;
    let following = reload::follow(Rc::clone(&engine), hangups, options.source.clone());
    tokio::task::spawn_local(following);
    engine.alerts.declare(&engine, &engine.settings.alert);
    if let Some(listener) = listener {
        info!(address = %listener.local_addr()?, "metrics over HTTP");
        tokio::task::spawn_local(http::serve(listener, Rc::clone(&engine)));
    }
    if let Some(listener) = remote {
        info!(address = %listener.address()?, "RPC over TLS");
        tokio::task::spawn_local(serve_remote(listener, Rc::clone(&engine)));
    }
    let serving = {
        let engine = Rc::clone(&engine);
        let clients = engine.settings.rpc.max_clients;
        let path = socket.as_ref().map(|s| s.path().to_owned());
        async move {
            match socket {
                Some(socket) => {
                    let serving = socket.serve(Rc::clone(&engine), clients);
                    tokio::join!(serving, keep_open(&socket, &engine));
                }
                None => std::future::pending().await,
            }
            drop(path);
        }
    };
    tokio::pin!(serving);
    let living = live(&engine, options, &socket_path);
    tokio::select! {
        () = &mut serving => unreachable!("the socket is served forever"),
        outcome = living => outcome?,
        () = stops.next() => {}
        () = engine.lifecycle.stopping() => {}
    }
    info!("stopping");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    engine.lifecycle.set_phase(Phase::Stopping);
    // Keep serving: clients may watch the drain, and the answer to spdk_kill_instance has to be
    // sent.
    tokio::select! {
        () = &mut serving => {}
        () = drain(&engine) => {}
        () = stops.next() => warn!("a second signal: not waiting for the drain"),
    }
    info!("stopped");
    match engine.lifecycle.failure() {
        Some(why) => Err(anyhow::anyhow!(why)),
        None => Ok(()),
    }
}

/// Serves clients over TLS, with the certificates and roles in effect when they connect.
async fn serve_remote(listener: TlsListener, engine: Rc<Engine>) {
    let config = {
        let engine = Rc::clone(&engine);
        move || engine.tunables().rpc_tls
    };
    let max_clients = engine.settings.rpc.max_clients;
    listener.serve(engine, config, max_clients).await;
}

/// Gives users with a role access to the socket, now and when the roles change.
async fn keep_open(socket: &Socket, engine: &Engine) {
    // Nothing else lives in the default folder.
    let own_folder =
        engine.settings.rpc.socket == "auto" && engine.personality == Personality::Nacre;
    let mut socket_access = engine.calls.socket_access();
    loop {
        let now = *socket_access.borrow_and_update();
        if let Err(error) = socket.set_access(now, own_folder) {
            warn!("users with a role in [rpc.access] may not reach the socket: {error}");
        }
        // The sender lives as long as the engine.
        let _ = socket_access.changed().await;
    }
}

async fn drain(engine: &Rc<Engine>) {
    if tokio::time::timeout(DRAIN_DEADLINE, fini(engine))
        .await
        .is_err()
    {
        error!(
            seconds = DRAIN_DEADLINE.as_secs(),
            "the drain did not end; stopping without it"
        );
    }
    // Leave time to send pending answers.
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// Starts the daemon, then runs until it is cancelled. Returns only if the start fails.
async fn live(engine: &Rc<Engine>, options: &ServeOptions, socket: &Path) -> anyhow::Result<()> {
    let calls = match &options.json_config {
        Some((path, config)) => {
            spdk_file::calls(config).with_context(|| format!("{}", path.display()))?
        }
        None => Vec::new(),
    };
    let startup = |method: &str| {
        engine
            .registry
            .find(method)
            .is_some_and(|m| m.when == When::Startup)
    };
    let (before, after): (Vec<_>, Vec<_>) =
        calls.into_iter().partition(|call| startup(&call.method));
    engine
        .lifecycle
        .more_to_come
        .send_replace(!after.is_empty());
    spdk_file::carry_out(engine, before, options, &[]).await?;
    if options.wait_for_rpc {
        info!(socket = %socket.display(), "waiting for framework_start_init");
    } else if engine.lifecycle.phase() == Phase::Startup {
        // Unless a client has called it already.
        init(engine).await?;
    }
    engine.lifecycle.reached(Phase::Runtime).await;
    hold(engine, true);
    let restored = engine.journal.select(|entry| entry.durable);
    spdk_file::carry_out(engine, after, options, &restored).await?;
    engine.lifecycle.more_to_come.send_replace(false);
    release(engine);
    sandbox::install(engine);
    info!(
        pid = std::process::id(),
        socket = %socket.display(),
        state = %engine.journal.store_path().map_or_else(|| "not kept".into(), |p| p.display().to_string()),
        objects = engine.journal.len(),
        "ready"
    );
    if let Some(experimental) = crate::features::warning(engine) {
        info!("{experimental}");
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::join!(
        watchdog(),
        retry(engine),
        periodic_work(engine),
        keyring::rotation::follow(engine)
    );
    Ok(())
}

/// Holds connecting hosts (`held`) while their subsystems are being created, or admits them; see
/// [`nacre_nvmf::subsystems::Target::hold`].
fn hold(engine: &Engine, held: bool) {
    engine
        .lifecycle
        .holds
        .set(engine.lifecycle.holds.get() + u64::from(held));
    if let Ok(plane) = engine.plane() {
        plane.target.hold(held);
    }
}

/// Admits hosts once the opening of every volume was tried, at the latest after
/// [`VOLUME_PATIENCE`]. A host that is admitted earlier would not find its namespace, and treat it
/// as deleted.
fn release(engine: &Rc<Engine>) {
    let (engine, holds) = (Rc::clone(engine), engine.lifecycle.holds.get());
    tokio::task::spawn_local(async move {
        let tried = crate::services::volumes::wait_until_tried(&engine);
        if tokio::time::timeout(VOLUME_PATIENCE, tried).await.is_err() {
            warn!("hosts are let in although volumes are still being opened");
        }
        // Unless hosts were held again since.
        if engine.lifecycle.holds.get() == holds {
            hold(&engine, false);
        }
    });
}

/// Starts the data plane, then creates all configured objects. Called once.
///
/// A panic becomes an error, and the caller ends the daemon. Otherwise a daemon that waits for
/// `framework_start_init` would stay in [`Phase::Starting`].
pub async fn init(engine: &Rc<Engine>) -> anyhow::Result<()> {
    let starting = AssertUnwindSafe(start(engine)).catch_unwind();
    starting.await.unwrap_or_else(|panic| {
        let said = panic_text(&*panic);
        Err(anyhow::anyhow!("{said}; this is a bug: please report it"))
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let fixed = panic.downcast_ref::<&str>().copied();
    owned.or(fixed).unwrap_or("it panicked")
}

async fn start(engine: &Rc<Engine>) -> anyhow::Result<()> {
    engine.lifecycle.set_phase(Phase::Starting);
    let plane = Plane::start(plane_config(engine)?)?;
    let cores: Vec<String> = plane.reactors.iter().map(|r| r.name().to_owned()).collect();
    info!(
        reactors = cores.join(","),
        mode = engine.settings.reactor.mode.word(),
        "data plane started"
    );
    let options = engine.options.borrow().nvmf.clone();
    let offer = offer(engine, &options);
    plane.target.authentication.set_offer(offer);
    plane.target.hold(true);
    let arrivals = engine.deferred.arrivals();
    let events = engine.devices.follow(&plane.bdevs, arrivals);
    engine.set_plane(Some(Rc::new(plane)));
    tokio::task::spawn_local(crate::services::devices::follow(Rc::clone(engine), events));
    tokio::task::spawn_local(crate::services::devices::watch_files(Rc::clone(engine)));
    tokio::task::spawn_local(crate::services::reservations::store_reservations(
        Rc::clone(engine),
    ));
    tokio::task::spawn_local(crate::services::remotes::follow(Rc::clone(engine)));
    tokio::task::spawn_local(crate::services::drives::follow(Rc::clone(engine)));
    tokio::task::spawn_local(crate::services::drives::watch(Rc::clone(engine)));
    crate::services::volumes::begin(engine).await?;
    let found = engine
        .journal
        .load()
        .await
        .context("reading the stored state")?;
    if found > 0 {
        info!(objects = found, "restoring");
    }
    crate::services::deferred::restore(engine);
    engine.declared.plan(&engine.settings);
    replay_keys(engine).await;
    engine.declared.make_keys(engine).await;
    crate::services::nvme::begin_all(engine, &engine.journal.waiting()).await;
    replay_waiting(engine).await;
    if engine.devices.pools.have_come(&*engine.plane()?) {
        // A disk that joined a pool later comes after the pool in the journal.
        replay_waiting(engine).await;
    }
    crate::services::rdma::soft::make(engine.settings.rdma.rxe.clone()).await;
    engine.declared.make(engine).await;
    engine.listeners.start(engine).await?;
    // Changes made by RPC to declared objects can be replayed only now. Hosts are not admitted yet.
    if engine.declared.has_come() {
        replay_waiting(engine).await;
    }
    crate::services::deferred::run_ready(engine).await;
    if engine.settings.cluster.is_node() {
        crate::services::cluster::start(engine).await?;
    } else {
        crate::services::volumes::open_all(engine);
    }
    if !*engine.lifecycle.more_to_come.borrow() {
        release(engine);
    }
    engine.lifecycle.set_phase(Phase::Runtime);
    if engine.devices.pools.have_come(&*engine.plane()?) {
        crate::services::pools::replay(engine);
    }
    Ok(())
}

/// Replays keys before the hosts and controllers that name them, even if the keys are newer.
async fn replay_keys(engine: &Rc<Engine>) {
    let is_key = |record: &Record| record.key.starts_with(keyring::PREFIX);
    for record in engine.journal.waiting().iter().filter(|one| is_key(one)) {
        engine.replay(record).await;
    }
}

async fn replay_waiting(engine: &Rc<Engine>) {
    for record in engine.journal.waiting() {
        engine.replay(&record).await;
    }
}

/// The first generation counter of the discovery log. It exceeds that of any earlier daemon, unless
/// that daemon made more than `CHANGES_PER_SECOND` changes per second, or the clock was set back.
fn first_generation(now: SystemTime) -> u64 {
    const CHANGES_PER_SECOND: u64 = 1 << 16;
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs().saturating_mul(CHANGES_PER_SECOND).max(1)
}

/// The data plane's configuration from the settings and the startup options.
fn plane_config(engine: &Engine) -> anyhow::Result<PlaneConfig> {
    let (settings, options) = (&engine.settings, engine.options.borrow());
    let mut target = TargetConfig {
        max_subsystems: options
            .nvmf
            .max_subsystems
            .unwrap_or(settings.nvmf.max_subsystems) as usize,
        max_connections: settings.nvmf.max_connections as usize,
        queue_limits: QueueLimits {
            max_io_entries: settings.nvmf.max_queue_depth,
            max_io_queues: settings.nvmf.max_io_qpairs_per_ctrlr,
            ..QueueLimits::default()
        },
        // SPDK's nvmf_tgt listens only on configured addresses.
        discovery_port: (engine.personality == Personality::Nacre
            && settings.nvmf.discovery_port != 0)
            .then_some(settings.nvmf.discovery_port),
        discovery_nqn: configured_nqn(engine),
        discovery_generation: first_generation(SystemTime::now()),
        ..TargetConfig::default()
    };
    for filter in &options.nvmf.discovery_filters {
        match filter {
            DiscoveryFilter::Transport => target.discovery_same_transport = true,
            DiscoveryFilter::Address => target.discovery_same_address = true,
            DiscoveryFilter::Svcid => target.discovery_same_service = true,
        }
    }
    if let Some(delays) = options.nvmf.command_retry_delay {
        target.command_retry_delay = delays;
    }
    Ok(PlaneConfig {
        target,
        ..crate::plane::demand::data_path(settings, &options.iobuf, engine.personality)?
    })
}

/// Hash functions and Diffie-Hellman groups for authentication, in the order of `nvmf_set_config`
/// or of the configuration file. As `nvmf_tgt` the strongest come first, as in SPDK.
pub fn offer(engine: &Engine, options: &NvmfOptions) -> Offer {
    let strongest = engine.personality == Personality::NvmfTgt;
    let mut offer = Offer::default();
    let nvmf = &engine.settings.nvmf;
    // The file was checked.
    if let Ok(hashes) = Offer::hashes_of(&nvmf.dhchap_digests) {
        offer.hashes = hashes;
    }
    if let Ok(groups) = Offer::groups_of(&nvmf.dhchap_dhgroups) {
        offer.groups = groups;
    }
    if let Some(hashes) = &options.hashes {
        offer.hashes = hashes.clone();
    }
    if let Some(groups) = &options.groups {
        offer.groups = groups.clone();
    }
    if strongest {
        offer.hashes.sort_unstable_by(|a, b| b.cmp(a));
        offer.groups.sort_unstable_by(|a, b| b.cmp(a));
    }
    offer
}

/// Closes the objects that [`init`] created, and stops the data plane.
pub async fn fini(engine: &Rc<Engine>) {
    let Ok(plane) = engine.plane() else { return };
    crate::services::cluster::leave(engine).await;
    crate::services::volumes::stop_opening(engine);
    engine.devices.backups.stop().await;
    if !plane.disconnect_hosts(HOST_PATIENCE).await {
        warn!("hosts were still connected when the reactors ended");
    }
    // Volumes close first: writing their last state needs everything else.
    crate::services::volumes::close_all(engine, &plane).await;
    crate::services::pools::close_all(engine).await;
    engine.set_plane(None);
    engine.devices.clear();
    engine.remotes.close().await;
    engine.drives.close().await;
    if !plane.stop(HOST_PATIENCE).await {
        warn!("the reactors did not end in time");
    } else {
        crate::services::devices::known_files::leave(engine, &plane).await;
    }
    engine.rdma.close();
    drop(plane);
    crate::services::volumes::end(engine);
}

/// Retries stored and declared objects that could not be created: every `[data] retry_s` seconds,
/// and when bdevs of remote controllers or drives appear.
async fn retry(engine: &Rc<Engine>) {
    loop {
        let every = match engine.tunables().retry_s {
            0 => {
                engine.tunables_changed().await;
                continue;
            }
            seconds => Duration::from_secs(seconds),
        };
        tokio::select! {
            () = engine.tunables_changed() => continue,
            () = tokio::time::sleep(every) => {}
            // Objects on a remote device or drive that is back need not wait.
            () = engine.remotes.bdevs_appeared() => {}
            () = engine.drives.bdevs_appeared() => {}
        }
        replay_waiting(engine).await;
        if engine.declared.make(engine).await {
            replay_waiting(engine).await;
        }
    }
}

/// Pings systemd's watchdog, if it is enabled, for as long as the management thread runs.
async fn watchdog() {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return std::future::pending().await;
    };
    loop {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
        tokio::time::sleep(limit / 2).await;
    }
}

/// Periodic work: drops expired generated PSKs; reports failed authentications, and dropped events
/// and log lines.
async fn periodic_work(engine: &Engine) {
    loop {
        tokio::time::sleep(PERIODIC_WORK_INTERVAL).await;
        if let Ok(plane) = engine.plane() {
            let generated = &plane.target.authentication.generated;
            generated.sweep(nacre_reactor::Clock::real().now());
        }
        failures::report(engine);
        engine.notes.report_left_out();
        engine.logs.report_left_out();
    }
}

pub fn socket_path(settings: &Settings, personality: Personality) -> PathBuf {
    match (settings.rpc.socket.as_str(), personality) {
        ("auto", Personality::Nacre) => default_socket(),
        ("auto", Personality::NvmfTgt) => PathBuf::from("/var/tmp/spdk.sock"),
        (path, _) => PathBuf::from(path),
    }
}

/// The data directory. `None`: state is not stored.
pub fn state_dir(settings: &Settings, personality: Personality) -> Option<PathBuf> {
    match (settings.data.dir.as_str(), personality) {
        ("none", _) | ("auto", Personality::NvmfTgt) => None,
        ("auto", Personality::Nacre) => files::default_data_dir(),
        (dir, _) => Some(PathBuf::from(dir)),
    }
}

fn audit_log(settings: &Settings, personality: Personality) -> AuditLog {
    let audit = &settings.rpc.audit;
    let path = match audit.file.as_str() {
        "none" => None,
        "auto" => state_dir(settings, personality).map(|dir| dir.join("audit.log")),
        path => Some(PathBuf::from(path)),
    };
    let max_bytes = audit.max_size_mb << 20;
    path.map(|path| AuditLog::to_file(AuditFile::new(path, max_bytes, audit.files)))
        .unwrap_or_default()
}

fn open_store(settings: &Settings, personality: Personality) -> anyhow::Result<Option<Store>> {
    let Some(dir) = state_dir(settings, personality) else {
        if personality == Personality::Nacre && settings.data.dir == "auto" {
            warn!(
                "nothing configured will survive: there is no home directory; name one with --data-dir"
            );
        }
        return Ok(None);
    };
    let store = Store::open(&dir).with_context(|| {
        format!(
            "the state in {}; choose another with --data-dir, or keep none with --data-dir none",
            dir.display()
        )
    })?;
    Ok(Some(store))
}

struct PidFile {
    path: PathBuf,
    inode: Inode,
}

impl PidFile {
    fn write(path: &Path) -> anyhow::Result<Self> {
        let io = || format!("cannot write the pid file {}", path.display());
        let (file, pid) = files::open_pid_file(path).with_context(io)?;
        let metadata = file.metadata().with_context(io)?;
        let theirs = pid.filter(|pid| *pid != std::process::id());
        let written = metadata.modified().with_context(io)?;
        if let Some((pid, name)) = theirs.and_then(|pid| Some((pid, files::writer(pid, written)?)))
        {
            let file = path.display();
            anyhow::bail!(
                "{file} is the pid file of process {pid} ({name}), which runs: name another with --pid-file"
            );
        }
        files::write_pid(&file).with_context(io)?;
        Ok(Self {
            path: path.to_owned(),
            inode: Inode::of(&metadata),
        })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        self.inode.remove(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a new daemon's generation counter exceeds its predecessor's, even one that started a
    /// second ago and changed every 20 us.
    #[test]
    fn a_restart_raises_the_discovery_generation() {
        let started = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let reached = first_generation(started) + 50_000;
        assert!(first_generation(started + Duration::from_secs(1)) > reached);
        // Must be exact in programs that use floating point numbers.
        assert!(first_generation(started) < 1 << 53);
        assert_eq!(first_generation(UNIX_EPOCH - Duration::from_secs(1)), 1);
    }
}
