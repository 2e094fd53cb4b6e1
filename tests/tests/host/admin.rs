//! Tests of associations: connect, keep-alive, refusals, and their end.

use std::time::Duration;

use nacre_nvmf::host::{ControllerState, HostError, fetch_discovery_log};
use nacre_nvmf::subsystems::{SubsystemConfig, TargetError};
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{GetLogPage, Identify};
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::{Nqn, Sqe, StatusCode};
use nacre_tests::target::{SUBNQN, nqn};

use super::rig::{BLOCK, BLOCKS, HOSTNQN, World, options};

#[test]
fn a_controller_comes_up() {
    let mut world = World::new();
    world.connect(options(3));
    assert_eq!(*world.controller().state(), ControllerState::Connecting);
    assert_eq!(world.controller().link().generation(), None);
    world.until("live", |w| w.controller().is_live());

    let link = world.controller().link().clone();
    let state = link.state();
    assert!(link.generation().is_some() && !link.has_failed());
    assert_eq!(state.io_queues, 3);
    assert_eq!(state.queue_entries, 17);
    assert_eq!(state.max_transfer_bytes, 128 << 10);
    assert!(state.fused_compare_and_write);
    let namespace = &state.namespaces[&1];
    assert_eq!((namespace.blocks, namespace.block_size), (BLOCKS, BLOCK));
    assert!(namespace.uuid.is_some());
    let identify = world.controller().identify().unwrap();
    assert_eq!(identify.cntlid.get(), state.cntlid);
    assert!(!world.controller().is_discovery());
    assert_eq!(world.target().controller_count(), 1);
}

/// Goal: an association without I/O stays alive for hours at a low cost.
#[test]
fn keep_alives_keep_it_alive() {
    let mut world = World::connected(1);
    let generation = world.controller().link().generation();
    world.pass(Duration::from_secs(3600));
    assert!(world.controller().is_live());
    assert_eq!(world.controller().link().generation(), generation);
    assert!(world.queues[0].is_live());
    assert_eq!(world.write(0, 0, 1, 1), nacre_bdev::Status::Ok);
}

/// Goal: the host gives up a target that no longer answers on an open connection, within the
/// keep-alive timeout.
#[test]
fn a_silent_target_is_detected() {
    let mut world = World::connected(1);
    let keep_alive = world.controller().options().keep_alive;
    world.faults(0).stall(true);
    let stalled_at = world.now;
    world.until("noticed", |w| !w.controller().is_live());
    assert!(
        world.failure().contains("keep alive"),
        "{}",
        world.failure()
    );
    let took = world.now.since(stalled_at);
    assert!(took <= keep_alive * 2, "noticed after {took:?}");
    world.until("live again", |w| w.controller().is_live());
}

#[test]
fn permanent_refusals() {
    let mut world = World::new();
    world.connect_to(nqn("nqn.2025-01.io.nacre:nobody"));
    world.until("refused", |w| {
        matches!(w.controller().state(), ControllerState::Failed(_))
    });
    assert!(world.failure().contains("subnqn"), "{}", world.failure());
    assert_eq!(world.net.borrow().dials.len(), 1, "tried once");
    assert!(world.controller().link().has_failed());

    world
        .target()
        .set_allow_any_host(&nqn(SUBNQN), false)
        .unwrap();
    world.connect(options(1));
    world.until("refused", |w| {
        matches!(w.controller().state(), ControllerState::Failed(_))
    });
    let ControllerState::Failed(HostError::Refused { status, .. }) = world.controller().state()
    else {
        panic!("{}", world.failure())
    };
    assert_eq!(status.code(), StatusCode::CONNECT_INVALID_HOST);

    world
        .target()
        .add_host(&nqn(SUBNQN), &nqn(HOSTNQN))
        .unwrap();
    world.connect(options(1));
    world.until("live", |w| w.controller().is_live());
}

#[test]
fn user_admin_commands_complete() {
    let mut world = World::connected(1);
    let memory = world.memory.clone();
    let identify = Identify::new(cns::CONTROLLER).to_sqe(0, 0);
    let ask = |world: &mut World, sqe: Sqe, bytes: usize| {
        let read = (bytes > 0).then(|| memory.acquire(bytes).unwrap());
        let ticket = world.controller_mut().submit(sqe, None, read).unwrap();
        let mut answer = None;
        world.until("an answer", |w| {
            answer = w.controller_mut().take_result(ticket);
            answer.is_some()
        });
        answer.unwrap()
    };
    let answer = ask(&mut world, identify, 4096).unwrap();
    assert!(answer.cqe.status().is_success());
    assert_eq!(answer.data.unwrap().len(), 4096);
    // An error completion is an answer, too.
    let answer = ask(&mut world, Sqe::new(0x55, 0), 0).unwrap();
    assert_eq!(answer.cqe.status().code(), StatusCode::INVALID_OPCODE);

    // Use all tickets, which are more than the queue has entries.
    let mut tickets = Vec::new();
    while let Some(ticket) = world.controller_mut().submit(identify, None, None) {
        tickets.push(ticket);
    }
    assert_eq!(tickets.len(), 256);
    for ticket in tickets.drain(..) {
        world.until("an answer", |w| {
            w.controller_mut().take_result(ticket).is_some()
        });
    }
    assert!(world.controller().is_live());

    // Commands in flight at the end complete with that error.
    let ticket = world.controller_mut().submit(identify, None, None).unwrap();
    world.faults(0).stall(true);
    let now = world.now;
    world.controller_mut().disconnect(now);
    world.until("closed", |w| {
        *w.controller().state() == ControllerState::Closed
    });
    let answer = world.controller_mut().take_result(ticket).unwrap();
    assert!(matches!(
        answer,
        Err(HostError::Lost(_) | HostError::TimedOut { .. })
    ));
    let late = world.controller_mut().submit(identify, None, None).unwrap();
    assert!(world.controller_mut().take_result(late).unwrap().is_err());
}

#[test]
fn disconnect_leaves_nothing_behind() {
    let mut world = World::connected(2);
    let now = world.now;
    world.controller_mut().disconnect(now);
    world.until("closed", |w| {
        *w.controller().state() == ControllerState::Closed
    });
    world.pass(Duration::from_secs(1));
    assert_eq!(world.target().controller_count(), 0);
    assert_eq!(
        world.net.borrow().dials.len(),
        3,
        "no host reconnects after a disconnect"
    );
    let token = world.submit_write(0, 0, 1, 1);
    assert_eq!(world.wait(token).status, nacre_bdev::Status::Gone);
    world.assert_buffers_back(0);
}

/// Goal: the host reads the log of a discovery controller, and gets the event when it changes.
#[test]
fn discovery() {
    let mut world = World::new();
    world.connect_to(Nqn::discovery());
    world.until("live", |w| w.controller().is_live());
    assert!(world.controller().is_discovery());
    let names = |world: &mut World| -> (u64, Vec<String>) {
        let log = fetch_discovery_log(|page| read_log(world, page), 3).unwrap();
        let names = log.records.iter().map(|r| r.subnqn.to_string());
        (
            log.generation,
            names.filter(|n| n.contains("nacre")).collect(),
        )
    };
    let (before, found) = names(&mut world);
    assert_eq!(found, [SUBNQN]);
    assert_eq!(names(&mut world), (before, found));

    let another = "nqn.2025-01.io.nacre:another";
    add_subsystem(&world, another).unwrap();
    world.until("the event arrives", |w| {
        w.controller_mut().take_event() == Some(AsyncEvent::DISCOVERY_LOG_CHANGE)
    });
    let (after, found) = names(&mut world);
    assert!(after > before);
    assert_eq!(found.len(), 2);
    assert!(found.contains(&another.to_string()));
    // Reading re-arms the event: the next change is reported, too.
    add_subsystem(&world, "nqn.2025-01.io.nacre:third").unwrap();
    world.until("the event arrives", |w| {
        w.controller_mut().take_event() == Some(AsyncEvent::DISCOVERY_LOG_CHANGE)
    });
    assert_eq!(names(&mut world).1.len(), 3);
}

/// Goal: if the log changes between two reads, the host reads it again; the result is of one
/// generation.
#[test]
fn discovery_log_that_changes_while_it_is_read() {
    let mut world = World::new();
    for at in 0..10 {
        add_subsystem(&world, &format!("nqn.2025-01.io.nacre:s{at}")).unwrap();
    }
    world.connect_to(Nqn::discovery());
    world.until("live", |w| w.controller().is_live());
    let mut reads = 0;
    let log = fetch_discovery_log(
        |page| {
            reads += 1;
            if reads == 3 {
                add_subsystem(&world, "nqn.2025-01.io.nacre:late").unwrap();
            }
            read_log(&mut world, page)
        },
        3,
    )
    .unwrap();
    assert_eq!(log.generation, world.target().discovery_generation());
    assert!(
        log.records
            .iter()
            .any(|r| r.subnqn.as_str().ends_with("late"))
    );
}

fn add_subsystem(world: &World, name: &str) -> Result<(), TargetError> {
    use nacre_nvmf::transport::{Address, TransportType};
    let mut config = SubsystemConfig::new(nqn(name));
    config.allow_any_host = true;
    world.target().create_subsystem(config)?;
    let address = Address::Loopback("here".into());
    world
        .target()
        .add_listener(&nqn(name), TransportType::Loopback, &address)
        .map(drop)
}

fn read_log(world: &mut World, page: GetLogPage) -> Result<Vec<u8>, HostError> {
    let read = world.memory.acquire(page.bytes() as usize);
    let sqe = page.to_sqe(0, 0);
    let ticket = world.controller_mut().submit(sqe, None, read).unwrap();
    let mut answer = None;
    world.until("a log page", |w| {
        answer = w.controller_mut().take_result(ticket);
        answer.is_some()
    });
    let answer = answer.unwrap()?;
    assert!(answer.cqe.status().is_success(), "{}", answer.cqe.status());
    Ok(answer.data.map_or_else(Vec::new, |data| data.to_vec()))
}
