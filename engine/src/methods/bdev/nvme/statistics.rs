//! `bdev_nvme_get_transport_statistics`: polls and commands of the queues to remote devices and to
//! local drives, per reactor and transport.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_bdev_nvme::QueuePairActivity;
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_remote::PathQueue;
use schemars::JsonSchema;
use serde::Serialize;

use crate::rpc::{Class, Method, NoParams, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetTransportStatistics>();
}

struct GetTransportStatistics;

#[derive(Debug, Serialize, JsonSchema)]
struct Statistics {
    poll_groups: Vec<Group>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Group {
    /// The reactor. Only reactors with a queue to a device are listed.
    thread: String,
    transports: Vec<TransportStatistics>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "trname")]
enum TransportStatistics {
    #[serde(rename = "RDMA")]
    Rdma { devices: Vec<RdmaDeviceStatistics> },
    #[serde(rename = "PCIE")]
    Pcie(PcieStatistics),
    #[serde(rename = "TCP")]
    Tcp(TcpStatistics),
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct RdmaDeviceStatistics {
    dev_name: String,
    polls: u64,
    idle_polls: u64,
    completions: u64,
    /// I/O that waited for a free command or for the connection.
    queued_requests: u64,
    total_send_wrs: u64,
    send_doorbell_updates: u64,
    total_recv_wrs: u64,
    recv_doorbell_updates: u64,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct PcieStatistics {
    polls: u64,
    idle_polls: u64,
    completions: u64,
    cq_mmio_doorbell_updates: u64,
    cq_shadow_doorbell_updates: u64,
    /// I/O that waited for a free command, a buffer or the queue.
    queued_requests: u64,
    submitted_requests: u64,
    sq_mmio_doorbell_updates: u64,
    sq_shadow_doorbell_updates: u64,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct TcpStatistics {
    polls: u64,
    idle_polls: u64,
    /// Polls of a connection that found completions.
    socket_completions: u64,
    nvme_completions: u64,
    /// I/O that waited for a free command or for the connection.
    queued_requests: u64,
    submitted_requests: u64,
}

impl TcpStatistics {
    fn add(&mut self, queue: &PathQueue) {
        let activity = &queue.activity;
        self.polls += activity.polls;
        self.idle_polls += activity.polls.saturating_sub(activity.busy_polls);
        self.socket_completions += activity.busy_polls;
        self.nvme_completions += activity.completions;
        self.queued_requests += activity.queued;
        self.submitted_requests += activity.submitted;
    }
}

impl RdmaDeviceStatistics {
    fn add(&mut self, queue: &PathQueue) {
        let activity = &queue.activity;
        self.polls += activity.polls;
        self.idle_polls += activity.polls.saturating_sub(activity.busy_polls);
        self.completions += activity.completions;
        self.queued_requests += activity.queued;
        self.total_send_wrs += activity.work_requests.sends;
        self.send_doorbell_updates += activity.work_requests.send_doorbells;
        self.total_recv_wrs += activity.work_requests.receives;
        self.recv_doorbell_updates += activity.work_requests.receive_doorbells;
    }
}

impl PcieStatistics {
    fn add(&mut self, queue: &QueuePairActivity) {
        self.polls += queue.polls;
        self.idle_polls += queue.polls.saturating_sub(queue.busy_polls);
        self.completions += queue.completions;
        self.cq_mmio_doorbell_updates += queue.cq_register_writes;
        self.cq_shadow_doorbell_updates += queue.cq_shadow_writes;
        self.queued_requests += queue.queued;
        self.submitted_requests += queue.submitted;
        self.sq_mmio_doorbell_updates += queue.sq_register_writes;
        self.sq_shadow_doorbell_updates += queue.sq_shadow_writes;
    }
}

/// The sums of one reactor.
#[derive(Debug, Default)]
struct ReactorSums {
    /// By device name.
    rdma: BTreeMap<String, RdmaDeviceStatistics>,
    pcie: Option<PcieStatistics>,
    tcp: Option<TcpStatistics>,
}

impl ReactorSums {
    fn transports(self) -> Vec<TransportStatistics> {
        let mut transports = Vec::new();
        if !self.rdma.is_empty() {
            let device = |(dev_name, sums)| RdmaDeviceStatistics { dev_name, ..sums };
            transports.push(TransportStatistics::Rdma {
                devices: self.rdma.into_iter().map(device).collect(),
            });
        }
        transports.extend(self.pcie.map(TransportStatistics::Pcie));
        transports.extend(self.tcp.map(TransportStatistics::Tcp));
        transports
    }
}

impl Method<Engine> for GetTransportStatistics {
    const NAME: &'static str = "bdev_nvme_get_transport_statistics";
    const ABOUT: &'static str = "Counts the polls and commands of queues to remote devices and local drives, per reactor \
        and transport. Counters of remote devices are up to 250 ms old; those of a queue count for its present transport.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Statistics;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Statistics, RpcError> {
        let mut groups: BTreeMap<String, ReactorSums> = BTreeMap::new();
        for (_, remote) in engine.remotes.list() {
            for device in remote.attachment.devices() {
                for path in device.paths() {
                    for queue in &path.queues {
                        let sums = groups.entry(queue.thread.clone()).or_default();
                        if path.status.transport == TransportType::Rdma {
                            let name = queue.device.clone().unwrap_or_default();
                            sums.rdma.entry(name).or_default().add(queue);
                        } else {
                            sums.tcp.get_or_insert_default().add(queue);
                        }
                    }
                }
            }
        }
        for (_, drive) in engine.drives.list() {
            for queue in drive.controller.queue_pairs() {
                let sums = groups.entry(queue.thread.clone()).or_default();
                sums.pcie.get_or_insert_default().add(&queue);
            }
        }
        let group = |(thread, sums): (String, ReactorSums)| Group {
            thread,
            transports: sums.transports(),
        };
        Ok(Statistics {
            poll_groups: groups.into_iter().map(group).collect(),
        })
    }
}
