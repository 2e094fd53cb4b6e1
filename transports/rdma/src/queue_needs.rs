//! Computes the resources that a connection needs: send queue entries, completion queue entries and
//! receives.

use nacre_nvmf_wire::cqe::Cqe;
use nacre_transport_rdma_verbs::DeviceAttributes;

use crate::RdmaConfig;

/// The resources that one queue pair needs from its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueNeed {
    pub sends: u32,
    /// The queue pair's own receives; 0 if the connections of a core share theirs.
    pub receives: u32,
}

impl QueueNeed {
    /// The needs of a queue of `depth` commands with `read_depth` outstanding RDMA READs.
    pub fn of(
        config: &RdmaConfig,
        attributes: &DeviceAttributes,
        depth: u32,
        read_depth: u8,
    ) -> Self {
        let shared = shared_receives(config, attributes).is_some();
        Self {
            sends: send_entries(config, depth, read_depth).min(attributes.max_qp_wr),
            receives: if shared { 0 } else { depth },
        }
    }

    /// The needs if neither the device nor the host has a lower limit than `config`.
    pub fn unlimited(config: &RdmaConfig, depth: u32) -> Self {
        Self {
            sends: send_entries(config, depth, config.read_depth),
            receives: if config.srq_size > 0 { 0 } else { depth },
        }
    }

    /// Most completions that can be pending at the same time.
    pub fn completions(&self) -> u32 {
        self.sends + self.receives
    }
}

/// Entries of the send queue: a WRITE and a SEND for each command, and the READs, rounded up to a
/// power of two. Responses without space wait. The largest response fits if it is alone: a WRITE
/// for each descriptor, one more where two buffers meet, the SEND, and a marker.
fn send_entries(config: &RdmaConfig, depth: u32, read_depth: u8) -> u32 {
    let one = u32::from(config.max_sge) + 3;
    let all = 2 * depth + u32::from(read_depth);
    all.max(one).next_power_of_two()
}

/// Bytes of memory for the responses of one connection: 16 for each entry of its send queue.
pub(crate) fn message_bytes(config: &RdmaConfig) -> usize {
    let entries = send_entries(config, config.max_queue_depth.into(), config.read_depth);
    entries as usize * Cqe::SIZE
}

/// Entries of the shared receive queue of a device on a core; `None`: each connection has its own
/// receive queue.
pub fn shared_receives(config: &RdmaConfig, attributes: &DeviceAttributes) -> Option<u32> {
    let shared = config.srq_size > 0 && attributes.max_srq > 0;
    shared.then(|| config.srq_size.min(attributes.max_srq_wr))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shallowest queue has space for the largest response.
    #[test]
    fn the_largest_response_fits() {
        for descriptors in 1..=64 {
            let config = RdmaConfig {
                max_sge: descriptors,
                ..RdmaConfig::default()
            };
            let entries = send_entries(&config, 1, 1);
            // One entry is reserved for a marker.
            let (writes, room) = (2 + u32::from(descriptors) - 1, entries - 1);
            assert!(room > writes, "{descriptors}");
        }
    }
}
