//! Looks for two holders: asks each daemon repeatedly whether it serves the volume and its lease is
//! good, over the daemon's Unix socket, which no partition cuts.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const PACE: Duration = Duration::from_millis(50);
/// If two answers of a node are further apart, it may have lost the volume and taken it again in
/// between.
const CONTINUOUS: Duration = Duration::from_secs(1);

/// Calls an RPC method of one daemon.
pub(super) fn ask(socket: &Path, method: &str, params: &Value) -> Result<Value> {
    let mut stream = UnixStream::connect(socket).context("connecting to a daemon")?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut call = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if !params.is_null() {
        call["params"] = params.clone();
    }
    stream.write_all(call.to_string().as_bytes())?;
    let mut answer = serde_json::Deserializer::from_reader(&stream);
    let mut answer = Value::deserialize(&mut answer).with_context(|| format!("{method} failed"))?;
    match answer.get_mut("result") {
        Some(result) => Ok(result.take()),
        None => bail!("{method} failed: {answer}"),
    }
}

/// One answer of a daemon. It is true for some moment between `begin` and `end`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    begin: Instant,
    end: Instant,
    /// The node serves the volume, and its lease is good. `None`: no answer.
    is_holder: Option<bool>,
}

impl Sample {
    fn is_true(&self) -> bool {
        self.is_holder == Some(true)
    }
}

/// The name of a node, and the answers of its daemon in order.
pub(super) type Samples = (&'static str, Vec<Sample>);

/// A thread that asks one daemon until it is stopped.
pub(super) struct Watch {
    node: &'static str,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Watch {
    pub(super) fn start(node: &'static str, socket: PathBuf) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            while !seen.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let answer = ask(&socket, "metrics_get", &json!({ "format": "text" })).ok();
                samples.push(Sample {
                    begin,
                    end: Instant::now(),
                    is_holder: answer.map(|text| is_holder(text.as_str().unwrap_or_default())),
                });
                std::thread::sleep(PACE);
            }
            samples
        });
        Self { node, ends, thread }
    }

    /// Stops all watches. Returns the samples, and the time of the stop: the last answer of a slow
    /// daemon comes later, when the others are no longer asked.
    pub(super) fn end_all(
        watches: impl IntoIterator<Item = Self>,
    ) -> Result<(Vec<Samples>, Instant)> {
        let watches: Vec<Self> = watches.into_iter().collect();
        let end = Instant::now();
        for watch in &watches {
            watch.ends.store(true, Ordering::Relaxed);
        }
        let samples = watches.into_iter().map(|watch| match watch.thread.join() {
            Ok(samples) => Ok((watch.node, samples)),
            Err(_) => bail!("the thread that watches node {} panicked", watch.node),
        });
        Ok((samples.collect::<Result<_>>()?, end))
    }
}

fn is_holder(metrics: &str) -> bool {
    let is_one = |name: &str, labels: &[&str]| {
        metrics.lines().any(|line| {
            line.starts_with(name)
                && labels.iter().all(|label| line.contains(label))
                && line.rsplit(' ').next().and_then(|value| value.parse().ok()) == Some(1.0)
        })
    };
    let is = |state: &str| is_one("nacre_volume_state{", &["volume=\"v\"", state]);
    let serves = is("state=\"healthy\"") || is("state=\"degraded\"");
    serves && is_one("nacre_cluster_lease_good{", &[])
}

/// An error if no sample until `until` shows that the node `holder`, which is known to serve the
/// volume, does so: then [`two_holders`] would prove nothing.
pub(super) fn unseen_holder(nodes: &[Samples], holder: &str, until: Instant) -> Option<String> {
    let mut samples = nodes
        .iter()
        .filter(|(node, _)| *node == holder)
        .flat_map(|(_, samples)| samples);
    let is_seen = samples.any(|sample| sample.is_true() && sample.end <= until);
    (!is_seen).then(|| {
        format!("node {holder} served the volume before the cut, and its metrics did not say so")
    })
}

/// The intervals in which a node certainly was the holder: for each run of true answers, from the
/// end of the first sample to the begin of the last one.
fn claims(samples: &[Sample]) -> Vec<(Instant, Instant)> {
    let is_run = |one: &Sample, next: &Sample| {
        one.is_true() && next.is_true() && next.end - one.begin < CONTINUOUS
    };
    let runs = samples.chunk_by(is_run);
    runs.filter_map(|run| match run {
        [first, .., last] => Some((first.end, last.begin)),
        _ => None,
    })
    .collect()
}

/// An error if two nodes were holders with good leases at the same moment.
pub(super) fn two_holders(nodes: &[Samples]) -> Option<String> {
    for (index, (one, samples)) in nodes.iter().enumerate() {
        for (from, to) in claims(samples) {
            for (other, others) in &nodes[index + 1..] {
                let both = claims(others)
                    .into_iter()
                    .map(|claim| (claim.0.max(from), claim.1.min(to)));
                if let Some((from, to)) = both.into_iter().find(|(from, to)| from < to) {
                    let ms = (to - from).as_millis();
                    return Some(format!(
                        "{one} and {other} were holders at once, for {ms} ms"
                    ));
                }
            }
        }
    }
    None
}

/// The longest time without an answer between `from` and `to`.
pub(super) fn longest_silence(samples: &[Sample], from: Instant, to: Instant) -> Duration {
    let mut last = from;
    let mut longest = Duration::ZERO;
    for sample in samples.iter().filter(|sample| sample.is_holder.is_some()) {
        let end = sample.end.min(to);
        longest = longest.max(end.saturating_duration_since(last));
        last = end;
    }
    longest.max(to.saturating_duration_since(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(start: Instant, of: &[(u64, bool)]) -> Vec<Sample> {
        let of = of.iter().map(|(ms, is_holder)| (*ms, 10, Some(*is_holder)));
        slow_samples(start, &of.collect::<Vec<_>>())
    }

    /// Begin, time until the answer, and the answer.
    fn slow_samples(start: Instant, of: &[(u64, u64, Option<bool>)]) -> Vec<Sample> {
        let at = |ms| start + Duration::from_millis(ms);
        let of = of.iter().map(|(begin, took, is_holder)| Sample {
            begin: at(*begin),
            end: at(*begin + *took),
            is_holder: *is_holder,
        });
        of.collect()
    }

    /// Goal: two holders at one moment are found, and a change of holders is none. Method: answers
    /// that overlap, that follow each other, and that are too far apart to say so.
    #[test]
    fn two_holders_at_once_are_found() {
        let start = Instant::now();
        let a = samples(start, &[(0, true), (100, true), (200, true), (300, false)]);
        let after = samples(start, &[(0, false), (195, true), (300, true)]);
        assert_eq!(two_holders(&[("a", a.clone()), ("b", after)]), None);
        let during = samples(start, &[(50, false), (120, true), (180, true)]);
        let found = two_holders(&[("a", a.clone()), ("b", during), ("c", Vec::new())]);
        assert_eq!(
            found.as_deref(),
            Some("a and b were holders at once, for 50 ms")
        );
        let apart = samples(start, &[(0, true), (2000, true)]);
        assert_eq!(two_holders(&[("a", a), ("c", apart)]), None);
    }

    /// Goal: the time of the answers belongs to a claim, or slow daemons hide a second holder.
    /// Method: answers of 300 ms, and another holder between the begin and the end of one. A false
    /// and a failed question end the claim.
    #[test]
    fn a_claim_goes_on_during_slow_answers() {
        let start = Instant::now();
        let other = samples(start, &[(400, true), (480, true)]);
        for (middle, is_found) in [(Some(true), true), (Some(false), false), (None, false)] {
            let slow = [
                (0, 300, Some(true)),
                (350, 300, middle),
                (700, 300, Some(true)),
            ];
            let slow = slow_samples(start, &slow);
            let found = two_holders(&[("a", slow), ("b", other.clone())]);
            assert_eq!(found.is_some(), is_found, "{middle:?}: {found:?}");
        }
    }

    /// Goal: a renamed metric is found. Method: the known holder has no true answer before the cut.
    #[test]
    fn the_known_holder_must_be_seen() {
        let start = Instant::now();
        let cut = start + Duration::from_millis(500);
        let nodes = |of: &[(u64, bool)]| {
            [
                ("a", samples(start, &[(0, true)])),
                ("b", samples(start, of)),
            ]
        };
        let unseen = |of| unseen_holder(&nodes(of), "b", cut).is_some();
        assert!(!unseen(&[(0, false), (100, true)]));
        assert!(unseen(&[(0, false), (100, false)]));
        assert!(
            unseen(&[(0, false), (495, true), (600, true)]),
            "after the cut"
        );
        assert!(unseen(&[]));
    }

    /// Goal: a node is a holder if it serves the volume with a good lease.
    #[test]
    fn a_holder_serves_with_a_good_lease() {
        let metrics = |state: &str, good: u8| {
            format!(
                "nacre_volume_state{{volume=\"v\",state=\"{state}\"}} 1\n\
                 nacre_volume_state{{volume=\"v\",state=\"frozen\"}} 0\n\
                 nacre_cluster_lease_good{{cluster=\"demo\"}} {good}\n"
            )
        };
        assert!(is_holder(&metrics("healthy", 1)));
        assert!(is_holder(&metrics("degraded", 1)));
        assert!(!is_holder(&metrics("degraded", 0)));
        assert!(!is_holder(&metrics("standby", 1)));
    }

    /// Goal: silence counts also before the first answer and after the last one.
    #[test]
    fn silence_is_the_longest_time_without_an_answer() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let some = samples(start, &[(90, false), (190, true), (690, true)]);
        assert_eq!(
            longest_silence(&some, start, at(800)),
            Duration::from_millis(500)
        );
        assert_eq!(
            longest_silence(&some, start, at(1800)),
            Duration::from_millis(1100)
        );
        assert_eq!(longest_silence(&[], start, at(5)), Duration::from_millis(5));
        let failed = slow_samples(start, &[(0, 10, Some(true)), (60, 400, None)]);
        assert_eq!(
            longest_silence(&failed, start, at(500)),
            Duration::from_millis(490)
        );
        let last = slow_samples(start, &[(0, 10, Some(true)), (60, 9000, Some(true))]);
        assert_eq!(
            longest_silence(&last, start, at(100)),
            Duration::from_millis(90),
            "an answer after the end"
        );
    }

    /// Goal: a slow daemon does not make the others silent. Method: two sockets; one answers each
    /// question only after 2 s, and the watches end during one.
    #[test]
    fn the_watches_end_at_one_time() {
        let dir = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let watches = [("slow", 2000), ("quick", 0)].map(|(node, ms)| {
            let socket = dir.path().join(node);
            let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    std::thread::sleep(Duration::from_millis(ms));
                    // The watch may have gone.
                    let _ = stream.unwrap().write_all(b"{\"result\": \"\"}");
                }
            });
            Watch::start(node, socket)
        });
        std::thread::sleep(Duration::from_millis(300));
        let (samples, end) = Watch::end_all(watches).unwrap();
        assert!(start.elapsed() > Duration::from_secs(2), "the slow answer");
        let (node, quick) = &samples[1];
        assert_eq!(*node, "quick");
        let silence = longest_silence(quick, start, end);
        assert!(silence < Duration::from_millis(1500), "{silence:?}");
    }
}
