//! `nacre rdma soak`: runs RDMA load with several peers for a long time, and reports pass or fail.
//!
//! ```text
//!   client.rs    runs the flows of each phase, takes a sample per second
//!   server.rs    a peer: serves both directions
//!   plan.rs      the phases and their flows                                (no I/O)
//!   verdict.rs   the meanings of counters, pass or fail, the report        (no I/O)
//! ```

mod client;
mod plan;
mod server;
mod verdict;

use clap::Subcommand;

use crate::Failure;

#[derive(Debug, Subcommand)]
pub(super) enum SoakCommand {
    /// Take part as a peer: serve the load until interrupted
    #[command(
        after_help = "Two ports are used, for the two directions: 18515 and 18516.\n\nExamples:\n  \
            nacre rdma soak server\n  nacre rdma soak server --listen 192.0.2.2,18600"
    )]
    Server(server::SoakServerArgs),
    /// Run the load with all peers, and judge it
    #[command(
        after_help = "Phases: each peer alone; incast: all peers send here at once; both \
            directions; both directions in bursts.\n\nThe test fails on a failed request, wrong \
            data, a lost queue pair, silence, and with --lossless on lost packets. Exit codes: 0 \
            passed, 1 failed, 2 wrong usage.\n\nExamples:\n  nacre rdma soak client --peers \
            192.0.2.2,192.0.2.3,192.0.2.4 --for 30m --lossless --report soak.txt"
    )]
    Client(Box<client::SoakClientArgs>),
}

pub(super) fn run(command: SoakCommand) -> Result<(), Failure> {
    match command {
        SoakCommand::Server(args) => server::run(&args),
        SoakCommand::Client(args) => client::run(&args),
    }
}
