//! The queue entries, completions and receives that a connection needs.

use nacre_nvmf_wire::cqe::Cqe;
use nacre_transport_rdma_verbs::DeviceAttributes;

use crate::RdmaConfig;

/// What one queue asks of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueNeed {
    pub sends: u32,
    /// The queue's own receives; 0 if the queues of a core share theirs.
    pub receives: u32,
}

impl QueueNeed {
    /// A queue of `depth` commands, whose host answers `read_depth` READs at once.
    pub fn of(
        config: &RdmaConfig,
        attributes: &DeviceAttributes,
        depth: u32,
        read_depth: u8,
    ) -> QueueNeed {
        let shared = shared_receives(config, attributes).is_some();
        QueueNeed {
            sends: send_entries(config, depth, read_depth).min(attributes.max_qp_wr),
            receives: if shared { 0 } else { depth },
        }
    }

    /// Whatever the device can do, and the host.
    pub fn unlimited(config: &RdmaConfig, depth: u32) -> QueueNeed {
        QueueNeed {
            sends: send_entries(config, depth, config.read_depth),
            receives: if config.srq_size > 0 { 0 } else { depth },
        }
    }

    /// There can be so many of it at once.
    pub fn completions(&self) -> u32 {
        self.sends + self.receives
    }
}

/// A response may need two writes and itself; responses without room wait their turn. The largest
/// response has room when it is alone. It needs a write for each of its descriptors, one more where
/// two buffers meet, the send itself, and a marker.
fn send_entries(config: &RdmaConfig, depth: u32, read_depth: u8) -> u32 {
    let one = u32::from(config.max_sgl_descriptors) + 3;
    let all = 2 * depth + u32::from(read_depth);
    all.max(one).next_power_of_two()
}

/// Bytes of the responses that one connection can have under way.
pub(crate) fn message_bytes(config: &RdmaConfig) -> usize {
    let entries = send_entries(config, config.max_queue_depth.into(), config.read_depth);
    entries as usize * Cqe::SIZE
}

/// Receives that the connections of a device on a core share; `None`: each has its own.
pub fn shared_receives(config: &RdmaConfig, attributes: &DeviceAttributes) -> Option<u32> {
    let shared = config.srq_size > 0 && attributes.max_srq > 0;
    shared.then(|| config.srq_size.min(attributes.max_srq_wr))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one response may need there is room for on the shallowest queue.
    #[test]
    fn room_for_one() {
        for descriptors in 1..=64 {
            let config = RdmaConfig {
                max_sgl_descriptors: descriptors,
                ..RdmaConfig::default()
            };
            let entries = send_entries(&config, 1, 1);
            // A place is kept for a marker.
            let (writes, room) = (2 + u32::from(descriptors) - 1, entries - 1);
            assert!(room > writes, "{descriptors}");
        }
    }
}
