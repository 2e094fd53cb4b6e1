//! Tests of failures of completion queues, receives, queue pairs and devices under a core's
//! connections, and of the removal of unused devices.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_nvmf::transport::{Address, Closed, ListenerId, ListenerOptions, Plug};
use nacre_transport_rdma_verbs::AsyncEvent;
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};

use super::rig::{ENTRIES, TARGET};
use super::several_devices::{SeveralDevices, config, devices};
use crate::{RdmaConfig, RdmaPlug};

impl SeveralDevices {
    /// The queue pair at the target's end of a host's connection.
    fn target_of(&self, client: usize) -> u32 {
        let host = self.clients[client].qp().expect("connected");
        self.fabric.peer_of(host).expect("connected")
    }

    fn works(&mut self, client: usize) {
        self.clients[client].completed.clear();
        self.write(client, 1);
        self.turns(6);
        assert_eq!(self.clients[client].completed, [1], "host {client}");
    }

    fn is_closed(&self, client: usize) {
        let closed = &self.clients[client].closed;
        assert!(closed.is_some(), "host {client}");
    }
}

/// Goal: a failed completion queue closes only its own connections, whether a poll or only the
/// device reports the failure. Later hosts get another queue, however often this happens. Method:
/// more failures than memory for receives would allow if their receives were not freed.
#[test]
fn a_failed_completion_queue_closes_its_connections() {
    for (srq, silently) in [(256, false), (256, true), (0, false), (0, true)] {
        let what = format!("{srq} shared receives, silently {silently}");
        let mut all = SeveralDevices::new(config(srq), &devices(2));
        let other = all.connect(1, ENTRIES).unwrap();
        let mut reserved = None;
        for round in 0..12 {
            let first = all.connect(0, ENTRIES).unwrap();
            let of_one = all.plug.completion_queues()[0].reserved;
            assert_eq!(*reserved.get_or_insert(of_one), of_one, "{what}, {round}");
            let second = all.connect(0, ENTRIES).unwrap();
            all.works(first);
            all.fabric
                .break_completion_queue(all.target_of(first), silently);
            all.turns(8);
            all.is_closed(first);
            all.is_closed(second);
            all.works(other);
            assert_eq!(all.plug.connections(), 1, "{what}");
            assert_eq!(all.fabric.posted_receives(), srq as usize, "{what}");
        }
        let stats = all.plug.total();
        let own = if srq == 0 { usize::from(ENTRIES) } else { 256 };
        assert_eq!(stats.receives, own as u64, "{what}");
        assert_eq!(all.plug.queue_pairs().len(), 1, "{what}");
    }
}

/// Goal: late completions of a failed queue's connections do not reduce the count of its successor.
/// Method: the core learns of the failure after the successor was created.
#[test]
fn completions_of_replaced_queues() {
    let mut all = SeveralDevices::new(config(256), &devices(1));
    let first = all.connect(0, ENTRIES).unwrap();
    let of_one = all.plug.completion_queues()[0].reserved;
    all.fabric
        .break_completion_queue(all.target_of(first), true);
    all.plug.turn();
    assert!(all.plug.completion_queues().is_empty());
    let second = all.dial(0, ENTRIES);
    for _ in 0..6 {
        all.plug.turn();
        all.hosts_turn();
        all.clients_turn();
    }
    assert_eq!(all.plug.completion_queues()[0].reserved, of_one);
    all.turns(12);
    assert_eq!(all.plug.completion_queues()[0].reserved, of_one);
    assert_eq!(all.plug.connections(), 1);
    all.is_closed(first);
    all.works(second);
    all.leave(second);
    let shared = 256;
    assert_eq!(all.plug.completion_queues()[0].reserved, shared);
}

/// Goal: receives of removed queues are freed, even if a queue pair is still being destroyed.
/// Method: the core gets an event at that moment, more often than it has memory for receives.
#[test]
fn receives_of_failed_queues() {
    let mut all = SeveralDevices::new(config(256), &devices(1));
    for _ in 0..12 {
        let client = all.connect(0, ENTRIES).unwrap();
        all.fabric
            .break_completion_queue(all.target_of(client), false);
        all.core_turn();
        assert_eq!(all.transport.connections(), 0);
        all.plug.wake_cores();
        all.core_turn();
        all.turns(8);
        all.is_closed(client);
        assert_eq!(all.fabric.completion_queues(), 0);
    }
}

/// Goal: when a device reports a failed shared receive queue, all connections of that core and
/// device close.
#[test]
fn shared_receives() {
    let mut all = SeveralDevices::new(config(256), &devices(2));
    let other = all.connect(1, ENTRIES).unwrap();
    let client = all.connect(0, ENTRIES).unwrap();
    let srq = all.fabric.shared_receives_of(all.target_of(client));
    let event = AsyncEvent::SrqError { srq: srq.unwrap() };
    all.fabric.inject_async(all.devices[0], event);
    all.turns(8);
    all.is_closed(client);
    all.works(other);
    let client = all.connect(0, ENTRIES).unwrap();
    all.works(client);
}

/// Goal: a queue pair that its device reports as failed closes alone, even if no posted request
/// could report the failure. Method: each such event, for a connection without requests in flight.
#[test]
fn queue_pairs() {
    for event in [
        |qp| AsyncEvent::QpFatal { qp },
        |qp| AsyncEvent::QpRequestError { qp },
        |qp| AsyncEvent::QpAccessError { qp },
    ] {
        let mut all = SeveralDevices::new(config(256), &devices(1));
        let (first, second) = (
            all.connect(0, ENTRIES).unwrap(),
            all.connect(0, ENTRIES).unwrap(),
        );
        let event = event(all.target_of(first));
        all.fabric.inject_async(all.devices[0], event);
        all.turns(8);
        all.is_closed(first);
        assert_eq!(all.plug.connections(), 1, "{event:?}");
        all.works(second);
    }
}

/// Goal: a shared receive held by an ending queue pair is freed when the device reports its end.
/// Without a report, the wait is limited to the time that a queue pair has to end.
#[test]
fn the_last_receive() {
    let mut all = SeveralDevices::new(config(256), &devices(1));
    let client = all.connect(0, ENTRIES).unwrap();
    all.leave(client);
    for finishes in [true, true, false] {
        let client = all.connect(0, ENTRIES).unwrap();
        let qp = all.target_of(client);
        let before = all.fabric.posted_receives();
        all.fabric.begin_message(qp);
        all.leave(client);
        assert_eq!(
            all.plug.connections(),
            1,
            "the connection waits for its last receive"
        );
        if finishes {
            all.fabric.finish_message(qp);
        } else {
            all.wait(RdmaConfig::default().drain_timeout);
        }
        all.turns(8);
        assert_eq!(all.plug.connections(), 0);
        let lost = usize::from(!finishes);
        assert_eq!(all.fabric.posted_receives(), before - lost);
    }
}

/// Goal: a removed device without users is released. Its removal waits for that, and its descriptor
/// keeps no thread awake. Method: a removed listener; devices that report their removal, and one
/// that does not.
#[test]
fn unused_devices() {
    for heard in [true, false] {
        let mut all = SeveralDevices::new(config(256), &devices(2));
        let client = all.connect(0, ENTRIES).unwrap();
        all.leave(client);
        all.plug.unlisten(ListenerId(0));
        if heard {
            all.fabric.remove_device(all.devices[0])
        } else {
            all.fabric.remove_device_silently(all.devices[0])
        }
        all.turns(4);
        assert_eq!(all.plug.domains().len(), 1, "heard {heard}");
        assert_eq!(all.fabric.completion_queues(), 0, "heard {heard}");
        assert!(all.plug.is_quiet(), "heard {heard}");
        let other = all.connect(1, ENTRIES).unwrap();
        all.works(other);
    }
}

/// Goal: the management thread checks by itself for a device that was removed without a report.
/// Method: the thread sleeps when the listener is removed.
#[test]
fn removed_devices_are_released_without_a_listener() {
    let fabric = Fabric::new();
    let device = fabric.add_device(attributes("sim"), &[TARGET]).unwrap();
    let plug = RdmaPlug::new(config(256), fabric.provider(), Vec::new()).unwrap();
    let address = Address::Ip(SocketAddr::new(TARGET, 4420));
    plug.listen(ListenerId(1), &address, &ListenerOptions::default())
        .unwrap();
    std::thread::sleep(Duration::from_millis(200));
    plug.unlisten(ListenerId(1));
    fabric.remove_device_silently(device);
    let begun = Instant::now();
    while !plug.domains().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Goal: a removed device keeps no thread awake while its connections end, although its descriptor
/// stays readable.
#[test]
fn a_removed_device_keeps_no_thread_awake() {
    let mut all = SeveralDevices::new(config(256), &devices(1));
    all.connect(0, ENTRIES).unwrap();
    all.fabric.remove_device(all.devices[0]);
    all.plug.turn();
    assert_eq!(all.plug.connections(), 1);
    assert!(all.plug.is_quiet());
    all.turns(8);
    assert_eq!(all.plug.connections(), 0);
}

/// Goal: posted receives are counted, and so are receives that wait for buffers. Method: hold the
/// data of commands until no buffer is free.
#[test]
fn receives_are_counted() {
    for srq in [64, 0] {
        let mut all = SeveralDevices::new(config(srq), &devices(1));
        let client = all.connect(0, ENTRIES).unwrap();
        let receives = |all: &SeveralDevices| {
            let total = all.plug.total();
            (
                total.receives,
                total.receives_waiting,
                total.receives_waited,
            )
        };
        assert_eq!(receives(&all), (64, 0, 0));
        assert!(all.plug.total().receives_posted >= 64, "{srq}");
        all.hoard = Some(Vec::new());
        let mut cid = 0;
        while receives(&all).1 < 64 {
            for _ in 0..ENTRIES {
                all.write(client, cid);
                cid += 1;
            }
            all.turns(8);
        }
        assert!(receives(&all).2 > 0);
        all.hoard = None;
        all.turns(8);
        assert_eq!(receives(&all).1, 0, "{srq}");
        all.leave(client);
        let stay = u64::from(srq);
        assert_eq!((receives(&all).0, receives(&all).1), (stay, 0), "{srq}");
        let closed = all.clients[client].closed.clone();
        assert!(matches!(closed, None | Some(Closed::Local)), "{closed:?}");
    }
}
