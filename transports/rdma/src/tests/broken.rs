//! What breaks under the connections of a core, and what goes while nobody uses it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_nvmf::transport::{Address, ListenerId, Plug};
use nacre_rdma_verbs::sim::{Fabric, attributes};

use super::rig::{ENTRIES, TARGET};
use super::several::{Several, config, devices};
use crate::RdmaPlug;

impl Several {
    fn works(&mut self, client: usize) {
        self.clients[client].completed.clear();
        self.write(client, 1);
        self.turns(6);
        assert_eq!(self.clients[client].completed, [1], "host {client}");
    }
}

/// Goal: a device that goes while nothing is on it is let go of: whoever removes it waits for that, and its descriptor keeps
/// nobody awake. Method: a listener that was there, devices that tell of their end and one that does not.
#[test]
fn devices_that_nothing_is_on() {
    for heard in [true, false] {
        let mut all = Several::new(config(256), &devices(2));
        let client = all.connect(0, ENTRIES).unwrap();
        all.leave(client);
        all.plug.unlisten(ListenerId(0));
        match heard {
            true => all.fabric.remove_device(all.devices[0]),
            false => all.fabric.remove_device_unheard(all.devices[0]),
        }
        all.turns(4);
        assert_eq!(all.plug.domains().len(), 1, "heard {heard}");
        assert_eq!(all.fabric.completion_queues(), 0, "heard {heard}");
        assert!(all.plug.is_quiet(), "heard {heard}");
        let other = all.connect(1, ENTRIES).unwrap();
        all.works(other);
    }
}

/// Goal: the management thread looks for such a device by itself. Method: it sleeps when the listener goes.
#[test]
fn devices_are_looked_for() {
    let fabric = Fabric::new();
    let device = fabric.add_device(attributes("sim"), &[TARGET]).unwrap();
    let plug = RdmaPlug::new(config(256), fabric.provider(), Vec::new()).unwrap();
    let address = Address::Ip(SocketAddr::new(TARGET, 4420));
    plug.listen(ListenerId(1), &address).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    plug.unlisten(ListenerId(1));
    fabric.remove_device_unheard(device);
    let begun = Instant::now();
    while !plug.domains().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Goal: a device that is gone keeps nobody awake while its connections end, either: its descriptor says for ever that there is
/// something to be heard of.
#[test]
fn a_device_that_has_no_events_any_more() {
    let mut all = Several::new(config(256), &devices(1));
    all.connect(0, ENTRIES).unwrap();
    all.fabric.remove_device(all.devices[0]);
    all.plug.turn();
    assert_eq!(all.plug.connections(), 1);
    assert!(all.plug.is_quiet());
    all.turns(8);
    assert_eq!(all.plug.connections(), 0);
}
