//! The access to etcd of the commands that need no daemon: options, or `[store]` of the
//! configuration file.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use serde_json::{Value, json};

use super::super::{Failure, absolute};
use nacre_engine::config::settings::VolumeStoreSettings;
use nacre_engine::config::{self, Flag};

// Each option replaces a key of `[store]`, and `flags` names the key. The rules of the values stand
// with the keys, in `VolumeStoreSettings`; keys that only a daemon uses have no option here.
#[derive(Debug, Default, Args)]
pub(super) struct EtcdArgs {
    /// The configuration file; the system's unless given
    #[arg(short = 'c', long, value_name = "FILE", env = "NACRE_CONFIG")]
    pub(super) config: Option<PathBuf>,
    /// Members of etcd (several with commas), in place of the configuration file
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(super) etcd: Vec<String>,
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
}

impl EtcdArgs {
    #[cfg(test)]
    pub(super) fn of_file(path: PathBuf) -> Self {
        Self {
            config: Some(path),
            ..Self::default()
        }
    }

    fn flags(&self, cluster: &str) -> Result<Vec<Flag>, Failure> {
        let mut flags = Vec::new();
        let mut set = |flag, key, value: Value| flags.push(Flag { key, value, flag });
        set("NAME", "cluster.name", json!(cluster));
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

    fn file(&self) -> Option<PathBuf> {
        self.config.clone().or_else(config::system_file)
    }

    /// The name of the cluster in the configuration.
    pub(super) fn named(&self) -> Result<Option<String>, Failure> {
        let file = self.file();
        let load = |flags: &[Flag]| config::load(file.as_deref(), std::env::vars_os(), flags);
        let refused = match load(&[]) {
            Ok(loaded) => return Ok(loaded.settings.cluster.name),
            Err(refused) => refused,
        };
        // Without a name, [store] alone is no configuration of a daemon.
        match load(&self.flags("name")?) {
            Ok(_) => Ok(None),
            Err(_) => Err(Failure::Failed(refused.into())),
        }
    }

    /// The access to the etcd of this cluster, as the configuration or the options say.
    pub(super) fn store(&self, cluster: &str) -> Result<VolumeStoreSettings, Failure> {
        let flags = self.flags(cluster)?;
        if !self.etcd.is_empty() {
            let loaded = config::load(None, [], &flags).map_err(anyhow::Error::from)?;
            return Ok(loaded.settings.store);
        }
        if let Some(other) = self.named()?.filter(|other| *other != cluster) {
            return Err(Failure::Failed(anyhow!(
                "cluster.name: the configuration has \"{other}\", and this command \"{cluster}\"; \
                 correct one of them"
            )));
        }
        let loaded = config::load(self.file().as_deref(), std::env::vars_os(), &flags);
        Ok(loaded.map_err(anyhow::Error::from)?.settings.store)
    }
}
