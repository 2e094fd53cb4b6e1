//! The RDMA host side of the process: one management thread and the registered memory of all
//! connections. It opens at the first connection, or at [`Rdma::prepare`].
//!
//! If an RDMA device appears later, or the kernel module of the connection manager is loaded later,
//! the next connection uses it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_nvmf::host::WantedQueue;
use nacre_nvmf::transport::HostTransport;
use nacre_transport_rdma::{RdmaDialer, RdmaHostOptions, RdmaHosts};
use nacre_transport_rdma_verbs::real::VerbsProvider;
use nacre_transport_rdma_verbs::{ProtectionDomain, Provider, VerbsError};
use parking_lot::Mutex;

use crate::source::Source;

/// Most queue pairs of one [`RdmaDial`] at a time. It needs three: one in use, one that is being
/// closed, and one that probes.
const QUEUES: usize = 4;

/// Parameters of all connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdmaTuning {
    /// Entries of the largest queue; sizes the memory for capsules.
    pub entries: u16,
    /// Time limit of each attempt: address, route and connection together.
    pub cm_timeout: Duration,
}

/// Returns the reason why there are no devices.
type Absence = Box<dyn Fn() -> VerbsError + Send + Sync>;

/// RDMA for the hosts of this process.
pub struct Rdma {
    provider: Arc<dyn Provider>,
    absence: Absence,
    tuning: RdmaTuning,
    max_inline: u32,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Set by the first connection or [`Rdma::prepare`] that finds a device.
    hosts: Option<Arc<RdmaHosts>>,
    arenas: Vec<Arena>,
}

impl Rdma {
    /// Opens the system's RDMA; an error names the missing part and how to get it. Success needs no
    /// device: one may appear later.
    pub fn open(tuning: RdmaTuning) -> Result<Self, VerbsError> {
        let provider = Arc::new(VerbsProvider::open()?);
        let asked = Arc::clone(&provider);
        let absence = Box::new(move || asked.absence().into_error());
        Ok(Self::over(provider, absence, tuning))
    }

    /// Uses another provider of verbs. `absence`: the error for connections while there is no
    /// device.
    pub fn over(provider: Arc<dyn Provider>, absence: Absence, tuning: RdmaTuning) -> Self {
        Self {
            provider,
            absence,
            tuning,
            max_inline: RdmaHostOptions::MAX_INLINE,
            inner: Mutex::default(),
        }
    }

    /// Adds memory of other parts of the process for the data of commands. Every device registers
    /// it.
    pub fn with_memory(self, arenas: Vec<Arena>) -> Self {
        self.inner.lock().arenas.extend(arenas);
        self
    }

    /// Posts capsules of up to `bytes`, in-capsule data included, as inline sends
    /// (`IBV_SEND_INLINE`), within the device's limit. The default is the size of a submission
    /// queue entry.
    pub fn inline_up_to(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Allocates `bytes` for [`Rdma::memory`]. Without this, that call registers new memory with
    /// the devices in use. With it, the first connection on a device registers the memory, so a
    /// limit on locked memory fails the connection.
    pub fn reserve(&self, bytes: usize) -> io::Result<()> {
        self.add_arena(&mut self.inner.lock(), bytes).map(drop)
    }

    /// A pool of buffers in memory that every RDMA device registers before its first connection.
    pub fn memory(&self, classes: &[ClassSpec]) -> io::Result<Pool> {
        let bytes = Pool::bytes_for(classes);
        let mut inner = self.inner.lock();
        let roomy = inner.arenas.iter().find(|arena| arena.remaining() >= bytes);
        let arena = match roomy {
            Some(arena) => arena.clone(),
            None => self.add_arena(&mut inner, bytes)?,
        };
        Pool::on_arena(&arena, classes).map_err(io::Error::other)
    }

    fn add_arena(&self, inner: &mut Inner, bytes: usize) -> io::Result<Arena> {
        let options = ArenaOptions::new(bytes.max(1) as u64);
        let arena = Arena::allocate(options).map_err(io::Error::other)?;
        if let Some(hosts) = &inner.hosts {
            hosts.add_arena(&arena).map_err(io::Error::other)?;
        }
        inner.arenas.push(arena.clone());
        Ok(arena)
    }

    /// Opens the devices, which blocks. Call it on a thread that may block; otherwise the first
    /// connection does it on its reactor. A failure is only logged: the next connection tries
    /// again.
    pub fn prepare(&self) {
        if let Err(error) = self.hosts() {
            tracing::debug!(%error, "no RDMA yet");
        }
    }

    /// The protection domains that connections use: one for each device that has had a connection.
    pub fn domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        let hosts = self.inner.lock().hosts.clone();
        hosts.map_or(Vec::new(), |hosts| hosts.domains())
    }

    /// The host side, started at the first call. An error if there is no device.
    fn hosts(&self) -> Result<Arc<RdmaHosts>, io::Error> {
        // Looked at each time: that also lets go of devices that are gone.
        let devices = self.provider.devices().map_err(io::Error::other)?;
        if devices.is_empty() {
            return Err(io::Error::other((self.absence)()));
        }
        let mut inner = self.inner.lock();
        if let Some(hosts) = &inner.hosts {
            return Ok(Arc::clone(hosts));
        }
        let hosts = RdmaHosts::new(Arc::clone(&self.provider), inner.arenas.clone())?;
        let hosts = Arc::new(hosts);
        inner.hosts = Some(Arc::clone(&hosts));
        Ok(hosts)
    }
}

/// Opens the queue pairs to one controller, on one thread.
pub(super) struct RdmaDial {
    rdma: Arc<Rdma>,
    address: SocketAddr,
    source: Source,
    tos: u8,
    dialer: Option<RdmaDialer>,
}

impl RdmaDial {
    pub(crate) fn new(rdma: Arc<Rdma>, address: SocketAddr, source: Source) -> Self {
        Self {
            rdma,
            address,
            source,
            tos: 0,
            dialer: None,
        }
    }

    /// Sets the Type of Service byte (DSCP << 2).
    pub(crate) fn marked(mut self, tos: u8) -> Self {
        self.tos = tos;
        self
    }

    pub(crate) fn dial(&mut self, wanted: &WantedQueue) -> io::Result<Box<dyn HostTransport>> {
        let hosts = self.rdma.hosts()?;
        let tuning = self.rdma.tuning;
        let dialer = match &mut self.dialer {
            Some(dialer) => dialer,
            none => none.insert(hosts.dialer(QUEUES, tuning.entries.max(wanted.entries))?),
        };
        let options = RdmaHostOptions {
            cntlid: wanted.cntlid,
            source: self.source.get(),
            cm_timeout: tuning.cm_timeout,
            // The caller that chooses between transports counts the attempts.
            connection_retries: 0,
            max_inline: self.rdma.max_inline,
            tos: self.tos,
            ..RdmaHostOptions::new(wanted.qid, wanted.entries)
        };
        Ok(Box::new(dialer.connect(self.address, options)?))
    }
}
