//! Tests of the choice of replicas when a volume is opened: which labels are trusted, and how an
//! operator overrides the choice.

use std::time::Duration;

use nacre_hugepages::Buf;

use super::rig::{REGION, World};
use crate::handle::{Command, ResyncKind, VolumeError, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{Outcome, Plan, StoreError};

fn why(world: &World, replica: usize) -> String {
    let status = world.status();
    status.replicas[replica].why.clone().unwrap_or_default()
}

/// A volume of two replicas, opened twice, whose hosts wait long; and a backup of the first
/// replica's label from the first opening.
fn with_backup() -> (World, Vec<Buf>) {
    let mut world = World::with(2);
    let settings = Box::new(Settings {
        frozen_hold_ms: 600_000,
        ..Settings::default()
    });
    world.run(Command::Set { settings }).unwrap();
    world.write(0, 8, 1);
    let backup = world.reserved("d0");
    world.crash();
    world.open().unwrap();
    (world, backup)
}

/// The last in-sync replica returns with an old label, as after a restore of its device from a
/// backup. It is not read and keeps its state. If it were set to filling, it would have no source,
/// and no replica could ever be in sync again.
#[test]
fn the_last_in_sync_replica_is_never_filled() {
    let (mut world, backup) = with_backup();
    world.write(0, 8, 2);
    world.shelf.take("d1");
    world.write(0, 8, 3);
    world.shelf.take("d0");
    let waits = world.begin_write(0, 8, 4);
    world.until(|world| world.state() == VolumeState::Frozen);
    let newest = world.reserved("d0");
    world.put_back("d0", &backup);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("its label is of epoch 1"));
    for at in 0..20 {
        // Attaching d1 does not change this.
        if at == 10 {
            world.shelf.bring("d1");
        }
        world.pass(Duration::from_secs(1));
        assert_eq!(world.state(), VolumeState::Frozen);
        assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    }
    assert!(world.ended(waits).is_none());
    assert!(why(&world, 0).contains("Bring back the device"));
    // The right device is detected without a command.
    world.put_back("d0", &newest);
    assert!(world.wait(waits).status.is_ok());
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(0), 4);
}

/// A replica without a label is not trusted either, also when the volume is opened; the error says
/// which device it is.
#[test]
fn the_last_in_sync_replica_without_a_label() {
    let mut world = World::empty(1);
    let blank = world.reserved("d0");
    world.create(1, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    let labelled = world.reserved("d0");
    world.shelf.take("d0");
    let waits = world.begin_write(0, 8, 2);
    world.until(|world| world.state() == VolumeState::Frozen);
    world.put_back("d0", &blank);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("it has no label"));
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    assert!(world.ended(waits).is_none());
    world.crash();
    let refused = world.open().unwrap_err();
    assert!(
        matches!(&refused, VolumeError::NothingInSync { why, .. } if why.contains("older state than the last one served")),
        "{refused}"
    );
    world.crash();
    world.put_back("d0", &labelled);
    world.open().unwrap();
    world.until_healthy();
}

/// An operator continues from an incomplete replica. This changes only the store: a label written
/// for this decision could arrive long after another decision, and roll back the writes of a later
/// holder.
#[test]
fn a_forced_replica_is_not_written_to() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    world.open().unwrap();
    world.shelf.take("d1");
    world.write(REGION, 8, 2);
    world.crash();
    world.open().unwrap();
    world.write(0, 8, 3);
    world.crash();
    world.shelf.take("d0");
    world.shelf.bring("d1");
    let refused = world.open().unwrap_err();
    assert!(matches!(refused, VolumeError::NothingInSync { .. }));
    world.crash();
    let before = world.reserved("d1");
    let same = |world: &World| {
        let now = world.reserved("d1");
        now.iter()
            .zip(&before)
            .all(|(now, then)| now[..] == then[..])
    };
    // A decision based on an outdated record.
    let record = world.record();
    world
        .store
        .plan_next([Plan::default(), Plan::outcome(Outcome::Intrude)]);
    let refused = world.force_in_sync("d1", "vol").unwrap_err();
    let conflict = VolumeError::Store(StoreError::Conflict {
        id: record.id,
        expected: record.version(),
        found: world.record().version(),
    });
    assert_eq!(refused.to_string(), conflict.to_string());
    assert!(same(&world));
    assert_eq!(world.record().replicas, record.replicas);
    // Without the volume's name the command is refused.
    let refused = world.force_in_sync("d1", "").unwrap_err();
    assert!(matches!(refused, VolumeError::LastCopy { .. }));

    world.force_in_sync("d1", "vol").unwrap();
    assert!(same(&world), "the device was written to");
    assert_eq!(world.replica_state("d1"), ReplicaState::InSync);
    world.open().unwrap();
    assert_eq!(
        world.read(REGION),
        0,
        "the forced replica missed this write"
    );
    world.write(0, 8, 4);
    // The replica has a new label from now on: an older copy of its device is not trusted.
    world.crash();
    world.put_back("d1", &before);
    let refused = world.open().unwrap_err();
    assert!(matches!(refused, VolumeError::NothingInSync { .. }));
    world.crash();
    world.force_in_sync("d1", "vol").unwrap();
    world.open().unwrap();
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!((world.read(0), world.read(REGION)), (4, 0));
}

/// Another holder opened the volume after the operator had read its record: writes acknowledged
/// since are not discarded for the earlier state.
#[test]
fn a_choice_made_before_opening_is_refused() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    let seen = world.record().version();
    world.open().unwrap();
    world.write(0, 8, 2);
    let record = world.record();
    world.shelf.forget_claims();
    let refused = world.force_as_of(seen, "d1", "vol").unwrap_err();
    let conflict = StoreError::Conflict {
        id: record.id,
        expected: seen,
        found: record.version(),
    };
    assert_eq!(refused, VolumeError::Store(conflict));
    assert_eq!(world.record(), record);
    world.write(8, 8, 3);
    assert_eq!((world.read(0), world.read(8)), (2, 3));
}

/// Another holder opens the volume at the same time: its opening wins, and its writes are kept.
#[test]
fn a_forced_replica_in_an_open_volume() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.forget_claims();
    world.force_in_sync("d1", "vol").unwrap();
    // The holder's next decision conflicts with the forced one, and it acknowledges nothing
    // afterwards.
    let settings = Box::new(Settings::default());
    let refused = world.run(Command::Set { settings }).unwrap_err();
    assert!(matches!(
        refused,
        VolumeError::Store(StoreError::Conflict { .. })
    ));
    assert_eq!(world.state(), VolumeState::Fenced);
    world.crash();
    world.shelf.forget_claims();
    world.open().unwrap();
    assert_eq!(world.read(0), 1);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

fn thaw(replica: &str, force: Option<&str>) -> Command {
    Command::Thaw {
        replica: Some(replica.into()),
        force: force.map(Into::into),
    }
}

/// A frozen volume continues, without being closed, from the replica that an operator names, whose
/// label is too old to be trusted. From then on its new label is trusted and the old one is not.
#[test]
fn a_frozen_volume_continues_from_a_forced_replica() {
    let (mut world, backup) = with_backup();
    world.write(REGION, 8, 2);
    let refused = world.run(thaw("d0", Some("vol"))).unwrap_err();
    assert!(
        matches!(&refused, VolumeError::Invalid { what: "replica", why } if why.contains("in sync")),
        "the volume serves already: {refused}"
    );
    world.shelf.take("d1");
    world.write(0, 8, 3);
    world.shelf.take("d0");
    let waits = world.begin_write(8, 8, 4);
    world.until(|world| world.state() == VolumeState::Frozen);
    let away = world.run(thaw("d0", Some("vol"))).unwrap_err();
    assert!(matches!(away, VolumeError::Device(_)), "{away}");
    world.put_back("d0", &backup);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("thaw the volume with this replica"));
    for force in [None, Some("d0")] {
        let refused = world.run(thaw("d0", force)).unwrap_err();
        assert!(matches!(refused, VolumeError::LastCopy { .. }), "{refused}");
    }
    let unknown = world.run(thaw("d7", Some("vol"))).unwrap_err();
    assert!(matches!(unknown, VolumeError::NoReplica { .. }));
    assert!(
        world.ended(waits).is_none(),
        "a refused command changes nothing"
    );
    let epoch = world.record().epoch;

    world.run(thaw("d0", Some("vol"))).unwrap();
    assert!(world.wait(waits).status.is_ok());
    assert_eq!((world.read(0), world.read(8)), (3, 4));
    let record = world.record();
    assert_eq!((record.epoch, record.serving), (epoch, epoch));
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Filling { watermark: 0, .. }
    ));
    world.write(0, 8, 5);
    // A device with the backup is not trusted either.
    world.crash();
    world.put_back("d0", &backup);
    let refused = world.open().unwrap_err();
    assert!(
        matches!(refused, VolumeError::NothingInSync { .. }),
        "{refused}"
    );
    world.crash();
    world.force_in_sync("d0", "vol").unwrap();
    world.open().unwrap();
    world.shelf.bring("d1");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(0), 5);
}

/// The process dies after the choice is stored and before the label is written: the choice stands.
#[test]
fn a_choice_survives_a_crash() {
    let (mut world, backup) = with_backup();
    world.shelf.take("d1");
    world.write(0, 8, 2);
    world.shelf.take("d0");
    let _waits = world.begin_write(8, 8, 4);
    world.until(|world| world.state() == VolumeState::Frozen);
    world.put_back("d0", &backup);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("thaw the volume with this replica"));
    let before = world.record().revision;
    let handle = world.handle.clone().unwrap();
    let command = thaw("d0", Some("vol"));
    drop(
        world
            .core
            .core()
            .spawn_local(async move { handle.run(command).await }),
    );
    world.until(|world| world.record().revision > before);
    assert!(world.record().serving < world.record().epoch);
    world.crash();
    world.open().unwrap();
    assert_eq!(world.record().serving, world.record().epoch);
    assert_eq!(world.read(0), 2);
    world.shelf.bring("d1");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// An operator can also name a replica that is out, absent or present, but not one that was never
/// in sync.
#[test]
fn a_frozen_volume_continues_from_an_out_replica() {
    for away in [true, false] {
        let mut world = World::with(3);
        world.write(0, 8, 1);
        world.shelf.take("d1");
        world.write(0, 8, 2);
        let offline = Command::Offline {
            replica: "d1".into(),
            force: None,
        };
        world.run(offline).unwrap();
        world.shelf.take("d2");
        world.write(0, 8, 3);
        let full = Command::Resync {
            replica: Some("d2".into()),
            full: true,
        };
        world.run(full).unwrap();
        world.shelf.take("d0");
        let waits = world.begin_write(8, 8, 4);
        world.until(|world| world.state() == VolumeState::Frozen);
        world.shelf.bring("d1");
        world.shelf.bring("d2");
        if !away {
            let replica = "d1".into();
            world.run(Command::Online { replica }).unwrap();
            world.until(|world| world.status().replicas[1].attached);
        }
        world.until(|world| world.status().replicas[2].attached);
        let refused = world.run(thaw("d2", Some("vol"))).unwrap_err();
        assert!(
            matches!(&refused, VolumeError::Invalid { why, .. } if why.contains("data is incomplete")),
            "{refused}"
        );
        world.run(thaw("d1", Some("vol"))).unwrap();
        assert!(world.wait(waits).status.is_ok(), "away: {away}");
        assert_eq!((world.read(0), world.read(8)), (1, 4));
        assert!(!world.record().replicas[1].offline);
        world.shelf.bring("d0");
        world.until_healthy();
        world.all_equal(&["d0", "d1", "d2"]);
    }
}

/// A replica is restored from a backup of the epoch in which the volume was closed. It has no
/// record of the close, and is filled from the other one. If no replica has that record, as after a
/// crash, the store decides.
#[test]
fn a_backup_of_the_last_epoch() {
    for (disk, late) in [("d0", false), ("d1", false), ("d1", true)] {
        let mut world = World::with(2);
        world.write(0, 8, 1);
        let backup = world.reserved(disk);
        world.write(0, 8, 2);
        world.close();
        world.put_back(disk, &backup);
        world.scribble(disk, 0, 1);
        if late {
            world.shelf.take(disk);
        }
        world.open().unwrap();
        if late {
            world.shelf.bring(disk);
            let filled = |e: &VolumeEventKind| matches!(e, VolumeEventKind::ResyncStarted { kind, .. } if *kind == ResyncKind::Full);
            world.until(|world| world.has_event(filled));
        }
        assert!(matches!(
            world.replica_state(disk),
            ReplicaState::Filling { .. }
        ));
        assert_eq!(world.read(0), 2, "{disk}");
        world.until_healthy();
        world.all_equal(&["d0", "d1"]);
        // Both replicas are in sync: a reopened volume is healthy.
        world.close();
        world.open().unwrap();
        assert_eq!(world.state(), VolumeState::Healthy);
    }
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let backups = ["d0", "d1"].map(|disk| (disk, world.reserved(disk)));
    world.close();
    for (disk, backup) in &backups {
        world.put_back(disk, backup);
    }
    world.open().unwrap();
    assert!(
        ["d0", "d1"]
            .iter()
            .all(|disk| world.replica_state(disk) == ReplicaState::InSync)
    );
    assert_eq!(world.read(0), 1);
}

/// Two disks, or their names, were swapped. Each of them holds good data and is not overwritten
/// with the other's. When swapped back they get their missed writes and nothing else.
#[test]
fn swapped_disks() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    world.crash();
    let (one, two) = (world.reserved("d1"), world.reserved("d2"));
    world.put_back("d1", &two);
    world.put_back("d2", &one);
    world.open().unwrap();
    world.write(REGION, 8, 2);
    world.pass(Duration::from_secs(30));
    for (at, other) in [(1, "d2"), (2, "d1")] {
        assert!(why(&world, at).contains(other), "{}", why(&world, at));
        let state = world.record().replicas[at].state;
        assert!(matches!(state, ReplicaState::Out { .. }), "{state:?}");
    }
    let same = |world: &World| {
        let pairs = [("d1", &two), ("d2", &one)];
        pairs.iter().all(|(name, before)| {
            let now = world.reserved(name);
            now.iter().zip(*before).all(|(a, b)| a[..] == b[..])
        })
    };
    assert!(same(&world), "they were written to");
    world.put_back("d1", &one);
    world.put_back("d2", &two);
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
    let full = |e: &VolumeEventKind| matches!(e, VolumeEventKind::ResyncStarted { kind, .. } if *kind == ResyncKind::Full);
    assert!(!world.has_event(full));
}

/// A disk returns with the label of its earlier replica. It is filled from the start, and its old
/// label does not remain beside the new one.
#[test]
fn a_label_of_a_former_replica_on_the_same_disk() {
    let mut world = World::with(2);
    let backup = world.reserved("d1");
    let replica = "d1".to_owned();
    world
        .run(Command::Remove {
            replica,
            force: None,
        })
        .unwrap();
    let device = "d1".to_owned();
    world
        .run(Command::Add {
            device,
            force: true,
        })
        .unwrap();
    world.until_healthy();
    world.write(0, 8, 1);
    world.crash();
    world.put_back("d1", &backup);
    world.open().unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    // Another opening trusts the new label, too.
    world.write(REGION, 8, 2);
    world.crash();
    world.open().unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}
