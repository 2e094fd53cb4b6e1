//! The current configuration: the created objects in order, each with the call that creates it
//! again.
//!
//! The journal is the one list behind the durable store (objects created by RPC) and the reply of
//! `framework_get_config` (all objects). It is also behind the list of objects that could not be
//! restored. The daemon keeps and retries them.

mod upgrade;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::rc::Rc;
use std::time::SystemTime;

use tracing::{info, warn};
use uuid::Uuid;

use crate::rpc::RpcError;
use crate::store::{Change, Edit, Record, Store, StoreError};

/// Prefix of the keys of calls that wait for a base bdev.
pub const DEFERRED: &str = "deferred/";

/// State of an object in the journal.
#[derive(Debug, Clone, PartialEq)]
pub enum EntryState {
    Live,
    /// Loaded from the store, not replayed yet.
    Waiting,
    /// Replay failed; the record stays in the store and is retried.
    Failed {
        error: RpcError,
        since: SystemTime,
        attempts: u32,
    },
}

/// An object of the journal: its record, its state, and whether it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct JournalEntry {
    pub record: Record,
    pub state: EntryState,
    /// The record is in the store. Those of declared objects are in the configuration file only.
    pub durable: bool,
}

tokio::task_local! {
    static DECLARING: ();
    static REPLAYED: Record;
    static TOGETHER: Together;
}

/// Changes that are to be stored as one transaction. `None`: the transaction was stored or given
/// up; later changes are stored separately.
pub type Together = Rc<RefCell<Option<Vec<Edit>>>>;

/// The pending transaction of the current task, if any.
pub fn part_of() -> Option<Together> {
    TOGETHER.try_with(Rc::clone).ok()
}

/// Runs `work` as part of the transaction `of`, if any.
pub async fn as_part<T>(of: Option<Together>, work: impl Future<Output = T>) -> T {
    match of {
        Some(all) => TOGETHER.scope(all, work).await,
        None => work.await,
    }
}

/// Runs `work` for the configuration file: its records are not stored.
pub async fn declaring<T>(work: impl Future<Output = T>) -> T {
    DECLARING.scope((), work).await
}

/// True if the current task runs for the configuration file.
pub fn is_declaring() -> bool {
    DECLARING.try_with(|()| ()).is_ok()
}

/// True if the current task replays a record.
pub fn is_replaying() -> bool {
    REPLAYED.try_with(|_| ()).is_ok()
}

/// Runs `work`, which replays `record`.
pub async fn replaying<T>(record: Record, work: impl Future<Output = T>) -> T {
    REPLAYED.scope(record, work).await
}

/// Prefix of keys that form a tree by their slashes. In other keys a slash is part of a name.
const TREE: &str = "nvmf/";

/// Prefix of facts about the files of bdevs; the UUID of the bdev follows. Facts are not replayed.
pub const SEEN: &str = "seen/";

fn is_fact(edit: &Edit) -> bool {
    match edit {
        Edit::Put(record) => record.key.starts_with(SEEN),
        Edit::Remove(key) => key.starts_with(SEEN),
        Edit::RemoveAll(_) => false,
    }
}

/// The key of the fact about the file of the device `uuid`.
pub fn seen_key(uuid: Uuid) -> String {
    format!("{SEEN}{uuid}")
}

/// The list of created objects, and the store behind it.
#[derive(Debug, Default)]
pub struct Journal {
    store: Option<Store>,
    entries: RefCell<Entries>,
    seen: RefCell<BTreeMap<String, Record>>,
}

/// Entries in order and by key.
#[derive(Debug, Default)]
struct Entries {
    in_order: BTreeMap<u64, JournalEntry>,
    places: BTreeMap<String, u64>,
    next: u64,
}

impl Entries {
    fn push(&mut self, entry: JournalEntry) {
        self.places.insert(entry.record.key.clone(), self.next);
        self.in_order.insert(self.next, entry);
        self.next += 1;
    }

    fn get(&self, key: &str) -> Option<&JournalEntry> {
        self.in_order.get(self.places.get(key)?)
    }

    fn get_mut(&mut self, key: &str) -> Option<&mut JournalEntry> {
        self.in_order.get_mut(self.places.get(key)?)
    }

    fn remove(&mut self, key: &str) -> Option<JournalEntry> {
        self.in_order.remove(&self.places.remove(key)?)
    }

    /// Positions of the entries whose keys begin with `prefix`, in order.
    fn below(&self, prefix: &str) -> Vec<u64> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let all = self.places.range::<str, _>(from);
        let ours = all.take_while(|(key, _)| key.starts_with(prefix));
        let mut places: Vec<u64> = ours.map(|(_, place)| *place).collect();
        places.sort_unstable();
        places
    }

    fn remove_all(&mut self, prefix: &str) -> Vec<JournalEntry> {
        let places = self.below(prefix).into_iter();
        let gone: Vec<JournalEntry> = places
            .filter_map(|place| self.in_order.remove(&place))
            .collect();
        for entry in &gone {
            self.places.remove(&entry.record.key);
        }
        gone
    }
}

impl Journal {
    pub fn new(store: Option<Store>) -> Self {
        Self {
            store,
            entries: RefCell::default(),
            seen: RefCell::default(),
        }
    }

    /// The fact about the file of bdev `uuid`, as of the bdev's creation or the last stop.
    pub fn seen(&self, uuid: Uuid) -> Option<serde_json::Value> {
        let seen = self.seen.borrow();
        seen.get(&seen_key(uuid)).map(|fact| fact.params.clone())
    }

    /// Replaces the fact in memory, and returns the former one. Nothing is stored: creating the
    /// bdev stores a new fact.
    pub fn set_seen(&self, uuid: Uuid, seen: Option<Record>) -> Option<Record> {
        let mut all = self.seen.borrow_mut();
        match seen {
            Some(record) => all.insert(seen_key(uuid), record),
            None => all.remove(&seen_key(uuid)),
        }
    }

    pub fn is_durable(&self) -> bool {
        self.store.is_some()
    }

    pub fn store_path(&self) -> Option<&std::path::Path> {
        self.store.as_ref().map(Store::path)
    }

    /// Loads the store. [`Journal::waiting`] then returns its records. Returns their number.
    pub async fn load(&self) -> Result<usize, StoreError> {
        let Some(store) = &self.store else {
            return Ok(0);
        };
        let (facts, records): (Vec<Record>, Vec<Record>) = upgraded(store)
            .await?
            .into_iter()
            .partition(|record| record.key.starts_with(SEEN));
        let facts = facts.into_iter().map(|fact| (fact.key.clone(), fact));
        self.seen.replace(facts.collect());
        let records = parents_first(records);
        let mut entries = Entries::default();
        for record in records {
            entries.push(JournalEntry {
                record,
                state: EntryState::Waiting,
                durable: true,
            });
        }
        let found = entries.in_order.len();
        self.entries.replace(entries);
        Ok(found)
    }

    /// Stores `change`, then applies it to the journal. Records that it puts become live. In
    /// [`Journal::together`] it is stored later; in [`declaring`] only its facts are stored.
    pub async fn commit(&self, change: Change) -> Result<(), RpcError> {
        let durable = !is_declaring();
        let edits: Vec<Edit> = replace_deferred(change)
            .0
            .into_iter()
            .filter(|edit| self.matters(edit, durable))
            .collect();
        let change = Change(edits);
        // Facts are also stored for declared devices.
        let kept = change.0.iter().filter(|edit| durable || is_fact(edit));
        let kept = Change(kept.cloned().collect());
        let mut kept = Some(kept);
        if let Some(together) = part_of()
            && let Some(all) = together.borrow_mut().as_mut()
        {
            all.extend(kept.take().into_iter().flat_map(|part| part.0));
        }
        if let Some(kept) = kept {
            self.keep(kept).await?;
        }
        let mut entries = self.entries.borrow_mut();
        let mut seen = self.seen.borrow_mut();
        for edit in change.0 {
            match edit {
                Edit::Put(fact) if fact.key.starts_with(SEEN) => {
                    seen.insert(fact.key.clone(), fact);
                }
                Edit::Remove(key) if key.starts_with(SEEN) => drop(seen.remove(&key)),
                Edit::Put(record) => match entries.get_mut(&record.key) {
                    Some(entry) => {
                        *entry = JournalEntry {
                            record,
                            state: EntryState::Live,
                            durable: entry.durable,
                        }
                    }
                    None => {
                        // Stored parts of a declared object were loaded before the object itself
                        // was created.
                        let parts = if record.key.starts_with(TREE) {
                            entries.remove_all(&format!("{}/", record.key))
                        } else {
                            Vec::new()
                        };
                        entries.push(JournalEntry {
                            record,
                            state: EntryState::Live,
                            durable,
                        });
                        parts.into_iter().for_each(|part| entries.push(part));
                    }
                },
                Edit::Remove(key) => drop(entries.remove(&key)),
                Edit::RemoveAll(prefix) => drop(entries.remove_all(&prefix)),
            }
        }
        Ok(())
    }

    async fn keep(&self, change: Change) -> Result<(), RpcError> {
        let Some(store) = self.store.as_ref().filter(|_| !change.0.is_empty()) else {
            return Ok(());
        };
        store.commit(change).await.map_err(|error| {
            warn!(%error, "a change was undone because it could not be stored");
            RpcError::internal(format!(
                "the change could not be stored, and was undone: {error}"
            ))
            .remedy("see whether the disk of the data directory is full or read-only")
        })
    }

    /// Runs `work`, then stores all changes of it as one transaction. If `work` or the store fails,
    /// nothing is stored, and the caller must undo the changes with [`Journal::unstored`].
    pub async fn together<T>(
        &self,
        work: impl Future<Output = Result<T, RpcError>>,
    ) -> Result<T, RpcError> {
        let all = Together::new(RefCell::new(Some(Vec::new())));
        let done = TOGETHER.scope(Rc::clone(&all), work).await;
        let edits = all.borrow_mut().take().unwrap_or_default();
        let done = done?;
        self.keep(Change(edits)).await?;
        Ok(done)
    }

    /// Runs `work` without storing its changes, which undo changes that were not stored.
    pub async fn unstored<T>(&self, work: impl Future<Output = T>) -> T {
        let all = Together::new(RefCell::new(Some(Vec::new())));
        let done = TOGETHER.scope(Rc::clone(&all), work).await;
        all.borrow_mut().take();
        done
    }

    /// Stores the record of a call that is executed later.
    pub async fn defer(&self, record: Record) -> Result<(), RpcError> {
        let key = record.key.clone();
        self.commit(Change(vec![Edit::Put(record)])).await?;
        if let Some(entry) = self.entries.borrow_mut().get_mut(&key) {
            entry.state = EntryState::Waiting;
        }
        Ok(())
    }

    /// True if the edit changes anything. Marks an unchanged record as live.
    fn matters(&self, edit: &Edit, durable: bool) -> bool {
        let Edit::Put(record) = edit else { return true };
        if is_fact(edit) {
            return self.seen.borrow().get(&record.key) != Some(record);
        }
        let mut entries = self.entries.borrow_mut();
        let same = entries
            .get_mut(&record.key)
            .filter(|e| e.record == *record && (e.durable || !durable));
        if let Some(entry) = same {
            entry.state = EntryState::Live;
            return false;
        }
        true
    }

    pub fn entries(&self) -> Vec<JournalEntry> {
        self.select(|_| true)
    }

    /// Entries for which `wanted` is true, in order.
    pub fn select(&self, wanted: impl Fn(&JournalEntry) -> bool) -> Vec<JournalEntry> {
        let entries = self.entries.borrow();
        let all = entries.in_order.values();
        all.filter(|entry| wanted(entry)).cloned().collect()
    }

    pub fn any(&self, is: impl Fn(&JournalEntry) -> bool) -> bool {
        self.entries.borrow().in_order.values().any(is)
    }

    /// Entries whose keys begin with `prefix`, in order.
    pub fn below(&self, prefix: &str) -> Vec<JournalEntry> {
        let entries = self.entries.borrow();
        let places = entries.below(prefix);
        let ours = places.iter().map(|place| entries.in_order[place].clone());
        ours.collect()
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.entries.borrow().in_order.len()
    }

    /// Numbers of live, waiting and failed entries.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for entry in self.entries.borrow().in_order.values() {
            counts[match entry.state {
                EntryState::Live => 0,
                EntryState::Waiting => 1,
                EntryState::Failed { .. } => 2,
            }] += 1;
        }
        counts
    }

    pub fn find(&self, key: &str) -> Option<JournalEntry> {
        self.entries.borrow().get(key).cloned()
    }

    /// Records to replay, in order: those not tried yet, and those that failed.
    pub fn waiting(&self) -> Vec<Record> {
        let entries = self.entries.borrow();
        let waits = |e: &&JournalEntry| e.state != EntryState::Live;
        let waiting = entries.in_order.values().filter(waits);
        waiting.map(|e| e.record.clone()).collect()
    }

    /// True if the current task replays a record that was deleted, changed or created meanwhile.
    pub fn is_overtaken(&self) -> bool {
        let waits = |record: &Record| {
            let entries = self.entries.borrow();
            let entry = entries.get(&record.key);
            entry.is_some_and(|e| e.record == *record && e.state != EntryState::Live)
        };
        REPLAYED.try_with(|record| !waits(record)).unwrap_or(false)
    }

    /// Sets the state of the record `key` after its replay. Ignores unknown keys.
    pub fn restored(&self, key: &str, outcome: Result<(), RpcError>) {
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.get_mut(key) else {
            return;
        };
        match outcome {
            Ok(()) => {
                if let EntryState::Failed { attempts, .. } = entry.state {
                    info!(object = key, attempts, "restored at last");
                }
                entry.state = EntryState::Live;
            }
            Err(error) => {
                let (since, attempts) = match &entry.state {
                    EntryState::Failed {
                        since, attempts, ..
                    } => (*since, attempts + 1),
                    _ => {
                        warn!(object = key, %error, "not restored; it is kept and tried again");
                        (SystemTime::now(), 1)
                    }
                };
                entry.state = EntryState::Failed {
                    error,
                    since,
                    attempts,
                };
            }
        }
    }
}

/// Loads the records of the store, and upgrades those of earlier versions.
async fn upgraded(store: &Store) -> Result<Vec<Record>, StoreError> {
    let mut records = store.load().await?;
    let changed = upgrade::with_ana(&records);
    if changed.is_empty() {
        return Ok(records);
    }
    info!(
        records = changed.len(),
        "volumes published by an earlier version report ANA states from now on: hosts use RDMA before TCP"
    );
    let edits = changed.iter().cloned().map(Edit::Put).collect();
    if let Err(error) = store.commit(Change(edits)).await {
        warn!(%error, "the changed records could not be stored; they are changed again at the next start");
    }
    let mut changed: HashMap<String, Record> =
        changed.into_iter().map(|r| (r.key.clone(), r)).collect();
    for record in &mut records {
        if let Some(new) = changed.remove(&record.key) {
            *record = new;
        }
    }
    Ok(records)
}

/// Adds the removal of the deferred call that is being replayed to the change that records its
/// bdev.
fn replace_deferred(mut change: Change) -> Change {
    let replayed = REPLAYED.try_with(|record| record.key.clone());
    if let Ok(key) = replayed
        && key.starts_with(DEFERRED)
        && change.0.iter().any(|edit| matches!(edit, Edit::Put(_)))
    {
        change.0.push(Edit::Remove(key));
    }
    change
}

/// Keeps the order, but moves each record behind those of its parent objects. A part can be older
/// than its parent, if the parent was declared in the file before an RPC created it.
fn parents_first(records: Vec<Record>) -> Vec<Record> {
    let at: HashMap<String, usize> = records
        .iter()
        .enumerate()
        .map(|(at, record)| (record.key.clone(), at))
        .collect();
    let place = |(own, record): &(usize, Record)| {
        let key = if record.key.starts_with(TREE) {
            record.key.as_str()
        } else {
            ""
        };
        let above = key.match_indices('/').map(|(end, _)| &key[..end]);
        let last = above.filter_map(|key| at.get(key)).max();
        (
            last.copied().unwrap_or(0).max(*own),
            key.matches('/').count(),
        )
    };
    let mut placed: Vec<(usize, Record)> = records.into_iter().enumerate().collect();
    placed.sort_by_cached_key(place);
    placed.into_iter().map(|(_, record)| record).collect()
}

#[cfg(test)]
mod tests {
    //! Goal: durability, listing and retries follow from the same list.

    use super::*;
    use crate::store::StateStore;
    use serde_json::json;
    use std::path::Path;
    use std::sync::Arc;

    use parking_lot::Mutex;

    /// A store in memory that can be made to fail.
    #[derive(Clone, Default)]
    struct Fake(Arc<Mutex<(Vec<Change>, bool)>>);

    impl StateStore for Fake {
        fn load(&mut self) -> Result<Vec<Record>, StoreError> {
            let put = |c: &Change| match &c.0[0] {
                Edit::Put(r) => Some(r.clone()),
                _ => None,
            };
            Ok(self.0.lock().0.iter().filter_map(put).collect())
        }

        fn commit(&mut self, change: &Change) -> Result<(), StoreError> {
            let mut inner = self.0.lock();
            if inner.1 {
                return Err(StoreError::Gone);
            }
            inner.0.push(change.clone());
            Ok(())
        }
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(work)
    }

    fn put(key: &str) -> Change {
        Change::put(key, "make", json!({ "name": key }))
    }

    #[test]
    fn declared_objects_are_listed_and_not_stored() {
        let fake = Fake::default();
        let journal = Journal::new(Some(Store::on(fake.clone(), Path::new("x"))));
        run(async {
            journal.commit(put("a")).await.unwrap();
            declaring(journal.commit(put("b"))).await.unwrap();
            journal.commit(put("a")).await.unwrap();
        });
        assert_eq!(
            fake.0.lock().0,
            [put("a")],
            "neither the declared one nor the unchanged one"
        );
        assert_eq!(
            journal
                .entries()
                .iter()
                .map(|e| e.durable)
                .collect::<Vec<_>>(),
            [true, false]
        );
    }

    /// Goal: a fact is stored for RPC and declared devices, is not listed as an object, and
    /// survives a restart.
    #[test]
    fn facts_are_kept_beside_the_objects() {
        let fake = Fake::default();
        let start = || Journal::new(Some(Store::on(fake.clone(), Path::new("x"))));
        let uuid = Uuid::from_u128(5);
        let fact = |inode: u64| Change::put(seen_key(uuid), "seen", json!({ "inode": inode }));
        let journal = start();
        run(async {
            declaring(journal.commit(put("a").and(fact(1))))
                .await
                .unwrap();
            declaring(journal.commit(fact(1))).await.unwrap();
        });
        assert_eq!(fake.0.lock().0, [fact(1)], "once, and alone");
        let journal = start();
        assert_eq!(run(journal.load()).unwrap(), 0);
        assert_eq!(journal.seen(uuid), Some(json!({ "inode": 1 })));
        let before = journal.set_seen(uuid, None);
        assert_eq!(journal.seen(uuid), None);
        journal.set_seen(uuid, before);
        run(journal.commit(Change::remove(seen_key(uuid)))).unwrap();
        assert_eq!(journal.seen(uuid), None);
    }

    #[test]
    fn a_failing_store_refuses_the_change() {
        let fake = Fake::default();
        fake.0.lock().1 = true;
        let journal = Journal::new(Some(Store::on(fake, Path::new("x"))));
        let refused = run(journal.commit(put("a"))).unwrap_err();
        assert_eq!(refused.code, crate::rpc::error::INTERNAL_ERROR);
        assert!(journal.entries().is_empty());
    }

    /// Goal: parts that RPC added to a declared object are exported and replayed after it, although
    /// they are loaded before it is created.
    #[test]
    fn parts_follow_their_parent() {
        let fake = Fake::default();
        fake.0.lock().0 = vec![
            put("nvmf/a/part"),
            put("nvmf/b"),
            put("nvmf/a/part/of"),
            put("bdev/a/other"),
        ];
        let journal = Journal::new(Some(Store::on(fake, Path::new("x"))));
        run(journal.load()).unwrap();
        run(declaring(journal.commit(put("nvmf/a")))).unwrap();
        run(declaring(journal.commit(put("bdev/a")))).unwrap();
        let waiting: Vec<String> = journal.waiting().into_iter().map(|r| r.key).collect();
        let parts = ["nvmf/a/part", "nvmf/a/part/of"];
        assert_eq!(waiting, ["nvmf/b", "bdev/a/other", parts[0], parts[1]]);
        let all: Vec<String> = journal
            .entries()
            .into_iter()
            .map(|e| e.record.key)
            .collect();
        assert_eq!(
            all,
            [
                "nvmf/b",
                "bdev/a/other",
                "nvmf/a",
                parts[0],
                parts[1],
                "bdev/a"
            ]
        );
    }

    #[test]
    fn stored_parts_are_replayed_after_their_parent() {
        let order = ["a/b/c", "x", "a/b", "y", "a", "z", "a/d"];
        let records = order.map(|key| Record {
            key: format!("nvmf/{key}"),
            method: "m".into(),
            params: json!({}),
        });
        let ordered = |records: &[Record]| -> Vec<String> {
            let ordered = parents_first(records.to_vec()).into_iter();
            ordered
                .map(|r| r.key.split_once('/').unwrap().1.to_owned())
                .collect()
        };
        let parts = ["x", "y", "a", "a/b", "a/b/c", "z", "a/d"];
        assert_eq!(ordered(&records), parts);
        // The name of a device may contain the name of another and a slash.
        let names = records.map(|record| Record {
            key: record.key.replace("nvmf/", "bdev/"),
            ..record
        });
        assert_eq!(ordered(&names), order);
    }

    #[test]
    fn failed_records_are_kept_and_retried() {
        let fake = Fake::default();
        fake.0.lock().0 = vec![put("a"), put("b")];
        let journal = Journal::new(Some(Store::on(fake, Path::new("x"))));
        run(journal.load()).unwrap();
        assert_eq!(journal.waiting().len(), 2);
        journal.restored("a", Err(RpcError::internal("no disk")));
        run(journal.commit(put("b"))).unwrap();
        assert_eq!(
            journal
                .waiting()
                .iter()
                .map(|r| r.key.as_str())
                .collect::<Vec<_>>(),
            ["a"]
        );
        journal.restored("a", Err(RpcError::internal("no disk")));
        assert!(matches!(
            journal.find("a").unwrap().state,
            EntryState::Failed { attempts: 2, .. }
        ));
        journal.restored("a", Ok(()));
        assert!(journal.waiting().is_empty());
    }
}
