//! The start of a node, and its return after a fence: it reads the cluster's key, creates its
//! lease, and writes its description.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_cluster_core::join::{Found, InUse, JoinStep};
use nacre_cluster_core::{BootTime, Holder, Incarnation, Join, Transaction};
use nacre_cluster_etcd::{Error as Said, LeaseKey, Outcome};
use tokio::time::sleep;

use super::{AGAIN, Again, Done, Driver, NodeState, Phase, no_record};
use crate::error::Error;
use crate::events::Decision;
use crate::keys;

impl Driver {
    pub(super) fn look_for_cluster(&mut self) {
        let (client, prefix) = (Arc::clone(&self.client), self.prefix.clone());
        let node = self.me.id;
        self.jobs.spawn(async move {
            let checked = client.check_version().await;
            if let Err(said) = checked.map_err(Error::at(&prefix.meta())) {
                return Done::Cluster(Err(said));
            }
            let found = keys::Cluster::read(&client, &prefix).await;
            if found.is_ok()
                && let Err(error) = keys::has_room(&client, &prefix, node).await
            {
                return Done::Cluster(Err(error));
            }
            Done::Cluster(found)
        });
    }

    pub(super) fn join_step(&mut self, step: JoinStep) {
        let (leases, node) = (Arc::clone(&self.leases), self.me.id);
        match step {
            JoinStep::Look => {
                self.jobs
                    .spawn(async move { Done::Found(leases.read(node).await) });
            }
            JoinStep::Create(create) => {
                let answer = async move { leases.execute(&create, no_record).await };
                self.jobs.spawn(async move { Done::Created(answer.await) });
            }
            JoinStep::Replace(replace) => {
                let answer = async move { leases.execute(&replace, no_record).await };
                self.jobs.spawn(async move { Done::Replaced(answer.await) });
            }
        }
    }

    pub(super) fn obstructed(&self, error: Error) {
        let obstacle = Some(error);
        self.shared
            .state
            .send_replace(NodeState::Joining { obstacle });
    }

    pub(super) fn found_cluster(&mut self, answer: Result<keys::Cluster, Error>, now: BootTime) {
        let Phase::Looking { .. } = self.phase else {
            return;
        };
        let answer = answer.map_err(|error| error.of_node(self.me.cluster));
        let found = answer.and_then(|cluster| {
            let timing = cluster.timing()?;
            Ok((timing, cluster.id, cluster.store()))
        });
        match found {
            Ok((timing, found, store)) => {
                let expected = *self.me.cluster.get_or_insert(found);
                let _ = self.shared.cluster.set(expected);
                if expected != found {
                    let key = self.prefix.meta();
                    return self.exclude(Error::OtherCluster {
                        key,
                        expected,
                        found,
                    });
                }
                // By its revisions alone, a restored etcd may be later than the former one.
                let former = self.store.replace(store);
                if self.is_other_store || former.is_some_and(|former| former != store) {
                    self.begin_anew();
                }
                self.shared.seen_keys.found(store);
                self.nodes.set_timing(timing, now);
                self.volumes.serving().lease(timing.lease());
                self.phase = Phase::Joining(Join::new(self.me.id, timing));
            }
            // Also a cluster that is created, restored or rebuilt later.
            Err(error) if error.is_passing() || matches!(error, Error::NoCluster { .. }) => {
                self.phase = Phase::Looking {
                    not_before: now + AGAIN,
                    is_asked: false,
                };
                self.obstructed(error);
            }
            Err(error) => self.exclude(error),
        }
    }

    fn exclude(&mut self, why: Error) {
        let text = why.to_string();
        self.shared
            .events
            .note(Decision::NodeExcluded { why: text });
        self.phase = Phase::Out;
        self.shared.state.send_replace(NodeState::Out { why });
    }

    pub(super) fn found_lease(&mut self, answer: Result<Option<LeaseKey>, Said>, now: BootTime) {
        let key = self.prefix.lease(self.me.id);
        let found = match answer {
            Ok(found) => found,
            Err(said) => {
                self.obstructed(Error::at(&key)(said));
                if let Phase::Joining(join) = &mut self.phase {
                    join.again(now);
                }
                return;
            }
        };
        let Phase::Joining(join) = &mut self.phase else {
            return;
        };
        let is_ours = |key: &LeaseKey| {
            // The lock of the data directory proves that an earlier process of this machine is
            // dead. A process that lives beside this one has a copy of the directory.
            let is_machine = self.me.machine.is_some() && key.machine == self.me.machine;
            key.process == self.me.process || (self.has_earlier && is_machine)
        };
        let answer = found.as_ref().map(|key| Found {
            revision: key.revision,
            is_ours: is_ours(key),
        });
        if let Err(InUse) = join.found(answer, now) {
            let machine = found.and_then(|key| key.machine);
            let machine = match machine {
                machine if machine == self.me.machine => {
                    "another process with this machine's id".to_owned()
                }
                Some(machine) => format!("machine {machine}"),
                None => "a machine without an id".to_owned(),
            };
            let node = self.me.id;
            self.exclude(Error::InUse { key, node, machine });
        }
    }

    pub(super) fn created(&mut self, answer: Result<Outcome, Said>, now: BootTime) {
        let key = self.prefix.lease(self.me.id);
        let Phase::Joining(join) = &mut self.phase else {
            return;
        };
        let incarnation = match answer {
            Ok(Outcome::Made(at)) => Incarnation(at.0),
            other => {
                join.again(now);
                if let Err(said) = other {
                    self.obstructed(Error::at(&key)(said));
                }
                return;
            }
        };
        let Some(lease) = join.created(incarnation, now) else {
            return;
        };
        self.shared.word.set(lease.until());
        self.phase = Phase::In(lease);
        self.has_earlier = false;
        self.again = self.again.max(Again::Publications);
        self.volumes.restart(&self.shared.events);
        // Volumes of an earlier incarnation were dropped.
        let revision = incarnation.0 as i64;
        self.shared.incarnation.store(revision, Ordering::SeqCst);
        self.shared
            .events
            .note(Decision::NodeJoined { incarnation });
        self.show_lease(incarnation, true);
        self.describe(incarnation);
    }

    /// The incarnation is gone: all serving ends, and the node joins again.
    pub(super) fn lost(&mut self, now: BootTime) {
        if let Some(Holder { incarnation, .. }) = self.end_serving() {
            self.shared.events.note(Decision::NodeLost { incarnation });
            // Not `Joining`: etcd may have lost its data, or have another cluster by now.
            self.look_again(now);
            self.turn(now);
        }
    }

    /// Other nodes that joined at the same time were the last ones of the cluster: this node gives
    /// its lease back, and stays out.
    pub(super) fn no_room(&mut self, of: Incarnation, why: Error) {
        let Phase::In(lease) = &self.phase else {
            return;
        };
        if lease.holder().incarnation == of
            && let Some(me) = self.end_serving()
        {
            let (leases, release) = (Arc::clone(&self.leases), Transaction::release(me));
            self.jobs.spawn(async move {
                let _ = leases.execute(&release, no_record).await;
                Done::Released
            });
            self.exclude(why);
        }
    }

    /// Ends all serving of the present incarnation. `None`: the node has none.
    fn end_serving(&mut self) -> Option<Holder> {
        let Phase::In(lease) = &self.phase else {
            return None;
        };
        let me = lease.holder();
        self.shared.word.set(BootTime::default());
        self.shared.incarnation.store(0, Ordering::SeqCst);
        self.volumes.restart(&self.shared.events);
        self.away = None;
        Some(me)
    }

    /// Writes `node/N`, until it succeeds or the incarnation is gone.
    fn describe(&mut self, incarnation: Incarnation) {
        let (client, prefix) = (Arc::clone(&self.client), self.prefix.clone());
        let (node, description) = (self.me.id, self.me.description.clone());
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(async move {
            loop {
                match keys::describe(&client, &prefix, node, incarnation, &description).await {
                    Ok(_) => return Done::Nothing,
                    Err(error) if error.is_passing() => sleep(AGAIN).await,
                    Err(error @ Error::TooManyNodes { .. }) => {
                        return Done::NoRoom(incarnation, error);
                    }
                    Err(error) => {
                        let (key, why) = (prefix.node(node), error.to_string());
                        shared.events.note(Decision::KeyIgnored { key, why });
                        return Done::Nothing;
                    }
                }
            }
        });
    }
}
