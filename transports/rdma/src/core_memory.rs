//! The memory of one core: the buffers for its commands, and its responses.
//!
//! All of it is taken at start, for the devices present then. When it is taken, further devices are
//! refused.

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::Sqe;
use nacre_transport_rdma_verbs::{DeviceAttributes, Provider};

use crate::RdmaConfig;
use crate::need::{message_bytes, shared_receives};

/// Devices that one core serves at once: buffers have keys of so many.
const DEVICES: usize = 8;
/// Receives of one core for connections that have their own: 64 MiB of in-capsule data of 4 KiB,
/// which 128 queues of 128 commands use up.
const OWN_RECEIVES: usize = 16_384;
/// Receives beyond those that are posted: in the place of the ones whose commands are under way.
const UNDER_WAY: usize = 1024;

/// Commands of the shallowest frequent queues: Linux has this depth on admin queues
/// (NVMF_AQ_DEPTH).
const ADMIN_DEPTH: usize = 32;

/// Memory that one core takes for receives and responses, in bytes, with one device. Each further
/// device takes memory for its receives.
pub fn bytes_per_core(config: &RdmaConfig) -> u64 {
    CoreMemory::of(config, Devices::usual(config)).bytes() as u64
}

/// What connections will come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Devices {
    /// Number of devices whose connections share their receives.
    sharing: usize,
    /// True if there is a device whose connections each have their own receives.
    own: bool,
}

impl Devices {
    /// Counts the devices that are present now.
    pub fn of(config: &RdmaConfig, provider: &dyn Provider) -> Devices {
        let Ok(there) = provider.devices() else {
            return Devices::usual(config);
        };
        let used = |device: &&DeviceAttributes| {
            let wanted = config.device.as_ref();
            wanted.is_none_or(|wanted| *wanted == device.name)
        };
        let all = there.iter().map(|device| device.attributes()).filter(used);
        let (sharing, own): (Vec<_>, Vec<_>) =
            all.partition(|of| shared_receives(config, of).is_some());
        match (sharing.len(), own.len()) {
            (0, 0) => Devices::usual(config),
            (sharing, own) => Devices {
                sharing: sharing.min(DEVICES),
                own: own > 0,
            },
        }
    }

    /// One, with all that adapters have.
    pub fn usual(config: &RdmaConfig) -> Devices {
        Devices {
            sharing: usize::from(config.srq_size > 0),
            own: config.srq_size == 0,
        }
    }
}

pub(crate) struct CoreMemory {
    pub messages: Vec<ClassSpec>,
    pub headers: Vec<ClassSpec>,
    pub data: Option<Vec<ClassSpec>>,
    /// Receives that may be posted at once; the data has a buffer for each.
    pub receives: usize,
}

impl CoreMemory {
    pub fn of(config: &RdmaConfig, devices: Devices) -> CoreMemory {
        let of = |size: usize, count: usize| ClassSpec { size, count };
        let depth = usize::from(config.max_queue_depth);
        let shared = config.srq_size as usize;
        let own = if devices.own {
            (config.max_connections * depth).min(OWN_RECEIVES)
        } else {
            0
        };
        // One device more may come; until it does its buffers are with commands under way, too.
        let receives = devices.sharing * shared + own + shared.max(UNDER_WAY);
        // Also for later connections of a device without shared receives: headers are small.
        let most = if devices.own {
            config.max_connections
        } else {
            config.max_connections.min(receives / ADMIN_DEPTH)
        };
        let mut headers = vec![of(depth * Sqe::SIZE, most)];
        if shared > 0 {
            headers.push(of(shared * Sqe::SIZE, DEVICES));
        }
        let in_capsule = config.receive_data_size() as usize;
        CoreMemory {
            messages: vec![of(message_bytes(config), config.max_connections)],
            headers,
            data: (in_capsule > 0).then(|| vec![of(in_capsule, receives)]),
            receives,
        }
    }

    pub fn bytes(&self) -> usize {
        let all = [
            Some(&self.messages),
            Some(&self.headers),
            self.data.as_ref(),
        ];
        let classes = all.into_iter().flatten();
        classes.map(|classes| Pool::bytes_for(classes)).sum()
    }
}
