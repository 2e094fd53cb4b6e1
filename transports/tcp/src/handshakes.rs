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

use nacre_nvmf::transport::TlsPolicy;
use nacre_reactor::{Interest, Nanos};
use nacre_transport_tls::{Failure, Handshake, Outcome, Role};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::accept::{ARRIVING, Acceptor, Arrival, Incoming, ListenerCounters, Said};
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
    /// It ends; a reason is worth a line in the log.
    Drop(Option<String>),
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
            self.finish(token, Next::Drop(Some("no TLS handshake in time".into())));
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
        let Some(arrival) = self.arriving.connections.get_mut(&token) else {
            return;
        };
        let next = loop {
            if let Some(handshake) = &mut arrival.handshake {
                break advance(handshake, &arrival.incoming);
            }
            let mut first = [0];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::net::recv(&arrival.incoming.socket, &mut first, flags) {
                Ok((_, 0)) => break Next::Drop(None),
                Ok(_) if first[0] == HANDSHAKE_RECORD => {
                    let Some(psks) = psks.clone() else {
                        break Next::Drop(None);
                    };
                    match Handshake::new(Role::Target(psks)) {
                        Ok(handshake) => arrival.handshake = Some(handshake),
                        Err(failure) => break Next::Drop(Some(failure.to_string())),
                    }
                }
                Ok(_) if arrival.incoming.options.tls() == TlsPolicy::Allow => {
                    break Next::HandOver(None);
                }
                Ok(_) => {
                    let why = "the host does not use TLS, which this listener requires";
                    break Next::Drop(Some(why.into()));
                }
                Err(Errno::AGAIN | Errno::INTR) => break Next::Wait,
                Err(_) => break Next::Drop(None),
            }
        };
        self.finish(token, next);
    }

    /// Closes the oldest arriving connection, if it is older than `grace`.
    pub fn evict_arriving(&mut self, now: Nanos, grace: Duration) -> bool {
        let oldest = self.arriving.connections.iter();
        let oldest = oldest.min_by_key(|(_, arrival)| arrival.deadline);
        let token = oldest
            .filter(|(_, arrival)| now.since(arrival.incoming.pending.since) >= grace)
            .map(|(token, _)| *token);
        if let Some(token) = token {
            let why = "no TLS handshake, and others wait ([nvmf] max_pending_connections)";
            self.finish(token, Next::Drop(Some(why.into())));
        }
        token.is_some()
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
            ..
        } = arrival;
        // The socket stays open where a core takes it.
        let _ = self.shared.watched.delete(&incoming.socket);
        match next {
            Next::Wait => {}
            Next::HandOver(sealed) => {
                if let Some(sealed) = &sealed {
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
                self.shared.rejected_tls.fetch_add(1, Ordering::Relaxed);
                let peer = incoming.peer;
                if let Some(why) = why {
                    self.say(Said::Tls(peer.ip()), |times| {
                        tracing::warn!(%peer, times, "connection closed: {why}");
                    });
                }
            }
        }
    }
}

/// Receives, and sends the answers of the handshake.
fn advance(handshake: &mut Handshake, incoming: &Incoming) -> Next {
    loop {
        let mut bytes = [0; RECEIVE];
        let count = match rustix::net::recv(&incoming.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                let why = "the host closed the connection during the TLS handshake";
                return Next::Drop(Some(why.into()));
            }
            Ok((_, count)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Next::Wait,
            Err(errno) => return Next::Drop(Some(socket::describe(errno))),
        };
        let result = handshake.received(&bytes[..count]);
        let sent = say(handshake, incoming);
        match (result, sent) {
            (Ok(None), true) => {}
            (Ok(Some(outcome)), true) => return Next::HandOver(sealed(outcome)),
            (Ok(_), false) => {
                // A flight is smaller than any socket's buffer.
                return Next::Drop(Some("the host does not take the TLS handshake".into()));
            }
            (Err(failure), _) => return Next::Drop(Some(described(&failure))),
        }
    }
}

fn sealed(outcome: Outcome) -> Option<Box<Sealed>> {
    Some(Box::new(Sealed::new(outcome)))
}

fn described(failure: &Failure) -> String {
    match failure.alert() {
        Some(alert) => format!("{failure} (alert {alert})"),
        None => failure.to_string(),
    }
}

/// Sends the output of a handshake. `false`: the socket does not take it.
fn say(handshake: &mut Handshake, incoming: &Incoming) -> bool {
    let output = handshake.take_output();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    output.is_empty()
        || rustix::net::send(incoming.socket.as_fd(), &output, flags) == Ok(output.len())
}
