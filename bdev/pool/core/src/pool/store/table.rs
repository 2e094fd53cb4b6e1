//! A change of the table of disks: two roots have it before it counts.

use super::Store;
use crate::disks::DiskState;
use crate::mutation::Mutation;

/// A disk gets another state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) struct TableChange {
    pub disk: usize,
    pub state: DiskState,
    /// Roots with it that are durable.
    roots: u32,
}

impl Store {
    /// Begins a change; no other is in progress.
    pub(in crate::pool) fn change_table(&mut self, disk: usize, state: DiskState) {
        debug_assert!(self.next_root.has_same_table(), "one change at a time");
        self.next_root.table = Some(TableChange {
            disk,
            state,
            roots: 0,
        });
        self.want_root();
    }

    /// A root is durable.
    pub(in crate::pool) fn advance_table(&mut self) {
        let Some(change) = &mut self.next_root.table else {
            return;
        };
        let disk = self.superblock.disks.disks().get(change.disk);
        if disk.is_some_and(|disk| disk.state == change.state) {
            change.roots += 1;
        }
        if change.roots < change.needed() {
            self.want_root();
        }
    }

    /// True once, when enough roots have the change.
    pub(in crate::pool) fn is_table_written(&mut self) -> bool {
        let change = self.next_root.table;
        let written = change.filter(|change| change.roots >= change.needed());
        if written.is_some() {
            self.next_root.table = None;
        }
        written.is_some()
    }
}

impl TableChange {
    fn needed(&self) -> u32 {
        match self.state {
            DiskState::Gone if Mutation::DropBeforeRoot.is_active() => 0,
            DiskState::Gone if Mutation::DropAfterOneRoot.is_active() => 1,
            _ => 2,
        }
    }
}
