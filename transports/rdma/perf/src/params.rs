//! The parameters of a measurement, and their bounds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

/// The largest message in bytes, 256 MiB. Reliable-connected queue pairs carry 2 GiB, but larger
/// messages show nothing new.
pub const MAX_MESSAGE: u32 = 1 << 28;
pub const MAX_QUEUE_PAIRS: u16 = 256;
pub const MAX_DEPTH: u16 = 4096;
/// Most bytes of the server's memory that one queue pair writes to: they have one key, and so lie
/// in one memory region on every device.
pub(crate) const MAX_EXPOSED: u64 = nacre_hugepages::REGION_MAX as u64 / 2;

/// The operation that moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Two-sided: the server receives.
    Send,
    /// One-sided, into the server's memory.
    Write,
    /// One-sided, from the server's memory.
    Read,
}

impl Op {
    pub const ALL: [Self; 3] = [Self::Send, Self::Write, Self::Read];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|op| op.name() == text);
        found.ok_or_else(|| format!("\"{text}\" is not one of send, write, read"))
    }
}

/// The measured pattern of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Bandwidth, with as many requests in flight as the depth allows.
    Bandwidth,
    /// Latency, with one request at a time on each queue pair.
    Latency,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
        })
    }
}

/// The length of each size's measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Number of messages, over all queue pairs.
    Messages(u64),
    Time(Duration),
}

/// The test that a client requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test {
    pub op: Op,
    pub measure: Measure,
    /// Message sizes in bytes, measured one after the other.
    pub sizes: Vec<u32>,
    pub length: Length,
    /// Messages before each size's measurement begins.
    pub warmup: u64,
    pub queue_pairs: u16,
    /// Most requests in flight on each queue pair, for bandwidth. Latency always has one.
    pub depth: u16,
    /// Compare every byte that arrives with the expected one.
    pub verify: bool,
    /// Seed of the compared bytes.
    pub seed: u32,
}

impl Default for Test {
    fn default() -> Self {
        Self {
            op: Op::Send,
            measure: Measure::Bandwidth,
            sizes: vec![64 << 10],
            length: Length::Messages(1000),
            warmup: 16,
            queue_pairs: 1,
            depth: 32,
            verify: false,
            seed: 1,
        }
    }
}

/// The reason why a test is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("no message size is given")]
    NoSize,
    #[error("{size} bytes are no message: 1 to {MAX_MESSAGE} are")]
    Size { size: u32 },
    #[error("{asked} queue pairs: 1 to {MAX_QUEUE_PAIRS} can be")]
    QueuePairs { asked: u16 },
    #[error("a depth of {asked}: 1 to {MAX_DEPTH} can be")]
    Depth { asked: u16 },
    #[error(
        "{needed} bytes of the server's memory for one queue pair, to compare the written data: at most {MAX_EXPOSED}, \
         whatever --memory says; use smaller messages or less --depth, or leave --verify out"
    )]
    Exposed { needed: u64 },
    #[error("0 messages, or no time, measure nothing")]
    Length,
}

impl Test {
    pub fn check(&self) -> Result<(), Invalid> {
        if self.sizes.is_empty() {
            return Err(Invalid::NoSize);
        }
        if let Some(&size) = self
            .sizes
            .iter()
            .find(|size| !(1..=MAX_MESSAGE).contains(*size))
        {
            return Err(Invalid::Size { size });
        }
        if !(1..=MAX_QUEUE_PAIRS).contains(&self.queue_pairs) {
            return Err(Invalid::QueuePairs {
                asked: self.queue_pairs,
            });
        }
        if !(1..=MAX_DEPTH).contains(&self.depth) {
            return Err(Invalid::Depth { asked: self.depth });
        }
        // Fewer READs may be possible than requested; this is known only when connected.
        if self.op == Op::Write && self.verify {
            let needed = u64::from(self.under_way()) * u64::from(self.largest());
            if needed > MAX_EXPOSED {
                return Err(Invalid::Exposed { needed });
            }
        }
        match self.length {
            Length::Messages(0) => Err(Invalid::Length),
            Length::Time(time) if time.is_zero() => Err(Invalid::Length),
            _ => Ok(()),
        }
    }

    pub fn largest(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Most requests in flight on one queue pair: `depth`, or 1 for latency.
    pub fn under_way(&self) -> u16 {
        match self.measure {
            Measure::Bandwidth => self.depth,
            Measure::Latency => 1,
        }
    }
}
