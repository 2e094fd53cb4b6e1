//! `nacre test`: tests the paths to a namespace of the running daemon, while its hosts stay
//! connected.
//!
//! ```text
//!   failover.rs   makes a listener inaccessible for a time, with verified I/O
//!   verdict.rs    the plan of a failover test, and its result: pass or fail         (no I/O)
//!   hosts.rs      which listeners carry the I/O of connected hosts                  (no I/O)
//!   copy.rs       each path reads, and on request writes, a block range; pass or fail
//!   paths.rs      the listeners of a subsystem, and this program's connections to them
//!   show.rs       output
//! ```

mod copy;
mod failover;
mod hosts;
mod paths;
mod show;
mod verdict;

use clap::{Args, Subcommand};

use super::{Connection, Failure};

#[derive(Debug, Args)]
#[command(mut_args = |arg| arg.global(true))]
pub(crate) struct TestArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: TestCommand,
}

#[derive(Debug, Subcommand)]
enum TestCommand {
    /// Take a listener out of use for a time, check I/O meanwhile, and restore it
    #[command(after_help = failover::HELP)]
    Failover(Box<failover::FailoverArgs>),
    /// Read, and with --overwrite write, a range over every path, and judge each path
    #[command(after_help = copy::HELP)]
    Copy(copy::CopyArgs),
}

pub(crate) fn run(args: TestArgs) -> Result<(), Failure> {
    match args.command {
        TestCommand::Failover(command) => failover::run(&args.connection, &command),
        TestCommand::Copy(command) => copy::run(&args.connection, &command),
    }
}
