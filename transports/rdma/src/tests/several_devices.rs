//! Tests of several devices on one core, and of several hosts.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::Extents;
use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, Pool};
use nacre_nvmf::transport::{
    Address, Closed, ConnId, Event, Events, HostCommand, HostEvent, HostTransport, ListenerId,
    ListenerOptions, Plug, Pools, QueueParams, ReqTag, Response, Transport,
};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::{Nanos, VirtualClock};
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};
use nacre_transport_rdma_verbs::{DeviceAttributes, DeviceId};

use super::rig::{ENTRIES, HOST, TestRig};
use crate::{RdmaConfig, RdmaDialer, RdmaHost, RdmaHostOptions, RdmaHosts, RdmaPlug};

const CLASSES: [ClassSpec; 1] = [ClassSpec {
    size: 4096,
    count: 64,
}];

/// A host, and the events that it received.
pub(super) struct Client {
    host: RdmaHost,
    pub ready: bool,
    pub completed: Vec<u16>,
    pub closed: Option<Closed>,
}

impl Client {
    /// The number of its queue pair.
    pub(super) fn qp(&self) -> Option<u32> {
        self.host.qp()
    }
}

/// A target's core with these devices, each with a listener of its own, and any number of hosts.
pub(super) struct SeveralDevices {
    pub clients: Vec<Client>,
    pub transport: Box<dyn Transport>,
    dialer: RdmaDialer,
    pub plug: RdmaPlug,
    pub hosts: RdmaHosts,
    pub fabric: Fabric,
    pub devices: Vec<DeviceId>,
    /// What hosts write.
    data: Buf,
    /// See [`RdmaHostOptions::max_inline`].
    max_inline: u32,
    pools: Pools,
    events: Events,
    /// The connections there are, each with the device that it came by.
    open: HashMap<ConnId, usize>,
    /// Received commands: the device, and the command identifier.
    pub commands: Vec<(usize, u16)>,
    /// The data of received commands; holding it keeps the buffers in use.
    pub hoard: Option<Vec<Buf>>,
    clock: VirtualClock,
    started: Instant,
}

impl SeveralDevices {
    pub(super) fn new(config: RdmaConfig, devices: &[DeviceAttributes]) -> Self {
        let fabric = Fabric::new();
        let add = |(at, device): (usize, &DeviceAttributes)| {
            let ip = address(at).ip();
            fabric.add_device(device.clone(), &[ip]).unwrap()
        };
        let devices: Vec<DeviceId> = devices.iter().enumerate().map(add).collect();
        let own = Arena::allocate(ArenaOptions::new(1 << 20)).unwrap();
        let plug = RdmaPlug::without_thread(config, fabric.provider(), vec![own]).unwrap();
        for at in 0..devices.len() {
            let id = ListenerId(at as u64);
            plug.listen(id, &Address::Ip(address(at)), &ListenerOptions::default())
                .unwrap();
        }
        fabric.add_device(attributes("sim_host"), &[HOST]).unwrap();
        let hosts = RdmaHosts::without_thread(fabric.provider(), Vec::new()).unwrap();
        let pool = || {
            let bytes = Pool::bytes_for(&CLASSES) as u64;
            let arena = Arena::allocate(ArenaOptions::new(bytes)).unwrap();
            hosts.add_arena(&arena).unwrap();
            Pool::on_arena(&arena, &CLASSES).unwrap()
        };
        let pools = Pools {
            io: pool(),
            admin: pool(),
        };
        Self {
            clients: Vec::new(),
            transport: plug.open(0, Arc::new(|| ())).unwrap(),
            dialer: hosts.dialer(64, ENTRIES).unwrap(),
            plug,
            data: pool().acquire(4096).unwrap(),
            max_inline: RdmaHostOptions::MAX_INLINE,
            hosts,
            fabric,
            devices,
            pools,
            events: Events::with_capacity(64),
            open: HashMap::new(),
            commands: Vec::new(),
            hoard: None,
            clock: VirtualClock::new(),
            started: Instant::now(),
        }
    }

    /// Adds a device after the core has allocated its memory.
    pub(super) fn plug_in(&mut self, device: &DeviceAttributes) -> usize {
        let at = self.devices.len();
        let added = self.fabric.add_device(device.clone(), &[address(at).ip()]);
        self.devices.push(added.unwrap());
        let id = ListenerId(at as u64);
        self.plug
            .listen(id, &Address::Ip(address(at)), &ListenerOptions::default())
            .unwrap();
        at
    }

    /// Starts to connect a host to the address of a device.
    pub(super) fn dial(&mut self, device: usize, entries: u16) -> usize {
        let options = RdmaHostOptions {
            entries,
            max_inline: self.max_inline,
            ..TestRig::host_options()
        };
        let mut host = self.dialer.connect(address(device), options).unwrap();
        host.set_in_capsule_bytes(4096);
        self.clients.push(Client {
            host,
            ready: false,
            completed: Vec::new(),
            closed: None,
        });
        self.clients.len() - 1
    }

    /// Connects a host. Returns it, or the reason of the refusal.
    pub(super) fn connect(&mut self, device: usize, entries: u16) -> Result<usize, Closed> {
        let client = self.dial(device, entries);
        self.turns(12);
        match &self.clients[client] {
            Client {
                closed: Some(why), ..
            } => Err(why.clone()),
            Client { ready, .. } => {
                assert!(ready, "neither connected nor closed");
                Ok(client)
            }
        }
    }

    /// A command without data.
    pub(super) fn submit(&mut self, client: usize, cid: u16) {
        let sqe = Sqe::for_namespace(io::FLUSH, cid, 1);
        self.submit_with(client, sqe, None);
    }

    /// A command with data in its capsule.
    pub(super) fn write(&mut self, client: usize, cid: u16) {
        let sqe = Sqe::for_namespace(io::WRITE, cid, 1);
        self.submit_with(client, sqe, Some(self.data.clone()));
    }

    fn submit_with(&mut self, client: usize, sqe: Sqe, write: Option<Buf>) {
        let host = &mut self.clients[client].host;
        host.submit(HostCommand {
            sqe,
            write,
            read: None,
        });
    }

    pub(super) fn leave(&mut self, client: usize) {
        self.clients[client].host.close();
        self.turns(12);
    }

    fn respond(&mut self, conn: ConnId, sqe: &Sqe) {
        let cid = sqe.cid();
        let response = Response {
            tag: ReqTag { cid, index: cid },
            cqe: Cqe::success(cid),
            data: Extents::new(),
            sgl: sqe.sgl_descriptor(),
            zero_copy: None,
        };
        self.transport.respond(conn, response);
    }

    pub(super) fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| self.turn());
    }

    fn turn(&mut self) {
        self.plug.turn();
        self.hosts_turn();
        self.core_turn();
        self.clients_turn();
    }

    pub(super) fn hosts_turn(&mut self) {
        self.clock.advance(Duration::from_micros(1));
        let now = self.clock.now();
        self.hosts.turn(self.started + now.since(Nanos::ZERO));
    }

    pub(super) fn wait(&self, time: Duration) {
        self.clock.advance(time);
    }

    pub(super) fn core_turn(&mut self) {
        let now = self.clock.now();
        self.transport.poll(now, &self.pools, &mut self.events);
        let events: Vec<Event> = self.events.drain().collect();
        for event in events {
            match event {
                Event::Opened { conn, listener, .. } => {
                    self.open.insert(conn, listener.0 as usize);
                    let params = QueueParams {
                        qid: 1,
                        entries: ENTRIES,
                        flow_control_off: false,
                    };
                    self.transport.established(conn, params);
                }
                Event::Capsule { conn, sqe, data } => {
                    self.commands.push((self.open[&conn], sqe.cid()));
                    if let Some(hoard) = &mut self.hoard {
                        hoard.extend(data);
                    }
                    self.respond(conn, &sqe);
                }
                Event::Closed { conn, .. } => {
                    self.open.remove(&conn);
                }
                other => panic!("{other:?}"),
            }
        }
        self.transport.flush(now);
    }

    pub(super) fn clients_turn(&mut self) {
        let now = self.clock.now();
        for client in &mut self.clients {
            let mut events = Vec::new();
            client.host.poll(now, &mut events, 64);
            for event in events {
                match event {
                    HostEvent::Ready => client.ready = true,
                    HostEvent::Completion { cqe, .. } => client.completed.push(cqe.cid()),
                    HostEvent::Closed(why) => client.closed = Some(why),
                }
            }
        }
    }
}

/// The address of device number `at`.
fn address(at: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, at as u8)), 4420)
}

pub(super) fn config(srq_size: u32) -> RdmaConfig {
    RdmaConfig {
        max_qpairs: 32,
        max_queue_depth: ENTRIES,
        srq_size,
        cq_size: 512,
        ..RdmaConfig::default()
    }
}

pub(super) fn devices(count: usize) -> Vec<DeviceAttributes> {
    let name = |at| attributes(&format!("sim_{at}"));
    (0..count).map(name).collect()
}

/// Goal: commands belong to the host that sent them, and a host that leaves affects no other host.
/// Method: two devices that number their queue pairs alike, with shared receives and without.
#[test]
fn queue_pairs_of_one_number() {
    for srq in [256, 0] {
        let mut all = SeveralDevices::new(config(srq), &devices(2));
        for device in all.devices.clone() {
            all.fabric.number_from(device, 77);
        }
        let first = all.connect(0, ENTRIES).unwrap();
        let second = all.connect(1, ENTRIES).unwrap();
        let numbers: Vec<u32> = all.plug.queue_pairs().iter().map(|qp| qp.number).collect();
        assert_eq!(numbers, [77, 77]);
        for round in 0..3 {
            all.submit(first, 2 * round);
            all.write(second, 2 * round + 1);
            all.turns(4);
            let mut commands = std::mem::take(&mut all.commands);
            commands.sort_unstable();
            assert_eq!(commands, [(0, 2 * round), (1, 2 * round + 1)], "{srq}");
        }
        assert_eq!(all.clients[first].completed, [0, 2, 4]);
        assert_eq!(all.clients[second].completed, [1, 3, 5]);
        all.leave(first);
        assert_eq!(all.plug.connections(), 1);
        all.submit(second, 7);
        all.turns(4);
        assert_eq!(all.clients[second].completed, [1, 3, 5, 7], "{srq}");
        assert_eq!(all.clients[second].closed, None);
    }
}

/// Goal: a write is sent inline if its command and data fit together, within the limit of the
/// device. Method: the simulated device takes 220 bytes; its response is inline in any case.
#[test]
fn small_writes_are_sent_inline() {
    let command = RdmaHostOptions::MAX_INLINE;
    for (max_inline, data, is_inline) in [
        (command, 100, false),
        (command + 99, 100, false),
        (command + 100, 100, true),
        (4096, 156, true),
        (4096, 157, false),
    ] {
        let mut all = SeveralDevices::new(config(0), &devices(1));
        all.max_inline = max_inline;
        all.data = all.pools.io.acquire(data).unwrap();
        let client = all.connect(0, ENTRIES).unwrap();
        let before = all.fabric.inline_sends();
        all.write(client, 0);
        all.turns(4);
        assert_eq!(all.clients[client].completed, [0]);
        let sent = all.fabric.inline_sends() - before;
        assert_eq!(sent, 1 + u64::from(is_inline), "{max_inline} {data}");
    }
}
