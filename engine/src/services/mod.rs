//! The services: each owns one kind of the daemon's objects. [`Engine`] owns the services. It is
//! the state that RPC methods work on, and calls enter through it.
//!
//! ```text
//!   methods ─▶ Engine ─┬─ calls        clients, their roles and calls
//!                      ├─ web          the administration page, part of calls
//!                      ├─ alerts       receivers of messages about events
//!                      ├─ volumes      replicated volumes: open, close, events
//!                      ├─ cluster      this node of a cluster
//!                      ├─ pools        storage pools, kept by devices
//!                      ├─ backup       backups of snapshots of pools, kept by devices
//!                      ├─ devices      requested histograms and samples, device events
//!                      ├─ drives       NVMe drives of this machine
//!                      ├─ remotes      namespaces of other machines
//!                      ├─ keyring      keys of hosts, and of this host
//!                      ├─ listeners    addresses that hosts connect to
//!                      ├─ failover     listeners that are inaccessible for a test
//!                      ├─ rdma         RDMA devices
//!                      ├─ nics         counters of network interfaces
//!                      ├─ declared     objects of the configuration file
//!                      └─ deferred     devices whose base does not exist yet
//! ```
//!
//! RPC methods use services. Services do not import methods. A service that needs a method calls it
//! by name, through [`Engine::own_call`] or [`Engine::declared_call`].

pub mod alerts;
pub mod backup;
pub mod bus;
pub mod calls;
pub mod certificates;
pub mod cluster;
pub mod concat;
pub mod declared;
pub mod deferred;
pub mod device_records;
pub mod devices;
pub mod drives;
pub mod failover;
pub mod http_token;
pub mod keyring;
pub mod lifecycle;
pub mod listeners;
pub mod machine;
pub mod nics;
pub mod nvme;
pub mod pools;
pub mod rdma;
pub mod remotes;
pub mod reservations;
pub mod sandbox;
pub mod startup;
pub mod stored_reservation;
pub mod subsystems;
pub mod volumes;
pub mod web;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::{Mutex, Notify, RwLock, RwLockWriteGuard};
use tracing::{debug, warn};

use self::lifecycle::Lifecycle;
use self::reservations::ReservationJobs;
use self::startup::StartupOptions;
use crate::audit::{AuditLog, AuditRecord, redact};
use crate::config::{Personality, Settings};
use crate::journal::{Journal, JournalEntry};
use crate::logs::Logs;
use crate::notify::Notifications;
use crate::plane::Plane;
use crate::rpc::access::{self, Caller};
use crate::rpc::error::Errno;
use crate::rpc::method::CallFuture;
use crate::rpc::secret::SecretJson;
use crate::rpc::server::Dispatch;
use crate::rpc::tls::files::ServerTls;
use crate::rpc::{Order, Registry, RpcError};
use crate::services::alerts::Alerts;
use crate::services::calls::{Calls, Client};
use crate::services::cluster::Cluster;
use crate::services::declared::Declared;
use crate::services::deferred::Deferred;
use crate::services::devices::Devices;
use crate::services::drives::Drives;
use crate::services::http_token::Token;
use crate::services::keyring::Keyring;
use crate::services::listeners::Listeners;
use crate::services::rdma::Rdma;
use crate::services::remotes::Remotes;
use crate::services::volumes::Volumes;
use crate::store::Record;

/// Settings that change when the configuration is reloaded.
#[derive(Debug, Clone)]
pub struct Tunables {
    pub deadline_s: u64,
    pub allowed: Vec<String>,
    pub retry_s: u64,
    /// The content of `[metrics] token_file`.
    pub http_token: Option<Token>,
    /// The certificate of `[metrics.tls]`; `None`: plain HTTP.
    pub http_tls: Option<Arc<ServerTls>>,
    /// The certificate of `[rpc.tls]`; `None`: no listener.
    pub rpc_tls: Option<Arc<ServerTls>>,
}

/// The present settings, and the notification of their changes.
struct CurrentTunables {
    current: RefCell<Tunables>,
    changed: Notify,
}

impl CurrentTunables {
    fn new(tunables: Tunables) -> Self {
        Self {
            current: RefCell::new(tunables),
            changed: Notify::new(),
        }
    }
}

/// Locks that order calls.
#[derive(Debug, Default)]
struct CallLocks {
    /// Changing calls hold it exclusively; reading calls share it. It is fair, so a read waits for
    /// earlier changes.
    gate: RwLock<()>,
    /// Held during a replay, so that no two tasks create the same object.
    replaying: Mutex<()>,
}

/// The state of a daemon. Lives on the management thread.
pub struct Engine {
    pub personality: Personality,
    /// The settings at start; [`Engine::tunables`] has the ones that can change.
    pub settings: Settings,
    pub registry: Registry<Self>,
    pub journal: Journal,
    pub notes: Notifications,
    pub logs: Logs,
    pub lifecycle: Lifecycle,
    tunables: CurrentTunables,
    /// Options set by startup-only methods, before the data plane starts.
    pub options: RefCell<StartupOptions>,
    pub devices: Devices,
    pub declared: Declared,
    pub deferred: Deferred,
    pub keyring: Keyring,
    pub listeners: Listeners,
    pub rdma: Rdma,
    pub remotes: Remotes,
    pub drives: Drives,
    /// Reservations on their way to storage.
    pub reservation_jobs: ReservationJobs,
    pub volumes: Volumes,
    /// The cluster that this daemon is a node of.
    pub cluster: Cluster,
    /// Set by [`Engine::set_plane`] at the start and the end of the data plane.
    plane: RefCell<Option<Rc<Plane>>>,
    locks: CallLocks,
    /// Receivers of messages about events.
    pub alerts: Alerts,
    pub calls: Calls,
}

impl Engine {
    pub fn new(
        personality: Personality,
        settings: Settings,
        logs: Logs,
        journal: Journal,
        registry: Registry<Self>,
        audit: AuditLog,
    ) -> Self {
        Self {
            personality,
            registry,
            journal,
            notes: Notifications::default(),
            logs,
            lifecycle: Lifecycle::default(),
            options: RefCell::default(),
            tunables: CurrentTunables::new(Tunables {
                deadline_s: settings.rpc.deadline_s,
                allowed: settings.rpc.allowed.clone(),
                retry_s: settings.data.retry_s,
                http_token: None,
                http_tls: None,
                rpc_tls: None,
            }),
            calls: Calls::new(&settings.rpc, audit),
            settings,
            devices: Devices::default(),
            declared: Declared::default(),
            deferred: Deferred::default(),
            keyring: Keyring::default(),
            listeners: Listeners::default(),
            rdma: Rdma::default(),
            remotes: Remotes::default(),
            drives: Drives::default(),
            reservation_jobs: ReservationJobs::default(),
            volumes: Volumes::default(),
            cluster: Cluster::default(),
            plane: RefCell::default(),
            locks: CallLocks::default(),
            alerts: Alerts::default(),
        }
    }

    /// The data plane. `EAGAIN` while it does not run; methods that need it cannot be called then.
    pub fn plane(&self) -> Result<Rc<Plane>, RpcError> {
        let plane = self.plane.borrow();
        plane
            .clone()
            .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "the data plane is not running"))
    }

    pub fn set_plane(&self, plane: Option<Rc<Plane>>) -> Option<Rc<Plane>> {
        self.plane.replace(plane)
    }

    /// Waits until the changes that were called earlier have ended.
    pub async fn earlier_changes(&self) {
        drop(self.locks.gate.read().await);
    }

    /// Locks the gate for a changing method of [`Order::Free`]. Such a method holds the gate only
    /// for parts of its work; other calls run between.
    pub async fn changing(&self) -> RwLockWriteGuard<'_, ()> {
        self.locks.gate.write().await
    }

    /// Finds, checks and runs a method for the daemon's own startup files. `ETIMEDOUT` after the
    /// deadline; the change goes on.
    pub async fn call(
        self: &Rc<Self>,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Box<RawValue>, RpcError> {
        let outcome = self.try_call(method, params, Origin::File).await;
        self.called(method, params, &outcome).await;
        outcome
    }

    /// As [`Engine::call`], for a client of a socket: with its role, and with audit records.
    pub async fn call_for(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Box<RawValue>, RpcError> {
        // The rules may have changed since the client connected.
        let client = self.calls.client(caller)?;
        let entry = self.registry.find(method);
        let (record, begun) = match entry.filter(|entry| self.allowed(entry.name)) {
            Some(entry) => self.calls.begin(&client, entry, params).await,
            None => (None, Ok(())),
        };
        let origin = Origin::Client(client.clone(), record.clone());
        let outcome = match begun {
            Ok(()) => self.try_call(method, params, origin).await,
            Err(refused) => Err(refused),
        };
        if let Some(record) = &record {
            self.calls.audit.close(record, &outcome).await;
        }
        self.called(method, params, &outcome).await;
        if calls::is_viewer(&client) {
            calls::for_viewer(self, outcome)
        } else {
            outcome
        }
    }

    async fn called(
        self: &Rc<Self>,
        method: &str,
        params: Option<&RawValue>,
        outcome: &Result<Box<RawValue>, RpcError>,
    ) {
        // The call may name deferred devices whose bases exist by now: create them first.
        deferred::run_ready(self).await;
        self.calls.count(outcome.is_err());
        let changes = self
            .registry
            .find(method)
            .is_some_and(|of| of.changes.in_call(params));
        if changes && outcome.is_ok() {
            self.calls.page.note(method);
        }
        if let Err(error) = outcome {
            // A client may give a key where its name belongs.
            let error = redact::text(&error.to_string());
            debug!(target: "nacre_engine_rpc", method, error, "call refused");
        }
    }

    async fn try_call(
        self: &Rc<Self>,
        method: &str,
        params: Option<&RawValue>,
        origin: Origin,
    ) -> Result<Box<RawValue>, RpcError> {
        let outside = matches!(origin, Origin::File | Origin::Client(..));
        let allowed = |name: &str| !outside || self.allowed(name);
        let entry = self
            .registry
            .find(method)
            .filter(|entry| allowed(entry.name))
            .ok_or_else(|| {
                let unknown =
                    RpcError::method_not_found(format!("there is no method \"{method}\""));
                match crate::values::suggest::closest(
                    method,
                    self.registry.names().filter(|n| self.allowed(n)),
                ) {
                    Some(close) => unknown.remedy(format!("did you mean \"{close}\"?")),
                    None => unknown.remedy("rpc_get_methods lists them all"),
                }
            })?;
        if outside {
            calls::check_phase(self.lifecycle.phase(), entry)?;
        }
        let (order, name) = (entry.order, entry.name);
        let changes = entry.changes.in_call(params);
        let work = entry.call(params, Rc::clone(self))?;
        let engine = Rc::clone(self);
        let part_of = crate::journal::part_of();
        // A separate task: a change that outlives its deadline still completes, so that nothing is
        // left half done.
        let record = match &origin {
            Origin::Client(_, record) => record.clone(),
            _ => None,
        };
        let is_audited = entry.class.is_audited() || record.is_some();
        if let Some(record) = &record {
            record.hand_over();
        }
        let audited = Rc::clone(self);
        let running = async move {
            let _changing;
            let _reading;
            match order {
                Order::Exclusive => _changing = engine.locks.gate.write().await,
                Order::Read => _reading = engine.locks.gate.read().await,
                Order::Free => {}
            }
            match origin {
                Origin::Config => crate::journal::declaring(work).await,
                Origin::Daemon => crate::journal::as_part(part_of, work).await,
                Origin::File | Origin::Client(..) => {
                    // Earlier calls ran first; the daemon may have started by now.
                    if let Some(entry) = engine.registry.find(name) {
                        calls::check_phase(engine.lifecycle.phase(), entry)?;
                    }
                    match origin {
                        Origin::Client(client, _) => access::acting_as(client.actor(), work).await,
                        _ => work.await,
                    }
                }
                Origin::Replay(entry) => {
                    let work = async {
                        engine.refuse_overtaken()?;
                        work.await
                    };
                    let work = crate::journal::replaying(entry.record, work);
                    if entry.durable {
                        work.await
                    } else {
                        crate::journal::declaring(work).await
                    }
                }
            }
        };
        let mut running = tokio::task::spawn_local(async move {
            // The gate is free while the audit log is written.
            let outcome = running.await;
            if let Some(record) = record {
                audited.calls.audit.end(&record, &outcome).await;
            }
            outcome
        });
        match tokio::time::timeout(self.deadline(), &mut running).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panic)) => {
                warn!(method, %panic, "a method failed");
                Err(RpcError::internal(format!("the method failed: {panic}"))
                    .remedy("this is a bug: please report it"))
            }
            Err(_) => {
                let seconds = self.deadline().as_secs();
                let late = format!("{method} has not ended within {seconds} s");
                let cause = if changes {
                    format!("{late}; its change will be completed")
                } else {
                    late
                };
                if !is_audited {
                    // No client waits for the answer, and exclusive calls would wait for this one.
                    running.abort();
                }
                Err(RpcError::errno(Errno::ETIMEDOUT, cause))
            }
        }
    }

    /// Runs a method for the daemon itself, without the allow-list and the phase check.
    pub async fn own_call(
        self: &Rc<Self>,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Box<RawValue>, RpcError> {
        self.try_call(method, params, Origin::Daemon).await
    }

    /// Runs a method for an object that the configuration file declares. The result is not stored.
    pub async fn declared_call(
        self: &Rc<Self>,
        method: &str,
        params: &serde_json::Value,
    ) -> Result<Box<RawValue>, RpcError> {
        let params = serde_json::value::to_raw_value(params)
            .map_err(|e| RpcError::internal(e.to_string()))?;
        self.try_call(method, Some(&params), Origin::Config).await
    }

    /// Fails if the object of a replayed record was deleted, changed or created meanwhile. Methods
    /// of [`Order::Free`] call it after they have locked the gate.
    pub fn refuse_overtaken(&self) -> Result<(), RpcError> {
        if self.journal.is_overtaken() {
            let cause = "the object was deleted, changed or created meanwhile";
            Err(RpcError::errno(Errno::EAGAIN, cause))
        } else {
            Ok(())
        }
    }

    pub fn tunables(&self) -> Tunables {
        self.tunables.current.borrow().clone()
    }

    /// Waits for a change of [`Engine::tunables`].
    pub async fn tunables_changed(&self) {
        self.tunables.changed.notified().await;
    }

    pub fn tune(&self, tunables: Tunables) {
        self.tunables.current.replace(tunables);
        self.tunables.changed.notify_waiters();
    }

    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.tunables.current.borrow().deadline_s)
    }

    pub fn allowed(&self, method: &str) -> bool {
        let allowed = &self.tunables.current.borrow().allowed;
        allowed.is_empty() || allowed.iter().any(|name| name == method)
    }

    /// Creates the object of a stored record again, unless it exists, was deleted, or waits for a
    /// base device. The caller must not hold the gate.
    pub async fn replay(self: &Rc<Self>, record: &Record) {
        use crate::journal::EntryState;
        let _one = self.locks.replaying.lock().await;
        // Find the entry before the call, which makes it live on success. It may have changed since
        // the replay was scheduled.
        let Some(entry) = self.journal.find(&record.key) else {
            return;
        };
        let record = entry.record.clone();
        let again = match entry.state {
            EntryState::Live => return,
            EntryState::Waiting => false,
            EntryState::Failed { .. } => true,
        };
        if self
            .plane()
            .is_ok_and(|plane| deferred::missing_base(&plane, &record).is_some())
        {
            return;
        }
        let outcome = match serde_json::value::to_raw_value(&record.params) {
            Ok(params) => {
                let called = self.try_call(&record.method, Some(&params), Origin::Replay(entry));
                called.await.map(drop)
            }
            Err(error) => Err(RpcError::internal(error.to_string())),
        };
        if outcome.is_ok() {
            deferred::done(self, &record).await;
        }
        let now = self.journal.find(&record.key);
        let waits = now.is_some_and(|e| e.record == record && e.state != EntryState::Live);
        if outcome.is_err() && !waits {
            return;
        }
        // The object may depend on a volume that is being opened, on a declared object, which comes
        // after the stored ones, or on an export. The code that creates the last of them retries.
        let has_more = self.volumes.are_opening() || self.declared.is_coming();
        if let Err(error) = &outcome
            && !again
            && (has_more || self.cluster.is_coming(self))
        {
            debug!(object = record.key, %error, "not restored yet");
            return;
        }
        let kind = if outcome.is_ok() {
            "state_restored"
        } else {
            "state_restore_failed"
        };
        // A repeated failure is not reported again; nor is a success at the first attempt.
        if outcome.is_ok() == again {
            self.notes.send(kind, record.key.clone());
        }
        self.journal.restored(&record.key, outcome);
    }
}

/// The origin of a call.
#[derive(Debug)]
enum Origin {
    /// A client, with the audit record if the call is audited or may change something.
    Client(Client, Option<Rc<AuditRecord>>),
    /// A startup file.
    File,
    Daemon,
    /// The replay of this entry of the journal.
    Replay(JournalEntry),
    /// The configuration file. The result is not stored.
    Config,
}

impl Dispatch for Engine {
    fn admit(&self, caller: &Caller) -> Result<(), RpcError> {
        self.calls.admit(caller)
    }

    fn call(
        self: Rc<Self>,
        caller: Rc<Caller>,
        method: String,
        params: Option<SecretJson>,
    ) -> CallFuture {
        Box::pin(async move { self.call_for(&caller, &method, params.as_deref()).await })
    }
}
