//! `nacre volume`: replicated volumes.

mod show;
mod wait;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use uuid::Uuid;

use super::address::{self, ListenAddress};
use super::listener::AnaState;
use super::subsystem::{done, drop_nulls, items};
use super::{Connection, Failure, events, output};

use self::wait::Until;
use crate::methods::volume::SettingsParams;

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "docs/operate/volumes.md explains the states, and what to do about each."
)]
pub struct VolumeArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// List the volumes
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about one: its replicas, copying, and why a replica is out
    Show {
        /// Name of the volume
        name: String,
        /// Refresh every second
        #[arg(long)]
        watch: bool,
    },
    /// Create one, and print its name
    Create(CreateArgs),
    /// Delete an unused volume; its data is lost
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the volume
        name: String,
        /// The name once more, to delete it although some of its replicas are unreachable
        #[arg(long, value_name = "NAME")]
        force: Option<String>,
    },
    /// Add a replica, which is filled while the volume is in use
    AddReplica {
        /// Name of the volume
        name: String,
        /// Device of the new replica
        device: String,
        /// Accept a device with data on it, which is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Take a replica out for good; its device is free
    RemoveReplica(ForcedArgs),
    /// Stop using a replica; missed writes are tracked
    Offline(ForcedArgs),
    /// Use a replica again that was taken offline
    Online {
        /// Name of the volume
        name: String,
        /// Its device or its id
        replica: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Replace one replica by a new one
    Replace(ReplaceArgs),
    /// Move a replica that is in sync to another device; redundancy is never reduced
    Move(ReplaceArgs),
    /// Try now to bring replicas in sync
    Resync {
        /// Name of the volume
        name: String,
        /// Only this one, by its device or its id
        replica: Option<String>,
        /// Copy everything, not only the regions known to differ
        #[arg(long, requires = "replica")]
        full: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Compare the replicas while the volume is in use
    Verify {
        /// Name of the volume
        name: String,
        /// Make them equal where they differ
        #[arg(long)]
        repair: bool,
        /// Stop the verification that is running
        #[arg(long, conflicts_with_all = ["repair", "wait"])]
        stop: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Enlarge a volume, after its devices have grown
    Grow {
        /// Name of the volume
        name: String,
        /// Such as 20GiB; unless given as large as the devices allow
        #[arg(value_parser = crate::values::size::whole_mebibytes)]
        size: Option<u64>,
    },
    /// Rename one; hosts are not affected
    Rename {
        /// Name of the volume
        name: String,
        /// Its new name
        new_name: String,
    },
    /// Change settings, live
    Set {
        /// Name of the volume
        name: String,
        #[command(flatten)]
        settings: SettingsParams,
    },
    /// Make a volume available to hosts, and print their connect commands
    Publish(PublishArgs),
    /// Stop serving a volume to hosts
    Unpublish {
        /// Name of the volume
        name: String,
    },
    /// Have a frozen volume serve again from the replicas that are present; ends fail-io
    Thaw {
        /// Name of the volume
        name: String,
        /// The name once more, to serve from a replica that misses acknowledged writes
        #[arg(long, value_name = "NAME")]
        force: Option<String>,
        /// The replica to serve from, by its device or its id; unless given the one that left last
        #[arg(long, requires = "force")]
        replica: Option<String>,
    },
    /// Fail waiting and new I/O of a volume, until thaw
    FailIo {
        /// Name of the volume
        name: String,
    },
    /// Show the events of volumes and their replicas
    Events(events::FollowArgs),
    /// List the hosts that are connected, and over which transport
    Connections {
        /// Name of the volume
        name: String,
    },
    /// Show the records of the volume store: which replicas are in sync, in which epoch
    StoreDump {
        /// A store's file that no daemon uses, or its folder; unless given, the daemon is called
        path: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Wait until it is done, and show the progress
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Args)]
struct ForcedArgs {
    /// Name of the volume
    name: String,
    /// Its device or its id
    replica: String,
    /// The volume's name once more, to give up the last good replica
    #[arg(long, value_name = "NAME")]
    force: Option<String>,
}

#[derive(Debug, Args)]
struct ReplaceArgs {
    /// Name of the volume
    name: String,
    /// The replica to remove, by its device or its id
    replica: String,
    /// The device of the new one
    device: String,
    /// Accept a device with data on it, which is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example: nacre volume create vol0 disk0 disk1 disk2 --size 10GiB --min-in-sync 2"
)]
struct CreateArgs {
    /// Name of the new volume
    name: String,
    /// Its replicas, one on each device
    #[arg(required = true, num_args = 1..=5)]
    device: Vec<String>,
    /// Such as 10GiB, whole MiB; unless given as large as the devices allow
    #[arg(long, value_parser = crate::values::size::whole_mebibytes)]
    size: Option<u64>,
    /// Random unless given
    #[arg(long)]
    uuid: Option<Uuid>,
    /// Accept devices with data on them, which is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    settings: SettingsParams,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example: nacre volume publish vol0 --allow-any-host --listen tcp://192.0.2.1:4420"
)]
struct PublishArgs {
    /// Name of the volume
    name: String,
    /// Of the subsystem; nqn.2025-01.io.nacre:NAME unless given
    #[arg(long)]
    nqn: Option<String>,
    /// Allow this host (may be repeated)
    #[arg(long, value_name = "HOSTNQN")]
    host: Vec<String>,
    /// Allow every host
    #[arg(short = 'a', long)]
    allow_any_host: bool,
    /// Listen there (may be repeated); unless given on every listener of the configuration file
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<ListenAddress>,
    /// State of the paths over a transport, such as tcp=optimized (may be repeated) [default: hosts
    /// use RDMA first, then TCP]
    #[arg(long, value_name = "TRANSPORT=STATE", value_parser = ana_of_transport)]
    ana: Vec<(String, AnaState)>,
    /// Report no ANA states: hosts use the path that they connected first
    #[arg(long, conflicts_with = "ana")]
    no_ana: bool,
}

/// `rdma=optimized`.
fn ana_of_transport(text: &str) -> Result<(String, AnaState), String> {
    let form = "write tcp=STATE or rdma=STATE";
    let (transport, state) = text.split_once('=').ok_or(form)?;
    let transport = transport.to_ascii_lowercase();
    if !["tcp", "rdma"].contains(&transport.as_str()) {
        return Err(format!("\"{transport}\" is not a transport: {form}"));
    }
    let state = AnaState::from_str(state, true).map_err(|_| {
        let all = AnaState::value_variants().iter().map(|s| s.name());
        format!(
            "\"{state}\" is not a state: {}",
            all.collect::<Vec<_>>().join(", ")
        )
    })?;
    Ok((transport, state))
}

pub fn run(args: VolumeArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    let change = |method: &str, mut params: Value, said: &str| {
        drop_nulls(&mut params);
        let answer = connection.call(method, params)?;
        match connection.json {
            true => output::json(&answer),
            false if said.is_empty() => Ok(()),
            false => output::line(said),
        }
    };
    match args.command {
        VolumeCommand::List => show::list(connection),
        VolumeCommand::Show { name, watch } => show::run(connection, &name, watch),
        VolumeCommand::Create(args) => {
            let params = json!({
                "name": args.name, "devices": args.device, "size_mb": args.size, "uuid": args.uuid,
                "settings": args.settings, "force": args.force.then_some(true),
            });
            change("volume_create", params, &args.name)
        }
        VolumeCommand::Delete { name, force } => {
            let params = json!({ "name": name, "force": force });
            change("volume_delete", params, "")
        }
        VolumeCommand::AddReplica {
            name,
            device,
            force,
            wait,
        } => {
            let params = json!({ "name": name, "device": device, "force": force.then_some(true) });
            let until = Until::InSync {
                there: vec![device],
                gone: None,
            };
            wait::after(
                connection,
                "volume_add_replica",
                params,
                &name,
                &wait,
                until,
            )
        }
        VolumeCommand::RemoveReplica(args) => change("volume_remove_replica", forced(&args), ""),
        VolumeCommand::Offline(args) => change("volume_offline_replica", forced(&args), ""),
        VolumeCommand::Online {
            name,
            replica,
            wait,
        } => {
            let params = json!({ "name": name, "replica": replica });
            let until = Until::InSync {
                there: vec![replica],
                gone: None,
            };
            let method = "volume_online_replica";
            wait::after(connection, method, params, &name, &wait, until)
        }
        VolumeCommand::Replace(args) => replace(connection, "volume_replace_replica", args),
        VolumeCommand::Move(args) => replace(connection, "volume_move_replica", args),
        VolumeCommand::Resync {
            name,
            replica,
            full,
            wait,
        } => {
            let params = json!({ "name": name, "replica": replica, "full": full.then_some(true) });
            let until = Until::InSync {
                there: replica.into_iter().collect(),
                gone: None,
            };
            wait::after(connection, "volume_resync", params, &name, &wait, until)
        }
        VolumeCommand::Verify {
            name,
            repair,
            stop,
            wait,
        } => {
            let params = json!({
                "name": name, "repair": repair.then_some(true), "stop": stop.then_some(true),
            });
            wait::after(
                connection,
                "volume_verify",
                params,
                &name,
                &wait,
                Until::Verified,
            )
        }
        VolumeCommand::Grow { name, size } => {
            let mut params = json!({ "name": name, "size_mb": size });
            drop_nulls(&mut params);
            let now = connection.call("volume_grow", params)?;
            if connection.json {
                output::json(&now)
            } else {
                output::line(&show::size(&now))
            }
        }
        VolumeCommand::Rename { name, new_name } => {
            let params = json!({ "name": name, "new_name": new_name });
            connection.call("volume_rename", params.clone())?;
            done(connection, params)
        }
        VolumeCommand::Set { name, settings } => {
            let settings = json!(settings);
            if settings.as_object().is_some_and(serde_json::Map::is_empty) {
                return Err(Failure::Usage(
                    "nothing to set: see nacre volume set --help".into(),
                ));
            }
            let params = json!({ "name": name, "settings": settings });
            change("volume_set", params, "")
        }
        VolumeCommand::Publish(args) => publish(connection, args),
        VolumeCommand::Unpublish { name } => {
            connection.call("volume_unpublish", json!({ "name": name }))?;
            done(connection, json!({ "name": name }))
        }
        VolumeCommand::Thaw {
            name,
            force,
            replica,
        } => {
            let params = json!({ "name": name, "force": force, "replica": replica });
            change("volume_thaw", params, "")
        }
        VolumeCommand::FailIo { name } => change("volume_fail_io", json!({ "name": name }), ""),
        VolumeCommand::Events(follow) => {
            events::follow(connection, &follow, &["volume", "replica"])
        }
        VolumeCommand::Connections { name } => {
            let hosts = connection.call("volume_get_connections", json!({ "name": name }))?;
            if connection.json {
                output::json(&hosts)
            } else {
                output::columns(
                    &hosts,
                    &[
                        ("host", "/host"),
                        ("transport", "/transport"),
                        ("queues", "/queues"),
                        ("from", "/peer_address"),
                        ("to", "/listen_address"),
                        ("admitted", "/admitted"),
                        ("subsystem", "/nqn"),
                    ],
                )
            }
        }
        VolumeCommand::StoreDump { path } => dump(connection, path),
    }
}

fn forced(args: &ForcedArgs) -> Value {
    json!({ "name": args.name, "replica": args.replica, "force": args.force })
}

fn replace(connection: &Connection, method: &str, args: ReplaceArgs) -> Result<(), Failure> {
    let params = json!({
        "name": args.name, "replica": args.replica, "device": args.device,
        "force": args.force.then_some(true),
    });
    let until = Until::InSync {
        there: vec![args.device],
        gone: Some(args.replica),
    };
    wait::after(connection, method, params, &args.name, &args.wait, until)
}

fn publish(connection: &Connection, args: PublishArgs) -> Result<(), Failure> {
    let listeners: Vec<Value> = args.listen.iter().map(ListenAddress::params).collect();
    let mut params = json!({
        "name": args.name, "nqn": args.nqn, "hosts": args.host,
        "allow_any_host": args.allow_any_host, "listeners": listeners,
        "ana_reporting": args.no_ana.then_some(false),
    });
    for (transport, state) in &args.ana {
        params["ana"][transport] = state.word().into();
    }
    drop_nulls(&mut params);
    let answer = connection.call("volume_publish", params)?;
    if connection.json {
        return output::json(&answer);
    }
    let nqn = answer["nqn"].as_str().unwrap_or_default();
    output::line(nqn)?;
    let addresses = items(&answer["listen_addresses"]);
    for address in addresses {
        match ListenAddress::from_value(address) {
            Some(address) => output::line(&address.connect_line(nqn))?,
            None => output::line(&address::describe(address))?,
        }
    }
    if addresses.is_empty() {
        eprintln!("no host can connect yet: `nacre listener add {nqn} tcp://ADDRESS`");
    }
    Ok(())
}

/// From the daemon, or from a file that no daemon has open.
fn dump(connection: &Connection, path: Option<PathBuf>) -> Result<(), Failure> {
    let answer = match path {
        None => connection.call("volume_get_records", Value::Null)?,
        Some(path) => {
            let file = if path.is_dir() {
                path.join(nacre_bdev_replica::store::FILE)
            } else {
                path
            };
            nacre_bdev_replica::store::dump(&file).map_err(anyhow::Error::from)?
        }
    };
    if connection.json {
        return output::json(&answer);
    }
    let file = answer["file"].as_str().unwrap_or("memory");
    output::line(&format!("in {file}\n"))?;
    let mut rows = Vec::new();
    for volume in items(&answer["volumes"]) {
        for replica in items(&volume["replicas"]) {
            let text = |value: &Value| output::cell(Some(value));
            let state = &replica["state"];
            let offline = if replica["offline"] == true {
                ", offline"
            } else {
                ""
            };
            rows.push(vec![
                text(&volume["name"]),
                text(&volume["epoch"]),
                text(&volume["serving"]),
                text(&volume["revision"]),
                text(&replica["slot"]),
                text(&replica["device"]),
                format!("{}{offline}", text(&state["state"])),
                text(&replica["id"]),
                text(&replica["why"]),
            ]);
        }
    }
    output::table(
        &[
            "volume", "epoch", "serving", "revision", "slot", "device", "state", "replica", "why",
        ],
        rows,
    )?;
    for broken in items(&answer["damaged"]) {
        output::line(&format!(
            "record {} is damaged: {}",
            broken["position"],
            output::cell(broken.get("error"))
        ))?;
    }
    Ok(())
}
