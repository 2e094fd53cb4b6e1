//! The configuration of a reactor: its core, its behaviour when idle, and its limits.

use std::time::Duration;

/// The behaviour of a reactor after a turn without work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Mode {
    /// Never sleeps: lowest latency, but uses a whole core all the time.
    Poll,
    /// Polls for `busy_poll_us`, or up to eight times as long, then sleeps. On a core shared with
    /// another busy thread, it sleeps after 20 µs.
    #[default]
    Adaptive,
    /// Sleeps immediately.
    Interrupt,
}

#[derive(Debug, Clone)]
pub struct ReactorConfig {
    /// Name of the reactor and of its thread; the kernel shows the first 15 bytes.
    pub name: String,
    /// The core to pin the thread to; `None`: not pinned.
    pub core: Option<usize>,
    pub mode: Mode,
    /// Minimum time in microseconds that an idle adaptive reactor polls before sleeping. The actual
    /// time grows up to eight times while work arrives soon after falling asleep. The default, 100
    /// µs, is longer than a loopback round trip and most flash reads, so a busy reactor does not
    /// sleep. Polling after ten wake-ups a second then costs 0.1 % of a core.
    pub busy_poll_us: u64,
    /// Most items that one poller may handle in one turn.
    pub poll_budget: u32,
    /// Most messages in the mailbox, at least 1.
    pub mailbox_capacity: usize,
    /// A turn longer than this counts as a stall; `None`: the watchdog's default limit.
    pub watchdog_limit: Option<Duration>,
}

impl Default for ReactorConfig {
    fn default() -> Self {
        Self {
            name: "reactor".to_owned(),
            core: None,
            mode: Mode::Adaptive,
            busy_poll_us: 100,
            poll_budget: 64,
            mailbox_capacity: 1024,
            watchdog_limit: None,
        }
    }
}

impl Mode {
    /// The name in configuration files and RPC.
    pub fn word(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }

    pub(crate) fn encode(self) -> u8 {
        self as u8
    }

    pub(crate) fn decode(byte: u8) -> Self {
        match byte {
            0 => Self::Poll,
            1 => Self::Adaptive,
            _ => Self::Interrupt,
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}
