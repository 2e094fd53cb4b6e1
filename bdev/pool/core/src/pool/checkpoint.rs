//! Checkpoints: an image of the state, then the root that makes it count.
//!
//! ```text
//!   Drain ──▶ Pages ──▶ Settle ──▶ FlushPages ──▶ Roots ──▶ FlushRoots
//!   records   window    all up to  pages before   two       before log
//!   in flight           the image  the root       places    pages go
//! ```
//!
//! The image is exact: first writes pause until the records in flight have ended (one I/O), so the
//! records after the image are the ones to replay, each once. Copies that still read their sources
//! have no record yet: nothing waits for them, and their records come after the image. The last two
//! images keep their pages, and the log is kept from the older one on.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Purpose;
use super::discards::Discards;
use super::store::Store;
use crate::disks::Location;
use crate::format::Page;
use crate::format::superblock::{PoolState, Superblock};
use crate::ids::Lsn;
use crate::image::{Encoder, Image};
use crate::interface::Answer;
use crate::log::LogPosition;
use crate::mutation::Mutation;

#[derive(Debug)]
pub(super) struct Checkpoint {
    stage: CheckpointStage,
    /// The image of the last root.
    last: Arc<Image>,
    /// The image before it: the disk may fall back to it.
    before_last: Arc<Image>,
    /// Pages of roots before the import.
    old_pages: Vec<u64>,
    /// Units that the log before the import refers to: in use until the first root is durable.
    until_root: Vec<u64>,
    /// Log position of the last root.
    log_start: u64,
    /// The next image writes all pages of the directory again.
    rewrites_directory: bool,
    /// Pages to write with the first checkpoint: copies to heal, places to wipe.
    repairs: Vec<(Location, Arc<Page>)>,
}

#[derive(Debug)]
enum CheckpointStage {
    Idle,
    Drain,
    Writing(Box<Writing>),
}

#[derive(Debug)]
struct Writing {
    image: Image,
    lsn: Lsn,
    log: LogPosition,
    superblock: Superblock,
    step: CheckpointStep,
    queue: VecDeque<(Location, Arc<Page>)>,
    in_flight: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckpointStep {
    Pages,
    Settle,
    FlushPages,
    Roots,
    RootsInFlight,
    FlushRoots,
    Done,
}

impl Checkpoint {
    pub(super) fn first(
        last: Image,
        old_pages: Vec<u64>,
        until_root: Vec<u64>,
        repairs: Vec<(Location, Arc<Page>)>,
    ) -> Self {
        Self {
            stage: CheckpointStage::Idle,
            last: Arc::new(last),
            before_last: Arc::default(),
            old_pages,
            until_root,
            log_start: 0,
            rewrites_directory: false,
            repairs,
        }
    }

    /// Units that count as used until the first root is durable.
    pub(super) fn until_root(&self) -> &[u64] {
        &self.until_root
    }

    pub(super) fn rewrite_directory(&mut self, is_lost: bool) {
        self.rewrites_directory |= is_lost;
    }

    /// The image of the root that is on the disk.
    pub(super) fn image(&self) -> Arc<Image> {
        Arc::clone(&self.last)
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.stage, CheckpointStage::Idle)
    }

    /// First writes pause.
    pub(super) fn is_draining(&self) -> bool {
        matches!(self.stage, CheckpointStage::Drain)
    }

    pub(super) fn written(&mut self) {
        if let CheckpointStage::Writing(writing) = &mut self.stage {
            writing.in_flight -= 1;
        }
    }

    pub(super) fn flushed(&mut self) {
        if let CheckpointStage::Writing(writing) = &mut self.stage {
            writing.step = match writing.step {
                CheckpointStep::FlushPages => CheckpointStep::Roots,
                _ => CheckpointStep::Done,
            };
        }
    }
}

impl Checkpoint {
    /// Takes every step that is possible. `is_quiet`: no record is in flight.
    pub(super) fn advance(&mut self, store: &mut Store, discards: &mut Discards, is_quiet: bool) {
        let since_root = store.log.next_sequence() - self.log_start;
        let is_due = store.wants_checkpoint
            || store.state.changed_nodes >= store.limits.changed_nodes
            || since_root >= store.superblock.geometry.log_pages / 8;
        if matches!(self.stage, CheckpointStage::Idle) {
            if !is_due {
                return;
            }
            // Without changes the log has marks only: a root would show nothing new.
            if !store.has_changes && store.log.has_room() {
                store.wants_checkpoint = false;
                return;
            }
            self.stage = CheckpointStage::Drain;
        }
        if self.is_draining() && is_quiet {
            self.take_image(store, discards);
        }
        self.write_image(store, discards);
    }

    /// The state now, as pages. The records after it begin on a page of their own.
    fn take_image(&mut self, store: &mut Store, discards: &mut Discards) {
        if store.has_root {
            if !store.log.may_emit() {
                return;
            }
            store.emit_page(false);
        }
        if Mutation::ReuseRootPages.is_active() && store.has_root {
            self.last = Arc::default();
            self.before_last = Arc::default();
            store.free_garbage();
        }
        let lsn = store.log.next_lsn() - 1;
        let mut encoder = Encoder {
            geometry: &store.superblock.geometry,
            tag: store.superblock.tag(),
            lsn,
            zones: &mut store.zones,
            space: &mut store.space,
            garbage: &store.garbage,
            writes: Vec::new(),
        };
        let none = Image::default();
        let reused = if std::mem::take(&mut self.rewrites_directory) {
            &none
        } else {
            &*self.last
        };
        let image = encoder.encode(&store.state.versions, reused);
        let writes = std::mem::take(&mut encoder.writes);
        let disks = &store.superblock.disks;
        let writes = writes
            .into_iter()
            .map(|(page, bytes)| (disks.page(page), bytes));
        let mut queue = VecDeque::from(std::mem::take(&mut self.repairs));
        queue.extend(writes);
        let Ok(image) = image else {
            store.held = true;
            store.has_news = true;
            return;
        };
        let log = store.log.position();
        let grown = store.next_root.growth.as_ref();
        let grown = grown.filter(|growth| growth.is_labelled());
        let mut disks = grown
            .map_or(&store.superblock.disks, |grown| &grown.disks)
            .clone();
        if let Some(change) = store.next_root.table {
            disks.set_state(change.disk, change.state);
        }
        let name = store.next_root.naming.as_ref().map(|(_, name)| name);
        let superblock = Superblock {
            name: name.unwrap_or(&store.superblock.name).clone(),
            sequence: store.superblock.sequence + 1,
            imports: log.imports,
            state: if store.exporting.is_some() {
                PoolState::Exported
            } else {
                PoolState::Open
            },
            geometry: grown.map_or(store.superblock.geometry, |grown| grown.geometry),
            checkpoint: lsn,
            settled: lsn,
            log_sequence: log.sequence,
            log_previous: log.previous,
            directory: image.index,
            page_map: image.page_map,
            next_generation: store.state.next_generation,
            required: store.superblock.required | store.next_root.features | disks.features(),
            disks,
            ..store.superblock.clone()
        };
        store.next_root.writing = Some(std::mem::take(&mut store.state.changed_nodes));
        store.has_changes = false;
        store.wants_checkpoint = false;
        store.settle.want(lsn);
        discards.collect(store);
        self.stage = CheckpointStage::Writing(Box::new(Writing {
            image,
            lsn,
            log,
            superblock,
            step: CheckpointStep::Pages,
            queue,
            in_flight: 0,
        }));
    }

    fn write_image(&mut self, store: &mut Store, discards: &mut Discards) {
        loop {
            let CheckpointStage::Writing(writing) = &mut self.stage else {
                return;
            };
            match writing.step {
                CheckpointStep::Pages => {
                    if writing.in_flight < store.limits.page_window
                        && let Some((at, bytes)) = writing.queue.pop_front()
                    {
                        writing.in_flight += 1;
                        store.write(Purpose::Page, at, bytes);
                        continue;
                    }
                    if writing.in_flight > 0 && !Mutation::RootBeforePages.is_active() {
                        return;
                    }
                    writing.step = CheckpointStep::Settle;
                }
                CheckpointStep::Settle => {
                    // An import that falls back to the root before must not verify them again.
                    if store.settle.settled() < writing.lsn {
                        return;
                    }
                    writing.step = CheckpointStep::FlushPages;
                    let skip = Mutation::RootBeforePages.is_active();
                    store.flush(Purpose::CheckpointFlush, skip);
                }
                CheckpointStep::Roots => {
                    writing.in_flight += store.write_roots(&writing.superblock);
                    writing.step = CheckpointStep::RootsInFlight;
                }
                CheckpointStep::RootsInFlight => {
                    if writing.in_flight > 0 {
                        return;
                    }
                    writing.step = CheckpointStep::FlushRoots;
                    store.flush(Purpose::CheckpointFlush, false);
                }
                CheckpointStep::FlushPages | CheckpointStep::FlushRoots => return,
                CheckpointStep::Done => {
                    discards.release();
                    return self.root_is_durable(store);
                }
            }
        }
    }

    /// The older image and the log before the last root are needed no more.
    fn root_is_durable(&mut self, store: &mut Store) {
        let stage = std::mem::replace(&mut self.stage, CheckpointStage::Idle);
        let CheckpointStage::Writing(writing) = stage else {
            unreachable!("a root was written");
        };
        let before = std::mem::replace(&mut store.superblock, writing.superblock);
        store.advance_features(&before);
        store.advance_growth();
        store.advance_table();
        store.advance_naming();
        store.next_root.replaced = store.next_root.writing.take().unwrap_or(0);
        let is_first = !store.has_root;
        let last = std::mem::replace(&mut self.last, Arc::new(writing.image));
        self.before_last = last;
        if is_first {
            store.has_root = true;
            for unit in std::mem::take(&mut self.until_root) {
                store.space.give_back(unit);
            }
        } else {
            store.log.set_tail(self.log_start);
            for page in std::mem::take(&mut self.old_pages) {
                store.zones.free(page, &mut store.space);
            }
        }
        if store.superblock.state == PoolState::Exported {
            store.is_exported = true;
            if let Some(token) = store.exporting {
                store.answer(token, Ok(Answer::Done));
            }
        }
        self.log_start = writing.log.sequence;
        store.free_garbage();
        store.has_news = true;
    }
}
