//! `nacre cluster init`: creates a cluster in etcd, without a daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::super::{Failure, output};
use super::access::EtcdArgs;
use super::node_file::{Edit, NodeFileArgs};
use nacre_engine::config::settings::VolumeStoreSettings;
use nacre_engine::methods::cluster::init::{Created, init};

#[derive(Debug, Args)]
#[command(
    after_help = "Without --etcd, [store] of the configuration file says where etcd is.\n\n\
                  Example: nacre cluster init lab --etcd https://192.0.2.11:2379 --ca /etc/nacre/etcd-ca.pem"
)]
pub(super) struct InitArgs {
    /// Name of the cluster: letters, digits, ".", "_" and "-"
    name: String,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// How long a silent node keeps its volumes: 1 s to 30 s
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = nacre_engine_values::time::parse)]
    lease: Duration,
    /// Make this machine a node: write [cluster] and [store] into its configuration file
    #[arg(long)]
    join: bool,
    #[command(flatten)]
    node: NodeFileArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InitArgs) -> Result<(), Failure> {
    if let Some(option) = args.node.given().filter(|_| !args.join) {
        return Err(Failure::Usage(format!(
            "{option} describes this machine as a node: add --join"
        )));
    }
    let store = args.etcd.store(&args.name)?;
    // Before the cluster exists: a refusal leaves nothing.
    let edit = if args.join {
        Some(Edit::new(&args.name, &store, &args.etcd, &args.node)?)
    } else {
        None
    };
    let Created { id, lease } = init(&store, &args.name, args.lease)?;
    let text = node_configuration(&args.name, &store);
    if let Some(edit) = &edit {
        edit.write()?;
    }
    if args.json {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        let mut answer = json!({
            "name": args.name, "id": id, "lease_ms": lease_ms, "configuration": text,
        });
        if let Some(edit) = edit {
            answer["file"] = json!(edit.path);
        }
        return output::json(&answer);
    }
    let lease = humantime::format_duration(lease);
    output::line(&format!(
        "Created cluster {}, id {id}, lease {lease}.",
        args.name
    ))?;
    match edit {
        Some(edit) => edit.report(),
        None => output::line(&format!(
            "Write this into the configuration of each node, and start its daemon:\n\n{text}"
        )),
    }
}

/// The part of a node's configuration that makes it join.
fn node_configuration(name: &str, store: &VolumeStoreSettings) -> String {
    let mut lines = vec![
        "[cluster]".to_owned(),
        format!("name = {}", json!(name)),
        String::new(),
        "[store]".to_owned(),
        format!("endpoints = [{}]", {
            let urls = store.endpoints.iter().map(|url| json!(url).to_string());
            urls.collect::<Vec<_>>().join(", ")
        }),
    ];
    let mut add = |key: &str, value: Option<Value>| {
        lines.extend(value.map(|value| format!("{key} = {value}")));
    };
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| json!(path));
    add("ca", path(&store.ca));
    add("cert", path(&store.cert));
    add("key", path(&store.key));
    add("user", store.user.as_ref().map(|user| json!(user)));
    add("password_file", path(&store.password_file));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use nacre_engine::config;

    use super::*;

    /// Goal: the printed text is a configuration that the daemon accepts, with the same store.
    #[test]
    fn the_printed_configuration_is_one() {
        let store = VolumeStoreSettings {
            endpoints: vec!["https://a:1".into(), "https://b:1".into()],
            ca: Some("/ca \"1\".pem".into()),
            user: Some("nacre".into()),
            password_file: Some("/p".into()),
            ..VolumeStoreSettings::default()
        };
        let text = node_configuration("lab", &store);
        let loaded = config::load_text(Some(("/n.toml", &text)), [], &[]).expect("good");
        assert_eq!(loaded.settings.store, store);
        assert_eq!(loaded.settings.cluster.name.as_deref(), Some("lab"));
    }
}
