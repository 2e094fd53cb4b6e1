//! The program `limit-target` of `cargo xtask bench spdk|tcp|vm --limit`. See
//! [`nacre_benches::limit_target`].

#![forbid(unsafe_code)]

use std::net::{SocketAddr, TcpListener};

use anyhow::{Context, Result};
use clap::Parser;
use nacre_benches::limit_target::{Disk, Idle, serve};

#[derive(Parser)]
#[command(about = "An NVMe/TCP target whose I/O queues only count bytes")]
struct Options {
    /// Address of the listener.
    #[arg(long)]
    listen: SocketAddr,
    /// The target that serves the admin queues.
    #[arg(long)]
    behind: SocketAddr,
    /// Core that serves the I/O queues.
    #[arg(long, default_value_t = 0)]
    core: usize,
    /// Bytes per block of the namespace.
    #[arg(long, default_value_t = 512)]
    block_bytes: usize,
    /// Blocks of the namespace.
    #[arg(long)]
    blocks: usize,
    /// Sleep while no bytes arrive, instead of polling.
    #[arg(long)]
    sleep: bool,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let listener = TcpListener::bind(options.listen)
        .with_context(|| format!("listening on {}", options.listen))?;
    let disk = Disk {
        block_bytes: options.block_bytes,
        blocks: options.blocks,
    };
    let idle = if options.sleep {
        Idle::Sleep
    } else {
        Idle::Poll
    };
    serve(&listener, options.behind, options.core, disk, idle)
}
