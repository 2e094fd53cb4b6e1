//! The remote controllers that this daemon is attached to, and the bdevs of their namespaces.
//!
//! ```text
//!   bdev_nvme_attach_controller ──▶ Plan ── begin ──▶ Attachment, polled by one reactor
//!        (methods/bdev/nvme)      (plan.rs)              │ its status changed
//!                                                        ▼
//!                                    follow: devices registered, resized, removed; events sent
//! ```
//!
//! Failed connections are retried. When the bdevs appear, the objects stacked on them are restored
//! from the journal.

pub mod discovery;
mod plan;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_nvmf::auth::KeySource;
use nacre_nvmf::tls::Suite;
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_remote::{Attachment, Changes, MAX_PATHS, Path, State, Status};
use nacre_transport_connect::{Rdma, RdmaTuning, Source};
use nacre_transport_rdma_verbs::{ProtectionDomain, VerbsError};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::config::replication::Replication;
use crate::plane::{Plane, admin_pool};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

pub use crate::attach::{attach_params, default_name};
pub use plan::{
    Authentication, PathPsk, PlanError, RemotePlan, RemoteTls, Timeouts, WantedController, resolve,
};

/// Time limit for an orderly shutdown of the controllers.
const PATIENCE: Duration = Duration::from_secs(2);

/// An attached subsystem, on the management thread.
pub struct Remote {
    pub attachment: Arc<Attachment>,
    /// In the order of their attachment; never empty.
    paths: RefCell<Vec<Rc<RemotePath>>>,
}

/// A path to an attached subsystem: one controller on it.
pub struct RemotePath {
    pub path: Path,
    /// The parameters as requested, for replies.
    pub wanted: WantedController,
    psk: PathPsk,
    source: Source,
    /// Start of the attempt; the time limit of the first connection counts from here.
    pub begun: Instant,
    reported: RefCell<Status>,
}

#[derive(Default)]
pub struct Remotes {
    all: RefCell<BTreeMap<String, Rc<Remote>>>,
    rdma: RefCell<Option<Arc<Rdma>>>,
    /// Index of the reactor that polls the next controller.
    next: Cell<usize>,
    /// Notified when the status of a controller changes.
    changed: Arc<Notify>,
    bdevs_appeared: Notify,
    pub discoveries: discovery::Discoveries,
    /// Notified after status changes were handled.
    pub handled: Notify,
}

impl Remotes {
    pub fn find(&self, name: &str) -> Option<Rc<Remote>> {
        self.all.borrow().get(name).cloned()
    }

    /// All attached subsystems, by controller name.
    pub fn list(&self) -> Vec<(String, Rc<Remote>)> {
        let all = self.all.borrow();
        all.iter()
            .map(|(name, remote)| (name.clone(), Rc::clone(remote)))
            .collect()
    }

    /// Takes a subsystem out of the list; the caller removes its bdevs and closes its connections.
    pub fn take(&self, name: &str) -> Option<Rc<Remote>> {
        self.all.borrow_mut().remove(name)
    }

    /// Resolves when new bdevs have been registered.
    pub async fn bdevs_appeared(&self) {
        self.bdevs_appeared.notified().await;
    }

    /// Begins to connect a path: the first of its name, or a further one (`ENOSPC` beyond
    /// [`MAX_PATHS`]). Does not wait for the connection.
    pub async fn begin(
        &self,
        engine: &Engine,
        plan: RemotePlan,
    ) -> Result<(Rc<Remote>, Rc<RemotePath>), RpcError> {
        let plane = engine.plane()?;
        let name = plan.config.name.clone();
        let found = self.find(&name);
        let (attachment, path) = match &found {
            Some(remote) => {
                let attachment = Arc::clone(&remote.attachment);
                let path = attachment.add_path(plan.config, plan.connector);
                let full = || {
                    let cause = format!("\"{name}\" has {MAX_PATHS} paths, which is the most");
                    RpcError::errno(Errno::ENOSPC, cause).field("name")
                };
                let path = path.ok_or_else(full)?;
                (attachment, path)
            }
            None => {
                let changed = Arc::clone(&self.changed);
                // `Notify` keeps a notification that arrives while no task waits.
                let on_change = move || changed.notify_one();
                let attachment = Arc::new(Attachment::new(plan.config, plan.connector, on_change));
                let path = attachment.path();
                (attachment, path)
            }
        };
        let path = Rc::new(RemotePath {
            reported: RefCell::new(path.status()),
            path,
            wanted: plan.wanted,
            psk: plan.psk,
            source: plan.source,
            begun: Instant::now(),
        });
        let remote = match found {
            Some(remote) => {
                remote.paths.borrow_mut().push(Rc::clone(&path));
                remote
            }
            None => {
                let paths = RefCell::new(vec![Rc::clone(&path)]);
                let remote = Rc::new(Remote { attachment, paths });
                self.all
                    .borrow_mut()
                    .insert(name.clone(), Rc::clone(&remote));
                remote
            }
        };
        if let Err(error) = self.poll(&plane, path.path.clone()).await {
            if !remote.remove(&path) {
                self.take(&name);
            }
            return Err(RpcError::internal(error));
        }
        Ok((remote, path))
    }

    /// Makes a reactor poll the controller of a path.
    async fn poll(&self, plane: &Plane, path: Path) -> Result<(), String> {
        let at = self.next.get();
        self.next.set(at + 1);
        let reactor = &plane.reactors[at % plane.reactors.len()];
        let polled = reactor.run(move |core| -> Result<(), String> {
            let pool = admin_pool().ok_or("the reactor has no memory")?;
            let waker = core.handle().waker();
            let wake = move || waker.wake();
            let poller = path
                .poller(pool, Some(core.clone()), wake, core.now())
                .map_err(|error| error.to_string())?;
            let added = core.add_poller(Box::new(poller));
            added.map(drop).map_err(|error| error.to_string())
        });
        polled.await.map_err(|error| error.to_string())?
    }

    /// The RDMA resources shared by all controllers, with the memory of the data path.
    pub fn rdma(
        &self,
        provider: Arc<dyn nacre_transport_rdma_verbs::Provider>,
        plane: &Plane,
        replication: &Replication,
    ) -> Arc<Rdma> {
        let tuning = RdmaTuning {
            entries: plan::ENTRIES,
            cm_timeout: replication.cm_timeout(),
        };
        let absence = || VerbsError::Unavailable {
            what: "No RDMA devices found".into(),
            remedy: "`nacre doctor` names the reason".into(),
        };
        let made = || {
            let rdma = Rdma::over(provider, Box::new(absence), tuning);
            let rdma = rdma.inline_up_to(replication.max_inline_data);
            Arc::new(rdma.with_memory(plane.arenas.clone()))
        };
        Arc::clone(self.rdma.borrow_mut().get_or_insert_with(made))
    }

    /// The protection domains of the RDMA devices over which controllers are connected.
    pub fn rdma_domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        let rdma = self.rdma.borrow();
        rdma.as_ref().map_or(Vec::new(), |rdma| rdma.domains())
    }

    /// Shuts down all controllers; waits at most [`PATIENCE`].
    pub async fn close(&self) {
        self.discoveries.close(close_deadline()).await;
        let all = std::mem::take(&mut *self.all.borrow_mut());
        for remote in all.values() {
            remote.attachment.close();
        }
        let deadline = tokio::time::Instant::now() + PATIENCE;
        for remote in all.values() {
            for path in remote.paths() {
                closed(&path.path, deadline).await;
            }
        }
        self.rdma.replace(None);
    }
}

/// Waits until the controller is shut down, or until `deadline`: an unreachable target confirms
/// nothing.
pub async fn closed(path: &Path, deadline: tokio::time::Instant) {
    while !matches!(path.status().state, State::Closed | State::Failed(_))
        && tokio::time::Instant::now() < deadline
    {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Deadline for the shutdown of a detached controller.
pub fn close_deadline() -> tokio::time::Instant {
    tokio::time::Instant::now() + PATIENCE
}

/// Handles status changes of attached controllers until the data plane ends.
pub async fn follow(engine: Rc<Engine>) {
    let changed = Arc::clone(&engine.remotes.changed);
    let mut again: Option<Duration> = None;
    loop {
        let later = async {
            match again {
                Some(after) => tokio::time::sleep(after).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed.notified() => {}
            () = later => {}
        }
        let Ok(plane) = engine.plane() else { return };
        again = None;
        for (name, remote) in engine.remotes.list() {
            let changes = remote.sync(&engine, &plane, &name);
            again = match (again, changes) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        engine.remotes.handled.notify_waiters();
    }
}

impl Remote {
    /// Its paths, in the order of their attachment.
    pub fn paths(&self) -> Vec<Rc<RemotePath>> {
        self.paths.borrow().clone()
    }

    /// The first path.
    pub fn path(&self) -> Rc<RemotePath> {
        Rc::clone(&self.paths.borrow()[0])
    }

    /// Removes a path; its queues complete their I/O in flight. The caller closes it. Returns false
    /// for the last path, which is not removed.
    pub fn remove(&self, path: &Rc<RemotePath>) -> bool {
        let removed = self.attachment.remove_path(&path.path);
        if removed {
            self.paths.borrow_mut().retain(|one| !Rc::ptr_eq(one, path));
        }
        removed
    }

    /// Updates the bdevs from the namespaces of the paths, and reports changes. Returns the delay
    /// after which to call again, if that is needed.
    pub fn sync(&self, engine: &Rc<Engine>, plane: &Plane, name: &str) -> Option<Duration> {
        let paths = self.paths();
        for path in &paths {
            let shown = match &paths[..] {
                [_] => name.to_owned(),
                _ => format!("{name} by {}", path.wanted.address),
            };
            path.report_changes(engine, &shown);
        }
        let Changes {
            added,
            resized,
            removed,
            refused,
            again,
        } = self.attachment.sync(&plane.bdevs, Instant::now());
        for device in &added {
            info!(controller = name, device, "a remote namespace is a device");
        }
        for (device, blocks) in resized {
            info!(device, blocks, "a remote namespace has another size");
        }
        for (device, _) in removed {
            warn!(device, "a remote namespace is gone");
        }
        for (device, why) in refused {
            warn!(device, why, "a remote namespace is not used");
            engine
                .notes
                .send("remote_refused", format!("{device}: {why}"));
        }
        if !added.is_empty() {
            engine.remotes.bdevs_appeared.notify_one();
        }
        again
    }
}

/// The protection of a path's connections.
#[derive(Debug, Default)]
pub struct PathSecurity {
    /// `None`: the connections are in clear.
    pub suite: Option<Suite>,
    /// Name of the configured PSK in use.
    pub psk: Option<String>,
    /// Name of the key with which this host authenticated itself.
    pub dhchap_key: Option<String>,
}

impl RemotePath {
    /// The protection of the present connections; a path without connections has none.
    pub fn security(&self) -> PathSecurity {
        let status = self.path.status();
        if status.state != State::Live {
            return PathSecurity::default();
        }
        let is_tcp = status.transport == TransportType::Tcp;
        let suite = self.psk.suite().filter(|_| is_tcp);
        let psk = match &self.wanted.tls {
            RemoteTls::Psk(psk) => psk.name().filter(|_| suite.is_some()),
            RemoteTls::Off | RemoteTls::Concatenated => None,
        };
        let is_authenticated = self.path.link().is_authenticated;
        let keys: &dyn KeySource = &*self.wanted.authentication.keys;
        PathSecurity {
            suite,
            psk,
            dhchap_key: keys.names().0.filter(|_| is_authenticated),
        }
    }

    fn report_changes(&self, engine: &Rc<Engine>, name: &str) {
        let status = self.path.status();
        let before = self.reported.replace(status.clone());
        self.report(engine, name, &before, &status);
        if before.state == State::Live && status.state != State::Live {
            self.look_for_source(engine);
        }
    }

    fn report(&self, engine: &Engine, name: &str, before: &Status, now: &Status) {
        let why = || match now.state.error() {
            Some(error) => format!("{name}: {error}"),
            None => name.to_owned(),
        };
        if now.losses > before.losses {
            engine.notes.send("remote_lost", why());
        }
        if now.connects > before.connects {
            engine
                .notes
                .send("remote_connected", format!("{name}: {}", now.transport));
            let (was, is) = (before.transport, now.transport);
            if was == TransportType::Rdma && is == TransportType::Tcp {
                engine
                    .notes
                    .send("transport_downgraded", format!("{name}: {}", now.causes));
            } else if was == TransportType::Tcp && is == TransportType::Rdma {
                engine.notes.send("transport_restored", name);
            }
        }
        let failed = |state: &State| matches!(state, State::Failed(_));
        if failed(&now.state) && !failed(&before.state) {
            engine.notes.send("remote_failed", why());
        }
    }

    /// Selects the source address again for the next connection: the interface may have another
    /// address.
    fn look_for_source(&self, engine: &Rc<Engine>) {
        let selectors = match self.wanted.hostaddr {
            Some(_) => return,
            None => engine.settings.replication.iface.clone(),
        };
        let (target, source) = (self.wanted.address.ip(), self.source.clone());
        if !selectors.is_empty() {
            tokio::task::spawn_blocking(move || match plan::source(&selectors, target) {
                Ok(found) => source.set(found),
                Err(error) => warn!(%error, "connections begin where they did before"),
            });
        }
    }
}

impl From<PlanError> for RpcError {
    fn from(error: PlanError) -> Self {
        let cause = error.to_string();
        let (errno, field) = match &error {
            PlanError::Resolve(_) => (Errno::ENOENT, "traddr"),
            PlanError::NoSource { .. } => (Errno::ENODEV, "hostaddr"),
            PlanError::Rdma(_) => (Errno::ENODEV, "trtype"),
            PlanError::Digests => (Errno::EINVAL, "hdgst"),
            PlanError::Identity(_) => (Errno::EINVAL, "hostnqn"),
            PlanError::Psk(_) => (Errno::EINVAL, "psk"),
        };
        Self::errno(errno, cause).field(field)
    }
}
