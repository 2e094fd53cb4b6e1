//! `nacre cluster rebuild-store`: makes the cluster's keys in etcd again, without a daemon on this
//! machine. The command takes the keys from the labels of replicas and the nodes' copies of the
//! keys.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::super::{Failure, output};
use super::access::EtcdArgs;
use super::backup::count;
use nacre_engine::methods::cluster::rebuilds::{self, Options, Rebuild};

#[derive(Debug, Args)]
#[command(
    after_help = "For a cluster whose etcd has lost everything: start an empty etcd, and run this command while the \
                  daemons of all nodes run. Each node reports the labels of its replicas, and its copy of the cluster's \
                  keys, which it writes within seconds of each change. No member of the former etcd may run.\n\n\
                  The command writes nothing if a node or a device is missing that may have later writes, and names \
                  it. Run an interrupted command again. Nodes join by themselves when it ends. A volume is served \
                  when all its replicas are there.\n\n\
                  Hosts get no access without --publish. Reservations of hosts are lost. Prefer `nacre cluster \
                  restore` if data directories of nodes are lost too, and a backup is there."
)]
pub(super) struct RebuildArgs {
    /// Name of the cluster
    name: String,
    /// A node that never returns, by name or id, one of its devices, or a replica by its id;
    /// several times for several. Writes that only its replicas have are lost
    #[arg(long, value_name = "NODE[:DEVICE]|REPLICA")]
    without: Vec<String>,
    /// Admit the hosts that had access. Otherwise admit hosts afterwards with `nacre volume
    /// publish`
    #[arg(long)]
    publish: bool,
    /// Take a volume that no copy names, or that was deleted, by name or id; several times for
    /// several
    #[arg(long, value_name = "VOLUME")]
    volume: Vec<String>,
    /// Leave a volume out, by name or id; several times for several
    #[arg(long, value_name = "VOLUME")]
    skip: Vec<String>,
    /// Longest wait for the nodes
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = nacre_engine_values::time::parse)]
    wait: Duration,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &RebuildArgs) -> Result<(), Failure> {
    let store = args.etcd.store(&args.name)?;
    let rebuild = Rebuild {
        options: Options {
            without: args.without.clone(),
            volumes: args.volume.clone(),
            skip: args.skip.clone(),
        },
        publish: args.publish,
        wait: args.wait,
    };
    let rebuilt = rebuilds::run(&store, &args.name, &rebuild, |reported, missing| {
        let missing = if missing.is_empty() {
            String::new()
        } else {
            format!("; waiting for {}", missing.join(", "))
        };
        eprintln!("{} reported{missing}", count(reported, "node"));
    })?;
    let notes = rebuilt.notes.iter().map(ToString::to_string);
    if args.json {
        return output::json(&json!({
            "cluster": args.name, "id": rebuilt.cluster, "keys": rebuilt.keys,
            "volumes": rebuilt.volumes, "nodes": rebuilt.nodes,
            "volumes_without_hosts": rebuilt.without_hosts, "is_repeated": rebuilt.is_repeated,
            "notes": notes.collect::<Vec<_>>(),
        }));
    }
    let mut text = format!(
        "Rebuilt cluster {}, id {}, from {}: {}, {}.\n\
         Its nodes join by themselves. A volume is served when all its replicas are there.",
        args.name,
        rebuilt.cluster,
        count(rebuilt.nodes, "node"),
        count(rebuilt.volumes, "volume"),
        count(rebuilt.keys, "key"),
    );
    if rebuilt.without_hosts > 0 {
        text += &format!(
            "\nNo host has access to {}: admit hosts with `nacre volume publish`.",
            count(rebuilt.without_hosts, "volume")
        );
    }
    for note in notes {
        text += &format!("\nnote: {note}");
    }
    output::line(&text)
}
