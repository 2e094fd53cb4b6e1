//! Accepted connections before a core takes them over: for listeners with TLS, the first byte and
//! the handshake.
//!
//! ```text
//!   accepted ──▶ first byte ──┬─ 16h ──▶ handshake ──▶ core, with the keys
//!                             ├─ other ─▶ core, as without TLS     (allow)
//!                             └─ other ─▶ closed                   (require)
//! ```
//!
//! The accepting thread does this, so a reactor never computes for a handshake. A handshake with a
//! known PSK takes 0.2 ms of processor time; one with an unknown PSK, a few HMACs. If an address
//! has many handshakes in flight, nothing is read from its further connections until one ends.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf::tls::{Refused, TlsFailure};
use nacre_nvmf::transport::TlsPolicy;
use nacre_nvmf_wire::Nqn;
use nacre_reactor::Interest;
use nacre_transport_tls::{Failure, Handshake, Role};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::accept::{ARRIVING, Acceptor, Arrival, Incoming, ListenerCounters, LogKey};
use crate::failure_kind::FailureKind;
use crate::limits::{Admission, Refusal};
use crate::sealed::Sealed;
use crate::socket;

/// The first byte of a handshake: the type of its record. An ICReq PDU begins with 0.
const HANDSHAKE_RECORD: u8 = 0x16;
/// The wait for events if no connection is in its handshake.
const LONG: Duration = Duration::from_secs(3600);
/// Bytes of one receive. The flights of a handshake are shorter.
const RECEIVE: usize = 4096;

/// The decision about a connection after its latest bytes.
enum Next {
    /// Wait for more bytes.
    Wait,
    /// Hand the connection to a core: over TLS, or in clear (`None`).
    HandOver(Option<Box<Sealed>>),
    /// Close the connection.
    Drop(CloseReason),
}

/// The reason why a connection ends before a core has it.
enum CloseReason {
    /// The host closed the connection before its handshake, or the socket failed.
    Left,
    /// Closed at `max_pending_connections`, to accept another.
    Evicted,
    Limit(Refusal),
    Failed(FailedHandshake),
}

/// A failed handshake, or a connection in clear where the listener requires TLS.
struct FailedHandshake {
    kind: FailureKind,
    reason: String,
    /// Host and subsystem, if the connection has named them.
    names: Option<(Nqn, Nqn)>,
}

impl FailedHandshake {
    fn of(kind: FailureKind, reason: &str) -> Next {
        Next::Drop(CloseReason::Failed(Self {
            kind,
            reason: reason.to_owned(),
            names: None,
        }))
    }

    fn by(failure: &Failure) -> Next {
        let (kind, names) = match failure {
            Failure::Refused(refused) => {
                let kind = match refused {
                    Refused::Unknown { .. } => FailureKind::Unknown,
                    Refused::Binder { .. } => FailureKind::Binder,
                    Refused::Unreadable { .. } => FailureKind::Unreadable,
                    _ => FailureKind::Refused,
                };
                (kind, refused.names())
            }
            Failure::Alert(_) => (FailureKind::Alert, None),
            _ => (FailureKind::Malformed, None),
        };
        let reason = match failure.alert() {
            Some(alert) => format!("{failure} (alert {alert})"),
            None => failure.to_string(),
        };
        Next::Drop(CloseReason::Failed(Self {
            kind,
            reason,
            names,
        }))
    }
}

impl Acceptor<'_> {
    /// Closes connections whose handshake is late, begins those whose turn has come, and returns
    /// the time until the next deadline.
    pub(crate) fn patience(&mut self) -> Duration {
        let now = self.clock.now();
        let late: Vec<u64> = self
            .arriving
            .connections
            .iter()
            .filter(|(_, arrival)| arrival.deadline <= now)
            .map(|(token, _)| *token)
            .collect();
        for token in late {
            self.finish(
                token,
                FailedHandshake::of(FailureKind::Late, "no TLS handshake in time"),
            );
        }
        self.take_turns();
        let deadlines = self.arriving.connections.values().map(|a| a.deadline);
        deadlines.min().map_or(LONG, |first| first.since(now))
    }

    /// Begins the handshakes of waiting connections after others of their address have ended.
    fn take_turns(&mut self) {
        while let Some(token) = self.arriving.turns.pop_front() {
            let Some(arrival) = self.arriving.connections.get(&token) else {
                continue;
            };
            let (socket, peer) = (&arrival.incoming.socket, arrival.incoming.peer.ip());
            if let Err(refusal) = self.limits.check_failures(peer, self.clock.now()) {
                self.finish(token, Next::Drop(CloseReason::Limit(refusal)));
            } else if self
                .shared
                .watched
                .modify(socket, token, Interest::READ)
                .is_ok()
            {
                self.arrived(token);
            } else {
                self.finish(token, Next::Drop(CloseReason::Left));
            }
        }
    }

    /// Watches a connection until its first byte shows whether it uses TLS.
    pub(crate) fn await_first_byte(&mut self, incoming: Incoming, counts: &Arc<ListenerCounters>) {
        let number = self.arriving.next % ARRIVING;
        self.arriving.next += 1;
        let token = number | ARRIVING;
        let watched = self
            .shared
            .watched
            .add(&incoming.socket, token, Interest::READ);
        if let Err(error) = watched {
            tracing::warn!(%error, peer = %incoming.peer, "a connection cannot be watched and is closed");
            return;
        }
        let arrival = Arrival {
            deadline: incoming.pending.since + self.shared.config.icreq_timeout,
            incoming,
            counts: Arc::clone(counts),
            turn: None,
            handshake: None,
        };
        self.arriving.connections.insert(token, arrival);
    }

    /// Continues with a connection that has input, or whose peer has closed it.
    pub(crate) fn arrived(&mut self, token: u64) {
        let psks = self.shared.psks.clone();
        let key_updates = self.shared.config.tls_key_updates;
        let now = self.clock.now();
        let Some(arrival) = self.arriving.connections.get_mut(&token) else {
            return;
        };
        let next = loop {
            if arrival.turn == Some(Admission::Later) {
                // Not watched for bytes: the connection has broken.
                break Next::Drop(CloseReason::Left);
            }
            if let Some(handshake) = &mut arrival.handshake {
                break advance(handshake, &arrival.incoming, key_updates);
            }
            let mut first = [0];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::net::recv(&arrival.incoming.socket, &mut first, flags) {
                Ok((_, 0)) => break Next::Drop(CloseReason::Left),
                Ok(_) if first[0] == HANDSHAKE_RECORD => {
                    let Some(psks) = psks.clone() else {
                        break Next::Drop(CloseReason::Left);
                    };
                    if arrival.turn.is_none() {
                        let peer = arrival.incoming.peer.ip();
                        match self.limits.begin(peer, token, now) {
                            Ok(turn) => arrival.turn = Some(turn),
                            Err(refusal) => break Next::Drop(CloseReason::Limit(refusal)),
                        }
                    }
                    if arrival.turn == Some(Admission::Later) {
                        let (watched, socket) = (&self.shared.watched, &arrival.incoming.socket);
                        match watched.modify(socket, token, Interest::empty()) {
                            Ok(()) => break Next::Wait,
                            Err(_) => break Next::Drop(CloseReason::Left),
                        }
                    }
                    match Handshake::new(Role::Target(psks)) {
                        Ok(handshake) => arrival.handshake = Some(handshake),
                        Err(failure) => break FailedHandshake::by(&failure),
                    }
                }
                Ok(_) if arrival.incoming.options.tls() == TlsPolicy::Allow => {
                    break Next::HandOver(None);
                }
                Ok(_) => {
                    let why = "the host does not use TLS, which this listener requires";
                    break FailedHandshake::of(FailureKind::Clear, why);
                }
                Err(Errno::AGAIN | Errno::INTR) => break Next::Wait,
                Err(_) => break Next::Drop(CloseReason::Left),
            }
        };
        self.finish(token, next);
    }

    /// Closes an arriving connection to make room for others.
    pub(crate) fn evict_arriving(&mut self, token: u64) {
        self.finish(token, Next::Drop(CloseReason::Evicted));
    }

    fn finish(&mut self, token: u64, next: Next) {
        if matches!(next, Next::Wait) {
            return;
        }
        let Some(arrival) = self.arriving.connections.remove(&token) else {
            return;
        };
        let Arrival {
            mut incoming,
            counts,
            turn,
            handshake,
            ..
        } = arrival;
        let peer = incoming.peer;
        match turn {
            None => {}
            Some(Admission::Later) => self.limits.leave(peer.ip(), token),
            Some(Admission::Now) => {
                let failed =
                    handshake.is_some() && matches!(next, Next::Drop(CloseReason::Failed(_)));
                let next = self.limits.end(peer.ip(), failed, self.clock.now());
                if let Some(next) = next {
                    if let Some(arrival) = self.arriving.connections.get_mut(&next) {
                        arrival.turn = Some(Admission::Now);
                    }
                    self.arriving.turns.push_back(next);
                }
            }
        }
        // The socket stays open where a core takes it.
        let _ = self.shared.watched.delete(&incoming.socket);
        match next {
            Next::Wait => {}
            Next::HandOver(sealed) => {
                if let Some(sealed) = &sealed {
                    self.shared
                        .handshakes
                        .succeeded
                        .fetch_add(1, Ordering::Relaxed);
                    let channel = sealed.channel();
                    tracing::debug!(
                        peer = %incoming.peer,
                        identity = %channel.identity,
                        suite = channel.suite.name(),
                        derivation = channel.derivation.name(),
                        "TLS handshake"
                    );
                }
                incoming.sealed = sealed;
                self.hand_over(incoming, &counts);
            }
            Next::Drop(why) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                match why {
                    CloseReason::Left => {}
                    CloseReason::Evicted => self.log_eviction(peer.ip()),
                    CloseReason::Limit(refusal) => {
                        let limited = &self.shared.handshakes.limited;
                        limited.fetch_add(1, Ordering::Relaxed);
                        self.log_tls_failure(&incoming, "limit", refusal.to_string(), None);
                    }
                    CloseReason::Failed(FailedHandshake {
                        kind,
                        reason,
                        names,
                    }) => {
                        let failed = &self.shared.handshakes.failed[kind as usize];
                        failed.fetch_add(1, Ordering::Relaxed);
                        self.log_tls_failure(&incoming, kind.name(), reason, names);
                    }
                }
            }
        }
    }

    /// Logs the end of a connection, and reports it as an event.
    fn log_tls_failure(
        &mut self,
        incoming: &Incoming,
        kind: &'static str,
        reason: String,
        names: Option<(Nqn, Nqn)>,
    ) {
        let (peer, psks) = (incoming.peer, self.shared.psks.as_deref());
        self.log(LogKey::Tls(peer.ip(), kind), |times| {
            tracing::warn!(%peer, times, "connection closed: {reason}");
            if let Some(psks) = psks {
                psks.failed(TlsFailure {
                    peer: peer.to_string(),
                    address: peer.ip().to_string(),
                    names,
                    reason,
                    times,
                });
            }
        });
    }
}

/// Receives, and sends the answers of the handshake.
fn advance(handshake: &mut Handshake, incoming: &Incoming, key_updates: bool) -> Next {
    loop {
        let mut bytes = [0; RECEIVE];
        let count = match rustix::net::recv(&incoming.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                let why = "the host closed the connection during the TLS handshake";
                return FailedHandshake::of(FailureKind::Left, why);
            }
            Ok((_, count)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Next::Wait,
            Err(errno) => {
                return FailedHandshake::of(FailureKind::Broken, &socket::describe(errno));
            }
        };
        let result = handshake.received(&bytes[..count]);
        let sent = send_output(handshake, incoming);
        match (result, sent) {
            (Ok(None), true) => {}
            (Ok(Some(outcome)), true) => {
                return Next::HandOver(Some(Box::new(Sealed::new(outcome, key_updates))));
            }
            (Ok(_), false) => {
                // A flight is smaller than any socket's buffer.
                return FailedHandshake::of(
                    FailureKind::Broken,
                    "the host does not take the TLS handshake",
                );
            }
            (Err(failure), _) => return FailedHandshake::by(&failure),
        }
    }
}

/// Sends the output of a handshake. `false`: the socket does not take it.
fn send_output(handshake: &mut Handshake, incoming: &Incoming) -> bool {
    let output = handshake.take_output();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    output.is_empty()
        || rustix::net::send(incoming.socket.as_fd(), &output, flags) == Ok(output.len())
}
