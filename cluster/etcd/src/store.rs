//! The records of volumes in etcd: an implementation of [`VolumeStore`].
//!
//! ```text
//!   call ──▶ queue of 1024 ──▶ thread with a runtime ──▶ one task per call, in order per volume
//! ```
//!
//! `vol/ID` has the record as JSON, and `name/NAME` the id. Beside the record's fields, the JSON
//! has `v` (the version of its format) and `op`, the UUID of the call that wrote it: a call that
//! was sent twice, to two members, recognises its own change.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use nacre_bdev_replica::model::{Stamp, VolumeRecord};
use nacre_bdev_replica::store::{
    StoreError, StoreFuture, VolumeStore, assert_grows, compare, reply,
};
use nacre_cluster_core::ids::MAX_VOLUMES;
use nacre_cluster_core::{NodeId, VolumeId};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::client::{Client, Copies, Endpoints, KeyValue, Txn, TxnAnswer};
use crate::compaction::{Compaction, compact};
use crate::error::Error;
use crate::health::{self, Health};
use crate::keys::Prefix;
use crate::lessee::{Lessee, holder};
use crate::node::DaemonIdentity;
use crate::owner::{self, Before};
use crate::stored::{Stored, bytes, decode, encode};

/// Most waiting calls; a control has one at a time.
const WAITING: usize = 1024;
/// Most calls that run at the same time.
const RUNNING: u32 = 64;
/// Revisions remembered, at most one per volume.
const REMEMBERED: usize = 16_384;
/// Tries of a creation while other nodes create volumes.
const CREATIONS: usize = 32;
/// Tries of a deletion while the volume's publication changes.
const DELETIONS: usize = 8;
/// Time for the calls that were accepted, when the store is dropped.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// The records of the volumes with one prefix. A drop waits until the accepted calls end, at most
/// 5 s. A call fails with [`StoreError::Unavailable`] while 1024 calls wait.
pub struct EtcdStore {
    /// `None` during the drop.
    calls: Option<mpsc::Sender<Call>>,
    thread: Option<std::thread::JoinHandle<()>>,
    client: Arc<Client>,
    records: Arc<Records>,
    runtime: tokio::runtime::Handle,
}

type Work = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// A call, with the volume that it changes or reads; `None`: all volumes.
struct Call {
    volume: Option<Uuid>,
    work: Box<dyn FnOnce(Arc<Records>) -> Work + Send>,
}

impl EtcdStore {
    /// The store of a daemon without a cluster. Connects at the first call. Without `compaction`,
    /// another program must compact etcd's history.
    pub fn open(
        endpoints: &Endpoints,
        prefix: Prefix,
        compaction: Option<Compaction>,
    ) -> Result<Self, Error> {
        let claimed = AtomicI64::new(0);
        Self::of(endpoints, prefix, compaction, User::Daemon { claimed })
    }

    /// The store of a node of a cluster: each change compares the node's incarnation, so that etcd
    /// refuses what a fenced node still sends. `incarnation`: the present one; 0: none.
    ///
    /// A record also has fields of the cluster. A change by the holder writes this node to
    /// `holder`. The last change of a volume that closes is a record without a holder. The store
    /// writes it with the present holder and `closed`. The holder stays until the node releases the
    /// volume.
    pub fn of_node(
        endpoints: &Endpoints,
        prefix: Prefix,
        node: NodeId,
        incarnation: Arc<AtomicI64>,
    ) -> Result<Self, Error> {
        let user = User::Node(Lessee { node, incarnation });
        Self::of(endpoints, prefix, None, user)
    }

    fn of(
        endpoints: &Endpoints,
        prefix: Prefix,
        compaction: Option<Compaction>,
        user: User,
    ) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Thread {
                why: error.to_string(),
            })?;
        let client = {
            let _entered = runtime.enter();
            Arc::new(Client::new(endpoints)?)
        };
        let records = Arc::new(Records {
            client: Arc::clone(&client),
            prefix,
            known: Mutex::default(),
            user,
            creating: tokio::sync::Mutex::default(),
            last: Arc::default(),
        });
        let served = Arc::clone(&records);
        let handle = runtime.handle().clone();
        let (calls, receiver) = mpsc::channel(WAITING);
        let thread = std::thread::Builder::new()
            .name("volume-store".to_owned())
            .spawn(move || {
                if let Some(how) = compaction {
                    let last = Arc::clone(&served.last);
                    runtime.spawn(compact(Arc::clone(&served.client), how, last));
                }
                runtime.block_on(serve(receiver, served));
                runtime.shutdown_timeout(Duration::ZERO);
            })
            .map_err(|error| Error::Thread {
                why: error.to_string(),
            })?;
        Ok(Self {
            calls: Some(calls),
            thread: Some(thread),
            client,
            records,
            runtime: handle,
        })
    }

    /// Makes `node` the owner of the prefix. From then on no other daemon changes a record, and the
    /// store is not shared. Call it before all other calls. Fails for the store of a node.
    ///
    /// The receiver has the health of the store, checked every 10 s.
    pub async fn claim(
        &self,
        node: &DaemonIdentity,
        before: Before,
    ) -> Result<watch::Receiver<Health>, Error> {
        let began = Instant::now();
        self.client.check_version().await?;
        let took = began.elapsed();
        let prefix = &self.records.prefix;
        let User::Daemon { claimed } = &self.records.user else {
            let prefix = prefix.to_string();
            return Err(Error::OfCluster { prefix });
        };
        let claim = owner::claim(&self.client, prefix, node, before).await?;
        claimed.store(claim.revision, Ordering::SeqCst);
        let (told, health) = watch::channel(Health::Answers(took));
        let asking = health::ask(
            Arc::clone(&self.client),
            prefix.clone(),
            claim.revision,
            told,
        );
        self.runtime.spawn(asking);
        Ok(health)
    }

    /// The client of the store, for other keys of the cluster. Its requests work on any runtime of
    /// tokio, while the store exists.
    pub fn client(&self) -> Arc<Client> {
        Arc::clone(&self.client)
    }

    fn call<T, F>(
        &self,
        volume: Option<Uuid>,
        work: impl FnOnce(Arc<Records>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (sender, receiver) = reply::reply();
        let work = Box::new(move |records| -> Work {
            let work = work(records);
            Box::pin(async move { sender.answer(work.await) })
        });
        let why = match self
            .calls
            .as_ref()
            .map(|c| c.try_send(Call { volume, work }))
        {
            Some(Ok(())) => return Box::pin(receiver),
            Some(Err(mpsc::error::TrySendError::Full(_))) => {
                format!("{WAITING} requests are waiting for etcd")
            }
            Some(Err(mpsc::error::TrySendError::Closed(_))) | None => {
                "the thread of the etcd client has ended".to_owned()
            }
        };
        Box::pin(std::future::ready(Err(StoreError::Unavailable { why })))
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // A panic of its work was reported where it happened.
            let _ = thread.join();
        }
    }
}

impl VolumeStore for EtcdStore {
    fn list(&self) -> StoreFuture<Vec<VolumeRecord>> {
        self.call(None, |records| async move { records.list().await })
    }

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord> {
        self.call(Some(id), move |records| async move {
            let stored = records.load(id).await?;
            Ok(stored.record)
        })
    }

    fn create(&self, record: VolumeRecord) -> StoreFuture<()> {
        self.call(Some(record.id), move |records| async move {
            records.create(record).await
        })
    }

    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()> {
        assert_grows(expected, &next);
        self.call(Some(next.id), move |records| async move {
            records.swap(expected, next).await
        })
    }

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()> {
        self.call(Some(id), move |records| async move {
            records.delete(id, expected).await
        })
    }

    /// False if the prefix has one owner: a takeover by another daemon ends the owner's changes.
    /// False for a node of a cluster: its lease is checked before answers leave.
    fn is_shared(&self) -> bool {
        match &self.records.user {
            User::Daemon { claimed } => claimed.load(Ordering::SeqCst) == 0,
            User::Node(_) => false,
        }
    }
}

/// Runs the calls: those of one volume in order, and a list after all earlier calls.
async fn serve(mut calls: mpsc::Receiver<Call>, records: Arc<Records>) {
    let permits = Arc::new(Semaphore::new(RUNNING as usize));
    // Each volume's last call: its channel closes with the end of the call.
    let mut last: HashMap<Uuid, watch::Receiver<()>> = HashMap::new();
    while let Some(Call { volume, work }) = calls.recv().await {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        last.retain(|_, end| end.has_changed().is_ok());
        let before: Vec<watch::Receiver<()>> = match volume {
            Some(id) => last.get(&id).cloned().into_iter().collect(),
            None => last.values().cloned().collect(),
        };
        let (ends, end) = watch::channel(());
        if let Some(id) = volume {
            last.insert(id, end);
        }
        let work = work(Arc::clone(&records));
        tokio::spawn(async move {
            for mut earlier in before {
                // An error: the earlier call has ended.
                while earlier.changed().await.is_ok() {}
            }
            work.await;
            drop((ends, permit));
        });
    }
    // The calls under way end.
    let all = permits.acquire_many(RUNNING);
    let _ = tokio::time::timeout(LAST_CALLS, all).await;
}

/// The user of the prefix.
enum User {
    /// One daemon alone.
    Daemon {
        /// Revision of the owner key; 0: the prefix has no owner.
        claimed: AtomicI64,
    },
    /// A node of a cluster.
    Node(Lessee),
}

#[derive(Default)]
struct Known {
    /// The incarnation of the node that knows them. Another one may be of another store, whose
    /// revisions begin anew.
    incarnation: i64,
    records: HashMap<Uuid, Stored>,
}

struct Records {
    client: Arc<Client>,
    prefix: Prefix,
    /// The last known state of each record, to save the read before a change.
    known: Mutex<Known>,
    user: User,
    /// Creations of this node run one after another: each refuses the others.
    creating: tokio::sync::Mutex<()>,
    /// Revision of the last change.
    last: Arc<AtomicI64>,
}

impl Records {
    async fn list(&self) -> Result<Vec<VolumeRecord>, StoreError> {
        self.client.check_version().await?;
        let mut page = self.client.list(&self.prefix.volumes()).await?;
        page.keys.sort_by_key(|kv| kv.create_revision);
        page.keys.iter().map(|kv| Ok(decode(kv)?.record)).collect()
    }

    async fn load(&self, id: Uuid) -> Result<Stored, StoreError> {
        let found = self.client.get(&self.prefix.volume(id)).await?;
        self.found(id, found.as_ref())
    }

    /// The record of an answer of etcd.
    fn found(&self, id: Uuid, found: Option<&KeyValue>) -> Result<Stored, StoreError> {
        let Some(kv) = found else {
            self.known().remove(&id);
            return Err(StoreError::NotFound { id });
        };
        let stored = decode(kv)?;
        self.remember(&stored);
        Ok(stored)
    }

    fn remember(&self, stored: &Stored) {
        let mut known = self.known();
        let id = stored.record.id;
        if known.len() >= REMEMBERED && !known.contains_key(&id) {
            known.clear();
        }
        // An answer may be older than one that overtook it.
        let is_older = |last: &Stored| last.revision > stored.revision;
        if !known.get(&id).is_some_and(is_older) {
            known.insert(id, stored.clone());
        }
    }

    fn known(&self) -> MappedMutexGuard<'_, HashMap<Uuid, Stored>> {
        let mut known = self.known.lock();
        if let User::Node(lessee) = &self.user {
            let incarnation = lessee.incarnation.load(Ordering::SeqCst);
            if known.incarnation != incarnation {
                known.records.clear();
                known.incarnation = incarnation;
            }
        }
        MutexGuard::map(known, |known| &mut known.records)
    }

    /// Executes a transaction, if this daemon still owns the prefix, or this node has its lease.
    async fn transact(&self, txn: Txn, copies: Copies) -> Result<TxnAnswer, StoreError> {
        let owner = self.prefix.owner();
        // A cluster's nodes and an owner exclude each other: without a claim there is no owner.
        let (txn, claimed, incarnation) = match &self.user {
            User::Daemon { claimed } => (txn, claimed.load(Ordering::SeqCst), 0),
            User::Node(lessee) => {
                let incarnation = lessee.incarnation()?;
                let lease = self.prefix.lease(lessee.node);
                (
                    txn.if_created(&lease, incarnation).read_on_failure(&lease),
                    0,
                    incarnation,
                )
            }
        };
        let txn = txn.if_modified(&owner, claimed).read_on_failure(&owner);
        let mut answer = self.client.transact(txn, copies).await?;
        if answer.is_made {
            self.last.fetch_max(answer.revision, Ordering::Relaxed);
            return Ok(answer);
        }
        let found = answer.found.pop().flatten();
        if found.as_ref().map_or(0, |kv| kv.mod_revision) != claimed {
            return Err(match found.as_ref().map(owner::decode).transpose()? {
                Some(owner) => owner.refuses(&self.prefix).into(),
                None => StoreError::Damaged {
                    what: format!("key \"{owner}\" of etcd, which has its owner, was deleted"),
                },
            });
        }
        if let User::Node(lessee) = &self.user {
            let lease = answer.found.pop().flatten();
            if lease.map_or(0, |kv| kv.create_revision) != incarnation {
                return Err(lessee.is_fenced(incarnation));
            }
        }
        Ok(answer)
    }

    fn encode(&self, record: &VolumeRecord, op: Uuid, stored: Option<&Stored>) -> Value {
        let mut value = encode(record, op, stored);
        if let User::Node(lessee) = &self.user {
            lessee.complete(record, stored.map(|stored| &stored.value), &mut value);
        }
        value
    }

    /// A condition of each change of a record: no other node holds the volume.
    fn unless_held(&self, txn: Txn, stored: &Stored) -> Txn {
        match self.other_holder(stored) {
            Some((lease, incarnation)) => txn
                .if_not_created(&lease, incarnation)
                .read_on_failure(&lease),
            None => txn,
        }
    }

    /// The lease of another holder, and its incarnation.
    fn other_holder(&self, stored: &Stored) -> Option<(String, i64)> {
        let User::Node(lessee) = &self.user else {
            return None;
        };
        let (node, incarnation) = holder(&stored.value)?;
        (node != lessee.node && incarnation != 0).then(|| (self.prefix.lease(node), incarnation))
    }

    /// The error, if the change was refused because another node holds the volume.
    fn held(&self, stored: &Stored, answer: &TxnAnswer) -> Result<(), StoreError> {
        let Some((lease, incarnation)) = self.other_holder(stored) else {
            return Ok(());
        };
        let mut found = answer.found.iter().flatten();
        match found.find(|kv| kv.key == lease.as_bytes()) {
            Some(kv) if kv.create_revision == incarnation => Err(StoreError::Fenced {
                why: format!(
                    "another node holds volume \"{}\": {lease}",
                    stored.record.name
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Sent once: a late copy could create the record again after its deletion. The reads find an
    /// endpoint that answers.
    async fn create(&self, record: VolumeRecord) -> Result<(), StoreError> {
        let (id, op) = (record.id, Uuid::new_v4());
        let key = self.prefix.volume(id);
        let name = self.prefix.name(&record.name);
        let value = self.encode(&record, op, None);
        let _one = match &self.user {
            User::Node(_) => Some(self.creating.lock().await),
            User::Daemon { .. } => None,
        };
        for _ in 0..CREATIONS {
            if self.client.get(&name).await?.is_some() {
                return Err(StoreError::Exists { name: record.name });
            }
            let txn = Txn::default()
                .if_created(&key, 0)
                .if_created(&name, 0)
                .put(&key, bytes(&value))
                .put(&name, id.to_string().into_bytes())
                .read_on_failure(&key)
                .read_on_failure(&name);
            let answer = self.transact(self.if_room(txn).await?, Copies::One).await?;
            if answer.is_made {
                let revision = answer.revision;
                self.remember(&Stored {
                    record,
                    value,
                    revision,
                });
                return Ok(());
            }
            match &answer.found[..] {
                // Another volume was created, or renamed, since they were counted.
                [None, None, ..] => {}
                // The name that stands there: it is the id that exists already.
                [Some(kv), None, ..] => {
                    let name = decode(kv)?.record.name;
                    return Err(StoreError::Exists { name });
                }
                _ => return Err(StoreError::Exists { name: record.name }),
            }
        }
        let why = "other nodes create volumes all the time".to_owned();
        Err(StoreError::Unavailable { why })
    }

    /// A condition of each creation in a cluster: it has fewer than [`MAX_VOLUMES`] volumes.
    async fn if_room(&self, txn: Txn) -> Result<Txn, StoreError> {
        let User::Node(_) = &self.user else {
            return Ok(txn);
        };
        let names = self.prefix.names();
        let (count, revision) = self.client.count(&names).await?;
        if count >= MAX_VOLUMES {
            let most = MAX_VOLUMES;
            return Err(StoreError::TooMany { most });
        }
        Ok(txn.if_none_created_after(&names, revision))
    }

    async fn swap(&self, expected: Stamp, next: VolumeRecord) -> Result<(), StoreError> {
        let (id, op) = (next.id, Uuid::new_v4());
        let key = self.prefix.volume(id);
        let new_name = self.prefix.name(&next.name);
        let change = |stored: &Stored| {
            let value = self.encode(&next, op, Some(stored));
            let mut txn = Txn::default()
                .put(&key, bytes(&value))
                .read_on_failure(&key);
            if stored.record.name != next.name {
                txn = txn
                    .if_created(&new_name, 0)
                    .put(&new_name, id.to_string().into_bytes())
                    .delete(&self.prefix.name(&stored.record.name))
                    .read_on_failure(&new_name);
            }
            (txn, value)
        };
        let (answer, value) = self.change(id, expected, op, change).await?;
        match answer {
            Some(answer) if !answer.is_made => Err(StoreError::Exists { name: next.name }),
            Some(answer) => {
                let (record, revision) = (next, answer.revision);
                self.remember(&Stored {
                    record,
                    value,
                    revision,
                });
                Ok(())
            }
            None => Ok(()),
        }
    }

    async fn delete(&self, id: Uuid, expected: Stamp) -> Result<(), StoreError> {
        let outcome = self.delete_with_publication(id, expected).await;
        self.known().remove(&id);
        outcome
    }

    /// Notes the deletion of a publication like an unpublish does: the nodes confirm that they have
    /// seen this revision, and the key that has it is gone. A volume that is published meanwhile
    /// stays: its deletion was asked for without hosts.
    async fn delete_with_publication(&self, id: Uuid, expected: Stamp) -> Result<(), StoreError> {
        let (key, publication) = (
            self.prefix.volume(id),
            self.prefix.publication(VolumeId(id)),
        );
        let mut was_absent = false;
        for _ in 0..DELETIONS {
            let published = self.client.get(&publication).await?;
            if was_absent && published.is_some() {
                let why = "it was published meanwhile".to_owned();
                return Err(StoreError::Unavailable { why });
            }
            was_absent |= published.is_none();
            let change = |stored: &Stored| {
                let mut txn = Txn::default()
                    .if_modified(
                        &publication,
                        published.as_ref().map_or(0, |kv| kv.mod_revision),
                    )
                    .delete(&key)
                    .delete(&self.prefix.name(&stored.record.name))
                    .read_on_failure(&key);
                for key in self.prefix.of_volume(id) {
                    txn = txn.delete(&key);
                }
                if published.is_some() {
                    txn = txn.note_unpublished(&self.prefix, VolumeId(id));
                }
                (txn, Value::Null)
            };
            let changed = self.change(id, expected, Uuid::new_v4(), change).await?;
            match changed.0 {
                // An operator published the volume, or unpublished it, between the read and now.
                Some(answer) if !answer.is_made => {}
                _ => return Ok(()),
            }
        }
        let why = "its publication changes all the time".to_owned();
        Err(StoreError::Unavailable { why })
    }

    /// Makes a change of the record whose version is `expected`, and returns the answer. `None`:
    /// an earlier copy of the change was made. An answer that was not made means that another
    /// condition of the change did not hold.
    async fn change(
        &self,
        id: Uuid,
        expected: Stamp,
        op: Uuid,
        change: impl Fn(&Stored) -> (Txn, Value),
    ) -> Result<(Option<TxnAnswer>, Value), StoreError> {
        let key = self.prefix.volume(id);
        let mut is_copied = false;
        let known = self.known().get(&id).cloned();
        let mut stored = match known.filter(|known| known.record.version() == expected) {
            Some(known) => known,
            None => self.load(id).await?,
        };
        loop {
            compare(&stored.record, expected)?;
            let (txn, value) = change(&stored);
            let txn = txn.if_modified(&key, stored.revision);
            let txn = self.unless_held(txn, &stored);
            let answer = self.transact(txn, Copies::Several).await?;
            if answer.is_made {
                return Ok((Some(answer), value));
            }
            is_copied |= answer.is_copied;
            let found = answer.found.first().cloned().flatten();
            if found.is_none() && is_copied && value.is_null() {
                // A deletion whose first copy was executed.
                return Ok((None, value));
            }
            let now = self.found(id, found.as_ref())?;
            if is_copied && now.value.get("op") == Some(&Value::from(op.to_string())) {
                return Ok((None, value));
            }
            if now.revision == stored.revision {
                self.held(&stored, &answer)?;
                // The record is as expected: another condition did not hold.
                return Ok((Some(answer), value));
            }
            stored = now;
        }
    }
}

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        match error {
            Error::Damaged { .. } => Self::Damaged {
                what: format!("{error} (restore a backup of etcd, or correct the key)"),
            },
            Error::Owned {
                prefix,
                owner,
                claim,
            } => Self::Owned {
                store: prefix,
                owner: owner.to_string(),
                claim,
            },
            Error::Newer { key, found, .. } => Self::Newer { path: key, found },
            error => Self::Unavailable {
                why: error.to_string(),
            },
        }
    }
}
