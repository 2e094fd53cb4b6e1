//! TLS with certificates, for the management protocol and the HTTP endpoints of the daemon.
//!
//! ```text
//!   files     PEM files -> configurations of rustls       parse
//!   crl       dates of revocation lists                   parse
//!   listen    the TCP listener of the RPC server          perform
//!   connect   the connection of a command to a daemon     perform
//! ```
//!
//! Only TLS 1.3, without session tickets, so each connection proves its certificate. TLS of
//! NVMe/TCP uses pre-shared keys, and is in another crate.

pub mod connect;
pub mod crl;
pub mod files;
pub mod listen;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use self::files::ServerTls;
use crate::subject::{Subject, SubjectError};

/// Time limit for the handshake of a client.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Least time between two handshakes of a listener, because the management thread computes them
/// beside its other work.
pub const HANDSHAKE_INTERVAL: Duration = Duration::from_millis(5);

/// The reason that a client was refused during its handshake.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("it has not finished its handshake within {} s", HANDSHAKE_LIMIT.as_secs())]
    Late,
    #[error("it does not speak TLS")]
    NotTls,
    #[error("it presented no certificate")]
    NoCertificate,
    #[error("its certificate is revoked")]
    Revoked,
    #[error("its certificate: {0}")]
    Subject(#[from] SubjectError),
    #[error("the handshake failed: {0}")]
    Failed(#[from] std::io::Error),
}

impl HandshakeError {
    /// The kind of the failure, for rate-limited log lines.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::NotTls => "no TLS",
            Self::NoCertificate => "no certificate",
            Self::Revoked => "revoked",
            Self::Subject(_) => "subject",
            Self::Failed(_) => "failed",
        }
    }
}

/// Performs the handshake of a client. Also returns the subject of its certificate, if the
/// configuration requires one.
pub async fn accept(
    tls: &ServerTls,
    stream: TcpStream,
) -> Result<(TlsStream<TcpStream>, Option<Subject>), HandshakeError> {
    let handshake = TlsAcceptor::from(Arc::clone(&tls.config)).accept(stream);
    let stream = match tokio::time::timeout(HANDSHAKE_LIMIT, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(match tls_error(&error) {
                Some(rustls::Error::InvalidMessage(_)) => HandshakeError::NotTls,
                Some(rustls::Error::NoCertificatesPresented) => HandshakeError::NoCertificate,
                Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Revoked)) => {
                    HandshakeError::Revoked
                }
                _ => HandshakeError::Failed(error),
            });
        }
        Err(_) => return Err(HandshakeError::Late),
    };
    let (_, connection) = stream.get_ref();
    let certificate = connection.peer_certificates().and_then(<[_]>::first);
    let subject = certificate.map(|der| Subject::of_certificate(der));
    Ok((stream, subject.transpose()?))
}

/// The error of rustls inside an I/O error.
pub(super) fn tls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}
