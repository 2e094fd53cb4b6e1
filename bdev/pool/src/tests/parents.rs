//! Other parents, and volumes that become read-only, under open queues.

use nacre_bdev::{Bdev, Status};
use uuid::Uuid;

use super::rig::{self, Home, Host, block_on, run};
use crate::{Command, Outcome, PoolError, Refusal};

fn parent(pool: &crate::PoolHandle, of: Uuid) -> Option<Uuid> {
    let mut list = rig::list(pool).into_iter();
    list.find(|lvol| lvol.id == of).unwrap().parent
}

/// A volume is separated from its parent while a queue to it is open, and from the next one.
#[test]
fn a_volume_is_decoupled_in_use() {
    let (_home, pool, lvol, mut host) = rig::start(64, 8);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    let oldest = rig::snapshot(&pool, lvol, 2);
    assert_eq!(host.write(16, 16, 2), Status::Ok);
    let newest = rig::snapshot(&pool, lvol, 3);
    assert_eq!(parent(&pool, lvol), Some(newest));
    run(&pool, Command::Decouple { lvol }).unwrap();
    assert_eq!(parent(&pool, lvol), Some(oldest));
    run(&pool, Command::Delete { lvol: newest }).unwrap();
    for (lba, byte) in [(0, 3), (16, 4)] {
        assert_eq!(host.read(lba, 1).1[0], byte - 2);
        assert_eq!(host.write(lba + 1, 1, byte), Status::Ok);
        assert_eq!(host.read(lba, 2).1[4096], byte);
    }
    assert_eq!(Host::on(&pool, oldest).read(1, 1).1[0], 1);
    run(&pool, Command::Decouple { lvol }).unwrap();
    let refused = run(&pool, Command::Decouple { lvol }).unwrap_err();
    assert_eq!(refused, PoolError::Refused(Refusal::NoParent));
    assert_eq!(host.read(0, 1).1[0], 1);
    // The count of one version is that of the list.
    for expected in rig::list(&pool) {
        let lvol = expected.id;
        let Ok(Outcome::List(counted)) = run(&pool, Command::Count { lvol }) else {
            panic!("a count");
        };
        assert_eq!(counted, [expected]);
    }
    let lvol = newest;
    let unknown = run(&pool, Command::Count { lvol }).unwrap_err();
    assert_eq!(unknown, PoolError::Unknown { id: newest });
    rig::check(&pool);
}

/// A volume's own units lie over its new parent, for the queue that is open already, too.
#[test]
fn a_volume_shows_its_new_parent() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let source = rig::volume(&pool, 1, 8);
    assert_eq!(Host::on(&pool, source).write(0, 32, 1), Status::Ok);
    let snapshot = rig::snapshot(&pool, source, 2);
    let lvol = rig::volume(&pool, 3, 8);
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(4, 2, 7), Status::Ok);
    run(&pool, Command::SetParent { lvol, snapshot }).unwrap();
    assert_eq!(parent(&pool, lvol), Some(snapshot));
    for (lba, byte) in [(0, 1), (4, 7), (5, 7), (6, 1), (31, 1), (32, 0)] {
        assert_eq!(host.read(lba, 1).1[0], byte, "block {lba}");
    }
    let again = run(&pool, Command::SetParent { lvol, snapshot }).unwrap_err();
    assert_eq!(again, PoolError::Refused(Refusal::SameParent));
    assert_eq!(host.write(0, 1, 9), Status::Ok);
    assert_eq!(Host::on(&pool, snapshot).read(0, 1).1[0], 1);
    rig::check(&pool);
}

/// An open queue refuses writes from the answer on; the device says so, and a clone takes them.
#[test]
fn a_volume_becomes_read_only() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let lvol = rig::volume(&pool, 1, 8);
    let device = block_on(pool.lvol(lvol)).unwrap();
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    assert!(!device.limits().read_only);
    run(&pool, Command::ReadOnly { lvol }).unwrap();
    assert!(device.limits().read_only);
    assert!(rig::list(&pool)[0].is_read_only);
    for lba in [0, 16] {
        assert_eq!(host.write(lba, 1, 2), Status::WriteProtected);
    }
    assert_eq!(host.unmap(0, 16), Status::WriteProtected);
    assert_eq!(host.read(0, 1).1[0], 1);
    let clone = rig::clone(&pool, lvol, 2);
    assert_eq!(Host::on(&pool, clone).write(0, 1, 2), Status::Ok);
    assert_eq!(host.read(0, 1).1[0], 1);
    rig::check(&pool);
}
