//! Connects a command of `nacre` to the TLS listener of a daemon. Blocking.

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConnection, StreamOwned};

use super::files::{Named, TlsError, client};
use super::tls_error;

/// The address of a daemon's TLS listener, and the files that authenticate both ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// `HOST:PORT`, `[ADDRESS]:PORT`.
    pub address: String,
    /// The name in the daemon's certificate; `None`: the host of `address`.
    pub server_name: Option<String>,
    /// The client's certificate, PEM.
    pub cert: PathBuf,
    /// The key of `cert`.
    pub key: PathBuf,
    /// CA certificates for the daemon's certificate, PEM.
    pub ca: PathBuf,
    /// Revocation lists of `ca`; `None`: no certificate is revoked.
    pub crl: Option<PathBuf>,
}

/// The reason why the handshake with a daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeFailure {
    #[error(transparent)]
    Files(#[from] TlsError),
    #[error(
        "\"{0}\" is no name of a host: name the one in the daemon's certificate with --server-name"
    )]
    Name(String),
    #[error(
        "the daemon's certificate is refused: {source}; --ca must name the certificate that signed it, and {name} must be one of its names (--server-name)"
    )]
    Certificate { name: String, source: rustls::Error },
    #[error(
        "the daemon's certificate is revoked: install a new certificate on the daemon, [rpc.tls] cert"
    )]
    Revoked,
    #[error(
        "the daemon's certificate is refused: {0}; the file of --crl needs a current revocation list of every authority that signed the certificate"
    )]
    NoList(rustls::Error),
    #[error(
        "the daemon refused the handshake: {0}; --cert must be a certificate that its [rpc.tls] client_ca signed, for clients, not expired and not revoked; the daemon's log has the cause"
    )]
    Refused(rustls::Error),
    #[error("{0}")]
    Tls(rustls::Error),
    #[error("the daemon closed the connection: is {0} its [rpc.tls] listen?")]
    Closed(String),
}

/// The reason why the connection failed.
#[derive(Debug)]
pub(crate) enum ConnectError {
    Unreachable(std::io::Error),
    Handshake(Box<HandshakeFailure>),
}

pub(crate) type Stream = StreamOwned<ClientConnection, TcpStream>;

impl Remote {
    /// Connects and performs the handshake, within `limit`.
    pub(crate) fn connect(&self, limit: Duration) -> Result<Stream, ConnectError> {
        let failed = |failure| ConnectError::Handshake(Box::new(failure));
        let unreachable = ConnectError::Unreachable;
        let until = Instant::now() + limit;
        let named = |key, path| Named { key, path };
        let config = client(
            named("--cert", &self.cert),
            named("--key", &self.key),
            named("--ca", &self.ca),
            self.crl.as_deref().map(|path| named("--crl", path)),
        );
        let config = config.map_err(|error| failed(error.into()))?;
        let name = self.name();
        let server_name = ServerName::try_from(name.clone())
            .map_err(|_| failed(HandshakeFailure::Name(name.clone())))?;
        let mut connection = ClientConnection::new(config, server_name)
            .map_err(|error| failed(HandshakeFailure::Tls(error)))?;
        let mut socket = self.tcp(limit).map_err(unreachable)?;
        let left = until.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        socket
            .set_nodelay(true)
            .and_then(|()| socket.set_read_timeout(Some(left)))
            .and_then(|()| socket.set_write_timeout(Some(left)))
            .map_err(unreachable)?;
        while connection.is_handshaking() {
            if let Err(error) = connection.complete_io(&mut socket) {
                return Err(match self.failure(&error) {
                    Some(failure) => failed(failure),
                    None if error.kind() == ErrorKind::WouldBlock => {
                        unreachable(ErrorKind::TimedOut.into())
                    }
                    None => unreachable(error),
                });
            }
        }
        Ok(StreamOwned::new(connection, socket))
    }

    fn tcp(&self, limit: Duration) -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, limit) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn name(&self) -> String {
        self.server_name.clone().unwrap_or_else(|| {
            let host = self.address.rsplit_once(':').map_or("", |(host, _)| host);
            host.trim_matches(['[', ']']).to_owned()
        })
    }

    /// The failure of TLS in an error of a read or write; `None`: the network failed. The daemon's
    /// refusal of a certificate arrives with the first read after the handshake (RFC 8446,
    /// 4.4.2.4).
    pub(crate) fn failure(&self, error: &std::io::Error) -> Option<HandshakeFailure> {
        match tls_error(error) {
            Some(rustls::Error::InvalidCertificate(CertificateError::Revoked)) => {
                Some(HandshakeFailure::Revoked)
            }
            Some(
                source @ rustls::Error::InvalidCertificate(
                    CertificateError::UnknownRevocationStatus
                    | CertificateError::ExpiredRevocationList
                    | CertificateError::ExpiredRevocationListContext { .. },
                ),
            ) => Some(HandshakeFailure::NoList(source.clone())),
            Some(source @ rustls::Error::InvalidCertificate(_)) => {
                Some(HandshakeFailure::Certificate {
                    name: self.name(),
                    source: source.clone(),
                })
            }
            Some(alert @ rustls::Error::AlertReceived(_)) => {
                Some(HandshakeFailure::Refused(alert.clone()))
            }
            Some(other) => Some(HandshakeFailure::Tls(other.clone())),
            None if error.kind() == ErrorKind::UnexpectedEof => {
                Some(HandshakeFailure::Closed(self.address.clone()))
            }
            None => None,
        }
    }
}
