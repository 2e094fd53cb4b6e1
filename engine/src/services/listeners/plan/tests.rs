//! Goal: every row of the decision table of listeners. Method: simulated machines, given as lists
//! of interfaces.

use std::collections::BTreeMap;

use nacre_transport_rdma_link::GidKind;

use super::*;
use crate::config::listener::Ana;

/// Interfaces, devices by interface, and addresses usable over RDMA.
#[derive(Default)]
struct Fake {
    interfaces: Vec<Interface>,
    devices: BTreeMap<&'static str, &'static str>,
    capable: BTreeSet<IpAddr>,
    is_iwarp: bool,
}

impl Machine for Fake {
    fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    fn interfaces_of(&self, device: &str) -> Option<Vec<String>> {
        let of = self.devices.iter().filter(|(_, d)| **d == device);
        let names: Vec<String> = of.map(|(iface, _)| (*iface).to_owned()).collect();
        (!names.is_empty()).then_some(names)
    }

    fn rdma_devices(&self) -> Vec<String> {
        self.devices.values().map(|d| (*d).to_owned()).collect()
    }

    fn rdma(&self, want: &CapabilityRequest) -> Result<Chosen, PathProblem> {
        let lack = |reason| PathProblem {
            reason,
            evidence: "seen".into(),
            remedy: "do".into(),
        };
        let device = self.devices.get(want.netdev.as_str());
        let device = device.ok_or_else(|| lack("no_rdma_dev"))?;
        if !self.capable.contains(&want.ip) {
            return Err(lack("no_gid_for_ip"));
        }
        if want.device.as_ref().is_some_and(|d| d != device) {
            return Err(lack("no_rdma_dev"));
        }
        Ok(Chosen {
            device: (*device).to_owned(),
            port: want.port.unwrap_or(1),
            gid_index: want.gid_index.unwrap_or(0),
            gid_kind: if self.is_iwarp {
                GidKind::Iwarp
            } else {
                GidKind::RoceV2
            },
            software: true,
        })
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn interface(name: &str, last: u8, addresses: &[&str]) -> Interface {
    Interface {
        name: name.into(),
        mac: Some([2, 0, 0x5e, 0, 0x53, last]),
        addresses: addresses.iter().map(|a| ip(a)).collect(),
    }
}

/// lo; eth0 with RDMA on both addresses; eth1 with a device and no GID; eth2 with neither; eth3
/// without an address. eth2 and bond0 share a MAC address.
fn machine() -> Fake {
    Fake {
        interfaces: vec![
            interface("lo", 0, &["127.0.0.1", "::1"]),
            interface("eth0", 1, &["10.0.0.4", "fd00::4", "fe80::4"]),
            interface("eth1", 2, &["10.0.1.4"]),
            interface("eth2", 3, &["10.0.2.4"]),
            interface("bond0", 3, &["10.0.3.4"]),
            interface("eth3", 4, &[]),
        ],
        devices: BTreeMap::from([("eth0", "rxe0"), ("eth1", "rxe1")]),
        capable: BTreeSet::from([ip("10.0.0.4"), ip("fd00::4")]),
        is_iwarp: false,
    }
}

fn on(iface: &[&str]) -> Listener {
    Listener {
        name: "data".into(),
        iface: iface.iter().map(|s| (*s).to_owned()).collect(),
        ..Listener::default()
    }
}

/// `eth0 10.0.0.4 RDMA`, or with the reason: `eth1 10.0.1.4 RDMA no_gid_for_ip`.
fn shown(plan: &ListenerPlan) -> Vec<String> {
    let one = |p: &Path| {
        let mut text = format!("{} {} {}", p.iface, p.ip, p.transport.trtype());
        if let Err(lack) = &p.verdict {
            text = format!("{text} {}", lack.reason);
        }
        if p.withheld {
            text += " withheld";
        }
        text
    };
    plan.paths.iter().map(one).collect()
}

fn planned(listener: Listener) -> ListenerPlan {
    plan(&[listener], &machine())
}

#[test]
fn the_decision_table() {
    use RdmaSetting::{Off, Prefer, Require};
    let (tcp, rdma) = (IpTransport::Tcp, IpTransport::Rdma);
    for (transports, setting, iface, paths, missing) in [
        (&[tcp][..], Off, "eth0", &["eth0 10.0.0.4 TCP"][..], 0),
        (&[rdma, tcp], Off, "eth0", &["eth0 10.0.0.4 TCP"], 0),
        (
            &[rdma, tcp],
            Prefer,
            "eth0",
            &["eth0 10.0.0.4 RDMA", "eth0 10.0.0.4 TCP"],
            0,
        ),
        (
            &[rdma, tcp],
            Prefer,
            "eth1",
            &["eth1 10.0.1.4 RDMA no_gid_for_ip", "eth1 10.0.1.4 TCP"],
            0,
        ),
        (
            &[rdma, tcp],
            Prefer,
            "eth2",
            &["eth2 10.0.2.4 RDMA no_rdma_dev", "eth2 10.0.2.4 TCP"],
            0,
        ),
        (
            &[rdma, tcp],
            Require,
            "eth2",
            &["eth2 10.0.2.4 RDMA no_rdma_dev", "eth2 10.0.2.4 TCP"],
            1,
        ),
        (&[rdma], Require, "eth0", &["eth0 10.0.0.4 RDMA"], 0),
        (
            &[rdma],
            Prefer,
            "eth1",
            &["eth1 10.0.1.4 RDMA no_gid_for_ip"],
            0,
        ),
    ] {
        let address = match iface {
            "eth0" => "10.0.0.4",
            "eth1" => "10.0.1.4",
            _ => "10.0.2.4",
        };
        let listener = Listener {
            transports: transports.to_vec(),
            rdma: setting,
            ..on(&[&format!("ip:{address}")])
        };
        let plan = planned(listener);
        assert_eq!(shown(&plan), paths, "{transports:?} {setting} {iface}");
        assert_eq!(
            plan.missing_required().count(),
            missing,
            "{setting} {iface}"
        );
        assert_eq!(plan.unmatched, []);
    }
}

#[test]
fn every_kind_of_selector() {
    let all_of_eth0 = &["eth0 10.0.0.4 TCP", "eth0 fd00::4 TCP"][..];
    for (selectors, paths) in [
        // Link-local addresses are used if they are selected explicitly.
        (&["ip:fe80::4"][..], &["eth0 fe80::4%eth0 TCP"][..]),
        (&["ip:fe80::4%eth0"], &["eth0 fe80::4%eth0 TCP"]),
        (&["subnet:fe80::/10"], &["eth0 fe80::4%eth0 TCP"]),
        (&["name:eth0"], all_of_eth0),
        (&["mac:02:00:5e:00:53:01"], all_of_eth0),
        (&["rdma:rxe0"], all_of_eth0),
        (&["ip:fd00::4"], &["eth0 fd00::4 TCP"]),
        (&["ip:10.0.1.4"], &["eth1 10.0.1.4 TCP"]),
        (
            &["subnet:10.0.0.0/23"],
            &["eth0 10.0.0.4 TCP", "eth1 10.0.1.4 TCP"],
        ),
        (&["subnet:fd00::/64"], &["eth0 fd00::4 TCP"]),
        (
            &["subnet:0.0.0.0/0"],
            &[
                "lo 127.0.0.1 TCP",
                "eth0 10.0.0.4 TCP",
                "eth1 10.0.1.4 TCP",
                "eth2 10.0.2.4 TCP",
                "bond0 10.0.3.4 TCP",
            ],
        ),
        // An address that two selectors match is used once.
        (
            &["name:eth1", "ip:10.0.1.4", "name:eth2"],
            &["eth1 10.0.1.4 TCP", "eth2 10.0.2.4 TCP"],
        ),
    ] {
        let plan = planned(on(selectors));
        assert_eq!(shown(&plan), paths, "{selectors:?}");
        assert_eq!(plan.unmatched, [], "{selectors:?}");
    }
}

#[test]
fn unmatched_selectors_list_the_choices() {
    let have = "lo 127.0.0.1, lo ::1, eth0 10.0.0.4, eth0 fd00::4, eth1 10.0.1.4, eth2 10.0.2.4, \
                bond0 10.0.3.4, eth3 without an address";
    for (selector, said) in [
        ("name:eth9", format!("no interface matches \"name:eth9\"; have: {have}")),
        ("name:eth3", format!("no interface matches \"name:eth3\"; have: {have}")),
        ("subnet:192.168.0.0/16", format!("no interface matches \"subnet:192.168.0.0/16\"; have: {have}")),
        ("rdma:mlx5_0", "no interface matches \"rdma:mlx5_0\"; have: rxe0, rxe1".into()),
        (
            "mac:02:00:5e:00:53:03",
            "2 interfaces match \"mac:02:00:5e:00:53:03\": eth2 10.0.2.4, bond0 10.0.3.4; choose by name: or ip:".into(),
        ),
    ] {
        let plan = planned(on(&[selector, "name:eth1"]));
        let texts: Vec<String> = plan.unmatched.iter().map(ToString::to_string).collect();
        assert_eq!(texts, [format!("listener \"data\": {said}")]);
        assert_eq!(shown(&plan), ["eth1 10.0.1.4 TCP"], "the other paths are kept");
    }
    let mac = planned(on(&["mac:00:00:00:00:00:09"])).unmatched[0].to_string();
    assert!(
        mac.contains("have: lo 02:00:5e:00:53:00, eth0 02:00:5e:00:53:01"),
        "{mac}"
    );
    let bare = plan(&[on(&["rdma:rxe0"])], &Fake::default());
    assert!(
        bare.unmatched[0]
            .to_string()
            .ends_with("have: no RDMA devices")
    );
}

#[test]
fn without_a_fallback_tcp_is_withheld() {
    let listener = Listener {
        rdma: RdmaSetting::Prefer,
        tcp_fallback: false,
        ..on(&["ip:10.0.0.4"])
    };
    let plan = planned(listener);
    assert_eq!(
        shown(&plan),
        ["eth0 10.0.0.4 RDMA", "eth0 10.0.0.4 TCP withheld"]
    );
}

#[test]
fn rdma_on_any_address_uses_all_capable_addresses() {
    let listener = |address: &str| Listener {
        name: "any".into(),
        address: address.parse().unwrap(),
        rdma: RdmaSetting::Require,
        ..Listener::default()
    };
    assert_eq!(
        shown(&planned(listener("0.0.0.0"))),
        ["eth0 10.0.0.4 RDMA", "* 0.0.0.0 TCP"]
    );
    assert_eq!(
        shown(&planned(listener("::"))),
        ["eth0 10.0.0.4 RDMA", "eth0 fd00::4 RDMA", "* :: TCP"]
    );
    assert_eq!(
        shown(&planned(Listener {
            rdma: RdmaSetting::Off,
            ..listener("fe80::4%eth0")
        })),
        ["eth0 fe80::4%eth0 TCP"]
    );
    let none = plan(&[listener("0.0.0.0")], &Fake::default());
    assert_eq!(
        shown(&none),
        ["* 0.0.0.0 RDMA no_rdma_dev", "* 0.0.0.0 TCP"]
    );
    assert_eq!(none.missing_required().count(), 1);
    assert_eq!(
        shown(&planned(listener("192.0.2.1"))),
        ["- 192.0.2.1 RDMA no_rdma_dev", "- 192.0.2.1 TCP"]
    );
}

#[test]
fn pinned_devices_and_states_are_passed_on() {
    let listener = Listener {
        rdma: RdmaSetting::Prefer,
        rdma_device: Some("rxe1".into()),
        ..on(&["ip:10.0.0.4"])
    };
    let plan = planned(listener.clone());
    assert_eq!(shown(&plan)[0], "eth0 10.0.0.4 RDMA no_rdma_dev");
    let listener = Listener {
        rdma_device: None,
        rdma_gid_index: Some(7),
        ana: Ana {
            rdma: AnaSetting::NonOptimized,
            tcp: AnaSetting::Inaccessible,
        },
        ..listener
    };
    let plan = planned(listener);
    let chosen = plan.paths[0].verdict.clone().unwrap().unwrap();
    assert_eq!((chosen.device.as_str(), chosen.gid_index), ("rxe0", 7));
    let states: Vec<AnaSetting> = plan.paths.iter().map(|p| p.ana).collect();
    assert_eq!(states, [AnaSetting::NonOptimized, AnaSetting::Inaccessible]);
}

/// Goal: a listener uses the port of its own key, else that of `[rdma]`.
#[test]
fn the_named_port_is_used() {
    let chosen = |text: &str| {
        let loaded = crate::config::load_text(Some(("n.toml", text)), [], &[]).unwrap();
        let plan = plan(&loaded.settings.listeners(), &machine());
        plan.paths[0].verdict.clone().unwrap().unwrap().port
    };
    let listener =
        "[[nvmf.listener]]\nname = \"data\"\niface = [\"ip:10.0.0.4\"]\nrdma = \"prefer\"\n";
    assert_eq!(chosen(listener), 1);
    let second = format!("{listener}rdma_port = 2\n");
    assert_eq!(chosen(&second), 2);
    assert_eq!(chosen(&format!("[rdma]\nport = 2\n{listener}")), 2);
    assert_eq!(chosen(&format!("[rdma]\nport = 3\n{second}")), 2);
}

/// Goal: a listener on an iWARP card does not promise two transports on one port of TCP.
#[test]
fn iwarp_and_tcp_do_not_share_a_port() {
    let iwarp = Fake {
        is_iwarp: true,
        ..machine()
    };
    let rdma = Listener {
        rdma: RdmaSetting::Require,
        ..on(&["ip:10.0.0.4"])
    };
    let one = plan(std::slice::from_ref(&rdma), &iwarp);
    let expected = ["eth0 10.0.0.4 RDMA iwarp_port", "eth0 10.0.0.4 TCP"];
    assert_eq!(shown(&one), expected);
    assert_eq!(one.missing_required().count(), 1);
    let only = Listener {
        transports: vec![IpTransport::Rdma],
        ..rdma.clone()
    };
    let tcp = |address: &str, port| Listener {
        name: "fallback".into(),
        address: address.parse().unwrap(),
        port,
        transports: vec![IpTransport::Tcp],
        ..Listener::default()
    };
    for (address, port, is_free) in [
        ("10.0.0.4", 4421, true),
        ("10.0.0.5", 4420, true),
        ("10.0.0.4", 4420, false),
        ("0.0.0.0", 4420, false),
        ("::", 4420, false),
    ] {
        let both = plan(&[only.clone(), tcp(address, port)], &iwarp);
        assert_eq!(
            both.missing_required().next().is_none(),
            is_free,
            "{address}"
        );
    }
    // The ports of RoCE are not those of TCP.
    assert_eq!(plan(&[rdma], &machine()).missing_required().count(), 0);
}

#[test]
fn two_listeners_on_one_address_keep_the_first() {
    let mut second = on(&["ip:10.0.1.4"]);
    second.name = "second".into();
    let other_port = Listener {
        port: 4421,
        ..second.clone()
    };
    let plan = plan(&[on(&["name:eth1"]), second, other_port], &machine());
    let names: Vec<(&str, u16)> = plan
        .paths
        .iter()
        .map(|p| (p.listener.as_str(), p.port))
        .collect();
    assert_eq!(names, [("data", 4420), ("second", 4421)]);
}
