//! Rate limits of a device: I/Os and bytes per second, over all cores together.
//!
//! Each limit is a leaky bucket shared by all cores. It has one number: the time at which the cost
//! of all admitted I/O is covered by the rate. I/O is admitted from that time on, and its cost
//! moves the time forward. So an I/O larger than one second's limit is admitted as well, and later
//! I/O waits longer. An unused bucket has a credit of [`CREDIT`], which compensates for reactors
//! that wake up late.
//!
//! Two cores that read the same time may both admit an I/O. Later I/O waits accordingly longer, so
//! the average rate is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nacre_reactor::Nanos;

use crate::io::Op;

/// The idle time that counts as credit. On a machine with other work a reactor wakes up tens of
/// milliseconds late; with a smaller credit a device stays below its limit there.
pub const CREDIT: Duration = Duration::from_millis(50);

/// Buckets count in this fraction of a nanosecond, so that the cost of small I/Os at high rates is
/// not lost by rounding. 64 bits then last for nine years.
const FINE: u64 = 64;

/// Limits per second. 0: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// Reads and writes together.
    pub rw_ios: u64,
    pub rw_bytes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
}

impl RateLimits {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn rates(&self) -> [u64; BUCKETS] {
        [
            self.rw_ios,
            self.rw_bytes,
            self.read_bytes,
            self.write_bytes,
        ]
    }
}

const BUCKETS: usize = 4;

/// The cost of an operation, by bucket. Flushes and unmaps are free. Write zeroes counts as an I/O
/// without bytes, a compare or verify as a read. A copy counts as one I/O that reads and writes its
/// bytes.
fn costs(op: Op, bytes: u64) -> [u64; BUCKETS] {
    match op {
        Op::Read | Op::Compare | Op::Verify => [1, bytes, bytes, 0],
        Op::Write | Op::CompareAndWrite => [1, bytes, 0, bytes],
        Op::Copy => [1, 2 * bytes, bytes, bytes],
        Op::WriteZeroes => [1, 0, 0, 0],
        Op::Flush | Op::Unmap => [0; BUCKETS],
    }
}

/// The limits of one device, shared by all its queues.
#[derive(Debug, Default)]
pub struct Qos {
    /// True if any limit is set.
    on: AtomicBool,
    buckets: [Bucket; BUCKETS],
}

#[derive(Debug, Default)]
struct Bucket {
    rate: AtomicU64,
    /// Time at which all admitted I/O is paid for, in [`FINE`] parts of a nanosecond.
    paid_at: AtomicU64,
}

impl Qos {
    pub fn set(&self, limits: RateLimits) {
        for (bucket, rate) in self.buckets.iter().zip(limits.rates()) {
            if bucket.rate.swap(rate, Relaxed) != rate {
                // A new rate clears the debt at the old rate.
                bucket.paid_at.store(0, Relaxed);
            }
        }
        self.on.store(!limits.is_none(), Relaxed);
    }

    pub fn limits(&self) -> RateLimits {
        let [rw_ios, rw_bytes, read_bytes, write_bytes] = self
            .buckets
            .each_ref()
            .map(|bucket| bucket.rate.load(Relaxed));
        RateLimits {
            rw_ios,
            rw_bytes,
            read_bytes,
            write_bytes,
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Returns the time at which such an I/O can be admitted.
    fn due(&self, op: Op, bytes: u64) -> Nanos {
        let cost = costs(op, bytes);
        let due = |(bucket, cost): (&Bucket, u64)| match cost {
            0 => 0,
            _ => bucket.due(),
        };
        Nanos(self.buckets.iter().zip(cost).map(due).max().unwrap_or(0))
    }

    fn charge(&self, op: Op, bytes: u64, now: Nanos) {
        for (bucket, cost) in self.buckets.iter().zip(costs(op, bytes)) {
            if cost > 0 {
                bucket.charge(cost, now);
            }
        }
    }
}

impl Bucket {
    fn due(&self) -> u64 {
        match self.rate.load(Relaxed) {
            0 => 0,
            _ => self.paid_at.load(Relaxed).div_ceil(FINE),
        }
    }

    fn charge(&self, cost: u64, now: Nanos) {
        let rate = self.rate.load(Relaxed);
        if rate == 0 {
            return;
        }
        let time = u128::from(cost) * u128::from(1_000_000_000 * FINE) / u128::from(rate);
        // A debt of centuries saturates.
        let time = u64::try_from(time).unwrap_or(u64::MAX);
        let credit = now.0.saturating_sub(CREDIT.as_nanos() as u64);
        let least = credit.saturating_mul(FINE);
        let later = |paid_at: u64| Some(paid_at.max(least).saturating_add(time));
        let _ = self.paid_at.fetch_update(Relaxed, Relaxed, later);
    }
}

/// All limits of a device: its own, and those of the devices below it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chain(Vec<Arc<Qos>>);

impl Chain {
    pub(crate) fn new(own: &Arc<Qos>, below: impl IntoIterator<Item = Self>) -> Self {
        let below = below.into_iter().flat_map(|chain| chain.0);
        Self(std::iter::once(Arc::clone(own)).chain(below).collect())
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.iter().any(|qos| qos.is_on())
    }

    pub(crate) fn due(&self, op: Op, bytes: u64) -> Nanos {
        let due = |qos: &Arc<Qos>| qos.due(op, bytes);
        self.0.iter().map(due).max().unwrap_or(Nanos::ZERO)
    }

    /// Charges the cost of the I/O, if the I/O can be admitted now.
    pub(crate) fn admit(&self, op: Op, bytes: u64, now: Nanos) -> bool {
        let admitted = self.due(op, bytes) <= now;
        if admitted {
            self.0.iter().for_each(|qos| qos.charge(op, bytes, now));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chain(limits: RateLimits) -> (Arc<Qos>, Chain) {
        let qos = Arc::new(Qos::default());
        qos.set(limits);
        (Arc::clone(&qos), Chain::new(&qos, []))
    }

    /// The number of these I/Os that are admitted within `seconds`, with an attempt every
    /// `step_us`.
    fn admitted(chain: &Chain, op: Op, bytes: u64, seconds: u64, step_us: u64) -> u64 {
        let mut count = 0;
        let begin = Nanos(5_000_000_000);
        for step in 0..=seconds * 1_000_000 / step_us {
            let now = begin + Duration::from_micros(step * step_us);
            while chain.admit(op, bytes, now) {
                count += 1;
            }
        }
        count
    }

    /// Unlimited I/O is not delayed. Limited I/O gets its rate at any step, plus the credit at the
    /// start.
    #[test]
    fn rates_are_kept() {
        let limits = RateLimits {
            rw_ios: 1000,
            read_bytes: 1 << 20,
            ..RateLimits::default()
        };
        for (op, bytes, wanted) in [
            (Op::Write, 65536, 3000),
            (Op::WriteZeroes, 1 << 30, 3000),
            (Op::Read, 512, 3000),
            (Op::Read, 4096, 3 * 256),
            (Op::Compare, 4096, 3 * 256),
            (Op::Copy, 4096, 3 * 256),
        ] {
            for step_us in [37, 1000, 9000] {
                let (_, chain) = chain(limits);
                let count = admitted(&chain, op, bytes, 3, step_us);
                let most = wanted + wanted / 50 + 1;
                assert!(
                    (wanted..=most).contains(&count),
                    "{op:?} of {bytes} every {step_us} us: {count}, not {wanted}"
                );
            }
        }
        let (_, chain) = chain(limits);
        for op in [Op::Flush, Op::Unmap] {
            assert!((0..100_000).all(|_| chain.admit(op, 1 << 40, Nanos(1))));
        }
    }

    /// An I/O of more than a second's worth is admitted, and later I/O waits for its cost.
    #[test]
    fn a_large_io_delays_later_io() {
        let (qos, chain) = chain(RateLimits {
            rw_bytes: 1 << 20,
            ..RateLimits::default()
        });
        let now = Nanos(1_000_000_000);
        assert!(chain.admit(Op::Write, 4 << 20, now));
        let due = chain.due(Op::Read, 1);
        assert_eq!(due, now + Duration::from_secs(4) - CREDIT);
        assert!(!chain.admit(Op::Read, 1, Nanos(due.0 - 1)) && chain.admit(Op::Read, 1, due));
        // A new rate clears the debt, and without a limit all I/O passes.
        qos.set(RateLimits {
            rw_bytes: 2 << 20,
            ..RateLimits::default()
        });
        assert!(chain.admit(Op::Write, 1 << 40, now) && !chain.admit(Op::Write, 1, now));
        qos.set(RateLimits::default());
        assert!(!chain.is_on() && chain.admit(Op::Write, u64::MAX / 2, now));
    }

    proptest! {
        /// Over any time, the admitted amount is at most the rate, plus the credit and one I/O.
        #[test]
        fn never_more_than_the_rate(
            rate in 1u64..10_000_000_000,
            ios in prop::collection::vec((1u64..1 << 21, 0u64..3_000_000), 1..200),
        ) {
            let (_, chain) = chain(RateLimits { rw_bytes: rate, ..RateLimits::default() });
            let begin = Nanos(1 << 40);
            let (mut now, mut sum, mut last) = (begin, 0u128, 0);
            for (bytes, wait) in ios {
                now = now + Duration::from_nanos(wait);
                if chain.admit(Op::Write, bytes, now) {
                    sum += u128::from(bytes);
                    last = bytes;
                }
            }
            let time = u128::from(now.since(begin).as_nanos() as u64) + CREDIT.as_nanos();
            let most = u128::from(rate) * time / 1_000_000_000 + u128::from(last) + 1 + u128::from(rate) / 1_000_000;
            prop_assert!(sum <= most, "{sum} of {most}");
        }
    }
}
