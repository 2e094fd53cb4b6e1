//! `cargo xtask cluster --partitions`: cuts links of nodes for 10 s, and heals them.
//!
//! [`split`] has the 31 partitions. During each, two loads run. `nacre perf --verify` reads and
//! writes through the multipath of a host, which shows the longest I/O. [`load`] reads and writes
//! on each node, which shows stale answers of any node. [`watch`] looks for two holders.

mod history;
pub(super) mod load;
mod nvme;
mod split;
mod watch;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use self::load::Report;
use self::split::Split;
use self::watch::Watch;
use super::demo::{Demo, HOST, NODES, call, on, set_ports, until};
use super::seconds;

/// Load before the cut: `nacre perf` first fills its range, and measures after that.
const BEFORE: Duration = Duration::from_secs(4);
const RANGE: &str = "1m";
const CUT: Duration = Duration::from_secs(10);
/// Load after the cut, in seconds.
const AFTER: u64 = 5;
/// The bars: from healing until each node has a good lease and all replicas are in sync; and how
/// long a daemon may be silent to its operator. That is less than a cut, and room for a machine
/// that is too busy for several seconds.
const HEALTHY: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(8);
/// How long before the end the last write may be: long after the cut, writes must go on.
const IDLE: Duration = Duration::from_secs(2);
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// What one partition did.
struct Outcome {
    split: Split,
    holder: &'static str,
    next: &'static str,
    /// Of the host's multipath.
    longest: Duration,
    /// Between answers of writes, on whatever path.
    pause: Duration,
    healthy: Duration,
    ios: u64,
    findings: Vec<String>,
}

/// A list of partitions as text, which may be wrong.
pub(super) fn checked(list: &str) -> Result<String, String> {
    split::parse(list).map(|_| list.to_owned())
}

/// Runs the partitions one after the other. False: a bar was missed.
pub(super) fn run(demo: &Demo, nqn: &str, list: &str, rate: u64) -> Result<bool> {
    let splits = split::parse(list).map_err(anyhow::Error::msg)?;
    let mut outcomes = Vec::new();
    for split in splits {
        let outcome = round(demo, nqn, split, rate)
            .with_context(|| format!("partition {}: {split}", split.number()))?;
        for finding in &outcome.findings {
            println!("failed: {finding}");
        }
        outcomes.push(outcome);
    }
    println!(
        "\n{:>2}  {:<28}{:<8}{:>12}{:>14}{:>14}{:>10}  wrong",
        "", "partition", "holder", "longest I/O", "writes pause", "healthy after", "checked"
    );
    for outcome in &outcomes {
        println!(
            "{:>2}  {:<28}{:<8}{:>12}{:>14}{:>14}{:>10}  {}",
            outcome.split.number(),
            outcome.split.to_string(),
            format!("{}, {}", outcome.holder, outcome.next),
            seconds(outcome.longest),
            seconds(outcome.pause),
            seconds(outcome.healthy),
            outcome.ios,
            outcome.findings.len(),
        );
    }
    Ok(outcomes.iter().all(|outcome| outcome.findings.is_empty()))
}

fn round(demo: &Demo, nqn: &str, split: Split, rate: u64) -> Result<Outcome> {
    wait_until_healthy(demo)?;
    let holder = demo.wait_until_healthy("a")?;
    let links = split.cuts();
    let names: Vec<String> = links
        .iter()
        .map(|(node, net)| format!("{node}-{}", net.name()))
        .collect();
    println!(
        "\npartition {}: {split}; node {holder} serves the volume; cut: {}",
        split.number(),
        names.join(" ")
    );
    let mut findings = Vec::new();
    let start = Instant::now();
    let watches = NODES.map(|node| Watch::start(node, demo.socket(node)));
    let time = (BEFORE + CUT).as_secs() + AFTER;
    let _ = std::fs::remove_file(demo.dir.join("history.log"));
    let loaded = Instant::now();
    let program = std::env::current_exe().context("finding this program")?;
    let mut history = on(HOST, &program);
    let mut history = demo.spawn(history.args(["cluster", "--history", nqn]), "history")?;
    let mut perf = demo.load("randrw", RANGE, rate, time)?;
    std::thread::sleep(BEFORE);
    let cut = Instant::now();
    set_ports(&demo.dir, &links, "down")?;
    std::thread::sleep(CUT);
    set_ports(&demo.dir, &links, "up")?;
    let healed = Instant::now();
    wait_until_healthy(demo)?;
    let healthy = healed.elapsed();
    if healthy > HEALTHY {
        findings.push(format!("healthy only {} after healing", seconds(healthy)));
    }
    let end = demo.end_of_load(&mut perf, time);
    let (longest, wrong) = end.unwrap_or_else(|error| {
        findings.push(format!("{error:#}"));
        (Duration::ZERO, 0)
    });
    if wrong > 0 {
        findings.push(format!("{wrong} blocks have wrong contents"));
    }
    history.terminate();
    let end = history.wait(STOP_LIMIT)?;
    let report = std::fs::read_to_string(demo.dir.join("history.log"))?;
    if !end.success() {
        bail!("the load on each node failed ({end}):\n{report}");
    }
    let text = report;
    let report: Report = serde_json::from_str(&text)
        .with_context(|| format!("the load on each node gave no report:\n{text}"))?;
    findings.extend(judge(&report, cut - loaded));
    let (samples, end) = Watch::end_all(watches)?;
    findings.extend(watch::unseen_holder(&samples, holder, cut));
    findings.extend(watch::two_holders(&samples));
    for (node, samples) in &samples {
        let silence = watch::longest_silence(samples, start, end);
        if silence > SILENCE {
            let silence = seconds(silence);
            findings.push(format!("the daemon of {node} gave no answer for {silence}"));
        }
    }
    let next = demo.wait_until_healthy("a")?;
    let pause = Duration::from_millis(report.longest_pause_ms);
    println!(
        "longest I/O {}, writes paused for {}; healthy {} after healing; node {next} serves; {text}",
        seconds(longest),
        seconds(pause),
        seconds(healthy),
    );
    Ok(Outcome {
        split,
        holder,
        next,
        longest,
        pause,
        healthy,
        ios: report.writes + report.reads,
        findings,
    })
}

/// Findings of the load on each node. `cut`: from its start to the cut.
fn judge(report: &Report, cut: Duration) -> Vec<String> {
    let mut findings = report.findings.clone();
    for node in NODES {
        let of_node = report.nodes.get(node);
        let first = of_node.and_then(|of_node| of_node.first_ms);
        if first.is_none_or(|first| Duration::from_millis(first) > cut) {
            let lost = of_node.and_then(|of_node| of_node.lost.as_deref());
            let lost = lost.unwrap_or("connected");
            findings.push(format!(
                "node {node} answered no I/O before the cut ({lost})"
            ));
        }
    }
    for (count, what) in [(report.writes, "write"), (report.reads, "read")] {
        if count == 0 {
            findings.push(format!("no {what} succeeded on any node"));
        }
    }
    let idle = Duration::from_millis(report.idle_ms);
    if idle > IDLE {
        let idle = seconds(idle);
        findings.push(format!("no write succeeded in the last {idle}"));
    }
    findings
}

/// Waits until each node has a good lease, and sees a volume with all replicas in sync.
fn wait_until_healthy(demo: &Demo) -> Result<()> {
    until(
        "each node has a lease, and all replicas are in sync",
        || {
            for node in NODES {
                let status = watch::ask(&demo.socket(node), "cluster_get_status", &Value::Null)?;
                let is_healthy = status["volumes"]["healthy"] == 1
                    && status["this_node"]["state"] == "joined"
                    && status["this_node"]["lease_is_good"] == true;
                if !is_healthy {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        },
    )
}

/// Keeps the logs of daemons and loads after a failure.
pub(super) fn keep_logs(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let mut copy = Command::new("sh");
    copy.args(["-c", "cp \"$0\"/*.log \"$1\"/"])
        .arg(from)
        .arg(to);
    call(&mut copy)?;
    println!("logs: {}", to.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::load::NodeReport;
    use super::*;

    fn good() -> Report {
        let node = NodeReport {
            answers: 1,
            first_ms: Some(100),
            ..NodeReport::default()
        };
        Report {
            writes: 1,
            reads: 1,
            nodes: NODES.map(|name| (name.to_owned(), node.clone())).into(),
            ..Report::default()
        }
    }

    /// Goal: a load that proves nothing is a finding. Method: a good report, and each one in which
    /// one thing is missing.
    #[test]
    fn a_load_must_see_each_node_and_go_on() {
        let cut = Duration::from_secs(4);
        type Change = fn(&mut Report);
        let found = |change: Change| {
            let mut report = good();
            change(&mut report);
            judge(&report, cut)
        };
        assert_eq!(found(|_| {}), Vec::<String>::new());
        let changes: [(Change, &str); 6] = [
            (|report| report.findings.push("stale".to_owned()), "stale"),
            (
                |report| drop(report.nodes.remove("b")),
                "node b answered no I/O before the cut",
            ),
            (
                |report| report.nodes.get_mut("c").unwrap().first_ms = Some(4001),
                "node c answered no I/O before the cut",
            ),
            (|report| report.writes = 0, "no write succeeded on any"),
            (|report| report.reads = 0, "no read succeeded on any"),
            (
                |report| report.idle_ms = 2001,
                "no write succeeded in the last 2.00 s",
            ),
        ];
        for (change, finding) in changes {
            let findings = found(change);
            assert!(
                matches!(findings.as_slice(), [one] if one.starts_with(finding)),
                "{finding}: {findings:?}"
            );
        }
    }
}
