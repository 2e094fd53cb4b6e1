//! Decides from counters and samples whether a soak test passed, and formats its report.

use std::collections::BTreeMap;

use nacre_transport_rdma_perf::Op;
use serde::Serialize;

use super::plan::LoadKind;
use crate::output;

/// The kind of event that a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CounterKind {
    OutOfSequence,
    Retransmit,
    Discard,
    Pause,
    /// Congestion notifications: how DCQCN works.
    Congestion,
    Error,
}

impl CounterKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OutOfSequence => "out of sequence",
            Self::Retransmit => "retransmit",
            Self::Discard => "discard",
            Self::Pause => "pause",
            Self::Congestion => "congestion",
            Self::Error => "error",
        }
    }

    /// The kind of a driver's counter by its name. `None`: the counter says nothing about health.
    pub(super) fn of(counter: &str) -> Option<Self> {
        let name = counter.to_ascii_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        // Ending a queue pair flushes its requests. A duration counts microseconds. Soft-RoCE
        // defers acknowledgements at any load.
        if has(&["flush", "duration", "lifespan", "deferred"]) {
            return None;
        }
        Some(if has(&["out_of_seq", "seq_err"]) {
            Self::OutOfSequence
        } else if has(&["retrans", "timeout", "retry", "duplicate", "rnr"]) {
            Self::Retransmit
        } else if has(&[
            "discard",
            "drop",
            "out_of_buffer",
            "no_buffer",
            "overrun",
            "missed",
        ]) {
            Self::Discard
        } else if has(&["pause"]) {
            Self::Pause
        } else if has(&["cnp", "ecn"]) {
            Self::Congestion
        } else if has(&["err"]) {
            Self::Error
        } else {
            return None;
        })
    }
}

/// A counter that grew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Change {
    /// Device and port.
    pub port: String,
    pub counter: String,
    #[serde(rename = "meaning")]
    pub kind: CounterKind,
    pub by: u64,
}

/// The samples of one second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Second {
    pub second: u64,
    pub phase: LoadKind,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// The largest 99th percentile of the latency, of all flows.
    pub p99_ns: u64,
    /// Flows without a completed message in this second.
    pub silent_flows: usize,
    pub changes: Vec<Change>,
}

/// One flow of one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct FlowReport {
    pub phase: LoadKind,
    pub peer: String,
    pub op: Op,
    pub bytes: u64,
    pub gigabytes_per_second: f64,
    pub median_ns: u64,
    pub p99_ns: u64,
    /// Longest run of seconds without a completed message.
    pub silent_seconds: u64,
    pub error: Option<String>,
}

/// The thresholds of failures and warnings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct SoakLimits {
    /// The network promises not to lose packets: losses fail the test.
    pub lossless: bool,
    /// Largest p99 under load, in multiples of the p99 of a peer alone.
    pub p99_factor: f64,
    /// Most pause frames per second on one counter.
    pub pauses: u64,
    /// Most seconds without a completed message of a flow.
    pub silent_seconds: u64,
    /// Smallest share of a peer in the incast, in percent of the mean.
    pub share_percent: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Soak {
    pub schema: &'static str,
    /// RDMA port of this machine.
    pub ports: Vec<String>,
    /// The kernel emulates the device: the rates say nothing about hardware.
    pub software: bool,
    pub peers: Vec<String>,
    pub message_bytes: u32,
    pub verify: bool,
    pub limits: SoakLimits,
    pub flows: Vec<FlowReport>,
    pub seconds: Vec<Second>,
    /// Changes over the whole test.
    pub counters: Vec<Change>,
    pub interrupted: bool,
    pub failures: Vec<String>,
    pub warnings: Vec<String>,
}

impl Soak {
    pub(super) const SCHEMA: &'static str = "nacre-rdma-soak/1";

    /// Adds the failures and warnings.
    pub(super) fn evaluate(&mut self) {
        let (mut failures, mut warnings) = (Vec::new(), Vec::new());
        for flow in &self.flows {
            let name = format!("{}, {} {}", flow.phase.name(), flow.op, flow.peer);
            if let Some(error) = &flow.error {
                failures.push(format!("{name}: {error}"));
            } else if flow.silent_seconds > self.limits.silent_seconds {
                let seconds = flow.silent_seconds;
                failures.push(format!("{name}: no message completed for {seconds} s"));
            } else if flow.bytes == 0 && !self.interrupted {
                failures.push(format!("{name}: no message completed"));
            }
        }
        warnings.extend(self.slow_peers());
        warnings.extend(self.unfair_peers());
        let mut losses: BTreeMap<CounterKind, Vec<&Change>> = BTreeMap::new();
        for change in &self.counters {
            losses.entry(change.kind).or_default().push(change);
        }
        for (kind, changes) in losses {
            let each: Vec<String> = changes
                .iter()
                .map(|change| format!("{} {} by {}", change.port, change.counter, change.by))
                .collect();
            let first = self.first_second(kind);
            let text = format!("{} counters grew{first}: {}", kind.name(), each.join(", "));
            match kind {
                CounterKind::OutOfSequence | CounterKind::Retransmit | CounterKind::Discard
                    if self.limits.lossless =>
                {
                    failures.push(text);
                }
                // How a lossless network and DCQCN work.
                CounterKind::Pause | CounterKind::Congestion => {}
                _ => warnings.push(text),
            }
        }
        warnings.extend(self.pause_storm());
        if self.ports.is_empty() {
            let text = "the RDMA port of the peers is not known, so losses were not counted";
            let list = if self.limits.lossless {
                &mut failures
            } else {
                &mut warnings
            };
            list.push(text.into());
        }
        if self.interrupted {
            failures.push("interrupted".into());
        }
        (self.failures, self.warnings) = (failures, warnings);
    }

    fn first_second(&self, kind: CounterKind) -> String {
        let has = |second: &&Second| second.changes.iter().any(|c| c.kind == kind);
        match self.seconds.iter().find(has) {
            Some(second) => format!(", first in second {}", second.second),
            None => String::new(),
        }
    }

    fn slow_peers(&self) -> Vec<String> {
        let reads = |kind| {
            let all = self.flows.iter();
            all.filter(move |flow| flow.phase == kind && flow.op == Op::Read && flow.p99_ns > 0)
        };
        let slow = |flow: &FlowReport| {
            let alone = reads(LoadKind::Alone).find(|alone| alone.peer == flow.peer)?;
            let factor = flow.p99_ns as f64 / alone.p99_ns as f64;
            (factor > self.limits.p99_factor).then(|| {
                format!(
                    "incast, {}: p99 is {factor:.0} times that of the peer alone ({:.0} us)",
                    flow.peer,
                    alone.p99_ns as f64 / 1e3
                )
            })
        };
        reads(LoadKind::Incast).filter_map(slow).collect()
    }

    fn unfair_peers(&self) -> Vec<String> {
        let incast: Vec<&FlowReport> = self
            .flows
            .iter()
            .filter(|flow| flow.phase == LoadKind::Incast && flow.error.is_none())
            .collect();
        let sum: u64 = incast.iter().map(|flow| flow.bytes).sum();
        let mean = sum / (incast.len() as u64).max(1);
        let share = |flow: &&FlowReport| (flow.bytes * 100).checked_div(mean).unwrap_or(100);
        let starved = incast
            .iter()
            .filter(|flow| share(flow) < self.limits.share_percent);
        starved
            .map(|flow| {
                format!(
                    "incast, {}: {} % of the mean of the peers",
                    flow.peer,
                    share(flow)
                )
            })
            .collect()
    }

    fn pause_storm(&self) -> Option<String> {
        let pauses = |second: &Second| {
            let all = second.changes.iter();
            let pauses = all.filter(|change| change.kind == CounterKind::Pause);
            pauses.map(|change| change.by).max().unwrap_or(0)
        };
        let stormy = self
            .seconds
            .iter()
            .filter(|s| pauses(s) > self.limits.pauses);
        let count = stormy.clone().count() as u64;
        let first = stormy.clone().next()?;
        Some(format!(
            "more than {} pause frames in {}, first in second {}",
            self.limits.pauses,
            output::count(count, "second"),
            first.second
        ))
    }

    /// The report for people.
    pub(super) fn text(&self) -> String {
        let mut lines = vec![
            format!(
                "RDMA soak test by {}: {}",
                self.ports.join(", "),
                output::count(self.peers.len() as u64, "peer")
            ),
            format!(
                "messages of {}{}",
                output::bytes(self.message_bytes.into()),
                if self.verify {
                    ", every byte compared"
                } else {
                    ""
                }
            ),
        ];
        if self.software {
            lines
                .push("the kernel emulates this device: the rates do not describe hardware".into());
        }
        lines.push(String::new());
        lines.push(format!(
            "{:<16} {:<6} {:<26} {:>10} {:>12} {:>12} {:>8}",
            "PHASE", "OP", "PEER", "GB/s", "MEDIAN us", "P99 us", "SILENT s"
        ));
        lines.extend(self.flows.iter().map(|flow| {
            format!(
                "{:<16} {:<6} {:<26} {:>10.3} {:>12.1} {:>12.1} {:>8}",
                flow.phase.name(),
                flow.op.name(),
                flow.peer,
                flow.gigabytes_per_second,
                flow.median_ns as f64 / 1e3,
                flow.p99_ns as f64 / 1e3,
                flow.silent_seconds
            )
        }));
        lines.push(String::new());
        lines.extend(self.seconds.iter().map(second));
        lines.push(String::new());
        match &self.counters[..] {
            [] if self.ports.is_empty() => lines.push("no counters were read".into()),
            [] => lines.push("no counter of losses, pauses, congestion or errors grew".into()),
            counters => lines.extend(counters.iter().map(|change| {
                let Change {
                    port, counter, by, ..
                } = change;
                format!("{port} {counter}: +{by} ({})", change.kind.name())
            })),
        }
        lines.extend(self.verdict());
        lines.join("\n")
    }

    /// The last lines of the report.
    pub(super) fn verdict(&self) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(self.warnings.iter().map(|text| format!("warning: {text}")));
        lines.extend(self.failures.iter().map(|text| format!("failure: {text}")));
        lines.push(match (&self.failures[..], &self.warnings[..]) {
            ([], []) => "passed".into(),
            ([], warnings) => {
                let count = output::count(warnings.len() as u64, "warning");
                format!("passed with {count}")
            }
            _ => "failed".into(),
        });
        lines
    }
}

/// One second as a line.
pub(super) fn second(second: &Second) -> String {
    let mut text = format!(
        "{:>5} s  {:<16} in {:>12}/s  out {:>12}/s  p99 {:>10.1} us",
        second.second,
        second.phase.name(),
        output::bytes(second.bytes_in),
        output::bytes(second.bytes_out),
        second.p99_ns as f64 / 1e3
    );
    if second.silent_flows > 0 {
        let flows = output::count(second.silent_flows as u64, "silent flow");
        text.push_str(&format!("  {flows}"));
    }
    for change in &second.changes {
        text.push_str(&format!("  {} +{}", change.counter, change.by));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names of mlx5, bnxt, irdma, rxe and interfaces get a kind; traffic has none.
    #[test]
    fn counters_have_a_meaning() {
        use CounterKind::*;
        for (name, kind) in [
            ("out_of_sequence", Some(OutOfSequence)),
            ("packet_seq_err", Some(OutOfSequence)),
            ("rcvd_out_of_seq_request", Some(OutOfSequence)),
            ("local_ack_timeout_err", Some(Retransmit)),
            ("roce_adp_retrans", Some(Retransmit)),
            ("retransSegs", Some(Retransmit)),
            ("completer_retry_err", Some(Retransmit)),
            ("duplicate_request", Some(Retransmit)),
            ("rx_discards_phy", Some(Discard)),
            ("port_xmit_discards", Some(Discard)),
            ("rx_dropped", Some(Discard)),
            ("rx_prio3_pause", Some(Pause)),
            ("rx_prio3_pause_duration", None),
            ("np_cnp_sent", Some(Congestion)),
            ("np_ecn_marked_roce_packets", Some(Congestion)),
            ("req_cqe_error", Some(Error)),
            ("req_cqe_flush_error", None),
            ("rx_crc_errors_phy", Some(Error)),
            ("port_xmit_data", None),
            ("sent_pkts", None),
            ("ack_deferred", None),
            ("rx_write_requests", None),
        ] {
            assert_eq!(CounterKind::of(name), kind, "{name}");
        }
    }

    fn flow(phase: LoadKind, peer: &str, p99_us: u64, bytes: u64) -> FlowReport {
        FlowReport {
            phase,
            peer: peer.into(),
            op: Op::Read,
            bytes,
            gigabytes_per_second: 1.0,
            median_ns: 1000,
            p99_ns: p99_us * 1000,
            silent_seconds: 0,
            error: None,
        }
    }

    fn change(counter: &str, by: u64) -> Change {
        Change {
            port: "mlx5_0/1".into(),
            counter: counter.into(),
            kind: CounterKind::of(counter).unwrap(),
            by,
        }
    }

    fn soak() -> Soak {
        Soak {
            schema: Soak::SCHEMA,
            ports: vec!["mlx5_0/1".into()],
            software: false,
            peers: vec!["a".into(), "b".into()],
            message_bytes: 65536,
            verify: true,
            limits: SoakLimits {
                lossless: false,
                p99_factor: 20.0,
                pauses: 1000,
                silent_seconds: 3,
                share_percent: 25,
            },
            flows: vec![
                flow(LoadKind::Alone, "a", 10, 100),
                flow(LoadKind::Alone, "b", 10, 100),
                flow(LoadKind::Incast, "a", 100, 100),
                flow(LoadKind::Incast, "b", 100, 100),
            ],
            seconds: vec![Second {
                second: 7,
                phase: LoadKind::Incast,
                bytes_in: 1 << 30,
                bytes_out: 0,
                p99_ns: 100_000,
                silent_flows: 1,
                changes: Vec::new(),
            }],
            counters: Vec::new(),
            interrupted: false,
            failures: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn judged(with: impl FnOnce(&mut Soak)) -> (Vec<String>, Vec<String>) {
        let mut soak = soak();
        with(&mut soak);
        soak.evaluate();
        (soak.failures, soak.warnings)
    }

    /// Goal: every threshold has its failure or warning; below all of them a run passes.
    #[test]
    fn judgements() {
        let none = Vec::<String>::new();
        assert_eq!(judged(|_| ()), (none.clone(), none.clone()));
        let (failures, _) = judged(|soak| soak.flows[2].error = Some("retry exceeded".into()));
        assert_eq!(failures, ["incast, read a: retry exceeded"]);
        let (failures, _) = judged(|soak| soak.flows[3].silent_seconds = 4);
        assert_eq!(failures, ["incast, read b: no message completed for 4 s"]);
        let (failures, _) = judged(|soak| soak.interrupted = true);
        assert_eq!(failures, ["interrupted"]);
        let (failures, warnings) = judged(|soak| soak.flows[2].p99_ns = 201_000);
        assert_eq!(failures, none);
        assert!(warnings[0].contains("p99 is 20 times"), "{warnings:?}");
        let (_, warnings) = judged(|soak| soak.flows[2].bytes = 10);
        assert_eq!(warnings, ["incast, a: 18 % of the mean of the peers"]);
        let storm = |soak: &mut Soak| {
            soak.seconds[0].changes = vec![change("rx_prio3_pause", 1001)];
            soak.counters = soak.seconds[0].changes.clone();
        };
        let (failures, warnings) = judged(storm);
        assert_eq!(failures, none);
        assert_eq!(
            warnings,
            ["more than 1000 pause frames in 1 second, first in second 7"]
        );
    }

    /// Goal: losses warn, and fail where the network is to lose nothing; congestion does neither.
    #[test]
    fn losses() {
        let lost = |soak: &mut Soak| {
            soak.counters = vec![change("out_of_sequence", 3), change("np_cnp_sent", 9)];
            soak.seconds[0].changes = soak.counters.clone();
        };
        let said =
            "out of sequence counters grew, first in second 7: mlx5_0/1 out_of_sequence by 3";
        let (failures, warnings) = judged(lost);
        assert!(failures.is_empty());
        assert_eq!(warnings, [said]);
        let (failures, warnings) = judged(|soak| {
            lost(soak);
            soak.limits.lossless = true;
        });
        assert!(warnings.is_empty());
        assert_eq!(failures, [said]);
    }

    #[test]
    fn the_report_has_everything() {
        let mut soak = soak();
        soak.counters = vec![change("out_of_sequence", 3)];
        soak.seconds[0].changes = soak.counters.clone();
        soak.evaluate();
        let text = soak.text();
        for part in [
            "RDMA soak test by mlx5_0/1: 2 peers",
            "messages of 64.0 KiB, every byte compared",
            "    7 s  incast           in      1.0 GiB/s",
            "1 silent flow  out_of_sequence +3",
            "mlx5_0/1 out_of_sequence: +3 (out of sequence)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.ends_with("\npassed with 1 warning"), "{text}");
    }
}
