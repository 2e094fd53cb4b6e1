//! `nacre bdev create`: creates a block device, with one subcommand per module.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, Subcommand};
use nacre_bdev::delay;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::super::{Connection, Failure, absolute, output};
use nacre_engine::bdev_modules::malloc::{MallocCreateParams, RamDisk};
use nacre_engine::bdev_modules::new_bdev::NewBdevOptions;
use nacre_engine::bdev_modules::null::{NullCreateParams, NullDisk};
use nacre_engine::bdev_modules::{self, DELAY, MODULES, ModuleEntry};
use nacre_engine::config::settings::DEFAULT_BLOCK;
use nacre_engine::methods::bdev::file::{AioCreate, AioCreateParams, NewFileOptions};
use nacre_engine::methods::bdev::list::{GetBdevs, GetBdevsParams};
use nacre_engine::methods::bdev::modules::CreateModule;
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::to_json;
use nacre_engine_values::size;

#[derive(Debug, Subcommand)]
pub(super) enum Kind {
    /// A RAM disk
    Malloc {
        /// Malloc0, Malloc1, … unless given
        name: Option<String>,
        #[command(flatten)]
        capacity: Capacity,
        #[command(flatten)]
        identity: Identity,
    },
    /// A device that accepts every write and stores nothing
    Null {
        /// Name of the new bdev
        name: String,
        #[command(flatten)]
        capacity: Capacity,
        #[command(flatten)]
        identity: Identity,
    },
    /// A file or block device
    File {
        /// Name of the new bdev
        name: String,
        /// Path of the file or block device
        path: PathBuf,
        /// Create the file with this size if it does not exist
        #[arg(long, value_parser = size::parse_bytes)]
        size: Option<u64>,
        /// Block size; unless given, one that suits the file
        #[arg(long, value_name = "BYTES", value_parser = size::parse_bytes)]
        block_size: Option<u64>,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        /// Offer neither deallocation nor writing zeroes, as for files that must stay allocated
        #[arg(long)]
        no_unmap: bool,
        #[command(flatten)]
        identity: Identity,
    },
    /// A slower device on top of another
    Delay {
        /// Name of the new bdev
        name: String,
        /// Bdev whose I/O is delayed
        base: String,
        /// Added latency of reads, such as 200us
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::parse, default_value = "0s")]
        read: Duration,
        /// Added latency of one read in a hundred; unless given, as for the others
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::parse)]
        read_p99: Option<Duration>,
        /// Added latency of writes
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::parse, default_value = "0s")]
        write: Duration,
        /// Added latency of one write in a hundred; unless given, as for the others
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::parse)]
        write_p99: Option<Duration>,
        #[command(flatten)]
        identity: Identity,
    },
    #[command(flatten)]
    Module(ModuleKind),
}

/// A kind of device whose arguments are the parameters of its create method.
#[derive(Debug)]
pub(super) struct ModuleKind {
    module: &'static ModuleEntry,
    params: Value,
}

impl ModuleKind {
    fn all() -> impl Iterator<Item = (&'static ModuleEntry, bdev_modules::Command)> {
        let all = MODULES.iter();
        all.filter_map(|module| Some((module, module.command?)))
    }
}

impl FromArgMatches for ModuleKind {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let mut all = Self::all();
        let name = bdev_modules::current_kind(name);
        let (module, command) = all.find(|(m, _)| m.kind == name).ok_or_else(missing)?;
        let params = (command.params)(matches)?;
        Ok(Self { module, params })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for ModuleKind {
    fn augment_subcommands(parent: clap::Command) -> clap::Command {
        Self::all().fold(parent, |parent, (module, command)| {
            let former = bdev_modules::FORMER_KINDS.iter();
            let former = former.filter(|(_, kind)| *kind == module.kind);
            let own = clap::Command::new(module.kind)
                .about(command.about)
                .aliases(former.map(|(name, _)| *name));
            parent.subcommand((command.arguments)(own).about(command.about))
        })
    }

    fn augment_subcommands_for_update(parent: clap::Command) -> clap::Command {
        Self::augment_subcommands(parent)
    }

    fn has_subcommand(name: &str) -> bool {
        let name = bdev_modules::current_kind(name);
        Self::all().any(|(module, _)| module.kind == name)
    }
}

#[derive(Debug, Args)]
pub(super) struct Capacity {
    /// Size, such as 64MiB
    #[arg(long, value_parser = size::parse_bytes)]
    size: u64,
    /// Bytes per logical block
    #[arg(long, value_name = "BYTES", value_parser = size::parse_bytes, default_value_t = DEFAULT_BLOCK.into())]
    block_size: u64,
}

#[derive(Debug, Default, Args)]
pub(super) struct Identity {
    /// Chosen by the daemon unless given
    #[arg(long)]
    uuid: Option<Uuid>,
}

pub(super) fn run(connection: &Connection, kind: Kind) -> Result<(), Failure> {
    let (method, params) = call(kind)?;
    // The daemon would wait for a missing base device, as SPDK does. Here a missing base is a
    // mistyped name.
    if let Some(base) = bdev_modules::base(method, &params) {
        connection.call_for_json::<GetBdevs>(&GetBdevsParams {
            name: Some(base.to_owned()),
            ..GetBdevsParams::default()
        })?;
    }
    let names = match connection.call_by_name(method, params.clone())? {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().map(|name| output::cell(Some(name))).collect(),
        // The reply of bdev_error_create contains no name.
        _ => bdev_modules::names(method, &params),
    };
    match names.as_slice() {
        [name] if connection.json => output::json(&json!({ "name": name })),
        names if connection.json => output::json(&json!({ "names": names })),
        names => output::line(&names.join("\n")),
    }
}

/// The method and parameters for a kind of device.
fn call(kind: Kind) -> Result<(&'static str, Value), Failure> {
    Ok(match kind {
        Kind::Malloc {
            name,
            capacity,
            identity,
        } => prepared::<CreateModule<RamDisk>>(
            &MallocCreateParams {
                name,
                num_blocks: capacity.blocks()?,
                block_size: block(capacity.block_size)?,
                options: NewBdevOptions {
                    uuid: identity.uuid,
                    ..NewBdevOptions::default()
                },
                ..MallocCreateParams::default()
            },
            &MallocCreateParams::default(),
        ),
        Kind::Null {
            name,
            capacity,
            identity,
        } => prepared::<CreateModule<NullDisk>>(
            &NullCreateParams {
                name,
                num_blocks: capacity.blocks()?,
                block_size: block(capacity.block_size)?,
                options: NewBdevOptions {
                    uuid: identity.uuid,
                    ..NewBdevOptions::default()
                },
                ..NullCreateParams::default()
            },
            &NullCreateParams::default(),
        ),
        Kind::File {
            name,
            path,
            size,
            block_size,
            read_only,
            no_unmap,
            identity,
        } => prepared::<AioCreate>(
            &AioCreateParams {
                name,
                // The daemon has a working directory of its own.
                filename: absolute(&path)?,
                readonly: read_only,
                fallocate: no_unmap.then_some(false),
                options: NewFileOptions {
                    block_size: block_size.map_or(Ok(0), block)?,
                    uuid: identity.uuid,
                    size,
                    ..NewFileOptions::default()
                },
                ..AioCreateParams::default()
            },
            &AioCreateParams::default(),
        ),
        Kind::Delay {
            name,
            base,
            read,
            read_p99,
            write,
            write_p99,
            identity,
        } => {
            let params = delay::Config {
                name,
                base_bdev_name: base,
                avg_read_latency: micros(read)?,
                p99_read_latency: micros(read_p99.unwrap_or(read))?,
                avg_write_latency: micros(write)?,
                p99_write_latency: micros(write_p99.unwrap_or(write))?,
                uuid: identity.uuid,
            };
            (DELAY.create, to_json(&params))
        }
        Kind::Module(ModuleKind { module, params }) => (module.create, params),
    })
}

/// The method's name, and the parameters that differ from their defaults. The others are not sent:
/// SPDK does not know all of them.
fn prepared<M>(params: &M::Params, defaults: &M::Params) -> (&'static str, Value)
where
    M: Method<Engine, Params: Serialize>,
{
    let (mut params, defaults) = (to_json(params), to_json(defaults));
    if let Some(fields) = params.as_object_mut() {
        fields.retain(|name, value| defaults.get(name) != Some(value));
    }
    (M::NAME, params)
}

impl Capacity {
    fn blocks(&self) -> Result<u64, Failure> {
        size::blocks(self.size, self.block_size).map_err(Failure::Usage)
    }
}

fn block(bytes: u64) -> Result<u32, Failure> {
    let block = u32::try_from(bytes).map_err(|_| size::check_block(bytes));
    block.map_err(|refused| Failure::Usage(refused.err().unwrap_or_default()))
}

fn micros(time: Duration) -> Result<u64, Failure> {
    u64::try_from(time.as_micros()).map_err(|_| Failure::Usage(format!("{time:?} is too long")))
}
