//! Goal: a check of a pool in use finds and repairs damage of its metadata, names what it cannot
//! repair, and ends when the pool closes. Method: pages of a valid image are damaged.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::content::value;
use super::damage::image;
use super::disk::{ALL_SECTORS, Crash};
use super::rig::{self, Pending, Rig, identity};
use crate::check::{CheckReport, Extent, Finding};
use crate::geometry::PAGE;
use crate::ids::{Place, VersionId};
use crate::interface::{Answer, Refusal, Request};
use crate::map::Node;
use crate::mutation::Mutation;

fn checked(rig: &mut Rig) -> CheckReport {
    match rig.run(Request::Check) {
        Ok(Answer::Checked(report)) => *report,
        other => panic!("{other:?}"),
    }
}

/// A pool whose last root has all kinds of pages, and its pages.
fn with_pages() -> (Rig, Vec<u64>) {
    let (disk, volume, _) = image();
    let (mut rig, _) = rig::import(disk).unwrap();
    rig.finish();
    rig.wrote(volume, 5, &[(2, value(1, 22, 7))]);
    rig.pool.checkpoint();
    rig.finish();
    let pages = rig.pool.zones().pages().collect();
    (rig, pages)
}

fn flip(rig: &mut Rig, page: u64) {
    let block = rig.geometry().page_offset(page) as usize / PAGE;
    rig.disk.corrupt(block, |bytes| bytes[200] ^= 1);
}

/// Damages a copy of each metadata page in turn, and checks.
fn check_each_page() {
    let (mut rig, pages) = with_pages();
    let sound = checked(&mut rig);
    assert_eq!((sound.repaired, sound.findings), (0, vec![]));
    assert!(sound.pages > 5 && sound.units > 10, "{:?}", sound.units);
    let mut repaired = 0;
    for page in pages {
        flip(&mut rig, page);
        let report = checked(&mut rig);
        assert_eq!((report.findings, report.not_repaired), (vec![], 0));
        repaired += report.repaired;
    }
    assert_eq!(repaired, 2 * sound.pages, "each copy of the root's pages");
    // The check has flushed its repairs: power fails now.
    let (_, report) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    assert_eq!(
        (report.healed, report.lost, report.fell_back),
        (0, 0, false)
    );
}

#[test]
fn a_check_repairs_copies() {
    check_each_page();
    Mutation::activate(Some(Mutation::CheckNoSums));
    let outcome = catch_unwind(AssertUnwindSafe(check_each_page));
    Mutation::activate(None);
    assert!(outcome.is_err(), "bad pages are not noticed");
}

/// Goal: a check writes a page again that is lost in both copies: the memory has the contents.
/// Method: each pair of equal pages is damaged, in a pool of its own.
#[test]
fn a_check_repairs_pages_without_a_copy() {
    let (rig, pages) = with_pages();
    let read = |page| {
        let block = rig.geometry().page_offset(page) as usize / PAGE;
        rig.disk.read(block)
    };
    let (mut rewritten, mut lists) = (0, 0);
    for (at, first) in pages.iter().enumerate() {
        let mut others = pages[at + 1..].iter();
        let Some(second) = others.find(|page| read(**page) == read(*first)) else {
            continue;
        };
        let (mut rig, _) = with_pages();
        flip(&mut rig, *first);
        flip(&mut rig, *second);
        let report = checked(&mut rig);
        match (report.repaired, &report.findings[..]) {
            (2, []) => rewritten += 1,
            (0, [Finding::ListLost { .. }]) => lists += 1,
            // Pages of the root before.
            (0, []) => continue,
            _ => panic!("{report:?}"),
        }
        rig.finish();
        rig.run(Request::Flush).unwrap();
        assert_eq!((checked(&mut rig).repaired, rig.pool.check()), (0, vec![]));
        let (_, report) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
        assert_eq!(
            (report.healed, report.lost, report.fell_back),
            (0, 0, false)
        );
    }
    assert!(rewritten > 3 && lists == 3, "{rewritten} {lists}");
}

/// The place of a node of a version's map, below the root along these children.
fn place_of(rig: &Rig, version: VersionId, children: &[usize]) -> Place {
    let mut node = rig.pool.state().versions[&version].tree.root.as_ref();
    for child in children {
        node = match node.map(|node| &**node) {
            Some(Node::Interior(interior)) => interior.children[*child].as_ref(),
            other => panic!("{other:?}"),
        };
    }
    node.unwrap().pages().expect("on the disk").first.place
}

/// So many leaves of a version.
fn leaves(number: u64, first: u64, count: u64) -> Extent {
    const LEAF: u64 = 64 << 10;
    Extent {
        lvol: identity(number).id,
        offset: first * LEAF,
        bytes: count * LEAF,
    }
}

fn flip_both(rig: &mut Rig, place: Place) {
    flip(rig, place.a);
    flip(rig, place.b);
}

/// The pool after the loss of a node of a version in both copies, and an import.
fn after_loss(of_snapshot: bool, children: &[usize]) -> Rig {
    let (disk, volume, snapshot) = image();
    let (mut rig, _) = rig::import(disk).unwrap();
    rig.finish();
    let version = if of_snapshot { snapshot } else { volume };
    let place = place_of(&rig, version, children);
    flip_both(&mut rig, place);
    let (mut rig, report) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
    assert_eq!(report.lost, 1);
    rig.finish();
    rig
}

/// The root of a version that did not change is older than the pool's root. The check makes its
/// page again, too.
#[test]
fn a_check_repairs_an_old_root_after_an_import() {
    let mut rig = Rig::create(96, 40, true);
    let old = rig.created(1, 16, false);
    let new = rig.created(2, 16, false);
    for place in 0..10 {
        rig.wrote(old, place, &[(1, value(1, place * 4 + 1, 1))]);
    }
    rig.pool.checkpoint();
    rig.finish();
    rig.wrote(new, 0, &[(1, value(2, 1, 1))]);
    rig.pool.checkpoint();
    rig.finish();
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
    rig.finish();
    let root = place_of(&rig, old, &[]);
    flip_both(&mut rig, root);
    let report = checked(&mut rig);
    assert_eq!((report.repaired, report.findings), (2, vec![]));
    let (_, report) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    assert_eq!((report.healed, report.lost), (0, 0));
}

/// A page that names the place of a lost leaf cannot be made again: the report says so. Earlier
/// versions left such pages.
#[test]
fn a_check_names_a_node_that_it_cannot_make_again() {
    Mutation::activate(Some(Mutation::KeepParentOfLost));
    let mut rig = after_loss(false, &[1, 0]);
    Mutation::activate(None);
    let snapshot = rig.find(2).unwrap();
    let parent = place_of(&rig, snapshot, &[1]);
    flip_both(&mut rig, parent);
    let report = checked(&mut rig);
    let page = parent.a;
    let lost = Finding::Lost {
        at: leaves(2, 2, 1),
    };
    assert_eq!(report.repaired, 0);
    assert!(report.findings.contains(&lost), "{report:?}");
    let at = leaves(2, 2, 2);
    let node = Finding::NodeLost { page, at };
    assert!(report.findings.contains(&node), "{report:?}");
    assert_eq!(report.findings.len(), 2, "{report:?}");
}

/// A lost subtree is one finding, which names the snapshot that has it: the volume shares it. The
/// versions above it share units with it: none of them is called stray or leaked.
#[test]
fn a_check_names_a_lost_subtree_once() {
    let lost = |number, leaf, count| {
        let at = leaves(number, leaf, count);
        vec![Finding::Lost { at }]
    };
    assert_eq!(
        checked(&mut after_loss(false, &[1])).findings,
        lost(2, 2, 2)
    );
    assert_eq!(checked(&mut after_loss(true, &[0])).findings, lost(2, 0, 2));
    assert_eq!(checked(&mut after_loss(true, &[])).findings, lost(2, 0, 4));
}

/// A repair counts once a flush has made it durable.
#[test]
fn a_check_flushes_before_it_reports() {
    for fails in [false, true] {
        let (mut rig, pages) = with_pages();
        let page = pages.into_iter().find(|page| {
            let (mut rig, _) = with_pages();
            flip(&mut rig, *page);
            checked(&mut rig).repaired == 1
        });
        flip(&mut rig, page.unwrap());
        let check = rig.submit(Request::Check);
        rig.finish_but(|pending| matches!(pending, Pending::Flush { .. }));
        assert_eq!((rig.pending.len(), rig.answers.len()), (1, 0));
        rig.end_with(0, fails);
        rig.finish();
        let Ok(Answer::Checked(report)) = rig.take_answer(check) else {
            panic!("no report");
        };
        let copies = (report.repaired, report.not_repaired);
        assert_eq!(copies, if fails { (0, 1) } else { (1, 0) });
    }
}

/// The I/O of a check has a bound, also while it repairs.
#[test]
fn a_check_has_few_io_in_flight() {
    let (mut rig, pages) = with_pages();
    let mut copies = HashSet::new();
    for page in pages {
        let block = rig.geometry().page_offset(page) as usize / PAGE;
        if copies.insert(rig.disk.read(block).copied()) {
            flip(&mut rig, page);
        }
    }
    let check = rig.submit(Request::Check);
    rig.pump();
    let mut most = 0;
    while rig.answers.is_empty() {
        most = most.max(rig.pending.len());
        rig.end(rig.pending.len() / 2);
    }
    assert!(matches!(rig.take_answer(check), Ok(Answer::Checked(_))));
    assert!((6..=8).contains(&most), "{most}");
}

/// An export does not wait for the pages and leaves that are left, and no further check begins.
#[test]
fn a_closing_pool_ends_its_check() {
    let (mut rig, pages) = with_pages();
    for page in pages.iter().step_by(2) {
        flip(&mut rig, *page);
    }
    let checks = [Request::Check, Request::Check].map(|check| rig.submit(check));
    rig.pump();
    for _ in 0..3 {
        rig.end(0);
    }
    let export = rig.submit(Request::Export);
    rig.finish();
    for check in checks {
        assert_eq!(rig.take_answer(check), Err(Refusal::Exported));
    }
    assert_eq!(rig.take_answer(export), Ok(Answer::Done));
    rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
}
