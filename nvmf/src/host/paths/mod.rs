//! Chooses between two transports to a controller, and decides when to probe the preferred one.
//!
//! ```text
//! ```text
//!            its attempts are used up              a probe succeeded
//! Preferred ───────────────────────▶ Fallback ─────────────────────▶ Preferred (on trial)
//!     ▲                               │    ▲                             │ fails
//!     └── its attempts are used up ───┘    └─────────────────────────────┘
//! ```
//!
//! This is a pure state machine: the caller connects, reports each event with its time, and asks
//! for the next step. A connection that ends before [`PathOptions::stable_after`] counts as a
//! failed attempt. So a host uses its fallback in a network that carries handshakes but no data.

use std::time::Duration;

use nacre_reactor::Nanos;

use crate::transport::TransportType;

/// The two transports, and the delays and limits of the choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathOptions {
    pub preferred: TransportType,
    /// The transport to use while the preferred one does not work; `None`: only the preferred one.
    pub fallback: Option<TransportType>,
    /// Consecutive attempts over one transport before the other one is tried. 0: use the fallback
    /// only if the target refuses the preferred transport permanently.
    pub connection_retries: u32,
    pub retry_delay: Duration,
    /// Time from the connection over the fallback to the first probe of the preferred transport;
    /// doubles with each failed probe, up to `reprobe_max`. Zero: no probes.
    pub reprobe: Duration,
    pub reprobe_max: Duration,
    /// Time after which a connection counts as good.
    pub stable_after: Duration,
    /// The reason to start with the fallback, if the preferred transport is known not to work.
    pub unusable: Option<String>,
}

impl PathOptions {
    /// The default delays and limits.
    pub fn new(preferred: TransportType, fallback: Option<TransportType>) -> Self {
        Self {
            preferred,
            fallback: fallback.filter(|fallback| *fallback != preferred),
            connection_retries: 3,
            retry_delay: Duration::from_secs(1),
            reprobe: Duration::from_secs(60),
            reprobe_max: Duration::from_secs(600),
            stable_after: Duration::from_secs(10),
            unusable: None,
        }
    }
}

/// Counters of a host's transports since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// Failed attempts to connect, including connections that ended before they counted as good.
    pub failed_attempts: u64,
    pub fallbacks: u64,
    pub returns: u64,
    pub failed_probes: u64,
    /// Cause of the latest fallback.
    pub fallback_cause: Option<String>,
}

/// Longest delay between rounds over both transports.
const ROUND_DELAY_MAX: Duration = Duration::from_secs(30);

/// The state machine of the choice.
#[derive(Debug)]
pub struct Paths {
    options: PathOptions,
    on_fallback: bool,
    /// Consecutive failed attempts over the current transport.
    failures: u32,
    connected_at: Option<Nanos>,
    /// The host has moved to the preferred transport after a probe, and the controller is not live
    /// over it yet.
    on_trial: bool,
    /// A fallback was counted, and its return was not counted yet.
    fallen: bool,
    /// Rounds in which both transports failed, since the last connection.
    rounds: u32,
    probe_at: Option<Nanos>,
    probe_delay: Duration,
    /// The latest failure of the preferred transport and of the fallback, and whether it is
    /// permanent.
    causes: [Option<(String, bool)>; 2],
    latest: Option<(TransportType, String)>,
    counts: PathCounts,
}

impl Paths {
    pub fn new(options: PathOptions) -> Self {
        let mut paths = Self {
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

    /// The transport that is connected, or that the next attempt uses.
    pub fn current(&self) -> TransportType {
        match self.options.fallback {
            Some(fallback) if self.on_fallback => fallback,
            _ => self.options.preferred,
        }
    }

    /// True if the preferred transport is in use and there is a fallback.
    pub fn can_fall_back(&self) -> bool {
        self.options.fallback.is_some() && !self.on_fallback
    }

    /// True if every transport has used up its attempts since the last connection.
    pub fn all_failed(&self) -> bool {
        let retries = self.options.connection_retries;
        match self.options.fallback {
            Some(_) => self.rounds > 0,
            None => retries > 0 && self.failures >= retries,
        }
    }

    /// The latest failure of each transport, as text.
    pub fn causes(&self) -> String {
        let kinds = [Some(self.options.preferred), self.options.fallback];
        let told = kinds.iter().zip(&self.causes);
        let told = told.filter_map(|(kind, cause)| {
            let (why, _) = cause.as_ref()?;
            Some(format!("{}: {why}", (*kind)?))
        });
        told.collect::<Vec<_>>().join("; ")
    }

    /// The latest failed attempt: its transport and reason.
    pub fn latest_failure(&self) -> Option<&(TransportType, String)> {
        self.latest.as_ref()
    }

    /// Records that the controller is live over the current transport.
    pub fn connected(&mut self, now: Nanos) {
        self.connected_at = Some(now);
        self.rounds = 0;
        // The target accepted this host, so an earlier permanent refusal may no longer hold.
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

    /// Records a failed attempt or a lost connection. Returns the delay before the next attempt,
    /// which uses [`Paths::current`]. `None`: the target has refused every transport permanently.
    pub fn failed(&mut self, why: &str, for_good: bool, now: Nanos) -> Option<Duration> {
        self.probe_at = None;
        let lasted = self.connected_at.take().map(|since| now.since(since));
        self.causes[usize::from(self.on_fallback)] = Some((why.to_owned(), for_good));
        if lasted.is_some_and(|lasted| lasted >= self.options.stable_after) {
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
            // Increase the delay of probes if the preferred transport connects but does not last.
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

    /// The time of the next probe. `None`: not connected over the fallback, a probe runs, or probes
    /// are disabled.
    pub fn probe_at(&self) -> Option<Nanos> {
        self.probe_at
    }

    /// Returns true if a probe is due, and starts it. It ends with [`Paths::probe_failed`] or
    /// [`Paths::returning`].
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

    /// Changes to the preferred transport after a successful probe.
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
