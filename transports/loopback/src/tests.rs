//! The transport conformance suite on loopback, and tests of its injected faults.

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::transport::conformance::{self, Rig};
use nacre_nvmf::transport::{
    Address, Closed, Event, Events, HostCommand, HostEvent, HostTransport, ListenError, ListenerId,
    ListenerOptions, Plug, Pools, Transport,
};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::Sqe;
use nacre_reactor::{Nanos, VirtualClock};

use crate::{ConnectError, LoopbackConfig, LoopbackPlug};

struct LoopbackRig {
    plug: LoopbackPlug,
    transport: Box<dyn Transport>,
    clock: VirtualClock,
}

impl LoopbackRig {
    fn new() -> Self {
        let plug = LoopbackPlug::new(LoopbackConfig::default());
        plug.listen(
            ListenerId(3),
            &Address::Loopback("here".into()),
            &ListenerOptions::default(),
        )
        .unwrap();
        let transport = plug.open(0, Arc::new(|| ())).unwrap();
        Self {
            plug,
            transport,
            clock: VirtualClock::new(),
        }
    }
}

impl Rig for LoopbackRig {
    fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    fn connect(&mut self) -> Box<dyn HostTransport> {
        Box::new(self.plug.connect_host("here").unwrap())
    }

    fn now(&self) -> Nanos {
        self.clock.advance(Duration::from_micros(1));
        self.clock.now()
    }

    fn listener(&self) -> ListenerId {
        ListenerId(3)
    }
}

#[test]
fn conforms() {
    conformance::run(LoopbackRig::new);
}

fn pools() -> Pools {
    let pool = Pool::heap(&[ClassSpec {
        size: 8192,
        count: 8,
    }]);
    Pools {
        io: pool.clone(),
        admin: pool,
    }
}

/// Names are refused for the reason that they are refused for.
#[test]
fn names() {
    let mut rig = LoopbackRig::new();
    let listen = |id, name: &str| {
        rig.plug.listen(
            ListenerId(id),
            &Address::Loopback(name.into()),
            &ListenerOptions::default(),
        )
    };
    assert!(matches!(listen(9, "here"), Err(ListenError::InUse { .. })));
    assert!(matches!(listen(3, "there"), Err(ListenError::InUse { .. })));
    let ip = Address::Ip("127.0.0.1:4420".parse().unwrap());
    assert!(matches!(
        rig.plug
            .listen(ListenerId(9), &ip, &ListenerOptions::default()),
        Err(ListenError::WrongKind { .. })
    ));
    let refused = |name: &str| rig.plug.connect_host(name).err();
    assert_eq!(
        refused("there"),
        Some(ConnectError::NoListener {
            name: "there".into()
        })
    );
    assert!(refused("here").is_none());
    rig.plug.unlisten(ListenerId(3));
    assert_eq!(
        refused("here"),
        Some(ConnectError::NoListener {
            name: "here".into()
        })
    );
    listen(4, "here").unwrap();
    rig.transport = LoopbackRig::new().transport;
    assert_eq!(
        rig.plug.connect_host("here").err(),
        Some(ConnectError::NoCore)
    );
}

/// A broken connection ends at both ends, in the middle of whatever was going on.
#[test]
fn break_now() {
    let mut rig = LoopbackRig::new();
    let pools = pools();
    let mut host = rig.plug.connect_host("here").unwrap();
    let write = pools.io.acquire(4096);
    host.submit(HostCommand {
        sqe: Sqe::for_namespace(io::WRITE, 5, 1),
        write,
        read: None,
    });
    let mut events = Events::with_capacity(16);
    rig.transport.poll(Nanos::ZERO, &pools, &mut events);
    assert!(matches!(
        events.drain().next_back(),
        Some(Event::Capsule { data: Some(_), .. })
    ));
    host.faults().break_now();
    let mut told = Vec::new();
    host.poll(Nanos::ZERO, &mut told, 8);
    assert!(
        matches!(&told[..], [HostEvent::Closed(Closed::Broken(_))]),
        "{told:?}"
    );
    rig.transport.poll(Nanos::ZERO, &pools, &mut events);
    assert!(matches!(
        events.drain().next_back(),
        Some(Event::Closed {
            why: Closed::Broken(_),
            ..
        })
    ));
    assert_eq!(rig.transport.connections(), 0);
    let back = host.reclaim().expect("the write did not complete");
    assert!(back.sqe.cid() == 5 && back.write.is_some());
    assert!(host.reclaim().is_none());
    drop(back);
    assert_eq!(pools.io.stats()[0].free, 8);
}

/// A stalled connection delivers nothing, and everything when it goes on.
#[test]
fn stall() {
    let mut rig = LoopbackRig::new();
    let pools = pools();
    let mut host = rig.plug.connect_host("here").unwrap();
    let faults = host.faults();
    let mut events = Events::with_capacity(16);
    rig.transport.poll(Nanos::ZERO, &pools, &mut events);
    faults.stall(true);
    host.submit(HostCommand {
        sqe: Sqe::for_namespace(io::FLUSH, 5, 1),
        write: None,
        read: None,
    });
    let mut told = Vec::new();
    for _ in 0..5 {
        rig.transport.poll(Nanos::ZERO, &pools, &mut events);
        host.poll(Nanos::ZERO, &mut told, 8);
    }
    assert_eq!(events.drain().count(), 1, "Opened only");
    assert!(told.is_empty());
    faults.stall(false);
    rig.transport.poll(Nanos::ZERO, &pools, &mut events);
    host.poll(Nanos::ZERO, &mut told, 8);
    assert!(matches!(
        events.drain().next_back(),
        Some(Event::Capsule { .. })
    ));
    assert!(matches!(&told[..], [HostEvent::Ready]));
}

/// A host that is dropped, or a target that is, ends the connection for the other.
#[test]
fn dropped_ends() {
    let mut rig = LoopbackRig::new();
    let pools = pools();
    let mut events = Events::with_capacity(16);
    drop(rig.plug.connect_host("here").unwrap());
    rig.transport.poll(Nanos::ZERO, &pools, &mut events);
    assert!(matches!(
        events.drain().next_back(),
        Some(Event::Closed {
            why: Closed::Peer,
            ..
        })
    ));
    let mut host = rig.plug.connect_host("here").unwrap();
    drop(rig.transport);
    let mut told = Vec::new();
    host.poll(Nanos::ZERO, &mut told, 8);
    assert!(
        matches!(&told[..], [HostEvent::Closed(Closed::Broken(_))]),
        "{told:?}"
    );
}
