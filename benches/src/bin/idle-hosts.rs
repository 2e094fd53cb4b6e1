//! The program `idle-hosts` of `cargo xtask bench tcp`: opens a number of connections, prints
//! `ready`, and closes them when stdin is closed.

#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use clap::Parser;

#[derive(Parser)]
#[command(about = "Holds connections to an NVMe/TCP target without asking for anything")]
struct Options {
    #[arg(long, default_value = "127.0.0.1:4420")]
    address: SocketAddr,
    #[arg(long)]
    nqn: String,
    #[arg(long, default_value_t = 64)]
    connections: u32,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let held = (0..options.connections)
        .map(|host| {
            nacre_benches::idle::connect(options.address, &options.nqn, host)
                .with_context(|| format!("connection {host} to {}", options.address))
        })
        .collect::<Result<Vec<_>>>()?;
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin()
        .read_to_end(&mut Vec::new())
        .context("waiting for the end of standard input")?;
    drop(held);
    Ok(())
}
