//! The transports of one core, and the mapping from their connections to queue pairs.

use std::sync::Arc;

use nacre_reactor::{EventSet, Idle, Interest, Nanos};

use crate::queues::queue_pair::QueuePair;
use crate::subsystems::core_handle::QueueId;
use crate::subsystems::nvmf_target::Target;
use crate::tls::SecureChannel;
use crate::transport::{
    CloseWhy, ConnId, Events, Pools, Response, Transport, TransportCaps, TransportType,
};

/// A transport's I/O half on this core.
struct Port {
    kind: TransportType,
    io: Box<dyn Transport>,
    /// Queue pair by connection index.
    queues: Vec<Option<(ConnId, QueueId)>>,
}

pub(crate) struct Ports {
    ports: Vec<Port>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl Ports {
    pub(crate) fn new(wake: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self {
            ports: Vec::new(),
            wake,
        }
    }

    /// Opens the target's transports that this core has not opened yet.
    pub(crate) fn open(&mut self, target: &Target, core: usize, sleepers: &EventSet) {
        for plug in target.plugs() {
            if self.ports.iter().any(|p| p.kind == plug.kind()) {
                continue;
            }
            match plug.open(core, Arc::clone(&self.wake)) {
                Ok(io) => {
                    for fd in io.wake_fds() {
                        if let Err(error) = sleepers.add(fd, 0, Interest::READ) {
                            tracing::error!(%error, "cannot watch a transport's descriptor");
                        }
                    }
                    self.ports.push(Port {
                        kind: plug.kind(),
                        io,
                        queues: Vec::new(),
                    });
                }
                Err(error) => {
                    tracing::error!(core, kind = %plug.kind(), %error, "cannot open transport on this core");
                }
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.ports.len()
    }

    pub(crate) fn poll(&mut self, port: usize, now: Nanos, pools: &Pools, events: &mut Events) {
        self.ports[port].io.poll(now, pools, events);
    }

    pub(crate) fn flush(&mut self, now: Nanos) {
        for port in &mut self.ports {
            port.io.flush(now);
        }
    }

    pub(crate) fn arm(&mut self, now: Nanos) -> Idle {
        let arm = |idle: Idle, port: &mut Port| idle.and(port.io.arm(now));
        self.ports.iter_mut().fold(Idle::Quiet, arm)
    }

    pub(crate) fn disarm(&mut self) {
        for port in &mut self.ports {
            port.io.disarm();
        }
    }

    // Connections.

    pub(crate) fn caps_of(&self, port: usize, conn: ConnId) -> &TransportCaps {
        self.ports[port].io.caps_of(conn)
    }

    /// The TLS channel of a queue pair's connection.
    pub(crate) fn secure_channel_of(&self, qp: &QueuePair) -> Option<Arc<SecureChannel>> {
        self.ports[qp.port].io.secure_channel(qp.conn)
    }

    /// The queue pair of a connection.
    #[inline]
    pub(crate) fn queue_of(&self, port: usize, conn: ConnId) -> Option<QueueId> {
        match self.ports[port].queues.get(conn.index as usize) {
            Some(Some((known, queue))) if *known == conn => Some(*queue),
            _ => None,
        }
    }

    /// Records the queue pair of a new connection.
    pub(crate) fn assign(&mut self, port: usize, conn: ConnId, queue: QueueId) {
        let queues = &mut self.ports[port].queues;
        if queues.len() <= conn.index as usize {
            queues.resize(conn.index as usize + 1, None);
        }
        queues[conn.index as usize] = Some((conn, queue));
    }

    /// Removes the mapping of a queue pair's connection. Another connection may use its index
    /// already, because the transport releases a connection before slow devices have completed its
    /// I/O.
    pub(crate) fn forget(&mut self, qp: &QueuePair) {
        let place = &mut self.ports[qp.port].queues[qp.conn.index as usize];
        place.take_if(|(conn, _)| *conn == qp.conn);
    }

    /// Closes a connection that has no queue pair.
    pub(crate) fn turn_away(&mut self, port: usize, conn: ConnId) {
        self.ports[port].io.close(conn, CloseWhy::Now);
    }

    // The connection of a queue pair.

    #[inline]
    pub(crate) fn of(&mut self, qp: &QueuePair) -> &mut dyn Transport {
        self.ports[qp.port].io.as_mut()
    }

    pub(crate) fn kind_of(&self, qp: &QueuePair) -> TransportType {
        self.ports[qp.port].kind
    }

    #[inline]
    pub(crate) fn respond(&mut self, qp: &QueuePair, response: Response) {
        self.of(qp).respond(qp.conn, response);
    }

    pub(crate) fn close(&mut self, qp: &QueuePair, why: CloseWhy) {
        self.of(qp).close(qp.conn, why);
    }
}
