//! `nacre initiator`: checks whether this machine is ready to connect as a Linux NVMe-oF host.

use clap::{Args, Subcommand};

use super::address::TargetAddress;
use super::{Failure, doctor};
use nacre_engine_doctor::{System, Target, examine_initiator};

#[derive(Debug, Args)]
pub(crate) struct InitiatorArgs {
    #[command(subcommand)]
    command: InitiatorCommand,
}

#[derive(Debug, Subcommand)]
enum InitiatorCommand {
    /// Check the requirements for connecting: modules, nvme-cli, multipath, RDMA device, the route
    /// to the target
    #[command(
        after_help = "Exit codes: 0 nothing failed (warnings do not count), 1 a check failed, 2 wrong usage."
    )]
    Check {
        /// The target to reach: ADDRESS[:PORT], or tcp://ADDRESS[:PORT][/NQN], or rdma://…, or
        /// auto://…
        #[arg(value_name = "URI")]
        target: Option<TargetAddress>,
        /// Print JSON for programs instead of a table for people
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(args: InitiatorArgs) -> Result<(), Failure> {
    match args.command {
        InitiatorCommand::Check { target, json } => {
            let target = target.map(|address| Target {
                ip: address.ip(),
                port: address.port(),
            });
            doctor::show(&examine_initiator(&System::real(), target), json)
        }
    }
}
