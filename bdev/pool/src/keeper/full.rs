//! Full pools: how long writes wait for space, and the thresholds before that.
//!
//! A write waits [`FULL_WAIT`]. Then the host is told to send it again, or, once the pool is full
//! for [`FULL_PATIENCE`] and no space is coming back, that there is no space. A trim that needs
//! room does not wait, and has the same end.

use std::collections::{HashMap, HashSet};

use nacre_bdev_pool_core::ids::Token;
use nacre_bdev_pool_core::interface::{Answer, Refusal};
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::Nanos;

use super::{FULL_PATIENCE, FULL_WAIT, Keeper, Stage};
use crate::model::PoolStatus;

/// Shares of the usable space that are reported, in percent.
const THRESHOLDS: [u8; 3] = [80, 90, 95];
/// A threshold is left when the share is so many percent below it.
const HYSTERESIS: u64 = 1;

#[derive(Default)]
pub(super) struct Full {
    /// Writes that wait, each with the end of its wait.
    waits: HashMap<Token, Nanos>,
    /// Writes that began to wait since the last look at the time.
    new: Vec<Token>,
    /// Writes whose wait has ended, and that have no answer yet.
    given_up: HashSet<Token>,
    /// A write first met the full pool at this time.
    since: Option<Nanos>,
    /// The pool is full for long: writes fail for good.
    is_final: bool,
    refusals: Refusals,
}

/// Trims that were refused for lack of room for a map, while no write waited.
#[derive(Default)]
struct Refusals {
    /// The time at the last look.
    now: Nanos,
    /// The first one and the last one of a shortage.
    range: Option<(Nanos, Nanos)>,
}

impl Refusals {
    /// Notes a refusal. Returns true when the shortage lasts so long that a retry is pointless.
    fn note(&mut self) -> bool {
        let (first, last) = self.range.get_or_insert((self.now, self.now));
        *last = self.now;
        *last >= *first + FULL_PATIENCE
    }

    /// Ends the shortage, once none was refused for long: a host that sends a request again does
    /// so earlier.
    fn look(&mut self, now: Nanos) {
        self.now = now;
        let is_over = |(_, last): &mut (Nanos, Nanos)| now >= *last + FULL_PATIENCE;
        self.range.take_if(is_over);
    }
}

impl Full {
    pub(super) fn begin(&mut self, token: Token) {
        self.new.push(token);
    }

    /// The outcome of a request, as its lane gets it.
    pub(super) fn ended(
        &mut self,
        token: Token,
        result: Result<Answer, Refusal>,
    ) -> Result<Answer, Refusal> {
        let is_new = self.new.iter().position(|new| *new == token);
        let is_new = is_new.map(|at| self.new.remove(at)).is_some();
        let is_waiting = self.waits.remove(&token).is_some();
        let has_waited = self.given_up.remove(&token) || is_waiting || is_new;
        match result {
            Err(Refusal::NoSpace { returning }) => {
                // A write that did not wait is one of more than may wait.
                let is_trim = !has_waited && self.since.is_none() && self.new.is_empty();
                let is_final = self.is_final || (is_trim && self.refusals.note());
                Err(Refusal::NoSpace {
                    returning: returning || !is_final,
                })
            }
            result => result,
        }
    }

    /// True when the end of a wait is not known yet.
    pub(super) fn has_new(&self) -> bool {
        !self.new.is_empty()
    }

    /// When the first wait ends.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.waits.values().min().copied()
    }
}

impl Keeper {
    pub(super) fn look_at_full(&mut self, now: Nanos) {
        let Stage::Open(pool) = &mut self.stage else {
            return;
        };
        let full = &mut self.full;
        full.refusals.look(now);
        if !full.new.is_empty() {
            let since = *full.since.get_or_insert(now);
            // A wait in vain for the whole time before makes further waits pointless.
            let until = if now < since + FULL_PATIENCE {
                now + FULL_WAIT
            } else {
                now
            };
            full.waits
                .extend(full.new.drain(..).map(|token| (token, until)));
        }
        let Some(since) = full.since else {
            return;
        };
        full.is_final = now >= since + FULL_PATIENCE;
        let due = full.waits.iter().filter(|(_, until)| **until <= now);
        let due: Vec<Token> = due.map(|(token, _)| *token).collect();
        for token in due {
            full.waits.remove(&token);
            full.given_up.insert(token);
            pool.give_up(token);
        }
        let (free, kept) = pool.free_units();
        if full.waits.is_empty() && free > kept {
            full.since = None;
            full.is_final = false;
        }
    }
}

/// The highest threshold that the use has reached. One that it had stays until the use is clearly
/// below it.
fn level(before: u8, used: u64, usable: u64) -> u8 {
    let has_reached = |threshold: &u8| {
        let slack = if *threshold <= before { HYSTERESIS } else { 0 };
        let share = u128::from(u64::from(*threshold) - slack);
        u128::from(used) * 100 >= u128::from(usable) * share
    };
    let reached = THRESHOLDS.into_iter().filter(has_reached);
    reached.max().unwrap_or(0)
}

/// Notes the use of the space in the state of the pool. Returns true when it passed a threshold, or
/// writes began or ceased to wait.
pub(super) fn note_use(status: &mut PoolStatus, pool: &Pool) -> bool {
    let (superblock, (free, kept)) = (pool.superblock(), pool.free_units());
    let units = pool.total_units();
    // The space that thick volumes may still take is no longer to be had: it counts as used.
    let usable = units.saturating_sub(superblock.reserve_units);
    let used = usable.saturating_sub(free.saturating_sub(kept));
    let (before, waited) = (status.full_percent, status.waiting_writes > 0);
    status.full_percent = level(before, used, usable.max(1));
    status.waiting_writes = pool.full_writes() as u64;
    if status.full_percent != before {
        report(&status.name, before, status.full_percent);
    }
    status.full_percent != before || waited != (status.waiting_writes > 0)
}

/// Logs that the use of a pool passed a threshold.
fn report(pool: &str, before: u8, now: u8) {
    if now > before {
        tracing::warn!(
            pool,
            percent = now,
            "the pool is nearly full: writes to new space will wait and then fail; trim, delete \
             snapshots, or add space"
        );
    } else {
        tracing::info!(pool, percent = now, "the pool has more free space again");
    }
}

#[cfg(test)]
mod tests {
    use super::level;

    /// A threshold is reported once while the use wavers around it.
    #[test]
    fn thresholds_have_hysteresis() {
        let mut at = 0;
        let uses = [79, 80, 79, 80, 78, 91, 89, 88, 96, 94, 93, 10];
        let levels = uses.map(|used| {
            at = level(at, used, 100);
            at
        });
        assert_eq!(levels, [0, 80, 80, 80, 0, 90, 90, 80, 95, 95, 90, 0]);
        assert_eq!(level(0, 5, 1), 95, "more is used than usable");
    }
}
