//! The options of `bdev_nvme_set_options`: they apply to controllers attached afterwards.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_nvmf::auth::Offer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::attach::{MultipathOptions, ReconnectTimes};
use crate::config::replication::Replication;
use crate::rpc::RpcError;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::services::Engine;
use crate::services::remotes::Timeouts;
use crate::values::flattened;

/// The journal key of the record with the options.
pub const KEY: &str = "nvme/options";

/// The JSON-RPC error code for an unknown option or a value of the wrong type.
pub const UNDECODABLE: i32 = INTERNAL_ERROR;

/// The range of `io_queue_requests` that is not 0.
const QUEUE_REQUESTS: RangeInclusive<u16> = 2..=1024;

/// The options in effect, merged over all calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, remote = "Self")]
#[schemars(!remote)]
pub struct Options {
    /// Action on a drive's command timeout: `abort` (default: abort the command, then recreate its
    /// queue, then reset the controller), `reset` or `none`. A connection to a remote target is
    /// always closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action_on_timeout: Option<String>,
    /// Timeout of an I/O command before its controller is reset; 0: 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_us: Option<u64>,
    /// Timeout of an admin command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_admin_us: Option<u64>,
    /// 0: no keep-alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_alive_timeout_ms: Option<u32>,
    /// Entries of each I/O queue; 0: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_queue_requests: Option<u16>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub times: ReconnectTimes,
    /// True: a connection that fell back to TCP stays on TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_auto_failback: Option<bool>,
    /// For TCP connections; DSCP << 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport_tos: Option<u8>,
    /// For a TCP connection; 0: 5000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_connect_timeout_ms: Option<u64>,
    /// How the devices of a controller divide their I/O among its paths, unless the attaching call
    /// says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multipath_opts: Option<MultipathOptions>,
    /// Other SPDK options: accepted with the value that Nacre behaves as, refused with any other.
    #[serde(flatten)]
    pub others: serde_json::Map<String, Value>,
}

flattened!(Options, times, without nulls);

/// SPDK's other options: the one accepted value, and the reason for refusing any other.
fn fixed_options() -> [(&'static str, Value, &'static str); 18] {
    let one_class = "commands are not weighed: each queue is served in turn";
    let polled = "queues are polled as the reactor turns";
    let rdma = "it is as large as its queues need";
    [
        ("arbitration_burst", json!(0), one_class),
        ("low_priority_weight", json!(0), one_class),
        ("medium_priority_weight", json!(0), one_class),
        ("high_priority_weight", json!(0), one_class),
        ("nvme_adminq_poll_period_us", json!(10000), polled),
        ("nvme_ioq_poll_period_us", json!(0), polled),
        (
            "delay_cmd_submit",
            json!(true),
            "all commands of a turn are sent at once",
        ),
        (
            "transport_retry_count",
            json!(4),
            "the network's own retries are not set here; connections are tried as ctrlr_loss_timeout_sec says",
        ),
        (
            "bdev_retry_count",
            json!(3),
            "I/O damaged by the network is sent again three times; I/O of a lost connection until fast_io_fail_timeout_sec",
        ),
        (
            "transport_ack_timeout",
            json!(0),
            "the connection manager sets it",
        ),
        (
            "generate_uuids",
            json!(false),
            "a namespace without an identity is not attached: it could not be known again",
        ),
        (
            "nvme_error_stat",
            json!(false),
            "metrics_get counts errors by kind",
        ),
        ("rdma_srq_size", json!(0), rdma),
        (
            "io_path_stat",
            json!(false),
            "bdev_nvme_get_path_iostat counts without it",
        ),
        (
            "allow_accel_sequence",
            json!(false),
            "there are no sequences",
        ),
        ("rdma_max_cq_size", json!(0), rdma),
        (
            "rdma_cm_event_timeout_ms",
            json!(5000),
            "how long an attempt by RDMA may take is [replication] cm_timeout_ms",
        ),
        ("rdma_umr_per_io", json!(false), "memory is registered once"),
    ]
}

/// A list of names, which is not empty.
fn names(value: &Value) -> Option<Vec<&str>> {
    let names: Vec<&str> = value
        .as_array()?
        .iter()
        .map(Value::as_str)
        .collect::<Option<_>>()?;
    (!names.is_empty()).then_some(names)
}

/// Checks options that have no field of their own: `rpc.py` sends them in every call, or SPDK
/// saves them in every configuration. `None` for another option; an error for a value of the wrong
/// type.
fn check_ignored_option(name: &str, value: &Value) -> Option<Result<(), &'static str>> {
    let (fits, kind) = match name {
        // A flush always reaches the target. That is safe for both values.
        "enable_flush" => (
            value.is_boolean(),
            "it is true or false; a flush always reaches the target",
        ),
        "dhchap_digests" => (
            names(value).is_some_and(|names| Offer::hashes_of(&names).is_ok()),
            "it is a list of sha256, sha384 and sha512",
        ),
        "dhchap_dhgroups" => (
            names(value).is_some_and(|names| Offer::groups_of(&names).is_ok()),
            "it is a list of null, ffdhe2048, ffdhe3072, ffdhe4096, ffdhe6144 and ffdhe8192",
        ),
        _ => return None,
    };
    Some(if fits || value.is_null() {
        Ok(())
    } else {
        Err(kind)
    })
}

/// The type that the option takes, if this value has another one.
fn wrong_kind(name: &str, value: &Value, only: &Value) -> Option<&'static str> {
    let (fits, kind) = match only {
        _ if value.is_null() => return None,
        Value::Bool(_) => (value.is_boolean(), "true or false"),
        // The only signed option of SPDK: -1 means no limit.
        Value::Number(_) if name == "bdev_retry_count" => (value.is_i64(), "a whole number"),
        Value::Number(_) => (value.is_u64(), "a whole number, not less than 0"),
        _ => (value.is_object(), "an object"),
    };
    (!fits).then_some(kind)
}

impl Options {
    /// The options in effect now.
    pub fn of(engine: &Engine) -> Self {
        let stored = engine.journal.find(KEY).map(|entry| entry.record.params);
        stored
            .and_then(|params| serde_json::from_value(params).ok())
            .unwrap_or_default()
    }

    /// Hash functions and groups that this host offers to targets.
    pub fn offer(&self) -> Offer {
        let mut offer = Offer::default();
        let of = |name: &str| self.others.get(name).and_then(names);
        if let Some(hashes) = of("dhchap_digests").and_then(|n| Offer::hashes_of(&n).ok()) {
            offer.hashes = hashes;
        }
        if let Some(groups) = of("dhchap_dhgroups").and_then(|n| Offer::groups_of(&n).ok()) {
            offer.groups = groups;
        }
        offer
    }

    /// Entries of each I/O queue, if set.
    pub fn queue_entries(&self) -> Option<u16> {
        self.io_queue_requests.filter(|entries| *entries > 0)
    }

    /// Refuses unknown options, and values that Nacre does not support.
    pub fn check(&self, replication: &Replication) -> Result<(), RpcError> {
        let refuse = |field: &str, why: String| RpcError::errno(Errno::EINVAL, why).field(field);
        for (name, value) in &self.others {
            if let Some(kind) = check_ignored_option(name, value) {
                let wrong = |kind: &str| RpcError {
                    code: UNDECODABLE,
                    ..RpcError::invalid_params(kind).field(name.clone())
                };
                kind.map_err(wrong)?;
                continue;
            }
            let all = fixed_options();
            let undecodable = |cause: String| {
                let refused = RpcError::invalid_params(cause).field(name.clone());
                Err(RpcError {
                    code: UNDECODABLE,
                    ..refused
                })
            };
            let Some((_, only, why)) = all.iter().find(|(known, ..)| known == name) else {
                return undecodable(format!("there is no option \"{name}\""));
            };
            if let Some(kind) = wrong_kind(name, value, only) {
                return undecodable(format!("it is {kind}"));
            }
            // 0 selects SPDK's default, which equals ours.
            let default = name == "rdma_cm_event_timeout_ms" && *value == json!(0);
            if !value.is_null() && value != only && !default {
                let why = match only {
                    Value::Null => (*why).to_owned(),
                    only => format!("it is {only} here: {why}"),
                };
                return Err(RpcError::errno(Errno::ENOTSUP, why).field(name.clone()));
            }
        }
        let action = self.action_on_timeout.as_deref();
        let timed = self.timeout_us.is_some_and(|us| us > 0)
            || self.timeout_admin_us.is_some_and(|us| us > 0);
        match action {
            None | Some("reset" | "abort") => {}
            Some("none") if !timed => {}
            Some("none") => {
                let why = "a command that takes too long ends with its connection, which a timeout is set for";
                return Err(RpcError::errno(Errno::ENOTSUP, why).field("action_on_timeout"));
            }
            Some(other) => {
                let why = format!("\"{other}\" is not one of none, reset and abort");
                return Err(RpcError::invalid_params(why).field("action_on_timeout"));
            }
        }
        for (field, us) in [
            ("timeout_us", self.timeout_us),
            ("timeout_admin_us", self.timeout_admin_us),
        ] {
            if us.is_some_and(|us| us > 0 && us < 1_000_000) {
                return Err(refuse(
                    field,
                    "less than a second would end commands that are only slow".to_owned(),
                ));
            }
        }
        let least = *Replication::KEEP_ALIVE_MS.start();
        if let Some(ms) = self
            .keep_alive_timeout_ms
            .filter(|ms| *ms > 0 && *ms < least)
        {
            return Err(refuse(
                "keep_alive_timeout_ms",
                format!("{ms} is neither 0 nor {least} or more"),
            ));
        }
        if let Some(n) = self
            .io_queue_requests
            .filter(|n| *n != 0 && !QUEUE_REQUESTS.contains(n))
        {
            return Err(refuse(
                "io_queue_requests",
                format!("{n} is neither 0 nor in {QUEUE_REQUESTS:?}"),
            ));
        }
        if let Some(options) = &self.multipath_opts {
            options.policy()?;
        }
        timeouts(self.times, replication).map(drop)
    }
}

/// Converts SPDK's three times by SPDK's rules.
pub fn timeouts(times: ReconnectTimes, replication: &Replication) -> Result<Timeouts, RpcError> {
    let (loss, delay) = times.check()?;
    Ok(Timeouts {
        loss: loss.map(Duration::from_secs),
        reconnect: delay.map(Duration::from_secs),
        fast_fail: match times.fast_io_fail_timeout_sec {
            None => replication.fast_fail(),
            Some(0) => None,
            Some(seconds) => Some(Duration::from_secs(seconds)),
        },
    })
}
