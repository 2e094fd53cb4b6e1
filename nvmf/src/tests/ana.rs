//! Tests of ANA states by listener: the log page, the status of commands, and the events of
//! changes. Method: one host on two listeners of one subsystem, in virtual time.

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{GetLogPage, async_event_request};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::fabrics::InvalidParameter;
use nacre_nvmf_wire::log::ana::{self, AnaHeader, AnaState};
use nacre_nvmf_wire::log::lid;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use zerocopy::FromBytes;

use super::rig::*;
use crate::subsystems::{
    AnaStates, ListenOptions, NamespaceConfig, NamespaceIds, SubsystemConfig, SubsystemError,
    TargetConfig, TargetError, Withheld,
};
use crate::transport::{Address, ConnId, ListenerId, TransportType};

const ANA: &str = "nqn.2025-01.io.nacre:ana";
const CHANGED: u32 = AsyncEvent::ANA_CHANGE.dword0();
const ALL: Option<u32> = None;

fn at(name: &str) -> Address {
    Address::Loopback(name.into())
}

/// A subsystem with ANA reporting on the listeners "test" (1) and "second" (2), and `namespaces`.
fn two_paths(namespaces: u32) -> Rig {
    let rig = Rig::new(TargetConfig::default());
    let mut config = SubsystemConfig::new(nqn(ANA));
    config.allow_any_host = true;
    config.ana_reporting = true;
    rig.target.create_subsystem(config).unwrap();
    for name in ["test", "second"] {
        rig.target
            .add_listener(&nqn(ANA), TransportType::Loopback, &at(name))
            .unwrap();
    }
    for _ in 0..namespaces {
        rig.add_namespace_to(ANA, ram());
    }
    rig
}

impl Rig {
    /// The admin and one I/O connection of a controller on a listener.
    fn path(&mut self, listener: u64) -> (ConnId, ConnId) {
        self.listener = ListenerId(listener);
        let (admin, cqe) = self.connect_as(HOSTNQN, ANA, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        self.enable(admin);
        let (io, answer) = self.connect_as(HOSTNQN, ANA, 1, cqe.dword0() as u16, 16);
        assert!(answer.status().is_success(), "{}", answer.status());
        (admin, io)
    }

    fn set(&mut self, listener: &str, group: Option<u32>, state: AnaState) -> bool {
        let changed = self.target.set_ana_state(
            &nqn(ANA),
            TransportType::Loopback,
            &at(listener),
            group,
            state,
        );
        changed.unwrap()
    }

    fn command(&mut self, io: ConnId, op: u8, nsid: u32) -> StatusCode {
        let cid = self.cid();
        let sqe = match op {
            opcode::FLUSH => Sqe::for_namespace(op, cid, nsid),
            _ => ReadWrite::new(0, 1)
                .to_sqe(op, cid, nsid)
                .with_sgl(Sgl::Transport { length: BLOCK }),
        };
        self.status(io, sqe, &[5; BLOCK as usize])
    }

    /// CHGCNT of the page, and state and CHGCNT of each group in it.
    fn ana(&mut self, admin: ConnId) -> (u64, Vec<(u32, AnaState, u64)>) {
        let page = GetLogPage::new(lid::ASYMMETRIC_NAMESPACE_ACCESS, 1024, 0);
        let page = self.log_page(admin, page).unwrap();
        let (header, _) = AnaHeader::read_from_prefix(&page).unwrap();
        let groups = ana::groups(&page).map(|group| {
            let (group, _) = group.unwrap();
            let state = group.state().unwrap();
            (group.anagrpid.get(), state, group.change_count.get())
        });
        (header.change_count.get(), groups.collect())
    }

    fn states(&mut self, admin: ConnId) -> Vec<AnaState> {
        let (_, groups) = self.ana(admin);
        groups.into_iter().map(|(_, state, _)| state).collect()
    }
}

/// Each controller has the states of the listener that it came through, and no other.
#[test]
fn states_belong_to_a_listener() {
    let mut rig = two_paths(2);
    let (first, first_io) = rig.path(1);
    let (second, second_io) = rig.path(2);
    assert!(rig.set("second", ALL, AnaState::NonOptimized));
    assert!(!rig.set("second", ALL, AnaState::NonOptimized), "no change");
    assert_eq!(rig.states(first), [AnaState::Optimized; 2]);
    assert_eq!(rig.states(second), [AnaState::NonOptimized; 2]);
    assert!(rig.set("second", Some(2), AnaState::Inaccessible));
    assert_eq!(
        rig.states(second),
        [AnaState::NonOptimized, AnaState::Inaccessible]
    );
    for (io, nsid, status) in [
        (first_io, 1, StatusCode::SUCCESS),
        (first_io, 2, StatusCode::SUCCESS),
        (second_io, 1, StatusCode::SUCCESS),
        (second_io, 2, StatusCode::ANA_INACCESSIBLE),
    ] {
        assert_eq!(rig.command(io, opcode::WRITE, nsid), status, "{nsid}");
    }
    assert!(
        rig.set("second", ALL, AnaState::Optimized),
        "and all groups"
    );
    assert_eq!(rig.states(second), [AnaState::Optimized; 2]);
    assert_eq!(
        rig.command(second_io, opcode::WRITE, 2),
        StatusCode::SUCCESS
    );
}

/// A command that is not carried out is answered with the status of its state, without DNR; one for
/// all namespaces fails when it cannot reach one of them.
#[test]
fn every_state_has_its_status() {
    let mut rig = two_paths(2);
    let (admin, io) = rig.path(1);
    for (state, status) in [
        (AnaState::Inaccessible, StatusCode::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, StatusCode::ANA_PERSISTENT_LOSS),
        (AnaState::Change, StatusCode::ANA_TRANSITION),
        (AnaState::NonOptimized, StatusCode::SUCCESS),
        (AnaState::Optimized, StatusCode::SUCCESS),
    ] {
        assert!(rig.set("test", Some(1), state));
        for op in [opcode::READ, opcode::WRITE, opcode::FLUSH] {
            assert_eq!(rig.command(io, op, 1), status, "{state:?} {op:#x}");
            assert_eq!(rig.command(io, op, 2), StatusCode::SUCCESS, "{state:?}");
        }
        assert_eq!(rig.command(io, opcode::FLUSH, u32::MAX), status);
        let hidden = matches!(state, AnaState::Inaccessible | AnaState::PersistentLoss);
        let id = rig.identify_namespace(admin, 1);
        assert_eq!(id.nuse.get() == 0, hidden, "{state:?}");
        assert_eq!(id.ncap.get(), BLOCKS, "the host keeps its block device");
    }
    // None of that is an error of the medium, and the numbers are those of the specification.
    assert_eq!(StatusCode::ANA_INACCESSIBLE.field(), 0x302);
    assert_eq!(StatusCode::ANA_PERSISTENT_LOSS.field(), 0x301);
    assert_eq!(StatusCode::ANA_TRANSITION.field(), 0x303);
}

/// Where a listener allows no commands, an absent namespace may be on its way to another target:
/// the host gets the listener's state, and can retry on another path.
#[test]
fn an_absent_namespace() {
    let mut rig = two_paths(1);
    let (_, io) = rig.path(1);
    let unknown = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(rig.command(io, opcode::READ, 2), unknown);
    let subsystem = rig.target.subsystem(&nqn(ANA)).unwrap();
    rig.set("test", ALL, AnaState::Change);
    subsystem.remove_namespace(1).unwrap();
    for op in [opcode::READ, opcode::WRITE, opcode::FLUSH] {
        let status = rig.command(io, op, 1);
        assert_eq!(status, StatusCode::ANA_TRANSITION, "{op:#x}");
    }
    for (state, status) in [
        (AnaState::Inaccessible, StatusCode::ANA_INACCESSIBLE),
        (AnaState::Optimized, unknown),
    ] {
        rig.set("test", ALL, state);
        assert_eq!(rig.command(io, opcode::READ, 1), status, "{state:?}");
    }
}

/// One event is outstanding until the log is read; only affected hosts get it.
#[test]
fn one_event_until_the_log_is_read() {
    let mut rig = two_paths(1);
    let (first, _) = rig.path(1);
    let (second, _) = rig.path(2);
    for conn in [first, first, second] {
        let cid = rig.cid();
        rig.send(conn, async_event_request(cid), None);
    }
    rig.turn();
    let told = |rig: &mut Rig| -> Vec<u32> {
        rig.turn();
        rig.answers().iter().map(|cqe| cqe.dword0()).collect()
    };
    rig.set("test", ALL, AnaState::NonOptimized);
    assert_eq!(told(&mut rig), [CHANGED], "one controller, one event");
    rig.set("test", ALL, AnaState::Inaccessible);
    assert_eq!(told(&mut rig), [0; 0], "masked until the host looks");
    assert_eq!(rig.states(first), [AnaState::Inaccessible]);
    assert_eq!(told(&mut rig), [0; 0], "what was read is not told again");
    rig.set("test", ALL, AnaState::Inaccessible);
    rig.set("test", Some(7), AnaState::Optimized);
    assert_eq!(
        told(&mut rig),
        [0; 0],
        "no namespace of this host is in group 7"
    );
    rig.set("test", ALL, AnaState::Optimized);
    assert_eq!(told(&mut rig), [CHANGED]);
    rig.set("second", Some(1), AnaState::Change);
    assert_eq!(told(&mut rig), [CHANGED], "the other path has its own");
}

/// CHGCNT distinguishes changes: of the page with each change, of a group with its own changes.
#[test]
fn changes_are_counted() {
    let mut rig = two_paths(2);
    let (admin, _) = rig.path(1);
    let (before, groups) = rig.ana(admin);
    let of = |groups: &[(u32, AnaState, u64)], group: u32| {
        groups.iter().find(|g| g.0 == group).unwrap().2
    };
    rig.set("test", Some(1), AnaState::NonOptimized);
    let (after, now) = rig.ana(admin);
    assert!(after > before);
    assert!(of(&now, 1) > of(&groups, 1));
    assert_eq!(of(&now, 2), of(&groups, 2));
    rig.target
        .subsystem(&nqn(ANA))
        .unwrap()
        .remove_namespace(2)
        .unwrap();
    let (last, now) = rig.ana(admin);
    assert!(last > after);
    assert_eq!(now.len(), 1, "a group without namespaces is not listed");
}

/// A namespace that moves to another group takes that group's state on each listener. Its hosts get
/// events for both, and the counts of both groups rise.
#[test]
fn a_namespace_moves() {
    let mut rig = two_paths(2);
    let (admin, io) = rig.path(1);
    let (_, other_io) = rig.path(2);
    rig.set("test", Some(2), AnaState::Inaccessible);
    let (_, before) = rig.ana(admin);
    for _ in 0..2 {
        let cid = rig.cid();
        rig.send(admin, async_event_request(cid), None);
    }
    rig.turn();
    rig.answers();
    let subsystem = rig.target.subsystem(&nqn(ANA)).unwrap();
    assert_eq!(subsystem.set_ana_group(1, 2).unwrap(), 1);
    rig.turn();
    let mut told: Vec<u32> = rig.answers().iter().map(|cqe| cqe.dword0()).collect();
    told.sort_unstable();
    let mut wanted = [CHANGED, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dword0()];
    wanted.sort_unstable();
    assert_eq!(told, wanted);
    assert_eq!(
        rig.command(io, opcode::READ, 1),
        StatusCode::ANA_INACCESSIBLE
    );
    assert_eq!(rig.command(other_io, opcode::READ, 1), StatusCode::SUCCESS);
    let (_, now) = rig.ana(admin);
    assert_eq!(now.len(), 1, "group 1 is empty now");
    assert_eq!((now[0].0, now[0].1), (2, AnaState::Inaccessible));
    assert!(now[0].2 > before[1].2);
    assert_eq!(rig.identify_namespace(admin, 1).anagrpid.get(), 2);

    assert_eq!(subsystem.set_ana_group(1, 1).unwrap(), 2);
    assert_eq!(rig.command(io, opcode::READ, 1), StatusCode::SUCCESS);
    assert_eq!(subsystem.set_ana_group(1, 1).unwrap(), 1, "no change");
    for (nsid, group) in [(9, 1), (1, 0), (1, u32::MAX)] {
        assert!(subsystem.set_ana_group(nsid, group).is_err());
    }
}

/// A namespace that comes later, and a listener that comes later, have their state from the start.
#[test]
fn nothing_is_optimized_for_a_moment() {
    let mut rig = two_paths(0);
    let mut states = AnaStates::new(AnaState::Inaccessible);
    states.set(Some(2), AnaState::NonOptimized);
    let options = ListenOptions {
        ana: states,
        ..ListenOptions::default()
    };
    rig.target
        .add_listener_with(&nqn(ANA), TransportType::Loopback, &at("third"), options)
        .unwrap();
    let (admin, io) = rig.path(3);
    let bdev = ram();
    for group in [2, 5] {
        let bdev = if group == 2 { bdev.clone() } else { ram() };
        let config = NamespaceConfig {
            nsid: None,
            bdev_name: bdev.name().to_string(),
            ids: NamespaceIds::from_uuid(bdev.uuid()),
            backing: backing(bdev),
            ana_group: Some(group),
            auto_visible: true,
            reservations: Default::default(),
        };
        rig.target.add_namespace(&nqn(ANA), config).unwrap();
    }
    assert_eq!(
        rig.states(admin),
        [AnaState::NonOptimized, AnaState::Inaccessible]
    );
    assert_eq!(rig.command(io, opcode::READ, 1), StatusCode::SUCCESS);
    assert_eq!(
        rig.command(io, opcode::READ, 2),
        StatusCode::ANA_INACCESSIBLE
    );
}

/// Invalid values are refused with the reason.
#[test]
fn refusals() {
    let rig = two_paths(1);
    let set = |subnqn: &str, name: &str, group, state| {
        rig.target.set_ana_state(
            &nqn(subnqn),
            TransportType::Loopback,
            &at(name),
            group,
            state,
        )
    };
    let refused = |outcome| match outcome {
        Err(TargetError::Subsystem(error)) => error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(
        refused(set(ANA, "nowhere", ALL, AnaState::Optimized)),
        SubsystemError::NoListener { .. }
    ));
    for group in [0, 33] {
        assert_eq!(
            refused(set(ANA, "test", Some(group), AnaState::Optimized)),
            SubsystemError::AnaGroupOutOfRange { group, max: 32 }
        );
    }
    assert!(matches!(
        refused(set(SUBNQN, "test", ALL, AnaState::Inaccessible)),
        SubsystemError::NoAnaReporting { .. }
    ));
    assert!(!set(SUBNQN, "test", ALL, AnaState::Optimized).unwrap());
    let options = ListenOptions {
        ana: AnaStates::new(AnaState::NonOptimized),
        ..ListenOptions::default()
    };
    let outcome =
        rig.target
            .add_listener_with(&nqn(SUBNQN), TransportType::Loopback, &at("other"), options);
    assert!(matches!(
        refused(outcome.map(|_| true)),
        SubsystemError::NoAnaReporting { .. }
    ));
}

/// A subsystem that is withheld from a listener is not shown there. A host that connects
/// nevertheless is refused permanently and counted. The status does not say that the host is
/// forbidden: its name is not the cause.
#[test]
fn a_withheld_listener_refuses_every_host() {
    let mut rig = two_paths(1);
    let options = ListenOptions {
        withheld: Some(Withheld::TcpFallback),
        ..ListenOptions::default()
    };
    rig.target
        .add_listener_with(&nqn(ANA), TransportType::Loopback, &at("third"), options)
        .unwrap();
    rig.listener = ListenerId(3);
    let (_, cqe) = rig.connect_as(HOSTNQN, ANA, 0, 0xffff, 32);
    assert_eq!(
        cqe.status(),
        StatusCode::CONNECT_INVALID_PARAMETERS.with_dnr()
    );
    assert_eq!(cqe.dword0(), InvalidParameter::SUBNQN.dword0());
    assert_eq!(rig.target.withheld_connects(), 1);
    let log = rig.target.discovery_snapshot(&nqn(HOSTNQN));
    let asker = crate::subsystems::discovery::Asker {
        transport: TransportType::Loopback,
        listener: ListenerId(1),
        local: &at("test"),
        secure: false,
    };
    let records = crate::subsystems::discovery::records(&log, &asker);
    let shown: Vec<&str> = records.iter().map(|r| r.record.traddr.as_str()).collect();
    assert!(
        shown.contains(&"second") && !shown.contains(&"third"),
        "{shown:?}"
    );
}

/// Withholding disconnects the hosts of that listener alone, and admits them again without the
/// listener having been away.
#[test]
fn a_listener_is_withheld_and_given_back() {
    let mut rig = two_paths(1);
    let (first, _) = rig.path(1);
    let (second, _) = rig.path(2);
    let withhold = |rig: &Rig, why| {
        let target = &rig.target;
        target.withhold(&nqn(ANA), TransportType::Loopback, &at("second"), why)
    };
    withhold(&rig, Some(Withheld::TransportPolicy)).unwrap();
    for _ in 0..4 {
        rig.turn();
    }
    let closed: Vec<ConnId> = rig.wire.borrow().closes.iter().map(|c| c.0).collect();
    assert!(
        closed.contains(&second) && !closed.contains(&first),
        "{closed:?}"
    );
    rig.listener = ListenerId(2);
    let (_, cqe) = rig.connect_as(HOSTNQN, ANA, 0, 0xffff, 32);
    assert_eq!(cqe.status().code(), StatusCode::CONNECT_INVALID_PARAMETERS);
    withhold(&rig, None).unwrap();
    rig.path(2);
    let missing = rig
        .target
        .withhold(&nqn(ANA), TransportType::Loopback, &at("third"), None);
    assert!(matches!(
        missing,
        Err(TargetError::Subsystem(SubsystemError::NoListener { .. }))
    ));
}
