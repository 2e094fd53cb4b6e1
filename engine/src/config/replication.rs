//! `[replication]`: connections to namespaces of remote targets.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_nvmf::address::{Fallback, TransportChoice};
use nacre_nvmf::host::PathOptions;
use nacre_nvmf::transport::{TransportType, words};
use nacre_transport_rdma::RdmaHostOptions;
use serde::{Deserialize, Serialize};

use crate::values::read;

/// Defaults for controllers attached with transport `AUTO`, and for parameters that a call leaves
/// out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Replication {
    pub transport: TransportChoice,
    /// Transport to use while RDMA fails.
    pub fallback: Fallback,
    /// Selectors of the source address, as for a listener; none: chosen by the route.
    pub iface: Vec<String>,
    /// RDMA attempts before the fallback; 0: no limit.
    pub connection_retries: u32,
    #[serde(deserialize_with = "read::millis")]
    pub retry_delay_ms: u64,
    /// Time limit per RDMA attempt: address and route resolution and connection together.
    #[serde(deserialize_with = "read::millis")]
    pub cm_timeout_ms: u64,
    /// Commands of up to this number of bytes are sent inline over RDMA, data included.
    #[serde(deserialize_with = "read::bytes")]
    pub max_inline_data: u32,
    /// Time from the fallback to the first probe of RDMA; 0: no probes.
    #[serde(deserialize_with = "read::seconds")]
    pub rdma_reprobe_s: u64,
    /// 0: no keep-alive.
    #[serde(deserialize_with = "read::millis")]
    pub keep_alive_ms: u32,
    /// How long I/O waits for an unreachable target; 0: no limit.
    #[serde(deserialize_with = "read::millis")]
    pub fast_fail_ms: u64,
    /// The names of keys for controllers that are attached without keys of their own; None: they
    /// have none.
    pub dhchap_key: Option<String>,
    pub dhchap_ctrlr_key: Option<String>,
    pub psk: Option<String>,
    pub tls: LegTls,
}

/// Whether connections to remote targets use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LegTls {
    /// Over TCP with a key; RDMA and controllers without a key are in clear.
    #[default]
    Prefer,
    /// Always: a controller without a key is refused, and RDMA is not used.
    Require,
}

impl Default for Replication {
    fn default() -> Self {
        let paths = PathOptions::new(TransportType::Rdma, Some(TransportType::Tcp));
        Self {
            transport: TransportChoice::Auto,
            fallback: Fallback::Tcp,
            iface: Vec::new(),
            connection_retries: paths.connection_retries,
            retry_delay_ms: millis(paths.retry_delay),
            cm_timeout_ms: millis(RdmaHostOptions::new(0, 0).cm_timeout),
            max_inline_data: RdmaHostOptions::MAX_INLINE,
            rdma_reprobe_s: paths.reprobe.as_secs(),
            keep_alive_ms: 5000,
            fast_fail_ms: 5000,
            dhchap_key: None,
            dhchap_ctrlr_key: None,
            psk: None,
            tls: LegTls::default(),
        }
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

impl Replication {
    /// The range of a keep-alive timeout that is not 0.
    pub const KEEP_ALIVE_MS: RangeInclusive<u32> = 500..=600_000;

    pub fn cm_timeout(&self) -> Duration {
        Duration::from_millis(self.cm_timeout_ms)
    }

    pub fn fast_fail(&self) -> Option<Duration> {
        (self.fast_fail_ms > 0).then(|| Duration::from_millis(self.fast_fail_ms))
    }

    /// Keys out of range, with the reason.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        let value = self.keep_alive_ms;
        if value != 0 && !Self::KEEP_ALIVE_MS.contains(&value) {
            let why = format!("{value} is neither 0 nor {}", words(&Self::KEEP_ALIVE_MS));
            problems.push(("keep_alive_ms", why));
        }
        if self.connection_retries == 0
            && self.fallback == Fallback::Tcp
            && self.transport != TransportChoice::Tcp
        {
            let why = "0 tries RDMA forever, so that fallback = \"tcp\" is never used; set fallback = \"none\"";
            problems.push(("connection_retries", why.to_owned()));
        }
        if self.tls == LegTls::Require && self.transport == TransportChoice::Rdma {
            let why = "RDMA has no TLS; set transport = \"tcp\", or tls = \"prefer\"";
            problems.push(("tls", why.to_owned()));
        }
        problems
    }
}
