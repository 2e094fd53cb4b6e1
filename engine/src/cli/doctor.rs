//! `nacre doctor`: the checks of [`crate::doctor`] in a table. Does not call the daemon.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::{Failure, output};
use crate::config;
use crate::config::Personality;
use crate::doctor::{Report, Scope, Status, System, examine};
use crate::plane::demand::IobufOptions;
use crate::plane::demand::{self, Demand};
use crate::values::size;

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 nothing failed (warnings do not count), 1 a check failed, 2 wrong usage.\n\n\
                  Example: nacre doctor --rdma --listener name:eth0 --peer 192.0.2.7"
)]
pub struct DoctorArgs {
    /// RDMA is required: its absence is a failure
    #[arg(long)]
    rdma: bool,
    /// Where it will listen: name:eth0, ip:192.0.2.1, subnet:192.0.2.0/24, mac:…, rdma:mlx5_0
    #[arg(long, value_name = "SELECTOR", value_parser = crate::values::selector::Selector::checked)]
    listener: Vec<String>,
    /// Another machine that must be reachable
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<IpAddr>,
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
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub fn run(args: DoctorArgs) -> Result<(), Failure> {
    let memory = match args.memory {
        Some(memory) => memory,
        None => memory(&args)?,
    };
    let scope = Scope {
        rdma: args.rdma,
        listeners: args.listener,
        peer: args.peer,
        port: args.port,
        memory,
        traffic: args.traffic,
        ..Scope::default()
    };
    show(&examine(&System::real(), &scope), args.json)
}

/// DMA memory of a daemon with this configuration.
fn memory(args: &DoctorArgs) -> Result<u64, Failure> {
    let file = args.config.clone().or_else(config::system_file);
    let loaded = config::load(file.as_deref(), std::env::vars_os(), &[]);
    let settings = loaded.map_err(anyhow::Error::from)?.settings;
    let transport = settings.rdma_transport();
    let rdma = args.rdma || demand::wants_rdma(&settings);
    let demand = demand::data_path(&settings, &IobufOptions::default(), Personality::Nacre)
        .and_then(|config| Demand::of(&config, rdma.then_some(&transport)));
    Ok(demand.map_err(anyhow::Error::from)?.bytes())
}

/// Prints the report; a failed check fails the command.
pub fn show(report: &Report, json: bool) -> Result<(), Failure> {
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
