//! The program `limit` of `cargo xtask bench tcp`: measures the requests per second that bare
//! sockets carry between two cores. See [`nacre_benches::limit`].

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use nacre_benches::limit::{Rate, Wait, Workload, measure};
use serde_json::json;

#[derive(Parser)]
#[command(about = "The most requests per second that two cores can exchange over loopback TCP")]
struct Options {
    #[command(flatten)]
    workload: Workload,
    /// Measure only this wait mode. By default both are measured and the faster one is the limit.
    #[arg(long, value_enum)]
    wait: Option<Wait>,
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let workload = options.workload;
    let waits = options
        .wait
        .map_or_else(|| vec![Wait::Spin, Wait::Block], |wait| vec![wait]);
    let rates: Vec<Rate> = waits
        .into_iter()
        .map(|wait| measure(&workload, wait))
        .collect::<Result<_>>()?;
    let best = rates
        .iter()
        .max_by(|a, b| a.requests_per_second.total_cmp(&b.requests_per_second))
        .context("nothing was measured")?;

    if options.json {
        let report = json!({
            "workload": workload,
            "requests_per_second": best.requests_per_second,
            "bytes_per_second": best.requests_per_second * workload.size as f64,
            "wait": best.wait,
            "rates": rates,
        });
        println!("{report}");
    } else {
        for rate in &rates {
            println!(
                "{:?}: {:.0} requests/s",
                rate.wait, rate.requests_per_second
            );
        }
        println!(
            "limit: {:.0} requests/s, {:.2} GB/s",
            best.requests_per_second,
            best.requests_per_second * workload.size as f64 / 1e9
        );
    }
    Ok(())
}
