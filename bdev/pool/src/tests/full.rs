//! Full pools: writes that wait for space, and the end of their wait.

use std::time::{Duration, Instant};

use nacre_bdev::{Status, Token};
use uuid::Uuid;

use super::rig::{self, Home, Host, run};
use crate::keeper::FULL_PATIENCE;
use crate::open::FULL_WRITES;
use crate::{Command, PoolError, PoolHandle, Refusal};

/// Blocks of a unit.
const UNIT: u64 = 16;

/// Begins to write a unit of a volume.
fn begin(host: &mut Host, unit: u64) -> Token {
    host.begin_write(unit * UNIT, UNIT as u32, 1 + (unit % 200) as u8)
}

/// Writes units of a volume until a write waits. Returns its unit and its token.
fn fill(pool: &PoolHandle, host: &mut Host) -> (u64, Token) {
    let mut unit = 0;
    loop {
        let token = begin(host, unit);
        loop {
            if let Some(status) = host.ended(token) {
                assert_eq!(status, Status::Ok);
                break;
            }
            if pool.status().waiting_writes > 0 {
                return (unit, token);
            }
            std::thread::yield_now();
        }
        unit += 1;
    }
}

/// Polls a queue until so many writes wait.
fn await_waits(pool: &PoolHandle, host: &mut Host, count: usize) {
    let began = Instant::now();
    while pool.status().waiting_writes != count as u64 {
        host.ended(0);
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
}

/// Goal: a write is sent again at first, and fails for good when the pool is full for long. Reads,
/// writes in place and trims go on. A trim lets the volume grow again.
#[test]
fn a_write_fails_when_the_pool_is_full_for_long() {
    let (_home, pool, _, mut host) = rig::start(64, 1024);
    let began = Instant::now();
    let (unit, waiting) = fill(&pool, &mut host);
    assert!(unit > 400, "{unit} units of 64 KiB on a disk of 64 MiB");
    assert_eq!(pool.status().full_percent, 95);
    rig::block_on(pool.news().notified());
    assert_eq!(host.write(0, 16, 250), Status::Ok);
    assert_eq!(host.read(UNIT, 1).1[0], 2);
    assert_eq!(host.end(waiting), Status::Retry);
    assert_eq!(host.write(unit * UNIT, 16, 3), Status::NoSpace);
    assert!(began.elapsed() >= FULL_PATIENCE);
    let again = begin(&mut host, unit);
    assert_eq!(host.end(again), Status::NoSpace, "it is not sent again");
    await_waits(&pool, &mut host, 0);

    assert_eq!(host.unmap(2 * UNIT, 160), Status::Ok);
    let mut status = Status::NoSpace;
    for _ in 0..200 {
        status = host.write(unit * UNIT, 16, 9);
        if status.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(status, Status::Ok);
    assert_eq!(host.read(2 * UNIT, 1).1[0], 0);
    assert_eq!(host.read(unit * UNIT, 1).1[0], 9);
    rig::check(&pool);
}

/// Goal: a write to a full pool waits, and goes on when a trim or a deletion returns space.
#[test]
fn returning_space_wakes_a_write() {
    for deletes in [false, true] {
        let home = Home::with_disk(64);
        let pool = home.create();
        let other = rig::volume(&pool, 2, 8);
        assert_eq!(Host::on(&pool, other).write(0, 16, 7), Status::Ok);
        let volume = rig::volume(&pool, 1, 1024);
        let mut host = Host::on(&pool, volume);
        let (unit, waiting) = fill(&pool, &mut host);
        assert_eq!(host.ended(waiting), None);
        if deletes {
            run(&pool, Command::Delete { lvol: other }).unwrap();
        } else {
            assert_eq!(host.unmap(2 * UNIT, 16), Status::Ok);
        }
        assert_eq!(host.end(waiting), Status::Ok, "deletes: {deletes}");
        assert_eq!(host.read(unit * UNIT, 1).1[0], 1 + (unit % 200) as u8);
        rig::check(&pool);
    }
}

/// Goal: a pool that is closed or exported, and a volume that is deleted, do not wait for space:
/// the write ends, with the status of a device that is gone.
#[test]
fn a_waiting_write_ends_with_its_pool_or_volume() {
    let commands = |lvol| {
        [
            Command::Close { export: false },
            Command::Close { export: true },
            Command::Delete { lvol },
        ]
    };
    for of in 0..3 {
        let (_home, pool, volume, mut host) = rig::start(64, 1024);
        let (_, waiting) = fill(&pool, &mut host);
        let command = commands(volume)[of].clone();
        run(&pool, command).unwrap();
        assert_eq!(host.end(waiting), Status::Gone, "{of}");
    }
}

/// Goal: the number of waiting writes has a bound. A host sends further writes again later, and
/// the waiting ones go on when space returns.
#[test]
fn few_writes_wait() {
    let (_home, pool, _, mut host) = rig::start(64, 1024);
    let (unit, first) = fill(&pool, &mut host);
    let mut waiting = vec![first];
    waiting.extend((1..FULL_WRITES as u64).map(|at| begin(&mut host, unit + at)));
    await_waits(&pool, &mut host, FULL_WRITES);
    // The answer comes while all others wait.
    let one_more = begin(&mut host, unit + FULL_WRITES as u64);
    assert_eq!(host.end(one_more), Status::Retry);
    assert!(waiting.iter().all(|token| host.ended(*token).is_none()));
    assert_eq!(host.unmap(0, 16 * FULL_WRITES as u32), Status::Ok);
    for token in waiting {
        assert_eq!(host.end(token), Status::Ok);
    }
    rig::check(&pool);
}

/// Goal: a volume with many writes does not keep space from another. Method: units return one by
/// one; one write of the other volume is behind three writes, and before three others.
#[test]
fn volumes_get_space_in_turn() {
    let (_home, pool, _, mut greedy) = rig::start(64, 1024);
    let other = rig::volume(&pool, 2, 8);
    let mut modest = Host::on(&pool, other);
    let (unit, first) = fill(&pool, &mut greedy);
    let mut begun = vec![
        first,
        begin(&mut greedy, unit + 1),
        begin(&mut greedy, unit + 2),
    ];
    await_waits(&pool, &mut greedy, 3);
    let modest_write = begin(&mut modest, 0);
    await_waits(&pool, &mut modest, 4);
    begun.extend((3..6).map(|at| begin(&mut greedy, unit + at)));
    await_waits(&pool, &mut greedy, 7);
    for (at, token) in begun.into_iter().enumerate() {
        if at == 3 {
            assert_eq!(modest.ended(modest_write), None);
            assert_eq!(greedy.unmap(100 * UNIT, 16), Status::Ok);
            assert_eq!(modest.end(modest_write), Status::Ok);
        }
        assert_eq!(greedy.ended(token), None, "write {at} came before its turn");
        assert_eq!(greedy.unmap(at as u64 * UNIT, 16), Status::Ok);
        assert_eq!(greedy.end(token), Status::Ok);
    }
    rig::check(&pool);
}

/// A thick volume has its space, whatever others take.
#[test]
fn a_thick_volume_keeps_its_room() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let thin = rig::volume(&pool, 1, 1024);
    let thick = Uuid::from_u128(2);
    let create = |bytes, id| Command::Create {
        id,
        name: format!("thick {bytes}"),
        bytes,
        thick: true,
    };
    run(&pool, create(16 << 20, thick)).unwrap();
    let refused = run(&pool, create(60 << 20, Uuid::from_u128(3))).unwrap_err();
    assert!(matches!(
        refused,
        PoolError::Refused(Refusal::NoSpace { .. })
    ));
    let mut filler = Host::on(&pool, thin);
    fill(&pool, &mut filler);
    let mut host = Host::on(&pool, thick);
    for lba in (0..4096).step_by(16) {
        assert_eq!(host.write(lba, 16, 3), Status::Ok);
    }
}
