//! `nacre rdma`: this machine's RDMA devices, as the kernel shows them. Only the limits of devices
//! come from libibverbs, if it is installed; only `perf` and `soak` move data. Only changes by
//! `qos` call the daemon: they look for its connections.

mod counters;
mod devices;
mod limits;
mod perf;
mod perf_show;
mod qos;
mod rxe;
pub(crate) mod size;
mod soak;
mod tune;

use std::time::Duration;

use clap::{Args, Subcommand};
use nacre_transport_rdma_link::{Fabric, Roots};

use super::{Failure, output};

pub(crate) use qos::interface_name;

#[derive(Debug, Args)]
pub(crate) struct RdmaArgs {
    #[command(subcommand)]
    command: RdmaCommand,
}

#[derive(Debug, Subcommand)]
enum RdmaCommand {
    /// List devices with their GUIDs, firmware, driver and interfaces
    Devices {
        /// Everything known of each device and port
        #[arg(short, long)]
        verbose: bool,
        #[command(flatten)]
        shown: Shown,
    },
    /// List ports with their state, as `rdma link show` does
    Link {
        #[command(flatten)]
        shown: Shown,
    },
    /// List the GIDs of each port, and which are used for which address
    Gids {
        /// Of this device only
        device: Option<String>,
        #[command(flatten)]
        shown: Shown,
    },
    /// Soft-RoCE: RDMA on any Ethernet interface
    Rxe {
        #[command(subcommand)]
        command: rxe::RxeCommand,
    },
    /// Network classes of a card: what [qos] of the configuration asks for
    Qos {
        #[command(subcommand)]
        command: qos::QosCommand,
    },
    /// Show the counters of ports, drivers and interfaces
    Counters {
        /// DEVICE or DEVICE/PORT; all unless given
        port: Option<String>,
        /// Show the changes in each interval, such as 1 or 500ms, until interrupted
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::above_zero)]
        watch: Option<Duration>,
        /// Include counters that are 0
        #[arg(short, long)]
        all: bool,
        #[command(flatten)]
        shown: Shown,
    },
    /// Calculate the queue pairs, completion entries and memory for a number of hosts, against a
    /// device's limits
    Size(size::SizeArgs),
    /// Compare the settings of cards and machine with the card's tuning profile; changes nothing
    #[command(
        after_help = "Exit codes: 0 shown, 1 there is no such device, 2 wrong usage.\n\nWithout root, \
            part of a card's PCI settings cannot be read.\n\nExample: nacre rdma tune mlx5_0"
    )]
    Tune {
        /// Of this device only
        device: Option<String>,
        #[command(flatten)]
        shown: Shown,
    },
    /// Measure bandwidth and latency of SEND, WRITE and READ between two machines
    Perf {
        #[command(subcommand)]
        command: perf::PerfCommand,
    },
    /// Load with several peers for a long time: incast, both directions, bursts; with a verdict
    Soak {
        #[command(subcommand)]
        command: soak::SoakCommand,
    },
}

#[derive(Debug, Args)]
struct Shown {
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: RdmaArgs) -> Result<(), Failure> {
    let roots = Roots::real();
    let fabric = || Fabric::read(&roots.sys);
    match args.command {
        RdmaCommand::Devices { verbose, shown } => {
            devices::devices(&fabric(), verbose, shown.json, &limits::all)
        }
        RdmaCommand::Link { shown } => devices::link(&fabric(), shown.json),
        RdmaCommand::Gids { device, shown } => {
            devices::gids(&fabric(), device.as_deref(), shown.json)
        }
        RdmaCommand::Rxe { command } => rxe::run(&roots, command),
        RdmaCommand::Qos { command } => qos::run(command),
        RdmaCommand::Counters {
            port,
            watch,
            all,
            shown,
        } => counters::run(&roots, port.as_deref(), watch, all, shown.json),
        RdmaCommand::Size(args) => size::run(&args, limits::all),
        RdmaCommand::Tune { device, shown } => tune::run(&roots, device.as_deref(), shown.json),
        RdmaCommand::Perf { command } => perf::run(command),
        RdmaCommand::Soak { command } => soak::run(command),
    }
}

/// Message in place of an empty table.
fn none_there() -> Result<(), Failure> {
    output::line(
        "No RDMA devices found; `nacre doctor --rdma` shows why, `nacre rdma rxe add rxe0 \
            --netdev NAME` creates a soft-RoCE device",
    )
}

#[cfg(test)]
mod tests;
