//! Tests of the buffers of commands: which pool each uses, and how many bytes at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::null;
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf_wire::commands::admin::{Abort, Identify};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};

use super::rig::*;
use super::scripted::{ScriptedBdev, rig_scripted};
use crate::transport::{ConnId, Event, ReqTag};

const KIB: u32 = 1024;

fn write(cid: u16, bytes: u32) -> Sqe {
    ReadWrite::new(0, bytes / BLOCK)
        .to_sqe(opcode::WRITE, cid, 1)
        .with_sgl(Sgl::Transport { length: bytes })
}

fn in_capsule(cid: u16, bytes: u32) -> Sqe {
    write(cid, bytes).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: bytes,
    })
}

/// A queue on a transport that fetches so much at a time.
fn rig(window: usize) -> (Rig, ConnId) {
    let mut rig = Rig::with_malloc();
    rig.wire.borrow_mut().window = Some(window);
    let io = rig.io();
    (rig, io)
}

/// The fetches in flight, by command identifier.
fn fetching(rig: &Rig) -> Vec<u16> {
    let wire = rig.wire.borrow();
    wire.fetches.iter().map(|(_, tag, _)| tag.cid).collect()
}

/// Takes the first fetch off the wire.
fn take_fetch(rig: &Rig) -> (ConnId, ReqTag, Buf) {
    let fetch = rig.wire.borrow_mut().fetches.pop_front();
    fetch.expect("a fetch")
}

/// Commands are fetched for in their order, so much at a time, however the fetches end; one that is
/// larger than the window is fetched for by itself.
#[test]
fn a_window_of_fetches() {
    let (mut rig, io) = rig(10 << 10);
    for (cid, kib) in [(1, 4), (2, 4), (3, 4), (4, 16), (5, 1), (6, 1)] {
        rig.send(io, write(cid, kib * KIB), None);
    }
    rig.turn();
    assert_eq!(fetching(&rig), [1, 2], "a third is more than the window");

    let (conn, tag, data) = take_fetch(&rig);
    rig.fetched(conn, tag, data);
    rig.turn();
    assert_eq!(fetching(&rig), [2, 3]);
    assert_eq!(rig.answers().len(), 1);

    let (conn, tag, _) = take_fetch(&rig);
    rig.event(Event::FetchDamaged { conn, tag });
    rig.turn();
    assert_eq!(fetching(&rig), [3], "the next is too large beside another");
    let (conn, tag, _) = take_fetch(&rig);
    let status = StatusCode::DATA_SGL_LENGTH_INVALID;
    rig.event(Event::FetchRefused { conn, tag, status });
    rig.turn();
    assert_eq!(fetching(&rig), [4], "by itself");

    let (conn, tag, data) = take_fetch(&rig);
    rig.fetched(conn, tag, data);
    rig.turn();
    assert_eq!(fetching(&rig), [5, 6]);
    rig.deliver(&[0; KIB as usize]);
    rig.turn();
    let failed = rig
        .answers()
        .iter()
        .filter(|cqe| !cqe.status().is_success())
        .count();
    assert_eq!(failed, 2, "the damaged and the refused");
    rig.hang_up(io);
}

/// In-capsule data can precede requested data on every connection: a buffer is kept for it,
/// otherwise all connections deadlock.
#[test]
fn fetches_leave_a_buffer() {
    let (mut rig, io) = rig(usize::MAX);
    // Opens the device, which takes some for itself.
    rig.send(io, in_capsule(999, 4096), rig.pools.io.acquire(4096));
    rig.turn();
    assert_eq!(rig.answer().cqe.status(), StatusCode::SUCCESS);
    let small = rig.pools.io.stats()[0];
    let hoard: Vec<Buf> = std::iter::from_fn(|| rig.pools.io.acquire(4096))
        .take(small.free)
        .collect();
    let large = rig.pools.io.stats()[1].free as u16;
    for cid in 0..large + 2 {
        rig.send(io, write(cid, 128 * KIB), None);
    }
    rig.turn();
    assert_eq!(fetching(&rig), (0..large - 1).collect::<Vec<_>>());
    for round in 0..large {
        // It is used and comes back, and no fetch takes it meanwhile.
        let data = rig.pools.io.acquire(4096);
        assert!(data.is_some(), "round {round}");
        rig.send(io, in_capsule(1000 + round, 4096), data);
        rig.turn();
        assert_eq!(rig.answer().cqe.status(), StatusCode::SUCCESS);
    }
    let (conn, tag, data) = take_fetch(&rig);
    rig.fetched(conn, tag, data);
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());
    rig.turn();
    assert_eq!(fetching(&rig), (1..large).collect::<Vec<_>>());
    drop(hoard);
    rig.turn();
    assert_eq!(fetching(&rig).last(), Some(&large), "there is another left");
    rig.hang_up(io);
}

/// A command that waits for its fetch can be aborted, as often as the host likes, and a connection
/// that ends takes those that wait along.
#[test]
fn waiting_for_a_fetch_ends() {
    let mut rig = Rig::with_malloc();
    rig.wire.borrow_mut().window = Some(4096);
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    rig.send(io, write(1, 4096), None);
    rig.turn();
    for cid in 2..100 {
        rig.send(io, write(cid, 4096), None);
        rig.turn();
        rig.send(admin, Abort { sqid: 1, cid }.to_sqe(1000), None);
        rig.turn();
        rig.turn();
        let answers = rig.answers();
        assert_eq!(answers.len(), 2);
        let of = |cid| {
            answers
                .iter()
                .find(|cqe| cqe.cid() == cid)
                .expect("an answer")
        };
        assert_eq!(of(1000).dword0() & 1, 0, "aborted");
        assert_eq!(of(cid).status(), StatusCode::ABORT_REQUESTED);
    }
    for qp in rig.group.queues.iter() {
        assert!(qp.fetches.waiting.is_empty(), "nothing is left of them");
    }
    rig.send(io, write(200, 4096), None);
    rig.send(io, write(201, 4096), None);
    rig.turn();
    assert_eq!(fetching(&rig), [1]);
    let (conn, tag, data) = take_fetch(&rig);
    rig.fetched(conn, tag, data);
    rig.turn();
    assert_eq!(fetching(&rig), [200]);
    rig.wire.borrow_mut().fetches.clear();
    rig.hang_up(io);
    rig.hang_up(admin);
    rig.assert_clean();
}

/// A RAM disk's data may stay in the transport's receive memory. Once there is a namespace whose
/// device keeps its data, data comes in the core's buffers, also data that was on its way.
#[test]
fn in_place_while_every_device_is_immediate() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let received = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 1,
    }]);
    let data = || {
        let mut data = received.acquire(4096).expect("the last one was let go of");
        data.bytes_mut().expect("just acquired").fill(0x5a);
        data
    };
    rig.send(io, in_capsule(1, 4096), Some(data()));
    rig.turn();
    assert_eq!(rig.wire.borrow().in_place, [(io, true)]);
    assert!(rig.answer().cqe.status().is_success());
    // But for those that emulation keeps.
    let free = |rig: &Rig| {
        rig.pools
            .io
            .stats()
            .iter()
            .map(|class| class.low_water)
            .sum::<usize>()
    };
    let before = free(&rig);
    rig.send(io, in_capsule(2, 4096), Some(data()));
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());
    assert_eq!(free(&rig), before, "no buffer was needed");

    let scripted = ScriptedBdev::new();
    scripted.script(|state| state.held = true);
    let nsid = rig.add_namespace(Arc::clone(&scripted) as Arc<dyn nacre_bdev::Bdev>);
    let mut sqe = in_capsule(3, 4096);
    sqe.nsid = nsid.into();
    rig.send(io, sqe, Some(data()));
    rig.turn();
    assert_eq!(rig.wire.borrow().in_place.last(), Some(&(io, false)));
    assert!(
        rig.wire.borrow().responses.is_empty(),
        "the device keeps it"
    );
    let copied = rig
        .group
        .core
        .handle
        .counts()
        .copied_bytes
        .load(Ordering::Relaxed);
    assert_eq!(copied, 4096, "what was copied is counted");
    drop(data());
    scripted.script(|state| state.held = false);
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());

    // Without a buffer it waits for one.
    let taken: Vec<Buf> = std::iter::from_fn(|| rig.pools.io.acquire(4096)).collect();
    rig.send(io, sqe, Some(data()));
    rig.turn();
    assert!(rig.wire.borrow().responses.is_empty());
    drop(taken);
    rig.turn();
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());
}

/// If a device is not immediate from the start, nothing is ever in place. With several devices, all
/// immediate, data may be in place.
#[test]
fn in_place_is_decided_at_the_start() {
    let (mut rig, _told) = rig_scripted();
    let io = rig.io();
    rig.send(io, in_capsule(1, 4096), rig.pools.io.acquire(4096));
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());
    assert!(rig.wire.borrow().in_place.is_empty());

    let mut rig = Rig::with_malloc();
    let config = null::Config {
        name: "null".into(),
        block_size: BLOCK,
        num_blocks: 100,
        physical_block_size: None,
        uuid: None,
        reads: null::Reads::Zeroes,
    };
    rig.add_namespace(null::create(config).expect("a null device"));
    let io = rig.io();
    for cid in 1..4 {
        rig.send(io, in_capsule(cid, 4096), rig.pools.io.acquire(4096));
        rig.turn();
        assert!(rig.answer().cqe.status().is_success());
    }
    assert_eq!(rig.wire.borrow().in_place, [(io, true)]);
}

/// Goal: whatever I/O waits for a buffer, admin and fabrics commands have buffers of their own, and
/// get one as soon as one is free; when their own are all taken, they use the others'.
#[test]
fn admin_does_not_stand_behind_io() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let hoard =
        |pool: &Pool, bytes| -> Vec<Buf> { std::iter::from_fn(|| pool.acquire(bytes)).collect() };
    let all_io = [4 * KIB, 128 * KIB].map(|bytes| hoard(&rig.pools.io, bytes as usize));
    rig.send(io, write(1, BLOCK), None);
    rig.turn();
    assert!(fetching(&rig).is_empty(), "the write waits");
    // With buffers of their own, at once.
    rig.identify_controller(admin);
    let other = rig.open();
    rig.start_connect(other, 2, cntlid);
    assert_eq!(rig.answer().cqe.status(), StatusCode::SUCCESS);
    // Without any they wait, and not for the buffer that the write waits for.
    let mut all_admin = hoard(&rig.pools.admin, 8192);
    let identify = Identify::new(cns::CONTROLLER).to_sqe(2, 0);
    let bytes = Sgl::Transport { length: 4096 };
    rig.send(admin, identify.with_sgl(bytes), None);
    rig.turn();
    assert!(rig.wire.borrow().responses.is_empty());
    all_admin.pop();
    rig.turn();
    assert_eq!(rig.answer().cqe.cid(), 2);
    assert!(fetching(&rig).is_empty(), "the write still waits");
    // Buffers for I/O would serve the write, too.
    all_admin.extend(hoard(&rig.pools.admin, 8192));
    drop(all_io);
    rig.identify_controller(admin);
    rig.turn();
    assert_eq!(fetching(&rig), [1]);
}
