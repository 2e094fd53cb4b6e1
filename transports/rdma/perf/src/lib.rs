//! Measures RDMA between two machines: SEND, WRITE and READ, bandwidth and latency, and compares
//! every byte on request.
//!
//! ```text
//! client                                              server
//!  │ ── REQ  control: the requested test ───────────▶ │  memory, domain, queues of this session
//!  │ ◀── REP  session number ──────────────────────── │
//!  │ ── REQ  data: session, index ──────────────────▶ │  one queue pair each
//!  │ ◀── REP  address, key, receives, READ depth ──── │
//!  │ ══ SEND, WRITE or READ, as many as the depth ══▶ │
//!  │ ◀═ credits, echoes or results of comparisons ═══ │
//!  │ ── control: alive ─────────────────────────────▶ │  both ends close if the peer is silent
//!  │ ── control: done ──────────────────────────────▶ │
//!  │ ◀── control: ended ───────────────────────────── │
//! ```
//!
//! [`Server`] serves one client after another; [`measure`] is a client's run. Both work over any
//! provider of `nacre_transport_rdma_verbs`, and so over the simulated one with its faults.
//! [`wire`] has the messages between the ends, [`Test`] the possible requests, and [`PerfError`]
//! every failure.

#![forbid(unsafe_code)]

mod client;
mod completion;
mod dial;
mod endpoint;
mod error;
mod flow;
mod params;
mod pattern;
mod probe;
mod report;
mod server;
mod server_queue_pair;
mod session;
pub mod wire;

#[cfg(test)]
mod tests;

pub use client::{Bursts, ClientOptions, Progress, measure};
pub use error::{Failed, Mismatch, PerfError};
pub use params::{Invalid, Length, MAX_DEPTH, MAX_MESSAGE, MAX_QUEUE_PAIRS, Measure, Op, Test};
pub use probe::{Answer, around, probe};
pub use report::{Latencies, Latency, LatencyOf, Report, SCHEMA, SizeReport};
pub use server::{Server, ServerEvent, ServerOptions};
pub use session::Served;

/// The default port of a server, which perftest's programs use too.
pub const DEFAULT_PORT: u16 = 18515;
