//! The pauses between attempts to deliver a message.

use std::time::Duration;

/// Pauses between the attempts to deliver a message: each is twice the one before, from `first` up
/// to `longest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    pub first: Duration,
    pub longest: Duration,
    /// Age at which a message is dropped.
    pub give_up: Duration,
}

impl Retry {
    /// The pause after failed attempt number `attempt`, from 1, of a message of this age. `asked`:
    /// the pause that the receiver asks for, which counts up to `longest`. `None`: drop the
    /// message, which would be older than `give_up` after the pause.
    pub fn pause(&self, attempt: u32, age: Duration, asked: Option<Duration>) -> Option<Duration> {
        let doubled = self.first.saturating_mul(1 << (attempt - 1).min(20));
        let pause = doubled.max(asked.unwrap_or_default()).min(self.longest);
        (age + pause <= self.give_up).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_end() {
        let seconds = Duration::from_secs;
        let retry = Retry {
            first: seconds(5),
            longest: seconds(300),
            give_up: seconds(3600),
        };
        let pause = |attempt, age, asked: Option<u64>| {
            let pause = retry.pause(attempt, seconds(age), asked.map(seconds));
            pause.map(|pause| pause.as_secs())
        };
        let first: Vec<_> = (1..=8).filter_map(|n| pause(n, 0, None)).collect();
        assert_eq!(first, [5, 10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(pause(u32::MAX, 0, None), Some(300));
        assert_eq!(pause(1, 0, Some(60)), Some(60), "as the receiver asks");
        assert_eq!(pause(1, 0, Some(86_400)), Some(300));
        assert_eq!(pause(4, 0, Some(1)), Some(40));
        assert_eq!(pause(7, 3300, None), Some(300));
        assert_eq!(pause(7, 3301, None), None);
        let never = Retry {
            give_up: Duration::ZERO,
            ..retry
        };
        assert_eq!(never.pause(1, Duration::ZERO, None), None);
    }
}
