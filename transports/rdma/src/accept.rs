//! Checks the connection request of a host, creates its queue pair, and hands the connection to the
//! core with the lowest load.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf::transport::{ListenerId, QueueKind};
use nacre_nvmf_wire::rdma::{AcceptData, RejectStatus, Request};
use nacre_transport_rdma_verbs::{
    CmId, ConnParams, ConnectionManager, DeviceAttributes, DeviceId, QpCaps, Queues, VerbsError,
};
use zerocopy::IntoBytes;

use crate::RdmaConfig;
use crate::queue_needs::{QueueNeed, shared_receives};
use crate::shared::{CoreSlot, Domain, Incoming, QueuePairInfo, QueuePairState, Shared, ToCore};
use crate::stats::ControlCounts;

/// A host's connection request, as the connection manager reports it.
pub(crate) struct ConnectRequest<'a> {
    pub id: CmId,
    pub listener: ListenerId,
    pub in_capsule: u32,
    pub device: DeviceId,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub params: &'a ConnParams,
}

/// A connection that was offered to a core.
pub(crate) struct Offered {
    pub core: Arc<CoreSlot>,
    pub kind: QueueKind,
    pub device: DeviceId,
    pub info: QueuePairInfo,
    /// Parameters for accepting it, once the core is ready.
    pub params: ConnParams,
    /// Number of its completions, and the queues in which they are reserved.
    pub completions: u32,
    pub queues: u64,
}

/// The reason of a refusal, for the host and for the log.
pub(crate) struct Refused(pub RejectStatus, pub String);

/// Time after the refusal of a host during which unconnected queues have a shorter deadline.
pub(crate) const CROWDED: Duration = Duration::from_secs(10);
/// That shorter deadline.
pub(crate) const CROWDED_PATIENCE: Duration = Duration::from_secs(1);

/// Scatter entries: a command's entry and its data; a message and its data.
const SGES: u32 = 2;

impl From<VerbsError> for Refused {
    fn from(error: VerbsError) -> Self {
        Self(RejectStatus::NoResources, error.to_string())
    }
}

pub(crate) fn offer(
    shared: &Shared,
    cm: &mut dyn ConnectionManager,
    counts: &mut ControlCounts,
    open: usize,
    connect: ConnectRequest<'_>,
) -> Result<Offered, Refused> {
    let config = &shared.config;
    let private = &connect.params.private_data;
    let request = Request::parse(private)
        .map_err(|status| Refused(status, format!("{} bytes of private data", private.len())))?;
    if request.qid == u16::MAX {
        return Err(Refused(RejectStatus::InvalidQueueId, "queue 65535".into()));
    }
    let domain = shared.memory.domain(&*shared.provider, connect.device)?;
    let attributes = domain.domain.attributes();
    let (depth, limit) = (request.host_send_entries, depth_limit(config, attributes));
    if depth > limit {
        let why = format!("{depth} entries; at most {limit} are possible here");
        return Err(Refused(RejectStatus::InvalidHostSendSize, why));
    }
    // A host that answers no READ could not write.
    if connect.params.initiator_depth == 0 {
        let why = "the host answers no RDMA READ".into();
        return Err(Refused(RejectStatus::InvalidResponderResources, why));
    }
    let no_room = |why: String| Refused(RejectStatus::NoResources, why);
    if open >= config.max_qpairs as usize {
        // Evict connections that only occupy a place; this host is refused and may retry.
        for core in shared.cores().iter() {
            core.send(ToCore::Crowded);
        }
        let limit = config.max_qpairs;
        return Err(no_room(format!(
            "{limit} queue pairs are open, as many as [rdma] max_qpairs allows"
        )));
    }
    let core = shared.least_loaded();
    let core = core.ok_or_else(|| no_room("no core serves this transport".into()))?;
    let read_depth = config
        .read_depth
        .min(attributes.max_initiator_depth)
        .min(connect.params.initiator_depth);
    let need = QueueNeed::of(config, attributes, depth, read_depth);
    let caps = QpCaps {
        max_send_wr: need.sends,
        max_recv_wr: need.receives,
        max_send_sge: SGES.min(attributes.max_sge),
        max_recv_sge: SGES.min(attributes.max_sge),
        max_inline: config.max_inline_data,
    };
    let completions = need.completions();
    let endpoint = {
        let mut queues = core.queues();
        let (queues, used) = match queues.entry(connect.device) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(make_queues(config, &domain)?)
            }
        };
        reserve(queues, *used + completions, attributes, counts)?;
        let endpoint = queues.create_qp(cm, connect.id, caps)?;
        *used += completions;
        endpoint
    };
    let mut params = ConnParams {
        initiator_depth: read_depth,
        responder_resources: connect
            .params
            .responder_resources
            .min(attributes.max_responder_resources),
        rnr_retry_count: 7,
        retry_count: 7,
        ..ConnParams::default()
    };
    let invalidate = domain.may_invalidate.load(Ordering::Relaxed);
    let info = QueuePairInfo {
        number: endpoint.number(),
        device: attributes.name.clone(),
        listener: connect.listener,
        local: connect.local,
        peer: connect.peer,
        core: core.core,
        state: QueuePairState::Connecting,
        depth: depth as u16,
        read_depth,
        invalidate,
        gid_index: None,
    };
    let accept = AcceptData::new(depth as u16);
    params
        .private_data
        .extend(accept.as_bytes().iter().copied());
    let (kind, queues) = (QueueKind::of(request.qid), endpoint.queues().id());
    core.load.add(kind);
    core.send(ToCore::Incoming(Box::new(Incoming {
        id: connect.id,
        endpoint,
        device: connect.device,
        key_slot: domain.key_slot,
        listener: connect.listener,
        in_capsule: connect.in_capsule,
        kind,
        local: connect.local,
        peer: connect.peer,
        depth: depth as u16,
        sends: need.sends,
        read_depth,
        invalidate,
        may_invalidate: Arc::clone(&domain.may_invalidate),
    })));
    Ok(Offered {
        core,
        kind,
        device: connect.device,
        info,
        params,
        completions,
        queues,
    })
}

/// Most commands of a queue, given the limits of the device.
fn depth_limit(config: &RdmaConfig, attributes: &DeviceAttributes) -> u32 {
    u32::from(config.max_queue_depth).min(attributes.max_qp_wr / 2)
}

/// Creates the queues. Also returns the number of completions already reserved: those of the
/// shared receives.
fn make_queues(config: &RdmaConfig, domain: &Domain) -> Result<(Queues, u32), VerbsError> {
    let attributes = domain.domain.attributes();
    let shared = shared_receives(config, attributes);
    let srq = shared.map(|entries| (entries, SGES.min(attributes.max_srq_sge)));
    let used = srq.map_or(0, |(entries, _)| entries);
    let cq = config.cq_size.max(used).min(attributes.max_cqe);
    Ok((Queues::new(&domain.domain, cq, srq)?, used))
}

/// Reserves completions, so that the completion queue cannot overflow.
fn reserve(
    queues: &Queues,
    entries: u32,
    attributes: &DeviceAttributes,
    counts: &mut ControlCounts,
) -> Result<(), Refused> {
    let there = queues.cq().capacity();
    if entries <= there {
        return Ok(());
    }
    let wanted = entries.next_power_of_two().min(attributes.max_cqe);
    if wanted < entries {
        let why = format!(
            "{} allows {} completions per queue, {entries} may come",
            attributes.name, attributes.max_cqe
        );
        return Err(Refused(RejectStatus::NoResources, why));
    }
    queues.cq().resize(wanted)?;
    counts.cq_resizes += 1;
    Ok(())
}
