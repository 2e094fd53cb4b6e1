//! The stalls of the machine, and those of etcd: they are subtracted from the time of a node.
//!
//! Two threads of the test process do what nodes and etcd do. One sleeps, the other writes and
//! syncs a file beside theirs. A stall is the excess of either. A round with a long stall is
//! repeated. A node that makes the machine stall is late in every round, and fails.

use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use nacre_cluster_core::BootTime;
use nacre_cluster_node::clock;
use parking_lot::Mutex;

use crate::PATIENCE;

const SLEEP: Duration = Duration::from_millis(5);
/// Pause between two syncs: they must not load the disk.
const SYNC: Duration = Duration::from_millis(20);
/// Shorter excesses are not kept: the scheduler's usual delays.
const NOISE: Duration = Duration::from_millis(10);
/// Longest stall that is subtracted: half of the strictest bar. A longer one voids the round.
const SUBTRACTED: Duration = Duration::from_millis(250);
/// Stalls that are kept: those of some minutes on a machine that stalls all the time.
const KEPT: usize = 16_384;
/// Rounds of one measurement.
pub(crate) const ROUNDS: usize = 3;

/// An interval of `CLOCK_BOOTTIME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) from: BootTime,
    pub(crate) to: BootTime,
}

impl Span {
    pub(crate) fn length(self) -> Duration {
        self.to.since(self.from)
    }

    /// Length of the part that both intervals have.
    fn shared(self, other: Self) -> Duration {
        self.to.min(other.to).since(self.from.max(other.from))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Met,
    /// Too late, and the machine stalled for long: measure again.
    Void,
    Missed,
}

pub(crate) fn verdict(length: Duration, bar: Duration, stall: Duration) -> Verdict {
    if length.saturating_sub(stall.min(SUBTRACTED)) < bar {
        Verdict::Met
    } else if stall > SUBTRACTED {
        Verdict::Void
    } else {
        Verdict::Missed
    }
}

/// The longest time that a request took inside etcd, by the warnings in its log. etcd warns from
/// 100 ms on.
pub(crate) fn longest_took(log: &str) -> Duration {
    let requests = log.lines().filter(|line| line.contains("took too long"));
    let times = requests.filter_map(|line| {
        let (_, took) = line.split_once(r#""took":""#)?;
        let (took, _) = took.split_once('"')?;
        let (number, unit) = match took.strip_suffix("ms") {
            Some(number) => (number, 1000.0),
            None => (took.strip_suffix('s')?, 1.0),
        };
        Some(Duration::from_secs_f64(number.parse::<f64>().ok()? / unit))
    });
    times.max().unwrap_or_default()
}

/// Records stalls until it is dropped.
pub(crate) struct Machine {
    stalls: Arc<Mutex<VecDeque<Span>>>,
    is_over: Arc<AtomicBool>,
    /// Each thread, with its number of acts.
    threads: Vec<(Arc<AtomicU64>, JoinHandle<()>)>,
}

impl Machine {
    /// `dir` is on the disk of etcd and of the nodes' files.
    pub(crate) fn observe(dir: &Path) -> Self {
        let mut machine = Self {
            stalls: Arc::default(),
            is_over: Arc::default(),
            threads: Vec::new(),
        };
        machine.repeat(SLEEP, || sleep(SLEEP));
        let file = std::fs::File::create(dir.join("stalls"));
        let mut file = file.expect("a file");
        machine.repeat(Duration::ZERO, move || {
            file.write_all(b"a line\n").expect("a write");
            file.sync_data().expect("a sync");
        });
        machine
    }

    /// Calls `act`, which takes `usual` on an idle machine, again and again.
    fn repeat(&mut self, usual: Duration, mut act: impl FnMut() + Send + 'static) {
        let (stalls, is_over) = (Arc::clone(&self.stalls), Arc::clone(&self.is_over));
        let acts = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&acts);
        let thread = spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let began = clock::now();
                act();
                let stall = Span {
                    from: began + usual,
                    to: clock::now(),
                };
                if stall.length() >= NOISE {
                    let mut stalls = stalls.lock();
                    if stalls.len() == KEPT {
                        stalls.pop_front();
                    }
                    stalls.push_back(stall);
                }
                counter.fetch_add(1, Ordering::Release);
                if usual.is_zero() {
                    sleep(SYNC);
                }
            }
        });
        self.threads.push((acts, thread));
    }

    /// The longest stall during `span`.
    pub(crate) fn longest_stall(&self, span: Span) -> Duration {
        // A stall that lasts is recorded at its end, and the act of this moment may be one.
        for (acts, _) in &self.threads {
            let before = acts.load(Ordering::Acquire);
            let began = clock::now();
            while acts.load(Ordering::Acquire) == before {
                assert!(
                    clock::now().since(began) < PATIENCE,
                    "the machine stands still"
                );
                sleep(SLEEP);
            }
        }
        let stalls = self.stalls.lock();
        let lengths = stalls.iter().map(|stall| stall.shared(span));
        lengths.max().unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for (_, thread) in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Only a stall during the late interval counts, and only up to a bound.
#[test]
fn stalls_are_subtracted() {
    let ms = Duration::from_millis;
    let at = |millis: u64| BootTime(millis * 1_000_000);
    let span = |from, to| Span {
        from: at(from),
        to: at(to),
    };
    assert_eq!(verdict(ms(499), ms(500), ms(0)), Verdict::Met);
    assert_eq!(verdict(ms(500), ms(500), ms(0)), Verdict::Missed);
    assert_eq!(verdict(ms(599), ms(500), ms(100)), Verdict::Met);
    assert_eq!(verdict(ms(600), ms(500), ms(100)), Verdict::Missed);
    assert_eq!(verdict(ms(750), ms(500), ms(250)), Verdict::Missed);
    assert_eq!(verdict(ms(750), ms(500), ms(251)), Verdict::Void);
    let dir = tempfile::tempdir().expect("a folder");
    let machine = Machine::observe(dir.path());
    *machine.stalls.lock() = VecDeque::from([span(1000, 1400), span(3000, 3090)]);
    assert_eq!(machine.longest_stall(span(1100, 3500)), ms(300));
    assert_eq!(machine.longest_stall(span(1400, 3500)), ms(90));
    assert_eq!(machine.longest_stall(span(1400, 2900)), ms(0));
}

#[test]
fn warnings_of_etcd() {
    let line = |took: &str| {
        format!(r#"{{"level":"warn","msg":"apply request took too long","took":"{took}"}}"#)
    };
    let log = [
        line("117.5ms"),
        line("1.25s"),
        line("nonsense"),
        String::new(),
    ]
    .join("\n");
    assert_eq!(longest_took(&log), Duration::from_millis(1250));
    assert_eq!(
        longest_took(&line("604.5ms")),
        Duration::from_micros(604_500)
    );
    assert_eq!(longest_took("nothing"), Duration::ZERO);
}
