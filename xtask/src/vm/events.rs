//! Events that the guest reports while it runs tests. It appends one line per event to
//! `OUT/results`, and the host reads them as they arrive:
//! ```text
//! begin <name> <limit in seconds>
//! end <name> pass|fail|skip <seconds>
//! dirty <name>            the guest could not be cleaned: boot another one for the rest
//! done                    nothing is left to run
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Time beyond a test's own limit before the host stops waiting for the guest to end it.
const GRACE: Duration = Duration::from_secs(90);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Pass,
    Fail,
    Skip,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Event {
    Begin {
        name: String,
        limit: Duration,
    },
    End {
        name: String,
        verdict: Verdict,
        took: f64,
    },
    Dirty,
    Done,
}

fn parse(line: &str) -> Result<Event> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let event = match *words.as_slice() {
        ["begin", name, limit] => Event::Begin {
            name: name.to_owned(),
            limit: Duration::from_secs(limit.parse()?),
        },
        ["end", name, verdict, took] => Event::End {
            name: name.to_owned(),
            verdict: match verdict {
                "pass" => Verdict::Pass,
                "skip" => Verdict::Skip,
                "fail" => Verdict::Fail,
                other => bail!("a verdict that is none: {other}"),
            },
            took: took.parse()?,
        },
        ["dirty", _] => Event::Dirty,
        ["done"] => Event::Done,
        _ => bail!("no event: {line:?}"),
    };
    Ok(event)
}

/// The running test, and the deadline for the guest's next event.
pub(super) struct Watch {
    pub(super) begun: Option<String>,
    pub(super) deadline: Instant,
}

impl Watch {
    pub(super) fn apply(&mut self, event: &Event) {
        match event {
            Event::Begin { name, limit } => {
                self.begun = Some(name.clone());
                self.deadline = Instant::now() + *limit + GRACE;
            }
            Event::End { .. } => {
                self.begun = None;
                self.deadline = Instant::now() + GRACE;
            }
            // The guest is about to stop.
            Event::Dirty | Event::Done => self.deadline = Instant::now() + GRACE,
        }
    }
}

/// A growing file, read by whole lines.
pub(super) struct Events {
    path: PathBuf,
    seen: usize,
}

impl Events {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, seen: 0 }
    }

    pub(super) fn read(&mut self) -> Result<Vec<Event>> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(error).with_context(|| format!("reading {}", self.path.display()));
            }
        };
        let fresh = bytes.get(self.seen..).unwrap_or_default();
        let whole = fresh
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |at| at + 1);
        self.seen += whole;
        String::from_utf8_lossy(&fresh[..whole])
            .lines()
            .map(parse)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_by_whole_lines_and_once() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let path = dir.join("results");
        let mut events = Events::new(path.clone());
        assert!(events.read().unwrap().is_empty());
        std::fs::write(&path, "begin connect 60\nend conn").unwrap();
        let begun = Event::Begin {
            name: "connect".into(),
            limit: Duration::from_secs(60),
        };
        assert_eq!(events.read().unwrap(), [begun]);
        std::fs::write(&path, "begin connect 60\nend connect pass 2.5\n").unwrap();
        let ended = Event::End {
            name: "connect".into(),
            verdict: Verdict::Pass,
            took: 2.5,
        };
        assert_eq!(events.read().unwrap(), [ended]);
        assert!(events.read().unwrap().is_empty());
    }

    #[test]
    fn an_unknown_line_is_refused() {
        for line in ["", "begin x", "end x maybe 1", "end x pass long", "hello"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_running_test_is_recorded_until_it_ends() {
        let mut watch = Watch {
            begun: None,
            deadline: Instant::now(),
        };
        watch.apply(&parse("begin fio 30").unwrap());
        assert_eq!(watch.begun.as_deref(), Some("fio"));
        watch.apply(&parse("end fio fail 3").unwrap());
        assert_eq!(watch.begun, None);
    }
}
