//! `nacre hugepages`: the kernel's pools of huge pages on this machine. Does not call the daemon.

use clap::{Args, Subcommand};
use nacre_hugepages::NodePages;
use serde_json::{Value, json};

use super::{Failure, output};
use nacre_engine_values::size;

#[derive(Debug, Args)]
pub(crate) struct HugepagesArgs {
    #[command(subcommand)]
    command: HugepagesCommand,
}

#[derive(Debug, Subcommand)]
enum HugepagesCommand {
    /// Show the pools of each NUMA node
    Show {
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Set how many pages a pool has, until the machine restarts
    #[command(after_help = "Example: nacre hugepages reserve 2MiB 1024 --node 0")]
    Reserve {
        /// Page size, such as 2MiB or 1GiB
        #[arg(value_parser = size::parse_bytes)]
        size: u64,
        /// Total number of pages, including those already reserved
        count: u64,
        /// On this NUMA node; spread over all unless given
        #[arg(long)]
        node: Option<u32>,
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(args: HugepagesArgs) -> Result<(), Failure> {
    match args.command {
        HugepagesCommand::Show { json } => show(&nacre_hugepages::show(), json),
        HugepagesCommand::Reserve {
            size,
            count,
            node,
            json,
        } => {
            let pages = nacre_hugepages::reserve(size, count, node).map_err(anyhow::Error::from)?;
            if json {
                return output::json(&json!({ "page_size": size, "node": node, "pages": pages }));
            }
            let total = output::bytes(pages.saturating_mul(size));
            output::line(&format!(
                "{pages} pages of {}: {total}",
                output::bytes(size)
            ))
        }
    }
}

fn show(pools: &[NodePages], json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&pools.iter().map(facts).collect());
    }
    let rows = pools.iter().map(|pool| {
        vec![
            pool.node
                .map_or_else(|| "-".into(), |node| node.to_string()),
            output::bytes(pool.size),
            pool.total.to_string(),
            pool.free.to_string(),
            pool.available().to_string(),
            output::bytes(pool.available().saturating_mul(pool.size)),
        ]
    });
    output::table(
        &["node", "page", "pages", "free", "available", "memory"],
        rows,
    )?;
    if pools.iter().all(|pool| pool.available() == 0) {
        output::line(
            "no huge pages are available; `nacre hugepages reserve 2MiB 1024` as root reserves 2 \
                GiB",
        )?;
    }
    Ok(())
}

fn facts(pool: &NodePages) -> Value {
    json!({
        "node": pool.node,
        "page_size": pool.size,
        "pages": pool.total,
        "free": pool.free,
        "reserved": pool.reserved,
        "surplus": pool.surplus,
        "overcommit": pool.overcommit,
        "available": pool.available(),
    })
}
