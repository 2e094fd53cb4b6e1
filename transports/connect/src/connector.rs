//! Connectors over TCP, and over RDMA with TCP as the fallback.

use std::net::SocketAddr;
use std::sync::Arc;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{Connector, Dial, Wanted};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::{HostTransport, TransportType};
use nacre_nvmf_wire::tcp::Digests;
use nacre_transport_tcp::{HostOptions, connect_host};

use crate::rdma::{Rdma, RdmaDial};
use crate::source::Source;

/// A controller behind a TCP address.
pub struct TcpConnector {
    address: SocketAddr,
    options: HostOptions,
    source: Source,
}

impl TcpConnector {
    /// With queues of `entries` entries.
    pub fn new(address: SocketAddr, digests: Digests, entries: u16) -> TcpConnector {
        let machine = HostConfig {
            digests,
            entries: entries.into(),
            ..HostConfig::default()
        };
        let options = HostOptions {
            machine,
            ..HostOptions::default()
        };
        TcpConnector {
            address,
            options,
            source: Source::default(),
        }
    }

    /// With this type of service (DSCP << 2), and this much time for a TCP connection.
    pub fn tuned(mut self, tos: u8, connect_timeout: std::time::Duration) -> TcpConnector {
        (self.options.tos, self.options.connect_timeout) = (tos, connect_timeout);
        self
    }

    pub fn from(mut self, source: Source) -> TcpConnector {
        self.source = source;
        self
    }
}

impl Connector for TcpConnector {
    fn dialer(&self) -> Box<dyn Dial> {
        let (address, source) = (self.address, self.source.clone());
        let options = self.options.clone();
        Box::new(move |_qid: u16| {
            let mut options = options.clone();
            options.source = source.get();
            let host = connect_host(address, options)?;
            Ok(Box::new(host) as Box<dyn HostTransport>)
        })
    }
}

/// A controller that RDMA leads to, and TCP, if that is allowed.
pub struct PathConnector {
    rdma: Arc<Rdma>,
    tcp: Option<TcpConnector>,
    address: SocketAddr,
    source: Source,
}

impl PathConnector {
    pub fn new(
        rdma: Arc<Rdma>,
        address: SocketAddr,
        fallback: Option<TcpConnector>,
    ) -> PathConnector {
        PathConnector {
            rdma,
            tcp: fallback,
            address,
            source: Source::default(),
        }
    }

    /// Of the connections over RDMA; TCP has its own.
    pub fn from(mut self, source: Source) -> PathConnector {
        self.source = source;
        self
    }
}

impl Connector for PathConnector {
    fn dialer(&self) -> Box<dyn Dial> {
        Box::new(PathDial {
            rdma: RdmaDial::new(Arc::clone(&self.rdma), self.address, self.source.clone()),
            tcp: self.tcp.as_ref().map(Connector::dialer),
        })
    }

    /// Known to the RDMA devices that there are, and to those to come.
    fn memory(&self, classes: &[ClassSpec]) -> std::io::Result<Pool> {
        self.rdma.memory(classes)
    }
}

/// Dials by the transport that is asked for.
struct PathDial {
    rdma: RdmaDial,
    tcp: Option<Box<dyn Dial>>,
}

impl Dial for PathDial {
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        let why = format!("queue {qid}: there is a choice of transports, and none was made");
        Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why))
    }

    fn dial_wanted(&mut self, wanted: &Wanted) -> std::io::Result<Box<dyn HostTransport>> {
        match (wanted.transport, &mut self.tcp) {
            (Some(TransportType::Rdma), _) => self.rdma.dial(wanted),
            (Some(TransportType::Tcp), Some(tcp)) => tcp.dial_wanted(wanted),
            _ => self.dial(wanted.qid),
        }
    }
}
