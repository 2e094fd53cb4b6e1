//! Connectors of the host side: they open the queues of one remote controller over NVMe/TCP, or
//! over NVMe/RDMA with NVMe/TCP as the fallback.

use std::net::SocketAddr;
use std::sync::Arc;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{Connector, Dial, GeneratedPsk, WantedQueue};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::tls::Derivation;
use nacre_nvmf::transport::{HostTransport, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;
use nacre_transport_tcp::{HostTls, Marking, TcpHostOptions, connect_host};

use crate::rdma::{Rdma, RdmaDial};
use crate::source::Source;

/// Connects queues to a controller at a TCP address.
pub struct TcpConnector {
    address: SocketAddr,
    options: TcpHostOptions,
    concatenated: Option<Concatenated>,
    source: Source,
}

/// Secure channel concatenation: the PSK that the authentication of the admin queue generates, and
/// the NQNs of its PSK identity.
#[derive(Clone)]
pub struct Concatenated {
    pub psk: Arc<GeneratedPsk>,
    pub host: Nqn,
    pub subsystem: Nqn,
    /// The thread that computes TLS handshakes; `None`: the polling thread computes them.
    pub helper: Option<Arc<Helper>>,
}

impl Concatenated {
    /// The TLS of a queue. Only the admin queue may be in clear, to generate the PSK.
    fn tls(&self, qid: u16) -> std::io::Result<Option<HostTls>> {
        match self.psk.get() {
            Some(psk) => Ok(Some(HostTls {
                identity: psk.offer(&self.host, &self.subsystem),
                psk,
                derivation: Derivation::Standard,
                helper: self.helper.clone(),
            })),
            None if qid == 0 => Ok(None),
            None => Err(std::io::Error::other(
                "the admin queue has not generated a PSK for TLS yet",
            )),
        }
    }
}

impl TcpConnector {
    /// A connector to `address` that requests `digests` and queues of `entries` entries (a count,
    /// not 0's based).
    pub fn new(address: SocketAddr, digests: Digests, entries: u16) -> Self {
        let machine = HostConfig {
            digests,
            entries: entries.into(),
            ..HostConfig::default()
        };
        let options = TcpHostOptions {
            machine,
            ..TcpHostOptions::default()
        };
        Self {
            address,
            options,
            concatenated: None,
            source: Source::default(),
        }
    }

    /// Sets the marking of packets.
    pub fn marked(mut self, marking: Marking) -> Self {
        self.options.marking = marking;
        self
    }

    /// Sets the time limit of a TCP connection attempt, and then of the TLS handshake.
    pub fn within(mut self, connect_timeout: std::time::Duration) -> Self {
        self.options.connect_timeout = connect_timeout;
        self
    }

    /// Sets the PSK of TLS; `None`: connections are in clear.
    pub fn secured(mut self, tls: Option<HostTls>) -> Self {
        self.options.tls = tls;
        self
    }

    /// Uses TLS with the PSK that authentication generates; `None`: does not.
    pub fn concatenated(mut self, concatenated: Option<Concatenated>) -> Self {
        self.concatenated = concatenated;
        self
    }

    /// Sets the source address of connections.
    pub fn from(mut self, source: Source) -> Self {
        self.source = source;
        self
    }
}

impl Connector for TcpConnector {
    fn dialer(&self) -> Box<dyn Dial> {
        let (address, source) = (self.address, self.source.clone());
        let (options, concatenated) = (self.options.clone(), self.concatenated.clone());
        Box::new(move |qid: u16| {
            let mut options = options.clone();
            if let Some(concatenated) = &concatenated {
                options.tls = concatenated.tls(qid)?;
            }
            options.source = source.get();
            let host = connect_host(address, options)?;
            Ok(Box::new(host) as Box<dyn HostTransport>)
        })
    }
}

/// Connects queues to a controller over RDMA, and over TCP if a fallback is given. The request for
/// a queue (`WantedQueue`) names the transport.
pub struct PathConnector {
    rdma: Arc<Rdma>,
    tcp: Option<TcpConnector>,
    address: SocketAddr,
    source: Source,
    tos: u8,
}

impl PathConnector {
    pub fn new(rdma: Arc<Rdma>, address: SocketAddr, fallback: Option<TcpConnector>) -> Self {
        Self {
            rdma,
            tcp: fallback,
            address,
            source: Source::default(),
            tos: 0,
        }
    }

    /// Sets the source address of RDMA connections. The TCP fallback has its own.
    pub fn from(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// Sets the Type of Service byte (DSCP << 2) of RDMA connections. The TCP fallback has its own.
    pub fn marked(mut self, tos: u8) -> Self {
        self.tos = tos;
        self
    }
}

impl Connector for PathConnector {
    fn dialer(&self) -> Box<dyn Dial> {
        let rdma = RdmaDial::new(Arc::clone(&self.rdma), self.address, self.source.clone());
        Box::new(PathDial {
            rdma: rdma.marked(self.tos),
            tcp: self.tcp.as_ref().map(Connector::dialer),
        })
    }

    /// A pool whose memory is registered with all RDMA devices, present and future.
    fn memory(&self, classes: &[ClassSpec]) -> std::io::Result<Pool> {
        self.rdma.memory(classes)
    }
}

/// Dials over the transport that the dial request names; a request without one is an error.
struct PathDial {
    rdma: RdmaDial,
    tcp: Option<Box<dyn Dial>>,
}

impl Dial for PathDial {
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        let why = format!("queue {qid}: there is a choice of transports, and none was made");
        Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why))
    }

    fn dial_wanted(&mut self, wanted: &WantedQueue) -> std::io::Result<Box<dyn HostTransport>> {
        match (wanted.transport, &mut self.tcp) {
            (Some(TransportType::Rdma), _) => self.rdma.dial(wanted),
            (Some(TransportType::Tcp), Some(tcp)) => tcp.dial_wanted(wanted),
            _ => self.dial(wanted.qid),
        }
    }
}
