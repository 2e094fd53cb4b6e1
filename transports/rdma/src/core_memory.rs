//! The memory of one core for receives (commands and in-capsule data) and responses.
//!
//! All memory is allocated at start, for the devices present then. A device that appears later is
//! refused if no memory is left.

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::Sqe;
use nacre_transport_rdma_verbs::{DeviceAttributes, Provider};

use crate::RdmaConfig;
use crate::queue_needs::{message_bytes, shared_receives};

/// Most devices of one core: buffers have keys for this number.
const DEVICES: usize = 8;
/// Receives of one core for connections with their own receives: 64 MiB of in-capsule data of 4
/// KiB, which 128 queues of 128 commands use up.
const OWN_RECEIVES: usize = 16_384;
/// Buffers beyond the posted receives: they replace those whose commands are in flight.
const UNDER_WAY: usize = 1024;

/// Queue depth of the shallowest common queues: Linux uses it for admin queues (NVMF_AQ_DEPTH).
const ADMIN_DEPTH: usize = 32;

/// Memory of one core for receives and responses, in bytes, with one device. Each further device
/// needs memory for its receives.
pub fn bytes_per_core(config: &RdmaConfig) -> u64 {
    CoreMemory::of(config, Devices::usual(config)).bytes() as u64
}

/// The devices that the memory is sized for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Devices {
    /// Number of devices whose connections share their receives.
    sharing: usize,
    /// True if a device exists whose connections have their own receives.
    own: bool,
}

impl Devices {
    /// Counts the present devices.
    pub(crate) fn of(config: &RdmaConfig, provider: &dyn Provider) -> Self {
        let Ok(there) = provider.devices() else {
            return Self::usual(config);
        };
        let used = |device: &&DeviceAttributes| {
            let wanted = config.device.as_ref();
            wanted.is_none_or(|wanted| *wanted == device.name)
        };
        let all = there.iter().map(|device| device.attributes()).filter(used);
        let (sharing, own): (Vec<_>, Vec<_>) =
            all.partition(|of| shared_receives(config, of).is_some());
        match (sharing.len(), own.len()) {
            (0, 0) => Self::usual(config),
            (sharing, own) => Self {
                sharing: sharing.min(DEVICES),
                own: own > 0,
            },
        }
    }

    /// One device with the features of usual adapters.
    pub(crate) fn usual(config: &RdmaConfig) -> Self {
        Self {
            sharing: usize::from(config.srq_size > 0),
            own: config.srq_size == 0,
        }
    }
}

pub(crate) struct CoreMemory {
    pub messages: Vec<ClassSpec>,
    pub headers: Vec<ClassSpec>,
    pub data: Option<Vec<ClassSpec>>,
    /// Most receives posted at the same time; each has a data buffer.
    pub receives: usize,
}

impl CoreMemory {
    pub(crate) fn of(config: &RdmaConfig, devices: Devices) -> Self {
        let of = |size: usize, count: usize| ClassSpec { size, count };
        let depth = usize::from(config.max_queue_depth);
        let shared = config.srq_size as usize;
        let own = if devices.own {
            (config.max_qpairs as usize * depth).min(OWN_RECEIVES)
        } else {
            0
        };
        // One more device may be added later; until then its buffers serve commands in flight.
        let receives = devices.sharing * shared + own + shared.max(UNDER_WAY);
        // Headers are small, so this also allows for later connections of a device without shared
        // receives.
        let most = if devices.own {
            config.max_qpairs as usize
        } else {
            (config.max_qpairs as usize).min(receives / ADMIN_DEPTH)
        };
        let mut headers = vec![of(depth * Sqe::SIZE, most)];
        if shared > 0 {
            headers.push(of(shared * Sqe::SIZE, DEVICES));
        }
        let in_capsule = config.receive_data_size() as usize;
        Self {
            messages: vec![of(message_bytes(config), config.max_qpairs as usize)],
            headers,
            data: (in_capsule > 0).then(|| vec![of(in_capsule, receives)]),
            receives,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let all = [
            Some(&self.messages),
            Some(&self.headers),
            self.data.as_ref(),
        ];
        let classes = all.into_iter().flatten();
        classes.map(|classes| Pool::bytes_for(classes)).sum()
    }
}
