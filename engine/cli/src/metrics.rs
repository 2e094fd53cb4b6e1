//! `nacre metrics`: prints the daemon's metrics, without Prometheus.

use clap::Args;

use super::{Connection, Failure, output};
use nacre_engine::methods::metrics::{GetMetrics, GetMetricsParams, MetricsFormat};

#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    #[command(flatten)]
    connection: Connection,
    /// Print the reference of all metrics, in Markdown
    #[arg(long)]
    reference: bool,
}

pub(crate) fn run(args: MetricsArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(nacre_engine::metrics::markdown().trim_end());
    }
    let format = if args.connection.json {
        MetricsFormat::Json
    } else {
        MetricsFormat::Text
    };
    let params = GetMetricsParams { format };
    let answer = args.connection.call_for_json::<GetMetrics>(&params)?;
    if args.connection.json {
        return output::json(&answer);
    }
    output::line(answer.as_str().unwrap_or_default().trim_end())
}
