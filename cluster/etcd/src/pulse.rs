//! The time of the last message from an etcd member, on any of the watch streams that share its
//! connection. One stream requests progress for all: with a stream for each observed node, a
//! request on each every second would be most of the load of etcd.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Silence of a member after which one of its watches asks for progress; after twice that, each
/// one asks.
pub(crate) const QUESTION: Duration = Duration::from_secs(1);

/// Times in milliseconds since `start`.
#[derive(Debug)]
pub(crate) struct Pulse {
    start: Instant,
    heard: AtomicU64,
    asked: AtomicU64,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            heard: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        }
    }

    pub(crate) fn hears(&self, now: Instant) {
        self.heard.fetch_max(self.millis(now), Ordering::Relaxed);
    }

    /// The time of the last message on any stream. `own`: that of the calling stream.
    pub(crate) fn heard(&self, own: Instant) -> Instant {
        self.instant(self.heard.load(Ordering::Relaxed)).max(own)
    }

    /// The time of the next question. `own`: as for [`Pulse::heard`].
    pub(crate) fn question(&self, own: Instant) -> Instant {
        let asked = self.instant(self.asked.load(Ordering::Relaxed));
        self.heard(own).max(asked) + QUESTION
    }

    /// True if a question is due and no other stream asks: the calling stream must ask now.
    pub(crate) fn takes_question(&self, own: Instant, now: Instant) -> bool {
        let before = self.asked.load(Ordering::Relaxed);
        let due = self.heard(own).max(self.instant(before)) + QUESTION;
        now >= due
            && self
                .asked
                .compare_exchange(
                    before,
                    self.millis(now),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    fn millis(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.start).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX)
    }

    fn instant(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: of several streams that heard nothing, one asks; an answer to it silences all; without
    /// an answer another one asks a second later.
    #[test]
    fn one_stream_asks_for_all() {
        let pulse = Pulse::new();
        let start = pulse.start;
        let at = |millis: u64| start + Duration::from_millis(millis);
        assert_eq!(pulse.question(start), at(1000));
        assert!(!pulse.takes_question(start, at(999)));
        assert!(pulse.takes_question(start, at(1000)));
        assert!(!pulse.takes_question(start, at(1000)), "it was asked");
        assert_eq!(pulse.question(start), at(2000));
        assert!(pulse.takes_question(start, at(2000)), "no answer");
        pulse.hears(at(2100));
        pulse.hears(at(2050));
        assert_eq!(pulse.heard(start), at(2100));
        assert_eq!(pulse.heard(at(2200)), at(2200), "the stream's own");
        assert!(!pulse.takes_question(start, at(3050)));
        assert!(pulse.takes_question(start, at(3100)));
    }
}
