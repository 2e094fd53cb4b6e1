//! `nacre connect`: connects this Linux host with nvme-cli, by every path in the target's discovery
//! log, RDMA first. Without a log: over RDMA if the route to the target supports it, else over TCP.
//! Every command is printed before it runs.
//!
//! ```text
//!   plan (pure)  transports in order, with reasons
//!     ▼
//!   drive        discovery log, then each path: attempts, pauses, fallback
//!     ▼
//!   HostCommands modprobe, nvme discover, nvme connect
//! ```

mod drive;
mod host;
mod log;

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use nacre_nvmf::address::{Fallback, IpTransport, TransportChoice};
use nacre_nvmf::auth::Secret;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use self::drive::{Attempt, drive};
use self::host::Shell;
use self::log::Path;
use super::address::{TargetAddress, fallback, hostnqn, transport_choice};
use super::attempts::Attempts;
use super::remote::KeyFiles;
use super::{Failure, output};
use nacre_engine::services::keyring;
use nacre_engine_doctor::{System, check_rdma_route};

#[derive(Debug, Clone, Args)]
#[command(after_help = "Exit codes: 0 connected, 1 failed, 2 wrong usage.\n\n\
                  Example: nacre connect 192.0.2.1 -n nqn.2025-01.io.example:v --transport auto")]
pub(crate) struct ConnectArgs {
    /// The target: ADDRESS[:PORT], or tcp://ADDRESS[:PORT][/NQN], or rdma://…, or auto://…
    #[arg(value_name = "URI")]
    pub address: TargetAddress,
    /// Name of the subsystem, unless the URI has it
    #[arg(short = 'n', long)]
    pub nqn: Option<String>,
    /// Transport where the URI names none; auto: RDMA if the route to the target supports it, then
    /// TCP [default: auto]
    #[arg(short, long, value_name = "TRANSPORT", value_parser = transport_choice())]
    pub transport: Option<TransportChoice>,
    /// What to do when RDMA fails [default: tcp with --transport auto, else none]
    #[arg(long, value_name = "FALLBACK", value_parser = fallback())]
    pub fallback: Option<Fallback>,
    #[command(flatten)]
    pub attempts: Attempts,
    /// Name of this host [default: nvme-cli's]
    #[arg(short = 'q', long, value_name = "NQN")]
    pub hostnqn: Option<String>,
    /// Identifier of this host, a UUID [default: nvme-cli's]
    #[arg(short = 'I', long, value_name = "UUID")]
    pub hostid: Option<String>,
    /// I/O queues [default: one per processor]
    #[arg(short = 'i', long, value_name = "COUNT")]
    pub nr_io_queues: Option<NonZeroU32>,
    /// Entries of each I/O queue
    #[arg(short = 'Q', long, value_name = "DEPTH")]
    pub queue_size: Option<NonZeroU32>,
    /// Seconds that the kernel tries to restore a lost connection; -1: without limit
    #[arg(
        short = 'l',
        long,
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    pub ctrl_loss_tmo: Option<i32>,
    #[command(flatten)]
    pub keys: KeyFiles,
    /// Type of service of the connection's packets
    #[arg(long, value_name = "TOS")]
    pub tos: Option<u8>,
    /// Print the commands and run none
    #[arg(long)]
    pub dry_run: bool,
    /// The texts of the keys, for nvme-cli.
    #[arg(skip)]
    pub secrets: Secrets,
    /// Print JSON for programs at the end; progress goes to standard error
    #[arg(long)]
    pub json: bool,
}

/// The secrets of this host and of the target.
#[derive(Clone, Default)]
pub(crate) struct Secrets {
    pub own: Option<Zeroizing<String>>,
    pub target: Option<Zeroizing<String>>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets")
    }
}

/// The kernel module that connects over a transport.
pub(crate) fn module(transport: IpTransport) -> &'static str {
    match transport {
        IpTransport::Rdma => "nvme-rdma",
        IpTransport::Tcp => "nvme-tcp",
    }
}

/// The transports to try, in order, and a remark to print first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub order: Vec<IpTransport>,
    /// The user named the transport: RDMA is tried even where its device is missing.
    pub by_name: bool,
    pub remark: Option<String>,
}

impl Plan {
    /// `rdma`: the reason, if RDMA cannot reach the target.
    pub(crate) fn of(
        choice: TransportChoice,
        fallback: Option<Fallback>,
        rdma: Result<(), String>,
    ) -> Self {
        let fallback = fallback.unwrap_or_else(|| choice.default_fallback());
        let (order, remark) = match (choice, fallback, rdma) {
            (TransportChoice::Tcp, _, _) => (vec![IpTransport::Tcp], None),
            // No RDMA device, and another transport is allowed.
            (TransportChoice::Auto, Fallback::Tcp, Err(why)) => (
                vec![IpTransport::Tcp],
                Some(format!(
                    "no RDMA from here to the target: {why}; connecting over TCP"
                )),
            ),
            // Requested by name: tried, because the device may appear later.
            (_, Fallback::Tcp, rdma) => (
                vec![IpTransport::Rdma, IpTransport::Tcp],
                rdma.err()
                    .map(|why| format!("RDMA will probably fail: {why}")),
            ),
            (_, Fallback::None, rdma) => (
                vec![IpTransport::Rdma],
                rdma.err()
                    .map(|why| format!("RDMA will probably fail: {why}")),
            ),
        };
        Self {
            order,
            by_name: choice != TransportChoice::Auto,
            remark,
        }
    }
}

impl ConnectArgs {
    /// The subsystem that --nqn or the URI names.
    pub(crate) fn subsystem(&self) -> Result<String, Failure> {
        match (&self.nqn, &self.address.endpoint.subnqn) {
            (Some(nqn), Some(other)) if nqn != other.as_str() => Err(Failure::Usage(format!(
                "the URI names {other} and --nqn names {nqn}: leave one of them out"
            ))),
            (Some(nqn), _) => Ok(nqn.clone()),
            (None, Some(nqn)) => Ok(nqn.to_string()),
            (None, None) => Err(Failure::Usage(
                "name the subsystem: --nqn, or /NQN behind the address; `nacre discover` lists them"
                    .into(),
            )),
        }
    }

    /// Reads the key files.
    fn read_keys(&mut self) -> Result<(), Failure> {
        let read = |path: &Option<PathBuf>| {
            let refuse = |path: &PathBuf, error: &dyn std::fmt::Display| {
                Failure::Usage(format!("{}: {error}", path.display()))
            };
            let read = |path: &PathBuf| {
                let text = keyring::read(path).map_err(|error| refuse(path, &error))?;
                let secret = Secret::parse(&text).map_err(|error| refuse(path, &error))?;
                Ok::<_, Failure>(secret.to_text())
            };
            path.as_ref().map(read).transpose()
        };
        self.secrets = Secrets {
            own: read(&self.keys.dhchap_key)?,
            target: read(&self.keys.dhchap_ctrlr_key)?,
        };
        Ok(())
    }

    /// The transport that --transport or the URI names.
    pub(crate) fn choice(&self) -> Result<TransportChoice, Failure> {
        match (self.address.endpoint.choice(), self.transport) {
            (Some(scheme), Some(asked)) if scheme != asked => Err(Failure::Usage(
                "the URI and --transport name two transports: leave one of them out".into(),
            )),
            (scheme, asked) => Ok(scheme.or(asked).unwrap_or_default()),
        }
    }
}

pub(crate) fn run(args: ConnectArgs) -> Result<(), Failure> {
    let mut args = args;
    args.nqn = Some(args.subsystem()?);
    args.hostnqn = hostnqn(args.hostnqn.as_deref(), &args.address.endpoint)?;
    args.read_keys()?;
    let system = System::real();
    let plan = Plan::of(
        args.choice()?,
        args.fallback.or_else(|| args.address.fallback()),
        check_rdma_route(&system, args.address.ip()),
    );
    let mut shell = Shell::new(args.json, args.attempts.cm_timeout);
    let print = |text: &str| {
        if args.json {
            eprintln!("{text}");
            Ok(())
        } else {
            output::line(text)
        }
    };
    if let Some(remark) = &plan.remark {
        print(remark)?;
    }
    if args.dry_run {
        for transport in &plan.order {
            print(&format!("modprobe {}", module(*transport)))?;
        }
        let here = |transport: &IpTransport| Path {
            transport: *transport,
            address: args.address.traddr(),
            port: args.address.port(),
        };
        print(&drive::words(&drive::discovery(
            &args,
            &here(&plan.order[0]),
        )))?;
        for transport in &plan.order {
            print(&drive::words(&drive::command(&args, &here(transport))))?;
        }
        return Ok(());
    }
    let attempts = drive(&args, &plan, &mut shell, &|ip| {
        check_rdma_route(&system, ip)
    })
    .map_err(anyhow::Error::from)?;
    if args.json {
        return output::json(&answer(&attempts));
    }
    for one in &attempts {
        let text = match &one.outcome {
            Ok(false) => format!("connected over {}", one.path.transport.word()),
            Ok(true) => format!("already connected over {}", one.path.transport.word()),
            Err(_) => continue,
        };
        output::line(&text)?;
    }
    let failed = attempts.iter().filter(|one| one.outcome.is_err()).count();
    match failed {
        0 => Ok(()),
        _ => output::line(&format!("{failed} of {} paths failed", attempts.len())),
    }
}

/// The first connected path, for compatibility, and all of them.
fn answer(attempts: &[Attempt]) -> Value {
    let first = attempts.iter().find(|one| one.outcome.is_ok());
    let path = |one: &Attempt| {
        let (state, cause) = match &one.outcome {
            Ok(false) => ("connected", None),
            Ok(true) => ("already_connected", None),
            Err(cause) => ("failed", Some(cause.to_string())),
        };
        json!({
            "transport": one.path.transport.word(),
            "address": one.path.address,
            "port": one.path.port,
            "state": state,
            "cause": cause,
            "failed_attempts": one.failures,
        })
    };
    json!({
        "transport": first.map(|one| one.path.transport.word()),
        "already_connected": first.is_some_and(|one| one.outcome == Ok(true)),
        "failed_attempts": attempts.iter().map(|one| one.failures).sum::<u64>(),
        "paths": attempts.iter().map(path).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
