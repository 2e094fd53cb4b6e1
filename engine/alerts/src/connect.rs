//! Connections to webhooks and mail servers.

use std::io::{Error, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::{Failure, Server, Trust};

/// Most addresses of a host that an attempt tries. Each has an equal share of its time.
const ADDRESSES: usize = 4;

impl Server {
    /// The first four addresses of the host, in the order of the resolver. Blocks.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, Failure> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let found = found.map_err(|source| self.unreachable(source))?;
        Ok(found.take(ADDRESSES).collect())
    }

    /// Connects to the first address that accepts the connection. Each address has an equal share
    /// of `limit`.
    pub(crate) async fn connect(
        &self,
        addresses: &[SocketAddr],
        limit: Duration,
    ) -> Result<TcpStream, Failure> {
        let mut error = Error::new(ErrorKind::NotFound, "the host has no address");
        let share = limit / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
        for address in addresses {
            match tokio::time::timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(refused)) => error = refused,
                Err(_) => {
                    let cause = format!("no answer within {} s", share.as_secs_f32());
                    error = Error::new(ErrorKind::TimedOut, cause);
                }
            }
        }
        Err(self.unreachable(error))
    }

    pub(crate) async fn handshake(
        &self,
        stream: TcpStream,
        trust: &Trust,
    ) -> Result<TlsStream<TcpStream>, Failure> {
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_| Failure::ServerName(self.host.clone()))?;
        let connector = TlsConnector::from(trust.config());
        let connected = connector.connect(name, stream).await;
        connected.map_err(|source| Failure::Tls {
            server: self.to_string(),
            source,
        })
    }

    fn unreachable(&self, source: Error) -> Failure {
        Failure::Connect {
            server: self.to_string(),
            source,
        }
    }
}
