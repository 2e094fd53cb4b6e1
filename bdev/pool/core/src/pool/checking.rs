//! A check of the whole pool while it serves: every page of the last root in both copies, and every
//! unit against the maps.
//!
//! ```text
//!   last root, held ──▶ pages ──▶ both copies read ──▶ a bad one is written again
//!   state, copied   ──▶ leaves ──▶ each unit has one owner ──▶ used units = owned units
//! ```
//!
//! A copied state shares all nodes, so requests go on meanwhile. Each step is short: it ends with a
//! read, and the next one begins when that has ended. Of a page that is lost in both copies the
//! memory has the contents: it is written again too.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::store::Store;
use super::{Attempt, Pool, Purpose};
use crate::check::{Accounts, findings};
use crate::format::{Page, checksum};
use crate::geometry::PAGE;
use crate::ids::{IoId, Place, Token};
use crate::image::{Image, encode_again};
use crate::interface::{Answer, Intent, IoFailed};
use crate::map::Node;
use crate::mutation::Mutation;
use crate::report::{CheckReport, Finding};

/// Reads in flight.
const WINDOW: usize = 8;
/// Leaves whose units a step counts.
const LEAVES: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Checking {
    check: Option<Box<Check>>,
}

#[derive(Debug)]
struct Check {
    token: Token,
    /// The root that is read: its pages are not reused while it is here.
    image: Arc<Image>,
    accounts: Option<Accounts>,
    /// Nodes whose pages are still to be read, each with its levels and its first leaf.
    nodes: Vec<(Arc<Node>, u32, u64)>,
    /// First pages of nodes that were visited: versions share nodes.
    visited: HashSet<u64>,
    pages: VecDeque<Target>,
    reads: HashMap<IoId, (u64, bool)>,
    /// Pages of which a copy is being read, by their first copy.
    pairs: HashMap<u64, Pair>,
    /// Repairs in flight.
    writes: HashSet<IoId>,
    report: CheckReport,
    /// The next image must write the directory again.
    has_lost_list: bool,
}

/// A page to read.
#[derive(Debug)]
struct Target {
    place: Place,
    /// `None`: a page of the directory or of a list, which a new root can write again.
    node: Option<(Arc<Node>, u32, u64)>,
}

#[derive(Debug)]
struct Pair {
    target: Target,
    /// Copies that are read: the sound contents, or that there are none.
    copies: [Option<Result<Arc<Page>, IoFailed>>; 2],
}

impl Checking {
    pub(super) fn is_idle(&self) -> bool {
        self.check.is_none()
    }

    /// True once after a page of the directory was lost in both copies.
    pub(super) fn take_lost_list(&mut self) -> bool {
        let check = self.check.as_mut();
        check.is_some_and(|check| std::mem::take(&mut check.has_lost_list))
    }

    /// Gives up. Returns the token of the request.
    pub(super) fn drain(&mut self) -> Option<Token> {
        self.check.take().map(|check| check.token)
    }

    fn begin(&mut self, token: Token, image: Arc<Image>, accounts: Accounts, levels: u32) {
        let roots = image.trees().iter().filter_map(|tree| tree.root.as_ref());
        let nodes = roots.map(|root| (Arc::clone(root), levels, 0)).collect();
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
        while check.reads.len() < WINDOW {
            let Some(target) = check.next_page(store) else {
                break;
            };
            check.read(store, target);
        }
        if !check.reads.is_empty() || !check.writes.is_empty() {
            return;
        }
        if check.accounts.is_some() {
            // No page is left to read: a read of the root paces the rest.
            let offset = store.superblock.geometry.superblock_offsets()[0];
            let io = store.io(Purpose::CheckPace);
            store.out.push_back(Intent::ReadPage { io, offset });
            check.reads.insert(io, (u64::MAX, false));
            return;
        }
        if let Some(check) = self.check.take() {
            store.answer(check.token, Ok(Answer::Checked(Box::new(check.report))));
            // Another check may wait.
            store.has_news = true;
        }
    }

    fn read_ended(&mut self, store: &mut Store, io: IoId, page: Result<&[u8], IoFailed>) {
        let Some(check) = &mut self.check else {
            return;
        };
        if let Some(accounts) = &mut check.accounts
            && accounts.advance(LEAVES, &mut check.report)
        {
            check.accounts = None;
        }
        let Some((pair, is_second)) = check.reads.remove(&io) else {
            return;
        };
        if pair != u64::MAX {
            check.copy_read(store, pair, is_second, page);
        }
    }

    pub(super) fn written(&mut self, io: IoId, result: Result<(), IoFailed>) {
        let Some(check) = &mut self.check else {
            return;
        };
        if check.writes.remove(&io) {
            match result {
                Ok(()) => check.report.repaired += 1,
                Err(IoFailed) => check.report.not_repaired += 1,
            }
        }
    }
}

impl Check {
    /// The next page of the root, in the order of the walk.
    fn next_page(&mut self, store: &Store) -> Option<Target> {
        while self.pages.is_empty() {
            let (node, levels, first) = self.nodes.pop()?;
            let Some(pages) = node.pages() else {
                if let Node::Lost { .. } = *node {
                    self.report.find(Finding::Lost { leaf: first });
                }
                continue;
            };
            if !self.visited.insert(pages.first.place.a) {
                continue;
            }
            let places = [Some(&pages.first), pages.rest.as_ref()];
            let targets = places.into_iter().flatten().map(|pair| Target {
                place: pair.place,
                node: Some((Arc::clone(&node), levels, first)),
            });
            self.pages.extend(targets);
            if let Node::Interior(interior) = &*node {
                let span = store.state.shape().span(levels - 1);
                let children = interior.children.iter().enumerate();
                self.nodes.extend(children.filter_map(|(at, child)| {
                    let child = Arc::clone(child.as_ref()?);
                    Some((child, levels - 1, first + at as u64 * span))
                }));
            }
        }
        self.pages.pop_front()
    }

    fn read(&mut self, store: &mut Store, target: Target) {
        let place = target.place;
        for (page, is_second) in [(place.a, false), (place.b, true)] {
            let io = store.io(Purpose::CheckRead);
            let offset = store.superblock.geometry.page_offset(page);
            store.out.push_back(Intent::ReadPage { io, offset });
            self.reads.insert(io, (place.a, is_second));
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
            let offset = store.superblock.geometry.page_offset(*page);
            let io = store.io(Purpose::CheckWrite);
            let bytes = Arc::clone(good);
            store.out.push_back(Intent::Write { io, offset, bytes });
            self.writes.insert(io);
        }
    }

    /// Both copies are bad: the memory has the contents.
    fn rewrite(&mut self, store: &mut Store, target: &Target) {
        let (geometry, tag) = (&store.superblock.geometry, store.superblock.tag());
        let place = target.place;
        let again = target.node.as_ref();
        let again = again.and_then(|(node, levels, first)| {
            let pages = encode_again(geometry, tag, node, *levels, *first);
            let mut pages = pages.into_iter();
            pages.find(|page| checksum(&page[..]) == place.sum)
        });
        match again {
            Some(page) => self.repair(store, &[place.a, place.b], &page),
            None => {
                self.has_lost_list = true;
                store.want_root();
                self.report.find(Finding::ListLost { page: place.a });
            }
        }
    }
}

impl Pool {
    /// Checks the whole state in memory at once: units against the maps, and counts. It visits
    /// every entry; [`Request::Check`] takes its time, and reads the disk as well.
    ///
    /// [`Request::Check`]: crate::interface::Request::Check
    pub fn check(&self) -> Vec<Finding> {
        let pending = self.pending_units();
        findings(self.state(), self.space(), self.zones(), pending)
    }

    /// The accounts of this moment.
    pub(crate) fn accounts(&self) -> Accounts {
        let (state, pending) = (self.state(), self.pending_units());
        Accounts::new(state, self.space(), self.zones(), pending)
    }

    /// A page that an intent `ReadPage` asked for.
    pub fn page_read(&mut self, io: IoId, page: Result<&[u8], IoFailed>) {
        self.store.has_news = true;
        debug_assert!(page.is_err() || page.is_ok_and(|page| page.len() == PAGE));
        if self.store.ios.remove(&io).is_some() {
            self.checking.read_ended(&mut self.store, io, page);
        }
    }

    pub(super) fn attempt_check(&mut self, token: Token) -> Attempt {
        if !self.checking.is_idle() {
            return Attempt::Wait;
        }
        let accounts = self.accounts();
        let levels = self.store.superblock.geometry.levels;
        let image = self.checkpoint.image();
        self.checking.begin(token, image, accounts, levels);
        self.store.has_news = true;
        Attempt::Begun
    }
}
