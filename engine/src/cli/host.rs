//! `nacre host`: hosts that may connect.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::subsystem::{done, drop_nulls, is_discovery, items, some};
use super::{Connection, Failure, output};

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "A Linux host's name is in its /etc/nvme/hostnqn."
)]
pub struct HostArgs {
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
    Allow {
        /// NQN of the subsystem
        nqn: String,
        /// NQN of the host
        hostnqn: String,
        /// Only show it this namespace, created with --not-visible
        #[arg(long, conflicts_with_all = ["dhchap_key", "dhchap_ctrlr_key", "psk"])]
        nsid: Option<u32>,
        /// Name of the key that the host must prove to have (SPDK's daemon; this one has no
        /// authentication yet)
        #[arg(long, value_name = "KEY")]
        dhchap_key: Option<String>,
        /// Name of the key that the target must prove to have (likewise)
        #[arg(long, value_name = "KEY", requires = "dhchap_key")]
        dhchap_ctrlr_key: Option<String>,
        /// Name of the TLS pre-shared key (likewise)
        #[arg(long, value_name = "KEY")]
        psk: Option<String>,
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

pub fn run(args: HostArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    let (method, mut params) = match args.command {
        HostCommand::List { nqn } => return list(connection, nqn.as_deref()),
        HostCommand::Allow {
            nqn,
            hostnqn,
            nsid: Some(nsid),
            ..
        } => (
            "nvmf_ns_add_host",
            json!({ "nqn": nqn, "nsid": nsid, "host": hostnqn }),
        ),
        HostCommand::Allow {
            nqn,
            hostnqn,
            nsid: None,
            dhchap_key,
            dhchap_ctrlr_key,
            psk,
        } => {
            let params = json!({
                "nqn": nqn, "host": hostnqn,
                "dhchap_key": dhchap_key, "dhchap_ctrlr_key": dhchap_ctrlr_key, "psk": psk,
            });
            ("nvmf_subsystem_add_host", params)
        }
        HostCommand::Remove { nqn, hostnqn, nsid } => match nsid {
            Some(nsid) => (
                "nvmf_ns_remove_host",
                json!({ "nqn": nqn, "nsid": nsid, "host": hostnqn }),
            ),
            None => (
                "nvmf_subsystem_remove_host",
                json!({ "nqn": nqn, "host": hostnqn }),
            ),
        },
        HostCommand::AllowAny { nqn, off } => (
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": nqn, "allow_any_host": !off }),
        ),
    };
    drop_nulls(&mut params);
    connection.call(method, params.clone())?;
    done(connection, params)
}

fn list(connection: &Connection, nqn: Option<&str>) -> Result<(), Failure> {
    let mut subsystems = some(&mut connection.open()?, nqn)?;
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
            let proves = if host.get("dhchap_key").is_some() {
                "dhchap"
            } else {
                ""
            };
            vec![nqn.clone(), output::cell(host.get("nqn")), proves.into()]
        });
        any.into_iter().chain(named)
    });
    output::table(&["subsystem", "host", "authentication"], rows)
}
