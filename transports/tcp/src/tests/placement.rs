//! Tests of the choice of the core of a new connection.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::transport::{
    Address, Event, Events, ListenerId, ListenerOptions, Plug, Pools, QueueParams,
};
use nacre_reactor::Clock;

use crate::{TcpConfig, TcpPlug};

fn listening() -> (TcpPlug, SocketAddr) {
    let plug = TcpPlug::new(TcpConfig::default()).unwrap();
    let any = Address::Ip("127.0.0.1:0".parse().unwrap());
    let Address::Ip(address) = plug
        .listen(ListenerId(1), &any, &ListenerOptions::default())
        .unwrap()
    else {
        unreachable!()
    };
    (plug, address)
}

fn pools() -> Pools {
    let pool = Pool::heap(&[ClassSpec {
        size: 8192,
        count: 1,
    }]);
    Pools {
        io: pool.clone(),
        admin: pool,
    }
}

/// Each new connection counts as an I/O queue and goes to the core with the fewest, to the first of
/// several, whichever was there first. Each core is woken for them.
#[test]
fn spread_over_cores() {
    let (plug, address) = listening();
    // No core yet: closed and counted.
    let mut early = TcpStream::connect(address).unwrap();
    assert!(matches!(early.read(&mut [0; 1]), Ok(0) | Err(_)));
    assert_eq!(plug.rejected(), (0, 1));
    let woken: Vec<Arc<AtomicUsize>> = (0..3).map(|_| Arc::default()).collect();
    let mut cores: Vec<_> = woken
        .iter()
        .enumerate()
        .rev()
        .map(|(core, woken)| {
            let woken = Arc::clone(woken);
            plug.open(
                core,
                Arc::new(move || _ = woken.fetch_add(1, Ordering::Relaxed)),
            )
            .unwrap()
        })
        .collect();
    let _streams: Vec<_> = (0..10)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    while plug.connections() < 10 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    let pools = pools();
    let mut events = Events::with_capacity(64);
    for (core, connections) in cores.iter_mut().zip([3, 3, 4]) {
        core.poll(Clock::real().now(), &pools, &mut events);
        assert_eq!(core.connections(), connections);
    }
    let woken = woken.iter().map(|woken| woken.load(Ordering::Relaxed));
    assert_eq!(woken.collect::<Vec<_>>(), [4, 3, 3]);
    // A core that closes takes its connections with it.
    cores.pop();
    assert_eq!(plug.connections(), 6);
    assert_eq!(plug.stats().len(), 2);
}

/// An admin queue, once known as such, makes no difference: a host's first I/O queue goes to the
/// first core too.
#[test]
fn admin_queues_do_not_count() {
    let (plug, address) = listening();
    let mut cores = [0, 1].map(|core| plug.open(core, Arc::new(|| ())).unwrap());
    let pools = pools();
    let mut streams = Vec::new();
    let mut placed = Vec::new();
    for qid in [0, 1, 2, 3] {
        streams.push(TcpStream::connect(address).unwrap());
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut events = Events::with_capacity(8);
        let (at, conn) = loop {
            assert!(Instant::now() < deadline);
            let opened = cores.iter_mut().enumerate().find_map(|(at, core)| {
                core.poll(Clock::real().now(), &pools, &mut events);
                events.drain().find_map(|event| match event {
                    Event::Opened { conn, .. } => Some((at, conn)),
                    _ => None,
                })
            });
            if let Some(opened) = opened {
                break opened;
            }
        };
        let params = QueueParams {
            qid,
            entries: 32,
            flow_control_off: true,
        };
        cores[at].established(conn, params);
        placed.push(at);
    }
    assert_eq!(placed, [0, 0, 1, 0]);
}
