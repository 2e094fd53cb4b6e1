//! All keys of one kind (exports, snapshots) for which the engine does the work, as etcd has them.

use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Followed<Id, Key> {
    pub(super) all: BTreeMap<Id, Key>,
    /// The engine does not know the present ones yet.
    has_news: bool,
}

impl<Id, Key> Default for Followed<Id, Key> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            has_news: false,
        }
    }
}

impl<Id: Ord, Key> Followed<Id, Key> {
    pub(super) fn put(&mut self, id: Id, key: Key) {
        self.all.insert(id, key);
        self.has_news = true;
    }

    pub(super) fn deleted(&mut self, id: &Id) {
        self.all.remove(id);
        self.has_news = true;
    }

    /// The list has arrived, which may be empty.
    pub(super) fn listed(&mut self) {
        self.has_news = true;
    }

    pub(super) fn take_news(&mut self) -> Option<&BTreeMap<Id, Key>> {
        std::mem::take(&mut self.has_news).then_some(&self.all)
    }
}
