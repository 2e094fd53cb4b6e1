//! The listeners of the page: TLS, connections, and their limits. [`crate::pages`] answers the
//! requests.

use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nacre_engine_rpc::places::NetworkPlace;
use nacre_engine_rpc::tls::{HANDSHAKE_INTERVAL, HANDSHAKE_LIMIT};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use crate::endpoint::Endpoint;
use crate::patient::Patient;
use crate::web::{Backend, Client, MAX_CLIENTS, Web};

/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// Most bytes of a request line with its headers.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// A listening TCP socket of the administration page, for HTTPS or plain HTTP.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    secure: bool,
}

/// A listen address could not be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve the page on {endpoint}: {source}; choose another [web] listen")]
pub struct BindError {
    pub endpoint: Endpoint,
    pub source: std::io::Error,
}

impl Listener {
    pub async fn bind(endpoint: Endpoint) -> Result<Self, BindError> {
        match TcpListener::bind(endpoint.address).await {
            Ok(socket) => Ok(Self {
                socket,
                secure: endpoint.secure,
            }),
            Err(source) => Err(BindError { endpoint, source }),
        }
    }

    /// The address, with the actual port if 0 was configured.
    pub fn endpoint(&self) -> std::io::Result<Endpoint> {
        Ok(Endpoint {
            address: self.socket.local_addr()?,
            secure: self.secure,
        })
    }
}

impl<B: Backend> Web<B> {
    /// Accepts clients, forever.
    pub async fn serve(self: Rc<Self>, listener: Listener) {
        loop {
            let (stream, address) = match listener.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely out of descriptors: other connections must end first.
                    self.log("accept", |times| {
                        warn!(%error, times, "web: cannot accept a client");
                    });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (place, gone) = self.clients.enter(address.ip());
            if let Some(address) = gone {
                self.log("full", |times| warn_full(address, times));
            }
            let secure = listener.secure;
            let client = Client { address, secure };
            tokio::task::spawn_local(Rc::clone(&self).client(stream, client, place));
            if secure {
                tokio::time::sleep(HANDSHAKE_INTERVAL).await;
            }
        }
    }

    async fn client(self: Rc<Self>, stream: TcpStream, client: Client, place: NetworkPlace) {
        let _ = stream.set_nodelay(true);
        let served = async {
            if !client.secure {
                return self.connection(stream, client).await;
            }
            let config = self
                .certificate
                .borrow()
                .as_ref()
                .map(|of| of.config.clone());
            let Some(config) = config else {
                return;
            };
            let handshake = TlsAcceptor::from(config).accept(stream);
            match tokio::time::timeout(HANDSHAKE_LIMIT, handshake).await {
                Ok(Ok(stream)) => self.connection(stream, client).await,
                Ok(Err(error)) => debug!(%error, "web: handshake failed"),
                Err(_) => debug!("web: handshake too slow"),
            }
        };
        tokio::select! {
            () = served => {}
            () = place.must_leave() => debug!("web: client dropped: another one needs its place"),
        }
    }

    async fn connection(&self, stream: impl AsyncRead + AsyncWrite + Unpin, client: Client) {
        let service = service_fn(|request| async move {
            Ok::<_, Infallible>(crate::pages::answer(self, request, client).await)
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(
                TokioIo::new(Patient::new(stream, self.limits.write)),
                service,
            );
        if let Err(error) = connection.await {
            debug!(%error, "web: client lost");
        }
    }
}

fn warn_full(address: IpAddr, times: u64) {
    warn!(
        clients = MAX_CLIENTS,
        %address,
        times,
        "web: no place for more clients: the oldest was closed for a new one"
    );
}
