//! Counts the failed attempts to connect an I/O queue, and computes the delay before the next one.

use std::time::Duration;

/// Delay before a lost I/O queue of a live controller connects again. It doubles with each failure,
/// up to [`RECONNECT_DELAY_MAX`].
pub(super) const RECONNECT_DELAY: Duration = Duration::from_millis(20);
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);

/// The failed attempts since the last success.
#[derive(Default)]
pub(super) struct Attempts {
    /// Reset to zero when the association ends or another transport is used.
    pub in_a_row: u32,
    pub last: Option<Failure>,
}

pub(super) struct Failure {
    pub why: String,
    /// The target refused the queue.
    pub refused: bool,
}

impl Attempts {
    /// Counts a failed attempt, and returns the delay before the next one.
    pub(super) fn next_delay(&mut self) -> Duration {
        let delay = RECONNECT_DELAY * 2u32.saturating_pow(self.in_a_row.min(16));
        self.in_a_row += 1;
        delay.min(RECONNECT_DELAY_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the delay doubles up to its maximum, and starts small again after a success.
    #[test]
    fn delays() {
        let mut attempts = Attempts::default();
        let delays: Vec<u128> = (0..40).map(|_| attempts.next_delay().as_millis()).collect();
        assert_eq!(delays[..9], [20, 40, 80, 160, 320, 640, 1280, 2000, 2000]);
        assert_eq!((delays[39], attempts.in_a_row), (2000, 40));
        assert_eq!(Attempts::default().next_delay(), RECONNECT_DELAY);
    }
}
