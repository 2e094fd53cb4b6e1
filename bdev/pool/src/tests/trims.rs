//! Trims of places without data.

use std::sync::Arc;

use nacre_bdev::fault::{self, Action, Fault, FaultDevice};
use nacre_bdev::{Bdev, Op, Status};

use super::rig::{self, HOLDER, Home, Host, POOL, run};
use crate::Command;

/// Blocks of a leaf.
const LEAF: u32 = 4096;

fn on_a_fault_device() -> (Home, Arc<FaultDevice>) {
    let home = Home::with_disk(64);
    let config = serde_json::from_value(serde_json::json!({ "base_name": "disk" })).unwrap();
    let device = fault::create(config, &home.registry).unwrap();
    let registered = Arc::clone(&device) as Arc<dyn Bdev>;
    home.registry.register(registered).unwrap();
    (home, device)
}

/// Goal: a trim of places that another trim has just emptied is answered after that one's record
/// is on the disk, and not before: a loss of power would bring the data back. Method: writes of the
/// log hang; the keeper finds no leaf, or (`reads`) the lane finds an empty one.
#[test]
fn a_trim_of_empty_places_waits_for_the_log() {
    for reads in [false, true] {
        let (home, device) = on_a_fault_device();
        let pool = home.create_on("EE_disk", false).unwrap();
        let lvol = rig::volume(&pool, 1, 16);
        let mut host = Host::on(&pool, lvol);
        assert_eq!(host.write(0, 16, 7), Status::Ok);
        assert_eq!(host.flush(), Status::Ok);
        drop((host, pool));
        // After an import no leaf is loaded.
        let home = Home::new(&home.kill());
        let (pool, _) = home.import_by("EE_disk", Some(POOL), HOLDER).unwrap();
        let mut host = Host::on(&pool, lvol);
        // A record of this import: the import itself has ended its work.
        assert_eq!(host.unmap(LEAF as u64 - 1, 1), Status::Ok);
        let hangs = Fault {
            ops: vec![Op::Write],
            ..Fault::new(Action::Hang)
        };
        device.inject(hangs).unwrap();
        let first = host.begin_unmap(0, LEAF);
        assert_eq!(host.ended(first), None);
        // The keeper takes its messages in their order: it has begun the trim before it loads the
        // leaf.
        run(&pool, Command::List).unwrap();
        if reads {
            assert_eq!(host.read(0, 1), (Status::Ok, vec![0; 4096]));
        }
        let second = host.begin_unmap(0, LEAF);
        for _ in 0..3 {
            assert_eq!(
                (host.ended(first), host.ended(second)),
                (None, None),
                "{reads}"
            );
            run(&pool, Command::List).unwrap();
        }
        device.clear();
        device.resume_pending();
        assert_eq!([first, second].map(|trim| host.end(trim)), [Status::Ok; 2]);
        assert_eq!(host.read(0, 1), (Status::Ok, vec![0; 4096]));
        rig::check(&pool);
    }
}
