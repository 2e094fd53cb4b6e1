//! `nacre subsystem`: lists, creates, changes and deletes subsystems.

mod connections;

use clap::{Args, Subcommand};
use nacre_nvmf::subsystems::MAX_CNTLID;
use serde_json::{Value, json};
use uuid::Uuid;

use super::address::{self, ListenUrl};
use super::output::done;
use super::reply::{is_discovery, items, subsystems};
use super::{Connection, Failure, listener, output, record};
use nacre_engine::methods::nvmf::host::{AddHost, AddHostParams};
use nacre_engine::methods::nvmf::listener::AddListenerParams;
use nacre_engine::methods::nvmf::namespace::{self, NamespaceParams};
use nacre_engine::methods::nvmf::reservation;
use nacre_engine::methods::nvmf::subsystem::{
    CreateSubsystem, CreateSubsystemParams, DeleteSubsystem, DeleteSubsystemParams, GetSubsystems,
    GetSubsystemsParams,
};
use nacre_engine_rpc::client::{Client, to_json};
use nacre_nvmf::subsystems::{ControllerModel, SubsystemOptions};

#[derive(Debug, Args)]
#[command(mut_args = |arg| arg.global(true))]
pub(crate) struct SubsystemArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: SubsystemCommand,
}

#[derive(Debug, Subcommand)]
enum SubsystemCommand {
    /// List the subsystems
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about one
    Show {
        /// NQN of the subsystem
        nqn: String,
    },
    /// Create one, and print its name
    Create(CreateArgs),
    /// Delete one: its hosts are disconnected, its devices stay
    #[command(visible_alias = "rm")]
    Delete {
        /// NQN of the subsystem
        nqn: String,
    },
    /// Add a block device as a namespace, and print its namespace identifier
    AddNamespace(AddNamespaceArgs),
    /// Remove a namespace; its device stays
    RemoveNamespace {
        /// NQN of the subsystem
        nqn: String,
        /// Id of the namespace
        nsid: u32,
    },
    /// Remove the reservation of a namespace and every registration: for hosts that are gone
    #[command(
        after_help = "From then on every host may write. Refused while a host that holds the reservation is connected, without\n\
                      --force. In a cluster, on the node that serves the volume.\n\n\
                      Example: nacre subsystem clear-reservation nqn.2026-01.com.example:disk 1"
    )]
    ClearReservation {
        /// NQN of the subsystem
        nqn: String,
        /// Id of the namespace
        nsid: u32,
        /// Also while a host that holds it is connected
        #[arg(long)]
        force: bool,
    },
    /// List the connected hosts, and their connections
    Connections {
        /// All subsystems unless given
        nqn: Option<String>,
    },
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example: nacre subsystem create nqn.2026-01.com.example:disk --allow-any-host \\\n             --namespace ram0 --listen tcp://127.0.0.1:4420"
)]
struct CreateArgs {
    /// nqn.2014-08.org.nvmexpress:uuid:… with a random identifier unless given
    nqn: Option<String>,
    /// At most 20 characters; derived from the name unless given
    #[arg(long)]
    serial: Option<String>,
    /// At most 40 characters
    #[arg(long)]
    model: Option<String>,
    /// Most namespaces
    #[arg(long, value_name = "N")]
    max_namespaces: Option<u32>,
    /// Allow every host; otherwise only those named with `nacre host allow`
    #[arg(short = 'a', long)]
    allow_any_host: bool,
    /// Report the state of each path to hosts (ANA): see `nacre listener set-ana`
    #[arg(long)]
    ana: bool,
    /// static: hosts ask for a controller by its id, or for any, and keep it; Linux hosts can only
    /// use dynamic ones
    #[arg(long, value_enum, default_value_t)]
    controller_model: ControllerModel,
    /// Range of controller ids, within 1-65519
    #[arg(long, value_name = "MIN-MAX", value_parser = parse_cntlids)]
    cntlids: Option<(u16, u16)>,
    /// Allow this host (may be repeated)
    #[arg(long, value_name = "HOSTNQN")]
    host: Vec<String>,
    /// Add this block device as a namespace (may be repeated)
    #[arg(long, value_name = "BDEV")]
    namespace: Vec<String>,
    /// Listen there, such as tcp://192.0.2.1:4420 (may be repeated)
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<ListenUrl>,
}

#[derive(Debug, Args)]
struct AddNamespaceArgs {
    /// NQN of the subsystem
    nqn: String,
    /// Bdev that becomes the namespace
    bdev: String,
    /// Unless given, the smallest free one
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..0xffff_ffff))]
    nsid: Option<u32>,
    /// Unless given, the device's
    #[arg(long)]
    uuid: Option<Uuid>,
    /// 32 hexadecimal digits
    #[arg(long)]
    nguid: Option<String>,
    /// 16 hexadecimal digits
    #[arg(long)]
    eui64: Option<String>,
    /// ANA group
    #[arg(long, value_name = "GROUP")]
    ana_group: Option<u32>,
    /// Only for hosts named by `nacre host allow --nsid`
    #[arg(long)]
    not_visible: bool,
}

pub(crate) fn run(args: SubsystemArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        SubsystemCommand::List => list(connection),
        SubsystemCommand::Show { nqn } => {
            let subsystem = one(&mut connection.open()?, &nqn)?;
            if connection.json {
                output::json(&subsystem)
            } else {
                record::print(&subsystem)
            }
        }
        SubsystemCommand::Create(args) => create(connection, args),
        SubsystemCommand::Delete { nqn } => {
            let params = DeleteSubsystemParams {
                nqn,
                tgt_name: None,
            };
            connection.call_for_json::<DeleteSubsystem>(&params)?;
            done(connection, to_json(&params))
        }
        SubsystemCommand::AddNamespace(args) => {
            let params = namespace::AddNamespaceParams {
                nqn: args.nqn,
                namespace: NamespaceParams {
                    bdev_name: args.bdev,
                    nsid: args.nsid.unwrap_or_default(),
                    uuid: args.uuid,
                    nguid: args.nguid,
                    eui64: args.eui64,
                    anagrpid: args.ana_group.unwrap_or_default(),
                    no_auto_visible: args.not_visible,
                    ..NamespaceParams::default()
                },
                tgt_name: None,
            };
            let nsid = connection.call_for_json::<namespace::AddNamespace>(&params)?;
            if connection.json {
                output::json(&json!({ "nqn": params.nqn, "nsid": nsid }))
            } else {
                output::line(&nsid.to_string())
            }
        }
        SubsystemCommand::RemoveNamespace { nqn, nsid } => {
            let params = namespace::RemoveParams {
                nqn,
                nsid,
                tgt_name: None,
            };
            connection.call_for_json::<namespace::RemoveNamespace>(&params)?;
            done(connection, to_json(&params))
        }
        SubsystemCommand::ClearReservation { nqn, nsid, force } => {
            let params = reservation::ClearParams {
                nqn,
                nsid,
                force,
                generation: None,
                tgt_name: None,
            };
            let cleared = connection.call_for_json::<reservation::Clear>(&params)?;
            if connection.json {
                return output::json(&cleared);
            }
            let count = items(&cleared["registrants"]).len() as u64;
            let kind = cleared["type"].as_str().unwrap_or("no reservation");
            output::line(&format!(
                "cleared: {kind}, {}",
                output::count(count, "registration")
            ))
        }
        SubsystemCommand::Connections { nqn } => connections::run(connection, nqn.as_deref()),
    }
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let subsystems = connection.call_for_json::<GetSubsystems>(&GetSubsystemsParams::default())?;
    if connection.json {
        return output::json(&subsystems);
    }
    let rows = items(&subsystems).iter().map(|subsystem| {
        let listeners: Vec<String> = items(&subsystem["listen_addresses"])
            .iter()
            .map(address::describe)
            .collect();
        let hosts = if subsystem["allow_any_host"] == true {
            "any".into()
        } else {
            items(&subsystem["hosts"]).len().to_string()
        };
        let namespaces = if is_discovery(subsystem) {
            String::new()
        } else {
            items(&subsystem["namespaces"]).len().to_string()
        };
        vec![
            output::cell(subsystem.get("nqn")),
            namespaces,
            hosts,
            output::cell(subsystem.get("serial_number")),
            listeners.join(" "),
        ]
    });
    output::table(&["nqn", "namespaces", "hosts", "serial", "listeners"], rows)
}

fn create(connection: &Connection, args: CreateArgs) -> Result<(), Failure> {
    let nqn = args
        .nqn
        .unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{}", Uuid::new_v4()));
    let mut client = connection.open()?;
    let params = CreateSubsystemParams {
        nqn: nqn.clone(),
        max_namespaces: args.max_namespaces.unwrap_or_default(),
        options: SubsystemOptions {
            serial_number: Some(args.serial.unwrap_or_else(|| serial_of(&nqn))),
            model_number: args.model,
            allow_any_host: Some(args.allow_any_host),
            ana_reporting: args.ana.then_some(true),
            // SPDK's daemon, which may be the one that is called, does not know this one.
            controller_model: Some(args.controller_model).filter(|m| *m != Default::default()),
            min_cntlid: args.cntlids.map(|(min, _)| min),
            max_cntlid: args.cntlids.map(|(_, max)| max),
        },
        ..CreateSubsystemParams::default()
    };
    client.call_for_json::<CreateSubsystem, _>(&params)?;
    // All or nothing: a failure removes the subsystem again.
    let (namespaces, listeners) =
        furnish(&mut client, &nqn, &args.namespace, &args.host, &args.listen).inspect_err(
            |_| {
                let params = DeleteSubsystemParams {
                    nqn: nqn.clone(),
                    tgt_name: None,
                };
                let _ = client.call_for_json::<DeleteSubsystem, _>(&params);
            },
        )?;
    if connection.json {
        return output::json(
            &json!({ "nqn": nqn, "namespaces": namespaces, "listeners": listeners }),
        );
    }
    output::line(&nqn)?;
    // For Linux hosts, which a subsystem with static controllers refuses.
    let connects = args.controller_model == ControllerModel::Dynamic;
    args.listen
        .iter()
        .filter(|_| connects)
        .try_for_each(|address| output::line(&address.connect_line(&nqn)))
}

/// `3-16`, or one.
fn parse_cntlids(text: &str) -> Result<(u16, u16), String> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse::<u16>().ok();
    match (number(min), number(max)) {
        (Some(min), Some(max)) if 0 < min && min <= max && max <= MAX_CNTLID => Ok((min, max)),
        _ => Err(format!("write MIN-MAX, within 1-{MAX_CNTLID}")),
    }
}

fn furnish(
    client: &mut Client,
    nqn: &str,
    bdevs: &[String],
    hosts: &[String],
    addresses: &[ListenUrl],
) -> Result<(Vec<Value>, Vec<String>), Failure> {
    let mut namespaces = Vec::new();
    for bdev in bdevs {
        let params = namespace::AddNamespaceParams {
            nqn: nqn.to_owned(),
            namespace: NamespaceParams {
                bdev_name: bdev.clone(),
                ..NamespaceParams::default()
            },
            tgt_name: None,
        };
        let nsid = client.call::<namespace::AddNamespace, _>(&params)?;
        namespaces.push(json!({ "nsid": nsid, "bdev_name": bdev }));
    }
    for host in hosts {
        client.call_for_json::<AddHost, _>(&AddHostParams {
            nqn: nqn.to_owned(),
            host: host.clone(),
            ..AddHostParams::default()
        })?;
    }
    // Hosts connect as soon as a listener exists: add listeners last.
    for address in addresses {
        let params = AddListenerParams {
            nqn: nqn.to_owned(),
            listen_address: address.params(),
            ..AddListenerParams::default()
        };
        listener::add(client, &params)?;
    }
    Ok((
        namespaces,
        addresses.iter().map(ToString::to_string).collect(),
    ))
}

/// The same for the same name, on every target: hosts distinguish subsystems by it. Identify
/// Controller has room for 20 characters (Base 2.1, figure 328).
fn serial_of(nqn: &str) -> String {
    let hash = Uuid::new_v5(&Uuid::NAMESPACE_URL, nqn.as_bytes())
        .simple()
        .to_string();
    format!("NACRE{}", hash[..15].to_uppercase())
}

/// A subsystem by its name.
fn one(client: &mut Client, nqn: &str) -> Result<Value, Failure> {
    let found = subsystems(client, Some(nqn))?;
    let missing = || Failure::Failed(anyhow::anyhow!("the daemon returned no data for {nqn}"));
    found.into_iter().next().ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_fit_and_stay() {
        let serial = serial_of("nqn.2026-01.com.example:disk");
        assert_eq!(serial, serial_of("nqn.2026-01.com.example:disk"));
        assert_ne!(serial, serial_of("nqn.2026-01.com.example:disc"));
        assert!(serial.len() == 20 && serial.is_ascii(), "{serial}");
    }

    #[test]
    fn ranges_of_controllers() {
        assert_eq!(parse_cntlids("3-16"), Ok((3, 16)));
        assert_eq!(parse_cntlids("1 - 65519"), Ok((1, 65_519)));
        assert_eq!(parse_cntlids("7"), Ok((7, 7)));
        for text in ["", "-", "0-3", "5-4", "1-65520", "1-", "a"] {
            let refused = parse_cntlids(text).unwrap_err();
            assert!(refused.contains("1-65519"), "{text}: {refused}");
        }
    }
}
