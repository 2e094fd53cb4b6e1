//! Plans `nacre rdma soak client`: the phases of the test in order. Each phase has the RDMA flows
//! between this machine and its peers. This module does no I/O.

use std::net::SocketAddr;
use std::time::Duration;

use nacre_transport_rdma_perf::{Bursts, Op};
use serde::Serialize;

/// The load of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LoadKind {
    /// One peer sends to this machine: the baseline for the same peer in other phases.
    Alone,
    /// All peers send to this machine at once.
    Incast,
    /// All peers, in both directions.
    Both,
    /// All peers, in both directions, in bursts.
    Bursts,
}

impl LoadKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Incast => "incast",
            Self::Both => "both directions",
            Self::Bursts => "bursts",
        }
    }
}

/// One direction of load with a peer: a client session with a server of that peer. RDMA READ moves
/// data to this machine, RDMA WRITE from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SoakFlow {
    /// As in `--peers`: the address of the peer's server for READ.
    pub peer: SocketAddr,
    pub op: Op,
}

impl SoakFlow {
    /// The address of the peer's server for this direction: READ at the port of `peer`, WRITE at
    /// the next one.
    pub(super) fn server(self) -> SocketAddr {
        let mut server = self.peer;
        if self.op != Op::Read {
            server.set_port(server.port().saturating_add(1));
        }
        server
    }
}

/// A part of the test: flows that run at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Phase {
    pub kind: LoadKind,
    pub time: Duration,
    pub flows: Vec<SoakFlow>,
    /// Times with and without load; `None`: load without a pause.
    pub bursts: Option<Bursts>,
}

/// Limits of the time of each peer alone.
const ALONE_LEAST: Duration = Duration::from_secs(2);
const ALONE_MOST: Duration = Duration::from_secs(10);

/// The phases: each peer alone for a twentieth of `time` (2 to 10 s), in addition to `time`. Then
/// incast, both directions and bursts follow, with a third of `time` each.
pub(super) fn plan(peers: &[SocketAddr], time: Duration, bursts: Bursts) -> Vec<Phase> {
    let flows = |ops: &[Op]| {
        let of = |peer: &SocketAddr| {
            let peer = *peer;
            ops.iter()
                .map(move |op| SoakFlow { peer, op: *op })
                .collect::<Vec<_>>()
        };
        peers.iter().flat_map(of).collect::<Vec<SoakFlow>>()
    };
    let alone = |peer: &SocketAddr| Phase {
        kind: LoadKind::Alone,
        time: (time / 20).clamp(ALONE_LEAST, ALONE_MOST),
        flows: vec![SoakFlow {
            peer: *peer,
            op: Op::Read,
        }],
        bursts: None,
    };
    let mut phases: Vec<Phase> = peers.iter().map(alone).collect();
    let kinds = [
        (LoadKind::Incast, &[Op::Read][..], None),
        (LoadKind::Both, &[Op::Read, Op::Write], None),
        (LoadKind::Bursts, &[Op::Read, Op::Write], Some(bursts)),
    ];
    phases.extend(kinds.map(|(kind, ops, bursts)| Phase {
        kind,
        time: time / 3,
        flows: flows(ops),
        bursts,
    }));
    phases
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: all peers take part in every kind, each direction at its own port.
    #[test]
    fn every_peer_takes_part() {
        let peers = ["192.0.2.1:18515", "[2001:db8::1]:9"].map(|peer| peer.parse().unwrap());
        let bursts = Bursts {
            on: Duration::from_millis(10),
            off: Duration::from_millis(40),
        };
        let phases = plan(&peers, Duration::from_secs(30), bursts);
        let kinds: Vec<(LoadKind, usize, u64)> = phases
            .iter()
            .map(|phase| (phase.kind, phase.flows.len(), phase.time.as_secs()))
            .collect();
        assert_eq!(
            kinds,
            [
                (LoadKind::Alone, 1, 2),
                (LoadKind::Alone, 1, 2),
                (LoadKind::Incast, 2, 10),
                (LoadKind::Both, 4, 10),
                (LoadKind::Bursts, 4, 10),
            ]
        );
        assert!(phases[4].bursts.is_some() && phases[3].bursts.is_none());
        let servers: Vec<String> = phases[3]
            .flows
            .iter()
            .map(|flow| flow.server().to_string())
            .collect();
        assert_eq!(
            servers,
            [
                "192.0.2.1:18515",
                "192.0.2.1:18516",
                "[2001:db8::1]:9",
                "[2001:db8::1]:10"
            ]
        );
    }
}
