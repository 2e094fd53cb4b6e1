//! Tests of the check group `roce`: findings from given settings and counters.

use std::time::Duration;

use nacre_transport_rdma_link::dcb::{
    Algorithm, App, Buffers, Dcb, DcbxMode, Ets, Pfc, Priorities, Selector,
};
use nacre_transport_rdma_link::ethtool::Pause;
use nacre_transport_rdma_link::lldp::{AnnouncedPfc, Neighbour};
use nacre_transport_rdma_link::qos::{Class, Qos};

use super::*;
use crate::roce::{Ecn, Facts, Sample, SwitchSettings, report};

fn qos() -> Qos {
    Qos {
        storage: Class {
            dscp: Some(26),
            prio: Some(3),
            share: Some(50),
        },
        lossless: true,
        ..Qos::default()
    }
}

fn ets() -> Ets {
    let mut ets = Ets {
        willing: false,
        classes: 8,
        credit_shaper: false,
        share: [50, 0, 0, 50, 0, 0, 0, 0],
        algorithm: [Algorithm::Strict; 8],
        class_of: [0, 0, 0, 3, 0, 0, 0, 0],
    };
    ets.algorithm[0] = Algorithm::Ets;
    ets.algorithm[3] = Algorithm::Ets;
    ets
}

/// Settings as `[qos]` asks for them.
fn good() -> Facts {
    Facts {
        interface: "eth0".into(),
        driver: Some("mlx5_core".into()),
        dcb: Some(Dcb {
            mode: Some(DcbxMode::HOST_IEEE),
            ets: Some(ets()),
            pfc: Some(Pfc {
                capability: 8,
                enabled: Priorities(0x08),
                ..Pfc::default()
            }),
            apps: vec![App::dscp(26, 3)],
            buffers: Some(Buffers {
                buffer_of: [0, 0, 0, 1, 0, 0, 0, 0],
                bytes: [100_000, 200_000, 0, 0, 0, 0, 0, 0],
                total: 300_000,
            }),
            trust: Some(vec![Selector::Dscp, Selector::Pcp]),
            ..Dcb::default()
        }),
        pause: Some(Pause::default()),
        ecn: Some(Ecn {
            notifies: [true; 8],
            reacts: [true; 8],
            cnp_dscp: Some(48),
            cnp_priority: Some(6),
        }),
        ..Facts::default()
    }
}

fn dcb(facts: &mut Facts) -> &mut Dcb {
    facts.dcb.as_mut().unwrap()
}

fn marked(qos: Qos) -> Marking {
    Marking {
        qos,
        ..Marking::default()
    }
}

fn scope() -> Scope {
    Scope {
        marking: marked(qos()),
        ..Scope::default()
    }
}

fn report_of(facts: Facts, scope: &Scope) -> Report {
    let tree = testing::rxe_on_eth();
    let probe = ScriptedProbe {
        ethernet: vec![facts],
        ..ScriptedProbe::default()
    };
    examine(&system(&tree, &[("eth0", "10.0.0.4")], probe), scope)
}

/// The finding of group `roce`; every problem has a remedy.
fn check(facts: Facts, scope: &Scope, id: &str, status: Status, evidence: &str) {
    let report = report_of(facts, scope);
    expect(&report, id, status, evidence);
}

/// Goal: a daemon that begins to use RDMA judges the network by its own `[qos]`.
#[test]
fn concerns_know_the_daemons_marking() {
    let ids = |marking| -> Vec<&str> {
        let probe = ScriptedProbe {
            ethernet: vec![good()],
            ..ScriptedProbe::default()
        };
        let machine = system(&testing::rxe_on_eth(), &[("eth0", "10.0.0.4")], probe);
        let all = concerns(&machine, &[ip("10.0.0.4")], marking);
        let ids = all.into_iter().map(|finding| finding.id);
        ids.filter(|id| id.starts_with("roce.")).collect()
    };
    let unmarked = ids(Marking::default());
    assert!(unmarked.contains(&"roce.trust"), "{unmarked:?}");
    let marking = Marking {
        qos: qos(),
        tos: 26 << 2,
    };
    assert_eq!(ids(marking), [""; 0]);
}

#[test]
fn a_port_that_is_set_as_asked_passes() {
    let report = report_of(good(), &scope());
    let all = report.findings.iter().filter(|f| f.id.starts_with("roce."));
    for finding in all {
        let skipped = ["roce.pfc", "roce.pause.rate"].contains(&finding.id);
        let expected = if skipped { Status::Skip } else { Status::Pass };
        assert_eq!(finding.status, expected, "{finding:?}");
    }
    expect(&report, "roce.lossless", Status::Pass, "priorities 3 pause");
    expect(&report, "roce.pfc", Status::Skip, "--wait 35s");
}

#[test]
fn a_driver_without_dcb_is_skipped_unless_pfc_is_asked_for() {
    let none = || Facts {
        interface: "eth0".into(),
        driver: Some("virtio_net".into()),
        no_dcb: Some("the driver of eth0 has no DCB".into()),
        ..Facts::default()
    };
    let report = report_of(none(), &Scope::default());
    expect(&report, "roce.lossless", Status::Skip, "virtio_net");
    assert!(report.findings.iter().all(|f| f.id != "roce.pfc"));
    check(
        none(),
        &scope(),
        "roce.lossless",
        Status::Fail,
        "lossless = true",
    );
}

#[test]
fn dcbx() {
    let with = |mode: u8| {
        let mut facts = good();
        dcb(&mut facts).mode = Some(DcbxMode(mode));
        facts
    };
    check(with(0x09), &scope(), "roce.dcbx", Status::Pass, "host ieee");
    check(with(0x0a), &scope(), "roce.dcbx", Status::Warn, "firmware");
    // mlx5 with its firmware's agent says neither host nor firmware.
    check(with(0x0c), &scope(), "roce.dcbx", Status::Warn, "firmware");
    let mut cee = good();
    cee.neighbour = SwitchSettings::Neighbour(Box::new(Neighbour {
        cee: true,
        ..Neighbour::default()
    }));
    check(cee, &scope(), "roce.dcbx", Status::Fail, "CEE");
    let mut willing = switch(0x20);
    dcb(&mut willing).ets = Some(Ets {
        willing: true,
        ..ets()
    });
    check(willing, &scope(), "roce.dcbx", Status::Warn, "willing");
    let mut silent = good();
    dcb(&mut silent).mode = None;
    check(silent, &scope(), "roce.dcbx", Status::Skip, "does not say");
}

#[test]
fn the_set_of_lossless_priorities() {
    let with = |enabled: u8| {
        let mut facts = good();
        dcb(&mut facts).pfc.as_mut().unwrap().enabled = Priorities(enabled);
        facts
    };
    let rows = [
        (0x08, Status::Pass, "asks for: 3"),
        (0x00, Status::Fail, "none"),
        (0xff, Status::Fail, "all eight"),
        (0x28, Status::Fail, "3,5"),
    ];
    for (enabled, status, text) in rows {
        check(with(enabled), &scope(), "roce.pfc.set", status, text);
    }
    let free = Scope::default();
    check(with(0x00), &free, "roce.pfc.set", Status::Pass, "none");
    check(with(0x38), &free, "roce.pfc.set", Status::Warn, "buffers");
    check(with(0x00), &free, "roce.lossless", Status::Pass, "lossy");
    let lossy = Scope {
        marking: marked(Qos {
            lossless: false,
            ..qos()
        }),
        ..Scope::default()
    };
    check(
        with(0x08),
        &lossy,
        "roce.pfc.set",
        Status::Warn,
        "asks for: none",
    );
    check(with(0x08), &scope(), "roce.lossless", Status::Pass, "pause");
    check(
        with(0x28),
        &scope(),
        "roce.lossless",
        Status::Warn,
        "roce.pfc.set",
    );
}

fn switch(enabled: u8) -> Facts {
    Facts {
        neighbour: SwitchSettings::Neighbour(Box::new(Neighbour {
            chassis: "02:00:00:00:00:02".into(),
            port: "Eth1/7".into(),
            system_name: Some("leaf1".into()),
            pfc: Some(AnnouncedPfc {
                willing: false,
                bypass: false,
                capability: 8,
                enabled: Priorities(enabled),
            }),
            ..Neighbour::default()
        })),
        ..good()
    }
}

#[test]
fn the_switch_is_compared() {
    let scope = scope();
    check(
        switch(0x08),
        &scope,
        "roce.pfc",
        Status::Pass,
        "leaf1 port Eth1/7: 3",
    );
    check(
        switch(0x10),
        &scope,
        "roce.pfc",
        Status::Fail,
        "ours: 3; leaf1 port Eth1/7: 4",
    );
    let with = |neighbour| Facts {
        neighbour,
        ..good()
    };
    let silence = with(SwitchSettings::Silence(Duration::from_secs(35)));
    check(
        silence,
        &scope,
        "roce.pfc",
        Status::Warn,
        "no LLDP frame arrived in 35 s",
    );
    let bad = with(SwitchSettings::Bad("it has no end TLV".into()));
    check(bad, &scope, "roce.pfc", Status::Warn, "malformed");
    let unable = with(SwitchSettings::Unable("not permitted".into()));
    check(unable, &scope, "roce.pfc", Status::Skip, "not permitted");
    let mute = with(SwitchSettings::Neighbour(Box::default()));
    check(mute, &scope, "roce.pfc", Status::Warn, "announces no PFC");
    let mut firmware = good();
    dcb(&mut firmware).peer_pfc = Some(Pfc::default());
    check(
        firmware,
        &scope,
        "roce.pfc",
        Status::Fail,
        "the card's agent: none",
    );
}

#[test]
fn shares() {
    let with = |change: &dyn Fn(&mut Ets)| {
        let mut facts = good();
        change(dcb(&mut facts).ets.as_mut().unwrap());
        facts
    };
    let scope = scope();
    check(
        with(&|_| ()),
        &scope,
        "roce.ets",
        Status::Pass,
        "class 3: priorities 3, 50 %",
    );
    let uneven = with(&|ets| ets.share[0] = 40);
    check(uneven, &scope, "roce.ets", Status::Fail, "90 percent");
    let one_class = with(&|ets| ets.class_of = [0; 8]);
    check(
        one_class,
        &scope,
        "roce.ets",
        Status::Warn,
        "shares class 0",
    );
    let small = with(&|ets| (ets.share[0], ets.share[3]) = (90, 10));
    check(small, &scope, "roce.ets", Status::Warn, "[qos] asks for 50");
}

#[test]
fn trust_leads_packets_to_their_priority() {
    let with = |trust: &[Selector], apps: &[App]| {
        let mut facts = good();
        dcb(&mut facts).trust = Some(trust.to_vec());
        dcb(&mut facts).apps = apps.to_vec();
        facts
    };
    let scope = scope();
    let dscp = [Selector::Dscp];
    let id = "roce.trust";
    check(good(), &scope, id, Status::Pass, "DSCP 26 has priority 3");
    // Without an entry, 26 is class selector 3.
    check(
        with(&dscp, &[]),
        &scope,
        id,
        Status::Pass,
        "without an entry",
    );
    let elsewhere = with(&dscp, &[App::dscp(26, 5)]);
    check(
        elsewhere,
        &scope,
        id,
        Status::Fail,
        "land in another priority",
    );
    let untagged = with(&[Selector::Pcp], &[]);
    check(
        untagged.clone(),
        &scope,
        id,
        Status::Fail,
        "without a VLAN tag",
    );
    let unmarked = Scope::default();
    check(untagged, &unmarked, id, Status::Warn, "no VLAN");
    check(good(), &unmarked, id, Status::Warn, "does not pause");
}

#[test]
fn congestion_notification() {
    let mut off = good();
    off.ecn = Some(Ecn::default());
    check(off.clone(), &scope(), "roce.ecn", Status::Warn, "off for 3");
    dcb(&mut off).pfc = Some(Pfc::default());
    let free = Scope::default();
    check(off, &free, "roce.ecn", Status::Fail, "lossy network");
    let mut unseen = good();
    unseen.ecn = None;
    check(
        unseen.clone(),
        &scope(),
        "roce.ecn",
        Status::Warn,
        "no ECN settings",
    );
    unseen.driver = Some("ice".into());
    check(unseen, &scope(), "roce.ecn", Status::Skip, "ice");
}

#[test]
fn pauses() {
    let mut both = good();
    both.pause.as_mut().unwrap().rx = true;
    check(
        both,
        &scope(),
        "roce.pause.global",
        Status::Fail,
        "received on",
    );
    let with = |pauses: u64, paused_us: u64, storms: u64| {
        let sample = |pauses, paused_us, storms| {
            let mut sample = Sample::default();
            sample.counters.rx[3].pauses = Some(pauses);
            sample.counters.rx[0].pauses = Some(0);
            sample.counters.rx[3].pause_us = Some(paused_us);
            let name = "tx_pause_storm_warning_events".to_owned();
            sample.counters.loss.insert(name, storms);
            sample
        };
        Facts {
            before: sample(1000, 0, 0),
            after: Some(Sample {
                seconds: 10.0,
                ..sample(1000 + pauses, paused_us, storms)
            }),
            ..good()
        }
    };
    let id = "roce.pause.rate";
    check(with(0, 0, 0), &scope(), id, Status::Pass, "no pause frame");
    check(
        with(990, 0, 0),
        &scope(),
        id,
        Status::Pass,
        "99 pause frames per second (priority 3)",
    );
    check(
        with(1500, 0, 0),
        &scope(),
        id,
        Status::Warn,
        "more than 100",
    );
    // Resyncs fill the network.
    let resyncing = Scope {
        resyncs: 1,
        ..scope()
    };
    check(with(1500, 0, 0), &resyncing, id, Status::Pass, "150");
    check(
        with(2500, 0, 0),
        &resyncing,
        id,
        Status::Warn,
        "more than 200",
    );
    check(with(1, 2_000_000, 0), &scope(), id, Status::Fail, "20 %");
    check(with(1, 0, 1), &scope(), id, Status::Fail, "storm");
}

#[test]
fn buffers() {
    let with = |change: &dyn Fn(&mut Buffers)| {
        let mut facts = good();
        change(dcb(&mut facts).buffers.as_mut().unwrap());
        facts
    };
    let id = "roce.buffer";
    let shared = with(&|buffers| buffers.buffer_of = [0; 8]);
    check(
        shared,
        &scope(),
        id,
        Status::Fail,
        "together with all other",
    );
    let mut small = with(&|buffers| buffers.bytes[1] = 10_000);
    dcb(&mut small).pfc.as_mut().unwrap().delay = 60_000;
    small.mtu = Some(9000);
    check(small, &scope(), id, Status::Warn, "needs 25500");
}

#[test]
fn members_of_a_bond_are_the_same() {
    let tree = testing::rxe_on_eth();
    for member in ["ens1", "ens2"] {
        tree.file(&format!("sys/class/net/eth0/lower_{member}/mtu"), "1500");
        tree.netdev(member, "02:00:00:00:00:01", 1500);
    }
    let member = |name: &str| Facts {
        interface: name.into(),
        ..good()
    };
    let report = |second: Facts| {
        let probe = ScriptedProbe {
            ethernet: vec![member("ens1"), second],
            ..ScriptedProbe::default()
        };
        examine(&system(&tree, &[("eth0", "10.0.0.4")], probe), &scope())
    };
    let same = report(member("ens2"));
    expect(&same, "roce.members", Status::Pass, "ens1, ens2");
    // Each member is checked by itself.
    let of = same.findings.iter().filter(|f| f.id == "roce.ets");
    let of: Vec<_> = of.map(|f| f.subject.as_deref().unwrap()).collect();
    assert_eq!(of, ["ens1", "ens2"]);
    let mut other = member("ens2");
    dcb(&mut other).apps.clear();
    expect(&report(other), "roce.members", Status::Fail, "different");
}

#[test]
fn interfaces_without_rdma_are_checked_on_request() {
    let tree = testing::empty();
    tree.netdev("eth5", "02:00:00:00:00:01", 1500);
    let report = |scope: &Scope| examine(&system(&tree, &[], ScriptedProbe::default()), scope);
    let none = report(&Scope::default());
    assert!(none.findings.iter().all(|f| !f.id.starts_with("roce.")));
    let asked = report(&Scope {
        qos_interfaces: vec!["eth5".into()],
        ..Scope::default()
    });
    expect(&asked, "roce.lossless", Status::Skip, "no DCB");
}

#[test]
fn a_report_for_the_network_team() {
    let tree = testing::rxe_on_eth();
    tree.file("proc/sys/kernel/hostname", "storage1");
    let probe = ScriptedProbe {
        ethernet: vec![switch(0x10)],
        ..ScriptedProbe::default()
    };
    let system = system(&tree, &[("eth0", "10.0.0.4")], probe);
    let (findings, facts) = examine_with_facts(&system, &scope());
    let text = |names| report::text(&system, &scope(), &findings, &facts, names);
    let plain = text(false);
    for part in [
        "DSCP 26, priority 3, share 50 %",
        "INTERFACE eth0",
        "10.0.0.4/24",
        "PFC on priorities      3 (asked for: 3)",
        "switch                 leaf1 port Eth1/7",
        "switch PFC             4",
        "FAIL roce.pfc [eth0]: ours: 3; leaf1 port Eth1/7: 4",
        "pause pfc-cos 3",
        "spanning-tree port type edge",
        "qos map dscp 26 to traffic-class 3",
        "nv set qos roce mode lossless",
    ] {
        assert!(plain.contains(part), "{part} is not in {plain}");
    }
    assert!(!plain.contains("storage1"));
    assert!(text(true).contains("Machine: storage1"));
}
