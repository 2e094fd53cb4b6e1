//! An orchestrator: calls the driver over its socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nacre_cluster_csi::messages::controller::{
    ControllerPublishVolumeRequest, CreateVolumeRequest, CreateVolumeResponse,
};
use nacre_cluster_csi::messages::{
    AccessMode, AccessType, CapacityRange, Mode, MountVolume, Nothing, Texts, VolumeCapability,
};
use nacre_cluster_csi::{Driver, Endpoint, serve};
use prost::Message;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

pub(crate) const MIB: i64 = 1 << 20;
pub(crate) const HOST: &str =
    "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111";
pub(crate) const OTHER: &str =
    "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4222-8222-222222222222";

pub(crate) struct Orchestrator {
    runtime: Runtime,
    channel: Channel,
}

impl Orchestrator {
    pub(crate) fn connect(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move {
                let stream = tokio::net::UnixStream::connect(socket).await?;
                std::io::Result::Ok(TokioIo::new(stream))
            }
        });
        let endpoint = tonic::transport::Endpoint::from_static("http://csi");
        let channel = runtime.block_on(endpoint.connect_with_connector(connector));
        Self {
            channel: channel.expect("the driver listens"),
            runtime,
        }
    }

    /// Calls `SERVICE/METHOD`.
    pub(crate) fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let path = format!("/csi.v1.{method}").parse().expect("a path");
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        self.runtime.block_on(async {
            grpc.ready().await.expect("the driver listens");
            let answer = grpc.unary(Request::new(request), path, ProstCodec::default());
            answer.await.map(tonic::Response::into_inner)
        })
    }

    /// Calls, and leaves before the answer.
    pub(crate) fn leave<Q>(self, method: &str, request: Q, after: Duration)
    where
        Q: Message + Send + Sync + 'static,
    {
        let path = format!("/csi.v1.{method}").parse().expect("a path");
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        self.runtime.block_on(async {
            grpc.ready().await.expect("the driver listens");
            let codec = ProstCodec::<Q, Nothing>::default();
            let answer = grpc.unary(Request::new(request), path, codec);
            let early = tokio::time::timeout(after, answer).await;
            assert!(early.is_err(), "it is answered already");
        });
    }

    /// A call that must be refused with this code. The specification wants a text, and no details.
    pub(crate) fn refused<Q>(&self, method: &str, request: Q, code: Code) -> String
    where
        Q: Message + Send + Sync + 'static,
    {
        let refused = self.call::<_, Nothing>(method, request);
        let refused = refused.expect_err("it must be refused");
        assert_eq!(refused.code(), code, "{method}: {}", refused.message());
        assert!(!refused.message().is_empty(), "{method}: no text");
        assert!(refused.details().is_empty(), "{method}: details");
        refused.message().to_owned()
    }

    pub(crate) fn create(&self, request: CreateVolumeRequest) -> Result<(String, i64), Status> {
        let answer: CreateVolumeResponse = self.call("Controller/CreateVolume", request)?;
        let volume = answer.volume.expect("a volume");
        Ok((volume.volume_id, volume.capacity_bytes))
    }
}

/// A driver of this process on a socket of its own.
pub(crate) struct Served {
    pub orchestrator: Orchestrator,
    pub socket: PathBuf,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Served {
    pub(crate) fn start(driver: Driver) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("csi.sock");
        let endpoint: Endpoint = socket.to_str().expect("text").parse().expect("a socket");
        let (end, ended) = oneshot::channel();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            let ended = async {
                let _ = ended.await;
            };
            let served = runtime.block_on(serve(&endpoint, Arc::new(driver), ended));
            served.expect("it serves");
        };
        let thread = std::thread::spawn(run);
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(!thread.is_finished(), "the driver ended");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self {
            orchestrator: Orchestrator::connect(&socket),
            socket,
            end: Some(end),
            thread: Some(thread),
            _dir: dir,
        }
    }
}

impl std::ops::Deref for Served {
    type Target = Orchestrator;

    fn deref(&self) -> &Orchestrator {
        &self.orchestrator
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(());
        }
        // The orchestrator's connection is open still: the server ends it.
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            let socket = self.socket.clone();
            thread.join().expect("the driver ends");
            assert!(!socket.exists(), "the socket is left");
        }
    }
}

pub(crate) fn mount(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: "ext4".to_owned(),
            ..Default::default()
        })),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub(crate) fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(Nothing {})),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub(crate) fn texts(pairs: &[(&str, &str)]) -> Texts {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

pub(crate) fn wanted(name: &str, bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange {
            required_bytes: bytes,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

pub(crate) fn publish(volume: &str, host: &str, mode: Mode) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume.to_owned(),
        node_id: host.to_owned(),
        volume_capability: Some(block(mode)),
        ..Default::default()
    }
}
