//! Tests of a node's part for hosts, without etcd. Method: a daemon as a node of a cluster that
//! never answers; the test calls it as the cluster's thread does.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::volume::{Ana, HoldingState};
use nacre_cluster_core::{ExportId, Record, VolumeId};
use nacre_cluster_node::{Publication, Serving, VolumeRole};
use nacre_nvmf::subsystems::Subsystem;
use nacre_nvmf_wire::Nqn;
use serde_json::json;
use uuid::Uuid;

use super::Running;
use super::inbox::Sender;
use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::services::Tunables;
use crate::store::Store;

const HOST: &str = "nqn.2026-01.org.example:host";
const OTHER: &str = "nqn.2026-01.org.example:other";
const PATIENCE: Duration = Duration::from_secs(20);
const VOLUME: VolumeId = VolumeId(Uuid::from_u128(7));

/// A node whose etcd is silent.
struct TestNode {
    daemon: TestDaemon,
    running: Rc<Running>,
    dir: tempfile::TempDir,
}

impl TestNode {
    fn start() -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"))
    }

    /// Starts the node whose data directory this is.
    fn start_in(dir: tempfile::TempDir) -> Self {
        let mut settings = Settings::default();
        settings.cluster.name = Some("lab".to_owned());
        // The discard port.
        settings.store.endpoints = vec!["http://127.0.0.1:9".to_owned()];
        let store = Store::open(dir.path()).expect("a store");
        let daemon = TestDaemon::with(settings, Some(store));
        let running = daemon.engine.cluster.running().expect("a node");
        Self {
            daemon,
            running,
            dir,
        }
    }

    /// The daemon ends, and another one starts in its data directory.
    fn restart(self) -> Self {
        let Self {
            daemon,
            running,
            dir,
        } = self;
        drop((daemon, running));
        Self::start_in(dir)
    }

    /// The exports of this node in etcd: the number of each, its NSID, and `there` or `gone`.
    fn exports(&self, exports: &[(u128, u32, &str)]) {
        let export = |(id, nsid, want): &(u128, u32, &str)| {
            let value = json!({
                "v": 1, "volume": VOLUME.0, "device": format!("ram{id}"), "nsid": nsid,
                "want": want, "is": "making",
            });
            let export = serde_json::from_value(value).expect("an export");
            (ExportId(Uuid::from_u128(*id)), export)
        };
        let exports = exports.iter().map(export).collect();
        self.sender().exports(&exports);
    }

    /// The NSIDs of the node's exports that have a namespace.
    fn nsids(&self) -> Vec<u32> {
        let subsystem = self.running.exports.nqn().and_then(|nqn| {
            let plane = self.daemon.engine.plane().expect("a plane");
            let nqn = Nqn::new(&nqn).expect("a name");
            plane.target.subsystem(&nqn).ok()
        });
        let namespaces = subsystem.map(|subsystem| subsystem.namespaces());
        let namespaces = namespaces.into_iter().flatten();
        namespaces.map(|entry| entry.namespace.nsid).collect()
    }

    /// The record of the volume arrives. Another node has served it.
    fn record(&self) {
        let limits = json!({
            "max_blocks": 8, "max_unmap_blocks": 8, "atomic_blocks": 1, "lend_blocks": 0,
            "read_only": false,
        });
        let value = json!({
            "id": VOLUME.0, "name": "ant", "block_size": 512, "blocks": 8, "region_shift": 20,
            "epoch": 1, "serving": 1, "revision": 1, "holder": null, "members": [],
            "limits": limits,
        });
        let role = VolumeRole {
            state: HoldingState::Standby,
            ana: Ana::Inaccessible,
            holder: None,
            record: Record {
                epoch: 1,
                serving: 1,
                holder: None,
                next: None,
                replicas: ArrayVec::new(),
            },
            value: Arc::new(value),
        };
        self.sender().show(VOLUME, &role);
    }

    fn sender(&self) -> Sender {
        Sender(Arc::clone(&self.running.inbox))
    }

    /// Shows the volume on this node, to these hosts. `None`: no more.
    fn publish(&self, hosts: Option<&[&str]>) {
        let publication = hosts.map(|hosts| {
            let mut publication = Publication::new(VOLUME);
            publication.slots.assign(self.running.me);
            publication.hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            publication
        });
        self.sender().publish(VOLUME, publication.as_ref());
    }

    fn nqn(&self) -> String {
        Publication::new(VOLUME).nqn
    }

    fn subsystem(&self) -> Option<Arc<Subsystem>> {
        let nqn = Nqn::new(&self.nqn()).expect("a name");
        let plane = self.daemon.engine.plane().expect("a plane");
        plane.target.subsystem(&nqn).ok()
    }

    fn hosts(&self) -> Vec<String> {
        let hosts = self.subsystem().map(|subsystem| subsystem.hosts());
        hosts.iter().flatten().map(Nqn::to_string).collect()
    }

    fn is_behind(&self) -> bool {
        self.sender().behind() == [VOLUME]
    }

    /// Why the publication is not in effect.
    fn cause(&self) -> Option<String> {
        let causes = self.sender().causes();
        causes.get(&VOLUME)?.why.clone()
    }

    #[track_caller]
    fn until(&self, what: &str, is_met: impl Fn() -> bool) {
        self.daemon.run(async {
            let wait = async {
                while !is_met() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let met = tokio::time::timeout(PATIENCE, wait).await;
            assert!(met.is_ok(), "never {what}");
        });
    }
}

/// Goal: a node that could not withdraw a volume tries it again, until nothing is left of it; it
/// confirms the end of the publication only then, and says the cause. Method: another call has the
/// gate for longer than a call may take, so that the deletion of the subsystem fails; the volume
/// stays, or is deleted.
#[test]
fn a_failed_withdrawal_is_tried_again() {
    for is_deleted in [false, true] {
        let node = TestNode::start();
        let (engine, running) = (&node.daemon.engine, &node.running);
        let is_shown = || running.shown.borrow().contains_key(&VOLUME);
        node.record();
        node.publish(Some(&[]));
        node.until("shown", || !node.is_behind() && is_shown());

        let gate = node.daemon.run(engine.changing());
        let usual = engine.tunables();
        engine.tune(Tunables {
            deadline_s: 0,
            ..usual.clone()
        });
        node.publish(None);
        if is_deleted {
            node.sender().forget(VOLUME);
        }
        node.until("withdrawn in vain", || node.cause().is_some());
        let cause = node.cause().expect("its withdrawal failed");
        assert!(cause.contains("nvmf_delete_subsystem"), "{cause}");
        assert!(node.is_behind() && is_shown() && node.subsystem().is_some());

        engine.tune(usual);
        drop(gate);
        node.until("gone", || node.subsystem().is_none() && !is_shown());
        node.until("confirmed", || !node.is_behind());
        // The task of a volume that is not deleted goes on.
        let has_task = || running.tasks.borrow().contains_key(&VOLUME);
        node.until("forgotten", || has_task() != is_deleted);
    }
}

/// Goal: a host that the publication does not name is refused at once, with the remedy, and so is
/// any host; the cluster's own calls are not. A host that an earlier daemon allowed by hand is
/// removed. Method: calls of a client, and one that is no client's, beside the publication.
#[test]
fn hosts_allowed_by_hand() {
    let node = TestNode::start();
    node.record();
    node.publish(Some(&[HOST]));
    node.until("shown", || !node.is_behind() && node.hosts() == [HOST]);
    let nqn = node.nqn();
    let add = |host: &str| json!({ "nqn": nqn, "host": host });
    let refused = node.daemon.refused("nvmf_subsystem_add_host", add(OTHER));
    assert_eq!(refused.message, "Operation not permitted");
    let text = refused.to_string();
    for part in [OTHER, "\"ant\"", "publish the volume again"] {
        assert!(text.contains(part), "{text}");
    }
    let any = json!({ "nqn": nqn, "allow_any_host": true });
    let refused = node.daemon.refused("nvmf_subsystem_allow_any_host", any);
    assert!(refused.to_string().contains("any host"), "{refused}");
    assert_eq!(node.hosts(), [HOST]);

    // As the record of an earlier daemon, which is replayed.
    let added = node.daemon.run(async {
        let add = add(OTHER);
        let call = node
            .daemon
            .engine
            .declared_call("nvmf_subsystem_add_host", &add);
        call.await.map(drop)
    });
    added.expect("it is allowed");
    node.publish(Some(&[HOST]));
    node.until("removed", || !node.is_behind() && node.hosts() == [HOST]);

    // Other subsystems are the operator's.
    let own = "nqn.2026-01.org.example:disk";
    let create = json!({ "nqn": own });
    node.daemon.call("nvmf_create_subsystem", create);
    let by_hand = json!({ "nqn": own, "host": OTHER });
    node.daemon.call("nvmf_subsystem_add_host", by_hand);
}

/// Goal: the NSID of an export that has ended is not given to another device after a restart, as a
/// host may know it. Method: exports that end and begin before and after restarts, also one whose
/// NSID etcd never had.
#[test]
fn namespace_ids_over_a_restart() {
    let mut node = TestNode::start();
    for id in 1..=5 {
        let ram = json!({ "name": format!("ram{id}"), "block_size": 512, "num_blocks": 2048 });
        node.daemon.call("bdev_malloc_create", ram);
    }
    node.exports(&[(1, 0, "there"), (2, 0, "there")]);
    node.until("two", || node.nsids() == [1, 2]);
    node.exports(&[(1, 1, "there"), (2, 2, "gone")]);
    node.until("one", || node.nsids() == [1]);
    node.exports(&[(1, 1, "there")]);

    node = node.restart();
    node.exports(&[(1, 1, "there"), (3, 0, "there")]);
    node.until("another one", || node.nsids() == [1, 3]);
    node = node.restart();
    node.exports(&[(1, 1, "there"), (4, 0, "there")]);
    node.until("the fourth", || node.nsids().contains(&4));

    // A disk that cannot note NSIDs keeps no replica away.
    let file = node.dir.path().join("export-nsid");
    std::fs::remove_file(&file).expect("it is there");
    std::fs::create_dir_all(file.join("in the way")).expect("a folder");
    node.exports(&[(1, 1, "there"), (4, 4, "there"), (5, 0, "there")]);
    node.until("the fifth", || node.nsids().contains(&5));
}
