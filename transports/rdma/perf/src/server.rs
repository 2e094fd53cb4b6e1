//! The server side of the RDMA performance test. It listens, and runs the tests of clients one
//! after another.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{
    CmEvent, CmEventKind, CmId, CmOptions, ConnParams, ConnectionManager, DeviceId, Provider,
};

use crate::endpoint::Waiter;
use crate::error::PerfError;
use crate::params::{MAX_DEPTH, MAX_QUEUE_PAIRS};
use crate::session::{Declined, Served, Session, SessionSetup};
use crate::wire::{Refusal, Reject, Request, SessionParameters, VERSION, WireError};

/// Most connect requests that wait in the kernel.
const BACKLOG: i32 = 128;
/// Interval at which an idle server checks for interruption.
const IDLE: Duration = Duration::from_millis(100);
/// Interval at which an idle server lists the RDMA devices, and so releases removed ones.
const LISTED: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct ServerOptions {
    pub listen: Vec<SocketAddr>,
    /// [`Server::serve`] returns after the first client.
    pub once: bool,
    /// Most memory in bytes that the server provides for one client's test.
    pub memory: u64,
    pub max_queue_pairs: u16,
    pub max_depth: u16,
    /// Type of Service byte (DSCP << 2); 0: the system's default.
    pub tos: u8,
    /// How long to poll for completions before sleeping.
    pub spin: Duration,
}

impl ServerOptions {
    pub fn new(listen: Vec<SocketAddr>) -> Self {
        Self {
            listen,
            once: false,
            memory: 512 << 20,
            max_queue_pairs: MAX_QUEUE_PAIRS,
            max_depth: MAX_DEPTH,
            tos: 0,
            spin: Duration::from_millis(1),
        }
    }
}

/// Events of a server.
#[derive(Debug)]
pub enum ServerEvent {
    Began {
        peer: SocketAddr,
        terms: SessionParameters,
    },
    Ended {
        peer: SocketAddr,
        terms: SessionParameters,
        outcome: Result<Served, PerfError>,
    },
    /// The server rejected a client. `why` is the server's own error, if that was the reason.
    Refused {
        peer: SocketAddr,
        reject: Reject,
        why: Option<PerfError>,
    },
}

pub struct Server {
    provider: Arc<dyn Provider>,
    options: ServerOptions,
    listeners: Vec<(CmId, SocketAddr)>,
    session: Option<Session>,
    /// The number of the last session. Each session has a different number.
    number: u32,
    waiter: Waiter,
    cm: Box<dyn ConnectionManager>,
}

/// A connect request.
struct ConnectRequest {
    id: CmId,
    device: DeviceId,
    peer: SocketAddr,
    params: ConnParams,
}

impl Server {
    pub fn bind(provider: Arc<dyn Provider>, options: ServerOptions) -> Result<Self, PerfError> {
        let mut cm = provider.connection_manager()?;
        let mut listeners = Vec::new();
        let cm_options = CmOptions {
            tos: options.tos,
            ack_timeout: None,
        };
        for address in &options.listen {
            let listening = cm.listen(*address, BACKLOG, cm_options)?;
            listeners.push((listening.id, listening.address));
        }
        Ok(Self {
            provider,
            options,
            listeners,
            session: None,
            // Different from earlier servers', so that their clients do not find a session here.
            number: std::process::id() << 8,
            waiter: Waiter::new(cm.fd())?,
            cm,
        })
    }

    /// The listening addresses, with the actual port where port 0 was requested.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().map(|(_, address)| *address).collect()
    }

    /// Serves clients until `stop` is set and reports each event to `report`. With
    /// [`ServerOptions::once`], returns the outcome of the first client. Fails with
    /// [`PerfError::NoListener`] when the devices of all listeners were removed.
    pub fn serve(
        &mut self,
        stop: &AtomicBool,
        report: &mut dyn FnMut(ServerEvent),
    ) -> Result<(), PerfError> {
        let mut listed = Instant::now();
        loop {
            self.events(report)?;
            if stop.load(Ordering::Relaxed) {
                if self.session.is_some() {
                    self.end(Err(PerfError::Interrupted), report)?;
                }
                return Ok(());
            }
            let Some(session) = &mut self.session else {
                if self.listeners.is_empty() {
                    return Err(PerfError::NoListener);
                }
                self.waiter.wait(IDLE)?;
                if listed.elapsed() >= LISTED {
                    listed = Instant::now();
                    // Releases a device that is being removed without an event to any listener: the
                    // removal waits for that.
                    let _ = self.provider.devices();
                }
                continue;
            };
            // Each check for events costs a system call.
            let outcome = loop {
                match session.turn(&mut self.waiter) {
                    Ok((false, None)) => {}
                    Ok((true, None)) => break None,
                    Ok((_, Some(served))) => break Some(Ok(served)),
                    Err(error) => break Some(Err(error)),
                }
            };
            if let Some(outcome) = outcome {
                let failed = self.end(outcome, report)?;
                if self.options.once {
                    return failed.map_or(Ok(()), Err);
                }
            }
        }
    }

    /// Ends the session. With [`ServerOptions::once`], returns the session's error instead of
    /// reporting it.
    fn end(
        &mut self,
        outcome: Result<Served, PerfError>,
        report: &mut dyn FnMut(ServerEvent),
    ) -> Result<Option<PerfError>, PerfError> {
        let Some(mut session) = self.session.take() else {
            return Ok(None);
        };
        if let Err(error) = &outcome {
            session.farewell(error, &mut self.waiter);
        }
        let (peer, terms) = (session.peer, session.terms);
        session.close(&mut *self.cm, &self.waiter);
        match outcome {
            Err(error) if self.options.once => Ok(Some(error)),
            outcome => {
                report(ServerEvent::Ended {
                    peer,
                    terms,
                    outcome,
                });
                Ok(None)
            }
        }
    }

    fn events(&mut self, report: &mut dyn FnMut(ServerEvent)) -> Result<(), PerfError> {
        while let Some(CmEvent { id, kind }) = self.cm.next_event()? {
            match kind {
                CmEventKind::ConnectRequest {
                    device,
                    peer,
                    params,
                    ..
                } => {
                    self.handle_request(
                        ConnectRequest {
                            id,
                            device,
                            peer,
                            params,
                        },
                        report,
                    );
                }
                CmEventKind::DeviceRemoval if self.listeners.iter().any(|(of, _)| *of == id) => {
                    self.listeners.retain(|(of, _)| *of != id);
                    self.cm.destroy(id);
                }
                kind => {
                    if let Some(session) = self.session.as_mut().filter(|session| session.has(id)) {
                        session.event(id, &kind);
                    }
                }
            }
        }
        Ok(())
    }

    fn handle_request(&mut self, request: ConnectRequest, report: &mut dyn FnMut(ServerEvent)) {
        let (id, peer) = (request.id, request.peer);
        let declined = match Request::parse(&request.params.private_data) {
            Ok(Request::Control(terms)) => self.begin(request, terms, report).err(),
            Ok(Request::Data { session, index }) => match &mut self.session {
                Some(of) if of.number == session && of.peer.ip() == peer.ip() => {
                    of.join(&mut *self.cm, id, index, &request.params).err()
                }
                _ => Some((Reject::new(Refusal::NoSession), None)),
            },
            Err(error) => Some((
                malformed(&error),
                Some(PerfError::Foreign {
                    peer,
                    source: error,
                }),
            )),
        };
        if let Some((reject, why)) = declined {
            // If the client is gone already, the error is ignored.
            let _ = self.cm.reject(id, &reject.to_bytes());
            self.cm.destroy(id);
            report(ServerEvent::Refused { peer, reject, why });
        }
    }

    fn begin(
        &mut self,
        request: ConnectRequest,
        terms: SessionParameters,
        report: &mut dyn FnMut(ServerEvent),
    ) -> Result<(), Declined> {
        if self.session.is_some() {
            return Err((Reject::new(Refusal::Busy), None));
        }
        let bounds = [
            (
                Refusal::QueuePairs,
                terms.queue_pairs,
                self.options.max_queue_pairs,
            ),
            (Refusal::Depth, terms.depth, self.options.max_depth),
        ];
        for (refusal, needed, limit) in bounds {
            if needed > limit {
                return Err((Reject::limit(refusal, needed.into(), limit.into()), None));
            }
        }
        let resources = |error: PerfError| (Reject::new(Refusal::Resources), Some(error));
        let device = self
            .provider
            .device(request.device)
            .map_err(|error| resources(error.into()))?;
        self.number = self.number.wrapping_add(1);
        let beginning = SessionSetup {
            id: request.id,
            peer: request.peer,
            number: self.number,
            terms,
            memory: self.options.memory,
            spin: self.options.spin,
        };
        let session = Session::new(&mut *self.cm, device, beginning)?;
        session.watch(&self.waiter).map_err(resources)?;
        if let Err(error) = session.accept_control(&mut *self.cm) {
            session.close(&mut *self.cm, &self.waiter);
            return Err(resources(error));
        }
        self.session = Some(session);
        report(ServerEvent::Began {
            peer: request.peer,
            terms,
        });
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.close(&mut *self.cm, &self.waiter);
        }
        self.listeners
            .iter()
            .for_each(|(id, _)| self.cm.destroy(*id));
    }
}

fn malformed(error: &WireError) -> Reject {
    match error {
        WireError::Version { theirs } => {
            Reject::limit(Refusal::Version, u64::from(*theirs), VERSION.into())
        }
        _ => Reject::new(Refusal::Malformed),
    }
}
