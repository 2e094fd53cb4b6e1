//! A running node of a cluster: the thread that drives it, and the parts that other threads use.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacre_cluster_core::lease::Word;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{BootTime, VolumeId};
use nacre_cluster_etcd::{Client, Endpoints, Prefix};
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock;
use crate::connection::{connect, thread};
use crate::driver::{Driver, Me, NodeState, Shared};
use crate::error::Error;
use crate::events::Events;
use crate::operator::Operator;
use crate::seen_keys::SeenKeys;
use crate::serving::{Link, Reports, Serving, WAITING};

/// Dropping it does as [`Node::leave`].
pub struct Node {
    shared: Arc<Shared>,
    state: watch::Receiver<NodeState>,
    client: Arc<Client>,
    prefix: Prefix,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Starts the thread. The caller holds the lock of the node's data directory. The node joins
    /// when etcd answers: [`Node::state`] and [`Node::wait`] show it.
    pub fn start(
        endpoints: &Endpoints,
        prefix: Prefix,
        me: Me,
        serving: impl FnOnce(Link) -> Box<dyn Serving>,
    ) -> Result<Self, Error> {
        let (runtime, client) = connect(endpoints, &prefix.meta())?;
        let (sender, state) = watch::channel(NodeState::Joining { obstacle: None });
        let shared = Arc::new(Shared {
            word: Arc::default(),
            incarnation: Arc::default(),
            events: Events::default(),
            renewals: AtomicU64::default(),
            state: sender,
            seen: parking_lot::Mutex::default(),
            volumes: parking_lot::Mutex::default(),
            seen_keys: SeenKeys::default(),
            cluster: OnceLock::new(),
        });
        let (reports, receiver) = mpsc::channel(WAITING);
        let link = Link {
            word: Arc::clone(&shared.word),
            incarnation: Arc::clone(&shared.incarnation),
            reports: Reports(reports),
        };
        let driver = Driver::new(
            me,
            Arc::clone(&client),
            prefix.clone(),
            Arc::clone(&shared),
            serving(link),
        );
        let (end, ended) = oneshot::channel();
        let ending = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("nacre-cluster".to_owned())
            .spawn(move || {
                let _watch = OnPanic(ending);
                runtime.block_on(driver.run(receiver, ended));
                runtime.shutdown_timeout(Duration::ZERO);
            })
            .map_err(thread)?;
        Ok(Self {
            shared,
            state,
            client,
            prefix,
            end: Some(end),
            thread: Some(thread),
        })
    }

    pub fn state(&self) -> NodeState {
        self.state.borrow().clone()
    }

    /// Changes of the state.
    pub fn states(&self) -> watch::Receiver<NodeState> {
        self.state.clone()
    }

    /// Waits until the node has joined or stays out, at most for `limit`.
    pub fn wait(&self, limit: Duration) -> NodeState {
        let end = Instant::now() + limit;
        loop {
            match self.state() {
                NodeState::Joining { .. } if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                state => return state,
            }
        }
    }

    pub fn word(&self) -> &Arc<Word> {
        &self.shared.word
    }

    /// Renewals of the node's leases that etcd has confirmed.
    pub fn renewals(&self) -> u64 {
        self.shared.renewals.load(Ordering::Relaxed)
    }

    /// The time for which the lease is still good; zero without one.
    pub fn lease_left(&self) -> Duration {
        self.shared.word.left(clock::now())
    }

    pub fn events(&self) -> &Events {
        &self.shared.events
    }

    /// The states of the volumes on this node, as of the driver's last turn.
    pub fn volumes(&self) -> Vec<(VolumeId, HoldingState)> {
        self.shared.volumes.lock().clone()
    }

    pub fn operator(&self) -> Operator {
        let shared = Arc::clone(&self.shared);
        Operator::of_node(Arc::clone(&self.client), self.prefix.clone(), shared)
    }

    /// Hands the volumes over, within 6 seconds, deletes the lease, and ends the thread.
    pub fn leave(self) {
        drop(self);
    }
}

/// After a panic, nothing renews the lease. From then on, responses to hosts wait until the
/// replicas confirm this holder.
struct OnPanic(Arc<Shared>);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.word.set(BootTime::default());
            let why = "it panicked".to_owned();
            let why = Error::Thread { why };
            self.0.state.send_replace(NodeState::Out { why });
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic.
            let _ = thread.join();
        }
    }
}
