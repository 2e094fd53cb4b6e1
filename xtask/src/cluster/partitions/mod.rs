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
use crate::process::Group;

/// Load before the cut: `nacre perf` first fills its range, and measures after that.
const BEFORE: Duration = Duration::from_secs(4);
const RANGE: &str = "1m";
const CUT: Duration = Duration::from_secs(10);
/// Load after the cut, in seconds.
const AFTER: u64 = 5;
/// Bar from healing until each node has a good lease and all replicas are in sync.
const HEALTHY: Duration = Duration::from_secs(30);
/// Bar for the silence of a daemon to its operator. It is less than a cut, and has room for a
/// machine that is too busy for several seconds.
const SILENCE: Duration = Duration::from_secs(8);
/// How long before the end the last write may be: long after the cut, writes must go on.
const IDLE: Duration = Duration::from_secs(2);
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// The result of one partition.
struct Outcome {
    split: Split,
    holder: &'static str,
    next: &'static str,
    /// The longest I/O through the host's multipath.
    longest: Duration,
    /// The longest time between answers of writes, on any path.
    pause: Duration,
    healthy: Duration,
    ios: u64,
    /// Filled in by [`rounds`].
    findings: Vec<String>,
}

/// A list of partitions as text, which may be wrong.
pub(super) fn checked(list: &str) -> Result<String, String> {
    split::parse(list).map(|_| list.to_owned())
}

/// Runs the partitions one after the other. False: a bar was missed.
pub(super) fn run(demo: &Demo, nqn: &str, list: &str, rate: u64) -> Result<bool> {
    let splits = split::parse(list).map_err(anyhow::Error::msg)?;
    let (outcomes, end) = rounds(splits, |split, findings| {
        round(demo, nqn, split, rate, findings)
    });
    print_table(&outcomes);
    end?;
    Ok(outcomes.iter().all(|outcome| outcome.findings.is_empty()))
}

/// Runs one round after the other, until one cannot go on. Its findings are printed too.
fn rounds(
    splits: Vec<Split>,
    mut round: impl FnMut(Split, &mut Vec<String>) -> Result<Outcome>,
) -> (Vec<Outcome>, Result<()>) {
    let mut outcomes = Vec::new();
    for split in splits {
        let mut findings = Vec::new();
        let end = round(split, &mut findings);
        for finding in &findings {
            println!("failed: {finding}");
        }
        match end {
            Ok(outcome) => outcomes.push(Outcome {
                findings,
                ..outcome
            }),
            Err(error) => {
                let error = error.context(format!("partition {}: {split}", split.number()));
                return (outcomes, Err(error));
            }
        }
    }
    (outcomes, Ok(()))
}

fn print_table(outcomes: &[Outcome]) {
    println!(
        "\n{:>2}  {:<28}{:<8}{:>12}{:>14}{:>14}{:>10}  wrong",
        "", "partition", "holder", "longest I/O", "writes pause", "healthy after", "checked"
    );
    for outcome in outcomes {
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
}

/// Runs one partition: both loads, the cut, and the return to health. Adds missed bars to
/// `findings`. An error: the next partition cannot begin, or the observers failed.
fn round(
    demo: &Demo,
    nqn: &str,
    split: Split,
    rate: u64,
    findings: &mut Vec<String>,
) -> Result<Outcome> {
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
    // Its error comes last: the findings of the loads may have the cause.
    let is_healthy = wait_until_healthy(demo);
    let healthy = healed.elapsed();
    if is_healthy.is_ok() && healthy > HEALTHY {
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
    let report = end_of_history(demo, &mut history);
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
    let (report, text) = report?;
    findings.extend(judge(&report, cut - loaded));
    let pause = Duration::from_millis(report.longest_pause_ms);
    println!(
        "longest I/O {}, writes paused for {}; healthy {} after healing; {text}",
        seconds(longest),
        seconds(pause),
        seconds(healthy),
    );
    is_healthy?;
    let next = demo.wait_until_healthy("a")?;
    Ok(Outcome {
        split,
        holder,
        next,
        longest,
        pause,
        healthy,
        ios: report.writes + report.reads,
        findings: Vec::new(),
    })
}

/// Ends the load on each node: its report, also as text.
fn end_of_history(demo: &Demo, history: &mut Group) -> Result<(Report, String)> {
    history.terminate();
    let end = history.wait(STOP_LIMIT)?;
    let text = std::fs::read_to_string(demo.dir.join("history.log"))?;
    if !end.success() {
        bail!("the load on each node failed ({end}):\n{text}");
    }
    let report = serde_json::from_str(&text)
        .with_context(|| format!("the load on each node gave no report:\n{text}"))?;
    Ok((report, text))
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

    /// Goal: an error does not lose the results before it. Method: the third of three rounds fails.
    #[test]
    fn earlier_outcomes_outlive_an_error() {
        let splits = split::parse("1,2,3").unwrap();
        let (outcomes, end) = rounds(splits, |split, findings| {
            findings.push("wrong".to_owned());
            if split.number() == 3 {
                bail!("never healthy");
            }
            Ok(Outcome {
                split,
                holder: "a",
                next: "b",
                longest: Duration::ZERO,
                pause: Duration::ZERO,
                healthy: Duration::ZERO,
                ios: 1,
                findings: Vec::new(),
            })
        });
        let numbers: Vec<u8> = outcomes.iter().map(|one| one.split.number()).collect();
        assert_eq!(numbers, [1, 2]);
        assert_eq!(outcomes[1].findings, ["wrong"]);
        let error = format!("{:#}", end.unwrap_err());
        assert_eq!(error, "partition 3: a b | c etcd data hosts: never healthy");
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
