//! Metrics of the RDMA transport: operations, errors, connections, memory, and the devices'
//! counters.

use std::collections::BTreeMap;

use nacre_transport_rdma::{BATCH_CLASSES, RdmaPlug, StatsSnapshot, Timed};
use nacre_transport_rdma_link::CounterGroup;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Sample, Scrape};

family!(
    CONNECTIONS,
    "nacre_rdma_connections",
    Gauge,
    "Queue pairs of hosts.",
    ["listener", "device"]
);
family!(
    OPERATIONS,
    "nacre_rdma_operations",
    Counter,
    "Total RDMA operations by type: `send`, `recv`, `read`, `write`.",
    ["type", "device"]
);
family!(
    BYTES,
    "nacre_rdma_bytes",
    Counter,
    "Bytes moved, by type of operation.",
    ["type", "device"]
);
family!(
    ERRORS,
    "nacre_rdma_completion_errors",
    Counter,
    "Requests that failed, by status; flushes of queue pairs that end are none.",
    ["status"]
);
family!(
    RETRY,
    "nacre_rdma_retry_exceeded",
    Counter,
    "Requests that failed after all retries: packets were lost, or the peer stopped.",
    []
);
family!(
    CM_EVENTS,
    "nacre_rdma_cm_events",
    Counter,
    "Events of the connection manager.",
    ["event"]
);
family!(
    REJECTS,
    "nacre_rdma_rejects",
    Counter,
    "Connection requests refused, by the status sent to the host (NVMe/RDMA, CMRejectStatus).",
    ["code"]
);
family!(
    CONNECT_FAILURES,
    "nacre_rdma_connect_failures",
    Counter,
    "Connections of hosts that failed, by stage: `request` (refused, by the status sent to the host), `establish` (accepted, and not established: by the event that reported it, or in time).",
    ["stage", "reason"]
);
family!(
    ASYNC_EVENTS,
    "nacre_rdma_async_events",
    Counter,
    "Asynchronous events of devices and ports.",
    []
);
family!(
    REGISTRATIONS,
    "nacre_mr_registrations",
    Counter,
    "Registrations of memory with a device; flat under load.",
    ["device"]
);
family!(
    REGISTERED,
    "nacre_mr_registered_bytes",
    Gauge,
    "Memory registered with a device.",
    ["device"]
);
family!(
    CQ_ENTRIES,
    "nacre_cq_entries",
    Gauge,
    "Entries of the completion queue of a device on a reactor.",
    ["reactor", "device"]
);
family!(
    CQ_RESERVED,
    "nacre_cq_entries_reserved",
    Gauge,
    "Entries of a completion queue that receives and queue pairs may need at the same time; a queue pair without room is refused.",
    ["reactor", "device"]
);
family!(
    RECEIVES,
    "nacre_rdma_receives",
    Gauge,
    "Receive buffers for commands of hosts, of a device on a reactor: shared by its queue pairs, or their own.",
    ["reactor", "device"]
);
family!(
    RECEIVES_FREE,
    "nacre_rdma_receives_free",
    Gauge,
    "Receives in which a command can arrive; the others wait for buffers of commands in flight.",
    ["reactor", "device"]
);
family!(
    RECEIVE_WAITS,
    "nacre_rdma_receive_waits",
    Counter,
    "Turns at whose end receives waited for buffers. Hosts are held up when none is free (RNR).",
    ["reactor", "device"]
);
family!(
    BATCH,
    "nacre_cq_poll_batch",
    Histogram,
    "Completions found by one poll of a completion queue, polls without completions left out.",
    ["device"]
);
family!(
    LATENCY,
    "nacre_rdma_latency_seconds",
    Histogram,
    "Time from post to completion of signaled requests, by the clock that a reactor reads once per turn: each `read`; of `send` those that are signaled, one of several; `write` until the signaled SEND after it is done.",
    ["op", "device"]
);
family!(
    PORT,
    "nacre_rdma_port_counter",
    Counter,
    "The kernel's counters of a port, of all users: the names of IBA (`port`) and of the driver (`hardware`).",
    ["device", "port", "group", "counter"]
);

/// Events after which an accepted connection is not established, as named by `rdma_event_str(3)`.
const NOT_ESTABLISHED: [&str; 3] = [
    "RDMA_CM_EVENT_CONNECT_ERROR",
    "RDMA_CM_EVENT_UNREACHABLE",
    "RDMA_CM_EVENT_REJECTED",
];

#[derive(Debug)]
pub struct RdmaMetrics;

impl MetricsSource for RdmaMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 19] = [
            &CONNECTIONS,
            &OPERATIONS,
            &BYTES,
            &ERRORS,
            &RETRY,
            &CM_EVENTS,
            &REJECTS,
            &CONNECT_FAILURES,
            &ASYNC_EVENTS,
            &REGISTRATIONS,
            &REGISTERED,
            &CQ_ENTRIES,
            &CQ_RESERVED,
            &RECEIVES,
            &RECEIVES_FREE,
            &RECEIVE_WAITS,
            &BATCH,
            &LATENCY,
            &PORT,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for port in &of.ports {
            let number = port.port.to_string();
            for counter in &port.counters {
                let group = match counter.group {
                    CounterGroup::Port => "port",
                    CounterGroup::Hardware => "hardware",
                    CounterGroup::Netdev => continue,
                };
                let labels = [&port.device[..], &number, group, &counter.name];
                into.value(&PORT, &labels, counter.value);
            }
        }
        let plug = of.engine.rdma.plug();
        failures(plug.as_deref(), into);
        let Some(plug) = plug else { return };
        let mut connections = BTreeMap::<_, u64>::new();
        for pair in plug.queue_pairs() {
            let place = (pair.local.to_string(), pair.device);
            *connections.entry(place).or_default() += 1;
        }
        for ((listener, device), count) in connections {
            into.value(&CONNECTIONS, &[&listener, &device], count);
        }
        let reactors = of.plane.as_ref().map(|plane| &plane.reactors);
        let reactor_of = |core: usize| {
            let reactor = reactors.and_then(|all| all.get(core));
            reactor.map_or("", |reactor| reactor.name())
        };
        let mut devices = BTreeMap::<String, StatsSnapshot>::new();
        for (core, of_core) in plug.stats() {
            for (device, stats) in of_core {
                let labels = [reactor_of(core), &device[..]];
                let free = stats.receives.saturating_sub(stats.receives_waiting);
                into.value(&RECEIVES, &labels, stats.receives);
                into.value(&RECEIVES_FREE, &labels, free);
                into.value(&RECEIVE_WAITS, &labels, stats.receives_waited);
                let sum = devices.entry(device).or_default();
                *sum = *sum + stats;
            }
        }
        for (device, stats) in devices {
            for (kind, operations, bytes) in [
                ("send", stats.send_ops, stats.send_bytes),
                ("recv", stats.recv_ops, stats.recv_bytes),
                ("read", stats.read_ops, stats.read_bytes),
                ("write", stats.write_ops, stats.write_bytes),
            ] {
                into.value(&OPERATIONS, &[kind, &device], operations);
                into.value(&BYTES, &[kind, &device], bytes);
            }
            into.add(&BATCH, &[&device], batches(&stats));
            for op in Timed::ALL {
                let of = stats.latency(op);
                let sample = super::nvmf::latency(of.sum_ns, &of.buckets);
                into.add(&LATENCY, &[op.name(), &device], sample);
            }
        }
        for queue in plug.completion_queues() {
            let labels = [reactor_of(queue.core), &queue.device];
            into.value(&CQ_ENTRIES, &labels, u64::from(queue.entries));
            into.value(&CQ_RESERVED, &labels, u64::from(queue.reserved));
        }
        for domain in plug.domains() {
            let (device, there) = (&domain.attributes().name, domain.registrations());
            into.value(&REGISTRATIONS, &[device], there.registered_total);
            into.value(&REGISTERED, &[device], there.bytes);
        }
    }
}

/// Adds a series for each kind of failure from the start, even at 0. Prometheus' `increase()`
/// misses the first failure in a series that begins with it.
fn failures(plug: Option<&RdmaPlug>, into: &mut Scrape) {
    let total = plug.map(RdmaPlug::total).unwrap_or_default();
    for (status, count) in total.completion_errors() {
        into.value(&ERRORS, &[status], count);
    }
    into.value(&RETRY, &[], total.retry_exceeded());
    let control = plug.map(RdmaPlug::control_counts).unwrap_or_default();
    for (code, count) in control.all_rejects() {
        into.value(&REJECTS, &[code], count);
        into.value(&CONNECT_FAILURES, &["request", code], count);
    }
    for (event, count) in control.all_events() {
        into.value(&CM_EVENTS, &[event], count);
        if NOT_ESTABLISHED.contains(&event) {
            into.value(&CONNECT_FAILURES, &["establish", event], count);
        }
    }
    let in_time = ["establish", "timeout"];
    into.value(&CONNECT_FAILURES, &in_time, total.closed_timeout);
    into.value(&ASYNC_EVENTS, &[], control.async_events);
}

/// The histogram of completions per poll, without polls that found none. The largest class has no
/// bound: it is in `count` only.
fn batches(stats: &StatsSnapshot) -> Sample {
    let mut count = 0;
    let mut buckets = Vec::new();
    for (most, polls) in BATCH_CLASSES.iter().zip(stats.batches).skip(1) {
        count += polls;
        if *most != usize::MAX {
            buckets.push((*most as f64, count));
        }
    }
    Sample::Histogram {
        sum: stats.completions as f64,
        count,
        buckets,
    }
}

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::rdma::RejectStatus;
    use nacre_transport_rdma_verbs::WcStatus;

    use super::super::testing;
    use super::*;

    /// Goal: every series of a failure exists before the first failure, also before the first RDMA
    /// listener.
    #[test]
    fn failures_start_at_0() {
        let mut scrape = Scrape::default();
        failures(None, &mut scrape);
        let text = scrape.text();
        let series = |name: &str| {
            let is_zero = |line: &&str| line.ends_with(" 0") || line.ends_with(" 0.0");
            let zeros = text.lines().filter(is_zero);
            zeros.filter(|line| line.starts_with(name)).count()
        };
        let statuses = WcStatus::ALL.len() - 2;
        assert_eq!(series("nacre_rdma_completion_errors_total{"), statuses);
        assert_eq!(series("nacre_rdma_rejects_total{"), RejectStatus::ALL.len());
        let stages = RejectStatus::ALL.len() + NOT_ESTABLISHED.len() + 1;
        assert_eq!(series("nacre_rdma_connect_failures_total{"), stages);
        assert!(series("nacre_rdma_cm_events_total{") > NOT_ESTABLISHED.len());
        testing::check(&text);
    }

    #[test]
    fn batches_are_a_valid_histogram() {
        let mut stats = StatsSnapshot::default();
        for (class, polls) in stats.batches.iter_mut().enumerate() {
            *polls = class as u64 + 1;
        }
        let mut scrape = Scrape::default();
        scrape.add(&BATCH, &["rxe0"], batches(&stats));
        testing::check(&scrape.text());
    }
}
