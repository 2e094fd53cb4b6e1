//! Devices that have something of their own to do while no command is under way.

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe};
use nacre_reactor::{Idle, Poller};

use super::rig::*;
use super::told::{Told, rig_told};

fn read(cid: u16) -> Sqe {
    let bytes = Sgl::Transport { length: BLOCK };
    ReadWrite::new(0, 1)
        .to_sqe(opcode::READ, cid, 1)
        .with_sgl(bytes)
}

fn left(told: &Told) -> u32 {
    told.state.lock().unwrap().leftovers
}

fn polls(told: &Told) -> u32 {
    told.state.lock().unwrap().polls
}

/// An idle device is polled until it has cleared away what a change left behind, and not after that: as
/// soon as the core is called on, with its next upkeep, or before it sleeps.
#[test]
fn idle_devices_clear_away() {
    let (mut rig, told) = rig_told();
    let io = rig.io();
    assert_eq!(rig.status(io, read(1), &[]), StatusCode::SUCCESS);
    (0..5).for_each(|_| rig.turn());
    let idle = polls(&told);
    told.tell(|state| state.leftovers = 3);
    rig.turn();
    assert_eq!(polls(&told), idle, "nobody has looked");
    rig.target.attend_all();
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&told), polls(&told)), (0, idle + 3));

    told.tell(|state| state.leftovers = 2);
    assert_eq!(
        rig.group.arm(rig.now),
        Idle::Busy,
        "it does not sleep over it"
    );
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&told), polls(&told)), (0, idle + 5));
    assert_ne!(rig.group.arm(rig.now), Idle::Busy);

    told.tell(|state| state.leftovers = 2);
    rig.pass(std::time::Duration::from_millis(100));
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&told), polls(&told)), (0, idle + 7));
    assert_eq!(rig.status(io, read(2), &[]), StatusCode::SUCCESS);
}
