//! A cluster for the examples of `cluster_*`: a real etcd, the daemon "ant" as a node, and "bee", a
//! node without devices.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use nacre_cluster_etcd_members::{Members, program};
use nacre_cluster_node::Node;
use nacre_random_ports::local_port;
use uuid::Uuid;

use crate::config::Settings;
use crate::config::settings::VolumeStoreSettings;
use crate::methods::cluster::init::init;
use crate::methods::cluster::tests::real::start;
use crate::methods::testing::TestDaemon;
use crate::store::Store;

/// Sorts after the random id of "ant".
const BEE: Uuid = Uuid::from_u128(0xff1c_1f0a_3c5b_4f0e_9d5e_0f5d_7b1c_2a32);

pub(super) struct ClusterSession {
    daemon: TestDaemon,
    bee: RefCell<Option<Node>>,
    has_started: Cell<bool>,
    pub(super) endpoint: String,
    /// The port of its listener.
    pub(super) port: String,
    _etcd: Members,
    _dir: tempfile::TempDir,
}

impl ClusterSession {
    /// `None`, which the output says, if the machine has no etcd.
    pub(super) fn start(test: &str) -> Option<Self> {
        let etcd = Members::start(program(test)?, 1, &[]);
        let endpoints = etcd.endpoints().urls.clone();
        let store = VolumeStoreSettings {
            endpoints: endpoints.clone(),
            ..VolumeStoreSettings::default()
        };
        init(&store, "lab", Duration::from_secs(2)).expect("a new cluster");
        let bee = start(&etcd, BEE, "bee");
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings {
            store,
            ..Settings::default()
        };
        // The replicas of volumes are exported on it.
        let port = local_port();
        settings.nvmf.listen = vec![format!("tcp://127.0.0.1:{port}")];
        settings.cluster.name = Some("lab".into());
        settings.cluster.node = Some("ant".into());
        let state = Store::open(&dir.path().join("state")).unwrap();
        Some(Self {
            daemon: TestDaemon::waiting_on(settings, state),
            bee: RefCell::new(Some(bee)),
            has_started: Cell::new(false),
            port: port.to_string(),
            endpoint: endpoints.into_iter().next().expect("one member"),
            _etcd: etcd,
            _dir: dir,
        })
    }

    /// The daemon, ready for a call of this method. The first call starts it. The node "bee" has
    /// ended before it is removed.
    pub(super) fn before(&self, method: &str) -> &TestDaemon {
        if !self.has_started.replace(true) {
            let started = self.daemon.run(crate::daemon::init(&self.daemon.engine));
            started.expect("the node starts");
        }
        if method == "cluster_remove_node" {
            drop(self.bee.take());
        }
        &self.daemon
    }
}
