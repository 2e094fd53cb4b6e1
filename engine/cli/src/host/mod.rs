//! `nacre host`: the hosts that may connect to a subsystem.

mod allow;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::{Value, json};

use self::allow::AllowArgs;
use super::output::done;
use super::reply::{is_discovery, items, subsystems};
use super::{Connection, Failure, output};
use nacre_engine::methods::nvmf::host::{
    AllowAnyHost, AllowAnyHostParams, RemoveHost, RemoveHostParams,
};
use nacre_engine::methods::nvmf::namespace::{NamespaceHostParams, RemoveNamespaceHost};
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
    Allow(Box<AllowArgs>),
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
        HostCommand::Allow(args) => args.run(connection),
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
