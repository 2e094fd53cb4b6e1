//! Tests of controller identifiers in subsystems with the static and with the dynamic controller
//! model.

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::admin::{GetLogPage, Identify};
use nacre_nvmf_wire::fabrics::{DISCOVERY_NQN, InvalidParameter};
use nacre_nvmf_wire::identify::controller::FCATT_STATIC;
use nacre_nvmf_wire::identify::{ControllerList, cns};
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, parse_page};
use nacre_nvmf_wire::log::lid;
use zerocopy::FromBytes;

use super::connect::refused_for;
use super::rig::*;
use crate::subsystems::{ControllerModel, Refusal, SubsystemConfig, Teardown};
use crate::transport::{Address, ConnId, ListenerId, TransportType};

const STATIC: &str = "nqn.2025-01.io.nacre:static";
const OTHER: &str = "nqn.2025-01.io.nacre:other";
const ANY: u16 = 0xfffe;
const DYNAMIC: u16 = 0xffff;
const BUSY: StatusCode = StatusCode::CONNECT_CONTROLLER_BUSY;

/// A rig that has a subsystem with the controllers `min` to `max` beside its dynamic one.
fn rig(min: u16, max: u16) -> Rig {
    let rig = Rig::with_malloc();
    let mut config = SubsystemConfig::new(nqn(STATIC));
    config.allow_any_host = true;
    config.controller_model = ControllerModel::Static;
    (config.min_cntlid, config.max_cntlid) = (min, max);
    rig.target.create_subsystem(config).unwrap();
    let address = Address::Loopback("test".into());
    let listen = rig
        .target
        .add_listener(&nqn(STATIC), TransportType::Loopback, &address);
    listen.unwrap();
    rig
}

impl Rig {
    /// The controller that a host gets for its request, or the status.
    fn ask_for(&mut self, host: &str, asked: u16) -> Result<(ConnId, u16), StatusCode> {
        let (conn, cqe) = self.connect_as(host, STATIC, 0, asked, 32);
        match cqe.status() {
            status if status.is_success() => Ok((conn, cqe.dword0() as u16)),
            status => Err(status),
        }
    }

    fn cntlid(&mut self, host: &str, asked: u16) -> Result<u16, StatusCode> {
        self.ask_for(host, asked).map(|(_, cntlid)| cntlid)
    }

    fn leave(&mut self, conn: ConnId) {
        self.hang_up(conn);
        self.turn();
    }
}

/// Goal: each model refuses permanently the ids of the other one, and ids that no subsystem has,
/// and names the controller id as the cause.
#[test]
fn ids_of_the_other_model_are_refused() {
    let mut rig = rig(3, 6);
    let reserved = [0xfff0, 0xfff1, 0xfffc, 0xfffd];
    let both = [0, 2, 7, 0x7fff, 0xffef].into_iter().chain(reserved);
    for asked in both.clone().chain([DYNAMIC]) {
        let (_, cqe) = rig.connect_as(HOSTNQN, STATIC, 0, asked, 32);
        refused_for(&cqe, InvalidParameter::CNTLID);
    }
    // The discovery subsystem is dynamic, whatever is beside it.
    for subnqn in [SUBNQN, DISCOVERY_NQN] {
        for asked in both.clone().chain([1, 3, ANY]) {
            let (_, cqe) = rig.connect_as(HOSTNQN, subnqn, 0, asked, 32);
            refused_for(&cqe, InvalidParameter::CNTLID);
        }
        let (conn, cqe) = rig.connect_as(HOSTNQN, subnqn, 0, DYNAMIC, 32);
        assert!(cqe.status().is_success(), "{subnqn}: {}", cqe.status());
        rig.leave(conn);
    }
    rig.assert_clean();
}

/// Goal: a requested id goes to one host at a time, whichever that is; a host that comes too early
/// may retry.
#[test]
fn a_controller_has_one_association() {
    let mut rig = rig(3, 6);
    let (first, cntlid) = rig.ask_for(HOSTNQN, 5).unwrap();
    assert_eq!(cntlid, 5);
    assert_eq!(rig.cntlid(HOSTNQN, 5), Err(BUSY), "its own host");
    rig.hostid = [2; 16];
    assert_eq!(rig.cntlid(OTHER, 5), Err(BUSY), "another host");
    assert_eq!(rig.cntlid(OTHER, 3), Ok(3));
    let mut rest = [rig.cntlid(OTHER, ANY), rig.cntlid(HOSTNQN, ANY)].map(|id| id.unwrap());
    rest.sort_unstable();
    assert_eq!(rest, [4, 6]);
    assert_eq!(rig.cntlid(HOSTNQN, ANY), Err(BUSY), "all are taken");
    rig.leave(first);
    assert_eq!(rig.cntlid(OTHER, ANY), Ok(5), "the one that is free");
}

/// Goal: a host that takes any controller gets the same one again, after it has left and after a
/// restart of the target, in any order of the hosts; hosts get different controllers while there is
/// room.
#[test]
fn a_host_finds_its_controllers_again() {
    let hosts: Vec<String> = (0..8)
        .map(|n| format!("nqn.2025-01.io.nacre:host{n}"))
        .collect();
    let meet = |order: &mut dyn Iterator<Item = usize>| {
        let mut rig = rig(1, 60_000);
        let mut got = vec![(0, 0); hosts.len()];
        for n in order {
            rig.hostid = [n as u8 + 1; 16];
            let (conn, one) = rig.ask_for(&hosts[n], ANY).unwrap();
            let two = rig.cntlid(&hosts[n], ANY).unwrap();
            rig.leave(conn);
            assert_eq!(rig.cntlid(&hosts[n], ANY), Ok(one), "when it comes again");
            got[n] = (one, two);
        }
        got
    };
    let forth = meet(&mut (0..hosts.len()));
    assert_eq!(meet(&mut (0..hosts.len()).rev()), forth);
    let mut all: Vec<u16> = forth.iter().flat_map(|(a, b)| [*a, *b]).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 2 * hosts.len());
}

/// Goal: while a controller is being torn down its next host waits, as it does for one of its own.
#[test]
fn a_controller_that_is_going_is_waited_for() {
    let rig = rig(3, 3);
    let subsystem = rig.target.subsystem(&nqn(STATIC)).unwrap();
    let admit = |asked, host, id| {
        let listener = ListenerId(1);
        subsystem.admit(
            asked,
            &nqn(host),
            [id; 16],
            listener,
            TransportType::Loopback,
        )
    };
    let one = admit(3, HOSTNQN, 1).unwrap();
    assert_eq!(admit(3, OTHER, 2).err(), Some(Refusal::ControllerTaken));
    assert_eq!(admit(ANY, OTHER, 2).err(), Some(Refusal::NoFreeController));
    one.tear_down(Teardown::HostLeft);
    assert_eq!(admit(3, OTHER, 2).err(), Some(Refusal::Busy));
    assert_eq!(admit(ANY, OTHER, 2).err(), Some(Refusal::Busy));
    subsystem.forget(&one);
    assert_eq!(admit(3, OTHER, 2).map(|a| a.cntlid), Ok(3));
}

/// Goal: I/O queues are of a controller that has an association, whatever ids there could be.
#[test]
fn io_queues_of_static_controllers() {
    let mut rig = rig(3, 6);
    let (admin, _) = rig.ask_for(HOSTNQN, 4).unwrap();
    rig.enable(admin);
    for asked in [3, 5, 9, ANY, DYNAMIC] {
        let (_, cqe) = rig.connect_as(HOSTNQN, STATIC, 1, asked, 16);
        refused_for(&cqe, InvalidParameter::CNTLID);
    }
    let (_, cqe) = rig.connect_as(HOSTNQN, STATIC, 1, 4, 16);
    assert!(cqe.status().is_success(), "{}", cqe.status());
    assert_eq!(cqe.dword0(), 4);
}

/// Goal: hosts see the model in Identify Controller, in the list of controllers and in the
/// discovery log.
#[test]
fn hosts_see_the_model() {
    let mut rig = rig(3, 6);
    let (admin, _) = rig.ask_for(HOSTNQN, 4).unwrap();
    rig.enable(admin);
    let identify = rig.identify_controller(admin);
    assert_eq!((identify.cntlid.get(), identify.fcatt), (4, FCATT_STATIC));
    let list = |rig: &mut Rig, conn, from| {
        let what = Identify {
            cntid: from,
            ..Identify::new(cns::CONTROLLERS)
        };
        let bytes = rig.identify_bytes(conn, what, 0).unwrap();
        let list = ControllerList::read_from_bytes(&bytes).unwrap();
        list.iter().collect::<Vec<_>>()
    };
    assert_eq!(list(&mut rig, admin, 0), [3, 4, 5, 6]);
    assert_eq!(list(&mut rig, admin, 5), [5, 6]);
    let (dynamic, cntlid) = rig.admin();
    assert_eq!(rig.identify_controller(dynamic).fcatt, 0);
    assert_eq!(list(&mut rig, dynamic, 0), [cntlid]);

    let discovery = rig.discovery(HOSTNQN);
    let page = GetLogPage::new(lid::DISCOVERY, 4096, 0);
    let page = rig.log_page(discovery, page).unwrap();
    let (_, entries) = parse_page(&page).unwrap();
    let parsed = entries.iter().map(|e| e.parse().unwrap());
    let told: Vec<(String, u16)> = parsed
        .map(|r: DiscoveryRecord| (r.subnqn.to_string(), r.cntlid))
        .collect();
    let expected = [(DISCOVERY_NQN, DYNAMIC), (STATIC, ANY), (SUBNQN, DYNAMIC)];
    assert_eq!(told, expected.map(|(nqn, id)| (nqn.to_owned(), id)));
}
