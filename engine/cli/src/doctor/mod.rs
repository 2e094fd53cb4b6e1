//! `nacre doctor`: the checks of [`nacre_engine_doctor`] in a table. Only the checks of pools need
//! the daemon.

mod answer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::rdma::interface_name;
use super::reply::items;
use super::{Failure, output};
use nacre_engine::config;
use nacre_engine::config::{Personality, Settings};
use nacre_engine::daemon;
use nacre_engine::methods::pool::ListPools;
use nacre_engine::methods::state::GetState;
use nacre_engine::plane::demand::{self, Demand};
use nacre_engine::services::Engine;
use nacre_engine::services::pools::IMPORT;
use nacre_engine::services::sandbox::for_doctor;
use nacre_engine::services::{calls, certificates, cluster, concat, keyring};
use nacre_engine_doctor::pools::{Closed, Pools};
use nacre_engine_doctor::roce::{self, LLDP_WAIT};
use nacre_engine_doctor::{Marking, Report, Scope, Status, System, examine_with_facts};
use nacre_engine_rpc::NoParams;
use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_values::address::ScopedIp;
use nacre_engine_values::size;

/// How long the daemon may take to describe its pools.
const DAEMON: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 nothing failed (warnings do not count), 1 a check failed, 2 wrong usage.\n\n\
                  Example: nacre doctor --rdma --listener name:eth0 --peer 192.0.2.7"
)]
pub(crate) struct DoctorArgs {
    /// RDMA is required: its absence is a failure
    #[arg(long)]
    rdma: bool,
    /// Where it will listen: name:eth0, ip:192.0.2.1, subnet:192.0.2.0/24, mac:…, rdma:mlx5_0
    #[arg(long, value_name = "SELECTOR", value_parser = nacre_engine_values::selector::Selector::checked)]
    listener: Vec<String>,
    /// Another machine that must be reachable. If `nacre doctor --answer ADDRESS` runs there, both
    /// ends are compared
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<ScopedIp>,
    /// NVMe's port on that machine
    #[arg(long, value_name = "PORT", default_value_t = 4420)]
    port: u16,
    /// The daemon's configuration file, instead of the system's
    #[arg(short = 'c', long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// DMA memory for the daemon, instead of its configured amount
    #[arg(long, value_name = "SIZE", value_parser = size::parse_bytes)]
    memory: Option<u64>,
    /// Move data through each RDMA device, compare it, and check that the right port's counters
    /// move: to itself, or to `nacre rdma perf server` on the peer
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "64MiB", value_parser = size::parse_bytes)]
    traffic: Option<u64>,
    /// Check the network settings for RoCE of this interface, even without an RDMA device on it
    #[arg(long, value_name = "INTERFACE", value_parser = interface_name)]
    qos: Vec<String>,
    /// How long to wait for LLDP frames of switches and to measure pauses; 35s suits every switch
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    /// Write one text about the network into a file, for the team that runs the switches; waits 35s
    /// for LLDP unless --wait says otherwise
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Put this machine's name into the report
    #[arg(long, requires = "report")]
    names: bool,
    /// Answer one `nacre doctor --peer ADDRESS` of another machine, on this address of this machine
    /// (TCP and UDP port 18516): network settings and byte counts of its interface, read only
    #[arg(
        long,
        value_name = "ADDRESS",
        conflicts_with_all = ["rdma", "listener", "peer", "traffic", "report", "json"]
    )]
    answer: Option<ScopedIp>,
    /// How long to wait for the other machine
    #[arg(long = "for", value_name = "TIME", requires = "answer", default_value = "60s", value_parser = humantime::parse_duration)]
    answer_for: Duration,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: DoctorArgs) -> Result<(), Failure> {
    if let Some(address) = &args.answer {
        return answer::run(address, args.answer_for);
    }
    let settings = settings(&args)?;
    let memory = match args.memory {
        Some(memory) => memory,
        None => Demand::of_settings(&settings, args.rdma)
            .map_err(anyhow::Error::from)?
            .bytes(),
    };
    let wait = match (args.wait, &args.report) {
        (Some(wait), _) => wait,
        (None, Some(_)) => LLDP_WAIT,
        (None, None) => Duration::ZERO,
    };
    let state = daemon::state_dir(&settings, Personality::Nacre);
    let socket = daemon::socket_path(&settings, Personality::Nacre);
    let pools = if settings.rpc.enabled {
        pools(&socket)
    } else {
        Pools::default()
    };
    let scope = Scope {
        rdma: args.rdma,
        listeners: args.listener,
        peer: args.peer,
        port: args.port,
        memory,
        tls_memory: demand::tls_bytes(&settings),
        traffic: args.traffic,
        socket: settings
            .rpc
            .enabled
            .then(|| calls::expected_socket(&settings.rpc, &socket)),
        sandbox: Some(for_doctor(&settings, Vec::new())),
        concat_hosts: concat::of_settings(&settings),
        keys: keyring::declared_for_doctor(&settings),
        revocations: certificates::for_doctor(&settings),
        store_key: keyring::store_key::in_folder(state.clone()),
        volume_store: cluster::store_for_doctor(&settings, state.as_deref()),
        marking: Marking {
            tos: settings.rdma_transport().tos,
            qos: settings.qos,
        },
        pools,
        qos_interfaces: args.qos,
        wait,
        ..Scope::default()
    };
    let system = System::real();
    let (report, facts) = examine_with_facts(&system, &scope);
    if let Some(file) = &args.report {
        let text = roce::report::text(&system, &scope, &report, &facts, args.names);
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    show(&report, args.json)
}

/// Asks the daemon for its pools. Without an answer there are none to check.
fn pools(socket: &Path) -> Pools {
    let ask = || -> Result<Pools, ClientError> {
        let mut client = Client::connect(socket, DAEMON)?;
        let open = client.call_for_json::<ListPools, Engine>(&NoParams {})?;
        let state = client.call_for_json::<GetState, Engine>(&NoParams {})?;
        let objects = items(&state["objects"]).iter();
        let failed = objects.filter(|of| of["method"] == IMPORT && of["state"] == "failed");
        let closed = failed.map(|of| Closed {
            disk: output::cell(of["params"].get("disk")),
            reason: output::cell(of.get("error")),
        });
        Ok(Pools {
            open: serde_json::from_value(open).unwrap_or_default(),
            closed: closed.collect(),
        })
    };
    ask().unwrap_or_default()
}

fn settings(args: &DoctorArgs) -> Result<Settings, Failure> {
    let file = args.config.clone().or_else(config::system_file);
    let loaded = config::load(file.as_deref(), std::env::vars_os(), &[]);
    Ok(loaded.map_err(anyhow::Error::from)?.settings)
}

/// Prints the report; a failed check fails the command.
pub(crate) fn show(report: &Report, json: bool) -> Result<(), Failure> {
    if json {
        output::json(&serde_json::to_value(report).expect("a report serialises"))?;
    } else {
        for finding in &report.findings {
            let subject = finding
                .subject
                .as_ref()
                .map(|subject| format!(" [{subject}]"))
                .unwrap_or_default();
            output::line(&format!(
                "{}  {}{subject}: {}",
                finding.status, finding.id, finding.evidence
            ))?;
            // The remedy, if there is one.
            if let Some(remedy) = finding
                .remedy
                .as_ref()
                .filter(|_| finding.status >= Status::Warn)
            {
                output::line(&format!("      remedy: {remedy}"))?;
            }
        }
        output::line(&format!(
            "{} passed, {}, {} failed, {} skipped",
            report.passed,
            output::count(report.warnings as u64, "warning"),
            report.failed,
            report.skipped
        ))?;
    }
    match report.failed {
        0 => Ok(()),
        1 => Err(Failure::Failed(anyhow::anyhow!("1 check failed"))),
        count => Err(Failure::Failed(anyhow::anyhow!("{count} checks failed"))),
    }
}
