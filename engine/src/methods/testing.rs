//! The daemon's management plane for tests: an engine without sockets, files or a second thread.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev_replica::store::VolumeStore;
use nacre_transport_rdma_verbs::sim::Fabric;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::LocalSet;

use crate::audit::AuditLog;
use crate::config::Personality;
use crate::config::Settings;
use crate::journal::Journal;
use crate::logs::Logs;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::drives::Drives;
use crate::services::lifecycle::Phase;
use crate::services::rdma::Rdma;
use crate::store::Store;

pub struct TestDaemon {
    pub engine: Rc<Engine>,
    /// The simulated RDMA devices of this daemon; none until a test adds some.
    pub fabric: Fabric,
    runtime: Runtime,
    local: LocalSet,
}

/// An initialized daemon with default settings and no objects.
pub fn test_daemon() -> TestDaemon {
    TestDaemon::with(Settings::default(), None)
}

impl TestDaemon {
    pub fn with(settings: Settings, store: Option<Store>) -> Self {
        let daemon = Self::not_started(settings, store);
        daemon
            .run(crate::daemon::init(&daemon.engine))
            .expect("the daemon starts");
        daemon
    }

    /// Uses the given volume store.
    pub fn with_volumes(store: Option<Store>, volumes: Arc<dyn VolumeStore>) -> Self {
        let daemon = Self::not_started(Settings::default(), store);
        daemon.engine.volumes.use_store(volumes);
        daemon
            .run(crate::daemon::init(&daemon.engine))
            .expect("the daemon starts");
        daemon
    }

    /// Uses the given drives.
    pub fn with_drives(settings: Settings, store: Option<Store>, drives: Drives) -> Self {
        let mut daemon = Self::not_started(settings, store);
        let engine = Rc::get_mut(&mut daemon.engine).expect("not shared yet");
        engine.drives = drives;
        daemon
            .run(crate::daemon::init(&daemon.engine))
            .expect("the daemon starts");
        daemon
    }

    /// A daemon that waits for `framework_start_init`.
    pub fn waiting() -> Self {
        Self::waiting_with(Settings::default())
    }

    /// As [`TestDaemon::waiting_with`], with a state.
    pub fn waiting_on(settings: Settings, store: Store) -> Self {
        Self::not_started(settings, Some(store))
    }

    pub fn waiting_with(settings: Settings) -> Self {
        Self::not_started(settings, None)
    }

    /// An initialized daemon that was started as SPDK's `nvmf_tgt`.
    pub fn nvmf_tgt() -> Self {
        let mut daemon = Self::waiting();
        let engine = Rc::get_mut(&mut daemon.engine).expect("not shared yet");
        engine.personality = Personality::NvmfTgt;
        daemon
            .run(crate::daemon::init(&daemon.engine))
            .expect("the daemon starts");
        daemon
    }

    /// Writes calls of clients to an audit log.
    pub fn audited(settings: Settings, audit: AuditLog) -> Self {
        let mut daemon = Self::not_started(settings, None);
        let engine = Rc::get_mut(&mut daemon.engine).expect("not shared yet");
        engine.calls.audit = audit;
        daemon
            .run(crate::daemon::init(&daemon.engine))
            .expect("the daemon starts");
        daemon
    }

    fn not_started(mut settings: Settings, store: Option<Store>) -> Self {
        settings.reactor.cores = "auto:1".into();
        settings.memory.size_mb = 16;
        settings.rdma.max_qpairs = 8;
        settings.rdma.srq_size = 64;
        // Tests run in parallel on one address.
        settings.nvmf.discovery_port = 0;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let logs = Logs::detached(&settings.log).expect("known flags");
        let journal = Journal::new(store);
        let registry = super::all();
        let mut engine = Engine::new(
            Personality::Nacre,
            settings,
            logs,
            journal,
            registry,
            AuditLog::default(),
        );
        let fabric = Fabric::new();
        engine.rdma = Rdma::with(fabric.provider());
        Self {
            engine: Rc::new(engine),
            fabric,
            runtime,
            local: LocalSet::new(),
        }
    }

    pub fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.local.block_on(&self.runtime, work)
    }

    /// Makes a call; null `params` are left out.
    pub fn try_call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        let raw = (!params.is_null())
            .then(|| serde_json::value::to_raw_value(&params).expect("plain data"));
        let answer = self.run(self.engine.call(method, raw.as_deref()))?;
        Ok(serde_json::from_str(answer.get()).expect("an answer is JSON"))
    }

    #[track_caller]
    pub fn call(&self, method: &str, params: Value) -> Value {
        self.try_call(method, params.clone())
            .unwrap_or_else(|e| panic!("{method} {params}: {e}"))
    }

    #[track_caller]
    pub fn refused(&self, method: &str, params: Value) -> RpcError {
        match self.try_call(method, params.clone()) {
            Ok(answer) => panic!("{method} {params} was not refused but answered {answer}"),
            Err(error) => {
                let facts = error.data.iter();
                let repeated = facts
                    .filter_map(|facts| Some((facts.field.as_ref()?, &facts.cause)))
                    .find(|(field, cause)| cause.starts_with(&format!("{field}: ")));
                assert_eq!(repeated, None, "the cause repeats the field");
                error
            }
        }
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.engine.lifecycle.set_phase(Phase::Stopping);
        self.run(crate::daemon::fini(&self.engine));
    }
}
