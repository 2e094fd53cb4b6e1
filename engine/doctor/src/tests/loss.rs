//! Tests of the checks of lost packets, from counters before and after.

use nacre_transport_rdma_link::qos::Qos;

use super::*;
use crate::loss::{Counts, card_loss, port_loss};
use crate::roce::{Facts, Sample};

fn lossless() -> Qos {
    let mut qos = Qos {
        lossless: true,
        ..Qos::default()
    };
    qos.storage.prio = Some(3);
    qos
}

fn is(finding: &Finding, status: Status, part: &str) {
    assert_eq!(finding.status, status, "{finding:?}");
    assert!(finding.evidence.contains(part), "{finding:?}");
}

/// Goal: growth is judged by what it is a sign of, and old counts by the packets of their time.
#[test]
fn losses_of_a_port() {
    let counts = |all: &[(&str, u64)]| -> Counts {
        all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect()
    };
    let before = counts(&[
        ("out_of_sequence", 7),
        ("rnr_nak_retry_err", 0),
        ("symbol_error", 0),
        ("req_transport_retries_exceeded", 1),
        ("port_xmit_packets", 1_000_000),
        ("port_rcv_packets", 1_000_000),
    ]);
    let grown = |name: &str, more: u64| {
        let mut after = before.clone();
        *after.get_mut(name).unwrap() += more;
        after
    };
    let plain = Qos::default();
    let loss = grown("out_of_sequence", 12);
    is(
        &port_loss(&before, &loss, 35.0, &plain),
        Status::Warn,
        "out_of_sequence +12 within 35 s: packets are lost on the way",
    );
    is(
        &port_loss(&before, &loss, 35.0, &lossless()),
        Status::Fail,
        "out_of_sequence +12",
    );
    let given_up = grown("req_transport_retries_exceeded", 1);
    is(
        &port_loss(&before, &given_up, 35.0, &plain),
        Status::Fail,
        "until connections ended",
    );
    let waits = grown("rnr_nak_retry_err", 3);
    let finding = port_loss(&before, &waits, 35.0, &lossless());
    is(&finding, Status::Warn, "senders wait for receive buffers");
    assert!(finding.remedy.unwrap().contains("srq_size"));
    let damage = grown("symbol_error", 3);
    is(
        &port_loss(&before, &damage, 35.0, &plain),
        Status::Warn,
        "the link damages packets",
    );
    is(
        &port_loss(&before, &before, 0.2, &lossless()),
        Status::Pass,
        "nothing lost in less than a second; out_of_sequence 7, req_transport_retries_exceeded 1 before, of 2000000 packets",
    );
    let mut many = before.clone();
    many.insert("packet_seq_err".into(), 21);
    is(
        &port_loss(&many, &many, 35.0, &plain),
        Status::Warn,
        "packet_seq_err 21",
    );
    // The driver was loaded again.
    let fresh = counts(&[("out_of_sequence", 0)]);
    is(
        &port_loss(&before, &fresh, 35.0, &plain),
        Status::Pass,
        "nothing lost within 35 s, nor before",
    );
    let unknown = counts(&[("rcvd_seq_err", 9)]);
    is(
        &port_loss(&unknown, &unknown, 35.0, &plain),
        Status::Pass,
        "of an unknown number",
    );
}

/// Goal: a card that drops packets is a warning, and a failure where the priority should pause.
#[test]
fn losses_of_a_card() {
    let with = |named: u64, discards: u64, seconds: Option<f64>| {
        let sample = |named, discards| {
            let mut sample = Sample::default();
            let counters = &mut sample.counters;
            counters.loss.insert("rx_discards_phy".into(), named);
            // Not a loss, and not even a count.
            counters
                .loss
                .insert("outbound_pci_stalled_wr".into(), named);
            counters.rx[3].discards = Some(discards);
            counters.rx[3].packets = Some(1_000_000);
            sample
        };
        Facts {
            before: sample(0, 0),
            after: seconds.map(|seconds| Sample {
                seconds,
                ..sample(named, discards)
            }),
            ..Facts::default()
        }
    };
    let judge = |facts: &Facts, qos: &Qos| card_loss(facts, qos).unwrap();
    let none = with(0, 0, Some(10.0));
    is(
        &judge(&none, &lossless()),
        Status::Pass,
        "nothing lost within 10 s",
    );
    let unmeasured = with(0, 0, None);
    is(
        &judge(&unmeasured, &lossless()),
        Status::Pass,
        "not measured",
    );
    let named = with(5, 0, Some(10.0));
    is(
        &judge(&named, &lossless()),
        Status::Warn,
        "rx_discards_phy +5 within 10 s",
    );
    let of_priority = with(0, 5, Some(10.0));
    is(
        &judge(&of_priority, &lossless()),
        Status::Fail,
        "rx_prio3_discards +5 within 10 s: priority 3 should pause",
    );
    is(
        &judge(&of_priority, &Qos::default()),
        Status::Warn,
        "no room",
    );
    assert_eq!(card_loss(&Facts::default(), &lossless()), None);
}

#[test]
fn the_report_has_the_losses_of_each_port() {
    let tree = testing::rxe_on_eth();
    let counter = |name: &str, value: &str| {
        tree.file(
            &format!("sys/class/infiniband/rxe0/ports/1/hw_counters/{name}"),
            value,
        );
    };
    counter("sent_pkts", "900");
    counter("rcvd_seq_err", "4");
    let system = system(&tree, &[("eth0", "10.0.0.4")], ScriptedProbe::default());
    let report = examine(&system, &Scope::default());
    expect(
        &report,
        "rdma.loss",
        Status::Warn,
        "rcvd_seq_err 4 before, of 900 packets",
    );
    assert_eq!(the(&report, "rdma.loss").subject.as_deref(), Some("rxe0/1"));
}
