//! The control path of the RDMA target: listeners, RDMA devices and their memory, and the
//! assignment of new connections to cores. The daemon adds [`RdmaPlug`] to its target.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use nacre_hugepages::Arena;
use nacre_nvmf::transport::{
    Address, ListenError, ListenerCounts, ListenerId, ListenerOptions, Plug, PlugCounts, Transport,
    TransportType, is_in_capsule_size,
};
use nacre_transport_rdma_verbs::{Access, ProtectionDomain, Provider, VerbsError};
use parking_lot::{Mutex, MutexGuard};

use crate::config::RdmaConfig;
use crate::control::{self, Control, Listener};
use crate::core_memory::Devices;
use crate::incident::{Incident, Incidents};
use crate::shared::{
    CompletionQueueInfo, CoreSlot, DomainInfo, Mailbox, Memory, QueuePairInfo, Shared,
};
use crate::stats::{ControlCounts, StatsSnapshot};
use crate::transport::RdmaTransport;

/// The RDMA transport of a target. Dropping it stops its thread, its listeners, and the management
/// of its connections.
pub struct RdmaPlug {
    shared: Arc<Shared>,
    control: Arc<Mutex<Control>>,
    thread: Option<JoinHandle<()>>,
}

impl RdmaPlug {
    /// Starts the management thread. An invalid `config` is `InvalidInput`. `arenas` is all memory
    /// for data; [`RdmaPlug::add_arena`] adds more.
    pub fn new(
        config: RdmaConfig,
        provider: Arc<dyn Provider>,
        arenas: Vec<Arena>,
    ) -> std::io::Result<Self> {
        let mut plug = Self::without_thread(config, provider, arenas)?;
        let (shared, control) = (Arc::clone(&plug.shared), Arc::clone(&plug.control));
        let thread = std::thread::Builder::new()
            .name("rdma-cm".into())
            .spawn(move || control::run(&shared, &control))?;
        plug.thread = Some(thread);
        Ok(plug)
    }

    /// Like [`RdmaPlug::new`], without a management thread: the owner calls [`RdmaPlug::turn`]. For
    /// tests that control the order of events.
    pub fn without_thread(
        config: RdmaConfig,
        provider: Arc<dyn Provider>,
        arenas: Vec<Arena>,
    ) -> std::io::Result<Self> {
        config
            .validate()
            .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
        let shared = Arc::new(Shared {
            memory: Memory::new(Access::Local, config.max_mr_size, arenas),
            devices: Devices::of(&config, &*provider),
            config,
            provider,
            mailbox: Mailbox::new()?,
            cores: Mutex::default(),
            prepared: Mutex::default(),
            changed: OnceLock::new(),
            incidents: Incidents::new(),
            stopping: AtomicBool::new(false),
        });
        let control = Control::new(&shared).map_err(std::io::Error::other)?;
        Ok(Self {
            shared,
            control: Arc::new(Mutex::new(control)),
            thread: None,
        })
    }

    /// Allocates memory for `cores` cores that will open: the allocation takes too long for a
    /// reactor's turn.
    pub fn prepare(&self, cores: usize) -> std::io::Result<()> {
        for _ in 0..cores {
            let arena = self.shared.allocate_core_memory()?;
            self.shared.prepared().push(arena);
        }
        Ok(())
    }

    /// Calls `changed`, on the management thread, after changes of devices, their ports or their
    /// addresses. The first callback counts.
    pub fn on_change(&self, changed: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.changed.set(Box::new(changed));
    }

    /// Calls `callback` for each new entry of [`RdmaPlug::incidents`], on the thread of the
    /// incident. The first callback counts.
    pub fn on_incident(&self, callback: impl Fn() + Send + Sync + 'static) {
        self.shared.incidents.on(callback);
    }

    /// The incidents since the last call, at most 64; further ones are dropped.
    pub fn incidents(&self) -> Vec<Incident> {
        self.shared.incidents.take()
    }

    /// Handles the pending events of the connection manager and of devices, and the messages of the
    /// cores, as the management thread does.
    pub fn turn(&self) {
        self.control().turn(&self.shared);
    }

    pub fn config(&self) -> &RdmaConfig {
        &self.shared.config
    }

    /// Registers memory with every device in use. Devices added later register it too.
    pub fn add_arena(&self, arena: &Arena) -> Result<(), VerbsError> {
        self.shared.memory.add(arena)
    }

    /// The protection domains in use, with the memory registered in each.
    pub fn domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        self.shared.memory.domains()
    }

    /// The memory regions registered with each device in use, in the order of device names.
    pub fn memory_regions(&self) -> Vec<DomainInfo> {
        self.shared.memory.known()
    }

    /// Number of connections of all cores, including those being handed over.
    pub fn connections(&self) -> usize {
        self.control().connections()
    }

    /// Number of listeners that are up, and of all listeners.
    pub fn listening(&self) -> (usize, usize) {
        let control = self.control();
        let up = control
            .listeners
            .values()
            .filter(|listener| listener.id.is_some());
        (up.count(), control.listeners.len())
    }

    /// True if the listener of an address is up; a listener that lost its device is retried.
    /// `None`: no listener.
    pub fn is_listening(&self, address: SocketAddr) -> Option<bool> {
        let control = self.control();
        let mut listeners = control.listeners.values();
        let found = listeners.find(|listener| listener.address == address)?;
        Some(found.id.is_some())
    }

    /// Number of open cores.
    pub fn open_cores(&self) -> usize {
        self.shared.cores().len()
    }

    /// The counters of each open core: its number, and the counters of every device it has used.
    pub fn stats(&self) -> Vec<(usize, Vec<(String, StatsSnapshot)>)> {
        let cores = self.shared.cores();
        cores
            .iter()
            .map(|core| (core.core, core.all_stats()))
            .collect()
    }

    /// The sum of [`RdmaPlug::stats`].
    pub fn total(&self) -> StatsSnapshot {
        let all = self.stats().into_iter().flat_map(|(_, devices)| devices);
        all.fold(StatsSnapshot::default(), |sum, (_, stats)| sum + stats)
    }

    /// The present connections, in the order of their devices' queue pair numbers.
    pub fn queue_pairs(&self) -> Vec<QueuePairInfo> {
        self.control().queue_pairs()
    }

    /// The existing completion queues, in the order of their cores and devices.
    pub fn completion_queues(&self) -> Vec<CompletionQueueInfo> {
        let mut all = Vec::new();
        for core in self.shared.cores().iter() {
            for (queues, reserved) in core.queues().values() {
                all.push(CompletionQueueInfo {
                    core: core.core,
                    device: queues.domain().attributes().name.clone(),
                    entries: queues.cq().capacity(),
                    reserved: *reserved,
                });
            }
        }
        all.sort_by(|a, b| (a.core, &a.device).cmp(&(b.core, &b.device)));
        all
    }

    /// All memory for data, which is registered with every device in use.
    pub fn arenas(&self) -> Vec<Arena> {
        self.shared.memory.arenas()
    }

    pub fn control_counts(&self) -> ControlCounts {
        self.control().counts.clone()
    }

    /// Sends every core a message without effect, which wakes it.
    #[cfg(test)]
    pub(crate) fn wake_cores(&self) {
        let cores = self.shared.cores();
        cores
            .iter()
            .for_each(|core| core.send(crate::shared::ToCore::DeviceGone));
    }

    /// True if the management thread would sleep now.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.control().is_quiet()
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    fn bind_error(address: SocketAddr, error: VerbsError, remedy: &str) -> ListenError {
        ListenError::Bind {
            address: address.to_string(),
            source: std::io::Error::other(error),
            remedy: remedy.into(),
        }
    }
}

impl Plug for RdmaPlug {
    fn kind(&self) -> TransportType {
        TransportType::Rdma
    }

    fn listen(
        &self,
        id: ListenerId,
        address: &Address,
        options: &ListenerOptions,
    ) -> Result<Address, ListenError> {
        let wanted = options.in_capsule_data_size;
        if let Some(bytes) = wanted.filter(|bytes| !is_in_capsule_size(*bytes)) {
            return Err(ListenError::Option {
                option: "in_capsule_data_size",
                why: format!("{bytes} is not a multiple of 16, at most 1048576"),
            });
        }
        let Address::Ip(address) = *address else {
            return Err(ListenError::WrongKind {
                address: address.to_string(),
                kind: TransportType::Rdma,
            });
        };
        let mut control = self.control();
        let serves = |other: &Listener| other.address == address;
        if control.listeners.contains_key(&id) || control.listeners.values().any(serves) {
            return Err(ListenError::InUse {
                address: address.to_string(),
            });
        }
        let config = &self.shared.config;
        let in_capsule = config.listener_data_size(wanted);
        if control.listeners.len() >= config.max_listeners {
            return Err(ListenError::TooMany {
                limit: config.max_listeners,
            });
        }
        let options = Control::options(&self.shared, options.tos);
        let listening = control.cm.listen(address, config.backlog.into(), options).map_err(|error| {
            let remedy = "check that an RDMA device has this address: `nacre rdma gids`, and that nothing else listens there";
            Self::bind_error(address, error, remedy)
        })?;
        if let Some(device) = listening.device
            && let Err(error) = control.use_listeners_device(&self.shared, address, device)
        {
            control.cm.destroy(listening.id);
            let remedy = "raise the limit on locked memory (`ulimit -l unlimited`) if registering failed; see `nacre doctor --rdma`";
            return Err(Self::bind_error(address, error, remedy));
        }
        control.listeners.insert(
            id,
            Listener {
                address: listening.address,
                options,
                in_capsule,
                id: Some(listening.id),
                device: listening.device,
                counts: ListenerCounts::default(),
            },
        );
        Ok(Address::Ip(listening.address))
    }

    fn in_capsule_data_size(&self, id: ListenerId) -> Option<u32> {
        let control = self.control();
        control
            .listeners
            .get(&id)
            .map(|listener| listener.in_capsule)
    }

    fn listener_counts(&self, id: ListenerId) -> Option<ListenerCounts> {
        let control = self.control();
        control.listeners.get(&id).map(|listener| listener.counts)
    }

    fn unlisten(&self, id: ListenerId) {
        let mut control = self.control();
        if let Some(listener) = control.listeners.remove(&id)
            && let Some(id) = listener.id
        {
            control.cm.destroy(id);
        }
        drop(control);
        // The listener's device may need to be watched from now on.
        self.shared.mailbox.ring();
    }

    fn hold(&self, held: bool) {
        self.control().held = held;
        self.shared.mailbox.ring();
    }

    fn counts(&self) -> PlugCounts {
        let all = self.total();
        let refused = self.control().counts.all_rejects().collect();
        PlugCounts {
            accepted: all.accepted,
            closed: vec![
                ("peer", all.closed_by_peer),
                ("broken", all.closed_broken),
                ("protocol", all.closed_protocol),
                ("timeout", all.closed_timeout),
                ("local", all.closed_local),
            ],
            refused,
            bytes_received: all.recv_bytes + all.read_bytes,
            bytes_sent: all.send_bytes + all.write_bytes,
            // The metrics of RDMA report the work by device.
            work: Vec::new(),
            tls: None,
        }
    }

    fn open(
        &self,
        core: usize,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>> {
        let slot = Arc::new(CoreSlot::new(core, wake));
        let transport = RdmaTransport::new(Arc::clone(&self.shared), Arc::clone(&slot))?;
        self.shared.cores().push(slot);
        Ok(Box::new(transport))
    }
}

impl Drop for RdmaPlug {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.mailbox.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
