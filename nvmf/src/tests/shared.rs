//! Tests of subsystems that several targets serve: the entries of other targets in the discovery
//! log.

use std::collections::BTreeSet;

use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, parse_page, subtype, treq};
use nacre_nvmf_wire::log::lid;

use super::rig::*;
use crate::subsystems::discovery::{Asker, Reachable, Snapshot, records};
use crate::subsystems::{LATER_IDS, SharedPort, SharedPorts, SharedSubsystem, SubsystemConfig};
use crate::transport::{Address, ConnId, ListenerId, TlsPolicy, TransportType};

const OTHER: &str = "nqn.2025-01.io.nacre:other-host";

fn port(id: u16, address: &str, is_here: bool) -> SharedPort {
    SharedPort {
        id,
        transport: TransportType::Tcp,
        address: Address::Ip(address.parse().unwrap()),
        tls: None,
        is_here,
    }
}

/// The snapshot for a host of one subsystem, without filters.
fn snapshot(subsystem: Reachable) -> Snapshot {
    Snapshot {
        generation: 1,
        subsystems: vec![subsystem],
        discovery: Vec::new(),
        discovery_nqn: nqn("nqn.2025-01.io.nacre:discovery"),
        referrals: Vec::new(),
        admin_entries: 32,
        same_transport: false,
        same_address: false,
        same_service: false,
    }
}

/// The NVM entries of the log that a connected host reads, and its GENCTR.
fn read(rig: &mut Rig, conn: ConnId) -> (u64, Vec<DiscoveryRecord>) {
    let page = rig.log(conn, lid::DISCOVERY, 16 * 1024);
    let (header, entries) = parse_page(&page).unwrap();
    let records = entries.iter().map(|entry| entry.parse().unwrap());
    let nvm = records.filter(|record| record.subtype == subtype::NVM);
    (header.genctr.get(), nvm.collect())
}

fn ports(records: &[DiscoveryRecord]) -> Vec<(u16, &str)> {
    let port = |record: &DiscoveryRecord| record.portid;
    let all = records.iter();
    all.map(|record| (port(record), record.traddr.as_str()))
        .collect()
}

/// Goal: the log of an allowed host has the ports of all targets once, with the same PORTID from
/// each, and the log of another host has none. Each change is an event and increments GENCTR. A
/// share without a change does neither.
#[test]
fn ports_of_all_targets_are_listed_for_allowed_hosts() {
    let mut rig = Rig::with_malloc();
    let name = nqn("nqn.2025-01.io.nacre:volume");
    let subsystem = rig
        .target
        .create_subsystem(SubsystemConfig::new(name.clone()))
        .unwrap();
    subsystem
        .add_host(&nqn(HOSTNQN), Default::default())
        .unwrap();
    let [host, stranger] = [HOSTNQN, OTHER].map(|host| rig.discovery(host));
    let of = |ports: Vec<SharedPort>| SharedSubsystem {
        hosts: BTreeSet::from([nqn(HOSTNQN)]),
        any_host: false,
        ports,
        later_ids: Some(0x1400),
    };
    let here = SharedPort {
        transport: TransportType::Loopback,
        address: Address::Loopback("test".into()),
        ..port(0x1001, "192.0.2.1:1", true)
    };
    let [b, c] = [
        port(0x2001, "192.0.2.2:4420", false),
        port(0x3001, "192.0.2.3:4420", false),
    ];
    let all = of(vec![here.clone(), b.clone(), c]);
    let mut genctr = read(&mut rig, host).0;
    let volume = |rig: &mut Rig, conn| {
        let (genctr, mut records) = read(rig, conn);
        records.retain(|record| record.subnqn == name);
        (genctr, records)
    };
    let mut changed = |rig: &mut Rig, expected: &[(u16, &str)]| {
        let (now, records) = volume(rig, host);
        assert!(now > genctr, "{now}");
        genctr = now;
        assert_eq!(ports(&records), expected);
        assert_eq!(ports(&volume(rig, stranger).1), [], "not for this host");
    };

    rig.target.share(&name, Some(all.clone()));
    // This target does not serve it yet, and would refuse hosts.
    let elsewhere = [(0x2001, "192.0.2.2"), (0x3001, "192.0.2.3")];
    changed(&mut rig, &elsewhere);
    let (kind, address) = (TransportType::Loopback, &here.address);
    rig.target.add_listener(&name, kind, address).unwrap();
    let everywhere = [(0x1001, "test"), elsewhere[0], elsewhere[1]];
    changed(&mut rig, &everywhere);
    // A listener that no target describes: its identifier is of this target's range.
    let later = Address::Loopback("later".into());
    rig.target.add_listener(&name, kind, &later).unwrap();
    let (_, records) = volume(&mut rig, host);
    let is_later = |record: &&DiscoveryRecord| record.traddr == "later";
    let id = records.iter().find(is_later).expect("it is listed").portid;
    assert!((0x1400..0x1400 + LATER_IDS).contains(&id), "{id:#x}");
    rig.target.remove_listener(&name, kind, &later).unwrap();
    changed(&mut rig, &everywhere);

    let before = rig.target.discovery_generation();
    rig.target.share(&name, Some(all));
    assert_eq!(rig.target.discovery_generation(), before, "no change");

    rig.target
        .share(&name, Some(of(vec![here.clone(), b.clone()])));
    changed(&mut rig, &everywhere[..2]);
    // The publication does not name the host any more, but the subsystem of this target does.
    let no_host = SharedSubsystem {
        hosts: BTreeSet::new(),
        ..of(vec![here, b.clone()])
    };
    rig.target.share(&name, Some(no_host));
    changed(&mut rig, &everywhere[..1]);
    rig.target.delete_subsystem(&name).unwrap();
    changed(&mut rig, &[]);
    // This target need not serve it.
    rig.target.share(&name, Some(of(vec![b])));
    changed(&mut rig, &elsewhere[..1]);
    rig.target.share(&name, None);
    changed(&mut rig, &[]);

    let open = SharedSubsystem {
        any_host: true,
        ..of(vec![port(1, "192.0.2.2:4420", false)])
    };
    rig.target.share(&name, Some(open));
    assert_eq!(volume(&mut rig, stranger).1.len(), 1, "any host");
}

/// Goal: the log has the ports of other targets that the host can reach, by the filters of the
/// target. The filter by address does not count: their addresses are on other machines.
#[test]
fn reach_and_filters() {
    let snapshot = snapshot(Reachable {
        shared: SharedPorts {
            listed: vec![
                port(1, "127.0.0.1:4420", false),
                port(2, "192.0.2.2:4420", false),
                port(3, "192.0.2.2:4421", false),
            ],
            later_ids: None,
        },
        ..Reachable::new(nqn(SUBNQN))
    });
    let listed = |snapshot: &Snapshot, transport, local: &str| {
        let local = Address::Ip(local.parse().unwrap());
        let asker = Asker {
            transport,
            listener: ListenerId(9),
            local: &local,
            secure: false,
        };
        let records = records(snapshot, &asker).into_iter();
        let records = records.map(|record| record.record);
        let nvm = records.filter(|record| record.subtype == subtype::NVM);
        nvm.map(|record| record.portid).collect::<Vec<_>>()
    };
    let (tcp, far) = (TransportType::Tcp, "192.0.2.1:4420");
    assert_eq!(listed(&snapshot, tcp, far), [2, 3]);
    assert_eq!(listed(&snapshot, tcp, "127.0.0.1:4420"), [1, 2, 3]);
    let same_address = Snapshot {
        same_address: true,
        ..snapshot.clone()
    };
    assert_eq!(listed(&same_address, tcp, far), [2, 3]);
    let same_service = Snapshot {
        same_service: true,
        ..snapshot.clone()
    };
    assert_eq!(listed(&same_service, tcp, far), [2]);
    let same_transport = Snapshot {
        same_transport: true,
        ..snapshot
    };
    assert_eq!(listed(&same_transport, tcp, far), [2, 3]);
    assert!(listed(&same_transport, TransportType::Rdma, far).is_empty());
}

/// Goal: the log shows whether a host uses TLS with a port of another target, by the policy of the
/// port and the keys of the host, as with a port of this target. Only the other target knows the
/// keys of a host whose subsystem is not here.
#[test]
fn tls_of_ports_elsewhere() {
    const CLEAR: Option<(u8, bool)> = Some((treq::SECURE_CHANNEL_NOT_SPECIFIED, false));
    const REQUIRED: Option<(u8, bool)> = Some((treq::SECURE_CHANNEL_REQUIRED, true));
    const CONCAT: Option<(u8, bool)> = Some((treq::SECURE_CHANNEL_NOT_REQUIRED, true));
    let policies = [
        None,
        Some(TlsPolicy::Off),
        Some(TlsPolicy::Allow),
        Some(TlsPolicy::Require),
    ];
    // The subsystem is here, the host has a PSK, and it must concatenate.
    let cases = [
        ((false, false, false), [CLEAR, CLEAR, CLEAR, REQUIRED]),
        ((true, false, false), [CLEAR, CLEAR, CLEAR, None]),
        ((true, true, false), [REQUIRED, None, REQUIRED, REQUIRED]),
        ((true, false, true), [CONCAT, None, CONCAT, None]),
    ];
    let local = Address::Ip("192.0.2.1:4420".parse().unwrap());
    let asker = Asker {
        transport: TransportType::Tcp,
        listener: ListenerId(9),
        local: &local,
        secure: false,
    };
    for ((knows_host, has_psk, must_concat), expected) in cases {
        for (tls, expected) in policies.into_iter().zip(expected) {
            let port = SharedPort {
                tls,
                ..port(2, "192.0.2.2:4420", false)
            };
            let snapshot = snapshot(Reachable {
                shared: SharedPorts {
                    listed: vec![port],
                    later_ids: None,
                },
                has_psk,
                must_concat,
                knows_host,
                ..Reachable::new(nqn(SUBNQN))
            });
            let records = records(&snapshot, &asker).into_iter();
            let mut nvm = records.filter(|record| record.record.subtype == subtype::NVM);
            let found = nvm.next().map(|record| {
                let channel = record.record.treq & !treq::SQ_FLOW_CONTROL_DISABLE;
                (channel, record.secure_channel)
            });
            let host = (knows_host, has_psk, must_concat);
            assert_eq!(found, expected, "{tls:?}, {host:?}");
        }
    }
}
