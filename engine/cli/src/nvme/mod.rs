//! `nacre nvme`: lists the NVMe drives of this machine, binds them to vfio-pci and back to the
//! kernel's driver, switches the locate lights of disks. Only `show` and `update-firmware` call the
//! daemon.

mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use nacre_bdev_nvme_vfio::pci::{
    Address, Bay, BayKind, DiskName, DiskNameError, Drive, Driver, Options, PciError, System,
};
use nacre_engine::methods::bdev::nvme::commands::{ApplyFirmware, ApplyFirmwareParams};
use serde_json::{Value, json};

use super::{Connection, Failure, output};

/// Minimum time limit of a firmware update: a drive may take minutes to store an image.
const FIRMWARE_LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Args)]
pub(crate) struct NvmeArgs {
    #[command(subcommand)]
    command: NvmeCommand,
}

#[derive(Debug, Subcommand)]
enum NvmeCommand {
    /// List the drives, their drivers, and their users
    #[command(visible_alias = "ls")]
    List {
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Show the drives that the daemon uses; with a name, that drive's health, firmware and newest
    /// errors
    Show {
        #[command(flatten)]
        connection: Connection,
        /// Name of the controller, as attached
        name: Option<String>,
    },
    /// Update the firmware of a drive that the daemon uses, from a file of its vendor; I/O waits
    /// while the controller is reset
    #[command(after_help = "Example: nacre nvme update-firmware Nvme0 /root/fw-2.1.bin")]
    UpdateFirmware {
        #[command(flatten)]
        connection: Connection,
        /// Name of the controller, or of a device of it
        name: String,
        /// The image, on the daemon's machine
        file: PathBuf,
    },
    /// Switch the locate light of a disk's bay; without a word, show it
    #[command(
        after_help = "As root. The light is one of PCIe enclosure management, of a hot-plug slot, or of a SCSI enclosure.\n\n\
                      Example: nacre nvme locate 0000:5e:00.0 on"
    )]
    Locate {
        /// A PCI address (0000:5e:00.0), or a block device: /dev/sda, or a link in /dev/disk
        #[arg(value_parser = disk)]
        disk: DiskName,
        /// The state to switch to; without it, the light is shown
        light: Option<Light>,
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Take drives from the kernel for the engine; refused for a drive in use
    #[command(
        after_help = "Example: nacre nvme bind 0000:5e:00.0\n\nIt lasts until the machine restarts."
    )]
    Bind(BindArgs),
    /// Give drives back to the kernel's driver; refused while a process uses them
    #[command(after_help = "Example: nacre nvme unbind 0000:5e:00.0")]
    Unbind {
        /// PCI addresses, such as 0000:5e:00.0
        #[arg(value_name = "BDF", required = true, value_parser = address)]
        addresses: Vec<Address>,
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Light {
    On,
    Off,
}

#[derive(Debug, Args)]
struct BindArgs {
    /// PCI addresses, such as 0000:5e:00.0
    #[arg(value_name = "BDF", value_parser = address, required_unless_present_any = ["serial", "all_unbound"])]
    addresses: Vec<Address>,
    /// The drive with this serial number
    #[arg(long)]
    serial: Vec<String>,
    /// Every drive that has no driver
    #[arg(long)]
    all_unbound: bool,
    /// Take one drive although it is in use: its serial number as a confirmation. Its data may be
    /// lost
    #[arg(long, value_name = "SERIAL", conflicts_with = "all_unbound")]
    force: Option<String>,
    /// Take drives although there is no IOMMU, which lets them write to all memory
    #[arg(long)]
    no_iommu: bool,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

pub(crate) fn address(text: &str) -> Result<Address, String> {
    text.parse()
        .map_err(|error: nacre_bdev_nvme_vfio::pci::AddressError| error.to_string())
}

fn disk(text: &str) -> Result<DiskName, String> {
    disk_in(Path::new("/dev"), text)
}

/// Follows links in `dev`, the folder of device nodes.
fn disk_in(dev: &Path, text: &str) -> Result<DiskName, String> {
    match DiskName::of_node(dev, Path::new(text)) {
        Ok(Some(disk)) => Ok(disk),
        Ok(None) => text
            .parse()
            .map_err(|error: DiskNameError| error.to_string()),
        Err(error) => Err(format!("{text}: {error}")),
    }
}

pub(crate) fn run(args: NvmeArgs) -> Result<(), Failure> {
    let system = System::real();
    match args.command {
        NvmeCommand::List { json } => list(&system, json),
        NvmeCommand::Show { connection, name } => show::run(&connection, name.as_deref()),
        NvmeCommand::UpdateFirmware {
            connection,
            name,
            file,
        } => update_firmware(&connection, name, &file),
        NvmeCommand::Locate { disk, light, json } => {
            let bay = match light {
                None => system.bay(&disk),
                Some(light) => system.locate(&disk, light == Light::On),
            };
            let bay = bay.map_err(anyhow::Error::from)?;
            if json {
                return output::json(&json!(bay));
            }
            output::line(&about(&disk, &bay))
        }
        NvmeCommand::Bind(args) => bind(&system, &args),
        NvmeCommand::Unbind { addresses, json } => unbind(&system, &addresses, json),
    }
}

/// Switches the light of a disk's bay; returns the result as text.
pub(crate) fn locate(system: &System, disk: &str, on: bool) -> Result<String, Failure> {
    let disk: DiskName = disk.parse().map_err(anyhow::Error::from)?;
    let bay = system.locate(&disk, on).map_err(anyhow::Error::from)?;
    Ok(about(&disk, &bay))
}

fn about(disk: &DiskName, bay: &Bay) -> String {
    let place = match bay.kind {
        BayKind::Npem => "the light of PCIe enclosure management at",
        BayKind::Slot => "the light of slot",
        BayKind::Enclosure => "the light of enclosure",
    };
    let state = if bay.lit { "on" } else { "off" };
    format!("{disk}: {place} {} is {state}", bay.name)
}

fn update_firmware(connection: &Connection, name: String, file: &Path) -> Result<(), Failure> {
    // The daemon has another working directory.
    let file = std::path::absolute(file)
        .map_err(|error| Failure::Usage(format!("\"{}\": {error}", file.display())))?;
    let Some(filename) = file.to_str().map(str::to_owned) else {
        let text = format!("\"{}\" is not UTF-8", file.display());
        return Err(Failure::Usage(text));
    };
    let params = ApplyFirmwareParams {
        filename,
        bdev_name: name,
    };
    let patient = connection.patient(FIRMWARE_LIMIT);
    let outcome = patient.call_for_json::<ApplyFirmware>(&params)?;
    if connection.json {
        return output::json(&outcome);
    }
    output::line(outcome.as_str().unwrap_or_default())
}

fn list(system: &System, json: bool) -> Result<(), Failure> {
    let drives = system.drives();
    if json {
        return output::json(&drives.iter().map(|drive| facts(system, drive)).collect());
    }
    if drives.is_empty() {
        return output::line("there is no NVMe drive on a PCI bus of this machine");
    }
    output::table(
        &[
            "address", "driver", "group", "node", "serial", "model", "disks", "in use",
        ],
        drives.iter().map(|drive| row(system, drive)),
    )
}

fn facts(system: &System, drive: &Drive) -> Value {
    let mut value = serde_json::to_value(drive).expect("a drive serialises");
    value["uses"] = json!(system.uses(drive));
    value
}

fn row(system: &System, drive: &Drive) -> Vec<String> {
    let disks = drive.disks.iter().map(|disk| match disk.nsid {
        Some(nsid) => format!(
            "{} (namespace {nsid}) {}",
            disk.name,
            output::bytes(disk.bytes)
        ),
        None => format!("{} {}", disk.name, output::bytes(disk.bytes)),
    });
    let uses = system.uses(drive);
    let model = drive.controller.as_ref().map(|told| told.model.clone());
    vec![
        drive.address.to_string(),
        drive.driver.to_string(),
        drive.iommu.to_string(),
        drive
            .numa_node
            .map_or(String::new(), |node| node.to_string()),
        drive.serial().unwrap_or_default().to_owned(),
        model.unwrap_or_else(|| format!("{}:{}", drive.vendor, drive.device)),
        disks.collect::<Vec<_>>().join(", "),
        uses.iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("; "),
    ]
}

/// The selected drives, each once.
fn chosen(system: &System, args: &BindArgs) -> Result<Vec<Address>, Failure> {
    let mut addresses = args.addresses.clone();
    for serial in &args.serial {
        addresses.push(system.by_serial(serial).map_err(failed)?.address);
    }
    if args.all_unbound {
        let drives = system.drives();
        let idle = drives.iter().filter(|drive| drive.driver == Driver::None);
        addresses.extend(idle.map(|drive| drive.address));
    }
    addresses.sort_unstable();
    addresses.dedup();
    if args.force.is_some() && addresses.len() > 1 {
        return Err(Failure::Usage(
            "--force takes one drive at a time, named by its serial number".into(),
        ));
    }
    Ok(addresses)
}

fn bind(system: &System, args: &BindArgs) -> Result<(), Failure> {
    let options = Options {
        force: args.force.clone(),
        no_iommu: args.no_iommu,
    };
    let addresses = chosen(system, args)?;
    if addresses.is_empty() && !args.json {
        return output::line("every drive has a driver");
    }
    each(&addresses, args.json, |address| {
        let bound = system.bind(address, &options)?;
        if let Some(warning) = &bound.warning {
            eprintln!("warning: drive {address}: {warning}");
        }
        let text = if bound.already {
            format!("{address} was bound to vfio-pci already ({})", bound.node)
        } else {
            format!("{address} is bound to vfio-pci ({})", bound.node)
        };
        Ok((text, json!(bound)))
    })
}

fn unbind(system: &System, addresses: &[Address], json: bool) -> Result<(), Failure> {
    each(addresses, json, |address| {
        let unbound = system.unbind(address)?;
        let text = match (&unbound.controller, unbound.already) {
            (Some(name), false) => format!("{address} is the kernel's again, as {name}"),
            (None, false) => {
                format!("{address} is the kernel's again; it has not come up: look at `dmesg`")
            }
            (_, true) => format!("{address} was the kernel's already"),
        };
        Ok((text, json!(unbound)))
    })
}

/// Processes one drive after the other, and reports the finished ones, also when one fails.
fn each(
    addresses: &[Address],
    json: bool,
    step: impl Fn(Address) -> Result<(String, Value), PciError>,
) -> Result<(), Failure> {
    let mut done = Vec::new();
    let mut outcome = Ok(());
    for &address in addresses {
        match step(address) {
            Ok((text, value)) => {
                if !json {
                    output::line(&text)?;
                }
                done.push(value);
            }
            Err(error) => {
                outcome = Err(failed(error));
                break;
            }
        }
    }
    if json {
        output::json(&Value::Array(done))?;
    }
    outcome
}

fn failed(error: PciError) -> Failure {
    Failure::Failed(error.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nacre_bdev_nvme_vfio::pci::testing::Machine;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        nvme: NvmeArgs,
    }

    /// Goal: the links of udev name a disk, too; a link that leads nowhere is not taken for a name.
    #[test]
    fn a_link_names_its_disk() {
        let root = tempfile::tempdir().unwrap();
        let dev = root.path().join("dev");
        std::fs::create_dir_all(dev.join("disk/by-id")).unwrap();
        std::fs::write(dev.join("sda"), "").unwrap();
        let link = |name: &str| dev.join("disk/by-id").join(name);
        for (name, node) in [("ata-A", "../../sda"), ("gone", "../../sdz")] {
            std::os::unix::fs::symlink(node, link(name)).unwrap();
        }
        let named = |path: &Path| disk_in(&dev, path.to_str().unwrap());
        let sda: DiskName = "sda".parse().unwrap();
        assert_eq!(named(&link("ata-A")), Ok(sda.clone()));
        assert_eq!(named(&dev.join("sda")), Ok(sda.clone()));
        assert_eq!(disk_in(&dev, "sda"), Ok(sda));
        let address = "0000:5e:00.0";
        assert_eq!(disk_in(&dev, address).unwrap().to_string(), address);
        let gone = named(&link("gone")).unwrap_err();
        assert!(gone.contains("No such file"), "{gone}");
        let other = disk_in(&dev, "/etc/passwd").unwrap_err();
        assert!(other.contains("neither a PCI address"), "{other}");
    }

    fn parsed(words: &[&str]) -> Result<BindArgs, String> {
        let line = Line::try_parse_from([&["nvme", "bind"], words].concat());
        match line.map_err(|error| error.to_string())?.nvme.command {
            NvmeCommand::Bind(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    fn addresses(machine: &Machine, words: &[&str]) -> Result<Vec<String>, Failure> {
        let chosen = chosen(&machine.system(), &parsed(words).unwrap())?;
        Ok(chosen.iter().map(ToString::to_string).collect())
    }

    /// Goal: drives are named by address, by serial, or by having no driver; each is selected once.
    #[test]
    fn drives_are_chosen() {
        let machine = Machine::usual();
        machine.function("0000:05:00.0", "0x010802", None, 30);
        let both = addresses(&machine, &["01:00.0", "--serial", "S1", "--serial", "S2"]);
        assert_eq!(both.unwrap(), ["0000:01:00.0", "0000:02:00.0"]);
        let idle = addresses(&machine, &["--all-unbound"]);
        assert_eq!(idle.unwrap(), ["0000:05:00.0"]);
        let error = addresses(&machine, &["--serial", "S9"]).unwrap_err();
        assert!(error.to_string().contains("known are: S1, S2"), "{error}");
        let error = addresses(&machine, &["1:0.0", "2:0.0", "--force", "S1"]).unwrap_err();
        assert!(matches!(error, Failure::Usage(_)), "{error}");
    }

    #[test]
    fn lines_that_name_no_drive_are_refused() {
        for words in [
            &[][..],
            &["--no-iommu"],
            &["nvme0"],
            &["--all-unbound", "--force", "S1"],
        ] {
            assert!(parsed(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn drives_are_shown_with_their_users() {
        let machine = Machine::usual();
        machine.file("proc/swaps", "Filename\n/dev/nvme0n2 partition\n");
        let system = machine.system();
        let drives = system.drives();
        let shown = row(&system, &drives[0]);
        let wanted = [
            "0000:01:00.0",
            "nvme",
            "14",
            "0",
            "S1",
            "QEMU NVMe Ctrl",
            "nvme0n2 (namespace 1) 1.0 MiB, nvme0n1 (namespace 2) 1.0 MiB",
            "nvme0n2 is swap space",
        ];
        assert_eq!(shown, wanted);
        let value = facts(&system, &drives[0]);
        assert_eq!(value["uses"][0]["use"], "swap");
        assert_eq!(value["controller"]["serial"], "S1");
        assert_eq!(value["driver"], "nvme");
    }

    /// Goal: the text names disk, place and state; another text is no disk.
    #[test]
    fn a_light_is_named() {
        let machine = Machine::usual();
        machine.file("sys/bus/pci/slots/3/address", "0000:02:00\n");
        machine.file("sys/bus/pci/slots/3/attention", "0\n");
        let text = locate(&machine.system(), "nvme1n1", true).unwrap();
        assert_eq!(text, "nvme1n1: the light of slot 3 is on");
        for (disk, part) in [("../x", "neither a PCI address"), ("nvme0n1", "no light")] {
            let refused = locate(&machine.system(), disk, true)
                .unwrap_err()
                .to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }

    /// Goal: the first refused drive stops the command, with the reason.
    #[test]
    fn drives_are_taken_and_given_back() {
        let machine = Machine::usual();
        let system = machine.system();
        bind(&system, &parsed(&["01:00.0", "02:00.0"]).unwrap()).unwrap();
        let drivers: Vec<Driver> = system.drives().into_iter().map(|d| d.driver).collect();
        assert_eq!(drivers, [Driver::VfioPci, Driver::VfioPci]);
        let there = [address("01:00.0").unwrap(), address("02:00.0").unwrap()];
        unbind(&system, &there, true).unwrap();
        machine.file("proc/swaps", "Filename\n/dev/nvme0n2 partition\n");
        let words = ["01:00.0", "02:00.0", "--json"];
        let error = bind(&system, &parsed(&words).unwrap()).unwrap_err();
        assert!(error.to_string().contains("--force S1"), "{error}");
        let drivers: Vec<Driver> = system.drives().into_iter().map(|d| d.driver).collect();
        assert_eq!(drivers, [Driver::Nvme, Driver::Nvme]);
    }
}
