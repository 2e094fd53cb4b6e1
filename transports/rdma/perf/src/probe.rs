//! Checks for `nacre doctor`: a connection to a listener of another machine, and a test of a device
//! of this machine.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use nacre_transport_rdma_verbs::{Access, CmOptions, ConnParams, Provider};

use crate::client::{ClientOptions, measure};
use crate::dial::{Destination, Dial};
use crate::endpoint::{End, LaneSizes, Waiter};
use crate::error::PerfError;
use crate::params::Test;
use crate::report::Report;
use crate::server::{Server, ServerOptions};

/// The answer to a connection request without private data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Accepted,
    /// The program that listens there refused, as NVMe/RDMA targets do.
    Refused,
}

/// Reject reason (IBTA 12.6.7.2): the program at the other end refused. The connection manager has
/// other reasons, such as that no program listens.
const REJECTED_BY_CONSUMER: i32 = 28;

/// Requests a connection with a queue pair and without private data, and ends it at once. If no
/// program listens, the result is [`PerfError::NobodyListens`], which also shows that the route
/// works.
pub fn probe(
    provider: &dyn Provider,
    peer: SocketAddr,
    source: Option<IpAddr>,
    timeout: Duration,
) -> Result<Answer, PerfError> {
    let mut cm = provider.connection_manager()?;
    let mut waiter = Waiter::new(cm.fd())?;
    let (never, mut others) = (AtomicBool::new(false), Vec::new());
    let options = CmOptions::default();
    let destination = Destination {
        peer,
        source,
        timeout,
        options,
    };
    let mut dial = Dial::new(&mut *cm, &mut waiter, &never, &mut others, destination);
    let found = dial.find()?;
    let outcome = (|| {
        let device = provider.device(found.device)?;
        let end = End::new(
            device,
            Access::Local,
            LaneSizes::CONTROL,
            0,
            Vec::new(),
            u64::MAX,
        )?;
        let lane = end.lane(dial.cm, found.id, 0, LaneSizes::CONTROL, peer)?;
        let params = ConnParams {
            retry_count: 7,
            rnr_retry_count: 7,
            ..ConnParams::default()
        };
        let answer = dial.connect(found.id, &params);
        // The connection ends with its id; the queue pair is there until then.
        dial.cm.destroy(found.id);
        drop(lane);
        answer
    })();
    cm.destroy(found.id);
    match outcome {
        Ok(_) => Ok(Answer::Accepted),
        Err(PerfError::NobodyListens {
            status: REJECTED_BY_CONSUMER,
            ..
        })
        | Err(PerfError::Foreign { .. } | PerfError::Refused { .. }) => Ok(Answer::Refused),
        Err(error) => Err(error),
    }
}

/// Runs `test` over the device with this address: between a server and a client of this process.
/// `patience`: the time limit of connecting, and of each end for a message of the other.
pub fn around(
    provider: &Arc<dyn Provider>,
    address: IpAddr,
    test: Test,
    patience: Duration,
) -> Result<Report, PerfError> {
    let stop = Arc::new(AtomicBool::new(false));
    let (bound, addresses) = channel();
    let (of_server, stopped) = (Arc::clone(provider), Arc::clone(&stop));
    let serve = move || {
        let options = ServerOptions {
            memory: 1 << 30,
            ..ServerOptions::new(vec![SocketAddr::new(address, 0)])
        };
        let mut server = match Server::bind(of_server, options) {
            Ok(server) => server,
            Err(error) => {
                let _ = bound.send(Err(error));
                return;
            }
        };
        let _ = bound.send(Ok(server.addresses()[0]));
        // The client says what went wrong.
        let _ = server.serve(&stopped, &mut |_| ());
    };
    let thread = std::thread::Builder::new()
        .name("rdma-server".into())
        .spawn(serve);
    let thread = thread.map_err(PerfError::Wait)?;
    let outcome = match addresses.recv() {
        Ok(Ok(server)) => {
            let options = ClientOptions {
                source: Some(address),
                cm_timeout: patience,
                peer_timeout: patience,
                ..ClientOptions::new(server, test)
            };
            measure(&**provider, &options, &AtomicBool::new(false), &mut |_| ())
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(PerfError::NoListener),
    };
    stop.store(true, Ordering::Relaxed);
    // It ends within the time of one look at `stop`.
    let _ = thread.join();
    outcome
}
