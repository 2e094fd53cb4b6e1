//! The choice between two transports to a controller, and when to try the better one again.
//!
//! ```text
//!            its attempts are used up                 a probe succeeded
//! Preferred ────────────────────────▶ Fallback ────────────────────────▶ Preferred (on trial)
//!     ▲                                  │ its attempts are used up, too       │ fails
//!     └──────────────────────────────────┘◀────────────────────────────────────┘
//! ```
//!
//! Only decisions: the caller connects, reports each event with its time, and asks for the next
//! step. A connection counts as good once it lasted [`PathOptions::settled`]; an earlier end is a
//! failed attempt. So a network that carries handshakes and no data does not keep a host from its
//! fallback.

use std::time::Duration;

use nacre_reactor::Nanos;

use crate::transport::TransportType;

/// Which transports, and with how much patience.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathOptions {
    pub preferred: TransportType,
    /// Used while the preferred one does not work; `None`: nothing else will do.
    pub fallback: Option<TransportType>,
    /// Consecutive attempts over one transport before the other has its turn. 0: retry the
    /// preferred one without end, unless the target refuses it permanently.
    pub connection_retries: u32,
    pub retry_delay: Duration,
    /// Time from a fallback to the first probe of the preferred transport; doubles with each failed
    /// one, up to `reprobe_max`. Zero: no probes.
    pub reprobe: Duration,
    pub reprobe_max: Duration,
    /// A connection that lasted so long was good.
    pub settled: Duration,
    /// Why the preferred transport need not be tried at first, if so.
    pub unusable: Option<String>,
}

impl PathOptions {
    /// `preferred` with a fallback or without, and the usual patience.
    pub fn new(preferred: TransportType, fallback: Option<TransportType>) -> PathOptions {
        PathOptions {
            preferred,
            fallback: fallback.filter(|fallback| *fallback != preferred),
            connection_retries: 3,
            retry_delay: Duration::from_secs(1),
            reprobe: Duration::from_secs(60),
            reprobe_max: Duration::from_secs(600),
            settled: Duration::from_secs(10),
            unusable: None,
        }
    }
}

/// What became of a host's transports since it began.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// Attempts to connect that failed, and connections that broke before they were good.
    pub failed_attempts: u64,
    pub fallbacks: u64,
    pub returns: u64,
    pub failed_probes: u64,
    /// Cause of the latest fallback.
    pub fallback_cause: Option<String>,
}

/// Delays between rounds over both transports grow to this.
const ROUND_DELAY_MAX: Duration = Duration::from_secs(30);

/// The state of the choice.
#[derive(Debug)]
pub struct Paths {
    options: PathOptions,
    on_fallback: bool,
    /// Attempts that failed in a row by the transport in use.
    failures: u32,
    connected_at: Option<Nanos>,
    /// Moved to the preferred transport because of a probe, and not connected by it yet.
    on_trial: bool,
    /// The fallback was counted, and the return was not yet.
    fallen: bool,
    /// Times that both transports were used up since the last connection.
    rounds: u32,
    probe_at: Option<Nanos>,
    probe_delay: Duration,
    /// The latest failures of the preferred transport and of the fallback, and whether they were
    /// permanent.
    causes: [Option<(String, bool)>; 2],
    latest: Option<(TransportType, String)>,
    counts: PathCounts,
}

impl Paths {
    pub fn new(options: PathOptions) -> Paths {
        let mut paths = Paths {
            on_fallback: false,
            failures: 0,
            connected_at: None,
            on_trial: false,
            fallen: false,
            rounds: 0,
            probe_at: None,
            probe_delay: options.reprobe,
            causes: [None, None],
            latest: None,
            counts: PathCounts::default(),
            options,
        };
        if let (Some(why), Some(_)) = (paths.options.unusable.take(), paths.options.fallback) {
            paths.causes[0] = Some((why, false));
            paths.fall_back();
        }
        paths
    }

    pub fn options(&self) -> &PathOptions {
        &self.options
    }

    pub fn counts(&self) -> &PathCounts {
        &self.counts
    }

    /// The transport to connect by now, or that is connected.
    pub fn current(&self) -> TransportType {
        match self.options.fallback {
            Some(fallback) if self.on_fallback => fallback,
            _ => self.options.preferred,
        }
    }

    /// Whether another transport may take over when the one in use does not work.
    pub fn can_fall_back(&self) -> bool {
        self.options.fallback.is_some() && !self.on_fallback
    }

    /// Each transport has failed as often as it may, since there was a connection.
    pub fn all_failed(&self) -> bool {
        let retries = self.options.connection_retries;
        match self.options.fallback {
            Some(_) => self.rounds > 0,
            None => retries > 0 && self.failures >= retries,
        }
    }

    /// The latest failure of each transport that had one, in words.
    pub fn causes(&self) -> String {
        let kinds = [Some(self.options.preferred), self.options.fallback];
        let told = kinds.iter().zip(&self.causes);
        let told = told.filter_map(|(kind, cause)| {
            let (why, _) = cause.as_ref()?;
            Some(format!("{}: {why}", (*kind)?))
        });
        told.collect::<Vec<_>>().join("; ")
    }

    /// The latest attempt that failed.
    pub fn latest_failure(&self) -> Option<&(TransportType, String)> {
        self.latest.as_ref()
    }

    /// The controller is live by the current transport.
    pub fn connected(&mut self, now: Nanos) {
        self.connected_at = Some(now);
        self.rounds = 0;
        // A target accepted this host: an earlier refusal may no longer hold.
        for (_, for_good) in self.causes.iter_mut().flatten() {
            *for_good = false;
        }
        if !self.on_fallback {
            self.on_trial = false;
            if std::mem::take(&mut self.fallen) {
                self.counts.returns += 1;
                tracing::info!(transport = %self.current(), "back on the preferred transport");
            }
        } else if !self.probe_delay.is_zero() {
            self.probe_at = Some(now + self.probe_delay);
        }
    }

    /// An attempt failed, or the connection was lost. The delay before the next attempt, by
    /// [`Paths::current`]; `None`: the target has refused every transport for good.
    pub fn failed(&mut self, why: &str, for_good: bool, now: Nanos) -> Option<Duration> {
        self.probe_at = None;
        let lasted = self.connected_at.take().map(|since| now.since(since));
        self.causes[usize::from(self.on_fallback)] = Some((why.to_owned(), for_good));
        if lasted.is_some_and(|lasted| lasted >= self.options.settled) {
            self.failures = 0;
            if !self.on_fallback {
                self.probe_delay = self.options.reprobe;
            }
            if !for_good {
                return Some(Duration::ZERO);
            }
        }
        self.counts.failed_attempts += 1;
        self.failures = self.failures.saturating_add(1);
        let transport = self.current();
        self.latest = Some((transport, why.to_owned()));
        tracing::warn!(%transport, attempt = self.failures, why, "no connection");
        if self.options.fallback.is_none() {
            return (!for_good).then_some(self.options.retry_delay);
        }
        if std::mem::take(&mut self.on_trial) {
            self.counts.failed_probes += 1;
            self.slow_down();
            self.switch(true);
            return Some(Duration::ZERO);
        }
        let retries = self.options.connection_retries;
        let used_up = if !self.on_fallback {
            retries > 0 && self.failures >= retries
        } else {
            self.failures >= retries.max(1)
        };
        if !for_good && !used_up {
            return Some(self.options.retry_delay);
        }
        let refused = |cause: &Option<(String, bool)>| matches!(cause, Some((_, true)));
        if self.causes.iter().all(refused) {
            return None;
        }
        if !self.on_fallback {
            // One that connects and does not last is not to be gone back to that soon.
            if lasted.is_some() {
                self.slow_down();
            }
            self.fall_back();
            let again = self.rounds > 0;
            return Some(if again {
                self.options.retry_delay
            } else {
                Duration::ZERO
            });
        }
        self.rounds += 1;
        self.switch(false);
        let delay = self.options.retry_delay * 2u32.saturating_pow(self.rounds.min(16) - 1);
        Some(delay.min(ROUND_DELAY_MAX.max(self.options.retry_delay)))
    }

    /// When the preferred transport is to be probed; only while connected by the fallback.
    pub fn probe_at(&self) -> Option<Nanos> {
        self.probe_at
    }

    /// Answers whether a probe is due; it is then under way until it failed or was moved to.
    pub fn take_probe(&mut self, now: Nanos) -> bool {
        let due = self.probe_at.is_some_and(|at| now >= at);
        if due {
            self.probe_at = None;
        }
        due
    }

    pub fn probe_failed(&mut self, why: &str, now: Nanos) {
        self.counts.failed_probes += 1;
        self.causes[0] = Some((why.to_owned(), false));
        self.slow_down();
        let (transport, next) = (self.options.preferred, self.probe_delay);
        tracing::info!(%transport, why, ?next, "still no connection by the preferred transport");
        self.probe_at = Some(now + self.probe_delay);
    }

    /// The preferred transport is used from now on: a probe of it came through.
    pub fn returning(&mut self) {
        self.connected_at = None;
        self.probe_at = None;
        self.switch(false);
        self.on_trial = true;
    }

    fn fall_back(&mut self) {
        self.switch(true);
        let (to, from) = (self.current(), self.options.preferred);
        let cause = self.causes[0].as_ref().map(|(why, _)| why.clone());
        if !std::mem::replace(&mut self.fallen, true) {
            self.counts.fallbacks += 1;
            let why = cause.as_deref().unwrap_or_default();
            tracing::warn!(%from, %to, why, "falling back");
            self.counts.fallback_cause = cause;
        }
    }

    fn switch(&mut self, to_fallback: bool) {
        (self.on_fallback, self.failures) = (to_fallback, 0);
    }

    fn slow_down(&mut self) {
        let max = self.options.reprobe_max.max(self.options.reprobe);
        self.probe_delay = (self.probe_delay * 2).min(max);
    }
}

#[cfg(test)]
mod tests;
