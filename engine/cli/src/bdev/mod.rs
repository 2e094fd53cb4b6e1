//! `nacre bdev`: lists, creates, changes and deletes block devices.

mod attach;
mod create;
mod iostat;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use clap::{Args, Subcommand};
use nacre_bdev::fault::{SpdkErrorType, SpdkIoType};
use nacre_bdev::module::ByName;
use serde_json::{Value, json};

use super::{Connection, Failure, output, record};
use nacre_engine::bdev_modules::{MODULES, ModuleEntry};
use nacre_engine::methods::bdev::accept::{Accept, AcceptParams};
use nacre_engine::methods::bdev::file::RescanParams;
use nacre_engine::methods::bdev::list::{GetBdevs, GetBdevsParams};
use nacre_engine::methods::bdev::null::ResizeParams;
use nacre_engine::methods::bdev::nvme::{DetachController, DetachControllerParams};
use nacre_engine::methods::bdev::qos::{SetQosLimit, SetQosLimitParams};
use nacre_engine::methods::bdev::stacked::{InjectError, InjectErrorParams, ResumePending};
use nacre_engine::methods::volume::create::{Delete, DeleteParams};
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::{Client, to_json};
use nacre_engine_values::size;

#[derive(Debug, Args)]
#[command(mut_args = |arg| arg.global(true))]
pub(crate) struct BdevArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: BdevCommand,
}

#[derive(Debug, Subcommand)]
enum BdevCommand {
    /// List the block devices
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about one
    Show {
        /// Name of the bdev
        name: String,
    },
    /// Create one, and print its name
    Create {
        #[command(subcommand)]
        kind: create::Kind,
    },
    /// Connect to a subsystem of another target; its namespaces become devices
    Attach(attach::AttachArgs),
    /// Disconnect such a controller, and delete its devices and all devices on top of them
    Detach {
        /// Name, as given to `attach` or printed by it
        name: String,
    },
    /// Delete devices, and all devices on top of them; files stay
    #[command(visible_alias = "rm")]
    Delete {
        /// Names of the bdevs
        #[arg(required = true)]
        name: Vec<String>,
    },
    /// Change the size of a null or file device; hosts see it at once
    Resize(ResizeArgs),
    /// Read the present size of a file or block device again
    Rescan {
        /// Name of the bdev
        name: String,
        /// Accept a smaller size while hosts are connected; data past the new end is lost
        #[arg(long)]
        force: bool,
    },
    /// Accept the file or disk that is now at a device's path, in place of the earlier one
    #[command(
        after_help = "The daemon restores a device only on its original file or disk. This \
            command accepts a copy with the same data, or an empty file in place of a missing \
            one."
    )]
    Accept {
        /// Name of the bdev
        name: String,
    },
    /// Show the I/O counters of devices, once or as rates
    Iostat(iostat::IostatArgs),
    /// Inject errors into a device made with `create error`
    Inject(InjectArgs),
    /// Limit a device's I/O per second; I/O above the limit waits
    Limit(LimitArgs),
    /// Release the I/O that `inject … pending` holds
    Resume {
        /// Name of the bdev
        name: String,
    },
}

#[derive(Debug, Args)]
struct ResizeArgs {
    /// Name of the bdev
    name: String,
    /// Size, such as 10GiB
    #[arg(value_parser = size::parse_bytes)]
    size: u64,
    /// Allow a smaller size: data past the new end is lost; refused while hosts are connected
    #[arg(long)]
    shrink: bool,
    /// Shrink although hosts are connected: they lose the data past the new end
    #[arg(long, requires = "shrink")]
    force: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Omitted limits stay unchanged. Sizes are whole MiB.\n\nExamples:\n  nacre bdev \
        limit disk0 --iops 5000 --write 100MiB\n  nacre bdev limit disk0 --iops 0\n  nacre bdev \
        limit disk0 --none"
)]
struct LimitArgs {
    /// Name of the bdev
    name: String,
    /// Reads and writes per second; 0 ends the limit
    #[arg(long, value_name = "N")]
    iops: Option<u64>,
    /// Bytes per second, of reads and writes together
    #[arg(long, value_name = "SIZE", value_parser = size::whole_mebibytes)]
    total: Option<u64>,
    /// Bytes read per second
    #[arg(long, value_name = "SIZE", value_parser = size::whole_mebibytes)]
    read: Option<u64>,
    /// Bytes written per second
    #[arg(long, value_name = "SIZE", value_parser = size::whole_mebibytes)]
    write: Option<u64>,
    /// End all limits
    #[arg(long, conflicts_with_all = ["iops", "total", "read", "write"])]
    none: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  nacre bdev inject EE_ram0 read failure --count 10\n  nacre bdev inject EE_ram0 write nvme-failure --sct 2 --sc 0x80\n  nacre bdev inject EE_ram0 clear"
)]
struct InjectArgs {
    /// Name of the bdev
    name: String,
    /// Affected operations; clear ends all errors
    operation: SpdkIoType,
    /// Kind of error
    #[arg(required_if_eq_any = [("operation", "read"), ("operation", "write"), ("operation", "unmap"), ("operation", "flush"), ("operation", "all")])]
    error: Option<SpdkErrorType>,
    /// Number of I/Os to affect
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u32,
    /// Only while this many I/Os are in flight
    #[arg(long, value_name = "N", default_value_t = 0)]
    queue_depth: u64,
    /// corrupt-data: offset of the byte to change
    #[arg(long, value_name = "BYTE", default_value_t = 0)]
    corrupt_offset: u64,
    /// corrupt-data: value to XOR the byte with
    #[arg(long, value_name = "VALUE", value_parser = byte, default_value = "0xff")]
    corrupt_value: u8,
    /// nvme-failure: the status code type
    #[arg(long, value_name = "TYPE", value_parser = byte, default_value = "0")]
    sct: u8,
    /// nvme-failure: the status code; 6 is Internal Error
    #[arg(long, value_name = "CODE", value_parser = byte, default_value = "6")]
    sc: u8,
}

pub(crate) fn run(args: BdevArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        BdevCommand::List => list(connection),
        BdevCommand::Show { name } => {
            let device = device(&mut connection.open()?, &name)?;
            if connection.json {
                output::json(&device)
            } else {
                record::print(&device)
            }
        }
        BdevCommand::Accept { name } => {
            let params = AcceptParams { name };
            connection.call_for_json::<Accept>(&params)?;
            done(connection, json!({ "accepted": params.name }))
        }
        BdevCommand::Create { kind } => create::run(connection, kind),
        BdevCommand::Attach(args) => attach::run(connection, &args),
        BdevCommand::Detach { name } => {
            let params = DetachControllerParams {
                name,
                ..DetachControllerParams::default()
            };
            connection.call_for_json::<DetachController>(&params)?;
            done(connection, json!({ "detached": params.name }))
        }
        BdevCommand::Delete { name } => {
            let mut client = connection.open()?;
            let mut calls: Vec<(&'static str, Value)> = Vec::new();
            for one in &name {
                let device = device(&mut client, one)?;
                if let Some(controller) = device.pointer("/driver_specific/controller") {
                    let controller = controller.as_str().unwrap_or_default();
                    let remedy = format!("`nacre bdev detach {controller}` detaches all of them");
                    let cause = "it is a namespace of another target";
                    return Err(refuse(&device, cause, &remedy));
                }
                // By its own name: the one given may be an alias.
                let call = deletion(&device)?;
                if call.1.get("name").is_none() {
                    refuse_some_of_several(&mut client, &device, &call, &name)?;
                }
                if !calls.contains(&call) {
                    calls.push(call);
                }
            }
            for (method, params) in calls {
                client.call_by_name(method, params)?;
            }
            done(connection, json!({ "deleted": name }))
        }
        BdevCommand::Resize(args) => resize(connection, &args),
        BdevCommand::Rescan { name, force } => {
            let mut client = connection.open()?;
            let device = device(&mut client, &name)?;
            let method = module(&device)?.rescan.ok_or_else(|| {
                refuse(
                    &device,
                    "its size does not change by itself",
                    "only files and block devices can be rescanned",
                )
            })?;
            let params = RescanParams {
                name: name_of(&device),
                size: None,
                force,
            };
            client.call_by_name(method, to_json(&params))?;
            print_size(connection, &mut client, &name)
        }
        BdevCommand::Iostat(args) => iostat::run(connection, &args),
        BdevCommand::Inject(args) => inject(connection, &args),
        BdevCommand::Limit(args) => limit(connection, &args),
        BdevCommand::Resume { name } => {
            let params = ByName { name };
            connection.call_for_json::<ResumePending>(&params)?;
            done(connection, to_json(&params))
        }
    }
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let devices = connection.call_for_json::<GetBdevs>(&GetBdevsParams::default())?;
    if connection.json {
        return output::json(&devices);
    }
    let rows = devices
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(|device| {
            vec![
                output::cell(device.get("name")),
                kind(device),
                output::bytes(bytes_of(device)),
                output::cell(device.get("block_size")),
                output::cell(device.get("claimed")),
                output::cell(device.get("uuid")),
            ]
        });
    output::table(&["name", "kind", "size", "block", "claimed", "uuid"], rows)
}

/// The kind of a bdev, as in `[[bdev]]` and `nacre bdev create`; a remote namespace with its
/// transport and connection state. Other devices have their product name.
fn kind(device: &Value) -> String {
    let name = device["product_name"].as_str().unwrap_or_default();
    let specific = &device["driver_specific"];
    let transport = specific["nvme"][0]["trid"]["trtype"].as_str();
    let is_remote = transport.is_some_and(|transport| transport != "PCIe");
    let product = match name {
        "NVMe disk" if is_remote => "remote".to_owned(),
        "NVMe disk" => "nvme".to_owned(),
        "Replicated volume" => "volume".to_owned(),
        "Logical Volume" => "lvol".to_owned(),
        _ => {
            let mut modules = MODULES.iter();
            let module = modules.find(|module| module.product == name);
            let shown = |module: &ModuleEntry| match module.filename {
                Some(_) => "file",
                None => module.kind,
            };
            module.map_or_else(
                || output::cell(device.get("product_name")),
                |m| shown(m).into(),
            )
        }
    };
    let transport = specific["nvme"][0]["trid"]["trtype"].as_str();
    match (transport, specific["state"].as_str()) {
        (Some(transport), Some("enabled")) if specific["refused"].is_null() => {
            format!("{product} ({transport})")
        }
        (Some(_), Some("enabled")) => format!("{product} (refused)"),
        (Some(transport), Some("failed")) => format!("{product} ({transport}, failed)"),
        (Some(transport), Some(_)) => format!("{product} ({transport}, away)"),
        _ => product,
    }
}

/// The method that deletes a device, with its parameters. A module of the table, or a volume.
fn deletion(device: &Value) -> Result<(&'static str, Value), Failure> {
    if device["product_name"] == "Replicated volume" {
        let params = DeleteParams {
            name: name_of(device),
            force: None,
        };
        return Ok((Delete::NAME, to_json(&params)));
    }
    let module = module(device)?;
    let (field, at) = module.deleted_by;
    Ok((module.delete, json!({ field: device.pointer(at) })))
}

/// Finds the module of a device by its `product_name`, as in SPDK: no other field shows the
/// module.
fn module(device: &Value) -> Result<&'static ModuleEntry, Failure> {
    let product = device["product_name"].as_str().unwrap_or_default();
    let unknown = || {
        refuse(
            device,
            &format!("\"{product}\" is a kind of device that this command does not know"),
            "call its method with `nacre rpc`",
        )
    };
    MODULES
        .iter()
        .find(|module| module.product == product)
        .ok_or_else(unknown)
}

/// Refuses to delete some of the devices that only one call deletes together.
fn refuse_some_of_several(
    client: &mut Client,
    device: &Value,
    deletion: &(&'static str, Value),
    names: &[String],
) -> Result<(), Failure> {
    let all = client.call_for_json::<GetBdevs, _>(&GetBdevsParams::default())?;
    let all = all.as_array().map_or(&[][..], Vec::as_slice);
    let with_it: Vec<&str> = all
        .iter()
        .filter(|other| {
            other["product_name"] == device["product_name"]
                && self::deletion(other).is_ok_and(|other| other == *deletion)
        })
        .filter_map(|other| other["name"].as_str())
        .collect();
    if with_it.iter().all(|name| names.iter().any(|n| n == name)) || with_it.len() < 2 {
        return Ok(());
    }
    let cause = "it can only be deleted together with the others on the same device";
    let remedy = format!("nacre bdev delete {}", with_it.join(" "));
    Err(refuse(device, cause, &remedy))
}

fn device(client: &mut Client, name: &str) -> Result<Value, Failure> {
    let params = GetBdevsParams {
        name: Some(name.to_owned()),
        ..GetBdevsParams::default()
    };
    let found = client.call_for_json::<GetBdevs, _>(&params)?;
    let missing = || Failure::Failed(anyhow::anyhow!("the daemon returned no data for {name}"));
    found.get(0).cloned().ok_or_else(missing)
}

fn name_of(device: &Value) -> String {
    device["name"].as_str().unwrap_or_default().to_owned()
}

fn bytes_of(device: &Value) -> u64 {
    let number = |key: &str| device[key].as_u64().unwrap_or(0);
    number("num_blocks").saturating_mul(number("block_size"))
}

/// A refusal of the command itself: the daemon was not called.
fn refuse(device: &Value, cause: &str, remedy: &str) -> Failure {
    let name = device["name"].as_str().unwrap_or_default();
    Failure::Failed(anyhow::anyhow!("{name}: {cause}; {remedy}"))
}

/// Prints nothing for people on success, and the changed object for programs.
fn done(connection: &Connection, what: Value) -> Result<(), Failure> {
    if connection.json {
        output::json(&what)
    } else {
        Ok(())
    }
}

/// Sets limits, or shows them when none is given.
fn limit(connection: &Connection, args: &LimitArgs) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let wanted = |limit: Option<u64>| limit.or_else(|| args.none.then_some(0));
    let is_given = args.none
        || [args.iops, args.total, args.read, args.write]
            .iter()
            .any(Option::is_some);
    if is_given {
        client.call::<SetQosLimit, _>(&SetQosLimitParams {
            name: args.name.clone(),
            rw_ios_per_sec: wanted(args.iops),
            rw_mbytes_per_sec: wanted(args.total),
            r_mbytes_per_sec: wanted(args.read),
            w_mbytes_per_sec: wanted(args.write),
        })?;
    }
    let now = device(&mut client, &args.name)?["assigned_rate_limits"].take();
    if connection.json {
        output::json(&now)
    } else {
        record::print(&now)
    }
}

fn print_size(connection: &Connection, client: &mut Client, name: &str) -> Result<(), Failure> {
    let device = device(client, name)?;
    let bytes = bytes_of(&device);
    if connection.json {
        output::json(&json!({ "name": device["name"], "size": bytes }))
    } else {
        output::line(&output::bytes(bytes))
    }
}

fn resize(connection: &Connection, args: &ResizeArgs) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let device = device(&mut client, &args.name)?;
    let module = module(&device)?;
    let block_size = device["block_size"].as_u64().unwrap_or(512);
    size::blocks(args.size, block_size).map_err(Failure::Usage)?;
    let now = bytes_of(&device);
    if args.size < now && !args.shrink {
        let cause = format!(
            "{} is less than the {} there are",
            output::bytes(args.size),
            output::bytes(now)
        );
        return Err(refuse(
            &device,
            &cause,
            "--shrink allows losing the data past the new end",
        ));
    }
    if let Some((filename, rescan)) = module.filename.zip(module.rescan) {
        let path = device
            .pointer(filename)
            .and_then(Value::as_str)
            .unwrap_or_default();
        let kept = |cause: anyhow::Error| match cause.downcast_ref::<NotAFile>() {
            Some(_) => refuse(
                &device,
                &format!("{path} is a block device"),
                "resize that, then `nacre bdev rescan`",
            ),
            None => Failure::Failed(cause.context(format!("{path} is not resized"))),
        };
        let file = open_file(Path::new(path)).map_err(kept)?;
        if !is_of(&device, &file)? {
            let cause =
                format!("another file is at {path} now, and the device uses the earlier one");
            return Err(refuse(&device, &cause, "nothing was changed"));
        }
        let mut params = RescanParams {
            name: name_of(&device),
            size: Some(args.size),
            force: args.force,
        };
        if args.size < now {
            // First without force: nothing is cut off under a connected host.
            client.call_by_name(rescan, to_json(&params))?;
        }
        (params.size, params.force) = (None, false);
        let cut = file.set_len(args.size);
        // Also after a failure: the daemon uses the actual size.
        client.call_by_name(rescan, to_json(&params))?;
        cut.map_err(|error| kept(error.into()))?;
    } else if let Some(method) = module.resize {
        const MIB: u64 = 1 << 20;
        if !args.size.is_multiple_of(MIB) {
            return Err(Failure::Usage(
                "a null device can only be resized to whole MiB".into(),
            ));
        }
        let params = ResizeParams {
            name: name_of(&device),
            new_size: args.size / MIB,
        };
        client.call_by_name(method, to_json(&params))?;
    } else {
        // Devices that are made several at a time keep the size that they were made with.
        let follows_base = module.base.is_some() && module.deleted_by.0 == "name";
        let (cause, remedy) = if follows_base {
            ("it has the size of the device below", "resize that")
        } else {
            ("devices of this kind have a fixed size", "create a new one")
        };
        return Err(refuse(&device, cause, remedy));
    }
    print_size(connection, &mut client, &args.name)
}

#[derive(Debug, thiserror::Error)]
#[error("not a file")]
struct NotAFile;

/// True when the daemon has this file open for the device, whatever the path names now.
fn is_of(device: &Value, file: &File) -> std::io::Result<bool> {
    let ours = file.metadata()?;
    let number = |part: &str| {
        let number = device.pointer(&format!("/driver_specific/nacre/file/{part}"));
        number.and_then(Value::as_u64)
    };
    // An older daemon does not report it.
    let same = |said: Option<u64>, is: u64| said.is_none_or(|said| said == is);
    Ok(same(number("device"), ours.dev()) && same(number("inode"), ours.ino()))
}

/// Opens a file of this machine for writing. The daemon is reached by a local socket, so the path
/// names the daemon's file.
fn open_file(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.file_type().is_block_device() {
        return Err(NotAFile.into());
    }
    Ok(file)
}

fn inject(connection: &Connection, args: &InjectArgs) -> Result<(), Failure> {
    // SPDK requires a type even for ending all errors.
    let error_type = args.error.unwrap_or(SpdkErrorType::Failure);
    let corrupts = error_type == SpdkErrorType::CorruptData;
    let has_status = error_type == SpdkErrorType::NvmeFailure;
    let params = InjectErrorParams {
        name: args.name.clone(),
        io_type: args.operation,
        error_type,
        num: args.count,
        queue_depth: args.queue_depth,
        corrupt_offset: if corrupts { args.corrupt_offset } else { 0 },
        corrupt_value: if corrupts { args.corrupt_value } else { 0 },
        nvme_sct: if has_status { args.sct.into() } else { 0 },
        nvme_sc: if has_status { args.sc.into() } else { 0 },
    };
    connection.call_for_json::<InjectError>(&params)?;
    done(connection, to_json(&params))
}

/// 0 to 255, also in hexadecimal as in the specifications.
fn byte(text: &str) -> Result<u8, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("\"{text}\" is not a byte: 0 to 255 or 0x00 to 0xff"))
}
