//! Nodes of maps that are lost in both copies: what their places hold afterwards.

use std::sync::Arc;

use nacre_random::Random;

use super::content::value;
use super::disk::{ALL_SECTORS, Crash, Disk};
use super::external::checkpoint;
use super::rig::{self, Rig};
use crate::geometry::PAGE;
use crate::ids::{Place, VersionId};
use crate::image::encode_again;
use crate::interface::{Refusal, Request};
use crate::map::Node;
use crate::mutation::Mutation;

/// The nodes of all maps that have pages: the node, its levels, its first leaf.
fn nodes(rig: &Rig) -> Vec<(Arc<Node>, u32, u64)> {
    let state = rig.pool.state();
    let shape = state.shape();
    let roots = state.versions.values();
    let roots = roots.filter_map(|version| version.tree.root.clone());
    let mut left: Vec<_> = roots.map(|root| (root, shape.levels, 0)).collect();
    let mut found: Vec<(Arc<Node>, u32, u64)> = Vec::new();
    while let Some((node, levels, first)) = left.pop() {
        if found.iter().any(|(known, ..)| Arc::ptr_eq(known, &node)) {
            continue;
        }
        if let Node::Interior(interior) = &*node {
            let children = interior.children.iter().enumerate();
            left.extend(children.filter_map(|(at, child)| {
                let first = first + at as u64 * shape.span(levels - 1);
                Some((child.clone()?, levels - 1, first))
            }));
        }
        if node.pages().is_some() {
            found.push((node, levels, first));
        }
    }
    found
}

fn places(rig: &Rig) -> Vec<Place> {
    let nodes = nodes(rig);
    let pages = nodes.iter().filter_map(|(node, ..)| node.pages());
    pages.map(|pages| pages.first.place).collect()
}

fn unmap(version: VersionId, first: u64) -> Request {
    Request::Unmap {
        version,
        first,
        granules: 1,
    }
}

/// A pool with volumes beside each other, a snapshot, and volumes on a device.
fn pool() -> Rig {
    let mut rig = Rig::create(128, 40, true);
    for family in [1, 2] {
        let volume = rig.created(family, 16, false);
        for place in 0..16 {
            let at = place * 4 + 1;
            rig.wrote(volume, place, &[(1, value(family, at, 1))]);
        }
        rig.snapshot(volume, 10 + family);
        rig.wrote(volume, 1, &[(2, value(family, 6, 2))]);
    }
    rig.on_device(20, 7, 9);
    let version = rig.on_device(21, 7, 9);
    rig.run(unmap(version, 1)).unwrap();
    checkpoint(&mut rig);
    rig
}

fn without(rig: &Rig, place: Place) -> Disk {
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    for page in [place.a, place.b] {
        let block = disk.block(rig.pool.superblock().disks.page(page));
        disk.corrupt(block, |bytes| *bytes = [0; PAGE]);
    }
    disk
}

fn pages_of_nodes(rig: &Rig) -> usize {
    let nodes = nodes(rig);
    let pages = nodes.iter().filter_map(|(node, ..)| node.pages());
    let pairs = pages.map(|pages| 1 + usize::from(pages.rest.is_some()));
    2 * pairs.sum::<usize>()
}

/// Nodes whose page is not what they are now.
fn stale(rig: &Rig) -> usize {
    let superblock = rig.pool.superblock();
    let nodes = nodes(rig);
    let differs = |(node, levels, first): &&(Arc<Node>, u32, u64)| {
        let tag = superblock.tag();
        let now = encode_again(&superblock.geometry, tag, node, *levels, *first);
        let place = node.pages().unwrap().first.place;
        let block = rig.disk.block(superblock.disks.page(place.a));
        rig.disk.read(block).unwrap() != &*now[0]
    };
    nodes.iter().filter(differs).count()
}

/// Goal: after an import that lost a node, or made it again, no page names its place, which other
/// nodes get. Method: each node of each map is lost; the pages of the next root are compared with
/// the nodes; the same with the rule broken.
#[test]
fn no_page_names_the_place_of_a_lost_node() {
    let stale_nodes = || {
        let before = pool();
        let mut sum = 0;
        for place in places(&before) {
            let (mut rig, report) = rig::import(without(&before, place)).unwrap();
            assert_eq!(report.lost + report.healed, 1);
            rig.finish();
            sum += stale(&rig);
            // The pages that were given up come back.
            for name in ["other", "pool", "other"] {
                let name = name.to_owned();
                rig.run(Request::RenamePool { name }).unwrap();
            }
            let lists = rig.pool.zones().pages().count() - pages_of_nodes(&rig);
            assert_eq!(
                lists, 10,
                "the directory; its index and the page map, of two roots"
            );
            let (again, report) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
            assert_eq!((report.lost, report.healed), (0, 0));
            for (id, version) in &rig.pool.state().versions {
                let read = |rig: &Rig, at| rig.read(*id, at);
                let all = 0..version.units * 4;
                assert!(all.clone().all(|at| read(&rig, at) == read(&again, at)));
            }
        }
        sum
    };
    assert_eq!(stale_nodes(), 0);
    Mutation::activate(Some(Mutation::KeepParentOfLost));
    let outcome = std::panic::catch_unwind(stale_nodes);
    Mutation::activate(None);
    assert_ne!(outcome.ok(), Some(0));
}

fn first_leaf(rig: &Rig, of: VersionId) -> Place {
    let state = rig.pool.state();
    let leaf = state.versions[&of].tree.leaf(state.shape(), 0);
    leaf.unwrap().unwrap().pages().unwrap().first.place
}

/// The first leaf of a volume is lost; the first leaf of another one changes until it has that
/// place, and the pool is imported.
fn reuse_a_lost_place() {
    let before = pool();
    let [first, second]: [VersionId; 2] = [1, 2].map(|number| before.find(number).unwrap());
    let lost = first_leaf(&before, first);
    let (mut rig, report) = rig::import(without(&before, lost)).unwrap();
    assert_eq!(report.lost, 1);
    rig.finish();
    let mut random = Random::new(1);
    for round in 1..2000 {
        rig.run(unmap(second, 3)).unwrap();
        rig.wrote(second, 0, &[(3, value(2, 3, round))]);
        // Other nodes take pages, too; those above the lost leaf do not change.
        for _ in 0..random.below(5) {
            let volume = *random.pick(&[first, second]);
            let leaf = random.within(2, 3);
            rig.run(unmap(volume, leaf * 16)).unwrap();
        }
        checkpoint(&mut rig);
        if first_leaf(&rig, second).a != lost.a {
            continue;
        }
        let (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
        assert_eq!(rig.read(first, 1), Err(Refusal::Damaged));
        assert_eq!(rig.read(second, 1), Ok(Some(value(2, 1, 1))));
        assert_eq!(rig.read(second, 3), Ok(Some(value(2, 3, round))));
        return assert_eq!(rig.pool.check(), []);
    }
    panic!("the place is not used again");
}

/// Goal: a node that gets the place of a lost one is not taken for it. Method: as above; also with
/// pages that name the lost place, as earlier versions left them.
#[test]
fn a_lost_place_is_given_to_another_node() {
    reuse_a_lost_place();
    Mutation::activate(Some(Mutation::KeepParentOfLost));
    let outcome = std::panic::catch_unwind(reuse_a_lost_place);
    Mutation::activate(None);
    assert!(outcome.is_ok());
}
