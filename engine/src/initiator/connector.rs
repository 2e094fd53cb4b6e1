//! Makes transport connections to one controller, from any thread.

use std::net::SocketAddr;
use std::sync::Arc;

use nacre_nvmf::host::Dial;
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::HostTransport;
use nacre_nvmf_wire::tcp::Digests;
use nacre_transport_tcp::{HostOptions, connect_host};

/// Shared by all threads that connect queues to one controller.
pub trait Connector: Send + Sync {
    /// Begins a connection for queue `qid`.
    fn connect(&self, qid: u16) -> std::io::Result<Box<dyn HostTransport>>;
}

/// A controller behind a TCP address.
pub struct TcpConnector {
    address: SocketAddr,
    options: HostOptions,
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
        TcpConnector { address, options }
    }
}

impl Connector for TcpConnector {
    fn connect(&self, _qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        Ok(Box::new(connect_host(self.address, self.options.clone())?))
    }
}

/// For a [`nacre_nvmf::host::Controller`] or [`nacre_nvmf::host::IoQueue`] of this thread.
pub(crate) fn dial(connector: &Arc<dyn Connector>) -> Box<dyn Dial> {
    let connector = Arc::clone(connector);
    Box::new(move |qid: u16| connector.connect(qid))
}
