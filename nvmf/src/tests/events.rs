//! Tests of asynchronous events: at most one outstanding per type, none lost, none that the host
//! did not enable.

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin::{Abort, GetLogPage, async_event_request};
use nacre_nvmf_wire::fabrics::{PropertyGet, PropertySize};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::log::{changed_namespaces, lid};
use nacre_nvmf_wire::registers::{Cc, offset};
use nacre_nvmf_wire::{Cqe, StatusCode};

use super::host::INVALID;
use super::rig::*;
use crate::subsystems::{Referral, SubsystemConfig};
use crate::transport::{Address, ConnId, TransportType};

const NAMESPACES: u32 = AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dword0();
const DISCOVERY: u32 = AsyncEvent::DISCOVERY_LOG_CHANGE.dword0();

impl Rig {
    /// Leaves an event request with the controller.
    fn ask(&mut self, conn: ConnId) -> u16 {
        let cid = self.cid();
        self.send(conn, async_event_request(cid), None);
        self.turn();
        cid
    }

    /// The answers to event requests that have come since.
    fn new_events(&mut self) -> Vec<(u16, u32)> {
        self.turn();
        let answers = self.answers();
        assert!(answers.iter().all(|cqe| cqe.status().is_success()));
        answers
            .iter()
            .map(|cqe: &Cqe| (cqe.cid(), cqe.dword0()))
            .collect()
    }

    fn changed(&mut self, conn: ConnId, retain_event: bool) -> Vec<u32> {
        let page = GetLogPage {
            retain_event,
            ..GetLogPage::new(lid::CHANGED_NAMESPACE_LIST, 4096, 0)
        };
        let page = self.log_page(conn, page).unwrap();
        let entries = page.chunks_exact(4);
        entries
            .map(|entry| u32::from_le_bytes(entry.try_into().unwrap()))
            .take_while(|nsid| *nsid != 0)
            .collect()
    }
}

#[test]
fn one_outstanding_until_the_log_is_read() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let first = rig.ask(conn);
    let second = rig.ask(conn);
    assert_eq!(rig.new_events(), []);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [(first, NAMESPACES)]);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [], "masked until the host looks");
    assert_eq!(rig.changed(conn, true), [2, 3]);
    assert_eq!(rig.new_events(), [], "a retained event is not cleared");
    assert_eq!(rig.changed(conn, false), [2, 3]);
    assert_eq!(
        rig.new_events(),
        [],
        "what happened meanwhile was in what was read"
    );
    assert_eq!(rig.changed(conn, false), [] as [u32; 0]);
    rig.target
        .subsystem(&nqn(SUBNQN))
        .unwrap()
        .remove_namespace(2)
        .unwrap();
    assert_eq!(rig.new_events(), [(second, NAMESPACES)]);
    assert_eq!(rig.changed(conn, false), [2]);
}

#[test]
fn events_before_the_request_are_reported() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    rig.target
        .bdev_resized(&rig.target.subsystem(&nqn(SUBNQN)).unwrap().namespaces()[0].bdev_name);
    rig.turn();
    let cid = rig.ask(conn);
    assert_eq!(rig.new_events(), [(cid, NAMESPACES)]);
    assert_eq!(rig.changed(conn, false), [1]);
}

/// Goal: a host that reuses the identifier of an event request has given that request up. Its
/// command is run, the event goes to the next request, and there is room for another one. (SPDK's
/// host leaves so.) Two event requests with one identifier are a conflict nevertheless.
#[test]
fn an_identifier_that_comes_again_gives_a_request_up() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let held = rig.identify_controller(conn).aerl + 1;
    let cids: Vec<u16> = (0..held).map(|_| rig.ask(conn)).collect();
    rig.send(conn, async_event_request(cids[0]), None);
    rig.turn();
    assert_eq!(rig.answer().cqe.status(), StatusCode::COMMAND_ID_CONFLICT);
    let get = PropertyGet {
        size: PropertySize::Four,
        offset: offset::CC,
    };
    rig.send(conn, get.to_sqe(cids[0]), None);
    rig.turn();
    let got = rig.answer().cqe;
    assert_eq!((got.cid(), got.status()), (cids[0], StatusCode::SUCCESS));
    assert_eq!(got.dword0(), Cc::enabled().0);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [(cids[1], NAMESPACES)]);
    let others = [rig.ask(conn), rig.ask(conn)];
    assert_eq!(rig.new_events(), [], "there is room for both: {others:?}");
    rig.hang_up(conn);
    rig.assert_clean();
}

#[test]
fn requests_have_a_limit_and_can_be_aborted() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let held = rig.identify_controller(conn).aerl + 1;
    let cids: Vec<u16> = (0..held).map(|_| rig.ask(conn)).collect();
    let cid = rig.cid();
    assert_eq!(
        rig.status(conn, async_event_request(cid), &[]),
        StatusCode::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED.with_dnr()
    );
    let abort = Abort {
        sqid: 0,
        cid: cids[1],
    }
    .to_sqe(400);
    rig.send(conn, abort, None);
    rig.turn();
    let answers = rig.answers();
    let of = |cid| answers.iter().find(|cqe| cqe.cid() == cid).unwrap();
    assert_eq!(of(400).dword0() & 1, 0, "aborted");
    assert_eq!(of(cids[1]).status(), StatusCode::ABORT_REQUESTED);
    // There is room for one again, and an abort of a missing request aborts nothing.
    rig.ask(conn);
    assert!(rig.answers().is_empty());
    let cqe = rig
        .call(
            conn,
            Abort {
                sqid: 0,
                cid: cids[1],
            }
            .to_sqe(401),
            &[],
        )
        .cqe;
    assert_eq!((cqe.status(), cqe.dword0()), (StatusCode::SUCCESS, 1));
    let cqe = rig
        .call(conn, Abort { sqid: 9, cid: 1 }.to_sqe(402), &[])
        .cqe;
    assert_eq!((cqe.status(), cqe.dword0()), (StatusCode::SUCCESS, 1));
}

#[test]
fn only_configured_events_are_reported() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 0)
        .unwrap();
    let cid = rig.ask(conn);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), []);
    rig.set_feature_events(conn, 1 << 8);
    assert_eq!(rig.new_events(), [(cid, NAMESPACES)]);
}

impl Rig {
    /// Sets the feature, whose answer may come together with an event.
    fn set_feature_events(&mut self, conn: ConnId, dword: u32) {
        let cid = self.cid();
        let set = nacre_nvmf_wire::commands::admin::SetFeatures::new(
            fid::ASYNC_EVENT_CONFIGURATION,
            dword,
        );
        self.send(conn, set.to_sqe(cid, 0), None);
        self.turn();
        let mut wire = self.wire.borrow_mut();
        let at = wire.responses.iter().position(|(_, r)| r.cqe.cid() == cid);
        let (_, response) = wire.responses.remove(at.expect("an answer")).unwrap();
        assert!(response.cqe.status().is_success());
    }
}

/// Goal: a namespace that a host cannot see does not exist for it, not even in events.
#[test]
fn invisible_namespaces_send_no_events() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    rig.ask(conn);
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let bdev = ram();
    let config = crate::subsystems::NamespaceConfig {
        nsid: Some(7),
        bdev_name: bdev.name().to_string(),
        ids: crate::subsystems::NamespaceIds::from_uuid(bdev.uuid()),
        backing: backing(bdev),
        ana_group: None,
        auto_visible: false,
        reservations: Default::default(),
    };
    rig.target.add_namespace(&nqn(SUBNQN), config).unwrap();
    assert_eq!(rig.new_events(), []);
    assert_eq!(rig.changed(conn, false), [] as [u32; 0]);
    subsystem.add_namespace_host(7, &nqn(HOSTNQN)).unwrap();
    assert_eq!(rig.new_events().len(), 1);
    assert_eq!(rig.changed(conn, false), [7]);
    subsystem.remove_namespace_host(7, &nqn(HOSTNQN)).unwrap();
    assert_eq!(rig.changed(conn, false), [7]);
}

/// Goal: a list too long for the page says just that, and is then empty.
#[test]
fn too_many_changes_to_list() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    let association = rig
        .target
        .subsystem(&nqn(SUBNQN))
        .unwrap()
        .controller(cntlid)
        .unwrap();
    for (count, expected) in [(1024, 1024), (1025, 1), (3000, 1)] {
        let changed: Vec<u32> = (1..=count).collect();
        association.set_view(association.view(), &changed);
        let list = rig.changed(conn, false);
        assert_eq!(list.len(), expected);
        if count > 1024 {
            assert_eq!(list, [changed_namespaces::TOO_MANY]);
        }
    }
    assert_eq!(rig.changed(conn, false), [] as [u32; 0]);
}

/// Goal: a read beyond the end of the list does not count as a read: neither the list nor the event
/// is gone.
#[test]
fn a_wrong_offset_reads_nothing() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let first = rig.ask(conn);
    rig.ask(conn);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [(first, NAMESPACES)]);
    let beyond = GetLogPage::new(lid::CHANGED_NAMESPACE_LIST, 4096, 4100);
    assert_eq!(rig.log_page(conn, beyond).unwrap_err(), INVALID);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [], "the host has not looked");
    assert_eq!(rig.changed(conn, false), [2, 3]);
}

/// Goal: a controller level reset completes held requests and clears the masks.
#[test]
fn reset_ends_held_requests() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let held = rig.ask(conn);
    rig.send(
        conn,
        {
            let set = nacre_nvmf_wire::fabrics::PropertySet {
                size: PropertySize::Four,
                offset: offset::CC,
                value: u64::from(Cc(0).0),
            };
            set.to_sqe(50)
        },
        None,
    );
    rig.turn();
    let answers = rig.answers();
    assert_eq!(answers.len(), 2);
    let ended = answers.iter().find(|cqe| cqe.cid() == held).unwrap();
    assert_eq!(ended.status(), StatusCode::ABORT_REQUESTED);
    rig.enable(conn);
    let cid = rig.ask(conn);
    rig.add_namespace(ram());
    assert_eq!(rig.new_events(), [(cid, NAMESPACES)]);
}

/// Goal: a host whose Connect announces that it stays gets events of the discovery log without a
/// request; a host that reads it and leaves does not.
#[test]
fn discovery_changes_from_the_start() {
    for (kato_ms, told) in [(15_000, 1), (0, 0)] {
        let mut rig = Rig::with_malloc();
        rig.kato_ms = kato_ms;
        let conn = rig.discovery(HOSTNQN);
        rig.ask(conn);
        rig.target.set_allow_any_host(&nqn(SUBNQN), true).unwrap();
        assert_eq!(rig.new_events().len(), told, "{kato_ms} ms");
    }
}

/// Goal: a discovery controller reports changes when the host wants that, for every way to change
/// the log.
#[test]
fn discovery_changes() {
    let mut rig = Rig::with_malloc();
    let conn = rig.discovery(HOSTNQN);
    rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 0)
        .unwrap();
    rig.ask(conn);
    let target = std::sync::Arc::clone(&rig.target);
    target.set_allow_any_host(&nqn(SUBNQN), true).unwrap();
    assert_eq!(rig.new_events(), [], "turned off");
    rig.log(conn, lid::DISCOVERY, 1024);
    rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 1 << 31)
        .unwrap();
    assert_eq!(rig.new_events(), []);

    let other = nqn("nqn.2025-01.io.nacre:other");
    let address = Address::Loopback("test".into());
    let referral = Referral {
        transport: TransportType::Loopback,
        address: Address::Loopback("elsewhere".into()),
        subnqn: nqn(nacre_nvmf_wire::fabrics::DISCOVERY_NQN),
        discovery: true,
        secure_channel: false,
    };
    let host = nqn(HOSTNQN);
    target
        .create_subsystem(SubsystemConfig::new(other.clone()))
        .unwrap();
    let changes: [&dyn Fn(); 7] = [
        &|| {
            drop(
                target
                    .add_listener(&other, TransportType::Loopback, &address)
                    .unwrap(),
            )
        },
        &|| target.add_host(&other, &host).unwrap(),
        &|| target.remove_host(&other, &host).unwrap(),
        &|| {
            target
                .remove_listener(&other, TransportType::Loopback, &address)
                .unwrap()
        },
        &|| target.add_referral(referral.clone()).unwrap(),
        &|| target.remove_referral(&referral).unwrap(),
        &|| drop(target.delete_subsystem(&other).unwrap()),
    ];
    for (index, change) in changes.iter().enumerate() {
        let before = target.discovery_generation();
        change();
        assert!(target.discovery_generation() > before, "change {index}");
        assert_eq!(
            rig.new_events().iter().map(|t| t.1).collect::<Vec<_>>(),
            [DISCOVERY],
            "change {index}"
        );
        rig.log(conn, lid::DISCOVERY, 1024);
        rig.ask(conn);
    }
}

/// Goal: a host that retains the event with every piece of a log that it reads in pieces, as older
/// libnvme does, still gets an event for the next change.
#[test]
fn reading_a_long_log_to_its_end_counts() {
    let mut rig = Rig::with_malloc();
    let conn = rig.discovery(HOSTNQN);
    rig.set_feature(conn, fid::ASYNC_EVENT_CONFIGURATION, 1 << 31)
        .unwrap();
    let target = std::sync::Arc::clone(&rig.target);
    for allow in [false, true] {
        rig.ask(conn);
        target.set_allow_any_host(&nqn(SUBNQN), allow).unwrap();
        assert_eq!(rig.new_events().len(), 1, "{allow}");
        for offset in [0, 1024] {
            let page = GetLogPage {
                retain_event: true,
                ..GetLogPage::new(lid::DISCOVERY, 1024 + 1024 * u32::from(offset > 0), offset)
            };
            rig.log_page(conn, page).unwrap();
        }
    }
}
