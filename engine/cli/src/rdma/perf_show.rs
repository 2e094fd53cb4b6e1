//! Prints the results of `nacre rdma perf`.

use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use nacre_transport_rdma_perf::wire::SessionParameters;
use nacre_transport_rdma_perf::{LatencyOf, Progress, Report, ServerEvent};
use serde_json::{Value, json};

use crate::{Failure, output};
use nacre_engine_doctor::System;

/// Device, port and GID of an address, as the kernel shows them.
pub(super) fn gid_of(system: &System, ip: IpAddr) -> Option<(String, u16, String)> {
    let ip = ip.to_canonical();
    system.fabric.ports().find_map(|(device, port)| {
        let gid = port
            .gids
            .iter()
            .find(|gid| gid.ip == Some(ip) && port.uses(gid))?;
        Some((
            format!("{}/{}", device.name, port.num),
            gid.index,
            gid.kind.to_string(),
        ))
    })
}

pub(super) fn listening(
    system: &System,
    addresses: &[SocketAddr],
    json: bool,
) -> Result<(), Failure> {
    if json {
        let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        return output::line(&json!({ "event": "listening", "addresses": addresses }).to_string());
    }
    for address in addresses {
        let by = match gid_of(system, address.ip()) {
            Some((port, index, kind)) => format!(" by {port}, GID {index} ({kind})"),
            None => String::new(),
        };
        output::line(&format!("listening on {address}{by}"))?;
    }
    Ok(())
}

pub(super) fn happened(happened: &ServerEvent, json: bool) -> Result<(), Failure> {
    if json {
        output::line(&event(happened).to_string())
    } else {
        output::line(&sentence(happened))
    }
}

pub(super) fn event(happened: &ServerEvent) -> Value {
    let test = |terms: &SessionParameters| {
        json!({
            "op": terms.op,
            "measure": terms.measure,
            "queue_pairs": terms.queue_pairs,
            "depth": terms.depth,
            "verify": terms.verify,
            "max_size": terms.message_bytes,
        })
    };
    match happened {
        ServerEvent::Began { peer, terms } => {
            json!({ "event": "began", "peer": peer.to_string(), "test": test(terms) })
        }
        ServerEvent::Ended {
            peer,
            terms,
            outcome,
        } => {
            let mut event =
                json!({ "event": "ended", "peer": peer.to_string(), "test": test(terms) });
            match outcome {
                Ok(served) => {
                    event["messages"] = served.messages.into();
                    event["bytes"] = served.bytes.into();
                }
                Err(error) => event["error"] = error.to_string().into(),
            }
            event
        }
        ServerEvent::Refused { peer, reject, why } => json!({
            "event": "refused",
            "peer": peer.to_string(),
            "reason": reject.to_string(),
            "why": why.as_ref().map(|why| why.to_string()),
        }),
    }
}

pub(super) fn sentence(happened: &ServerEvent) -> String {
    match happened {
        ServerEvent::Began { peer, terms } => format!(
            "{peer}: {}, {}, {}, messages of at most {} bytes{}",
            terms.op,
            terms.measure,
            queue_pairs(terms.queue_pairs, terms.depth),
            terms.message_bytes,
            if terms.verify {
                ", every byte compared"
            } else {
                ""
            }
        ),
        ServerEvent::Ended {
            peer,
            outcome: Ok(served),
            ..
        } => format!(
            "{peer}: done: {} messages, {}",
            served.messages,
            output::bytes(served.bytes)
        ),
        ServerEvent::Ended {
            peer,
            outcome: Err(error),
            ..
        } => format!("{peer}: failed: {error}"),
        ServerEvent::Refused { peer, reject, why } => {
            let why = why
                .as_ref()
                .map(|why| format!(": {why}"))
                .unwrap_or_default();
            format!("{peer}: refused: {reject}{why}")
        }
    }
}

fn queue_pairs(count: u16, depth: u16) -> String {
    let pairs = if count == 1 {
        "queue pair"
    } else {
        "queue pairs"
    };
    format!("{count} {pairs} of depth {depth}")
}

/// Returns the report as JSON, with index and type of the GID in use: the library does not know
/// the index.
pub(super) fn described(system: &System, report: &Report) -> Value {
    let mut value = serde_json::to_value(report).expect("a report serialises");
    let gid = report.local.parse().ok().and_then(|ip| gid_of(system, ip));
    if let Some((_, index, kind)) = gid {
        value["gid_index"] = index.into();
        value["gid_type"] = kind.into();
    }
    value
}

pub(super) fn report(system: &System, report: &Report, json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&described(system, report));
    }
    for line in head(system, report) {
        output::line(&line)?;
    }
    output::table(
        &[
            "bytes",
            "messages",
            "GB/s",
            "messages/s",
            "min us",
            "median us",
            "p99 us",
            "p99.9 us",
            "max us",
        ],
        rows(report),
    )
}

pub(super) fn head(system: &System, report: &Report) -> Vec<String> {
    let gid = report.local.parse().ok().and_then(|ip| gid_of(system, ip));
    let gid = gid
        .map(|(_, index, kind)| format!(", GID {index} ({kind})"))
        .unwrap_or_default();
    let mut lines = vec![
        format!(
            "{}, {}: {} by {}/{}{gid} to {}, {}{}",
            report.op,
            report.measure,
            report.local,
            report.device,
            report.port,
            report.server,
            queue_pairs(report.queue_pairs, report.depth),
            if report.verify {
                ", every byte compared"
            } else {
                ""
            }
        ),
        match report.results.first().map(|result| result.latency_of) {
            Some(LatencyOf::HalfRoundTrip) => {
                "latency: half of the time from posting a message to the arrival of its echo".into()
            }
            _ => "latency: from posting a request to its completion".into(),
        },
    ];
    if report.software {
        lines.push("the kernel emulates this device: the figures do not describe hardware".into());
    }
    if report.interrupted {
        lines.push("interrupted: results so far".into());
    }
    lines
}

pub(super) fn rows(report: &Report) -> Vec<Vec<String>> {
    let micros = |nanos: u64| format!("{:.2}", nanos as f64 / 1000.0);
    let row = |result: &nacre_transport_rdma_perf::SizeReport| {
        let latency = &result.latency_ns;
        vec![
            result.size.to_string(),
            result.messages.to_string(),
            format!("{:.3}", result.gigabytes_per_second),
            format!("{:.0}", result.messages_per_second),
            micros(latency.min),
            micros(latency.median),
            micros(latency.p99),
            micros(latency.p999),
            micros(latency.max),
        ]
    };
    report.results.iter().map(row).collect()
}

/// One line on the terminal that shows the progress.
pub(super) struct ProgressLine(ProgressBar);

impl ProgressLine {
    pub(super) fn new(hidden: bool) -> Self {
        let bar = if hidden || !std::io::stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            ProgressBar::new_spinner()
        };
        let style = ProgressStyle::with_template("{msg}");
        bar.set_style(style.expect("the template is right"));
        Self(bar)
    }

    pub(super) fn show(&self, progress: &Progress) {
        let seconds = progress.elapsed.max(Duration::from_millis(1)).as_secs_f64();
        let rate = progress.messages as f64 * f64::from(progress.size) / seconds;
        self.0.set_message(format!(
            "{} bytes: {} messages, {}/s",
            progress.size,
            progress.messages,
            output::bytes(rate as u64)
        ));
    }

    pub(super) fn clear(&self) {
        self.0.finish_and_clear();
    }
}
