//! `nacre cluster join`: makes this machine a node, without a daemon.

use clap::Args;
use serde_json::json;

use super::super::{Failure, output};
use super::access::EtcdArgs;
use super::node_file::{Edit, NodeFileArgs};
use nacre_engine::methods::cluster::join::{FoundCluster, look};

#[derive(Debug, Args)]
#[command(
    after_help = "The command looks for the cluster in etcd, and writes [cluster] and [store] into the \
                  configuration file. It refuses a file with other values, and changes nothing else there.\n\n\
                  Example: nacre cluster join lab --etcd http://192.0.2.11:2379 --listen tcp://192.0.2.1:4420"
)]
pub(super) struct JoinArgs {
    /// Name of the cluster
    name: String,
    #[command(flatten)]
    etcd: EtcdArgs,
    #[command(flatten)]
    node: NodeFileArgs,
    /// Print the configuration, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &JoinArgs) -> Result<(), Failure> {
    let store = args.etcd.store(&args.name)?;
    let edit = Edit::new(&args.name, &store, &args.etcd, &args.node)?;
    let FoundCluster { id, lease, nodes } = look(&store, &args.name)?;
    if !args.dry_run {
        edit.write()?;
    }
    if args.json {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        return output::json(&json!({
            "name": args.name, "id": id, "lease_ms": lease_ms, "nodes": nodes,
            "file": edit.path, "is_changed": edit.is_change(), "configuration": edit.after,
            "next": edit.next_step(),
        }));
    }
    if args.dry_run {
        return output::line(edit.after.trim_end());
    }
    let known = match nodes.as_slice() {
        [] => "no node yet".to_owned(),
        some => {
            let count = u64::try_from(some.len()).unwrap_or(u64::MAX);
            format!("{}: {}", output::count(count, "node"), some.join(", "))
        }
    };
    output::line(&format!(
        "Found cluster {}, id {id}, lease {}; {known}.",
        args.name,
        humantime::format_duration(lease)
    ))?;
    edit.report()
}
