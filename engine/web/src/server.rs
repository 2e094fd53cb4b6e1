//! The listeners of the page: TLS, connections, and their bounds. [`crate::pages`] answers.

use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nacre_engine_rpc::places::{NetworkPlace, Places};
use nacre_engine_rpc::server::Dispatch;
use nacre_engine_rpc::tls::{HANDSHAKE_INTERVAL, HANDSHAKE_LIMIT};
use nacre_reactor::{Clock, Repeats};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use crate::assets::Assets;
use crate::certificate::Certificate;
use crate::endpoint::Endpoint;
use crate::live::{Live, Source};
use crate::logins::Logins;
use crate::patient::Patient;

/// Most clients at a time, streams included: a browser has up to six connections.
pub const MAX_CLIENTS: usize = 128;
/// Most POST requests being answered at a time.
const MAX_RUNNING: usize = 64;
const MAX_HEADERS: usize = 64;
/// Largest request line with its headers, in bytes.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Shortest interval between equal log lines about clients.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The executor of calls and the source of live data.
pub trait Backend: Dispatch + Source {}

impl<B: Dispatch + Source> Backend for B {}

/// Time limits; tests have shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the head of a request, also after the last answer on a connection.
    pub head: Duration,
    /// For the body of a request.
    pub body: Duration,
    /// Without a byte that the client reads.
    pub write: Duration,
    /// Between samples of the live data.
    pub tick: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(10),
            body: Duration::from_secs(10),
            write: Duration::from_secs(20),
            tick: Duration::from_secs(1),
        }
    }
}

/// The page's server; all listeners share it.
pub struct Web<B> {
    pub(crate) backend: Rc<B>,
    pub(crate) logins: Rc<Logins>,
    pub(crate) assets: Assets,
    pub(crate) live: Rc<Live<B>>,
    pub(crate) limits: Limits,
    pub(crate) about: About,
    pub(crate) running: Rc<Semaphore>,
    certificate: Rc<RefCell<Option<Certificate>>>,
    clients: Rc<Places>,
    log_limit: RefCell<Repeats<&'static str>>,
}

impl<B> fmt::Debug for Web<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Web")
    }
}

/// Facts for the page.
#[derive(Debug, Clone)]
pub struct About {
    pub version: String,
    pub host: String,
}

/// One listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    secure: bool,
}

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

    /// The address with the port that the system chose.
    pub fn endpoint(&self) -> std::io::Result<Endpoint> {
        Ok(Endpoint {
            address: self.socket.local_addr()?,
            secure: self.secure,
        })
    }
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(crate) address: SocketAddr,
    pub(crate) secure: bool,
}

impl<B: Backend> Web<B> {
    /// `certificate`: for the HTTPS listeners; may be replaced at any time.
    pub fn new(
        backend: Rc<B>,
        logins: Rc<Logins>,
        certificate: Rc<RefCell<Option<Certificate>>>,
        about: About,
        limits: Limits,
    ) -> Rc<Self> {
        let live = Live::new(Rc::clone(&backend), Rc::clone(&logins), limits.tick);
        Rc::new(Self {
            backend,
            logins,
            assets: Assets::embedded(),
            live,
            limits,
            about,
            running: Rc::new(Semaphore::new(MAX_RUNNING)),
            certificate,
            clients: Places::new(MAX_CLIENTS),
            log_limit: RefCell::new(Repeats::new(LOG_INTERVAL)),
        })
    }

    /// True if browsers may insist on HTTPS from now on: the administrator's certificate is in use.
    pub(crate) fn has_real_certificate(&self) -> bool {
        let certificate = self.certificate.borrow();
        certificate
            .as_ref()
            .is_some_and(|one| one.renew_at.is_none())
    }

    /// Accepts clients forever.
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

    fn log(&self, line: &'static str, write: impl FnOnce(u64)) {
        let admitted = self.log_limit.borrow_mut().admit(line, Clock::real().now());
        if let Some(left_out) = admitted {
            write(left_out + 1);
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

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum Answer {
    Whole(Option<Bytes>),
    Stream(mpsc::Receiver<Bytes>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(receiver) => {
                let next = receiver.poll_recv(context);
                next.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Stream(_) => SizeHint::default(),
        }
    }
}
