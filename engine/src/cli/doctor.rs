//! `nacre doctor`: the checks of [`crate::doctor`] in a table. Asks no daemon.

use std::net::IpAddr;

use clap::Args;

use super::{Failure, output, size};
use crate::doctor::{Report, Scope, Status, System, examine};

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 nothing failed (warnings do not count), 1 a check failed, 2 wrong usage.\n\n\
                  Example: nacre doctor --rdma --listener name:eth0 --peer 192.0.2.7"
)]
pub struct DoctorArgs {
    /// RDMA is wanted: its absence is a failure
    #[arg(long)]
    rdma: bool,
    /// Where it shall listen: name:eth0, ip:192.0.2.1, subnet:192.0.2.0/24, mac:…, rdma:mlx5_0
    #[arg(long, value_name = "SELECTOR")]
    listener: Vec<String>,
    /// Another machine that must be reached
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<IpAddr>,
    /// NVMe's port on that machine
    #[arg(long, value_name = "PORT", default_value_t = 4420)]
    port: u16,
    /// DMA memory that the daemon shall use
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size::parse_bytes)]
    memory: u64,
    /// Move data through each RDMA device, compare it, and see whether the right port's counters move: to itself, or to
    /// `nacre rdma perf server` on the peer
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "64MiB", value_parser = size::parse_bytes)]
    traffic: Option<u64>,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub fn run(args: DoctorArgs) -> Result<(), Failure> {
    let scope = Scope {
        rdma: args.rdma,
        listeners: args.listener,
        peer: args.peer,
        port: args.port,
        memory: args.memory,
        traffic: args.traffic,
        ..Scope::default()
    };
    show(&examine(&System::real(), &scope), args.json)
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
            // What to do stands where something is to be done.
            if let Some(remedy) = finding
                .remedy
                .as_ref()
                .filter(|_| finding.status >= Status::Warn)
            {
                output::line(&format!("      remedy: {remedy}"))?;
            }
        }
        output::line(&format!(
            "{} passed, {} warnings, {} failed, {} skipped",
            report.passed, report.warnings, report.failed, report.skipped
        ))?;
    }
    match report.failed {
        0 => Ok(()),
        1 => Err(Failure::Failed(anyhow::anyhow!("1 check failed"))),
        count => Err(Failure::Failed(anyhow::anyhow!("{count} checks failed"))),
    }
}
