//! Limits the number of lines in the audit log about calls that a client may not make, about
//! changes by viewers, and about acts on the administration page. Without a limit, such lines could
//! fill the files of the log, and so remove other lines.
//!
//! Each client has [`BURST`] lines. It gets another one every [`INTERVAL`]; that line has the
//! number of calls without lines. Above [`MAX_CLIENTS`] clients, all further ones share one
//! allowance.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Most lines of a client at once.
pub const BURST: u32 = 20;
/// Interval at which a client gets another line: 144 a day, so 64 MiB last for years.
pub const INTERVAL: Duration = Duration::from_secs(600);
const MAX_CLIENTS: usize = 256;
/// The key of the shared allowance.
const OTHERS: &str = "";

#[derive(Debug, Default)]
pub struct Refusals {
    clients: HashMap<String, Allowance>,
}

#[derive(Debug)]
struct Allowance {
    lines: u32,
    /// Time up to which `lines` was refilled.
    since: Instant,
    left_out: u64,
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self {
            lines: BURST,
            since: now,
            left_out: 0,
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.duration_since(self.since).as_secs() / INTERVAL.as_secs();
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        self.lines = self.lines.saturating_add(passed).min(BURST);
        self.since = match self.lines {
            BURST => now,
            _ => self.since + INTERVAL * passed,
        };
    }
}

impl Refusals {
    /// Counts a call. `Some(n)`: write its line; `n` calls of the client had no line since the last
    /// one. `None`: write no line.
    pub fn admit(&mut self, client: &str, now: Instant) -> Option<u64> {
        if !self.clients.contains_key(client) && self.clients.len() >= MAX_CLIENTS {
            self.clients.retain(|_, allowance| {
                allowance.refill(now);
                allowance.lines < BURST || allowance.left_out > 0
            });
        }
        let is_full = self.clients.len() >= MAX_CLIENTS;
        let known = !is_full || self.clients.contains_key(client);
        let key = if known { client } else { OTHERS };
        let allowance = self
            .clients
            .entry(key.to_owned())
            .or_insert_with(|| Allowance::full(now));
        allowance.refill(now);
        if allowance.lines == 0 {
            allowance.left_out += 1;
            return None;
        }
        allowance.lines -= 1;
        Some(std::mem::take(&mut allowance.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_a_burst_and_then_a_line_per_interval() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let lines = |refusals: &mut Refusals, calls: u32, at: Instant| {
            let calls = (0..calls).map(|_| refusals.admit("a", at));
            calls.flatten().collect::<Vec<_>>()
        };
        assert_eq!(lines(&mut refusals, 500, start), vec![0; BURST as usize]);
        assert_eq!(lines(&mut refusals, 5, start + INTERVAL / 2), [0; 0]);
        assert_eq!(lines(&mut refusals, 5, start + INTERVAL), [485]);
        assert_eq!(refusals.admit("b", start + INTERVAL), Some(0));
        let later = start + INTERVAL * 100;
        assert_eq!(lines(&mut refusals, 30, later).len(), BURST as usize);
        // A day of steady refusals.
        let day = (0..1440).map(|minute| later + Duration::from_secs(60 * (minute + 1)));
        let written: usize = day.map(|at| lines(&mut refusals, 10, at).len()).sum();
        assert_eq!(written, 144);
    }

    #[test]
    fn the_number_of_clients_is_bounded() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let mut written = 0;
        for client in 0..10_000 {
            let client = format!("CN={client}");
            written += usize::from(refusals.admit(&client, now).is_some());
        }
        assert_eq!(refusals.clients.len(), MAX_CLIENTS + 1);
        assert_eq!(written, MAX_CLIENTS + BURST as usize);
        let later = now + INTERVAL * (BURST + 1);
        assert_eq!(refusals.admit("CN=x", later), Some(0));
        assert!(refusals.clients.len() < 3);
    }
}
