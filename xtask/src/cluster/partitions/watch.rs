//! Asks each daemon over its socket, which no partition cuts, whether it serves the volume and has
//! a good lease.

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
/// Two answers that are further apart say nothing about the time between them: in it, a node can
/// lose a volume and take it again.
const CONTINUOUS: Duration = Duration::from_secs(1);

/// A call of one daemon.
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

/// An answer: what was true at one moment between `begin` and `end`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) begin: Instant,
    pub(super) end: Instant,
    /// The node serves the volume, and its lease is good.
    pub(super) is_holder: bool,
}

/// Answers of one daemon, until the watch ends.
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
                // A daemon that does not answer is missing in the samples.
                if let Ok(answer) = ask(&socket, "metrics_get", &json!({ "format": "text" })) {
                    samples.push(Sample {
                        begin,
                        end: Instant::now(),
                        is_holder: is_holder(answer.as_str().unwrap_or_default()),
                    });
                }
                std::thread::sleep(PACE);
            }
            samples
        });
        Self { node, ends, thread }
    }

    pub(super) fn end(self) -> Result<(&'static str, Vec<Sample>)> {
        self.ends.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(samples) => Ok((self.node, samples)),
            Err(_) => bail!("the thread that watches node {} panicked", self.node),
        }
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

/// A moment at which two nodes were holders with good leases.
pub(super) fn two_holders(nodes: &[(&'static str, Vec<Sample>)]) -> Option<String> {
    // Between two answers in sequence, a node was the holder for all of the time.
    let claims = |samples: &[Sample]| -> Vec<(Instant, Instant)> {
        let pairs = samples.windows(2);
        let pairs = pairs.filter(|pair| {
            pair[0].is_holder && pair[1].is_holder && pair[1].end - pair[0].begin < CONTINUOUS
        });
        pairs.map(|pair| (pair[0].end, pair[1].begin)).collect()
    };
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

/// The longest time without an answer.
pub(super) fn longest_silence(samples: &[Sample], from: Instant, to: Instant) -> Duration {
    let mut last = from;
    let mut longest = Duration::ZERO;
    for sample in samples {
        longest = longest.max(sample.end.saturating_duration_since(last));
        last = sample.end;
    }
    longest.max(to.saturating_duration_since(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(start: Instant, of: &[(u64, bool)]) -> Vec<Sample> {
        let at = |ms| start + Duration::from_millis(ms);
        let of = of.iter().map(|(ms, is_holder)| Sample {
            begin: at(*ms),
            end: at(*ms + 10),
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
    }
}
