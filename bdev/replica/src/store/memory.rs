//! A [`VolumeStore`] in memory with scripted failures and delays: for tests and the simulator.
//!
//! Every clone sees the same records. A planner decides for each call how long it takes, whether it
//! is carried out, and whether the reply arrives; [`MemoryStore::advance`] sets the time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

use super::reply::{Sender, reply};
use super::{StoreError, StoreFuture, VolumeStore};
use crate::model::{Stamp, VolumeRecord};

#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Mutex<Inner>>,
    client: u32,
    shared: bool,
}

/// A request to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRequest {
    List,
    Load,
    Create,
    Swap,
    Delete,
}

/// A call that the planner decides about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The caller: see [`MemoryStore::client`].
    pub client: u32,
    pub request: StoreRequest,
    /// The volume; nil for [`StoreRequest::List`].
    pub id: Uuid,
}

/// The fate of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Time until it is carried out.
    pub before: Duration,
    pub outcome: Outcome,
    /// Time from then until the reply.
    pub after: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Do,
    /// The call is not carried out, and returns unavailable.
    Refuse,
    /// The call is carried out, and returns unavailable all the same.
    Lose,
    /// Another holder changes the record just before, so that a swap or delete conflicts.
    Intrude,
    /// Another daemon owns the store: the call is refused.
    Own,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            before: Duration::ZERO,
            outcome: Outcome::Do,
            after: Duration::ZERO,
        }
    }
}

impl Plan {
    pub fn outcome(outcome: Outcome) -> Self {
        Self {
            outcome,
            ..Self::default()
        }
    }
}

type Planner = Box<dyn FnMut(&Call) -> Plan + Send>;

#[derive(Default)]
struct Inner {
    records: Vec<VolumeRecord>,
    planner: Option<Planner>,
    now: Nanos,
    /// Calls in progress, by the time of their next step; the number keeps the order of steps at
    /// the same time.
    steps: BinaryHeap<Reverse<Step>>,
    calls: u64,
    /// Number of calls carried out.
    carried_out: u64,
    /// Number of steps done.
    stepped: u64,
}

struct Step {
    due: Nanos,
    number: u64,
    what: Work,
}

/// Delivers a reply; called without the lock, since the woken task may call again at once.
type Wake = Box<dyn FnOnce() + Send>;
type Work = Box<dyn FnOnce(&mut Inner) -> Option<Wake> + Send>;

impl Ord for Step {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Step {}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    pub fn new() -> Self {
        Self {
            inner: Arc::default(),
            client: 0,
            shared: true,
        }
    }

    /// A store of one holder, which no other can reach: see [`VolumeStore::is_shared`].
    pub fn alone() -> Self {
        Self {
            shared: false,
            ..Self::new()
        }
    }

    /// The same store, as another client sees it: the planner can distinguish the two.
    pub fn client(&self, client: u32) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            client,
            shared: self.shared,
        }
    }

    /// Asks `planner` about each call from now on. `None`: every call succeeds and takes no time.
    pub fn plan(&self, planner: Option<Planner>) {
        self.inner.lock().planner = planner;
    }

    /// Decides about the next calls one after the other; later ones succeed.
    pub fn plan_next(&self, plans: impl IntoIterator<Item = Plan>) {
        let mut plans: std::collections::VecDeque<Plan> = plans.into_iter().collect();
        self.plan(Some(Box::new(move |_| {
            plans.pop_front().unwrap_or_default()
        })));
    }

    /// Sets the time to `now`: due steps happen.
    pub fn advance(&self, now: Nanos) {
        loop {
            let mut inner = self.inner.lock();
            inner.now = inner.now.max(now);
            let due = inner.steps.peek().is_some_and(|s| s.0.due <= now);
            let Some(Reverse(step)) = due.then(|| inner.steps.pop()).flatten() else {
                return;
            };
            let wake = (step.what)(&mut inner);
            drop(inner);
            if let Some(wake) = wake {
                wake();
            }
        }
    }

    /// Time of the next step for [`MemoryStore::advance`].
    pub fn next_due(&self) -> Option<Nanos> {
        self.inner.lock().steps.peek().map(|step| step.0.due)
    }

    /// Number of calls made.
    pub fn calls(&self) -> u64 {
        self.inner.lock().calls
    }

    /// Number of calls carried out: while it is unchanged, so are the records.
    pub fn carried_out(&self) -> u64 {
        self.inner.lock().carried_out
    }

    /// The stored records, without a call.
    pub fn records(&self) -> Vec<VolumeRecord> {
        self.inner.lock().records.clone()
    }

    fn call<T: Send + 'static>(
        &self,
        request: StoreRequest,
        id: Uuid,
        work: impl FnOnce(&mut Vec<VolumeRecord>) -> Result<T, StoreError> + Send + 'static,
    ) -> StoreFuture<T> {
        let (sender, receiver) = reply();
        let mut inner = self.inner.lock();
        inner.calls += 1;
        let call = Call {
            client: self.client,
            request,
            id,
        };
        let plan = match &mut inner.planner {
            Some(planner) => planner(&call),
            None => Plan::default(),
        };
        let due = inner.now + plan.before.min(FAR);
        inner.step(due, move |inner| {
            let answer = inner.carry_out(plan.outcome, id, work);
            inner.answer(plan.after, sender, answer)
        });
        let now = inner.now;
        drop(inner);
        self.advance(now);
        Box::pin(receiver)
    }
}

/// Longer than any test: a call that never arrives.
const FAR: Duration = Duration::from_secs(1 << 32);

impl Inner {
    fn step(&mut self, due: Nanos, what: impl FnOnce(&mut Self) -> Option<Wake> + Send + 'static) {
        self.stepped += 1;
        self.steps.push(Reverse(Step {
            due,
            number: self.stepped,
            what: Box::new(what),
        }));
    }

    fn carry_out<T>(
        &mut self,
        outcome: Outcome,
        id: Uuid,
        work: impl FnOnce(&mut Vec<VolumeRecord>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.carried_out += 1;
        let unavailable = |why: &str| StoreError::Unavailable {
            why: why.to_owned(),
        };
        match outcome {
            Outcome::Do => work(&mut self.records),
            Outcome::Refuse => Err(unavailable("refused by the test's plan")),
            Outcome::Lose => {
                let _ = work(&mut self.records);
                Err(unavailable("its reply was lost"))
            }
            Outcome::Intrude => {
                if let Some(record) = self.records.iter_mut().find(|r| r.id == id) {
                    record.revision += 1;
                }
                work(&mut self.records)
            }
            Outcome::Own => Err(StoreError::Owned {
                store: "(memory)".to_owned(),
                owner: "another daemon".to_owned(),
                claim: Uuid::nil(),
            }),
        }
    }

    fn answer<T: Send + 'static>(
        &mut self,
        after: Duration,
        sender: Sender<T>,
        answer: Result<T, StoreError>,
    ) -> Option<Wake> {
        let wake: Wake = Box::new(move || sender.answer(answer));
        if after.is_zero() {
            return Some(wake);
        }
        let due = self.now + after.min(FAR);
        self.step(due, move |_| Some(wake));
        None
    }
}

impl VolumeStore for MemoryStore {
    fn is_shared(&self) -> bool {
        self.shared
    }

    fn list(&self) -> StoreFuture<Vec<VolumeRecord>> {
        self.call(StoreRequest::List, Uuid::nil(), |records| {
            Ok(records.clone())
        })
    }

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord> {
        self.call(StoreRequest::Load, id, move |records| {
            Ok(records[find(records, id)?].clone())
        })
    }

    fn create(&self, record: VolumeRecord) -> StoreFuture<()> {
        self.call(StoreRequest::Create, record.id, move |records| {
            let same = |r: &&VolumeRecord| r.id == record.id || r.name == record.name;
            if let Some(there) = records.iter().find(same) {
                return Err(StoreError::Exists {
                    name: there.name.clone(),
                });
            }
            records.push(record);
            Ok(())
        })
    }

    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()> {
        super::assert_grows(expected, &next);
        self.call(StoreRequest::Swap, next.id, move |records| {
            let index = find(records, next.id)?;
            super::compare(&records[index], expected)?;
            let mut others = records.iter().filter(|r| r.id != next.id);
            if others.any(|r| r.name == next.name) {
                return Err(StoreError::Exists { name: next.name });
            }
            records[index] = next;
            Ok(())
        })
    }

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()> {
        self.call(StoreRequest::Delete, id, move |records| {
            let index = find(records, id)?;
            super::compare(&records[index], expected)?;
            records.remove(index);
            Ok(())
        })
    }
}

fn find(records: &[VolumeRecord], id: Uuid) -> Result<usize, StoreError> {
    let index = records.iter().position(|record| record.id == id);
    index.ok_or(StoreError::NotFound { id })
}
