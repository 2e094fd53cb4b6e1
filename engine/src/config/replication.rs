//! `[replication]`: how the namespaces of other targets are connected.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::values::read;

/// For what is attached with a transport of `AUTO`, and where the call does not say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Replication {
    pub transport: Wish,
    /// What is used while RDMA does not work.
    pub fallback: Fallback,
    /// Where connections begin, as the selectors of a listener; none: where the route leads.
    pub iface: Vec<String>,
    /// Attempts by RDMA before the fallback; 0: for ever.
    pub connection_retries: u32,
    #[serde(deserialize_with = "read::millis")]
    pub retry_delay_ms: u64,
    /// For each attempt by RDMA: address, route and connection together.
    #[serde(deserialize_with = "read::millis")]
    pub cm_timeout_ms: u64,
    /// From the fallback to the first probe of RDMA; 0: there are none.
    #[serde(deserialize_with = "read::seconds")]
    pub rdma_reprobe_s: u64,
    /// 0: none.
    #[serde(deserialize_with = "read::millis")]
    pub keep_alive_ms: u32,
    /// How long I/O waits for a target that is away; 0: as long as it is.
    #[serde(deserialize_with = "read::millis")]
    pub fast_fail_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// RDMA where the way to the target has it, else TCP.
    Auto,
    Rdma,
    Tcp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    Tcp,
    None,
}

impl Default for Replication {
    fn default() -> Replication {
        Replication {
            transport: Wish::Auto,
            fallback: Fallback::Tcp,
            iface: Vec::new(),
            connection_retries: 3,
            retry_delay_ms: 1000,
            cm_timeout_ms: 5000,
            rdma_reprobe_s: 60,
            keep_alive_ms: 5000,
            fast_fail_ms: 5000,
        }
    }
}

impl Replication {
    pub fn cm_timeout(&self) -> Duration {
        Duration::from_millis(self.cm_timeout_ms)
    }

    pub fn fast_fail(&self) -> Option<Duration> {
        (self.fast_fail_ms > 0).then(|| Duration::from_millis(self.fast_fail_ms))
    }

    /// Keys that cannot be as they are, and why.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        if self.keep_alive_ms != 0 && !(500..=600_000).contains(&self.keep_alive_ms) {
            let value = self.keep_alive_ms;
            let why = format!("{value} is neither 0 nor from 500 to 600000");
            problems.push(("keep_alive_ms", why));
        }
        if self.connection_retries == 0
            && self.fallback == Fallback::Tcp
            && self.transport != Wish::Tcp
        {
            let why = "0 tries RDMA for ever, so that fallback = \"tcp\" is never used; set fallback = \"none\"";
            problems.push(("connection_retries", why.to_owned()));
        }
        problems
    }
}
