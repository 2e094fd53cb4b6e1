//! `nacre rdma size`: computes the queue pairs, completion queue entries and memory for a number of
//! hosts.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;
use nacre_nvmf::transport::{MAX_IN_CAPSULE_DATA, QUEUE_DEPTHS};
use nacre_transport_rdma::{MAX_SRQ_SIZE, QueueNeed, RdmaConfig, bytes_per_core};
use nacre_transport_rdma_verbs::DeviceAttributes;
use serde_json::json;

use crate::{Failure, output};
use nacre_engine::config::Personality;
use nacre_engine::config::{self, Settings};
use nacre_engine::plane::PlaneError;
use nacre_engine::plane::demand::IobufOptions;
use nacre_engine::plane::demand::data_path;
use nacre_engine_values::size;

const DEPTHS: RangeInclusive<i64> = *QUEUE_DEPTHS.start() as i64..=*QUEUE_DEPTHS.end() as i64;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 it fits, or nothing was compared, 1 a need exceeds its limit, 2 \
        wrong usage.\n\nExample: nacre rdma size --hosts 32 --queues 8 --depth 128 --device \
        mlx5_0"
)]
pub(crate) struct SizeArgs {
    /// Hosts connected at the same time
    #[arg(long)]
    pub hosts: NonZeroU32,
    /// I/O queues of each host
    #[arg(long)]
    pub queues: NonZeroU32,
    /// Entries of each I/O queue; unless given, as configured
    #[arg(long, value_parser = clap::value_parser!(u16).range(DEPTHS))]
    pub depth: Option<u16>,
    /// Reactors that share the connections; unless given, as configured
    #[arg(long)]
    pub reactors: Option<NonZeroU32>,
    /// In-capsule data size: the largest of all listeners, which share their receives; unless
    /// given, as configured
    #[arg(long, value_name = "SIZE", value_parser = size::parse_bytes)]
    pub in_capsule: Option<u64>,
    /// Receives of the shared receive queue of each reactor, 0: each queue has its own; unless
    /// given, as configured
    #[arg(long, value_name = "ENTRIES", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_SRQ_SIZE)))]
    pub srq: Option<u32>,
    /// The daemon's configuration file, instead of the system's
    #[arg(short = 'c', long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Compare with the limits of this device
    #[arg(long)]
    pub device: Option<String>,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    pub json: bool,
}

/// A device's limits, as verbs reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    pub max_srq_wr: u32,
}

/// Entries of the admin queue: Linux uses 32 (NVMF_AQ_DEPTH).
const ADMIN_DEPTH: u32 = 32;

/// The daemon's settings.
#[derive(Debug, Clone)]
pub(crate) struct Configured {
    pub transport: RdmaConfig,
    pub reactors: NonZeroU32,
}

impl Configured {
    /// The configuration that `nacre serve` would find, overridden by the arguments.
    pub(crate) fn of(args: &SizeArgs, settings: &Settings) -> Result<Self, PlaneError> {
        let data_path = data_path(settings, &IobufOptions::default(), Personality::Nacre)?;
        let reactors = u32::try_from(data_path.cores.len()).unwrap_or(1);
        let mut transport = settings.rdma_transport();
        if let Some(bytes) = args.in_capsule {
            transport.in_capsule_data_size = bytes.min(MAX_IN_CAPSULE_DATA.into()) as u32;
            transport.listener_in_capsule_data_size = 0;
        }
        transport.max_queue_depth = args.depth.unwrap_or(transport.max_queue_depth);
        transport.srq_size = args.srq.unwrap_or(transport.srq_size);
        Ok(Self {
            transport,
            reactors: args
                .reactors
                .or_else(|| NonZeroU32::new(reactors))
                .unwrap_or(NonZeroU32::MIN),
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Need {
    pub queue_pairs: u64,
    /// Work requests of one I/O queue pair: sends, and receives unless these are shared.
    pub send_wrs: u64,
    pub recv_wrs: u64,
    /// Completions of each reactor's completion queue. The transport refuses connections that
    /// exceed it.
    pub cqes: u64,
    /// Memory for receives and responses, over all reactors.
    pub memory_bytes: u64,
    /// The receives are those of a shared queue.
    shared: bool,
    /// `[rdma] max_qpairs`.
    max_qpairs: u64,
}

/// One need, its limit, and the remedy if it is exceeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CheckedNeed {
    pub name: &'static str,
    pub need: u64,
    pub limit: Option<u64>,
    pub remedy: &'static str,
}

impl CheckedNeed {
    pub(crate) fn fits(&self) -> bool {
        self.limit.is_none_or(|limit| self.need <= limit)
    }
}

impl Need {
    pub(crate) fn of(args: &SizeArgs, configured: &Configured) -> Self {
        let number = |n: NonZeroU32| u64::from(n.get());
        let (hosts, queues) = (number(args.hosts), number(args.queues));
        let reactors = number(configured.reactors);
        let io_pairs = hosts.saturating_mul(queues);
        let queue_pairs = io_pairs.saturating_add(hosts);
        let max_qpairs = configured.transport.max_qpairs;
        let connections = queue_pairs.min(u32::MAX.into()) as u32;
        let config = RdmaConfig {
            max_qpairs: max_qpairs.max(connections),
            ..configured.transport.clone()
        };
        let depth = config.max_queue_depth;
        let needs = |depth| QueueNeed::unlimited(&config, depth);
        let (io, admin) = (needs(depth.into()), needs(ADMIN_DEPTH));
        // A connection goes as a whole to the reactor with the fewest.
        let on_each = |pairs: u64, need: QueueNeed| {
            let pairs = pairs.div_ceil(reactors);
            pairs.saturating_mul(need.completions().into())
        };
        let shared = config.srq_size > 0;
        Self {
            queue_pairs,
            // These suffice to accept a queue; if a device has more, the queue gets them.
            send_wrs: 2 * u64::from(depth),
            recv_wrs: if shared { config.srq_size } else { io.receives }.into(),
            cqes: on_each(io_pairs, io)
                .saturating_add(on_each(hosts, admin))
                .saturating_add(config.srq_size.into()),
            memory_bytes: bytes_per_core(&config).saturating_mul(reactors),
            shared,
            max_qpairs: max_qpairs as u64,
        }
    }

    /// Every need that the configuration or a device limits.
    pub(crate) fn against(&self, limits: Option<&Limits>) -> Vec<CheckedNeed> {
        let line = |name, need, limit: Option<u64>, remedy| CheckedNeed {
            name,
            need,
            limit,
            remedy,
        };
        let of_device = |name, need, limit: fn(&Limits) -> u32, remedy| {
            let limit = limits.map(|limits| u64::from(limit(limits)));
            line(name, need, limit, remedy)
        };
        const FEWER: &str = "fewer hosts or queues (`nvme connect -i`)";
        vec![
            of_device("queue pairs", self.queue_pairs, |l| l.max_qp, FEWER),
            line(
                "queue pairs as configured",
                self.queue_pairs,
                Some(self.max_qpairs),
                "a larger [rdma] max_qpairs",
            ),
            of_device(
                "sends per queue pair",
                self.send_wrs,
                |l| l.max_qp_wr,
                "a smaller [nvmf] max_queue_depth",
            ),
            if self.shared {
                of_device(
                    "receives per shared queue",
                    self.recv_wrs,
                    |l| l.max_srq_wr,
                    "a smaller [rdma] srq_size",
                )
            } else {
                of_device(
                    "receives per queue pair",
                    self.recv_wrs,
                    |l| l.max_qp_wr,
                    "a smaller [nvmf] max_queue_depth",
                )
            },
            of_device(
                "completion entries per reactor",
                self.cqes,
                |l| l.max_cqe,
                "more reactors ([reactor] cores), fewer queues, or a smaller [nvmf] max_queue_depth",
            ),
        ]
    }
}

/// Gets the limits of the device from `limits`, if one was named.
pub(crate) fn run(
    args: &SizeArgs,
    limits: impl FnOnce() -> Result<Vec<DeviceAttributes>, String>,
) -> Result<(), Failure> {
    let file = args.config.clone().or_else(config::system_file);
    let loaded = config::load(file.as_deref(), std::env::vars_os(), &[]);
    let settings = loaded.map_err(anyhow::Error::from)?.settings;
    let configured = Configured::of(args, &settings).map_err(anyhow::Error::from)?;
    let Some(name) = &args.device else {
        return show(args, &configured, None);
    };
    let all = limits().map_err(|why| anyhow::anyhow!("the limits of {name} are unknown: {why}"))?;
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
    show(args, &configured, Some((name, Limits::from(found))))
}

/// Prints the needs beside the limits of the device, if known. Fails if a need exceeds its limit.
fn show(
    args: &SizeArgs,
    configured: &Configured,
    device: Option<(&str, Limits)>,
) -> Result<(), Failure> {
    let need = Need::of(args, configured);
    let lines = need.against(device.as_ref().map(|(_, limits)| limits));
    let exceeded: Vec<&CheckedNeed> = lines.iter().filter(|line| !line.fits()).collect();
    if args.json {
        output::json(&json!({
            "device": device.as_ref().map(|(name, _)| name),
            "queue_pairs": need.queue_pairs,
            "send_wrs": need.send_wrs,
            "recv_wrs": need.recv_wrs,
            "cqes": need.cqes,
            "memory_bytes": need.memory_bytes,
            "reactors": configured.reactors,
            "exceeded": exceeded.iter().map(|line| line.name).collect::<Vec<_>>(),
        }))?;
    } else {
        let rows = lines.iter().map(|line| {
            let fits = match (line.limit, line.fits()) {
                (None, _) => "",
                (Some(_), true) => "yes",
                (Some(_), false) => "no",
            };
            let limit = line.limit.map_or(String::new(), |limit| limit.to_string());
            vec![
                line.name.to_owned(),
                line.need.to_string(),
                limit,
                fits.into(),
            ]
        });
        let memory = vec![
            "memory for receives and responses".to_owned(),
            output::bytes(need.memory_bytes),
            String::new(),
            String::new(),
        ];
        output::table(&["what", "need", "limit", "fits"], rows.chain([memory]))?;
        let transport = &configured.transport;
        output::line(&format!(
            "with {} reactors, {} commands per queue, {} receives shared by each reactor",
            configured.reactors, transport.max_queue_depth, transport.srq_size
        ))?;
        if device.is_none() {
            output::line("`--device NAME` compares this with the limits of a device")?;
        }
    }
    if exceeded.is_empty() {
        return Ok(());
    }
    let each = exceeded.iter().map(|line| {
        let limit = line.limit.unwrap_or_default();
        format!(
            "{}: {} of {limit}; use {}",
            line.name, line.need, line.remedy
        )
    });
    let text = each.collect::<Vec<_>>().join("; ");
    Err(Failure::Failed(anyhow::anyhow!("it does not fit: {text}")))
}
