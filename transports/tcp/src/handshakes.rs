//! Connections of listeners with TLS, before a core has them: the first byte and the handshake.
//!
//! ```text
//!   accepted ──▶ first byte ──┬─ 16h ──▶ handshake ──▶ core, with the keys
//!                             ├─ other ─▶ core, as without TLS     (allow)
//!                             └─ other ─▶ closed                   (require)
//! ```
//!
//! The accepting thread does this, so a reactor never computes for a handshake. A key that fits
//! costs 0.2 ms; a host without one costs a few HMACs.

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

use crate::accept::{ARRIVING, Acceptor, Arrival, Incoming, ListenerCounters, Said};
use crate::limits::Refusal;
use crate::sealed::Sealed;
use crate::socket;

/// The first byte of a handshake: the type of its record. An ICReq PDU begins with 0.
const HANDSHAKE_RECORD: u8 = 0x16;
/// The longest wait where no connection is arriving.
const LONG: Duration = Duration::from_secs(3600);
/// Records of a flight are well below it.
const RECEIVE: usize = 4096;

/// The decision about a connection after its latest bytes.
enum Next {
    /// More bytes.
    Wait,
    /// A core has it, in clear or with these keys.
    HandOver(Option<Box<Sealed>>),
    /// It ends.
    Drop(Why),
}

/// Why a connection ends here.
enum Why {
    /// The host left before its first byte.
    Left,
    /// Others need its place.
    Evicted,
    Limit(Refusal),
    Failed(Ended),
}

/// The end of a connection by its TLS, or for want of it.
struct Ended {
    /// What log lines and events have one of in a minute, for each address.
    kind: &'static str,
    reason: String,
    /// Host and subsystem, if the connection has named them.
    names: Option<(Nqn, Nqn)>,
}

impl Ended {
    fn of(kind: &'static str, reason: &str) -> Next {
        Next::Drop(Why::Failed(Ended {
            kind,
            reason: reason.to_owned(),
            names: None,
        }))
    }

    fn by(failure: &Failure) -> Next {
        let (kind, names) = match failure {
            Failure::Refused(refused) => {
                let kind = match refused {
                    Refused::Unknown { .. } => "unknown",
                    Refused::Binder { .. } => "binder",
                    Refused::Unreadable { .. } => "unreadable",
                    _ => "refused",
                };
                (kind, refused.names())
            }
            Failure::Alert(_) => ("alert", None),
            _ => ("malformed", None),
        };
        let reason = match failure.alert() {
            Some(alert) => format!("{failure} (alert {alert})"),
            None => failure.to_string(),
        };
        Next::Drop(Why::Failed(Ended {
            kind,
            reason,
            names,
        }))
    }
}

impl Acceptor<'_> {
    /// How long to wait for events.
    pub fn patience(&mut self) -> Duration {
        let now = self.clock.now();
        let late: Vec<u64> = self
            .arriving
            .connections
            .iter()
            .filter(|(_, arrival)| arrival.deadline <= now)
            .map(|(token, _)| *token)
            .collect();
        for token in late {
            self.finish(token, Ended::of("late", "no TLS handshake in time"));
        }
        let deadlines = self.arriving.connections.values().map(|a| a.deadline);
        deadlines.min().map_or(LONG, |first| first.since(now))
    }

    /// Watches a connection until its first byte shows whether it uses TLS.
    pub fn await_first_byte(&mut self, incoming: Incoming, counts: &Arc<ListenerCounters>) {
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
            handshake: None,
        };
        self.arriving.connections.insert(token, arrival);
    }

    /// Bytes arrived, or the connection ended.
    pub fn arrived(&mut self, token: u64) {
        let psks = self.shared.psks.clone();
        let key_updates = self.shared.config.tls_key_updates;
        let now = self.clock.now();
        let Some(arrival) = self.arriving.connections.get_mut(&token) else {
            return;
        };
        let next = loop {
            if let Some(handshake) = &mut arrival.handshake {
                break advance(handshake, &arrival.incoming, key_updates);
            }
            let mut first = [0];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::net::recv(&arrival.incoming.socket, &mut first, flags) {
                Ok((_, 0)) => break Next::Drop(Why::Left),
                Ok(_) if first[0] == HANDSHAKE_RECORD => {
                    let Some(psks) = psks.clone() else {
                        break Next::Drop(Why::Left);
                    };
                    if let Err(refusal) = self.limits.begin(arrival.incoming.peer.ip(), now) {
                        break Next::Drop(Why::Limit(refusal));
                    }
                    match Handshake::new(Role::Target(psks)) {
                        Ok(handshake) => arrival.handshake = Some(handshake),
                        Err(failure) => {
                            self.limits.end(arrival.incoming.peer.ip(), false, now);
                            break Ended::by(&failure);
                        }
                    }
                }
                Ok(_) if arrival.incoming.options.tls() == TlsPolicy::Allow => {
                    break Next::HandOver(None);
                }
                Ok(_) => {
                    let why = "the host does not use TLS, which this listener requires";
                    break Ended::of("clear", why);
                }
                Err(Errno::AGAIN | Errno::INTR) => break Next::Wait,
                Err(_) => break Next::Drop(Why::Left),
            }
        };
        self.finish(token, next);
    }

    /// Closes an arriving connection to make room for others.
    pub fn evict_arriving(&mut self, token: u64) {
        self.finish(token, Next::Drop(Why::Evicted));
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
            handshake,
            ..
        } = arrival;
        let peer = incoming.peer;
        if handshake.is_some() {
            let failed = matches!(next, Next::Drop(Why::Failed(_)));
            self.limits.end(peer.ip(), failed, self.clock.now());
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
                    Why::Left => {}
                    Why::Evicted => self.say_evicted(peer.ip()),
                    Why::Limit(refusal) => {
                        let limited = &self.shared.handshakes.limited;
                        limited.fetch_add(1, Ordering::Relaxed);
                        self.say_ended(&incoming, "limit", refusal.to_string(), None);
                    }
                    Why::Failed(Ended {
                        kind,
                        reason,
                        names,
                    }) => {
                        let failed = &self.shared.handshakes.failed;
                        failed.fetch_add(1, Ordering::Relaxed);
                        self.say_ended(&incoming, kind, reason, names);
                    }
                }
            }
        }
    }

    /// Logs the end of a connection, and reports it as an event.
    fn say_ended(
        &mut self,
        incoming: &Incoming,
        kind: &'static str,
        reason: String,
        names: Option<(Nqn, Nqn)>,
    ) {
        let (peer, psks) = (incoming.peer, self.shared.psks.as_deref());
        self.say(Said::Tls(peer.ip(), kind), |times| {
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
                return Ended::of("left", why);
            }
            Ok((_, count)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Next::Wait,
            Err(errno) => return Ended::of("broken", &socket::describe(errno)),
        };
        let result = handshake.received(&bytes[..count]);
        let sent = say(handshake, incoming);
        match (result, sent) {
            (Ok(None), true) => {}
            (Ok(Some(outcome)), true) => {
                return Next::HandOver(Some(Box::new(Sealed::new(outcome, key_updates))));
            }
            (Ok(_), false) => {
                // A flight is smaller than any socket's buffer.
                return Ended::of("broken", "the host does not take the TLS handshake");
            }
            (Err(failure), _) => return Ended::by(&failure),
        }
    }
}

/// Sends the output of a handshake. `false`: the socket does not take it.
fn say(handshake: &mut Handshake, incoming: &Incoming) -> bool {
    let output = handshake.take_output();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    output.is_empty()
        || rustix::net::send(incoming.socket.as_fd(), &output, flags) == Ok(output.len())
}
