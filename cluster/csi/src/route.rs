//! Routes gRPC requests to the calls of the CSI services by their paths, without generated code.
//!
//! Each call runs on a thread of its own and ends there, also when its caller has left: an
//! operation that has begun is finished. The number of calls and the size of requests are bounded.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};
use tonic_prost::ProstCodec;
use tower_service::Service;
use tracing::{debug, info};

use crate::controller::Controller;
use crate::identity::Identity;
use crate::messages::Nothing;
use crate::node::Node;

/// Calls that run at the same time. More are refused with `UNAVAILABLE`. Calls of `Identity` do not
/// count: a busy driver is healthy.
pub(crate) const MAX_CALLS: usize = 64;
/// Calls of `Identity` that run at the same time. More are refused with `UNAVAILABLE`.
pub(crate) const MAX_PROBES: usize = 8;
/// Largest request. The interface limits its fields to some KiB.
const MAX_REQUEST: usize = 256 << 10;

/// The CSI services of this process. Calls of a service that is `None` fail with `UNIMPLEMENTED`.
#[derive(Debug)]
pub struct Driver {
    pub identity: Identity,
    pub controller: Option<Controller>,
    pub node: Option<Arc<Node>>,
}

impl Driver {
    fn controller(&self) -> Result<Controller, Status> {
        let controller = self.controller.as_ref().map(Controller::for_call);
        controller.ok_or_else(|| {
            Status::unimplemented("this process is no controller: it runs without --controller")
        })
    }

    fn node(&self) -> Result<&Node, Status> {
        self.node
            .as_deref()
            .ok_or_else(|| Status::unimplemented("this process is no node: it runs without --node"))
    }
}

/// Answers the requests of one server.
#[derive(Clone)]
pub struct Router {
    driver: Arc<Driver>,
    places: Arc<Semaphore>,
    probes: Arc<Semaphore>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Router {
    pub fn new(driver: Arc<Driver>) -> Self {
        Self {
            driver,
            places: Arc::new(Semaphore::new(MAX_CALLS)),
            probes: Arc::new(Semaphore::new(MAX_PROBES)),
        }
    }

    /// True while no call runs, other than those of `Identity`.
    pub(crate) fn idle(&self) -> impl Fn() -> bool + Send + use<> {
        let places = Arc::clone(&self.places);
        move || places.available_permits() == MAX_CALLS
    }

    fn answer<Q, A>(
        &self,
        request: Request<Body>,
        call: impl FnOnce(&Driver, Q) -> Result<A, Status> + Send + 'static,
    ) -> Answer
    where
        Q: prost::Message + Default + Send + 'static,
        A: prost::Message + Default + Send + 'static,
    {
        Self::run(request, &self.driver, &self.places, call)
    }

    fn identify<A>(
        &self,
        request: Request<Body>,
        call: impl FnOnce(&Identity) -> Result<A, Status> + Send + 'static,
    ) -> Answer
    where
        A: prost::Message + Default + Send + 'static,
    {
        let call = |driver: &Driver, _: Nothing| call(&driver.identity);
        Self::run(request, &self.driver, &self.probes, call)
    }

    fn run<Q, A>(
        request: Request<Body>,
        driver: &Arc<Driver>,
        places: &Arc<Semaphore>,
        call: impl FnOnce(&Driver, Q) -> Result<A, Status> + Send + 'static,
    ) -> Answer
    where
        Q: prost::Message + Default + Send + 'static,
        A: prost::Message + Default + Send + 'static,
    {
        let name = request.uri().path().to_owned();
        let call = Call {
            driver: Arc::clone(driver),
            places: Arc::clone(places),
            name,
            call: Some(call),
        };
        Box::pin(async move {
            let codec = ProstCodec::<A, Q>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(MAX_REQUEST);
            Ok(grpc.unary(call, request).await)
        })
    }
}

struct Call<F> {
    driver: Arc<Driver>,
    places: Arc<Semaphore>,
    name: String,
    /// Taken by the one request.
    call: Option<F>,
}

impl<Q, A, F> UnaryService<Q> for Call<F>
where
    Q: Send + 'static,
    A: Send + 'static,
    F: FnOnce(&Driver, Q) -> Result<A, Status> + Send + 'static,
{
    type Response = A;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<A>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let (driver, name) = (Arc::clone(&self.driver), self.name.clone());
        let place = Arc::clone(&self.places).try_acquire_owned();
        let call = self.call.take();
        Box::pin(async move {
            let (Ok(place), Some(call)) = (place, call) else {
                let text = "too many calls run already; try again later";
                return Err(Status::unavailable(text));
            };
            let run = move || {
                let answer = call(&driver, request.into_inner());
                match &answer {
                    Ok(_) => debug!(call = name, "answered"),
                    Err(status) => {
                        info!(call = name, code = ?status.code(), "refused: {}", status.message());
                    }
                }
                drop(place);
                answer
            };
            let ended = tokio::task::spawn_blocking(run).await;
            let ended = ended.map_err(|error| Status::internal(format!("a call died: {error}")))?;
            ended.map(tonic::Response::new)
        })
    }
}

impl Service<Request<Body>> for Router {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        let path = request.uri().path();
        let Some((service, method)) = path
            .strip_prefix("/csi.v1.")
            .and_then(|rest| rest.split_once('/'))
        else {
            return unknown(path);
        };
        match (service, method) {
            ("Identity", "GetPluginInfo") => self.identify(request, |identity| Ok(identity.info())),
            ("Identity", "GetPluginCapabilities") => {
                self.identify(request, |identity| Ok(identity.capabilities()))
            }
            ("Identity", "Probe") => self.identify(request, Identity::probe),
            ("Controller", "CreateVolume") => {
                self.answer(request, |driver, asked| driver.controller()?.create(asked))
            }
            ("Controller", "DeleteVolume") => {
                self.answer(request, |driver, asked| driver.controller()?.delete(&asked))
            }
            ("Controller", "ControllerPublishVolume") => self.answer(request, |driver, asked| {
                driver.controller()?.publish(&asked)
            }),
            ("Controller", "ControllerUnpublishVolume") => self.answer(request, |driver, asked| {
                driver.controller()?.unpublish(&asked)
            }),
            ("Controller", "ValidateVolumeCapabilities") => self
                .answer(request, |driver, asked| {
                    driver.controller()?.validate(asked)
                }),
            ("Controller", "ListVolumes") => {
                self.answer(request, |driver, asked| driver.controller()?.list(&asked))
            }
            ("Controller", "GetCapacity") => self.answer(request, |driver, asked| {
                driver.controller()?.capacity(&asked)
            }),
            ("Controller", "ControllerGetCapabilities") => self
                .answer(request, |driver, _: Nothing| {
                    driver.controller()?.capabilities()
                }),
            ("Controller", "CreateSnapshot") => self.answer(request, |driver, asked| {
                driver.controller()?.create_snapshot(&asked)
            }),
            ("Controller", "DeleteSnapshot") => self.answer(request, |driver, asked| {
                driver.controller()?.delete_snapshot(&asked)
            }),
            ("Controller", "ListSnapshots") => self.answer(request, |driver, asked| {
                driver.controller()?.list_snapshots(&asked)
            }),
            ("Controller", "ControllerExpandVolume") => {
                self.answer(request, |driver, asked| driver.controller()?.expand(&asked))
            }
            ("Node", "NodeStageVolume") => {
                self.answer(request, |driver, asked| driver.node()?.stage(&asked))
            }
            ("Node", "NodeUnstageVolume") => {
                self.answer(request, |driver, asked| driver.node()?.unstage(&asked))
            }
            ("Node", "NodePublishVolume") => {
                self.answer(request, |driver, asked| driver.node()?.publish(&asked))
            }
            ("Node", "NodeUnpublishVolume") => {
                self.answer(request, |driver, asked| driver.node()?.unpublish(&asked))
            }
            ("Node", "NodeGetVolumeStats") => {
                self.answer(request, |driver, asked| driver.node()?.stats(&asked))
            }
            ("Node", "NodeExpandVolume") => {
                self.answer(request, |driver, asked| driver.node()?.expand(&asked))
            }
            ("Node", "NodeGetCapabilities") => self.answer(request, |driver, _: Nothing| {
                Ok(driver.node()?.capabilities())
            }),
            ("Node", "NodeGetInfo") => {
                self.answer(request, |driver, _: Nothing| driver.node()?.info())
            }
            _ => unknown(path),
        }
    }
}

fn unknown(path: &str) -> Answer {
    let status = Status::unimplemented(format!("this driver has no call {path}"));
    Box::pin(std::future::ready(Ok(status.into_http())))
}
