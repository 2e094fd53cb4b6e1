//! `nacre rdma size`: what a number of hosts will need of queue pairs, completion entries and memory, before
//! they come.

use std::num::NonZeroU32;

use clap::Args;
use nacre_rdma::{MAX_SRQ_SIZE, QueueNeed, RdmaConfig};
use nacre_rdma_verbs::DeviceAttributes;
use serde_json::{Value, json};

use crate::cli::{Failure, output, size};

#[derive(Debug, Clone, Args)]
#[command(after_help = "Example: nacre rdma size --hosts 32 --queues 8 --depth 128")]
pub struct SizeArgs {
    /// Hosts connected at the same time
    #[arg(long)]
    pub hosts: NonZeroU32,
    /// I/O queues of each host
    #[arg(long)]
    pub queues: NonZeroU32,
    /// Commands of each I/O queue
    #[arg(long, default_value = "128", value_parser = clap::value_parser!(u16).range(2..=4096))]
    pub depth: u16,
    /// Reactors that share the connections
    #[arg(long, default_value = "1")]
    pub reactors: NonZeroU32,
    /// Data that a command capsule may carry: the most of all listeners, which share their receives
    #[arg(long, value_name = "SIZE", default_value = "4KiB", value_parser = size::parse_bytes)]
    pub in_capsule: u64,
    /// Receives of the shared receive queue of each reactor; without one each queue has its own
    #[arg(long, value_name = "ENTRIES", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SRQ_SIZE)))]
    pub srq: Option<u32>,
    /// Compare with the limits of this device
    #[arg(long)]
    pub device: Option<String>,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    pub json: bool,
}

/// What a device can hold, as verbs say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    pub max_srq_wr: u32,
}

/// Of the admin queue: Linux asks for 32 commands on it (NVMF_AQ_DEPTH).
const ADMIN_DEPTH: u32 = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    pub queue_pairs: u64,
    /// Of one I/O queue pair.
    pub send_wrs: u64,
    pub recv_wrs: u64,
    /// Of each reactor's completion queue: the transport accepts nobody for whom it has none.
    pub cqes: u64,
    /// Memory for receives and responses, over all reactors.
    pub memory_bytes: u64,
}

impl Need {
    pub fn of(args: &SizeArgs) -> Need {
        let number = |n: NonZeroU32| u64::from(n.get());
        let (hosts, queues) = (number(args.hosts), number(args.queues));
        let reactors = number(args.reactors);
        let io_pairs = hosts.saturating_mul(queues);
        let queue_pairs = io_pairs.saturating_add(hosts);
        let usual = RdmaConfig::default();
        let connections = queue_pairs.min(u32::MAX.into()) as usize;
        let config = RdmaConfig {
            in_capsule_data_size: args.in_capsule.min(1 << 20) as u32,
            max_queue_depth: args.depth,
            srq_size: args.srq.unwrap_or(0),
            max_connections: usual.max_connections.max(connections),
            ..usual
        };
        let needs = |depth| QueueNeed::unlimited(&config, depth);
        let (io, admin) = (needs(args.depth.into()), needs(ADMIN_DEPTH));
        // Connections go to the reactor that has least, whole.
        let on_each = |pairs: u64, need: QueueNeed| {
            let pairs = pairs.div_ceil(reactors);
            pairs.saturating_mul(need.completions().into())
        };
        Need {
            queue_pairs,
            // With these a queue is accepted; where a device has more, it gets them.
            send_wrs: 2 * u64::from(args.depth),
            recv_wrs: args.srq.unwrap_or(io.receives).into(),
            cqes: on_each(io_pairs, io)
                .saturating_add(on_each(hosts, admin))
                .saturating_add(config.srq_size.into()),
            memory_bytes: config.bytes_per_core().saturating_mul(reactors),
        }
    }

    /// Name, need and limit of everything a device bounds.
    pub fn against(
        &self,
        limits: Option<&Limits>,
        srq: bool,
    ) -> Vec<(&'static str, u64, Option<u64>)> {
        let limit = |of: fn(&Limits) -> u32| limits.map(|limits| u64::from(of(limits)));
        let recv = match srq {
            true => ("receives per shared queue", limit(|l| l.max_srq_wr)),
            false => ("receives per queue pair", limit(|l| l.max_qp_wr)),
        };
        vec![
            ("queue pairs", self.queue_pairs, limit(|l| l.max_qp)),
            (
                "sends per queue pair",
                self.send_wrs,
                limit(|l| l.max_qp_wr),
            ),
            (recv.0, self.recv_wrs, recv.1),
            (
                "completion entries per reactor",
                self.cqes,
                limit(|l| l.max_cqe),
            ),
        ]
    }
}

/// Asks `limits` for the device's, if one was named.
pub fn run(
    args: &SizeArgs,
    limits: impl FnOnce() -> Result<Vec<DeviceAttributes>, String>,
) -> Result<(), Failure> {
    let Some(name) = &args.device else {
        return show(args, None);
    };
    let all =
        limits().map_err(|why| anyhow::anyhow!("the limits of {name} are not known: {why}"))?;
    let found = all.iter().find(|of| of.name == *name).ok_or_else(|| {
        let have: Vec<&str> = all.iter().map(|of| &of.name[..]).collect();
        anyhow::anyhow!(
            "libibverbs shows no device \"{name}\"; have: {}",
            if have.is_empty() {
                "none".into()
            } else {
                have.join(", ")
            }
        )
    })?;
    show(args, Some((name, Limits::from(found))))
}

/// With the limits of a device, if they are known.
fn show(args: &SizeArgs, device: Option<(&str, Limits)>) -> Result<(), Failure> {
    let need = Need::of(args);
    let limits = device.as_ref().map(|(_, limits)| limits);
    let lines = need.against(limits, args.srq.is_some());
    if args.json {
        return output::json(&json!({
            "device": device.as_ref().map(|(name, _)| name),
            "queue_pairs": need.queue_pairs,
            "send_wrs": need.send_wrs,
            "recv_wrs": need.recv_wrs,
            "cqes": need.cqes,
            "memory_bytes": need.memory_bytes,
            "exceeded": exceeded(&lines),
        }));
    }
    let rows = lines.iter().map(|(name, need, limit)| {
        let (limit, fits) = match limit {
            Some(limit) => (limit.to_string(), if need <= limit { "yes" } else { "no" }),
            None => (String::new(), ""),
        };
        vec![(*name).to_owned(), need.to_string(), limit, fits.to_owned()]
    });
    let memory = vec![
        "memory for receives and responses".to_owned(),
        output::bytes(need.memory_bytes),
        String::new(),
        String::new(),
    ];
    output::table(&["what", "need", "limit", "fits"], rows.chain([memory]))?;
    if device.is_none() {
        output::line("`--device NAME` compares this with what a device can hold")?;
    }
    Ok(())
}

fn exceeded(lines: &[(&'static str, u64, Option<u64>)]) -> Value {
    lines
        .iter()
        .filter(|(_, need, limit)| limit.is_some_and(|limit| *need > limit))
        .map(|(name, _, _)| *name)
        .collect()
}
