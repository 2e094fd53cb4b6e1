//! The values of the simulated controller's features (Base 5.27).

use nacre_nvmf_wire::features::{AsyncEvents, HostBehavior, NumberOfQueues};

pub(crate) struct Features {
    pub arbitration: u32,
    pub power: u32,
    pub temperature: u32,
    pub error_recovery: u32,
    pub cache: bool,
    pub queues: Option<NumberOfQueues>,
    pub coalescing: u32,
    pub atomicity: u32,
    pub async_events: AsyncEvents,
    /// Interrupt Vector Configuration (dword 11) by vector: bit 16 disables coalescing.
    pub vectors: Vec<u32>,
    pub timestamp: [u8; 8],
    pub host_behavior: HostBehavior,
    /// The addresses of the shadow doorbell and EventIdx buffers (Doorbell Buffer Config).
    pub doorbells: Option<(u64, u64)>,
}

impl Features {
    pub(crate) fn new(cache: bool) -> Self {
        Self {
            arbitration: 0,
            power: 0,
            temperature: 343,
            error_recovery: 0,
            cache,
            queues: None,
            coalescing: 0,
            atomicity: 0,
            async_events: AsyncEvents::empty(),
            vectors: Vec::new(),
            timestamp: [0; 8],
            host_behavior: HostBehavior::zeroed(),
            doorbells: None,
        }
    }
}
