//! `nacre metrics`: the numbers that Prometheus scrapes, without Prometheus.

use clap::Args;
use serde_json::{Value, json};

use super::{Connection, Failure, output};

#[derive(Debug, Args)]
pub struct MetricsArgs {
    #[command(flatten)]
    connection: Connection,
    /// Print the reference of all metrics, in Markdown
    #[arg(long)]
    reference: bool,
}

pub fn run(args: MetricsArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(crate::metrics::markdown().trim_end());
    }
    if args.connection.json {
        return output::json(&args.connection.call_by_name("metrics_get", Value::Null)?);
    }
    let text = args
        .connection
        .call_by_name("metrics_get", json!({ "format": "text" }))?;
    output::line(text.as_str().unwrap_or_default().trim_end())
}
