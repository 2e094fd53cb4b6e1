//! `nacre cluster init`: creates a cluster in etcd, without a daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::super::{Failure, absolute, output};
use nacre_engine::config::settings::VolumeStore;
use nacre_engine::config::{self, Flag};
use nacre_engine::methods::cluster::init::{Created, init};

#[derive(Debug, Args)]
#[command(
    after_help = "Without --etcd, [store] of the configuration file says where etcd is.\n\n\
                  Example: nacre cluster init lab --etcd https://192.0.2.11:2379 --ca /etc/nacre/etcd-ca.pem"
)]
pub(super) struct InitArgs {
    /// Name of the cluster: letters, digits, ".", "_" and "-"
    name: String,
    /// The configuration file; the system's unless given
    #[arg(short = 'c', long, value_name = "FILE", env = "NACRE_CONFIG")]
    config: Option<PathBuf>,
    /// Members of etcd (several with commas), in place of the configuration file
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    etcd: Vec<String>,
    /// The certificates in PEM that sign those of the members
    #[arg(long, value_name = "FILE", requires = "etcd")]
    ca: Option<PathBuf>,
    /// The certificate of this client
    #[arg(long, value_name = "FILE", requires = "etcd")]
    cert: Option<PathBuf>,
    /// The key of this client
    #[arg(long, value_name = "FILE", requires = "etcd")]
    key: Option<PathBuf>,
    /// A user of etcd
    #[arg(long, value_name = "NAME", requires = "etcd")]
    user: Option<String>,
    /// The file with the user's password
    #[arg(long, value_name = "FILE", requires = "etcd")]
    password_file: Option<PathBuf>,
    /// How long a silent node keeps its volumes: 1 s to 30 s
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = nacre_engine_values::time::parse)]
    lease: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl InitArgs {
    fn flags(&self) -> Result<Vec<Flag>, Failure> {
        let mut flags = Vec::new();
        let mut set = |flag, key, value: Value| flags.push(Flag { key, value, flag });
        set("NAME", "cluster.name", json!(self.name));
        if !self.etcd.is_empty() {
            set("--etcd", "store.endpoints", json!(self.etcd));
        }
        for (flag, key, path) in [
            ("--ca", "store.ca", &self.ca),
            ("--cert", "store.cert", &self.cert),
            ("--key", "store.key", &self.key),
            (
                "--password-file",
                "store.password_file",
                &self.password_file,
            ),
        ] {
            if let Some(path) = path {
                set(flag, key, json!(absolute(path)?));
            }
        }
        if let Some(user) = &self.user {
            set("--user", "store.user", json!(user));
        }
        Ok(flags)
    }

    /// The access to etcd, as the configuration or the options say.
    fn store(&self) -> Result<VolumeStore, Failure> {
        let flags = self.flags()?;
        if !self.etcd.is_empty() {
            let loaded = config::load(None, [], &flags).map_err(anyhow::Error::from)?;
            return Ok(loaded.settings.store);
        }
        let file = self.config.clone().or_else(config::system_file);
        let load = |flags: &[Flag]| config::load(file.as_deref(), std::env::vars_os(), flags);
        // Without a name, [store] alone is no configuration of a daemon.
        let named = load(&[]).ok().and_then(|file| file.settings.cluster.name);
        if let Some(other) = named.filter(|other| *other != self.name) {
            return Err(Failure::Failed(anyhow::anyhow!(
                "cluster.name: the configuration has \"{other}\", and this command \"{}\"; correct \
                 one of them",
                self.name
            )));
        }
        Ok(load(&flags).map_err(anyhow::Error::from)?.settings.store)
    }
}

pub(super) fn run(args: &InitArgs) -> Result<(), Failure> {
    let store = args.store()?;
    let Created { id, lease } = init(&store, &args.name, args.lease)?;
    let text = node_configuration(&args.name, &store);
    if args.json {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        return output::json(&json!({
            "name": args.name, "id": id, "lease_ms": lease_ms, "configuration": text,
        }));
    }
    output::line(&format!(
        "Created cluster {}, id {id}, lease {}.\n\
         Write this into the configuration of each node, and start its daemon:\n\n{text}",
        args.name,
        humantime::format_duration(lease)
    ))
}

/// The part of a node's configuration that makes it join.
fn node_configuration(name: &str, store: &VolumeStore) -> String {
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
    use super::*;

    /// Goal: the printed text is a configuration that the daemon accepts, with the same store.
    #[test]
    fn the_printed_configuration_is_one() {
        let store = VolumeStore {
            endpoints: vec!["https://a:1".into(), "https://b:1".into()],
            ca: Some("/ca \"1\".pem".into()),
            user: Some("nacre".into()),
            password_file: Some("/p".into()),
            ..VolumeStore::default()
        };
        let text = node_configuration("lab", &store);
        let loaded = config::load_text(Some(("/n.toml", &text)), [], &[]).expect("good");
        assert_eq!(loaded.settings.store, store);
        assert_eq!(loaded.settings.cluster.name.as_deref(), Some("lab"));
    }
}
