//! `nacre doctor`: checks of this machine, each with evidence and a remedy.
//!
//! ```text
//!   System (files, interfaces, limits, probes) ─▶ checks ─▶ Finding{id, status, evidence, remedy}
//!                                                               └──▶ Report
//! ```
//!
//! A check reads only the [`System`], so that a test can simulate any machine, and contacts peers
//! and devices only through its [`Probe`]. A check without the facts that it needs reports SKIP
//! with the reason.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod cluster;
mod concat;
mod container;
mod echo;
mod ethernet;
mod hardware;
mod initiator;
pub mod keys;
mod live;
mod loss;
mod memory;
mod net;
mod numa;
mod nvme;
pub mod peer;
pub mod pools;
mod probe;
mod rdma;
mod rdma_route;
pub mod revocation;
pub mod roce;
mod sandbox;
mod select;
mod session;
mod socket;
mod system;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod volume_store;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nacre_engine_values::address::{AddressError, ScopedIp};
use nacre_transport_rdma_link::qos::Qos;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use concat::ConcatHost;
pub use echo::{Echo, EchoError};
pub use initiator::{Target, examine as examine_initiator, rdma_path};
pub use numa::{Placed, placed_devices};
pub use probe::RealProbe;
pub use rdma::reason_without_rdma;
pub use rdma_route::check_rdma_route;
pub use sandbox::Sandbox;
pub use select::{Selected, no_interface, select};
pub use socket::Socket;
pub use system::{Interface, Limit, Probe, System};

/// The result of a check, from the best to the worst.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    Pass,
    /// The check lacks facts, or does not apply.
    Skip,
    /// The machine works, but with a loss of performance or reliability.
    Warn,
    Fail,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pass => "PASS",
            Self::Skip => "SKIP",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        })
    }
}

/// One check's outcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// Stable across versions, such as `rdma.gid.ip`.
    pub id: &'static str,
    /// The device, interface or address, if a check has several outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    pub status: Status,
    pub evidence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Joins text of other programs into one line.
fn one_line(text: String) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

impl Finding {
    fn new(id: &'static str, status: Status, evidence: impl Into<String>) -> Self {
        Self {
            id,
            subject: None,
            status,
            evidence: one_line(evidence.into()),
            remedy: None,
        }
    }

    fn pass(id: &'static str, evidence: impl Into<String>) -> Self {
        Self::new(id, Status::Pass, evidence)
    }

    fn skip(id: &'static str, evidence: impl Into<String>) -> Self {
        Self::new(id, Status::Skip, evidence)
    }

    fn warn(id: &'static str, evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..Self::new(id, Status::Warn, evidence)
        }
    }

    fn fail(id: &'static str, evidence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..Self::new(id, Status::Fail, evidence)
        }
    }

    fn of(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }
}

/// The configuration to check the machine for, and the optional checks to run.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// RDMA is required: its absence is a failure, not a warning.
    pub rdma: bool,
    /// Present or planned listeners: selectors (`name:eth0`, `ip:192.0.2.1`) or plain names and
    /// addresses.
    pub listeners: Vec<String>,
    /// Another machine that must be reachable, and is compared with this one if it answers.
    pub peer: Option<ScopedIp>,
    /// NVMe port of the peer; 0: 4420.
    pub port: u16,
    /// Bytes of DMA memory still to be registered.
    pub memory: u64,
    /// Number of 2 MiB pages for all of a daemon's memory; `None`: those for `memory`.
    pub pages: Option<u64>,
    /// The memory of a running daemon, as text.
    pub memory_had: Vec<String>,
    /// True if that daemon lacks huge pages or locked memory.
    pub memory_is_short: bool,
    /// Most bytes of the buffers of TLS connections; 0: no listener uses TLS.
    pub tls_memory: u64,
    /// Bytes to move through each RDMA device. `None`: move no data.
    pub traffic: Option<u64>,
    /// I/O queues per host; 0: one per CPU, like Linux, assuming a host with as many CPUs as this
    /// machine.
    pub queues: u64,
    /// Queue depth in commands; 0: the default of 128.
    pub queue_depth: u32,
    /// The traffic classes that the network must be configured for.
    pub marking: Marking,
    /// Interfaces to check for RoCE even without an RDMA device.
    pub qos_interfaces: Vec<String>,
    /// How long to receive LLDP frames and to measure PFC pauses; 0: neither.
    pub wait: Duration,
    /// Number of resyncs in progress: they fill the network, so more PFC pauses are normal.
    pub resyncs: u64,
    /// The management socket; `None`: not checked.
    pub socket: Option<Socket>,
    /// The daemon's sandbox; `None`: not checked.
    pub sandbox: Option<Sandbox>,
    /// Hosts that must use secure channel concatenation.
    pub concat_hosts: Vec<ConcatHost>,
    /// The daemon's keys.
    pub keys: Vec<keys::Key>,
    /// The key that encrypts them; `None`: no key is encrypted.
    pub store_key: Option<keys::StoreKey>,
    /// The certificate revocation lists of the TLS listeners for management and metrics.
    pub revocations: Vec<revocation::Revocation>,
    /// The volume store in etcd; `None`: it is a file.
    pub volume_store: Option<volume_store::VolumeStoreReport>,
    /// The pools of the running daemon.
    pub pools: pools::Pools,
}

impl Scope {
    fn pages(&self) -> u64 {
        const TWO_MIB: u64 = 2 << 20;
        self.pages
            .unwrap_or_else(|| self.memory.div_ceil(TWO_MIB))
            .max(1)
    }

    /// A port of the peer. `None`: the scope has no peer; an error: its interface is gone.
    fn peer_at(&self, port: u16) -> Option<Result<SocketAddr, AddressError>> {
        self.peer.as_ref().map(|peer| peer.socket(port))
    }

    /// The byte that marks RDMA packets: the storage class's, or [`Marking::tos`].
    fn storage_tos(&self) -> u8 {
        self.marking.qos.storage.tos().unwrap_or(self.marking.tos)
    }

    fn queues(&self) -> u64 {
        match self.queues {
            0 => std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
            queues => queues,
        }
    }

    fn depth(&self) -> u32 {
        match self.queue_depth {
            0 => 128,
            depth => depth,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Report {
    pub findings: Vec<Finding>,
    pub passed: usize,
    pub skipped: usize,
    pub warnings: usize,
    pub failed: usize,
}

impl Report {
    pub fn of(findings: Vec<Finding>) -> Self {
        let count = |status| findings.iter().filter(|f| f.status == status).count();
        Self {
            passed: count(Status::Pass),
            skipped: count(Status::Skip),
            warnings: count(Status::Warn),
            failed: count(Status::Fail),
            findings,
        }
    }
}

/// Runs all checks of a machine that runs the daemon.
pub fn examine(system: &System, scope: &Scope) -> Report {
    examine_with_facts(system, scope).0
}

/// As [`examine`], and returns the facts about RoCE interfaces, for [`roce::report`].
pub fn examine_with_facts(system: &System, scope: &Scope) -> (Report, Vec<roce::Facts>) {
    let mut findings = Vec::new();
    let begin = loss::Moment::of(system);
    rdma::modules(system, scope, &mut findings);
    rdma::devices(system, scope, &mut findings);
    rdma::of_each_device(system, &mut findings);
    rdma::interfaces(system, scope, &mut findings);
    live::completion_queues(system, scope, &mut findings);
    live::traffic(system, scope, &mut findings);
    memory::checks(system, scope, &mut findings);
    net::checks(system, scope, &mut findings);
    let facts = roce::facts(system, scope);
    roce::checks(system, scope, &facts, &mut findings);
    peer::checks(system, scope, &mut findings);
    hardware::checks(system, scope, &mut findings);
    loss::checks(system, scope, &facts, &begin, &mut findings);
    numa::checks(system, scope, &mut findings);
    nvme::checks(system, scope, &mut findings);
    container::checks(system, scope, &mut findings);
    socket::checks(scope, &mut findings);
    sandbox::checks(scope, &mut findings);
    concat::checks(scope, &mut findings);
    keys::checks(scope, &mut findings);
    revocation::checks(scope, &mut findings);
    volume_store::checks(scope, &mut findings);
    cluster::checks(system, scope, &mut findings);
    pools::checks(scope, &mut findings);
    (Report::of(findings), facts)
}

/// The DSCP marks of a daemon's packets, from its configuration.
#[derive(Debug, Clone, Default)]
pub struct Marking {
    pub qos: Qos,
    /// The Type of Service byte of RDMA packets without `qos`: DSCP << 2.
    pub tos: u8,
}

/// The warnings and failures of the checks of RDMA at these addresses, found without opening a
/// device. RDMA can work on an unsuitable network until it is under load.
pub fn concerns(system: &System, addresses: &[IpAddr], marking: Marking) -> Vec<Finding> {
    let scope = Scope {
        marking,
        listeners: addresses.iter().map(|ip| format!("ip:{ip}")).collect(),
        ..Scope::default()
    };
    let mut findings = Vec::new();
    rdma::of_each_device(system, &mut findings);
    net::of_rdma(system, &scope, &mut findings);
    hardware::drops(system, &scope, &mut findings);
    roce::checks(system, &scope, &roce::facts(system, &scope), &mut findings);
    // Devices, ports (`mlx5_0/1`) and interfaces behind these addresses.
    let mut here: Vec<String> = Vec::new();
    for selected in select::select_all(system, &scope) {
        for (device, port) in system.fabric.ports_of(&selected.netdev) {
            here.push(format!("{}/{}", device.name, port.num));
            here.push(device.name.clone());
        }
        here.push(selected.netdev);
    }
    findings.retain(|finding| {
        let about = finding.subject.as_ref().is_some_and(|s| here.contains(s));
        about && matches!(finding.status, Status::Warn | Status::Fail)
    });
    findings
}

#[cfg(test)]
mod tests;
