//! Metadata of volumes on external devices: its bounds, its end, and its loss.

use std::sync::Arc;

use super::content;
use super::disk::{ALL_SECTORS, Crash};
use super::external::{self, again, checkpoint, contents};
use super::rig::{self, Pending, Rig};
use crate::check::{Accounts, CheckReport, Finding};
use crate::geometry::PAGE;
use crate::ids::VersionId;
use crate::interface::{Answer, Refusal, Request};
use crate::map::{Node, Tree};
use crate::mutation::Mutation;
use crate::state::Found;

fn unmap(version: VersionId, first: u64, granules: u64) -> Request {
    Request::Unmap {
        version,
        first,
        granules,
    }
}

fn pages(rig: &Rig) -> usize {
    rig.pool.zones().pages().count()
}

/// Two roots: the second one frees the pages that the first one replaced.
fn at_rest(rig: &mut Rig, version: VersionId) {
    let name = &rig.pool.state().versions[&version].identity.name;
    let rename = Request::Rename {
        version,
        name: name.clone(),
    };
    for _ in 0..3 {
        rig.run(rename.clone()).unwrap();
        checkpoint(rig);
    }
}

fn tree(rig: &Rig, version: VersionId) -> &Tree {
    &rig.pool.state().versions[&version].tree
}

/// Goal: trims of a device leave no metadata behind when they cover everything, leaf by leaf or in
/// pieces; and one leaf of a device goes without a page for it.
#[test]
fn trims_leave_no_pages() {
    for step in [16, 4, 1] {
        let mut rig = Rig::create(96, 32, true);
        let other = rig.on_device(1, 7, 16);
        let volume = rig.on_device(2, 7, 16);
        at_rest(&mut rig, other);
        let before = pages(&rig);
        for first in (0..64).step_by(step) {
            rig.run(unmap(volume, first, step as u64)).unwrap();
            if step == 16 {
                let shape = rig.pool.state().shape();
                assert!(
                    tree(&rig, volume)
                        .leaf(shape, first / 16)
                        .unwrap()
                        .is_none()
                );
            }
        }
        assert!(tree(&rig, volume).root.is_none(), "{step}");
        assert_eq!(contents(&rig, volume), [0; 64]);
        at_rest(&mut rig, other);
        assert!(pages(&rig) <= before, "{step}");
        let mut rig = again(&rig);
        assert_eq!(contents(&rig, volume), [0; 64]);
        assert_ne!(contents(&rig, other), [0; 64]);
        // Empty places take units again.
        rig.wrote(volume, 5, &[(1, content::value(1, 21, 3))]);
        assert_eq!(rig.read(volume, 21), Ok(Some(content::value(1, 21, 3))));
    }
}

/// A node that stands for many places becomes several: all of them count as changed.
#[test]
fn split_nodes_are_counted() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 16);
    checkpoint(&mut rig);
    let state = rig.pool.state();
    let (shape, before) = (state.shape(), state.changed_nodes);
    let mut tree = tree(&rig, volume).clone();
    let expected = tree.nodes_to_change(shape, 2, false);
    let (_, copied) = tree.change(shape, 2).unwrap();
    // The root is copied; an interior node and a leaf take the place of external ones.
    assert_eq!((expected, copied), (3, 3));
    rig.run(unmap(volume, 33, 1)).unwrap();
    assert!(rig.pool.state().changed_nodes >= before + 3);
}

/// Trims a granule of every leaf of many volumes, until the pool refuses. Returns the refusals.
fn fill_with_trims(rig: &mut Rig) -> usize {
    let mut refused = 0;
    for number in 1..24 {
        let clone = Request::CloneExternal {
            device: external::device(7, 16),
            identity: rig::identity(number),
        };
        if rig.run(clone).is_err() {
            refused += 1;
            continue;
        }
        let volume = rig.find(number).unwrap();
        for leaf in 0..4 {
            match rig.run(unmap(volume, leaf * 16 + number % 16, 1)) {
                Ok(_) => {}
                Err(Refusal::NoSpace { .. }) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
    refused
}

/// Goal: a host cannot fill a small pool with trims so that a root, or an import, has no room.
/// Method: a granule of each leaf of many volumes; then the same leaves again, whole ones, and
/// writes, with a crash after each step.
#[test]
fn a_small_full_pool_stays_open() {
    let mut rig = Rig::create(72, 24, true);
    assert!(fill_with_trims(&mut rig) > 8);
    assert!(!rig.pool.is_held());
    rig.run(Request::Flush).unwrap();
    let volumes: Vec<(u64, VersionId)> = (1..24)
        .filter_map(|number| Some((number, rig.find(number)?)))
        .collect();
    assert!(volumes.len() > 2);
    let mut done = 0;
    for (number, volume) in &volumes {
        for leaf in 0..4 {
            let mut expected = contents(&rig, *volume);
            let first = leaf * 16 + (number + 3) % 16;
            for (first, granules) in [(first, 1), (leaf * 16, 16)] {
                match rig.run(unmap(*volume, first, granules)) {
                    Ok(_) => {
                        done += 1;
                        let range = first as usize..(first + granules) as usize;
                        expected[range].fill(0);
                    }
                    Err(Refusal::NoSpace { .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
                rig.run(Request::Flush).unwrap();
                let again = again(&rig);
                assert!(!again.pool.is_held());
                assert_eq!(contents(&again, *volume), expected);
            }
        }
    }
    assert!(done > 8 * volumes.len() / 2, "{done}");
    // Once the leaves are gone, there is room again.
    at_rest(&mut rig, volumes[0].1);
    rig.run(unmap(volumes[0].1, 0, 16)).unwrap();
    rig.wrote(volumes[0].1, 0, &[(0, content::value(1, 0, 9))]);
}

/// Goal: a request without room ends, whatever else goes on. Method: trims fill a pool in which a
/// copy waits for a device, so that changes are in flight all the time.
#[test]
fn a_shortage_ends_beside_a_device_that_does_not_answer() {
    let hangs = |pending: &Pending| matches!(pending, Pending::External { .. });
    let mut rig = Rig::create(72, 24, true);
    let slow = rig.on_device(30, 8, 8);
    rig.wrote(slow, 0, &[(0, content::value(30, 0, 5))]);
    rig.snapshot(slow, 31);
    let late = rig.write(slow, 0, &[(1, content::value(30, 1, 6))], false);
    rig.finish_but(hangs);
    assert!(rig.pending.iter().any(hangs));
    let run = |rig: &mut Rig, request: Request| {
        let token = rig.submit(request);
        rig.pump();
        for _ in 0..5000 {
            if rig.answers.iter().any(|(of, _)| *of == token) {
                return rig.take_answer(token);
            }
            let mut ready = rig.ready().into_iter();
            let at = ready.find(|at| !hangs(&rig.pending[*at]));
            rig.end(at.expect("an I/O, or an answer"));
        }
        panic!("no answer");
    };
    let mut refused = 0;
    for number in 1..24 {
        let clone = Request::CloneExternal {
            device: external::device(7, 16),
            identity: rig::identity(number),
        };
        refused += usize::from(run(&mut rig, clone).is_err());
        let Some(volume) = rig.find(number) else {
            continue;
        };
        for leaf in 0..4 {
            match run(&mut rig, unmap(volume, leaf * 16 + number % 16, 1)) {
                Ok(_) => {}
                Err(Refusal::NoSpace { .. }) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
    assert!(refused > 8, "{refused}");
    let at = rig.pending.iter().position(hangs).unwrap();
    rig.end(at);
    rig.finish();
    assert_eq!(rig.take_answer(late), Ok(Answer::Done));
    assert!(!rig.pool.is_held());
    assert_eq!(rig.pool.check(), []);
}

/// Goal: a thick volume has its space when trims of others have filled the pool. Method: reserves
/// of several sizes; every place of the thick volume is written.
#[test]
fn a_thick_volume_keeps_its_room() {
    for (units, reserve) in [(72, 24), (64, 20), (80, 32), (72, 16)] {
        let mut rig = Rig::create(units, reserve, true);
        let thick = rig.created(100, 8, true);
        fill_with_trims(&mut rig);
        for volume in (1..24)
            .filter_map(|number| rig.find(number))
            .collect::<Vec<_>>()
        {
            for leaf in 0..4 {
                // Entries change where a leaf is there, or it goes.
                for (first, granules) in [(leaf * 16 + 1, 2), (leaf * 16, 16)] {
                    let _ = rig.run(unmap(volume, first, granules));
                }
            }
            if rig.pool.free_units().0 <= rig.pool.free_units().1 {
                break;
            }
        }
        for place in 0..8 {
            let at = place * 4;
            rig.wrote(thick, place, &[(0, content::value(100, at, 3))]);
            assert_eq!(rig.read(thick, at), Ok(Some(content::value(100, at, 3))));
        }
        assert!(!rig.pool.is_held());
    }
}

/// A node that is cleared counts the nodes above it as changed, and its volume goes on.
#[test]
fn cleared_nodes_are_counted() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 1, &[(1, content::value(1, 5, 3))]);
    checkpoint(&mut rig);
    let leaf = tree(&rig, volume).leaf(rig.pool.state().shape(), 0);
    let place = leaf.unwrap().unwrap().pages().unwrap().first.place;
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    for page in [place.a, place.b] {
        let block = disk.block(rig.pool.superblock().disks.page(page));
        disk.corrupt(block, |bytes| *bytes = [0; PAGE]);
    }
    let (mut rig, _) = rig::import(disk).unwrap();
    rig.finish();
    let before = rig.pool.state().changed_nodes;
    let clear = Request::Clear {
        version: volume,
        place: 1,
    };
    rig.run(clear).unwrap();
    // The root and the node above the leaf.
    assert_eq!(rig.pool.state().changed_nodes, before + 2);
    assert_eq!(rig.read(volume, 5), Ok(Some(0)));
}

/// `a_small_full_pool_stays_open` finds a pool that does not count its pages.
#[test]
fn maps_without_room() {
    Mutation::activate(Some(Mutation::MapWithoutRoom));
    let mut rig = Rig::create(72, 24, true);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        fill_with_trims(&mut rig);
        rig.pool.checkpoint();
        rig.finish();
    }));
    let is_held = outcome.is_err() || rig.pool.is_held();
    Mutation::activate(None);
    assert!(is_held, "a pool without room for a root is not noticed");
}

/// Goal: a search passes a node that stands for many places at once, and looks at few leaves in one
/// turn.
#[test]
fn searches_have_a_bound() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 16);
    let state = rig.pool.state();
    assert_eq!(state.next_above(volume, 0, 0), Ok(Found::Nothing));
    assert_eq!(state.next_shared(volume, 3, None), Ok(Found::Place(3)));
    for leaf in 0..4 {
        rig.run(unmap(volume, leaf * 16, 1)).unwrap();
    }
    let state = rig.pool.state();
    assert_eq!(state.next_above(volume, 0, 0), Ok(Found::Later(8)));
    assert_eq!(state.next_above(volume, 8, 0), Ok(Found::Nothing));
    // The pool goes on by itself.
    let before = contents(&rig, volume);
    let device = external::device(8, 16);
    rig.run(Request::SetExternal {
        version: volume,
        device,
    })
    .unwrap();
    assert_ne!(contents(&rig, volume), before);
    rig.run(Request::Inflate { version: volume }).unwrap();
    assert_eq!(rig.pool.state().externals().count(), 0);
}

/// A volume shrinks leaf by leaf, and each step removes what it finds.
#[test]
fn a_volume_on_a_device_shrinks() {
    let mut rig = Rig::create(96, 32, true);
    let version = rig.on_device(1, 7, 16);
    rig.run(unmap(version, 20, 1)).unwrap();
    let mut expected = contents(&rig, version);
    for units in [13, 6, 1] {
        rig.run(Request::Resize { version, units }).unwrap();
        expected.truncate(units as usize * 4);
        assert_eq!(contents(&rig, version), expected);
        let state = rig.pool.state();
        assert_eq!(state.next_leaf(version, units.next_multiple_of(4)), None);
        assert_eq!(state.next_leaf_beyond(version, units), None);
    }
}

/// Goal: the map of a device follows from its size, so the loss of its pages is none. Method: each
/// node of it is lost in both copies, for each size.
#[test]
fn a_lost_map_of_a_device_is_made_again() {
    for units in [3, 9, 14, 16] {
        let mut rig = Rig::create(96, 32, true);
        let plain = rig.on_device(1, 7, units);
        let trimmed = rig.on_device(2, 7, units);
        rig.run(unmap(trimmed, 1, 1)).unwrap();
        checkpoint(&mut rig);
        let expected = [plain, trimmed].map(|version| contents(&rig, version));
        let disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
        let state = rig.pool.state();
        let (device, _) = state.externals().next().unwrap();
        let mut places = Vec::new();
        let mut left = vec![tree(&rig, device).root.clone().unwrap()];
        while let Some(node) = left.pop() {
            places.extend(node.pages().map(|pages| pages.first.place));
            if let Node::Interior(interior) = &*node {
                left.extend(interior.children.iter().flatten().cloned());
            }
        }
        for place in places {
            let mut disk = disk.clone();
            for page in [place.a, place.b] {
                let at = rig.pool.superblock().disks.page(page);
                let block = disk.block(at);
                disk.corrupt(block, |bytes| *bytes = [0; PAGE]);
            }
            let (mut rig, report) = rig::import(disk).unwrap();
            assert_eq!((report.lost, report.healed), (0, 1), "{units}");
            assert_eq!(contents(&rig, plain), expected[0]);
            assert_eq!(contents(&rig, trimmed), expected[1]);
            rig.finish();
            assert_eq!(rig.pool.check(), []);
            assert_eq!(contents(&again(&rig), plain), expected[0]);
        }
    }
}

/// Places of a device below lost maps are no fault of the places above it.
#[test]
fn a_check_knows_external_places() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 8);
    rig.run(unmap(volume, 1, 1)).unwrap();
    let snapshot = rig.snapshot(volume, 2);
    rig.run(unmap(volume, 2, 1)).unwrap();
    let mut state = rig.pool.state().clone();
    let lost = Arc::new(Node::Lost {
        pages: Default::default(),
    });
    let root = crate::map::Interior {
        children: [Some(Arc::clone(&lost)), Some(lost)].into(),
        pages: Default::default(),
    };
    let root = Arc::new(Node::Interior(root));
    let device = state.external_parent(volume).unwrap();
    for id in [snapshot, device] {
        let of = state.versions.get_mut(&id).unwrap();
        of.tree.root = Some(Arc::clone(&root));
    }
    let mut report = CheckReport::default();
    let pending = rig.pool.pending_units();
    let mut accounts = Accounts::new(&state, rig.pool.space(), rig.pool.zones(), pending);
    while !accounts.advance(1, &mut report) {}
    let is_loss = |finding: &Finding| matches!(finding, Finding::Lost { .. });
    assert!(report.findings.iter().all(is_loss), "{report:?}");
    assert!(!report.findings.is_empty());
}
