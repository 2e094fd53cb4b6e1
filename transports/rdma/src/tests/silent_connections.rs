//! Goal: silent connections do not lock out other hosts for long, and a refused host gets the
//! reason. Method: as many silent connections as the limit allows, on the simulated fabric and in
//! virtual time.

use std::time::Duration;

use nacre_hugepages::ClassSpec;
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{
    CloseWhy, Closed, Event, Events, HostEvent, HostTransport, Pools, QueueParams,
};

use super::rig::{ENTRIES, Options, TestRig};
use crate::{Incident, RdmaHost};

const CLASSES: [ClassSpec; 1] = [ClassSpec {
    size: 16 << 10,
    count: 32,
}];

struct World {
    rig: TestRig,
    pools: Pools,
    events: Events,
    hosts: Vec<(RdmaHost, Option<HostEvent>)>,
    /// Whether the target accepts the Connect that each host would send.
    accepts: bool,
    closed: Vec<Closed>,
}

impl World {
    fn dial(&mut self) -> usize {
        let host = self.rig.dial(TestRig::host_options());
        self.hosts.push((host, None));
        self.hosts.len() - 1
    }

    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            let now = self.rig.now();
            self.rig.transport.poll(now, &self.pools, &mut self.events);
            let events: Vec<Event> = self.events.drain().collect();
            for event in events {
                match event {
                    Event::Opened { conn, .. } if self.accepts => {
                        let params = QueueParams {
                            qid: 1,
                            entries: ENTRIES,
                            flow_control_off: false,
                        };
                        self.rig.transport.established(conn, params);
                    }
                    Event::Closed { conn, why } => {
                        self.rig.transport.close(conn, CloseWhy::Now);
                        self.closed.push(why);
                    }
                    _ => {}
                }
            }
            self.rig.transport.flush(now);
            for (host, last_event) in &mut self.hosts {
                let mut events = Vec::new();
                host.poll(now, &mut events, 8);
                if let Some(event) = events.pop() {
                    *last_event = Some(event);
                }
            }
        }
    }
}

#[test]
fn idle_connections_make_room() {
    let options = Options::with(|options| options.config.max_qpairs = 2);
    let mut rig = TestRig::new(options);
    let pools = Pools {
        io: rig.pool(&CLASSES),
        admin: rig.pool(&CLASSES),
    };
    let mut world = World {
        rig,
        pools,
        events: Events::with_capacity(64),
        hosts: Vec::new(),
        accepts: true,
        closed: Vec::new(),
    };
    world.dial();
    world.turns(20);
    world.accepts = false;
    world.dial();
    world.turns(20);
    assert_eq!(world.rig.transport.connections(), 2);
    let third = world.dial();
    world.turns(20);
    let Some(HostEvent::Closed(Closed::Refused(why))) = &world.hosts[third].1 else {
        panic!("{:?}", world.hosts[third].1);
    };
    assert!(why.contains("no resources"), "{why}");
    // The administrator learns which setting it was.
    match &world.rig.plug.incidents()[..] {
        [Incident::Refused { why, .. }] => assert_eq!(
            why,
            "2 queue pairs are open, as many as [rdma] max_qpairs allows"
        ),
        other => panic!("{other:?}"),
    }
    // The second, which has said nothing, has a second; the first, which is a queue, stays.
    world.rig.clock.advance(Duration::from_millis(1100));
    world.turns(50);
    assert_eq!(world.closed, [Closed::TimedOut]);
    world.accepts = true;
    let next = world.dial();
    world.turns(20);
    let last_event = &world.hosts[next].1;
    assert!(
        matches!(last_event, Some(HostEvent::Ready)),
        "{last_event:?}"
    );
    assert_eq!(world.rig.transport.connections(), 2);
}
