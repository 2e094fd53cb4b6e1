//! The harness of the tests: a target's plug and hosts, over one simulated fabric.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{Address, HostTransport, ListenerId, ListenerOptions, Plug, Transport};
use nacre_reactor::{Nanos, VirtualClock};
use nacre_transport_rdma_verbs::DeviceAttributes;
use nacre_transport_rdma_verbs::DeviceId;
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};

use crate::{RdmaConfig, RdmaDialer, RdmaHost, RdmaHostOptions, RdmaHosts, RdmaPlug};

pub(super) const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
pub(super) const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
pub(super) const ENTRIES: u16 = 64;

#[derive(Clone)]
pub(super) struct Options {
    pub config: RdmaConfig,
    /// The target's; the host's has the same limit of memory regions.
    pub device: DeviceAttributes,
    pub listener: ListenerOptions,
    /// Bytes of each arena that are left out before its pool begins.
    pub lead: usize,
}

impl Default for Options {
    fn default() -> Self {
        let config = RdmaConfig {
            max_qpairs: 16,
            max_queue_depth: ENTRIES,
            srq_size: 256,
            cq_size: 512,
            ..RdmaConfig::default()
        };
        Self {
            config,
            device: attributes("sim_target"),
            listener: ListenerOptions::default(),
            lead: 0,
        }
    }
}

impl Options {
    pub(super) fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut options = Self::default();
        change(&mut options);
        options
    }
}

pub(super) struct TestRig {
    // Connections go before what manages them.
    pub transport: Box<dyn Transport>,
    pub dialer: RdmaDialer,
    pub plug: RdmaPlug,
    pub hosts: RdmaHosts,
    pub fabric: Fabric,
    pub device: DeviceId,
    pub host_device: DeviceId,
    pub address: SocketAddr,
    pub clock: VirtualClock,
    started: Instant,
    lead: usize,
}

impl TestRig {
    pub(super) fn new(options: Options) -> Self {
        let fabric = Fabric::new();
        let device = fabric
            .add_device(options.device.clone(), &[TARGET])
            .unwrap();
        let mut of_host = attributes("sim_host");
        of_host.max_mr_size = options.device.max_mr_size;
        let host_device = fabric.add_device(of_host, &[HOST]).unwrap();
        let plug = RdmaPlug::without_thread(options.config, fabric.provider(), Vec::new()).unwrap();
        let hosts = RdmaHosts::without_thread(fabric.provider(), Vec::new()).unwrap();
        let wanted = Address::Ip(SocketAddr::new(TARGET, 4420));
        let bound = plug.listen(ListenerId(3), &wanted, &options.listener);
        let Address::Ip(address) = bound.unwrap() else {
            panic!("an address of another kind");
        };
        Self {
            transport: plug.open(0, Arc::new(|| ())).unwrap(),
            dialer: hosts.dialer(16, ENTRIES).unwrap(),
            plug,
            hosts,
            fabric,
            device,
            host_device,
            address,
            clock: VirtualClock::new(),
            started: Instant::now(),
            lead: options.lead,
        }
    }

    pub(super) fn host_options() -> RdmaHostOptions {
        RdmaHostOptions {
            source: Some(HOST),
            connection_retries: 0,
            ..RdmaHostOptions::new(1, ENTRIES)
        }
    }

    pub(super) fn dial(&self, options: RdmaHostOptions) -> RdmaHost {
        self.dialer.connect(self.address, options).unwrap()
    }

    /// Both management threads have their turn.
    pub(super) fn manage(&self) {
        self.plug.turn();
        let passed = self.clock.now().since(Nanos::ZERO);
        self.hosts.turn(self.started + passed);
    }
}

impl Rig for TestRig {
    fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    fn connect(&mut self) -> Box<dyn HostTransport> {
        Box::new(self.dial(Self::host_options()))
    }

    fn now(&self) -> Nanos {
        self.manage();
        self.clock.advance(Duration::from_micros(1));
        self.clock.now()
    }

    fn listener(&self) -> ListenerId {
        ListenerId(3)
    }

    fn pool(&mut self, classes: &[ClassSpec]) -> Pool {
        let bytes = Pool::bytes_for(classes) as u64;
        let arena = Arena::allocate(ArenaOptions::new(bytes + self.lead as u64)).unwrap();
        arena.carve(self.lead).unwrap();
        self.plug.add_arena(&arena).unwrap();
        self.hosts.add_arena(&arena).unwrap();
        Pool::on_arena(&arena, classes).unwrap()
    }

    fn receives_ahead(&self) -> bool {
        true
    }
}
