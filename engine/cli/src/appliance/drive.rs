//! `nacre appliance drive`: NVMe drives that are bound to vfio-pci now and at each start.

use clap::{Args, Subcommand};
use nacre_bdev_nvme_vfio::pci::{Address, System};
use nacre_engine_appliance::acts::ActKind;
use nacre_engine_appliance::drives::{self, DriveError, DriveId, DriveState, Restoration};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status::StatusError;
use nacre_engine_rpc::error::causes;
use serde_json::json;

use super::Noted;
use crate::{Failure, output};

#[derive(Debug, Subcommand)]
pub(crate) enum DriveCommand {
    /// List the drives of the list, with their states
    #[command(visible_alias = "ls")]
    List {
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Take a drive from the kernel for the daemon; refused for a drive in use
    #[command(
        after_help = "The kernel shows the drive's disks no more. Attach the drive: nacre bdev attach pcie://ADDRESS --name Nvme0\n\n\
                      Each start of the machine finds the drive by serial number and model, and binds it again before the\n\
                      daemon starts, also at another address. A drive that is gone is skipped. A drive whose serial number and\n\
                      model another drive of the machine has, too, is refused.\n\n\
                      Example: nacre appliance drive bind 0000:5e:00.0"
    )]
    Bind {
        /// PCI address, such as 0000:5e:00.0
        #[arg(value_name = "BDF", value_parser = crate::nvme::address)]
        address: Address,
        /// Refuse a drive with another serial number
        #[arg(long)]
        serial: Option<String>,
    },
    /// Give a drive back to the kernel; refused while the daemon has it attached
    #[command(
        after_help = "A drive that the machine does not show is forgotten: name it by its serial number.\n\n\
                      Example: nacre appliance drive unbind 0000:5e:00.0"
    )]
    Unbind(UnbindArgs),
    /// Bind the drives of the list; systemd starts this before the daemon
    #[command(hide = true)]
    Restore,
}

#[derive(Debug, Args)]
pub(crate) struct UnbindArgs {
    /// PCI address, such as 0000:5e:00.0
    #[arg(value_name = "BDF", value_parser = crate::nvme::address, required_unless_present = "serial")]
    address: Option<Address>,
    /// Serial number of the drive
    #[arg(long)]
    serial: Option<String>,
}

pub(super) fn run(command: DriveCommand, places: &Places, system: &System) -> Result<(), Failure> {
    match command {
        DriveCommand::List { json } => list(places, system, json),
        DriveCommand::Bind { address, serial } => bind(places, system, address, serial.as_deref()),
        DriveCommand::Unbind(UnbindArgs { address, serial }) => {
            unbind(places, system, &DriveId { address, serial })
        }
        DriveCommand::Restore => restore(places, system),
    }
}

fn list(places: &Places, system: &System, json: bool) -> Result<(), Failure> {
    let all = drives::status(places, system).map_err(failed)?;
    if json {
        return output::json(&json!(all));
    }
    if all.is_empty() {
        return output::line("no drive was taken from the kernel");
    }
    let rows = all.into_iter().map(|one| {
        let state = match one.state {
            DriveState::Bound => "bound",
            DriveState::Kernel => "kernel",
            DriveState::Missing => "missing",
        };
        let address = one.drive.address.map(|address| address.to_string());
        vec![
            address.unwrap_or_default(),
            state.to_owned(),
            one.drive.serial,
            one.drive.model,
        ]
    });
    output::table(&["address", "state", "serial", "model"], rows)
}

/// Binds a drive, with an entry in the history.
pub(super) fn bind(
    places: &Places,
    system: &System,
    address: Address,
    serial: Option<&str>,
) -> Result<(), Failure> {
    noted(places, || {
        let done = drives::bind(places, system, address, serial)?;
        let drive = done.drive;
        Ok(if done.already {
            format!("{drive} was taken already")
        } else {
            format!("{drive} is taken from the kernel: the daemon attaches it as pcie://{address}")
        })
    })
}

/// Gives a drive back, with an entry in the history.
pub(super) fn unbind(places: &Places, system: &System, id: &DriveId) -> Result<(), Failure> {
    noted(places, || {
        let done = drives::unbind(places, system, id)?;
        let id = done.id;
        Ok(match (done.was_bound, done.controller) {
            (true, Some(name)) => format!("{id} is the kernel's again, as {name}"),
            (true, None) => format!("{id} is the kernel's again; its controller is not live yet"),
            (false, _) => format!("{id} is not bound at a start any more"),
        })
    })
}

fn noted(places: &Places, act: impl FnOnce() -> Result<String, DriveError>) -> Result<(), Failure> {
    let entry = Noted::begin(places, ActKind::Drive, None);
    let done = act().map_err(failed);
    entry.end(done.as_ref().map(Clone::clone));
    output::line(&done?)
}

/// Binds the drives of the list. The history has the skipped drives only: most starts bind all.
fn restore(places: &Places, system: &System) -> Result<(), Failure> {
    let mut problems = Vec::new();
    match drives::restore(places, system) {
        Ok(Restoration { drives, list }) => {
            for one in drives {
                match one.outcome {
                    Ok(address) => output::line(&format!("{} is bound, at {address}", one.drive))?,
                    Err(error) => problems.push(causes(&error.into())),
                }
            }
            problems.extend(list.err().map(|error| causes(&error.into())));
        }
        Err(error) => problems.push(causes(&error.into())),
    }
    if problems.is_empty() {
        return Ok(());
    }
    let failure = Failure::Failed(anyhow::anyhow!(problems.join("; ")));
    Noted::begin(places, ActKind::Drive, None).end(Err(&failure));
    Err(failure)
}

fn failed(error: DriveError) -> Failure {
    Failure::Failed(match error {
        DriveError::Status(StatusError::NoAppliance { .. }) => {
            anyhow::anyhow!("{error}: `nacre nvme bind` and `nacre nvme unbind` serve it")
        }
        error => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;
    use std::path::Path;

    use clap::Parser;
    use nacre_bdev_nvme_vfio::pci::Driver;
    use nacre_bdev_nvme_vfio::pci::testing::Machine;
    use nacre_engine_appliance::acts::{self, ActState, Request};

    use super::*;

    fn appliance() -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        for path in [places.os_release(), places.boot_id()] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        (root, places)
    }

    fn newest(places: &Places) -> (ActKind, ActState, String) {
        let act = acts::history(places).remove(0);
        (act.act, act.state, act.text)
    }

    /// Goal: the unit of the image runs a command that exists, before the daemon, and cannot keep
    /// the daemon from starting.
    #[test]
    fn the_unit_runs_before_the_daemon() {
        let image = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/image/root/usr/lib");
        let text = |file: &str| fs::read_to_string(image.join(file)).unwrap();
        let unit = text("systemd/system/nacre-drives.service");
        let has = |line: &str| unit.lines().any(|one| one == line);
        assert!(has("Before=nacre.service") && has("Type=oneshot"));
        assert!(unit.contains("TimeoutStartSec="));
        let daemon = text("systemd/system/nacre.service.d/10-appliance.conf");
        assert!(!daemon.contains("nacre-drives") && !unit.contains("RequiredBy="));
        let list = Places::system().drives();
        // A factory reset makes the partition for state, mounted there, anew.
        assert!(list.starts_with("/var"));
        assert!(has(&format!("ConditionPathExists={}", list.display())));
        let command = unit
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="));
        let words = command.unwrap().split(' ').skip(2);
        let line = Line::try_parse_from(words).unwrap();
        assert!(matches!(line.command, DriveCommand::Restore));
        let preset = text("systemd/system-preset/00-appliance.preset");
        assert!(preset.contains("enable nacre-drives.service\n"));
    }

    /// Goal: a call without a drive is refused.
    #[test]
    fn a_drive_has_a_name() {
        for words in [
            &["drive", "bind"][..],
            &["drive", "unbind"],
            &["drive", "bind", "nvme0"],
        ] {
            assert!(Line::try_parse_from(words).is_err(), "{words:?}");
        }
        for words in [
            &["drive", "bind", "5e:00.0", "--serial", "S1"][..],
            &["drive", "unbind", "--serial", "S1"],
            &["drive", "ls"],
        ] {
            Line::try_parse_from(words).unwrap();
        }
    }

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: DriveCommand,
    }

    /// Goal: the request of the daemon is the one that the command executes; the history has each
    /// result, and of a start only the drives that it skipped.
    #[test]
    fn requests_of_drives_and_their_history() {
        let (_root, places) = appliance();
        let machine = Machine::usual();
        let system = machine.system();
        let address: Address = "0000:01:00.0".parse().unwrap();
        let serial = Some("S1".to_owned());
        let request = Request::BindDrive { address, serial };
        acts::ask(&places, &request).unwrap();
        assert_eq!(acts::take(&places).unwrap(), Some(request));
        bind(&places, &system, address, Some("S1")).unwrap();
        let (act, state, text) = newest(&places);
        assert_eq!((act, state), (ActKind::Drive, ActState::Done));
        assert!(text.contains("pcie://0000:01:00.0"), "{text}");
        let refused = bind(&places, &system, "2:0.0".parse().unwrap(), Some("S9")).unwrap_err();
        let (_, state, text) = newest(&places);
        assert_eq!((state, text), (ActState::Failed, refused.to_string()));

        let acts_before = acts::history(&places).len();
        let restarted = Machine::usual();
        restore(&places, &restarted.system()).unwrap();
        assert_eq!(acts::history(&places).len(), acts_before);
        let without = Machine::bare();
        let failed = restore(&places, &without.system()).unwrap_err();
        let (act, state, text) = newest(&places);
        assert_eq!((act, state), (ActKind::Drive, ActState::Failed));
        assert_eq!(text, failed.to_string());
        assert!(text.contains("serial number S1"), "{text}");

        let drive = DriveId {
            address: None,
            serial: Some("S1".into()),
        };
        let request = Request::UnbindDrive {
            drive: drive.clone(),
        };
        acts::ask(&places, &request).unwrap();
        assert_eq!(acts::take(&places).unwrap(), Some(request));
        unbind(&places, &restarted.system(), &drive).unwrap();
        assert!(
            newest(&places)
                .2
                .contains("is the kernel's again, as nvme0")
        );
        let drives = restarted.system().drives();
        assert!(drives.iter().all(|drive| drive.driver == Driver::Nvme));
        list(&places, &restarted.system(), false).unwrap();
        fs::remove_file(places.os_release()).unwrap();
        let refused = bind(&places, &restarted.system(), address, None).unwrap_err();
        assert!(
            refused.to_string().contains("`nacre nvme bind`"),
            "{refused}"
        );
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        restore(&places, &Machine::usual().system()).unwrap();
        // The cause of the kernel is in the history.
        bind(&places, &Machine::usual().system(), address, None).unwrap();
        let broken = Machine::usual();
        let refuse = ErrorKind::ResourceBusy;
        broken.kernel.refuse.lock().insert("bind".into(), refuse);
        restore(&places, &broken.system()).unwrap_err();
        let text = newest(&places).2;
        assert!(text.contains("failed: resource busy"), "{text}");
    }
}
