//! The check of a pool's metadata while hosts use the pool
//! ([`Request::Check`](crate::interface::Request::Check)). It reads both copies of every metadata
//! page, and compares every unit (64 KiB) with the block maps of the volumes and snapshots.
//!
//! ```text
//!   last root on the disk ──▶ read both copies of a page ──▶ write a bad copy again ──▶ flush
//!   state at the start    ──▶ count the units of some leaves ──▶ one owner each? ──▶ used = owned?
//! ```
//!
//! A *root* is a checkpoint: a superblock and the tree of pages below it. The pool reuses no page
//! of the root while the check has it. The state at the start costs no copy, as it shares the nodes
//! of the maps with the pool. Later requests replace nodes and do not alter them.
//!
//! Each turn of the pool takes at most one short step of the check, and only after an I/O of the
//! check has ended.
//!
//! If both copies of a page are bad, the check replaces them from memory. It encodes the page of a
//! map's node again; a page that does not become the same as before is a finding. For the other
//! pages (the directory, its index, the page map) it requests a new root, which writes them anew.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use uuid::Uuid;

use super::store::Store;
use super::{Attempt, Pool, Purpose};
use crate::check::{Accounts, findings};
use crate::format::{Page, checksum};
use crate::geometry::PAGE;
use crate::ids::{IoId, Place, Token};
use crate::image::{Image, encode_again};
use crate::interface::{Answer, Intent, IoFailed, Refusal};
use crate::map::Node;
use crate::mutation::Mutation;
use crate::report::{CheckReport, Extent, Finding};

/// Reads and writes of a check in flight.
const WINDOW: usize = 8;
/// Leaves whose units a step counts: a step takes about 0.1 ms.
const LEAVES: usize = 4;
/// Nodes that a step visits in search of a page: versions share nodes, and some have no page.
const NODES: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Checking {
    check: Option<Box<Check>>,
    /// The pool closes (an export): a check in progress ends, and no other begins.
    is_stopped: bool,
}

#[derive(Debug)]
struct Check {
    token: Token,
    /// The root that the check reads. The pool reuses none of its pages while the check has it.
    image: Arc<Image>,
    /// The comparison of units with the maps. `None`: it is complete.
    accounts: Option<Accounts>,
    /// Nodes whose pages are still to be read.
    nodes: Vec<Visit>,
    /// First pages of nodes that were visited: versions share nodes.
    visited: HashSet<u64>,
    pages: VecDeque<Target>,
    reads: HashMap<IoId, Read>,
    /// Pages with a read in flight, by their first copy.
    pairs: HashMap<u64, Pair>,
    /// Repairs in flight.
    writes: HashSet<IoId>,
    /// Copies that were written since the last flush.
    unflushed: u64,
    is_flushing: bool,
    /// An I/O has ended since the last step.
    may_step: bool,
    report: CheckReport,
    /// A page that belongs to no map was bad in both copies: the next root must write the whole
    /// directory again.
    has_lost_list: bool,
}

/// A node of the map of a version.
#[derive(Debug, Clone)]
struct Visit {
    node: Arc<Node>,
    levels: u32,
    first_leaf: u64,
    lvol: Uuid,
}

/// A page to read.
#[derive(Debug)]
struct Target {
    place: Place,
    /// The node of the page. `None`: a page of the directory, its index or the page map.
    node: Option<Visit>,
}

/// The purpose of a read in flight.
#[derive(Debug, Clone, Copy)]
enum Read {
    /// A copy of the page whose first copy is `pair`.
    Copy { pair: u64, is_second: bool },
    /// A read that only delays the next step: its contents are ignored.
    Pace,
}

#[derive(Debug)]
struct Pair {
    target: Target,
    /// The contents of each copy, or an error for a bad one. `None`: the read is in flight.
    copies: [Option<Result<Arc<Page>, IoFailed>>; 2],
}

impl Checking {
    pub(super) fn is_idle(&self) -> bool {
        self.check.is_none()
    }

    /// The outcome of a request for a check that cannot begin now: refused while the pool closes,
    /// waiting during another check.
    fn obstacle(&self) -> Option<Attempt> {
        if self.is_stopped {
            Some(Refusal::Exported.into())
        } else {
            self.check.as_ref().map(|_| Attempt::Wait)
        }
    }

    /// True once after both copies of a page of the directory, its index or the page map were bad.
    pub(super) fn take_lost_list(&mut self) -> bool {
        let check = self.check.as_mut();
        check.is_some_and(|check| std::mem::take(&mut check.has_lost_list))
    }

    /// Forgets the check at once. Returns the token of its request.
    pub(super) fn drain(&mut self) -> Option<Token> {
        self.check.take().map(|check| check.token)
    }

    /// Ends the check when its I/O has ended, without a report, and refuses further ones.
    pub(super) fn stop(&mut self) {
        self.is_stopped = true;
    }

    fn begin(&mut self, token: Token, image: Arc<Image>, accounts: Accounts, levels: u32) {
        let roots = image.trees().iter().filter_map(|(lvol, tree)| {
            Some(Visit {
                node: Arc::clone(tree.root.as_ref()?),
                levels,
                first_leaf: 0,
                lvol: *lvol,
            })
        });
        let nodes = roots.collect();
        let lists = image.pairs().map(|pair| Target {
            place: pair.place,
            node: None,
        });
        self.check = Some(Box::new(Check {
            token,
            pages: lists.collect(),
            image,
            accounts: Some(accounts),
            nodes,
            visited: HashSet::new(),
            reads: HashMap::new(),
            pairs: HashMap::new(),
            writes: HashSet::new(),
            unflushed: 0,
            is_flushing: false,
            may_step: true,
            report: CheckReport::default(),
            has_lost_list: false,
        }));
    }

    /// Takes a step. Ends the check when nothing is left.
    pub(super) fn advance(&mut self, store: &mut Store) {
        let Some(check) = &mut self.check else {
            return;
        };
        if Mutation::CheckWithoutRoot.is_active() {
            check.image = Arc::default();
        }
        if !self.is_stopped && !check.advance(store) {
            return;
        }
        // The root is held until no write to a page of its own is in flight.
        if check.in_flight() == 0
            && let Some(check) = self.check.take()
        {
            let report = Ok(Answer::Checked(Box::new(check.report)));
            let stopped = Err(Refusal::Exported);
            store.answer(check.token, if self.is_stopped { stopped } else { report });
            // Another request may wait for the end of the check.
            store.has_news = true;
        }
    }

    fn read_ended(&mut self, store: &mut Store, io: IoId, page: Result<&[u8], IoFailed>) {
        let Some(check) = &mut self.check else {
            return;
        };
        check.may_step = true;
        if let Some(Read::Copy { pair, is_second }) = check.reads.remove(&io) {
            check.copy_read(store, pair, is_second, page);
        }
    }

    pub(super) fn written(&mut self, io: IoId, result: Result<(), IoFailed>) {
        let Some(check) = &mut self.check else {
            return;
        };
        if check.writes.remove(&io) {
            check.may_step = true;
            match result {
                Ok(()) => check.unflushed += 1,
                Err(IoFailed) => check.report.not_repaired += 1,
            }
        }
    }

    pub(super) fn flushed(&mut self, result: Result<(), IoFailed>) {
        let Some(check) = &mut self.check else {
            return;
        };
        check.is_flushing = false;
        let copies = std::mem::take(&mut check.unflushed);
        match result {
            Ok(()) => check.report.repaired += copies,
            Err(IoFailed) => check.report.not_repaired += copies,
        }
    }
}

impl Check {
    fn in_flight(&self) -> usize {
        self.reads.len() + self.writes.len() + usize::from(self.is_flushing)
    }

    /// Counts some leaves, and reads pages as far as the window permits. Returns true when nothing
    /// is left to do.
    fn advance(&mut self, store: &mut Store) -> bool {
        if std::mem::take(&mut self.may_step) {
            if let Some(accounts) = &mut self.accounts
                && accounts.advance(LEAVES, &mut self.report)
            {
                self.accounts = None;
            }
            let mut nodes = NODES;
            // A page has two copies. The writes that repair them take the place of their reads.
            while self.in_flight() + 2 <= WINDOW
                && let Some(target) = self.next_page(store, &mut nodes)
            {
                self.read(store, target);
            }
        }
        if self.in_flight() > 0 {
            return false;
        }
        if self.accounts.is_some() || !self.nodes.is_empty() || !self.pages.is_empty() {
            // A read of the root paces the steps that read no page.
            let at = store
                .superblock
                .disks
                .superblocks(0, &store.superblock.geometry)[0];
            let io = store.io(Purpose::CheckRead);
            store.out.push_back(Intent::ReadPage { io, at });
            self.reads.insert(io, Read::Pace);
            return false;
        }
        if self.unflushed > 0 {
            self.is_flushing = true;
            store.flush(Purpose::CheckFlush, false);
            return false;
        }
        true
    }

    /// The next page of the root, in the order of the walk. Visits at most so many `nodes`.
    fn next_page(&mut self, store: &Store, nodes: &mut usize) -> Option<Target> {
        while self.pages.is_empty() {
            *nodes = nodes.checked_sub(1)?;
            let visit = self.nodes.pop()?;
            let Some(pages) = visit.node.pages() else {
                continue;
            };
            if !self.visited.insert(pages.first.place.a) {
                continue;
            }
            let places = [Some(&pages.first), pages.rest.as_ref()];
            let targets = places.into_iter().flatten().map(|pair| Target {
                place: pair.place,
                node: Some(visit.clone()),
            });
            self.pages.extend(targets);
            if let Node::Interior(interior) = &*visit.node {
                let levels = visit.levels - 1;
                let span = store.state.shape().span(levels);
                let children = interior.children.iter().enumerate();
                self.nodes.extend(children.filter_map(|(at, child)| {
                    Some(Visit {
                        node: Arc::clone(child.as_ref()?),
                        levels,
                        first_leaf: visit.first_leaf + at as u64 * span,
                        lvol: visit.lvol,
                    })
                }));
            }
        }
        self.pages.pop_front()
    }

    fn read(&mut self, store: &mut Store, target: Target) {
        let place = target.place;
        for (page, is_second) in [(place.a, false), (place.b, true)] {
            let io = store.io(Purpose::CheckRead);
            let at = store.superblock.disks.page(page);
            store.out.push_back(Intent::ReadPage { io, at });
            let pair = place.a;
            self.reads.insert(io, Read::Copy { pair, is_second });
        }
        let copies = [None, None];
        self.pairs.insert(place.a, Pair { target, copies });
        self.report.pages += 1;
    }

    fn copy_read(
        &mut self,
        store: &mut Store,
        pair: u64,
        is_second: bool,
        page: Result<&[u8], IoFailed>,
    ) {
        let Some(found) = self.pairs.get_mut(&pair) else {
            return;
        };
        let sum = found.target.place.sum;
        let page: Option<&Page> = page.ok().and_then(|bytes| bytes.first_chunk());
        let trust = Mutation::CheckNoSums.is_active();
        let page = page.filter(|page| checksum(&page[..]) == sum || trust);
        let page = page.map(|page| Arc::new(*page)).ok_or(IoFailed);
        found.copies[usize::from(is_second)] = Some(page);
        if found.copies.iter().any(Option::is_none) {
            return;
        }
        let Some(Pair { target, copies }) = self.pairs.remove(&pair) else {
            return;
        };
        let [Some(a), Some(b)] = copies else { return };
        let Place {
            a: at, b: other, ..
        } = target.place;
        match (a, b) {
            (Ok(_), Ok(_)) => {}
            (Ok(good), Err(IoFailed)) => self.repair(store, &[other], &good),
            (Err(IoFailed), Ok(good)) => self.repair(store, &[at], &good),
            (Err(IoFailed), Err(IoFailed)) => self.rewrite(store, &target),
        }
    }

    fn repair(&mut self, store: &mut Store, pages: &[u64], good: &Arc<Page>) {
        for page in pages {
            let at = store.superblock.disks.page(*page);
            let io = store.io(Purpose::CheckWrite);
            let bytes = Arc::clone(good);
            store.out.push_back(Intent::Write { io, at, bytes });
            self.writes.insert(io);
        }
    }

    /// Replaces a page whose two copies are bad. The check encodes a node's page from memory; for a
    /// page that belongs to no map, it requests a new root.
    fn rewrite(&mut self, store: &mut Store, target: &Target) {
        let (geometry, tag) = (&store.superblock.geometry, store.superblock.tag());
        let place = target.place;
        let Some(visit) = &target.node else {
            self.has_lost_list = true;
            store.want_root();
            return self.report.find(Finding::ListLost { page: place.a });
        };
        let Visit {
            node,
            levels,
            first_leaf,
            lvol,
        } = visit;
        let mut pages = encode_again(geometry, tag, node, *levels, *first_leaf).into_iter();
        match pages.find(|page| checksum(&page[..]) == place.sum) {
            Some(page) => self.repair(store, &[place.a, place.b], &page),
            // A node whose child was lost at the import: the page had the place of the child.
            None => {
                let shape = store.state.shape();
                let leaf_bytes = geometry.unit_bytes() * shape.units_per_leaf as u64;
                let at = Extent {
                    lvol: *lvol,
                    offset: first_leaf * leaf_bytes,
                    bytes: shape.span(*levels) * leaf_bytes,
                };
                let page = place.a;
                self.report.find(Finding::NodeLost { page, at });
            }
        }
    }
}

impl Pool {
    /// Compares every unit, and every volume's count of units, with the block maps, in one call and
    /// without I/O. It visits every map entry. [`Request::Check`] does the same in short steps, and
    /// reads the disk as well.
    ///
    /// [`Request::Check`]: crate::interface::Request::Check
    pub fn check(&self) -> Vec<Finding> {
        let pending = self.pending_units();
        findings(self.state(), self.space(), self.zones(), pending)
    }

    /// A new comparison of the units with the maps, as they are now.
    pub(crate) fn accounts(&self) -> Accounts {
        let (state, pending) = (self.state(), self.pending_units());
        Accounts::new(state, self.space(), self.zones(), pending)
    }

    /// Handles the end of an [`Intent::ReadPage`]: the contents of the page, or an error.
    pub fn page_read(&mut self, io: IoId, page: Result<&[u8], IoFailed>) {
        self.store.has_news = true;
        debug_assert!(page.is_err() || page.is_ok_and(|page| page.len() == PAGE));
        if self.store.ios.remove(&io).is_some() {
            self.checking.read_ended(&mut self.store, io, page);
        }
    }

    pub(super) fn attempt_check(&mut self, token: Token) -> Attempt {
        if let Some(obstacle) = self.checking.obstacle() {
            return obstacle;
        }
        let (accounts, image) = (self.accounts(), self.checkpoint.image());
        let levels = self.store.superblock.geometry.levels;
        self.checking.begin(token, image, accounts, levels);
        self.store.has_news = true;
        Attempt::Begun
    }
}
