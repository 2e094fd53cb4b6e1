//! `nacre host`: the hosts that may connect to a subsystem.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::{Value, json};

use super::key::{self, KeyHash, NewKey};
use super::output::done;
use super::reply::{is_discovery, items, subsystems};
use super::{Connection, Failure, output};
use nacre_engine::config::host_keys::HostKeyNames;
use nacre_engine::methods::nvmf::host::{
    AddHost, AddHostParams, AllowAnyHost, AllowAnyHostParams, RemoveHost, RemoveHostParams,
};
use nacre_engine::methods::nvmf::namespace::{
    AddNamespaceHost, NamespaceHostParams, RemoveNamespaceHost,
};
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::to_json;

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "A Linux host's name is in its /etc/nvme/hostnqn."
)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: HostCommand,
}

#[derive(Debug, Subcommand)]
enum HostCommand {
    /// List the hosts that may connect
    #[command(visible_alias = "ls")]
    List {
        /// All subsystems unless given
        nqn: Option<String>,
    },
    /// Allow a host
    #[command(visible_alias = "add")]
    Allow {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        hostnqn: String,
        /// Only show it this namespace, created with --not-visible
        #[arg(long, conflicts_with_all = ["dhchap_key", "dhchap_ctrlr_key", "psk"])]
        nsid: Option<u32>,
        /// Name of the key that the host must prove to have
        #[arg(long, value_name = "KEY")]
        dhchap_key: Option<String>,
        /// Name of the key that the target must prove to have
        #[arg(long, value_name = "KEY", requires = "dhchap_key")]
        dhchap_ctrlr_key: Option<String>,
        /// Make a key for the host under this name, and print the host's `nvme connect` command
        #[arg(long, value_name = "KEY", conflicts_with_all = ["dhchap_key", "nsid"])]
        generate_key: Option<String>,
        /// Make a key for the target, too
        #[arg(
            long,
            value_name = "KEY",
            requires = "generate_key",
            conflicts_with = "dhchap_ctrlr_key"
        )]
        generate_ctrlr_key: Option<String>,
        /// Folder of the new key files
        #[arg(long, value_name = "FOLDER", default_value = super::key::FOLDER)]
        key_folder: PathBuf,
        /// Name of the pre-shared key with which the host must use TLS
        #[arg(long, value_name = "KEY")]
        psk: Option<String>,
        /// The host must make its TLS key by authentication (`nvme connect --concat`)
        #[arg(long, requires = "dhchap_key", conflicts_with_all = ["psk", "nsid"])]
        concat: bool,
    },
    /// Stop allowing a host; it is disconnected
    #[command(visible_alias = "rm")]
    Remove {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        hostnqn: String,
        /// Only hide this namespace from it
        #[arg(long)]
        nsid: Option<u32>,
    },
    /// Allow every host, or only those named
    AllowAny {
        /// NQN of the subsystem
        nqn: String,
        /// Only the named ones
        #[arg(long)]
        off: bool,
    },
}

pub(crate) fn run(args: HostArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        HostCommand::List { nqn } => list(connection, nqn.as_deref()),
        HostCommand::Allow {
            nqn,
            hostnqn,
            nsid: Some(nsid),
            ..
        } => {
            let params = namespace_host(nqn, nsid, hostnqn);
            change::<AddNamespaceHost>(connection, &params)
        }
        HostCommand::Allow {
            nqn,
            hostnqn,
            generate_key: Some(key),
            generate_ctrlr_key,
            key_folder,
            ..
        } => {
            let host = NewHost {
                nqn,
                hostnqn,
                key,
                controller_key: generate_ctrlr_key,
                folder: key_folder,
            };
            host.allow(connection)
        }
        HostCommand::Allow {
            nqn,
            hostnqn,
            nsid: None,
            dhchap_key,
            dhchap_ctrlr_key,
            psk,
            concat,
            ..
        } => {
            let params = AddHostParams {
                nqn,
                host: hostnqn,
                keys: HostKeyNames {
                    dhchap_key,
                    dhchap_ctrlr_key,
                    psk,
                    concat: concat.then_some(true),
                },
                ..AddHostParams::default()
            };
            change::<AddHost>(connection, &params)
        }
        HostCommand::Remove { nqn, hostnqn, nsid } => match nsid {
            Some(nsid) => {
                let params = namespace_host(nqn, nsid, hostnqn);
                change::<RemoveNamespaceHost>(connection, &params)
            }
            None => {
                let params = RemoveHostParams {
                    nqn,
                    host: hostnqn,
                    ..RemoveHostParams::default()
                };
                change::<RemoveHost>(connection, &params)
            }
        },
        HostCommand::AllowAny { nqn, off } => {
            let params = AllowAnyHostParams {
                nqn,
                allow_any_host: !off,
                tgt_name: None,
            };
            change::<AllowAnyHost>(connection, &params)
        }
    }
}

fn namespace_host(nqn: String, nsid: u32, host: String) -> NamespaceHostParams {
    NamespaceHostParams {
        nqn,
        nsid,
        host,
        tgt_name: None,
    }
}

fn change<M: Method<Engine>>(connection: &Connection, params: &M::Params) -> Result<(), Failure>
where
    M::Params: Serialize,
{
    connection.call_for_json::<M>(params)?;
    done(connection, to_json(params))
}

/// A host that gets keys with its permission.
struct NewHost {
    nqn: String,
    hostnqn: String,
    key: String,
    controller_key: Option<String>,
    folder: PathBuf,
}

impl NewHost {
    /// Makes the keys, allows the host, and prints the host's command: the one place where the
    /// secrets are shown.
    fn allow(&self, connection: &Connection) -> Result<(), Failure> {
        let kind = NewKey::Dhchap(KeyHash::Sha256);
        let generate = |name: &str| key::generate(connection, name, kind, &self.folder, None);
        let own = generate(&self.key)?;
        let mut made = vec![&own];
        let other = self.controller_key.as_deref().map(generate).transpose();
        let allowed = other.and_then(|other| {
            let params = AddHostParams {
                nqn: self.nqn.clone(),
                host: self.hostnqn.clone(),
                keys: HostKeyNames {
                    dhchap_key: Some(self.key.clone()),
                    dhchap_ctrlr_key: self.controller_key.clone(),
                    ..HostKeyNames::default()
                },
                ..AddHostParams::default()
            };
            let called = connection.call_for_json::<AddHost>(&params);
            if called.is_err()
                && let Some(other) = &other
            {
                other.discard(connection);
            }
            called.map(|_| other)
        });
        let other = match allowed {
            Ok(other) => other,
            Err(refused) => {
                own.discard(connection);
                return Err(refused);
            }
        };
        made.extend(&other);
        let mut open = connection.open()?;
        let subsystems = subsystems(&mut open, Some(&self.nqn))?;
        let addresses = subsystems.first().map(|s| items(&s["listen_addresses"]));
        let lines = addresses.unwrap_or_default().iter().map(|address| {
            let text = |field: &str| output::cell(address.get(field));
            let mut line = format!(
                "nvme connect -t {} -a {} -s {} -n {} --hostnqn {} --dhchap-secret '{}'",
                text("trtype").to_lowercase(),
                text("traddr"),
                text("trsvcid"),
                self.nqn,
                self.hostnqn,
                *own.secret.to_text(),
            );
            if let Some(other) = &other {
                line += &format!(" --dhchap-ctrl-secret '{}'", *other.secret.to_text());
            }
            line
        });
        let lines: Vec<String> = lines.collect();
        if connection.json {
            let files: Vec<_> = made.iter().map(|key| &key.file).collect();
            return output::json(&json!({ "files": files, "commands": lines }));
        }
        for key in made {
            output::line(&format!("key {}: {}", key.name, key.file.display()))?;
        }
        if lines.is_empty() {
            let advice =
                "no listener: add one with `nacre listener add`, then give the host the key";
            return output::line(advice);
        }
        output::line("on the host:")?;
        lines
            .iter()
            .try_for_each(|line| output::line(&format!("  {line}")))
    }
}

fn list(connection: &Connection, nqn: Option<&str>) -> Result<(), Failure> {
    let mut subsystems = subsystems(&mut connection.open()?, nqn)?;
    subsystems.retain(|subsystem| !is_discovery(subsystem));
    let facts = |subsystem: &Value| {
        json!({
            "nqn": subsystem["nqn"],
            "allow_any_host": subsystem["allow_any_host"],
            "hosts": subsystem["hosts"],
        })
    };
    if connection.json {
        return output::json(&subsystems.iter().map(facts).collect());
    }
    let rows = subsystems.iter().flat_map(|subsystem| {
        let nqn = output::cell(subsystem.get("nqn"));
        let any = (subsystem["allow_any_host"] == true)
            .then(|| vec![nqn.clone(), "any".into(), String::new()]);
        let named = items(&subsystem["hosts"]).iter().map(move |host| {
            let kinds = [
                ("dhchap_key", "dhchap"),
                ("psk", "tls"),
                ("concat", "tls by concatenation"),
            ];
            let given = kinds.iter().filter(|(field, _)| host.get(field).is_some());
            let proves: Vec<&str> = given.map(|(_, kind)| *kind).collect();
            vec![
                nqn.clone(),
                output::cell(host.get("nqn")),
                proves.join(", "),
            ]
        });
        any.into_iter().chain(named)
    });
    output::table(&["subsystem", "host", "authentication"], rows)
}
