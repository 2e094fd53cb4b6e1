//! The harness of the tests: a server on its own thread, and its reports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nacre_transport_rdma_verbs::sim::{Fabric, attributes};
use nacre_transport_rdma_verbs::{DeviceAttributes, DeviceId};

use crate::*;

pub(super) const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
pub(super) const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// Time limit of all waits, generous for slow machines.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Rig {
    pub fabric: Fabric,
    pub server_device: DeviceId,
    pub client_device: DeviceId,
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    reports: Receiver<ServerEvent>,
    thread: Option<JoinHandle<Result<(), PerfError>>>,
}

/// A fabric with two devices and no connections.
pub(super) fn network(
    server: DeviceAttributes,
    client: DeviceAttributes,
) -> (Fabric, [DeviceId; 2]) {
    let fabric = Fabric::new();
    let server = fabric.add_device(server, &[SERVER]).unwrap();
    let client = fabric.add_device(client, &[CLIENT]).unwrap();
    (fabric, [server, client])
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(super) fn with(change: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::on(attributes("sim_server"), attributes("sim_client"), change)
    }

    pub(super) fn on(
        server: DeviceAttributes,
        client: DeviceAttributes,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let (fabric, [server_device, client_device]) = network(server, client);
        let mut options = ServerOptions::new(vec![SocketAddr::new(SERVER, DEFAULT_PORT)]);
        options.spin = Duration::ZERO;
        change(&mut options);
        let provider = fabric.provider();
        let (bound, addresses) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (report, reports) = channel();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut server = Server::bind(provider, options).unwrap();
            bound.send(server.addresses()[0]).unwrap();
            server.serve(&stopped, &mut |happened| {
                // The test may have seen enough.
                let _ = report.send(happened);
            })
        });
        let address = addresses.recv_timeout(PATIENCE).expect("it listens");
        Self {
            fabric,
            server_device,
            client_device,
            address,
            stop,
            reports,
            thread: Some(thread),
        }
    }

    pub(super) fn options(&self, test: Test) -> ClientOptions {
        ClientOptions {
            source: Some(CLIENT),
            spin: Duration::ZERO,
            ..ClientOptions::new(self.address, test)
        }
    }

    pub(super) fn run(&self, test: Test) -> Result<Report, PerfError> {
        self.run_with(&self.options(test))
    }

    pub(super) fn run_with(&self, options: &ClientOptions) -> Result<Report, PerfError> {
        measure(
            &*self.fabric.provider(),
            options,
            &AtomicBool::new(false),
            &mut |_| (),
        )
    }

    /// Runs the client on its own thread, while the test acts.
    pub(super) fn start(&self, options: ClientOptions) -> Running {
        let provider = self.fabric.provider();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (sender, progress) = channel();
        let thread = std::thread::spawn(move || {
            measure(&*provider, &options, &stopped, &mut |at| {
                let _ = sender.send(at);
            })
        });
        Running {
            stop,
            progress,
            thread,
        }
    }

    pub(super) fn next(&self) -> ServerEvent {
        self.reports
            .recv_timeout(PATIENCE)
            .expect("the server reports it in time")
    }

    /// Waits for the end of the present or next session.
    pub(super) fn ended(&self) -> Result<Served, PerfError> {
        loop {
            if let ServerEvent::Ended { outcome, .. } = self.next() {
                return outcome;
            }
        }
    }

    pub(super) fn refused(&self) -> (wire::Reject, Option<PerfError>) {
        loop {
            if let ServerEvent::Refused { reject, why, .. } = self.next() {
                return (reject, why);
            }
        }
    }

    pub(super) fn interrupt(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The result of `serve`, when the server stops by itself.
    pub(super) fn outcome(&mut self) -> Result<(), PerfError> {
        self.thread.take().expect("once").join().expect("no panic")
    }

    /// Stops the server, and checks that the devices have no objects left.
    pub(super) fn stop(mut self) -> Result<(), PerfError> {
        self.interrupt();
        let outcome = self.outcome();
        assert!(self.fabric.queue_pairs().is_empty());
        assert_eq!(self.fabric.ids(), []);
        outcome
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.interrupt();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(super) struct Running {
    pub stop: Arc<AtomicBool>,
    progress: Receiver<Progress>,
    thread: JoinHandle<Result<Report, PerfError>>,
}

impl Running {
    /// Waits until the measurement runs.
    pub(super) fn under_way(&self) -> Progress {
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            let progress = self
                .progress
                .recv_timeout(left)
                .expect("it measures in time");
            if progress.messages > 0 {
                return progress;
            }
        }
    }

    pub(super) fn outcome(self) -> Result<Report, PerfError> {
        self.thread.join().expect("no panic")
    }
}

/// A measurement without an end of its own.
pub(super) fn endless(op: Op, measure: Measure) -> Test {
    Test {
        op,
        measure,
        sizes: vec![512],
        length: Length::Time(Duration::from_secs(3600)),
        depth: 4,
        ..Test::default()
    }
}
