//! `nacre appliance`: installation, updates, rollback, backup, reset, name, drives and network of a
//! machine that runs Nacre from its image. Runs on the appliance itself, as root.

mod drive;
pub(crate) mod install;
pub(crate) mod network;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use nacre_bdev_nvme_vfio::pci::System;
use nacre_engine_appliance::acts::{self, ActKind, ActState, Entry, Request, RequestError};
use nacre_engine_appliance::bundle::{BundleError, Unpacked};
use nacre_engine_appliance::guard::{self, Obstacle};
use nacre_engine_appliance::host::{self, HostName};
use nacre_engine_appliance::lock::{Lock, LockError};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::run::{Programs, Run};
use nacre_engine_appliance::slots::{self, Tries};
use nacre_engine_appliance::status::{self, Status};
use nacre_engine_appliance::update::{UpdateError, UpdateStep};
use nacre_engine_appliance::version::Version;
use nacre_engine_appliance::{backup, reset, update};
use serde_json::json;

use super::{Connection, Failure, output};
use nacre_engine::methods::volume::list::List;
use nacre_engine_rpc::method::NoParams;

#[derive(Debug, Args)]
pub(crate) struct ApplianceArgs {
    #[command(subcommand)]
    command: ApplianceCommand,
}

#[derive(Debug, Subcommand)]
enum ApplianceCommand {
    /// Show the version of each slot, its tries, and the free space for state
    Status {
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Write the system of the USB disk that started this machine to another disk
    #[command(
        after_help = "Only after a start with the boot entry \"Install Nacre\" of the image. Without --yes the command asks\n\
                      for the serial number again. A disk with partitions, file systems or labels of Nacre needs --force.\n\
                      The boot disk, disks in use and disks without a serial number of their own are refused.\n\n\
                      The command reads back every byte that it wrote. An interrupted installation leaves a disk that\n\
                      does not boot: repeat it.\n\n\
                      Example: nacre appliance install --disk S64DNX0R600021 --yes"
    )]
    Install(install::InstallArgs),
    /// Install a signed update bundle in the slot that does not run
    #[command(
        after_help = "The next restart boots the new version; after three boots without success the former one returns.\n\
                      Refused while a volume is resynced, or while others of its replicas are not in sync and this\n\
                      node has the last ones that are.\n\n\
                      Exit code 75: refused because of a volume or another command; the update may succeed later.\n\n\
                      Example: nacre appliance update nacre_0.2.0.tar"
    )]
    Update {
        #[command(flatten)]
        connection: Connection,
        /// The bundle: nacre_VERSION.tar
        file: PathBuf,
        /// Install a version older than the one that runs
        #[arg(long)]
        allow_older: bool,
        /// Update also while volumes depend on this node, or the daemon does not answer
        #[arg(long)]
        force: bool,
    },
    /// Boot the other version from the next restart on
    Rollback {
        /// Also if the other version failed in all its tries
        #[arg(long)]
        force: bool,
    },
    /// Execute the request that the page left; systemd starts this
    #[command(hide = true)]
    Obey {
        #[command(flatten)]
        connection: Connection,
    },
    /// Show updates, rollbacks and restarts of this machine, the newest first
    History {
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Write configuration and state to a new file
    #[command(
        after_help = "The file holds the keys and certificates of the state as they are there: keep it as safe as the\n\
                      machine. Files of 32 MiB and more, such as disk images, and update bundles are left out."
    )]
    Export {
        /// The new file
        file: PathBuf,
    },
    /// Replace configuration and state by those of an export
    #[command(
        after_help = "The whole export is checked before anything changes. The daemon stops for a moment. The former\n\
                      state stays in /var/lib/nacre.before-restore until the next restore. A nacre.toml of the boot\n\
                      partition replaces the restored one at the next boot."
    )]
    Restore {
        /// The export
        file: PathBuf,
        /// Also an export of a newer version
        #[arg(long)]
        force: bool,
    },
    /// Erase configuration and state at the next start, and restart now
    FactoryReset {
        /// The name of this machine, as a confirmation
        host: String,
    },
    /// Show the name of this machine, or give it another one
    #[command(
        after_help = "The new name counts at once, and after each start. The page's own certificate is made again for it, so\n\
                      browsers ask once more. A node of a cluster without `[cluster] node` takes it when its daemon starts next.\n\
                      A name has up to 63 letters, digits, '-' and '.'.\n\n\
                      Example: nacre appliance name storage1"
    )]
    Name {
        /// The new name
        name: Option<HostName>,
    },
    /// NVMe drives that the daemon polls itself, now and after each start
    Drive {
        #[command(subcommand)]
        command: drive::DriveCommand,
    },
    /// Network settings, undone after a minute unless confirmed
    Network {
        #[command(subcommand)]
        command: network::NetworkCommand,
    },
}

/// Exit code of an update that a later attempt may install: EX_TEMPFAIL of sysexits(3).
const NOT_NOW: u8 = 75;
/// Longest time for a command of systemd, and for writing a slot.
const PATIENCE: Duration = Duration::from_secs(90);
const WRITE_PATIENCE: Duration = Duration::from_secs(1800);

pub(crate) fn run(args: ApplianceArgs) -> Result<(), Failure> {
    let places = Places::system();
    let programs = Programs::new(PATIENCE);
    match args.command {
        ApplianceCommand::Status { json } => show(&places, json),
        ApplianceCommand::Install(args) => install::run(&args, &places),
        ApplianceCommand::Update {
            connection,
            file,
            allow_older,
            force,
        } => {
            let json = connection.json;
            let done = update(&places, &connection, &file, allow_older, force)?;
            say_installed(&places, &done, json)
        }
        ApplianceCommand::Rollback { force } => output::line(&roll_back(&places, force)?),
        ApplianceCommand::Obey { connection } => obey(&places, &programs, &connection),
        ApplianceCommand::History { json } => history(&places, json),
        ApplianceCommand::Export { file } => export(&places, &file),
        ApplianceCommand::Restore { file, force } => restore(&places, &programs, &file, force),
        ApplianceCommand::FactoryReset { host } => factory_reset(&places, &programs, &host),
        ApplianceCommand::Name { name: None } => show_name(&places),
        ApplianceCommand::Name { name: Some(name) } => set_name(&places, &name),
        ApplianceCommand::Drive { command } => drive::run(command, &places, &System::real()),
        ApplianceCommand::Network { command } => network::run(command, &places, &programs),
    }
}

fn show(places: &Places, json: bool) -> Result<(), Failure> {
    let status = status::status(places).map_err(anyhow::Error::from)?;
    if json {
        return output::json(&json!(status));
    }
    output::line(&format!(
        "{} {} on {}",
        status.image, status.version, status.host
    ))?;
    output::table(
        &["version", "state", "tries left", "failed", "boot entry"],
        rows(&status),
    )?;
    if status.slots.len() < 2 {
        output::line("the other slot is empty")?;
    }
    if let Some(entry) = pinned(&status) {
        output::line(&entry)?;
    }
    output::line(&format!(
        "free for state: {}",
        output::bytes(status.free_bytes)
    ))?;
    match network::pending_line(places)? {
        Some(line) => output::line(&line),
        None => Ok(()),
    }
}

fn rows(status: &Status) -> impl Iterator<Item = Vec<String>> {
    status.slots.iter().map(|slot| {
        let number = |part: fn(Tries) -> u32| slot.tries.map(|tries| part(tries).to_string());
        vec![
            slot.version.to_string(),
            slot.state.text().to_owned(),
            number(|tries| tries.left).unwrap_or_default(),
            number(|tries| tries.failed).unwrap_or_default(),
            slot.entry.clone().unwrap_or_default(),
        ]
    })
}

/// The boot menu's key `d` fixes an entry, whatever the tries say.
fn pinned(status: &Status) -> Option<String> {
    let entry = status.pinned_entry.as_ref()?;
    Some(format!(
        "warning: the boot menu always starts {entry}; `bootctl set-default ''` ends that"
    ))
}

/// Refuses an act that would stop or delay volumes.
fn check_unless(force: bool, connection: &Connection) -> Result<(), Failure> {
    if force {
        return Ok(());
    }
    let volumes = connection.call_for_json::<List>(&NoParams {})?;
    let obstacles = guard::obstacles(volumes).map_err(anyhow::Error::from)?;
    refuse(&obstacles)
}

fn refuse(obstacles: &[Obstacle]) -> Result<(), Failure> {
    if obstacles.is_empty() {
        return Ok(());
    }
    let causes: Vec<String> = obstacles.iter().map(ToString::to_string).collect();
    Err(Failure::Exit {
        code: NOT_NOW,
        error: anyhow::anyhow!(
            "{}; wait until they are in sync, or --force",
            causes.join("; ")
        ),
    })
}

/// An installed bundle, or the version of a bundle that runs already.
#[derive(Debug)]
enum Installed {
    Now(Unpacked),
    Before(Version),
}

impl Installed {
    fn text(&self) -> String {
        match self {
            Self::Now(done) => format!(
                "version {} is installed, signed by the key \"{}\"; a restart boots it",
                done.version, done.key
            ),
            Self::Before(version) => {
                format!("version {version} runs already: nothing to install")
            }
        }
    }
}

/// Installs a bundle, with an entry of the history.
fn update(
    places: &Places,
    connection: &Connection,
    file: &Path,
    allow_older: bool,
    force: bool,
) -> Result<Installed, Failure> {
    let entry = Noted::begin(places, ActKind::Update, Some(file));
    let done = match check_unless(force, connection) {
        Ok(()) => install_bundle(places, file, allow_older, &entry),
        Err(refused) => Err(refused),
    };
    entry.end(done.as_ref().map(Installed::text));
    done
}

fn install_bundle(
    places: &Places,
    file: &Path,
    allow_older: bool,
    entry: &Noted<'_>,
) -> Result<Installed, Failure> {
    let programs = Programs::new(WRITE_PATIENCE);
    let mut report = |step| match step {
        UpdateStep::Unpack { percent } => {
            entry.step("checks and unpacks the bundle", Some(percent))
        }
        UpdateStep::Write => entry.step("writes the other slot", None),
    };
    match update::update(places, &programs, file, allow_older, &mut report) {
        Ok(done) => Ok(Installed::Now(done)),
        // Also after a power failure between an update and the removal of its bundle.
        Err(UpdateError::Bundle(BundleError::Runs { version })) => Ok(Installed::Before(version)),
        Err(error) => Err(failure(error)),
    }
}

fn say_installed(places: &Places, done: &Installed, json: bool) -> Result<(), Failure> {
    if json {
        return output::json(&match done {
            Installed::Now(done) => json!({
                "version": done.version.to_string(), "key": done.key, "bytes": done.bytes,
            }),
            Installed::Before(version) => {
                json!({ "version": version.to_string(), "key": null, "bytes": 0 })
            }
        });
    }
    output::line(&match done {
        Installed::Now(_) => format!("{} (`systemctl reboot`)", done.text()),
        Installed::Before(_) => done.text(),
    })?;
    // The update is done, whatever the disk answers now.
    match status::status(places).ok().as_ref().and_then(pinned) {
        Some(warning) => output::line(&warning),
        None => Ok(()),
    }
}

/// An entry of the history. A history that cannot be written delays no act: it warns.
struct Noted<'a>(RefCell<Option<Entry<'a>>>);

impl<'a> Noted<'a> {
    fn begin(places: &'a Places, kind: ActKind, file: Option<&Path>) -> Self {
        Self(RefCell::new(warned(Entry::begin(places, kind, file))))
    }

    fn step(&self, text: &str, percent: Option<u8>) {
        if let Some(entry) = &mut *self.0.borrow_mut() {
            warned(entry.step(text, percent));
        }
    }

    fn end(self, result: Result<String, &Failure>) {
        let Some(entry) = self.0.into_inner() else {
            return;
        };
        let (state, text) = match result {
            Ok(text) => (ActState::Done, text),
            Err(failure) => (ActState::Failed, failure.to_string()),
        };
        warned(entry.end(state, &text));
    }
}

fn warned<T>(result: Result<T, RequestError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        // The act itself refuses such a machine.
        Err(RequestError::Status(_)) => None,
        Err(error) => {
            eprintln!("nacre: the history of this machine: {error}");
            None
        }
    }
}

/// Executes the request of the page. Its result is in the history, for the page; that of a light is
/// in the journal only.
fn obey(places: &Places, programs: &impl Run, connection: &Connection) -> Result<(), Failure> {
    let Some(request) = acts::take(places).map_err(anyhow::Error::from)? else {
        return output::line("there is no request");
    };
    match request {
        Request::Update {
            file,
            allow_older,
            force,
        } => {
            let done = update(places, connection, &file, allow_older, force)?;
            if file == places.uploads().join(acts::UPLOAD) {
                std::fs::remove_file(&file).with_context(|| file.display().to_string())?;
            }
            say_installed(places, &done, false)
        }
        Request::Rollback { force } => output::line(&roll_back(places, force)?),
        Request::Restart { force } => {
            let guard = || check_unless(force, connection);
            stop(places, programs, ActKind::Restart, guard)
        }
        Request::PowerOff { force } => {
            let guard = || check_unless(force, connection);
            stop(places, programs, ActKind::PowerOff, guard)
        }
        Request::SetNetwork {
            interface,
            settings,
        } => network::noted(places, || {
            network::change(places, programs, &interface, &settings)
        }),
        Request::KeepNetwork => network::noted(places, || network::keep(places, programs)),
        Request::RevertNetwork => {
            network::noted(places, || network::revert(places, programs, true))
        }
        Request::SetName { name } => set_name(places, &name),
        Request::BindDrive { address, serial } => {
            drive::bind(places, &System::real(), address, serial.as_deref())
        }
        Request::UnbindDrive { drive } => drive::unbind(places, &System::real(), &drive),
        Request::Locate { disk, on } => {
            output::line(&crate::nvme::locate(&System::real(), &disk, on)?)
        }
    }
}

/// Restarts the machine, or powers it off, and says so.
fn stop(
    places: &Places,
    programs: &impl Run,
    kind: ActKind,
    guard: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    output::line(&stopped(places, programs, kind, guard)?)
}

/// Restarts the machine, or powers it off, with an entry in the history. Refused during an update
/// or a restore.
pub(crate) fn stopped(
    places: &Places,
    programs: &impl Run,
    kind: ActKind,
    guard: impl FnOnce() -> Result<(), Failure>,
) -> Result<String, Failure> {
    let (verb, text) = match kind {
        ActKind::PowerOff => ("poweroff", "the machine powers off"),
        _ => ("reboot", "the machine restarts"),
    };
    let entry = Noted::begin(places, kind, None);
    // Not in the middle of an update or a restore.
    let lock = guard().and_then(|()| {
        let lock = Lock::of_system(places).map_err(anyhow::Error::from)?;
        Ok(lock)
    });
    let lock = match lock {
        Ok(lock) => lock,
        Err(failure) => {
            entry.end(Err(&failure));
            return Err(failure);
        }
    };
    // Noted first: the act ends this process.
    entry.end(Ok(text.to_owned()));
    let asked = programs.run("systemctl", &[verb]);
    drop(lock);
    if let Err(error) = asked {
        let failure = Failure::Failed(error.into());
        Noted::begin(places, kind, None).end(Err(&failure));
        return Err(failure);
    }
    Ok(text.to_owned())
}

fn history(places: &Places, json: bool) -> Result<(), Failure> {
    let acts = acts::history(places);
    if json {
        return output::json(&json!(acts));
    }
    output::table(
        &["began", "act", "state", "version", "result"],
        acts.iter().map(|act| {
            let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            vec![
                crate::web::date(&json!(act.began_ms)).unwrap_or_default(),
                word(json!(act.act)),
                word(json!(act.state)),
                act.running.clone(),
                act.text.clone(),
            ]
        }),
    )
}

fn failure(error: UpdateError) -> Failure {
    match error {
        UpdateError::Lock(LockError::Taken) => Failure::Exit {
            code: NOT_NOW,
            error: error.into(),
        },
        error => Failure::Failed(error.into()),
    }
}

fn roll_back(places: &Places, force: bool) -> Result<String, Failure> {
    let entry = Noted::begin(places, ActKind::Rollback, None);
    let done = choose_other(places, force).map_err(Failure::Failed);
    entry.end(done.as_ref().map(Clone::clone));
    done
}

fn choose_other(places: &Places, force: bool) -> anyhow::Result<String> {
    let running = status::image(places)?.version;
    let _lock = Lock::of_system(places)?;
    let version = slots::roll_back(places, &running, force)?;
    Ok(format!(
        "version {version} starts at the next restart (`systemctl reboot`); {running} runs until then"
    ))
}

fn export(places: &Places, file: &Path) -> Result<(), Failure> {
    let _lock = Lock::of_system(places).map_err(anyhow::Error::from)?;
    let done = backup::export(places, file).map_err(anyhow::Error::from)?;
    output::line(&format!(
        "{}: {}, {}",
        file.display(),
        output::count(done.files as u64, "file"),
        output::bytes(done.bytes)
    ))?;
    for name in done.left_out {
        output::line(&format!("left out: {name}"))?;
    }
    Ok(())
}

fn restore(places: &Places, programs: &impl Run, file: &Path, force: bool) -> Result<(), Failure> {
    let done = backup::restore(places, programs, file, force).map_err(anyhow::Error::from)?;
    for name in &done.kept {
        output::line(&format!("kept as it was: {name}"))?;
    }
    output::line(&format!(
        "{} of {} (version {}) restored; the former state is in {}",
        output::count(done.files as u64, "file"),
        done.host,
        done.version,
        places.former_state().display()
    ))
}

fn show_name(places: &Places) -> Result<(), Failure> {
    status::image(places).map_err(anyhow::Error::from)?;
    output::line(&status::host_name(places))
}

fn set_name(places: &Places, name: &HostName) -> Result<(), Failure> {
    output::line(&rename(places, name)?)
}

/// Names the machine, with an entry in the history; returns the result as text.
pub(crate) fn rename(places: &Places, name: &HostName) -> Result<String, Failure> {
    // Other systems have their own ways for this.
    status::image(places).map_err(anyhow::Error::from)?;
    let entry = Noted::begin(places, ActKind::Name, None);
    let former = status::host_name(places);
    let done = host::set(places, name).map_err(|error| Failure::Failed(error.into()));
    let done = done.map(|()| format!("the name of this machine is {name}, and was {former}"));
    entry.end(done.as_ref().map(Clone::clone));
    done
}

fn factory_reset(places: &Places, programs: &impl Run, host: &str) -> Result<(), Failure> {
    reset::request(places, host).map_err(anyhow::Error::from)?;
    output::line("the next start erases configuration and state; restarting")?;
    programs
        .run("systemctl", &["reboot"])
        .context("the reset is requested, and happens at the next start")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_during_another_command_may_succeed_later() {
        let taken = failure(UpdateError::Lock(LockError::Taken));
        assert!(matches!(taken, Failure::Exit { code: NOT_NOW, .. }));
        let missing = failure(UpdateError::Open {
            path: "x".into(),
            source: std::io::ErrorKind::NotFound.into(),
        });
        assert!(matches!(missing, Failure::Failed(_)));
    }

    #[test]
    fn an_update_waits_for_volumes_by_name() {
        assert!(refuse(&[]).is_ok());
        let obstacles = [
            Obstacle::Resync {
                volume: "a".into(),
                device: "left".into(),
            },
            Obstacle::LastInSync { volume: "b".into() },
        ];
        let refused = refuse(&obstacles).unwrap_err();
        assert!(matches!(refused, Failure::Exit { code: NOT_NOW, .. }));
        let text = refused.to_string();
        for part in ["volume a", "left", "volume b", "--force"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
