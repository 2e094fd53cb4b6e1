//! A server in a thread of its own, and its reports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nacre_transport_rdma_verbs::sim::{Fabric, attributes};
use nacre_transport_rdma_verbs::{DeviceAttributes, DeviceId};

use crate::*;

pub const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
pub const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// For anything that has to come, however slow the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Rig {
    pub fabric: Fabric,
    pub server_device: DeviceId,
    pub client_device: DeviceId,
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    reports: Receiver<Happened>,
    thread: Option<JoinHandle<Result<(), PerfError>>>,
}

/// Two devices on a network, without anything on them.
pub fn network(server: DeviceAttributes, client: DeviceAttributes) -> (Fabric, [DeviceId; 2]) {
    let fabric = Fabric::new();
    let server = fabric.add_device(server, &[SERVER]).unwrap();
    let client = fabric.add_device(client, &[CLIENT]).unwrap();
    (fabric, [server, client])
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(|_| ())
    }

    pub fn with(change: impl FnOnce(&mut ServerOptions)) -> Rig {
        Rig::on(attributes("sim_server"), attributes("sim_client"), change)
    }

    pub fn on(
        server: DeviceAttributes,
        client: DeviceAttributes,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Rig {
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
        Rig {
            fabric,
            server_device,
            client_device,
            address,
            stop,
            reports,
            thread: Some(thread),
        }
    }

    pub fn options(&self, test: Test) -> ClientOptions {
        ClientOptions {
            source: Some(CLIENT),
            spin: Duration::ZERO,
            ..ClientOptions::new(self.address, test)
        }
    }

    pub fn run(&self, test: Test) -> Result<Report, PerfError> {
        self.run_with(&self.options(test))
    }

    pub fn run_with(&self, options: &ClientOptions) -> Result<Report, PerfError> {
        measure(
            &*self.fabric.provider(),
            options,
            &AtomicBool::new(false),
            &mut |_| (),
        )
    }

    /// In a thread, for tests that do something meanwhile.
    pub fn start(&self, options: ClientOptions) -> Running {
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

    pub fn next(&self) -> Happened {
        self.reports
            .recv_timeout(PATIENCE)
            .expect("the server reports it in time")
    }

    /// The end of the session that is next to begin, or has begun.
    pub fn ended(&self) -> Result<Served, PerfError> {
        loop {
            if let Happened::Ended { outcome, .. } = self.next() {
                return outcome;
            }
        }
    }

    pub fn refused(&self) -> (wire::Reject, Option<PerfError>) {
        loop {
            if let Happened::Refused { reject, why, .. } = self.next() {
                return (reject, why);
            }
        }
    }

    pub fn interrupt(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What `serve` answers, when it ends by itself.
    pub fn outcome(&mut self) -> Result<(), PerfError> {
        self.thread.take().expect("once").join().expect("no panic")
    }

    /// The server ends, and the devices have no objects left.
    pub fn stop(mut self) -> Result<(), PerfError> {
        self.interrupt();
        let outcome = self.outcome();
        assert_eq!(self.fabric.queue_pairs(), []);
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

pub struct Running {
    pub stop: Arc<AtomicBool>,
    progress: Receiver<Progress>,
    thread: JoinHandle<Result<Report, PerfError>>,
}

impl Running {
    /// Waits until it measures.
    pub fn under_way(&self) -> Progress {
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

    pub fn outcome(self) -> Result<Report, PerfError> {
        self.thread.join().expect("no panic")
    }
}

/// A test that goes on until something ends it.
pub fn endless(op: Op, measure: Measure) -> Test {
    Test {
        op,
        measure,
        sizes: vec![512],
        length: Length::Time(Duration::from_secs(3600)),
        depth: 4,
        ..Test::default()
    }
}
