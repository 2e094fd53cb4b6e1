//! Metrics of the NVMe-oF target: subsystems, controllers, and the load of each host.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use nacre_nvmf::subsystems::LATENCY_BUCKETS;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Sample, Scrape};

family!(
    NAMESPACES,
    "nacre_nvmf_namespaces",
    Gauge,
    "Namespaces.",
    ["subsystem"]
);
family!(
    NAMESPACE,
    "nacre_nvmf_namespace",
    Gauge,
    "Always 1: a namespace and its block device, whose `nacre_bdev_…` count the I/O of hosts.",
    ["subsystem", "nsid", "bdev"]
);
family!(
    LISTENERS,
    "nacre_nvmf_listener",
    Gauge,
    "Always 1: the subsystem can be reached here.",
    ["subsystem", "transport", "address"]
);
family!(
    CONTROLLERS,
    "nacre_nvmf_controllers",
    Gauge,
    "Controllers, one for each connected host and port.",
    ["subsystem"]
);
family!(
    QUEUES,
    "nacre_nvmf_queue_pairs",
    Gauge,
    "Queue pairs, that of administration included.",
    ["subsystem", "host", "transport"]
);
family!(
    OPERATIONS,
    "nacre_nvmf_operations",
    Counter,
    "Commands of a host, from its first connection until the last one of its connections ends.",
    ["subsystem", "host", "transport", "op"]
);
family!(
    BYTES,
    "nacre_nvmf_bytes",
    Counter,
    "Bytes moved by a host, from its first connection until the last one of its connections ends.",
    ["subsystem", "host", "transport", "op"]
);
family!(
    ERRORS,
    "nacre_nvmf_errors",
    Counter,
    "Commands of a host answered with an error, from its first connection until the last one of its connections ends.",
    ["subsystem", "host", "transport", "op"]
);
family!(
    LATENCY,
    "nacre_nvmf_latency_seconds",
    Histogram,
    "Time from a command's arrival to its answer, by host, from its first connection until the last one of its connections ends.",
    ["subsystem", "host", "transport", "op"]
);
family!(
    INFLIGHT,
    "nacre_qpair_inflight",
    Gauge,
    "Commands in flight on a host's queue pairs, at most 100 ms old.",
    ["subsystem", "host", "transport"]
);
family!(
    ENTRIES,
    "nacre_qpair_entries",
    Gauge,
    "Entries of a host's queue pairs.",
    ["subsystem", "host", "transport"]
);
family!(
    CONFLICTS,
    "nacre_nvmf_reservation_conflicts",
    Counter,
    "Commands refused because of a reservation of the namespace.",
    ["subsystem", "nsid"]
);
family!(
    REGISTRANTS,
    "nacre_nvmf_reservation_registrants",
    Gauge,
    "Hosts registered with the namespace; absent where another node may have changed them.",
    ["subsystem", "nsid"]
);
family!(
    DISCOVERY,
    "nacre_nvmf_discovery_generation",
    Gauge,
    "Generation counter of the discovery log.",
    []
);
family!(
    AUTHENTICATIONS,
    "nacre_nvmf_authentications",
    Counter,
    "Authentications of hosts, one for each queue pair, by result: `succeeded` or `failed`.",
    ["result"]
);
family!(
    AUTHENTICATION_FAILURES,
    "nacre_nvmf_authentication_failures",
    Counter,
    "Failed authentications of hosts, by reason: `wrong_key`, `no_key` (of the host or of the controller), `expired_key`, `unreadable_key`, `unusable` (no common hash function or group), `concatenation` (asked for where it does not work, or not asked for where it must be), `malformed`, `given_up` (by the host), `late` or `overloaded`.",
    ["reason"]
);
family!(
    AUTHENTICATIONS_WAITING,
    "nacre_nvmf_authentication_jobs_waiting",
    Gauge,
    "Computations that wait for the helper thread: of authentications of hosts, and of authentications and TLS handshakes of this daemon as the host. At most 4096.",
    []
);
family!(
    UNAUTHENTICATED,
    "nacre_nvmf_unauthenticated_queue_pairs",
    Gauge,
    "Queue pairs whose hosts have to authenticate themselves and have not yet.",
    []
);
family!(
    HANDSHAKES,
    "nacre_tls_handshakes",
    Counter,
    "TLS handshakes of hosts, one for each connection, by result: `succeeded`, `failed` (also connections in clear where TLS is required) or `limited` (not begun: too many of the address wait, or too many failed).",
    ["result"]
);
family!(
    HANDSHAKE_FAILURES,
    "nacre_tls_handshake_failures",
    Counter,
    "Failed TLS handshakes of hosts, by reason: `unknown` (no PSK of the identity), `binder` (another PSK), `unreadable` (a PSK that cannot be read, or has expired), `refused` (no common version, mode or cipher suite, or a malformed identity), `alert` (from the host), `malformed`, `late`, `clear` (a connection in clear where TLS is required), `left` (closed by the host) or `broken` (the socket failed).",
    ["reason"]
);
family!(
    TLS_CONNECTIONS,
    "nacre_tls_connections",
    Gauge,
    "Connections of hosts over TLS.",
    []
);
family!(
    KEY_UPDATES,
    "nacre_tls_key_updates",
    Counter,
    "KeyUpdates of TLS on connections of hosts: `sent` and `received`.",
    ["direction"]
);
family!(
    KEYS_PAST_LIMIT,
    "nacre_tls_keys_past_limit",
    Counter,
    "Keys of TLS connections with which more records were sealed than AES-GCM allows (2^24.5), because the host takes no KeyUpdate.",
    []
);
family!(
    ACCEPTED,
    "nacre_transport_accepted",
    Counter,
    "Connections accepted.",
    ["transport"]
);
family!(
    CLOSED,
    "nacre_transport_closed",
    Counter,
    "Connections that ended, by cause.",
    ["transport", "cause"]
);
family!(
    REFUSED,
    "nacre_transport_refused",
    Counter,
    "Connections refused before any byte of them was read, by cause.",
    ["transport", "cause"]
);
family!(
    TRANSPORT_BYTES,
    "nacre_transport_bytes",
    Counter,
    "Bytes moved on all connections, headers included.",
    ["transport", "direction"]
);
family!(
    WORK,
    "nacre_transport_work",
    Counter,
    "Work of TCP: `receive` and `send` are system calls (`receive_empty` found nothing, `send_partial` was not taken in full), `epoll` asks which sockets are ready, `pdu_received` and `pdu_sent` are PDUs; `buffer_wait` counts turns in which a connection was not read for want of a buffer.",
    ["transport", "what"]
);

#[derive(Debug)]
pub struct NvmfMetrics;

/// The number of a host's queue pairs, and their fill level.
#[derive(Default)]
struct Filled {
    queues: u64,
    entries: u64,
    inflight: u64,
}

impl MetricsSource for NvmfMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 28] = [
            &NAMESPACES,
            &NAMESPACE,
            &LISTENERS,
            &CONTROLLERS,
            &QUEUES,
            &INFLIGHT,
            &ENTRIES,
            &OPERATIONS,
            &BYTES,
            &ERRORS,
            &LATENCY,
            &CONFLICTS,
            &REGISTRANTS,
            &DISCOVERY,
            &AUTHENTICATIONS,
            &AUTHENTICATION_FAILURES,
            &AUTHENTICATIONS_WAITING,
            &UNAUTHENTICATED,
            &HANDSHAKES,
            &HANDSHAKE_FAILURES,
            &TLS_CONNECTIONS,
            &KEY_UPDATES,
            &KEYS_PAST_LIMIT,
            &ACCEPTED,
            &CLOSED,
            &REFUSED,
            &TRANSPORT_BYTES,
            &WORK,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let Some(plane) = &of.plane else { return };
        into.value(&DISCOVERY, &[], plane.target.discovery_generation());
        let (succeeded, failed) = plane.target.authentication.counts();
        for (result, count) in [("succeeded", succeeded), ("failed", failed)] {
            into.value(&AUTHENTICATIONS, &[result], count);
        }
        for (reason, count) in plane.target.authentication.failures() {
            into.value(&AUTHENTICATION_FAILURES, &[reason.name()], count);
        }
        let waiting = plane.target.authentication.helper().waiting();
        into.value(&AUTHENTICATIONS_WAITING, &[], waiting);
        let unauthenticated = plane.target.unauthenticated_queues();
        into.value(&UNAUTHENTICATED, &[], unauthenticated);
        for plug in plane.target.plugs() {
            let (kind, counts) = (plug.kind().to_string(), plug.counts());
            into.value(&ACCEPTED, &[&kind], counts.accepted);
            for (cause, count) in counts.closed {
                into.value(&CLOSED, &[&kind, cause], count);
            }
            for (cause, count) in counts.refused {
                into.value(&REFUSED, &[&kind, cause], count);
            }
            into.value(
                &TRANSPORT_BYTES,
                &[&kind, "received"],
                counts.bytes_received,
            );
            into.value(&TRANSPORT_BYTES, &[&kind, "sent"], counts.bytes_sent);
            if let Some(tls) = counts.tls {
                for (result, count) in tls.handshakes {
                    into.value(&HANDSHAKES, &[result], count);
                }
                for (reason, count) in tls.failures {
                    into.value(&HANDSHAKE_FAILURES, &[reason], count);
                }
                into.value(&TLS_CONNECTIONS, &[], tls.connections);
                into.value(&KEY_UPDATES, &["sent"], tls.key_updates_sent);
                into.value(&KEY_UPDATES, &["received"], tls.key_updates_received);
                into.value(&KEYS_PAST_LIMIT, &[], tls.keys_past_limit);
            }
            for (what, count) in counts.work {
                into.value(&WORK, &[&kind, what], count);
            }
        }
        let mut queues: BTreeMap<(String, String, String), Filled> = BTreeMap::new();
        for subsystem in plane.target.subsystems() {
            let nqn = subsystem.nqn().to_string();
            let controllers = subsystem.controllers();
            let namespaces = subsystem.namespaces();
            into.value(&NAMESPACES, &[&nqn], namespaces.len());
            for entry in &namespaces {
                let labels = [nqn.as_str(), &entry.namespace.nsid.to_string()];
                into.value(&NAMESPACE, &[labels[0], labels[1], &entry.bdev_name], 1.0);
                let reservation = &entry.namespace.reservation;
                into.value(&CONFLICTS, &labels, reservation.conflicts());
                if let Some(state) = reservation.state() {
                    into.value(&REGISTRANTS, &labels, state.registrants.len());
                }
            }
            into.value(&CONTROLLERS, &[&nqn], controllers.len());
            for listener in subsystem.listeners() {
                let labels = [
                    nqn.as_str(),
                    &listener.transport.to_string(),
                    &listener.address.to_string(),
                ];
                into.value(&LISTENERS, &labels, 1.0);
            }
            for controller in &controllers {
                let host = controller.hostnqn.to_string();
                for queue in controller.queues() {
                    let key = (nqn.clone(), host.clone(), queue.transport.to_string());
                    let filled = queues.entry(key).or_default();
                    filled.queues += 1;
                    filled.entries += u64::from(queue.entries);
                    filled.inflight += queue.stats.inflight.load(Relaxed);
                }
            }
            for of_host in subsystem.host_sums() {
                let (host, transport) = (of_host.host.as_str(), of_host.transport.to_string());
                for (op, sum) in ["read", "write", "other"].iter().zip(of_host.sums) {
                    let labels = [nqn.as_str(), host, &transport, op];
                    into.value(&OPERATIONS, &labels, sum.operations);
                    into.value(&BYTES, &labels, sum.bytes);
                    into.value(&ERRORS, &labels, sum.errors);
                    into.add(&LATENCY, &labels, latency(sum.latency_ns, &sum.latency));
                }
            }
        }
        for ((nqn, host, transport), filled) in queues {
            let labels = [nqn.as_str(), &host, &transport];
            into.value(&QUEUES, &labels, filled.queues);
            into.value(&INFLIGHT, &labels, filled.inflight);
            into.value(&ENTRIES, &labels, filled.entries);
        }
    }
}

/// Bucket `i` counts latencies below `2^i` microseconds; the last one also counts all longer ones.
pub(super) fn latency(sum_ns: u64, counts: &[u64; LATENCY_BUCKETS]) -> Sample {
    let mut below = 0;
    let finite = counts[..LATENCY_BUCKETS - 1].iter().enumerate();
    let buckets = finite.map(|(at, count)| {
        below += count;
        ((1u64 << at) as f64 / 1e6, below)
    });
    let buckets = buckets.collect();
    Sample::Histogram {
        sum: sum_ns as f64 / 1e9,
        count: counts.iter().sum(),
        buckets,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::methods::testing::test_daemon;

    /// Goal: the queue of the authentication helper, and every reason of failures, are visible
    /// before the first failure. Method: the helper's thread starts with the first key, so that
    /// jobs wait.
    #[test]
    fn the_queue_of_the_helper_and_the_reasons() {
        let daemon = test_daemon();
        let scraped = || {
            let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
            metrics.as_str().expect("text").to_owned()
        };
        let waiting = |count| format!("nacre_nvmf_authentication_jobs_waiting{{}} {count}.0\n");
        let metrics = scraped();
        assert!(metrics.contains(&waiting(0)), "{metrics}");
        let family = "nacre_nvmf_authentication_failures_total{reason=";
        let lines = metrics.lines().filter(|line| line.starts_with(family));
        assert_eq!(lines.count(), 10, "{metrics}");
        let plane = daemon.engine.plane().expect("it runs");
        let helper = plane.target.authentication.helper();
        for _ in 0..3 {
            helper.submit("host", || {}).expect("room");
        }
        let metrics = scraped();
        assert!(metrics.contains(&waiting(3)), "{metrics}");
    }
}
