//! Tests of the check group `peer`: findings from given settings of both ends, and sessions over
//! the loopback interface.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use nacre_transport_rdma_link::dcb::{
    Algorithm, App, Dcb, DcbxMode, Ets, Pfc, Priorities, Selector,
};
use nacre_transport_rdma_link::qos::{Class, Qos};

use super::*;
use crate::peer::{Answer, AskError, Burst, Bytes, End, ProbeClass, Question, Responder, ask};
use crate::roce::{Ecn, Facts, report};

const PEER: &str = "10.0.0.9";

fn scope() -> Scope {
    Scope {
        peer: Some(ip(PEER).into()),
        marking: Marking {
            qos: Qos {
                storage: Class {
                    dscp: Some(26),
                    prio: Some(3),
                    share: Some(50),
                },
                lossless: true,
                ..Qos::default()
            },
            ..Marking::default()
        },
        ..Scope::default()
    }
}

fn ets() -> Ets {
    Ets {
        willing: false,
        classes: 8,
        credit_shaper: false,
        share: [50, 0, 0, 50, 0, 0, 0, 0],
        algorithm: [Algorithm::Ets; 8],
        class_of: [0, 0, 0, 3, 0, 0, 0, 0],
    }
}

fn ecn() -> Ecn {
    Ecn {
        notifies: [true; 8],
        reacts: [true; 8],
        ..Ecn::default()
    }
}

/// This end: settings as `[qos]` asks for them.
fn ours() -> Facts {
    Facts {
        interface: "eth0".into(),
        driver: Some("mlx5_core".into()),
        dcb: Some(Dcb {
            mode: Some(DcbxMode::HOST_IEEE),
            ets: Some(ets()),
            pfc: Some(Pfc {
                enabled: Priorities(0x08),
                ..Pfc::default()
            }),
            apps: vec![App::dscp(26, 3)],
            trust: Some(vec![Selector::Dscp]),
            ..Dcb::default()
        }),
        ecn: Some(ecn()),
        ..Facts::default()
    }
}

/// The peer, with the same settings.
fn theirs() -> End {
    End {
        interface: "ens1".into(),
        driver: Some("mlx5_core".into()),
        mtu: Some(1500),
        pfc: Some(Priorities(0x08)),
        ets: Some(ets()),
        trusted: vec![Selector::Dscp],
        apps: vec![App::dscp(26, 3)],
        ecn: Some(ecn()),
        ..End::default()
    }
}

/// 256 probes of a class, without loss, counted on `prio` at both ends.
fn burst(name: &'static str, dscp: u8, prio: usize) -> Burst {
    let mut bytes = Bytes {
        rx: [Some(0); 8],
        tx: [Some(0); 8],
    };
    bytes.rx[prio] = Some(300_000);
    bytes.tx[prio] = Some(300_000);
    Burst {
        class: ProbeClass {
            name,
            dscp,
            priority: (dscp == 26).then_some(3),
            is_lossless: dscp == 26,
        },
        sent: 256,
        arrived: BTreeMap::from([(dscp, 256)]),
        returned: BTreeMap::from([(dscp, 256)]),
        ours: bytes,
        theirs: bytes,
    }
}

fn same() -> Answer {
    Answer {
        theirs: theirs(),
        bursts: vec![burst("storage", 26, 3), burst("unmarked", 0, 0)],
    }
}

fn report_of(facts: Facts, answer: Option<Answer>) -> Report {
    let tree = testing::rxe_on_eth();
    let probe = ScriptedProbe {
        source: Some(ip("10.0.0.4")),
        ethernet: vec![facts],
        peer: answer,
        ..ScriptedProbe::default()
    };
    let mut report = examine(&system(&tree, &[("eth0", "10.0.0.4")], probe), &scope());
    report
        .findings
        .retain(|finding| finding.id.starts_with("peer."));
    report
}

/// The finding about `subject`; every problem has a remedy.
fn check(report: &Report, id: &str, class: &str, status: Status, evidence: &str) {
    let subject = format!("{PEER}{class}");
    let of = |f: &&Finding| f.id == id && f.subject.as_deref() == Some(subject.as_str());
    let finding = report.findings.iter().find(of).expect("a finding");
    is_judged(finding, status, evidence);
}

#[test]
fn equal_ends_pass() {
    let report = report_of(ours(), Some(same()));
    assert!(
        report.findings.iter().all(|f| f.status == Status::Pass),
        "{report:#?}"
    );
    assert_eq!(report.findings.len(), 5 + 2 * 3);
    check(
        &report,
        "peer.mtu",
        "",
        Status::Pass,
        "here (eth0): 1500; there (ens1): 1500",
    );
    check(
        &report,
        "peer.pfc",
        "",
        Status::Pass,
        "here (eth0): 3; there (ens1): 3",
    );
    check(
        &report,
        "peer.dscp",
        " storage",
        Status::Pass,
        "DSCP 26 arrives unchanged",
    );
    let sent = "256 packets sent on priority 3";
    check(&report, "peer.priority", " storage", Status::Pass, sent);
}

#[test]
fn each_difference_is_found() {
    let differs = |change: &dyn Fn(&mut End)| {
        let mut answer = same();
        change(&mut answer.theirs);
        report_of(ours(), Some(answer))
    };
    let report = differs(&|end| end.mtu = Some(9000));
    check(&report, "peer.mtu", "", Status::Warn, "there (ens1): 9000");
    let report = differs(&|end| end.pfc = Some(Priorities(0x18)));
    check(
        &report,
        "peer.pfc",
        "",
        Status::Fail,
        "here (eth0): 3; there (ens1): 3,4",
    );
    let report = differs(&|end| end.apps = vec![App::dscp(26, 4)]);
    check(
        &report,
        "peer.trust",
        "",
        Status::Fail,
        "DSCP 26 has priority 4",
    );
    let report = differs(&|end| end.trusted = vec![Selector::Pcp]);
    check(
        &report,
        "peer.trust",
        "",
        Status::Fail,
        "trusts pcp, DSCP 8 has priority 0",
    );
    let report = differs(&|end| {
        end.trusted = vec![Selector::Pcp];
        end.is_vlan = true;
    });
    check(
        &report,
        "peer.trust",
        "",
        Status::Fail,
        "the VLAN tag's priority",
    );
    let report = differs(&|end| end.ets.as_mut().unwrap().share[3] = 40);
    check(&report, "peer.ets", "", Status::Warn, "40 %");
    let report = differs(&|end| end.ecn.as_mut().unwrap().reacts = [false; 8]);
    check(&report, "peer.ecn", "", Status::Warn, "slows down on none");

    let report = differs(&|end| {
        *end = End {
            interface: "ens1".into(),
            driver: Some("virtio_net".into()),
            no_dcb: Some("the driver of ens1 has no DCB".into()),
            ..End::default()
        }
    });
    for id in ["peer.mtu", "peer.pfc", "peer.trust", "peer.ets", "peer.ecn"] {
        check(&report, id, "", Status::Skip, "");
    }
    check(
        &report,
        "peer.pfc",
        "",
        Status::Skip,
        "there (ens1, driver virtio_net)",
    );
}

/// Goal: each fault of the network has findings of its own. Method: the bursts of a rewritten
/// DSCP, of lost packets, of no packets, and of drivers that count late or never.
#[test]
fn faults_of_the_network() {
    let differs = |change: &dyn Fn(&mut Burst)| {
        let mut answer = same();
        change(&mut answer.bursts[0]);
        report_of(ours(), Some(answer))
    };
    let class = " storage";
    let report = differs(&|burst| {
        burst.arrived = BTreeMap::from([(0, 256)]);
        burst.theirs.rx[3] = Some(0);
        burst.theirs.rx[0] = Some(300_000);
    });
    let rewritten = "sent to the peer with 26, arrived with 0 (256 of 256)";
    check(&report, "peer.dscp", class, Status::Fail, rewritten);
    check(
        &report,
        "peer.priority",
        class,
        Status::Fail,
        "256 received on 0",
    );
    check(&report, "peer.loss", class, Status::Pass, "256 returned");
    check(&report, "peer.dscp", " unmarked", Status::Pass, "");
    let report = differs(&|burst| burst.returned = BTreeMap::from([(26, 250), (8, 6)]));
    let back = "sent to this end with 26, arrived with 8 (6 of 256)";
    check(&report, "peer.dscp", class, Status::Fail, back);

    let report = differs(&|burst| burst.arrived = BTreeMap::from([(26, 200)]));
    check(
        &report,
        "peer.loss",
        class,
        Status::Fail,
        "200 arrived, 256 returned; this class",
    );
    let mut answer = same();
    answer.bursts[1].returned = BTreeMap::from([(0, 255)]);
    let report = report_of(ours(), Some(answer));
    check(
        &report,
        "peer.loss",
        " unmarked",
        Status::Warn,
        "255 returned",
    );
    let report = differs(&|burst| {
        burst.arrived.clear();
        burst.returned.clear();
    });
    check(&report, "peer.loss", class, Status::Fail, "0 arrived");
    check(
        &report,
        "peer.dscp",
        class,
        Status::Skip,
        "no packet arrived",
    );
    check(
        &report,
        "peer.priority",
        class,
        Status::Skip,
        "no packet arrived",
    );

    let report = differs(&|burst| burst.theirs.rx = [None; 8]);
    check(
        &report,
        "peer.priority",
        class,
        Status::Skip,
        "there (ens1): driver mlx5_core counts no",
    );
    let report = differs(&|burst| burst.ours.tx = [Some(10); 8]);
    check(
        &report,
        "peer.priority",
        class,
        Status::Skip,
        "did not count them in time",
    );
    // Both ends agree, on a priority that [qos] does not ask for.
    let report = differs(&|burst| {
        for bytes in [&mut burst.ours, &mut burst.theirs] {
            (bytes.rx[3], bytes.tx[3]) = (Some(0), Some(0));
            (bytes.rx[1], bytes.tx[1]) = (Some(300_000), Some(300_000));
        }
    });
    check(
        &report,
        "peer.priority",
        class,
        Status::Fail,
        "[qos] asks for 3",
    );
}

#[test]
fn a_peer_without_a_responder_is_skipped() {
    let report = report_of(ours(), None);
    check(
        &report,
        "peer.compare",
        "",
        Status::Skip,
        "`nacre doctor --answer 10.0.0.9 --for 60s` there",
    );
    assert_eq!(report.findings.len(), 1);
}

#[test]
fn the_report_has_the_path_between_both_ends() {
    let mut answer = same();
    answer.bursts[0].arrived = BTreeMap::from([(0, 256)]);
    let probe = ScriptedProbe {
        source: Some(ip("10.0.0.4")),
        ethernet: vec![ours()],
        peer: Some(answer),
        ..ScriptedProbe::default()
    };
    let tree = testing::rxe_on_eth();
    let machine = system(&tree, &[("eth0", "10.0.0.4")], probe);
    let (all, facts) = examine_with_facts(&machine, &scope());
    let text = report::text(&machine, &scope(), &all, &facts, false);
    let (_, between) = text
        .split_once("BETWEEN THIS MACHINE AND 10.0.0.9")
        .expect("a section");
    for line in [
        "  PASS peer.pfc: ",
        "  FAIL peer.dscp storage: the network rewrites",
        "      every switch port",
    ] {
        assert!(between.contains(line), "{line} in {text}");
    }
}

/// A responder on the loopback with the given facts, for one session.
fn responder(count: fn(&[String]) -> Bytes) -> (SocketAddr, std::thread::JoinHandle<bool>) {
    let responder = Responder::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = responder.address().unwrap();
    let facts = |_: IpAddr| (theirs(), vec!["ens1".to_owned()]);
    let thread = std::thread::spawn(move || {
        let until = Instant::now() + Duration::from_secs(20);
        responder.serve(until, &facts, &count).unwrap().is_some()
    });
    (at, thread)
}

fn question(at: SocketAddr) -> Question {
    let class = |name, dscp, priority| ProbeClass {
        name,
        dscp,
        priority,
        is_lossless: false,
    };
    Question {
        at,
        source: ip("127.0.0.1"),
        interfaces: vec!["eth0".into()],
        classes: vec![class("storage", 26, Some(3)), class("unmarked", 0, None)],
    }
}

/// Goal: a session carries settings and counts, and probes arrive with their DSCP in both
/// directions. Method: real sockets on the loopback; before that, connections that are no session.
#[test]
fn a_session_over_the_loopback() {
    let (at, thread) = responder(|interfaces| {
        assert_eq!(interfaces, ["ens1"]);
        Bytes {
            rx: [Some(7); 8],
            tx: [None; 8],
        }
    });
    // A scanner, a wrong protocol, another version, and a session that breaks off.
    drop(TcpStream::connect(at).unwrap());
    for text in [
        "GET / HTTP/1.1\r\n\r\n",
        "\"counts\"\n",
        "{\"hello\":{\"version\":1,\"port\":9}}\n",
    ] {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
    }
    let mut stream = TcpStream::connect(at).unwrap();
    stream
        .write_all(b"{\"hello\":{\"version\":2,\"port\":9}}\n")
        .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("{\"hello\":{\"version\":1,"), "{reply}");

    let answer = ask(&question(at), &Bytes::default).unwrap();
    assert!(thread.join().unwrap());
    assert_eq!(answer.theirs, theirs());
    assert_eq!(answer.bursts.len(), 2);
    for burst in &answer.bursts {
        let all = BTreeMap::from([(burst.class.dscp, 256)]);
        assert_eq!(
            (burst.sent, &burst.arrived, &burst.returned),
            (256, &all, &all)
        );
        assert_eq!(burst.theirs.rx, [Some(0); 8]);
        assert_eq!(burst.theirs.tx, [None; 8]);
    }
}

#[test]
fn a_session_without_a_responder_fails() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let liar = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        let _ = stream.read(&mut [0; 512]);
    });
    let error = ask(&question(at), &Bytes::default).unwrap_err();
    assert!(matches!(error, AskError::Malformed("reply")), "{error:?}");
    liar.join().unwrap();
    let error = ask(&question(at), &Bytes::default).unwrap_err();
    assert!(matches!(error, AskError::NoResponder(_)), "{error:?}");
    let responder = Responder::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let facts = |_: IpAddr| (End::default(), Vec::new());
    let until = Instant::now() + Duration::from_millis(30);
    let served = responder.serve(until, &facts, &|_| Bytes::default());
    assert_eq!(served.unwrap(), None);
}

/// Goal: text of another machine that could act on a terminal, or as a command, is not shown.
#[test]
fn text_that_no_interface_has_is_refused() {
    for (interface, driver) in [
        ("eth0\u{1b}[2K", None),
        ("eth0; reboot", None),
        ("", None),
        ("eth0", Some("mlx5\ncore")),
    ] {
        let responder = Responder::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = responder.address().unwrap();
        let end = End {
            interface: interface.to_owned(),
            driver: driver.map(str::to_owned),
            ..theirs()
        };
        let thread = std::thread::spawn(move || {
            let facts = |_: IpAddr| (end.clone(), Vec::new());
            let until = Instant::now() + Duration::from_millis(500);
            responder.serve(until, &facts, &|_| Bytes::default())
        });
        let error = ask(&question(at), &Bytes::default).unwrap_err();
        assert!(matches!(error, AskError::Malformed(_)), "{error:?}");
        assert_eq!(thread.join().unwrap().unwrap(), None);
    }
}
