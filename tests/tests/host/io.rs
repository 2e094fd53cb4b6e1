//! Tests of I/O through the host's bdev queues: every operation, several queues, full queues.

use nacre_bdev::{Busy, Flags, Op, Queue, Status};

use super::rig::{BLOCKS, World, bytes};

#[test]
fn reads_and_writes_on_several_queues() {
    let mut world = World::connected(3);
    for queue in 0..3 {
        for (at, blocks) in [1u32, 8, 9, 64, 256].into_iter().enumerate() {
            let lba = (queue * 1000 + at * 300) as u64 % (BLOCKS - 300);
            let seed = (queue * 10 + at) as u8;
            assert_eq!(world.write(queue, lba, blocks, seed), Status::Ok);
            let other = (queue + 1) % 3;
            assert_eq!(world.read(other, lba, blocks), bytes(blocks, seed));
        }
    }
    world.assert_buffers_back(0);
}

#[test]
fn every_operation() {
    let mut world = World::connected(1);
    let zeroes = vec![0; 512];
    assert_eq!(world.write(0, 10, 4, 1), Status::Ok);
    let buf = world.buf(1, 9);
    let fua = world.flags(Op::Write, 20, 1, Flags::FUA).with(buf);
    assert_eq!(world.run(0, fua), Status::Ok);
    let flush = world.io(Op::Flush, 0, 0);
    assert_eq!(world.run(0, flush), Status::Ok);

    let compare = |world: &mut World, seed| {
        let buf = world.buf(4, seed);
        let io = world.io(Op::Compare, 10, 4).with(buf);
        world.run(0, io)
    };
    assert_eq!(compare(&mut world, 1), Status::Ok);
    assert_eq!(compare(&mut world, 2), Status::Miscompare);

    let swap = |world: &mut World, expected, new| {
        let (expected, new) = (world.buf(1, expected), world.buf(1, new));
        let io = world.io(Op::CompareAndWrite, 20, 1);
        world.run(0, io.with(expected).with(new))
    };
    assert_eq!(swap(&mut world, 9, 5), Status::Ok);
    assert_eq!(world.read(0, 20, 1), bytes(1, 5));
    assert_eq!(swap(&mut world, 9, 6), Status::Miscompare);
    assert_eq!(world.read(0, 20, 1), bytes(1, 5));

    let copy = world.io(Op::Copy, 100, 4).source(10);
    assert_eq!(world.run(0, copy), Status::Ok);
    assert_eq!(world.read(0, 100, 4), bytes(4, 1));
    let unmap = world.io(Op::Unmap, 100, 1);
    assert_eq!(world.run(0, unmap), Status::Ok);
    assert_eq!(world.read(0, 100, 1), zeroes);
    let clear = world.flags(Op::WriteZeroes, 101, 1, Flags::DEALLOCATE);
    assert_eq!(world.run(0, clear), Status::Ok);
    assert_eq!(world.read(0, 101, 1), zeroes);
    assert_eq!(world.read(0, 102, 2), bytes(4, 1)[1024..]);

    assert_eq!(world.write(0, BLOCKS - 1, 2, 1), Status::OutOfRange);
    assert_eq!(world.write(0, u64::MAX, 1, 1), Status::OutOfRange);
    world.assert_buffers_back(0);
}

/// Goal: the submitted buffers come back filled, in order.
#[test]
fn io_in_two_extents() {
    let mut world = World::connected(1);
    let (a, b) = (world.buf(1, 3), world.buf(2, 4));
    let io = world.io(Op::Write, 50, 3).with(a).with(b);
    let token = world.submit(0, io);
    let back = world.wait(token);
    assert_eq!((back.status, back.data.len()), (Status::Ok, 2));
    assert_eq!(*back.data[1], bytes(2, 4));
    drop(back);
    let expected = [bytes(1, 3), bytes(2, 4)].concat();
    assert_eq!(world.read(0, 50, 3), expected);

    let (a, b) = (world.buf(2, 0), world.buf(1, 0));
    let addresses = [a.as_ptr(), b.as_ptr()];
    let io = world.io(Op::Read, 50, 3).with(a).with(b);
    let token = world.submit(0, io);
    let back = world.wait(token);
    assert_eq!([back.data[0].as_ptr(), back.data[1].as_ptr()], addresses);
    assert_eq!(
        [back.data[0].to_vec(), back.data[1].to_vec()].concat(),
        expected
    );

    let (a, b) = (world.buf(1, 3), world.buf(2, 5));
    let io = world.io(Op::Compare, 50, 3).with(a).with(b);
    assert_eq!(world.run(0, io), Status::Miscompare);
    drop(back);
    world.assert_buffers_back(0);
}

#[test]
fn a_full_queue_hands_io_back() {
    let mut world = World::connected(1);
    world.tap.hold(true);
    let mut tokens = Vec::new();
    loop {
        let buf = world.buf(1, 1);
        let io = world.io(Op::Write, tokens.len() as u64, 1).with(buf);
        let token = io.token;
        match world.queues[0].submit(io) {
            Ok(()) => tokens.push(token),
            Err((Busy, io)) => {
                assert_eq!((io.token, io.data.len()), (token, 1), "handed back whole");
                break;
            }
        }
    }
    assert_eq!(tokens.len(), 16);
    assert_eq!(world.queues[0].inflight(), 16);
    for _ in 0..50 {
        world.turn();
    }
    assert!(world.completions.is_empty());
    world.tap.hold(false);
    world.until("all back", |w| w.completions.len() == 16);
    assert_eq!(world.queues[0].inflight(), 0);
    assert!(
        tokens
            .iter()
            .all(|t| world.completions[t].status == Status::Ok)
    );
}

/// Goal: if the controller's queues are smaller than the submitted depth, the host queues the rest.
#[test]
fn submissions_beyond_the_controllers_depth_wait() {
    let mut options = super::rig::options(1);
    options.queue_entries = 200;
    let mut world = World::connected_with(options);
    assert_eq!(world.controller().link().state().queue_entries, 128);
    let mut tokens = Vec::new();
    for lba in 0..199 {
        let io = world.io(Op::WriteZeroes, lba, 1);
        tokens.push(world.submit(0, io));
    }
    world.until("all back", |w| w.completions.len() == 199);
    assert!(
        tokens
            .iter()
            .all(|t| world.completions[t].status == Status::Ok)
    );
}

/// Goal: commands that were not sent can be aborted; sent commands cannot.
#[test]
fn abort() {
    let mut world = World::connected(1);
    world.tap.hold(true);
    let sent = world.submit_write(0, 1, 1, 1);
    for _ in 0..10 {
        world.turn();
    }
    assert!(!world.queues[0].abort(sent));
    assert!(!world.queues[0].abort(999_999));
    world.kill_target();
    world.until("noticed", |w| !w.queues[0].is_live());
    let waiting = world.submit_write(0, 2, 1, 1);
    assert!(world.queues[0].abort(waiting));
    assert_eq!(world.wait(waiting).status, Status::Aborted);
    assert!(world.queues[0].abort(sent), "it waits to be sent again");
    assert_eq!(world.wait(sent).status, Status::Aborted);
    assert_eq!(world.queues[0].inflight(), 0);
    world.assert_buffers_back(0);
}
