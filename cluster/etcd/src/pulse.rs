//! The time of the last message from an etcd member, on any of the watch streams that share its
//! connection. One stream requests progress for all. Each observed node has a stream, and a request
//! on each stream every second would be most of the load of etcd.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Silence of a member after which one of its watches asks for progress; after twice that, each
/// one asks.
const QUESTION: Duration = Duration::from_secs(1);
/// Silence of a member after which all its watches open their streams again.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);
/// Silence of one stream after which it requests progress, although other streams hear the member:
/// it may be broken alone.
const OWN_QUESTION: Duration = Duration::from_secs(10);
/// Silence of one stream after which it is opened again, although others hear the member.
const OWN_SILENCE: Duration = Duration::from_secs(15);

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

    fn hears(&self, now: Instant) {
        self.heard.fetch_max(self.millis(now), Ordering::Relaxed);
    }

    /// The time of the last message on any stream. `own`: that of the calling stream.
    fn heard(&self, own: Instant) -> Instant {
        self.instant(self.heard.load(Ordering::Relaxed)).max(own)
    }

    /// The time of the next question. `own`: as for [`Pulse::heard`].
    fn question(&self, own: Instant) -> Instant {
        let asked = self.instant(self.asked.load(Ordering::Relaxed));
        self.heard(own).max(asked) + QUESTION
    }

    /// True if a question is due and no other stream asks: the calling stream must ask now.
    fn takes_question(&self, own: Instant, now: Instant) -> bool {
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

/// When one stream heard its member, and when it asked.
#[derive(Debug)]
pub(crate) struct StreamTimes {
    heard: Instant,
    asked: Instant,
}

impl StreamTimes {
    /// The times of a stream that was opened `now`.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            heard: now,
            asked: now,
        }
    }

    /// Notes an answer.
    pub(crate) fn heard(&mut self, pulse: &Pulse, now: Instant) {
        self.heard = now;
        pulse.hears(now);
    }

    /// The time at which the stream may have to ask.
    pub(crate) fn question(&self, pulse: &Pulse) -> Instant {
        let own = self.own_question(pulse);
        if self.is_free() {
            own.min(pulse.question(self.heard))
        } else {
            own
        }
    }

    /// False: the stream has a question without an answer, and leaves the next one to the others.
    fn is_free(&self) -> bool {
        self.asked <= self.heard
    }

    /// True if the stream must ask now, which this notes.
    pub(crate) fn asks(&mut self, pulse: &Pulse, now: Instant) -> bool {
        let asks = now >= self.own_question(pulse)
            || (self.is_free() && pulse.takes_question(self.heard, now));
        if asks {
            self.asked = now;
        }
        asks
    }

    /// The time at which this stream asks, whatever the others do: after [`OWN_QUESTION`], and
    /// once when the member has not answered another stream. etcd gives no answer on a stream
    /// whose watch has not caught up, or begins after the last change.
    fn own_question(&self, pulse: &Pulse) -> Instant {
        let own = self.heard.max(self.asked) + OWN_QUESTION;
        let late = pulse.heard(self.heard) + 2 * QUESTION;
        if self.asked < late {
            own.min(late)
        } else {
            own
        }
    }

    /// The time from which the stream counts as broken: after [`SILENCE`] of the member, or after
    /// [`OWN_SILENCE`] of this stream.
    pub(crate) fn silent(&self, pulse: &Pulse) -> Instant {
        (pulse.heard(self.heard) + SILENCE).min(self.heard + OWN_SILENCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: two streams on which etcd gives no answer cost no other stream. Method: the first one
    /// to ask gets none; every stream asks after two seconds, and one answer serves all.
    #[test]
    fn an_answer_on_any_stream_keeps_all() {
        let pulse = Pulse::new();
        let at = |millis: u64| pulse.start + Duration::from_millis(millis);
        let mut streams: Vec<_> = (0..3).map(|_| StreamTimes::new(at(0))).collect();
        let asked = |streams: &mut Vec<StreamTimes>, now| {
            let asks = streams.iter_mut().map(|of| of.asks(&pulse, now));
            asks.filter(|asks| *asks).count()
        };
        assert_eq!(asked(&mut streams, at(999)), 0);
        assert_eq!(asked(&mut streams, at(1000)), 1);
        assert_eq!(streams[0].question(&pulse), at(2000), "once more");
        assert_eq!(asked(&mut streams, at(2000)), 3);
        assert_eq!(asked(&mut streams, at(2500)), 0);
        assert_eq!(streams[0].silent(&pulse), at(3000));
        streams[2].heard(&pulse, at(2600));
        for stream in &streams {
            assert_eq!(stream.silent(&pulse), at(5600));
        }
        assert_eq!(streams[2].question(&pulse), at(3600));
        // The only stream of a member asks twice before it leaves.
        let lone = Pulse::new();
        let at = |millis: u64| lone.start + Duration::from_millis(millis);
        let mut stream = StreamTimes::new(at(0));
        assert!(stream.asks(&lone, at(1000)) && stream.asks(&lone, at(2000)));
        assert_eq!(stream.silent(&lone), at(3000));
    }

    /// Goal: a stream that is broken alone is found, although others hear the member.
    #[test]
    fn a_stream_that_is_silent_alone_is_left() {
        let pulse = Pulse::new();
        let at = |millis: u64| pulse.start + Duration::from_millis(millis);
        let (mut broken, mut other) = (StreamTimes::new(at(0)), StreamTimes::new(at(0)));
        for second in 1..=14 {
            other.heard(&pulse, at(second * 1000 - 500));
            assert_eq!(broken.asks(&pulse, at(second * 1000)), second == 10);
        }
        assert_eq!(broken.silent(&pulse), at(15_000));
        assert!(other.silent(&pulse) > at(15_000));
    }

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
