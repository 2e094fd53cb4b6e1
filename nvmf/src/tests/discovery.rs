//! Tests of the discovery log: the entries for each host, and their addresses.

use std::time::Duration;

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::fabrics::{DISCOVERY_NQN, InvalidParameter};
use nacre_nvmf_wire::identify::controller::cntrltype;
use nacre_nvmf_wire::log::discovery::{
    DiscoveryEntry, adrfam, eflags, parse_page, subtype, treq, trtype,
};
use nacre_nvmf_wire::log::lid;
use proptest::prelude::*;

use super::connect::refused_for;
use super::host::INVALID;
use super::rig::*;
use crate::subsystems::discovery::{Asker, Reachable, Record, Snapshot, records, write_page};
use crate::subsystems::{
    ListenOptions, Referral, SubsystemConfig, SubsystemListener, TargetConfig, TargetError,
};
use crate::transport::{
    Address, ConnId, ListenerId, ListenerOptions, RdmaProviderType, TlsPolicy, TransportType,
};

fn ip(text: &str) -> Address {
    Address::Ip(text.parse().unwrap())
}

fn listener(id: u64, address: &str) -> SubsystemListener {
    SubsystemListener {
        id: ListenerId(id),
        transport: TransportType::Tcp,
        address: ip(address),
        ana: Default::default(),
        withheld: None,
        options: Default::default(),
    }
}

/// One subsystem with these listeners.
fn snapshot(listeners: Vec<SubsystemListener>) -> Snapshot {
    Snapshot {
        generation: 5,
        subsystems: vec![Reachable {
            listeners,
            ..Reachable::new(nqn(SUBNQN))
        }],
        discovery: Vec::new(),
        discovery_nqn: nqn(DISCOVERY_NQN),
        referrals: Vec::new(),
        admin_entries: 128,
        same_transport: false,
        same_address: false,
        same_service: false,
    }
}

fn asked(snapshot: &Snapshot, id: u64, local: &str) -> Vec<Record> {
    asked_with(snapshot, id, local, false)
}

fn asked_with(snapshot: &Snapshot, id: u64, local: &str, secure: bool) -> Vec<Record> {
    let asker = Asker {
        transport: TransportType::Tcp,
        listener: ListenerId(id),
        local: &ip(local),
        secure,
    };
    records(snapshot, &asker)
}

fn listener_with(id: u64, tls: TlsPolicy) -> SubsystemListener {
    SubsystemListener {
        options: ListenerOptions {
            tls: Some(tls),
            ..ListenerOptions::default()
        },
        ..listener(id, &format!("192.0.2.1:{id}"))
    }
}

/// Subtype, address and port of each.
fn places(records: &[Record]) -> Vec<(u8, &str, &str)> {
    records
        .iter()
        .map(|r| {
            (
                r.record.subtype,
                r.record.traddr.as_str(),
                r.record.trsvcid.as_str(),
            )
        })
        .collect()
}

const UNIQUE: &str = "nqn.2014-08.org.nvmexpress:uuid:0b6a4f0e-93f4-4a3c-8d5e-2a1e0f3c7b58";

const CURRENT: u8 = subtype::CURRENT_DISCOVERY;

#[test]
fn an_entry_in_full() {
    let records = asked(
        &snapshot(vec![listener(3, "192.0.2.1:4420")]),
        3,
        "192.0.2.1:4420",
    );
    let own = &records[0].record;
    assert_eq!(own.subnqn, nqn(DISCOVERY_NQN));
    assert_eq!(own.eflags, eflags::EPCSD | eflags::DUPRETINFO);
    let record = &records[1].record;
    assert_eq!(
        (record.trtype, record.adrfam, record.subtype),
        (trtype::TCP, adrfam::IPV4, subtype::NVM)
    );
    assert_eq!(record.treq, treq::SQ_FLOW_CONTROL_DISABLE);
    assert_eq!(
        (record.portid, record.cntlid, record.asqsz),
        (3, 0xffff, 128)
    );
    assert_eq!(record.eflags, 0);
    assert_eq!(record.subnqn, nqn(SUBNQN));
    assert_eq!(
        (record.traddr.as_str(), record.trsvcid.as_str()),
        ("192.0.2.1", "4420")
    );
}

/// Goal: a host never hears of 0.0.0.0 or [::], but of the address that it can reach.
#[test]
fn wildcard_listeners() {
    let nvm = subtype::NVM;
    let any = |id, address| snapshot(vec![listener(id, address)]);
    for (log, asker, local, expected) in [
        (
            any(1, "0.0.0.0:4420"),
            1,
            "192.0.2.7:4420",
            Some(("192.0.2.7", "4420")),
        ),
        (
            any(1, "0.0.0.0:4420"),
            2,
            "192.0.2.7:8009",
            Some(("192.0.2.7", "4420")),
        ),
        (any(1, "0.0.0.0:4420"), 2, "[2001:db8::1]:8009", None),
        (
            any(1, "[::]:4420"),
            2,
            "[2001:db8::1]:8009",
            Some(("2001:db8::1", "4420")),
        ),
        // IPv4 through [::], as the kernel shows it.
        (
            any(1, "[::]:4420"),
            1,
            "[::ffff:192.0.2.7]:4420",
            Some(("192.0.2.7", "4420")),
        ),
        (
            any(1, "[::]:4420"),
            2,
            "192.0.2.7:8009",
            Some(("192.0.2.7", "4420")),
        ),
        (
            any(1, "[2001:db8::5]:4420"),
            2,
            "192.0.2.7:8009",
            Some(("2001:db8::5", "4420")),
        ),
    ] {
        let records = asked(&log, asker, local);
        let told: Vec<_> = places(&records)
            .into_iter()
            .filter(|p| p.0 == nvm)
            .collect();
        let expected: Vec<_> = expected.into_iter().map(|(a, p)| (nvm, a, p)).collect();
        assert_eq!(told, expected, "{log:?} asked at {local}");
    }
    let records = asked(&any(1, "[::]:4420"), 1, "[::ffff:192.0.2.7]:4420");
    assert!(records.iter().all(|r| r.record.adrfam == adrfam::IPV4));
}

/// Goal: a host is not sent where it cannot go. Method: listeners on loopback and link-local
/// addresses, asked for from this machine, from the link, and from elsewhere.
#[test]
fn listeners_out_of_a_hosts_reach_are_not_listed() {
    let log = snapshot(vec![
        listener(1, "127.0.0.1:1"),
        listener(2, "[::1]:2"),
        listener(3, "[::ffff:127.0.0.1]:3"),
        listener(4, "[fe80::1%2]:4"),
        listener(5, "[fe80::1%3]:5"),
        listener(6, "192.0.2.1:6"),
    ]);
    for (local, expected) in [
        ("127.0.0.1:8009", &["1", "2", "3", "6"][..]),
        ("[::1]:8009", &["1", "2", "3", "6"]),
        ("[::ffff:127.0.0.1]:8009", &["1", "2", "3", "6"]),
        ("192.0.2.1:8009", &["6"]),
        ("[2001:db8::1]:8009", &["6"]),
        ("[fe80::9%2]:8009", &["4", "6"]),
        ("[fe80::1%3]:8009", &["5", "6"]),
    ] {
        let records = asked(&log, 9, local);
        let nvm = records.iter().filter(|r| r.record.subtype == subtype::NVM);
        let ports: Vec<_> = nvm.map(|r| r.record.trsvcid.as_str()).collect();
        assert_eq!(ports, expected, "asked at {local}");
        let scoped = records.iter().find(|r| r.record.traddr.contains('%'));
        assert_eq!(
            scoped, None,
            "an interface of this machine means nothing to a host"
        );
    }
}

/// Goal: one place is one entry. Method: a listener on every address beside one on the address that
/// the host reached.
#[test]
fn a_place_is_listed_once() {
    let log = snapshot(vec![
        listener(1, "[::]:4420"),
        listener(2, "0.0.0.0:4420"),
        listener(3, "192.0.2.7:4420"),
    ]);
    let nvm = [(subtype::NVM, "192.0.2.7", "4420")];
    assert_eq!(places(&asked(&log, 9, "192.0.2.7:8009"))[1..], nvm);
}

/// Goal: the discovery subsystem is reported once per listener of its own and for the host's
/// address, and hosts are not sent around between places with the same contents.
#[test]
fn the_discovery_subsystem_itself() {
    let mut log = snapshot(vec![]);
    log.discovery = vec![listener(1, "192.0.2.1:8009"), listener(2, "192.0.2.2:8009")];
    let records = asked(&log, 1, "192.0.2.1:8009");
    let both = [
        (CURRENT, "192.0.2.1", "8009"),
        (CURRENT, "192.0.2.2", "8009"),
    ];
    assert_eq!(places(&records), both);
    assert!(
        records
            .iter()
            .all(|r| r.record.eflags & eflags::DUPRETINFO != 0)
    );
    let at_io_port = asked(&log, 9, "192.0.2.1:4420");
    assert_eq!(places(&at_io_port)[0], (CURRENT, "192.0.2.1", "4420"));
    assert_eq!(at_io_port.len(), 3);
    // With a filter each address has something else to say.
    log.same_transport = true;
    let flags: Vec<u16> = asked(&log, 1, "192.0.2.1:8009")
        .iter()
        .map(|r| r.record.eflags & eflags::DUPRETINFO)
        .collect();
    assert_eq!(flags, [eflags::DUPRETINFO, 0]);
}

/// A listener over RDMA is reported with the attributes of its fabric.
#[test]
fn an_rdma_listener_is_reported_with_its_fabric() {
    for (fabric, prtype) in [
        (RdmaProviderType::InfiniBand, 2),
        (RdmaProviderType::RoceV1, 3),
        (RdmaProviderType::RoceV2, 4),
        (RdmaProviderType::Iwarp, 5),
    ] {
        let rdma = SubsystemListener {
            transport: TransportType::Rdma,
            options: ListenerOptions {
                fabric: Some(fabric),
                ..ListenerOptions::default()
            },
            ..listener(2, "[2001:db8::2]:4420")
        };
        let records = asked(&snapshot(vec![rdma]), 1, "192.0.2.1:4420");
        let of_rdma = |r: &Record| r.record.trtype == trtype::RDMA;
        let records: Vec<Record> = records.into_iter().filter(of_rdma).collect();
        let record = &records[0].record;
        assert_eq!(record.adrfam, adrfam::IPV6);
        assert_eq!(record.treq & treq::SECURE_CHANNEL_REQUIRED, 0);
        let mut page = vec![0; 2048];
        write_page(1, &records, 0, &mut page).unwrap();
        // TSAS begins at byte 768 of an entry: QPTYPE 1 (connected), PRTYPE, CMS 1 (RDMA CM).
        assert_eq!(page[1024 + 768..][..3], [1, prtype, 1], "{fabric:?}");
    }
}

/// Goal: a host finds the listeners that serve it, and reads there that it must use TLS if it has
/// a PSK.
#[test]
fn tls_of_the_asking_host() {
    let mut log = snapshot(vec![
        listener_with(1, TlsPolicy::Off),
        listener_with(2, TlsPolicy::Allow),
        listener_with(3, TlsPolicy::Require),
    ]);
    for (has_psk, must_concat, ports, required) in [
        (false, false, &["1", "2"][..], 0),
        (true, false, &["2", "3"], 1),
        // It begins in clear, and then uses TLS.
        (false, true, &["2"], 2),
    ] {
        log.subsystems[0].has_psk = has_psk;
        log.subsystems[0].must_concat = must_concat;
        let records = asked(&log, 9, "192.0.2.1:9");
        let nvm = || records.iter().filter(|r| r.record.subtype == subtype::NVM);
        let found: Vec<&str> = nvm().map(|r| r.record.trsvcid.as_str()).collect();
        assert_eq!(found, ports);
        assert!(nvm().all(|r| r.secure_channel == (has_psk || must_concat)));
        assert!(nvm().all(|r| r.record.treq & 3 == required));
        // This connection is in clear.
        assert!(!records[0].secure_channel);
    }
}

/// Goal: a host that asks over TLS is sent to discovery over TLS only, and a host without a PSK
/// only where it gets in.
#[test]
fn tls_of_the_discovery_subsystem() {
    let mut log = snapshot(vec![]);
    log.discovery = vec![
        listener_with(1, TlsPolicy::Off),
        listener_with(2, TlsPolicy::Allow),
        listener_with(3, TlsPolicy::Require),
    ];
    for (has_psk, secure, expected) in [
        (
            false,
            false,
            &[("9", false), ("1", false), ("2", false)][..],
        ),
        (
            true,
            false,
            &[("9", false), ("1", false), ("2", false), ("3", true)],
        ),
        (true, true, &[("9", true), ("2", true), ("3", true)]),
    ] {
        log.subsystems[0].has_psk = has_psk;
        let records = asked_with(&log, 9, "192.0.2.1:9", secure);
        let own = records.iter().filter(|r| r.record.subtype == CURRENT);
        let found: Vec<(&str, bool)> = own
            .map(|r| (r.record.trsvcid.as_str(), r.secure_channel))
            .collect();
        assert_eq!(found, expected, "psk {has_psk}, TLS {secure}");
    }
}

/// Goal: the discovery service's own port takes TLS while a listener beside it does. Method:
/// listeners at one address come and go.
#[test]
fn tls_of_the_discovery_port() {
    use TlsPolicy::{Allow, Off, Require};
    let rig = Rig::new(TargetConfig {
        discovery_port: Some(8009),
        ..TargetConfig::default()
    });
    let kind = TransportType::Loopback;
    let port = |rig: &Rig| {
        let listeners = rig.target.discovery().listeners();
        let mut of_port = listeners
            .iter()
            .filter(|l| l.address == ip("192.0.2.1:8009"));
        let policy = of_port.next().map(|l| l.options.tls());
        assert!(of_port.next().is_none());
        policy
    };
    let add = |rig: &Rig, listener: SubsystemListener| {
        let options = ListenOptions {
            listener: listener.options,
            ..ListenOptions::default()
        };
        let added = rig
            .target
            .add_listener_with(&nqn(SUBNQN), kind, &listener.address, options);
        added.unwrap();
        port(rig)
    };
    let remove = |rig: &Rig, address: &str| {
        let removed = rig.target.remove_listener(&nqn(SUBNQN), kind, &ip(address));
        removed.unwrap();
        port(rig)
    };
    assert_eq!(add(&rig, listener_with(1, Require)), Some(Allow));
    assert_eq!(add(&rig, listener_with(2, Require)), Some(Allow));
    assert_eq!(add(&rig, listener_with(3, Off)), Some(Allow));
    assert_eq!(remove(&rig, "192.0.2.1:1"), Some(Allow));
    assert_eq!(remove(&rig, "192.0.2.1:2"), Some(Off));
    assert_eq!(add(&rig, listener_with(4, Allow)), Some(Allow));
    assert_eq!(remove(&rig, "192.0.2.1:3"), Some(Allow));
    assert_eq!(remove(&rig, "192.0.2.1:4"), None);
    // A listener of the administrator stays as it is.
    let (own, address) = (nqn(DISCOVERY_NQN), ip("192.0.2.1:8009"));
    rig.target.add_listener(&own, kind, &address).unwrap();
    assert_eq!(add(&rig, listener_with(5, Require)), Some(Off));
    assert_eq!(remove(&rig, "192.0.2.1:5"), Some(Off));
    // Also where it follows one that was opened automatically.
    rig.target.remove_listener(&own, kind, &address).unwrap();
    assert_eq!(add(&rig, listener_with(6, Off)), Some(Off));
    rig.target.remove_listener(&own, kind, &address).unwrap();
    let options = ListenOptions {
        listener: listener_with(7, Require).options,
        ..ListenOptions::default()
    };
    let added = rig.target.add_listener_with(&own, kind, &address, options);
    added.unwrap();
    assert_eq!(add(&rig, listener_with(8, Allow)), Some(Require));
    assert_eq!(remove(&rig, "192.0.2.1:6"), Some(Require));
    rig.target.remove_listener(&own, kind, &address).unwrap();
    // A subsystem served at the port itself shares the listener, and decides its policy.
    assert_eq!(add(&rig, listener_with(8009, Require)), Some(Require));
    assert_eq!(remove(&rig, "192.0.2.1:8009"), Some(Allow));
}

#[test]
fn filters() {
    let rdma = SubsystemListener {
        transport: TransportType::Rdma,
        ..listener(2, "192.0.2.1:4420")
    };
    let other = listener(3, "192.0.2.9:4420");
    let mut log = snapshot(vec![listener(1, "192.0.2.1:4420"), rdma, other]);
    log.referrals = vec![Referral {
        transport: TransportType::Rdma,
        address: ip("192.0.2.44:8009"),
        subnqn: nqn(DISCOVERY_NQN),
        discovery: false,
        secure_channel: false,
    }];
    let count = |log: &Snapshot| asked(log, 1, "192.0.2.1:4420").len();
    assert_eq!(count(&log), 1 + 3 + 1);
    log.same_transport = true;
    assert_eq!(count(&log), 1 + 2);
    log.same_transport = false;
    log.same_address = true;
    assert_eq!(count(&log), 1 + 2 + 1, "referrals are elsewhere anyway");
    log.same_address = false;
    log.same_service = true;
    log.subsystems[0]
        .listeners
        .push(listener(4, "192.0.2.1:4421"));
    assert_eq!(count(&log), 1 + 3 + 1, "all but the one on another port");
}

#[test]
fn referrals() {
    let mut log = snapshot(vec![]);
    let referral = |subnqn: &str, discovery, secure_channel| Referral {
        transport: TransportType::Tcp,
        address: ip("[2001:db8::7]:8009"),
        subnqn: nqn(subnqn),
        discovery,
        secure_channel,
    };
    log.referrals = vec![
        referral(DISCOVERY_NQN, false, false),
        referral(SUBNQN, false, true),
        referral(UNIQUE, true, false),
    ];
    let records = asked(&log, 1, "192.0.2.1:8009");
    let [_, discovery, nvm, unique] = records.as_slice() else {
        panic!("four entries: {records:?}");
    };
    // A host would take another discovery subsystem for one with namespaces, and connect to it as
    // such.
    assert_eq!(unique.record.subtype, subtype::REFERRAL);
    assert_eq!(unique.record.subnqn, nqn(UNIQUE));
    assert_eq!(
        (discovery.record.subtype, discovery.record.adrfam),
        (subtype::REFERRAL, adrfam::IPV6)
    );
    assert_eq!(discovery.record.traddr, "2001:db8::7");
    assert_eq!(nvm.record.subtype, subtype::NVM);
    assert_eq!(nvm.record.treq, treq::SECURE_CHANNEL_REQUIRED);
    let mut page = vec![0; 5 * 1024];
    write_page(1, &records, 0, &mut page).unwrap();
    let (_, entries) = parse_page(&page).unwrap();
    assert_eq!((entries[1].tcp_sectype(), entries[2].tcp_sectype()), (0, 2));
}

/// A subsystem that does not fit an entry is left out; the rest of the log is correct.
#[test]
fn names_that_do_not_fit() {
    let loopback = |name: &str| SubsystemListener {
        id: ListenerId(8),
        transport: TransportType::Loopback,
        address: Address::Loopback(name.to_owned()),
        ana: Default::default(),
        withheld: None,
        options: Default::default(),
    };
    let log = snapshot(vec![
        loopback(&"x".repeat(257)),
        loopback("caf\u{e9}"),
        loopback("fine"),
    ]);
    let records = asked(&log, 1, "192.0.2.1:4420");
    assert_eq!(places(&records)[1..], [(subtype::NVM, "fine", "")]);
}

proptest! {
    /// Goal: a log read in pieces, wherever they begin and end, is the log read at once.
    #[test]
    fn pieces_make_the_page(
        listeners in 0usize..6,
        cuts in proptest::collection::vec(0u64..8000, 0..12),
    ) {
        let log = snapshot((0..listeners).map(|i| listener(i as u64, &format!("192.0.2.{i}:4420"))).collect());
        let records = asked(&log, 1, "192.0.2.1:4420");
        let length = 1024 * (records.len() + 1);
        let mut whole = vec![0xee; length];
        write_page(log.generation, &records, 0, &mut whole).unwrap();
        let (header, entries) = parse_page(&whole).unwrap();
        prop_assert_eq!((header.genctr.get(), entries.len()), (5, records.len()));
        for (entry, record) in entries.iter().zip(&records) {
            prop_assert_eq!(&entry.parse().unwrap(), &record.record);
        }
        let mut cuts: Vec<u64> = cuts.into_iter().map(|cut| cut.min(length as u64)).collect();
        cuts.extend([0, length as u64]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            let range = pair[0] as usize..pair[1] as usize;
            let mut piece = vec![0xee; range.len()];
            write_page(log.generation, &records, pair[0], &mut piece).unwrap();
            prop_assert_eq!(&piece[..], &whole[range]);
        }
        prop_assert!(write_page(1, &records, length as u64 + 1, &mut [0; 8]).is_err());
    }
}

// Through a discovery controller.

/// Header and entries, read at once.
fn log(rig: &mut Rig, conn: ConnId) -> (u64, Vec<DiscoveryEntry>) {
    let page = rig.log(conn, lid::DISCOVERY, 16 * 1024);
    let (header, entries) = parse_page(&page).unwrap();
    (header.genctr.get(), entries.to_vec())
}

fn names(entries: &[DiscoveryEntry]) -> Vec<Nqn> {
    let nvm = entries
        .iter()
        .map(|e| e.parse().unwrap())
        .filter(|r| r.subtype == subtype::NVM);
    nvm.map(|r| r.subnqn).collect()
}

#[test]
fn hosts_see_the_subsystems_that_admit_them() {
    let mut rig = Rig::with_malloc();
    let private = nqn("nqn.2025-01.io.nacre:private");
    let address = Address::Loopback("test".into());
    rig.target
        .create_subsystem(SubsystemConfig::new(private.clone()))
        .unwrap();
    rig.target
        .add_listener(&private, TransportType::Loopback, &address)
        .unwrap();
    let friend = "nqn.2025-01.io.nacre:friend";
    rig.target.add_host(&private, &nqn(friend)).unwrap();
    let (stranger, friend) = (rig.discovery(HOSTNQN), rig.discovery(friend));
    let (first, entries) = log(&mut rig, stranger);
    assert_eq!(names(&entries), [nqn(SUBNQN)]);
    let (_, entries) = log(&mut rig, friend);
    assert_eq!(names(&entries), [private.clone(), nqn(SUBNQN)]);
    rig.target.add_host(&private, &nqn(HOSTNQN)).unwrap();
    let (second, entries) = log(&mut rig, stranger);
    assert_eq!(entries.len(), 3);
    assert!(second > first);
    let (third, _) = log(&mut rig, stranger);
    assert_eq!(third, second, "stable while nothing changes");
}

/// Goal: a discovery subsystem with a unique name is reached by that and by the well-known one, and
/// reports the unique one either way: in Identify Controller, and in its own entries of the log
/// (Base 2.1: 3.1.3.3, 5.1.12.3.1). It still has no I/O queues.
#[test]
fn a_unique_name() {
    let mut rig = Rig::new(TargetConfig {
        discovery_nqn: Some(nqn(UNIQUE)),
        ..TargetConfig::default()
    });
    for name in [DISCOVERY_NQN, UNIQUE] {
        let (conn, cqe) = rig.connect_as(HOSTNQN, name, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{name}: {}", cqe.status());
        rig.enable(conn);
        let id = rig.identify_controller(conn);
        assert_eq!(Nqn::from_field(&id.subnqn), Ok(nqn(UNIQUE)));
        assert_eq!(id.cntrltype, cntrltype::DISCOVERY);
        let (_, entries) = log(&mut rig, conn);
        let own = entries[0].parse().unwrap();
        assert_eq!((own.subtype, own.subnqn), (CURRENT, nqn(UNIQUE)));
        assert_eq!(names(&entries), [nqn(SUBNQN)]);
        let (_, cqe) = rig.connect_as(HOSTNQN, name, 1, id.cntlid.get(), 16);
        refused_for(&cqe, InvalidParameter::QID);
    }
    // One subsystem, whatever it is called.
    assert_eq!(rig.target.discovery().controllers().len(), 2);
}

/// Goal: the unique name can be set, changed and removed. Connected hosts stay and are notified,
/// and the old name is invalid. It is never the name of two subsystems.
#[test]
fn the_unique_name_changes() {
    let mut rig = Rig::with_malloc();
    let conn = rig.discovery(HOSTNQN);
    let told = |rig: &mut Rig| {
        let id = rig.identify_controller(conn);
        let (genctr, entries) = log(rig, conn);
        assert_eq!(entries[0].subnqn, id.subnqn);
        (genctr, Nqn::from_field(&id.subnqn).unwrap())
    };
    let (mut before, name) = told(&mut rig);
    assert!(name.is_discovery());
    let other = nqn("nqn.2025-01.io.nacre:discovery");
    for (set, told_as) in [
        (Some(nqn(UNIQUE)), nqn(UNIQUE)),
        (Some(other.clone()), other.clone()),
        (Some(Nqn::discovery()), Nqn::discovery()),
        (Some(other.clone()), other.clone()),
        (None, Nqn::discovery()),
    ] {
        rig.target.set_discovery_nqn(set.clone()).unwrap();
        let (genctr, name) = told(&mut rig);
        assert_eq!(name, told_as);
        assert!(genctr > before, "a change of the log");
        rig.target.set_discovery_nqn(set).unwrap();
        assert_eq!(told(&mut rig), (genctr, name), "no change");
        before = genctr;
    }
    let (_, cqe) = rig.connect_as(HOSTNQN, UNIQUE, 0, 0xffff, 32);
    refused_for(&cqe, InvalidParameter::SUBNQN);

    let taken = rig.target.set_discovery_nqn(Some(nqn(SUBNQN)));
    assert!(matches!(taken, Err(TargetError::SubsystemExists { .. })));
    rig.target.set_discovery_nqn(Some(other.clone())).unwrap();
    let taken = rig.target.create_subsystem(SubsystemConfig::new(other));
    assert!(matches!(taken, Err(TargetError::DiscoveryName { .. })));
}

/// Goal: a host that reads header, entries and header again sees that something changed between.
#[test]
fn changes_between_pieces_show() {
    let mut rig = Rig::with_malloc();
    let conn = rig.discovery(HOSTNQN);
    let genctr = |rig: &mut Rig| {
        let page = GetLogPage {
            retain_event: true,
            ..GetLogPage::new(lid::DISCOVERY, 16, 0)
        };
        let page = rig.log_page(conn, page).unwrap();
        u64::from_le_bytes(page[..8].try_into().unwrap())
    };
    let before = genctr(&mut rig);
    let entry = rig
        .log_page(conn, GetLogPage::new(lid::DISCOVERY, 1024, 2048))
        .unwrap();
    assert_eq!(entry[256..256 + SUBNQN.len()], *SUBNQN.as_bytes());
    assert_eq!(genctr(&mut rig), before);
    rig.target.delete_subsystem(&nqn(SUBNQN)).unwrap();
    assert!(genctr(&mut rig) > before);
    let gone = rig.log_page(conn, GetLogPage::new(lid::DISCOVERY, 1024, 3072));
    assert_eq!(gone.unwrap_err(), INVALID, "the log is shorter now");
}

/// Goal: a discovery controller without keep-alive goes after two minutes of silence; one with it
/// stays for as long as it is heard of.
#[test]
fn idle_discovery_controllers_go() {
    let mut rig = Rig::with_malloc();
    let lasting = rig.discovery(HOSTNQN);
    let passing = rig.discovery(HOSTNQN);
    let kato = nacre_nvmf_wire::features::fid::KEEP_ALIVE_TIMER;
    rig.set_feature(passing, kato, 0).unwrap();
    let get = nacre_nvmf_wire::commands::admin::GetFeatures::new(kato);
    assert_eq!(rig.feature(passing, get), Ok(0));
    // The upkeep that sees the last command of the one that falls silent.
    rig.pass(Duration::from_millis(200));
    for _ in 0..11 {
        rig.pass(Duration::from_secs(10));
        let cid = rig.cid();
        let alive = nacre_nvmf_wire::commands::admin::keep_alive(cid);
        assert!(rig.status(lasting, alive, &[]).is_success());
    }
    assert_eq!(
        rig.group.queue_pairs(),
        2,
        "110 seconds are not two minutes"
    );
    rig.pass(Duration::from_secs(11));
    rig.pass(Duration::from_secs(1));
    assert_eq!(rig.group.queue_pairs(), 1);
}
