//! `nacre volume`: lists, creates, changes and deletes replicated volumes.

mod show;
mod snapshots;
mod wait;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use super::address::{self, ListenUrl};
use super::output::done;
use super::reply::items;
use super::{Connection, Failure, events, output};

use self::wait::WaitGoal;
use nacre_bdev_replica::model::{MAX_REPLICAS, SettingsPatch};
use nacre_engine::methods::bdev::nvme::paths::{GetPaths, GetPathsParams};
use nacre_engine::methods::volume::NameParams;
use nacre_engine::methods::volume::create::options::NewVolumeOptions;
use nacre_engine::methods::volume::create::{self, CreateParams, DeleteParams, RenameParams};
use nacre_engine::methods::volume::list::{GetVolume, Records};
use nacre_engine::methods::volume::on_pools::PoolReplica;
use nacre_engine::methods::volume::operate::{
    self, GrowParams, SetParams, ThawParams, VerifyParams,
};
use nacre_engine::methods::volume::publish::{self, PublishParams};
use nacre_engine::methods::volume::replicas::{
    self, AddReplicaParams, ForcedParams, ReplaceParams, ReplicaParams, ResyncParams,
};
use nacre_engine::notify::Category;
use nacre_engine::services::Engine;
use nacre_engine::services::volumes::published::AnaByTransport;
use nacre_engine_rpc::client::to_json;
use nacre_engine_rpc::{Method, NoParams};
use nacre_nvmf_wire::log::ana::AnaState;

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "docs/operate/volumes.md explains the states, and what to do about each."
)]
pub(crate) struct VolumeArgs {
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
    /// Delete an unused volume, with the lvols that it was created with; its data is lost
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
    /// Enlarge a volume, with the lvols that it was created with, or after its devices have grown
    Grow {
        /// Name of the volume
        name: String,
        /// Such as 20GiB; unless given as large as the devices allow
        #[arg(value_parser = nacre_engine_values::size::whole_mebibytes)]
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
        settings: SettingsPatch,
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
    /// Make, list and delete snapshots of volumes
    #[command(subcommand)]
    Snapshot(snapshots::SnapshotCommand),
    /// Show the events of volumes and their replicas
    Events(events::FollowArgs),
    /// List the hosts that are connected, and over which transport; and the paths to remote
    /// replicas
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
pub(crate) struct WaitArgs {
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
#[command(after_help = "Examples:
  nacre volume create vol0 disk0 disk1 disk2 --size 10GiB --min-in-sync 2
  nacre volume create vol1 --pool pool0 --pool pool1 --size 10GiB --thin
  nacre volume create vol2 --replicas 3 --size 10GiB --spread zone,rack
  nacre volume create vol3 --replicas 3 --snapshot monday
  nacre volume create vol4 --snapshot monday")]
struct CreateArgs {
    /// Name of the new volume
    name: String,
    /// Its replicas, one on each device
    #[arg(required_unless_present_any = ["pool", "replica_count", "snapshot"], num_args = 1..=MAX_REPLICAS)]
    device: Vec<String>,
    /// A replica on this pool (may be repeated), on an lvol that goes with the volume
    #[arg(long)]
    pool: Vec<String>,
    /// Such as 10GiB, whole MiB; unless given as large as the devices allow
    #[arg(long, value_parser = nacre_engine_values::size::whole_mebibytes)]
    size: Option<u64>,
    #[command(flatten)]
    options: NewVolumeOptions,
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
    listen: Vec<ListenUrl>,
    /// State of the paths over a transport, such as tcp=optimized (may be repeated) [default: hosts
    /// use RDMA first, then TCP]
    #[arg(long, value_name = "TRANSPORT=STATE", value_parser = ana_of_transport)]
    ana: Vec<(String, AnaState)>,
    /// Report no ANA states: hosts use the path that they connected first
    #[arg(long, conflicts_with = "ana")]
    no_ana: bool,
    /// In a cluster: show it on this node (may be repeated); unless given on the nodes with its
    /// replicas, then on others, at most 16
    #[arg(long, value_name = "NODE")]
    node: Vec<String>,
}

/// Parses a transport and its ANA state: `rdma=optimized`.
fn ana_of_transport(text: &str) -> Result<(String, AnaState), String> {
    let form = "write tcp=STATE or rdma=STATE";
    let (transport, state) = text.split_once('=').ok_or(form)?;
    let transport = transport.to_ascii_lowercase();
    if !["tcp", "rdma"].contains(&transport.as_str()) {
        return Err(format!("\"{transport}\" is not a transport: {form}"));
    }
    let state = AnaState::from_str(state, true).map_err(|_| {
        let all = AnaState::value_variants().iter();
        let all = all.filter_map(|state| Some(state.to_possible_value()?.get_name().to_owned()));
        format!(
            "\"{state}\" is not a state: {}",
            all.collect::<Vec<_>>().join(", ")
        )
    })?;
    Ok((transport, state))
}

pub(crate) fn run(args: VolumeArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        VolumeCommand::List => show::list(connection),
        VolumeCommand::Show { name, watch } => show::run(connection, &name, watch),
        VolumeCommand::Create(args) => {
            let mut options = args.options;
            let is_placed = options.replica_count.is_some();
            let is_thin = options.thin;
            if is_thin && !is_placed && args.pool.is_empty() {
                return Err(Failure::Usage(
                    "--thin needs --pool or --replicas".to_owned(),
                ));
            }
            let has_snapshot = options.snapshot.is_some();
            if !args.pool.is_empty() && !has_snapshot && args.size.is_none() {
                return Err(Failure::Usage("--pool needs --size".to_owned()));
            }
            if is_placed && !has_snapshot && args.size.is_none() {
                return Err(Failure::Usage("--replicas needs --size".to_owned()));
            }
            // Each replica on a named pool has its own flag.
            options.thin = is_thin && is_placed;
            let on_pool = |pool| PoolReplica {
                pool,
                size: None,
                thin: is_thin,
            };
            let params = CreateParams {
                name: args.name,
                devices: args.device,
                replicas: args.pool.into_iter().map(on_pool).collect(),
                size_mb: args.size,
                num_blocks: None,
                size: None,
                options,
            };
            change::<create::Create>(connection, &params, &params.name)
        }
        VolumeCommand::Delete { name, force } => {
            change::<create::Delete>(connection, &DeleteParams { name, force }, "")
        }
        VolumeCommand::AddReplica {
            name,
            device,
            force,
            wait,
        } => {
            let goal = WaitGoal::InSync {
                there: vec![device.clone()],
                gone: None,
            };
            let params = AddReplicaParams {
                name: name.clone(),
                device,
                force,
            };
            wait::after::<replicas::AddReplica>(connection, &params, &name, &wait, goal)
        }
        VolumeCommand::RemoveReplica(args) => {
            change::<replicas::RemoveReplica>(connection, &forced(args), "")
        }
        VolumeCommand::Offline(args) => change::<replicas::Offline>(connection, &forced(args), ""),
        VolumeCommand::Online {
            name,
            replica,
            wait,
        } => {
            let goal = WaitGoal::InSync {
                there: vec![replica.clone()],
                gone: None,
            };
            let params = ReplicaParams {
                name: name.clone(),
                replica,
            };
            wait::after::<replicas::Online>(connection, &params, &name, &wait, goal)
        }
        VolumeCommand::Replace(args) => replace::<replicas::Replace>(connection, args),
        VolumeCommand::Move(args) => replace::<replicas::Move>(connection, args),
        VolumeCommand::Resync {
            name,
            replica,
            full,
            wait,
        } => {
            let goal = WaitGoal::InSync {
                there: replica.iter().cloned().collect(),
                gone: None,
            };
            let params = ResyncParams {
                name: name.clone(),
                replica,
                full,
            };
            wait::after::<replicas::Resync>(connection, &params, &name, &wait, goal)
        }
        VolumeCommand::Verify {
            name,
            repair,
            stop,
            wait,
        } => {
            let params = VerifyParams {
                name: name.clone(),
                repair,
                stop,
            };
            wait::after::<operate::Verify>(connection, &params, &name, &wait, WaitGoal::Verified)
        }
        VolumeCommand::Grow { name, size } => {
            let now = connection.call_for_json::<operate::Grow>(&GrowParams {
                name,
                size_mb: size,
                num_blocks: None,
                size: None,
            })?;
            if connection.json {
                output::json(&now)
            } else {
                output::line(&show::size(&now))
            }
        }
        VolumeCommand::Rename { name, new_name } => {
            let params = RenameParams { name, new_name };
            connection.call_for_json::<create::Rename>(&params)?;
            done(connection, to_json(&params))
        }
        VolumeCommand::Set { name, settings } => {
            if settings == SettingsPatch::default() {
                return Err(Failure::Usage(
                    "nothing to set: see nacre volume set --help".into(),
                ));
            }
            change::<operate::Set>(connection, &SetParams { name, settings }, "")
        }
        VolumeCommand::Publish(args) => make_available(connection, args),
        VolumeCommand::Unpublish { name } => {
            let params = NameParams { name };
            connection.call_for_json::<publish::Unpublish>(&params)?;
            done(connection, to_json(&params))
        }
        VolumeCommand::Thaw {
            name,
            force,
            replica,
        } => {
            let params = ThawParams {
                name,
                force,
                replica,
            };
            change::<operate::Thaw>(connection, &params, "")
        }
        VolumeCommand::FailIo { name } => {
            change::<operate::FailIo>(connection, &NameParams { name }, "")
        }
        VolumeCommand::Snapshot(command) => snapshots::run(connection, command),
        VolumeCommand::Events(follow) => {
            events::follow(connection, &follow, &[Category::Volume, Category::Replica])
        }
        VolumeCommand::Connections { name } => connections(connection, name),
        VolumeCommand::StoreDump { path } => dump(connection, path),
    }
}

/// The hosts of a volume, and the paths to its remote replicas. Programs get the hosts;
/// `remote_get_paths` has the paths.
fn connections(connection: &Connection, name: String) -> Result<(), Failure> {
    let params = NameParams { name };
    let hosts = connection.call_for_json::<publish::GetConnections>(&params)?;
    if connection.json {
        return output::json(&hosts);
    }
    output::columns(
        &hosts,
        &[
            ("host", "/host"),
            ("transport", "/transport"),
            ("queues", "/queues"),
            ("from", "/peer_address"),
            ("to", "/listen_address"),
            ("tls", "/tls"),
            ("psk", "/psk"),
            ("dhchap key", "/dhchap_key"),
            ("admitted", "/admitted"),
            ("subsystem", "/nqn"),
        ],
    )?;
    let volume = connection.call_for_json::<GetVolume>(&params)?;
    let replicas = items(&volume["replicas"]);
    let all = connection.call_for_json::<GetPaths>(&GetPathsParams::default())?;
    let is_ours = |path: &&Value| replicas.iter().any(|one| one["device"] == path["bdev"]);
    let paths: Vec<Value> = items(&all).iter().filter(is_ours).cloned().collect();
    if paths.is_empty() {
        return Ok(());
    }
    output::line("")?;
    output::columns(
        &paths.into(),
        &[
            ("replica", "/bdev"),
            ("transport", "/trid/trtype"),
            ("address", "/trid/traddr"),
            ("port", "/trid/trsvcid"),
            ("state", "/state"),
            ("ana", "/ana_state"),
            ("used", "/current"),
            ("tls", "/tls"),
            ("psk", "/psk"),
            ("dhchap key", "/dhchap_key"),
            ("reads", "/reads"),
            ("writes", "/writes"),
            ("resent", "/resent"),
            ("why", "/why"),
        ],
    )
}

/// Makes a call; people see `said`, programs the reply.
fn change<M: Method<Engine>>(
    connection: &Connection,
    params: &M::Params,
    said: &str,
) -> Result<(), Failure>
where
    M::Params: Serialize,
{
    let answer = connection.call_for_json::<M>(params)?;
    match connection.json {
        true => output::json(&answer),
        false if said.is_empty() => Ok(()),
        false => output::line(said),
    }
}

fn forced(args: ForcedArgs) -> ForcedParams {
    ForcedParams {
        name: args.name,
        replica: args.replica,
        force: args.force,
    }
}

fn replace<M: Method<Engine, Params = ReplaceParams>>(
    connection: &Connection,
    args: ReplaceArgs,
) -> Result<(), Failure> {
    let goal = WaitGoal::InSync {
        there: vec![args.device.clone()],
        gone: Some(args.replica.clone()),
    };
    let params = ReplaceParams {
        name: args.name.clone(),
        replica: args.replica,
        device: args.device,
        force: args.force,
    };
    wait::after::<M>(connection, &params, &args.name, &args.wait, goal)
}

fn make_available(connection: &Connection, args: PublishArgs) -> Result<(), Failure> {
    let listener = |listen: &ListenUrl| {
        let address = listen.params();
        publish::ListenAddress {
            trtype: address.trtype,
            adrfam: address.adrfam,
            traddr: address.traddr,
            trsvcid: address.trsvcid.unwrap_or_default(),
        }
    };
    let ana = args.ana.iter().fold(None, |ana, (transport, state)| {
        let mut ana = ana.unwrap_or_else(AnaByTransport::default);
        match transport.as_str() {
            "rdma" => ana.rdma = Some(*state),
            _ => ana.tcp = Some(*state),
        }
        Some(ana)
    });
    let answer = connection.call_for_json::<publish::Publish>(&PublishParams {
        name: args.name,
        nqn: args.nqn,
        hosts: args.host,
        allow_any_host: args.allow_any_host,
        listeners: args.listen.iter().map(listener).collect(),
        ana_reporting: !args.no_ana,
        ana,
        nodes: args.node,
        adopt: false,
    })?;
    if connection.json {
        return output::json(&answer);
    }
    let nqn = answer["nqn"].as_str().unwrap_or_default();
    output::line(nqn)?;
    let addresses = items(&answer["listen_addresses"]);
    for address in addresses {
        match ListenUrl::from_value(address) {
            Some(address) => output::line(&address.connect_line(nqn))?,
            None => output::line(&address::describe(address))?,
        }
    }
    if addresses.is_empty() {
        eprintln!("no host can connect yet: `nacre listener add {nqn} tcp://ADDRESS`");
    }
    Ok(())
}

/// Prints the records of the daemon, or of a file that no daemon has open.
fn dump(connection: &Connection, path: Option<PathBuf>) -> Result<(), Failure> {
    let answer = match path {
        None => connection.call_for_json::<Records>(&NoParams {})?,
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
    let place = match (answer["etcd"].as_str(), answer["file"].as_str()) {
        (Some(prefix), _) => format!("etcd {prefix}"),
        (None, file) => file.unwrap_or("memory").to_owned(),
    };
    output::line(&format!("in {place}\n"))?;
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
