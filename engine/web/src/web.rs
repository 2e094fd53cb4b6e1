//! [`Web`]: the state that all listeners and requests of the page share, and the body of a
//! response.

use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, SizeHint};
use nacre_engine_rpc::places::Places;
use nacre_engine_rpc::server::Dispatch;
use nacre_reactor::{Clock, Repeats};
use tokio::sync::{Semaphore, mpsc};

use crate::acts::Trail;
use crate::assets::Assets;
use crate::certificate::Certificate;
use crate::live::{Live, Source};
use crate::logins::Logins;
use crate::upload::{UploadPlace, Uploads};

/// Most clients at a time, streams included; a browser opens up to six connections.
pub const MAX_CLIENTS: usize = 128;
/// Most POST requests that are being answered at a time.
const MAX_RUNNING: usize = 64;
/// Shortest interval between equal log lines about clients.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The engine: executes calls, supplies live data, and records acts.
pub trait Backend: Dispatch + Source + Trail {}

impl<B: Dispatch + Source + Trail> Backend for B {}

/// Time limits; tests have shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the head of a request; also the longest idle time between two requests of a connection.
    pub head: Duration,
    /// For the body of a request.
    pub body: Duration,
    /// For a client to accept some bytes of a response.
    pub write: Duration,
    /// Interval of the samples of live data.
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

/// The server of the page, which all listeners share.
pub struct Web<B> {
    pub(crate) backend: Rc<B>,
    pub(crate) logins: Rc<Logins>,
    pub(crate) assets: Assets,
    pub(crate) live: Rc<Live<B>>,
    pub(crate) limits: Limits,
    pub(crate) about: About,
    pub(crate) uploads: Rc<Uploads>,
    pub(crate) running: Rc<Semaphore>,
    pub(crate) certificate: Rc<RefCell<Option<Certificate>>>,
    pub(crate) clients: Rc<Places>,
    pub(crate) log_limit: RefCell<Repeats<&'static str>>,
}

impl<B> fmt::Debug for Web<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Web")
    }
}

/// Facts that the page shows.
#[derive(Debug, Clone)]
pub struct About {
    pub version: String,
    /// The machine's host name; may be replaced at any time.
    pub host: Rc<RefCell<String>>,
    /// `None`: the machine takes no uploads.
    pub uploads: Option<UploadPlace>,
}

/// The client of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(crate) address: SocketAddr,
    pub(crate) secure: bool,
}

impl<B: Backend> Web<B> {
    /// `certificate`: that of the HTTPS listeners; may be replaced at any time.
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
            uploads: Rc::new(Uploads::new(about.uploads.clone())),
            about,
            running: Rc::new(Semaphore::new(MAX_RUNNING)),
            certificate,
            clients: Places::new(MAX_CLIENTS),
            log_limit: RefCell::new(Repeats::new(LOG_INTERVAL)),
        })
    }

    /// Writes a rate-limited log line about clients. `write` gets the number of its occurrences.
    pub(crate) fn log(&self, line: &'static str, write: impl FnOnce(u64)) {
        let admitted = self.log_limit.borrow_mut().admit(line, Clock::real().now());
        if let Some(left_out) = admitted {
            write(left_out + 1);
        }
    }

    /// True if the administrator's certificate is in use, so that HSTS may make browsers require
    /// HTTPS.
    pub(crate) fn has_real_certificate(&self) -> bool {
        let certificate = self.certificate.borrow();
        certificate
            .as_ref()
            .is_some_and(|one| one.renew_at.is_none())
    }
}

/// The body of a response.
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
