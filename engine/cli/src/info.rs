//! `nacre info`: the counters of one part of the daemon, named as in RPC replies and metrics; and
//! its sandbox.

use clap::{Args, Subcommand};
use serde_json::Value;

use super::{Connection, Failure, output};
use nacre_engine::methods::rdma::GetRdmaStats;
use nacre_engine_rpc::NoParams;

#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    #[command(subcommand)]
    command: InfoCommand,
}

#[derive(Debug, Subcommand)]
enum InfoCommand {
    /// The RDMA transport: operations, bytes, latencies, errors and events since the start
    #[command(visible_alias = "RDMA")]
    Rdma {
        #[command(flatten)]
        connection: Connection,
    },
    /// Capabilities of the daemon, and the filter of its system calls
    Sandbox {
        #[command(flatten)]
        connection: Connection,
    },
}

pub(crate) fn run(args: InfoArgs) -> Result<(), Failure> {
    let connection = match args.command {
        InfoCommand::Rdma { connection } => connection,
        InfoCommand::Sandbox { connection } => return super::sandbox::run(&connection),
    };
    let stats = connection.call_for_json::<GetRdmaStats>(&NoParams {})?;
    if connection.json {
        return output::json(&stats);
    }
    for (at, table) in tables(&stats).into_iter().enumerate() {
        if at > 0 {
            output::line("")?;
        }
        output::table(table.header, table.rows)?;
    }
    Ok(())
}

struct Table {
    header: &'static [&'static str],
    rows: Vec<Vec<String>>,
}

/// The tables with content; the first one always.
fn tables(stats: &Value) -> Vec<Table> {
    let all = [
        sums(stats),
        latencies(stats),
        occurrences(stats),
        reactors(stats),
    ];
    let mut all = all.into_iter();
    let first = all.next();
    first
        .into_iter()
        .chain(all.filter(|table| !table.rows.is_empty()))
        .collect()
}

/// Every top-level number of the reply, also one that a later daemon adds.
fn sums(stats: &Value) -> Table {
    let fields = stats.as_object().into_iter().flatten();
    let numbers = fields.filter(|(_, value)| value.is_number());
    let mut rows: Vec<Vec<String>> = numbers
        .map(|(name, value)| {
            let bytes = value.as_u64().filter(|_| name.ends_with("_bytes"));
            let text = bytes.filter(|bytes| *bytes >= 1024).map(output::bytes);
            vec![name.clone(), value.to_string(), text.unwrap_or_default()]
        })
        .collect();
    // Well-known names first, in the order of the reply.
    rows.sort_by_key(|row| !row[0].starts_with("rdma_"));
    Table {
        header: &["name", "value", ""],
        rows,
    }
}

fn latencies(stats: &Value) -> Table {
    let ops = stats["latency"].as_object().into_iter().flatten();
    let timed = ops.filter_map(|(op, of)| {
        let count = of["count"].as_u64().filter(|count| *count > 0)?;
        let total = of["total_us"].as_u64()?;
        let below = |field: &str| format!("< {}", output::cell(of.get(field)));
        Some(vec![
            op.clone(),
            count.to_string(),
            format!("{:.1}", total as f64 / count as f64),
            below("p50_us"),
            below("p99_us"),
        ])
    });
    Table {
        header: &["latency of", "count", "average us", "p50 us", "p99 us"],
        rows: timed.collect(),
    }
}

/// Errors, refusals and events that occurred.
fn occurrences(stats: &Value) -> Table {
    let mut rows = Vec::new();
    for (field, what) in [
        ("completion_errors", "completion error"),
        ("rejects", "refused connection"),
        ("cm_events", "event"),
    ] {
        for (name, count) in stats[field].as_object().into_iter().flatten() {
            rows.push(vec![what.into(), name.clone(), count.to_string()]);
        }
    }
    Table {
        header: &["what", "name", "count"],
        rows,
    }
}

fn reactors(stats: &Value) -> Table {
    let each = stats["reactors"].as_array().into_iter().flatten();
    let row = |of: &Value| {
        let mut row = vec![
            output::cell(of.get("reactor")),
            output::cell(of.get("device")),
        ];
        for kind in ["recv", "send", "read", "write"] {
            let counter = |what: &str| &of["counters"][format!("{kind}_{what}")];
            let bytes = counter("bytes").as_u64().unwrap_or(0);
            let ops = output::cell(Some(counter("ops")));
            row.push(format!("{ops} ({})", output::bytes(bytes)));
        }
        row
    };
    Table {
        header: &["reactor", "device", "recv", "send", "read", "write"],
        rows: each.map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(table: &Table) -> Vec<Vec<&str>> {
        let rows = table.rows.iter();
        rows.map(|row| row.iter().map(String::as_str).collect())
            .collect()
    }

    /// Present values are shown, under the names of the reply; absent ones take no room.
    #[test]
    fn rdma() {
        let stats = json!({
            "rdma_connections": 2, "rdma_send_ops": 7, "rdma_send_bytes": 2048, "copied_bytes": 0,
            "completion_errors": { "IBV_WC_RETRY_EXC_ERR": 1 },
            "cm_events": { "RDMA_CM_EVENT_ESTABLISHED": 2 }, "rejects": {},
            "latency": {
                "read": { "count": 4, "total_us": 50, "p50_us": 8, "p99_us": 16 },
                "send": { "count": 0, "total_us": 0, "p50_us": null, "p99_us": null },
            },
            "reactors": [{
                "reactor": "reactor_0", "device": "mlx5_0",
                "counters": {
                    "recv_ops": 1, "recv_bytes": 64, "send_ops": 7, "send_bytes": 2048,
                    "read_ops": 4, "read_bytes": 4096, "write_ops": 0, "write_bytes": 0,
                },
            }],
        });
        let tables = tables(&stats);
        let all: Vec<_> = tables.iter().map(texts).collect();
        assert_eq!(
            all,
            [
                vec![
                    vec!["rdma_connections", "2", ""],
                    vec!["rdma_send_bytes", "2048", "2.0 KiB"],
                    vec!["rdma_send_ops", "7", ""],
                    vec!["copied_bytes", "0", ""],
                ],
                vec![vec!["read", "4", "12.5", "< 8", "< 16"]],
                vec![
                    vec!["completion error", "IBV_WC_RETRY_EXC_ERR", "1"],
                    vec!["event", "RDMA_CM_EVENT_ESTABLISHED", "2"],
                ],
                vec![vec![
                    "reactor_0",
                    "mlx5_0",
                    "1 (64 B)",
                    "7 (2.0 KiB)",
                    "4 (4.0 KiB)",
                    "0 (0 B)"
                ]],
            ]
        );
        for table in &tables {
            assert!(table.rows.iter().all(|row| row.len() == table.header.len()));
        }
    }

    /// A daemon without RDMA returns zeroes.
    #[test]
    fn a_daemon_without_rdma() {
        let stats =
            json!({ "rdma_connections": 0, "cm_events": {}, "latency": {}, "reactors": [] });
        let tables = tables(&stats);
        assert_eq!(tables.len(), 1);
        assert_eq!(texts(&tables[0]), [["rdma_connections", "0", ""]]);
    }
}
