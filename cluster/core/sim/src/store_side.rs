//! The simulated etcd as a server: it executes the requests of nodes, and loses or delays answers.
//!
//! [`crate::store::Store`] has the keys; this module has the faults and a check:
//!
//! - While the store is away, it drops every request. While its disk is full, it drops
//!   transactions and answers reads.
//! - If the node's link to the store is cut, a request that has arrived is executed and its answer
//!   is lost: the node cannot know the outcome of its transaction.
//! - An answer takes 0.2 to 2 ms, sometimes up to 50 ms or 4 s, and 0.3 to 0.95 s on a slow link.
//!   One read in eight is stale: it returns the lease key before its last change.
//! - A commit chosen by [`crate::copying`] takes effect, and isolates its node from the store and
//!   all other nodes for some time.
//! - A fence (the deletion of another node's lease key) too soon after the store was away fails
//!   the run. Nodes could not renew their leases in that time, so their silence proves nothing.

use std::time::Duration;

use nacre_cluster_core::{Effect, Holder, Incarnation, Transaction};

use crate::events::{Core, Event, Message, Trouble};
use crate::names::{MICRO, MILLI, node_id};
use crate::node::{Answer, Ask, Request};
use crate::store::Outcome;
use crate::world::World;

/// The store's end of requests, over the state of the run.
pub(crate) struct StoreSide<'a>(pub &'a mut World);

impl StoreSide<'_> {
    /// Executes a request that has arrived, and sends the answer, with delays and losses as above.
    pub(crate) fn request(&mut self, request: Request) {
        if self.0.health.away_since.is_some() {
            return;
        }
        let (node, life, id) = (request.from, request.life, request.id);
        let answer = match request.what {
            Ask::Read(of) => {
                let stale = self.0.lively && self.0.random.one_in(8);
                Answer::Read(self.0.store.read(of, stale))
            }
            Ask::Transaction(transaction) => {
                if self.0.health.is_full {
                    return;
                }
                let is_commit = matches!(transaction.effect, Effect::Commit { .. });
                let outcome = self.execute(Some(node), request.sent, transaction);
                let is_made = matches!(outcome, Outcome::Made(_));
                if is_commit
                    && is_made
                    && self.0.lively
                    && std::mem::take(&mut self.0.nodes[node].link.is_cut_by_commit)
                {
                    self.0
                        .after(0, Event::Begin(Trouble::Isolation(node), 6000));
                    if self.0.random.one_in(2) {
                        // Only the management core stalls. The data path of this former holder
                        // goes on, and the replicas must refuse its writes for the next holder.
                        let ms = self.0.random.within(3000, 9000);
                        self.0.stall(node, Core::Management as u64, ms);
                    }
                }
                Answer::Transaction(outcome)
            }
        };
        if self.0.nodes[node].link.is_cut {
            return;
        }
        let delay = match self.0.random.below(100) {
            _ if self.0.nodes[node].link.is_slow => self.0.random.within(300, 950) * MILLI,
            0 if self.0.lively => self.0.random.within(50, 4000) * MILLI,
            1..=3 => self.0.random.within(5, 50) * MILLI,
            _ => self.0.random.within(200, 2000) * MICRO,
        };
        let message = Message::Store(id, answer);
        self.0.send_to(delay, node, life, Core::Management, message);
    }

    fn execute(&mut self, from: Option<usize>, sent: u64, transaction: Transaction) -> Outcome {
        let effect = transaction.effect.clone();
        let outcome = self.0.store.execute(transaction);
        let Outcome::Made(at) = outcome else {
            return outcome;
        };
        match (&effect, from) {
            (Effect::Create { .. }, Some(node)) => {
                self.0.remember_created(node, Incarnation(at.0));
            }
            (Effect::Fence { node: fenced, .. }, Some(node)) if *fenced != node_id(node) => {
                self.0.report.fences += 1;
                self.check_fence(sent);
            }
            _ => {}
        }
        for node in 0..self.0.nodes.len() {
            self.0.notify(node);
        }
        outcome
    }

    /// Fails the run if a fence, sent after the store was away for more than one lease, is made
    /// less than 0.9 leases after its return. Observers must count a node's silence only while
    /// the store makes their own renewals. `sent` is when the node sent the transaction.
    fn check_fence(&mut self, sent: u64) {
        let nanos = |duration: Duration| duration.as_nanos() as u64;
        let lease = nanos(self.0.timing.lease());
        if let Some((start, end)) = self.0.health.last_absence
            && end - start > lease * 103 / 100
            && sent >= end
            && self.0.now < end + lease * 9 / 10
        {
            let after = (self.0.now - end) / MILLI;
            self.0.failure = Some(format!("a fence {after} ms after the store was away"));
        }
    }

    /// The transaction of an operator who knows that the holder's process is dead: it ends the
    /// holder's lease. No effect while the store is away or full.
    pub(crate) fn fence_off(&mut self, dead: Holder) {
        let is_silent = self.0.health.away_since.is_some() || self.0.health.is_full;
        if !is_silent {
            self.execute(None, 0, Transaction::fence_off(dead));
        }
    }
}
