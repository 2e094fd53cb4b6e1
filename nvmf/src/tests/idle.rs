//! Tests of the idle timeout of a listener, in virtual time.

use std::time::Duration;

use nacre_nvmf_wire::commands::admin::keep_alive;
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::opcode::admin::ASYNC_EVENT_REQUEST;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};

use super::rig::*;
use super::scripted::rig_scripted;
use crate::subsystems::ListenOptions;
use crate::subsystems::association::Teardown;
use crate::transport::{Address, ListenerId, ListenerOptions, TransportType};

/// The rig's next hosts come through a listener with this timeout, without Keep Alive.
fn with_timeout(mut rig: Rig, seconds: u32) -> Rig {
    let options = ListenOptions {
        listener: ListenerOptions {
            idle_timeout_s: Some(seconds),
            ..ListenerOptions::default()
        },
        ..ListenOptions::default()
    };
    let address = Address::Loopback("idle".into());
    rig.target
        .add_listener_with(&nqn(SUBNQN), TransportType::Loopback, &address, options)
        .unwrap();
    (rig.listener, rig.kato_ms) = (ListenerId(2), 0);
    rig
}

fn pass(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds * 5 {
        rig.pass(Duration::from_millis(200));
    }
}

fn read(cid: u16) -> Sqe {
    let bytes = Sgl::Transport { length: BLOCK };
    ReadWrite::new(0, 1)
        .to_sqe(opcode::READ, cid, 1)
        .with_sgl(bytes)
}

/// Goal: all connections of a silent host are closed, for the reason that the log names. An event
/// request does not stop the timer.
#[test]
fn a_silent_host_is_closed() {
    let mut rig = with_timeout(Rig::with_malloc(), 30);
    let (admin, cntlid) = rig.admin();
    rig.io_queue(cntlid, 1);
    let cid = rig.cid();
    rig.send(admin, Sqe::new(ASYNC_EVENT_REQUEST, cid), None);
    pass(&mut rig, 29);
    assert_eq!(rig.group.queue_pairs(), 2);
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let association = subsystem.controllers().remove(0);
    pass(&mut rig, 2);
    assert_eq!(association.teardown_reason(), Some(Teardown::Idle));
    rig.assert_clean();
}

/// Goal: no option, and 0, mean never.
#[test]
fn without_a_timeout_a_host_may_be_silent() {
    let mut plain = Rig::with_malloc();
    plain.kato_ms = 0;
    for mut rig in [plain, with_timeout(Rig::with_malloc(), 0)] {
        rig.io();
        pass(&mut rig, 1000);
        assert_eq!(rig.group.queue_pairs(), 2);
    }
}

/// Goal: a command on one queue, Keep Alive too, keeps the others.
#[test]
fn any_command_counts_for_all_queues() {
    let mut rig = with_timeout(Rig::with_malloc(), 30);
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    for _ in 0..3 {
        pass(&mut rig, 25);
        let cid = rig.cid();
        assert!(rig.status(admin, keep_alive(cid), &[]).is_success());
        pass(&mut rig, 25);
        let cid = rig.cid();
        assert!(rig.status(io, read(cid), &[]).is_success());
    }
    assert_eq!(rig.group.queue_pairs(), 2);
    pass(&mut rig, 31);
    rig.assert_clean();
}

/// Goal: an I/O command in progress stops the timer, which starts again afterwards.
#[test]
fn a_command_in_progress_stops_the_timer() {
    let (rig, scripted) = rig_scripted();
    let mut rig = with_timeout(rig, 30);
    let io = rig.io();
    scripted.script(|state| state.held = true);
    let cid = rig.cid();
    rig.send(io, read(cid), None);
    pass(&mut rig, 100);
    assert_eq!(rig.group.queue_pairs(), 2);
    scripted.script(|state| state.held = false);
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(cid, StatusCode::SUCCESS)]);
    pass(&mut rig, 29);
    assert_eq!(
        rig.group.queue_pairs(),
        2,
        "the timer ran while the command was in progress"
    );
    pass(&mut rig, 2);
    rig.assert_clean();
}
