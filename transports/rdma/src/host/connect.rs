//! The management thread of the RDMA host side: connects queue pairs to targets through the
//! connection manager, with retries and timeouts, and destroys those that the cores return.
//!
//! ```text
//!   ADDR_RESOLVE ─▶ ROUTE_RESOLVE ─▶ (queue pair, receives) ─▶ CONNECT ─▶ established
//!        └───────────────┴──────────────────────────────────────┴─▶ failed: retry or report
//! ```

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nacre_nvmf::transport::Closed;
use nacre_nvmf_wire::rdma::{AcceptData, RejectData, Request};
use nacre_reactor::{EventSet, Events, Interest};
use nacre_transport_rdma_verbs::{
    CmEventKind, CmId, CmOptions, ConnParams, ConnectionManager, DeviceId, QpCaps, Queues,
    VerbsError,
};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::queue::send_entries;
use super::{HostShared, Link, ManagerRequest, QueueMessage, RdmaHostOptions};
use crate::stats::event_name;

/// The status of an event for a peer that does not answer.
const TIMED_OUT: i32 = -rustix::io::Errno::TIMEDOUT.raw_os_error();

/// Beginning of the text of a timeout; documented, so that operators can search logs for it.
const TIMEOUT: &str = "RDMA connection timeout";

fn timed_out(limit: Duration) -> String {
    format!("{TIMEOUT} after {}ms", limit.as_millis())
}

/// Advice for a connection that timed out; empty for other causes.
fn remedy(why: &str, address: SocketAddr) -> String {
    if why.starts_with(TIMEOUT) {
        format!(
            "; is it there (`ping {}`), does the packet filter admit UDP 4791, has this machine a GID for the address it \
         comes from (`nacre rdma gids`)?",
            address.ip()
        )
    } else {
        String::new()
    }
}

/// Interval of checks for removed RDMA devices: the kernel's removal may wait for this process.
const LOOK: Duration = Duration::from_secs(2);
/// Interval of checks for timeouts.
const TICK: Duration = Duration::from_millis(100);

struct Attempt {
    address: SocketAddr,
    options: RdmaHostOptions,
    link: Arc<Link>,
    stage: &'static str,
    deadline: Instant,
    retries: u32,
    /// The last attempt was rejected by a running target.
    refused: bool,
    established: bool,
    /// A reactor has the queue pair, and will return it.
    at_core: bool,
    device: Option<DeviceId>,
    read_depth: u8,
}

/// The connections of the host side: attempts in progress, attempts to retry, and connections that
/// reactors use.
pub(super) struct Connects {
    cm: Box<dyn ConnectionManager>,
    attempts: HashMap<CmId, Attempt>,
    /// The devices of failed attempts whose queue pairs reactors have not returned yet.
    returning: HashMap<CmId, DeviceId>,
    /// Attempts to retry, each with its due time.
    waiting: Vec<(Instant, Attempt)>,
    /// Connections have changed: a removed device may have lost its last user.
    stale: bool,
    looked_at: Option<Instant>,
}

impl Connects {
    pub(super) fn new(shared: &HostShared) -> Result<Self, VerbsError> {
        Ok(Self {
            cm: shared.provider.connection_manager()?,
            attempts: HashMap::new(),
            returning: HashMap::new(),
            waiting: Vec::new(),
            stale: false,
            looked_at: None,
        })
    }

    /// Handles new requests of reactors, connection manager events and timeouts. Does not wait for
    /// events. The first queue pair on a device takes long: it registers all memory with the
    /// device.
    pub(super) fn turn(&mut self, shared: &HostShared, now: Instant) {
        shared.mailbox.quiet();
        while let Some(ask) = shared.mailbox.take() {
            match ask {
                ManagerRequest::Connect(address, options, link) => {
                    self.stale = true;
                    let retries = options.connection_retries;
                    self.begin(
                        Attempt {
                            address,
                            options,
                            link,
                            stage: "ADDR_RESOLVE",
                            deadline: now,
                            retries,
                            refused: false,
                            established: false,
                            at_core: false,
                            device: None,
                            read_depth: 0,
                        },
                        now,
                    );
                }
                ManagerRequest::Ready(id) => self.connect(id, now),
                ManagerRequest::Forget(arena) => shared.memory.remove(&arena),
                ManagerRequest::Done(id, endpoint) => {
                    drop(endpoint);
                    self.cm.destroy(id);
                    self.attempts.remove(&id);
                    self.returning.remove(&id);
                    self.stale = true;
                }
            }
        }
        while let Ok(Some(event)) = self.cm.next_event() {
            self.event(shared, event.id, event.kind, now);
        }
        self.timeouts(now);
        // A device without connections disappears without an event.
        let looked = self.looked_at.is_some_and(|at| now < at + LOOK);
        if !looked {
            (self.looked_at, self.stale) = (Some(now), true);
            if let Err(error) = shared.provider.devices() {
                tracing::debug!(%error, "the RDMA devices cannot be listed");
            }
        }
        self.forget_gone(shared);
    }

    /// Releases removed devices that no queue pair uses. Their removal may wait for that, and the
    /// number of devices that memory is registered with is small.
    fn forget_gone(&mut self, shared: &HostShared) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        for domain in shared.memory.domains() {
            let id = domain.device();
            let mut attempts = self.attempts.values();
            let in_use = attempts.any(|a| a.device == Some(id) && a.at_core)
                || self.returning.values().any(|device| *device == id);
            if !in_use && shared.provider.device(id).is_err() {
                shared.memory.forget(id);
            }
        }
    }

    fn begin(&mut self, mut attempt: Attempt, now: Instant) {
        if attempt.link.abandoned.load(Ordering::Acquire) {
            return;
        }
        let options = &attempt.options;
        let cm_options = CmOptions {
            tos: options.tos,
            ack_timeout: None,
        };
        (attempt.stage, attempt.deadline) = ("ADDR_RESOLVE", now + options.cm_timeout);
        attempt.at_core = false;
        attempt.refused = false;
        let timeout = options.cm_timeout;
        match self
            .cm
            .resolve_address(options.source, attempt.address, timeout, cm_options)
        {
            Ok(id) => {
                self.attempts.insert(id, attempt);
            }
            Err(error) => self.retry(attempt, &error.to_string(), now),
        }
    }

    /// Handles a failed attempt: retries it, or reports the failure after the last one.
    fn fail(&mut self, id: CmId, why: &str, now: Instant) {
        let Some(attempt) = self.attempts.get(&id) else {
            return;
        };
        if attempt.established {
            let ended = Closed::Broken(format!("{}: {why}", attempt.address));
            return attempt.link.send(QueueMessage::Ended(ended));
        }
        let Some(attempt) = self.attempts.remove(&id) else {
            return;
        };
        // The core returns its queue pair first; the id is destroyed with it.
        match attempt.device {
            Some(device) if attempt.at_core => drop(self.returning.insert(id, device)),
            _ => self.cm.destroy(id),
        }
        self.retry(attempt, why, now);
    }

    fn retry(&mut self, mut attempt: Attempt, why: &str, now: Instant) {
        let (address, stage) = (attempt.address, attempt.stage);
        if attempt.link.abandoned.load(Ordering::Acquire) {
            return;
        }
        if attempt.retries == 0 {
            tracing::warn!(%address, stage, why, "RDMA connection failed");
            let text = format!(
                "cannot connect to {address} by RDMA: {why} ({stage}){}",
                remedy(why, address)
            );
            let ended = if attempt.refused {
                Closed::Refused(text)
            } else {
                Closed::Broken(text)
            };
            return attempt.link.send(QueueMessage::Ended(ended));
        }
        attempt.retries -= 1;
        tracing::debug!(%address, stage, why, retries = attempt.retries, "RDMA connection failed, trying again");
        attempt.link.send(QueueMessage::Again);
        self.waiting
            .push((now + attempt.options.retry_delay, attempt));
    }

    fn event(&mut self, shared: &HostShared, id: CmId, kind: CmEventKind, now: Instant) {
        let Some(attempt) = self.attempts.get_mut(&id) else {
            return;
        };
        let name = event_name(&kind);
        match kind {
            CmEventKind::AddressResolved { device, .. } => {
                (attempt.stage, attempt.device) = ("ROUTE_RESOLVE", Some(device));
                let timeout = attempt.options.cm_timeout;
                if let Err(error) = self.cm.resolve_route(id, timeout) {
                    self.fail(id, &error.to_string(), now);
                }
            }
            CmEventKind::RouteResolved => {
                attempt.stage = "CONNECT";
                if let Err(error) = make_qp(shared, &mut *self.cm, id, attempt) {
                    self.fail(id, &error.to_string(), now);
                }
            }
            CmEventKind::Established { params } => {
                if AcceptData::parse(&params.private_data).is_none() {
                    return self.fail(id, "its answer is not one of NVMe/RDMA", now);
                }
                attempt.established = true;
                attempt.link.send(QueueMessage::Established);
            }
            CmEventKind::Rejected {
                status,
                private_data,
            } => {
                let refusal = RejectData::parse(&private_data);
                let why = match refusal {
                    Some(status) => format!("refused: {status} (code {:02x}h)", status as u16),
                    None => format!("refused: nothing listens there (reason {status})"),
                };
                // Without a reason code of NVMe/RDMA, the target may just be restarting.
                attempt.refused = refusal.is_some();
                // The admin queue of this controller has just been connected, so the target refuses
                // deliberately.
                if attempt.refused && attempt.options.qid > 0 {
                    attempt.retries = 0;
                }
                self.fail(id, &why, now);
            }
            CmEventKind::Disconnected => attempt.link.send(QueueMessage::Ended(Closed::Peer)),
            // The kernel's timeout equals this one: whichever comes first, users see the same
            // result.
            CmEventKind::AddressError { status: TIMED_OUT }
            | CmEventKind::RouteError { status: TIMED_OUT } => {
                let timeout = attempt.options.cm_timeout;
                self.fail(id, &timed_out(timeout), now);
            }
            CmEventKind::AddressError { status }
            | CmEventKind::RouteError { status }
            | CmEventKind::ConnectError { status }
            | CmEventKind::Unreachable { status } => {
                self.fail(id, &format!("{name}, status {status}"), now);
            }
            CmEventKind::DeviceRemoval => {
                self.stale = true;
                self.fail(id, "the RDMA device was removed", now);
            }
            CmEventKind::AddressChange => {
                self.fail(id, "the address moved to another RDMA device", now);
            }
            // Other events are not needed.
            CmEventKind::TimewaitExit
            | CmEventKind::ConnectRequest { .. }
            | CmEventKind::Other { .. } => {}
        }
    }

    /// Sends the connect request, after the reactor has posted the queue pair's receives.
    fn connect(&mut self, id: CmId, now: Instant) {
        let Some(attempt) = self.attempts.get(&id) else {
            return;
        };
        let options = &attempt.options;
        let mut params = ConnParams {
            responder_resources: attempt.read_depth,
            // The controller reads from this side, which reads nothing.
            initiator_depth: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            ..ConnParams::default()
        };
        let request = Request::new(options.qid, options.entries, options.cntlid).to_data();
        params
            .private_data
            .extend(request.as_bytes().iter().copied());
        if let Err(error) = self.cm.connect(id, &params) {
            self.fail(id, &error.to_string(), now);
        }
    }

    fn timeouts(&mut self, now: Instant) {
        let late = |attempt: &Attempt| !attempt.established && now >= attempt.deadline;
        let overdue = self.attempts.iter().filter(|(_, attempt)| late(attempt));
        let overdue: Vec<(CmId, Duration)> = overdue
            .map(|(id, attempt)| (*id, attempt.options.cm_timeout))
            .collect();
        for (id, timeout) in overdue {
            self.fail(id, &timed_out(timeout), now);
        }
        let due = self.waiting.extract_if(.., |(at, _)| now >= *at);
        let due: Vec<Attempt> = due.map(|(_, attempt)| attempt).collect();
        for attempt in due {
            self.begin(attempt, now);
        }
    }

    fn patience(&self) -> Duration {
        let idle = self.waiting.is_empty() && self.attempts.values().all(|a| a.established);
        if idle { LOOK } else { TICK }
    }
}

fn make_qp(
    shared: &HostShared,
    cm: &mut dyn ConnectionManager,
    id: CmId,
    attempt: &mut Attempt,
) -> Result<(), VerbsError> {
    let device = attempt.device.ok_or(VerbsError::NoSuchId(id))?;
    let domain = shared.memory.domain(&*shared.provider, device)?;
    let attributes = domain.domain.attributes();
    let entries = u32::from(attempt.options.entries);
    let caps = QpCaps {
        max_send_wr: send_entries(attempt.options.entries).min(attributes.max_qp_wr),
        max_recv_wr: entries.min(attributes.max_qp_wr),
        max_send_sge: 2.min(attributes.max_sge),
        max_recv_sge: 1,
        max_inline: attempt.options.max_inline,
    };
    attempt.read_depth = attempt
        .options
        .read_depth
        .min(attributes.max_responder_resources);
    let queues = Queues::new(&domain.domain, caps.max_send_wr + caps.max_recv_wr, None)?;
    let endpoint = queues.create_qp(cm, id, caps)?;
    attempt.at_core = true;
    attempt.link.send(QueueMessage::Endpoint(Box::new((
        endpoint,
        domain.key_slot,
        id,
    ))));
    Ok(())
}

/// The function of the management thread.
pub(super) fn run(shared: &HostShared, connects: &Mutex<Connects>) {
    let lock = || connects.lock();
    let set = EventSet::new().and_then(|set| {
        set.add(lock().cm.fd(), 0, Interest::READ)?;
        set.add(&shared.mailbox.wake, 1, Interest::READ)?;
        Ok(set)
    });
    let set = match set {
        Ok(set) => set,
        Err(error) => return tracing::error!(%error, "no RDMA connections can be made"),
    };
    let mut events = Events::with_capacity(2);
    while !shared.stopping.load(Ordering::Acquire) {
        let patience = {
            let mut connects = lock();
            connects.turn(shared, Instant::now());
            connects.patience()
        };
        if let Err(error) = set.wait(&mut events, patience) {
            tracing::error!(%error, "waiting for RDMA events failed");
            return;
        }
    }
}
