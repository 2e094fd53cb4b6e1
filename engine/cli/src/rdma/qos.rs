//! `nacre rdma qos`: compares `[qos]` of the configuration with the DCB settings of a network card,
//! applies it, and reverts it.
//!
//! `plan` only prints. `apply --yes` makes the changes over netlink and stores the undo; a failed
//! step reverts the steps before it. Cards lose these settings at a reset, so `apply --persist`
//! adds a systemd unit that applies them whenever the interface appears.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use nacre_transport_rdma_link::Roots;
use nacre_transport_rdma_link::dcb;
use nacre_transport_rdma_link::plan::{self, Action, Found, Step};
use nacre_transport_rdma_link::qos::Qos;
use serde_json::{Value, json};

use crate::{Connection, Failure, output, reply};
use nacre_engine::config;
use nacre_engine::methods::bdev::nvme::list::{GetNvmeControllers, NvmeControllersParams};
use nacre_engine::methods::nvmf::connected::{GetQpairs, SubsystemParams};
use nacre_engine_doctor::System;
use nacre_engine_doctor::roce::{self, report};
use nacre_engine_rpc::client::{Client, ClientError};

#[derive(Debug, Subcommand)]
pub(super) enum QosCommand {
    /// Print the commands that set an interface as [qos] of the configuration says
    #[command(after_help = "Example: nacre rdma qos plan --iface ens1f0")]
    Plan(QosArgs),
    /// Make these changes. Some cards stop traffic for a moment
    #[command(after_help = "Example: nacre rdma qos apply --iface ens1f0 --yes --persist")]
    Apply {
        #[command(flatten)]
        wanted: QosArgs,
        /// Make the changes; without it they are only printed
        #[arg(long)]
        yes: bool,
        /// Apply them again whenever the interface appears, by a systemd unit
        #[arg(long, requires = "yes")]
        persist: bool,
        #[command(flatten)]
        kept: QosPaths,
        #[command(flatten)]
        daemon: DaemonArgs,
    },
    /// Show the settings of an interface, without a configuration
    #[command(after_help = "Example: nacre rdma qos show --iface ens1f0")]
    Show {
        /// The Ethernet interface
        #[arg(long, value_name = "INTERFACE", value_parser = interface_name)]
        iface: String,
        /// Print JSON for programs, with pause frames and the counters of each priority
        #[arg(long)]
        json: bool,
    },
    /// Take the changes of `apply` back, also the systemd unit
    #[command(after_help = "Example: nacre rdma qos undo --iface ens1f0 --yes")]
    Undo {
        /// The Ethernet interface
        #[arg(long, value_name = "INTERFACE", value_parser = interface_name)]
        iface: String,
        /// Make the changes; without it they are only printed
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        kept: QosPaths,
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// The daemon whose connections a change could disturb.
#[derive(Debug, Args)]
pub(super) struct DaemonArgs {
    /// Change the settings although hosts or remote targets are connected over the interface
    #[arg(long)]
    while_in_use: bool,
    /// The daemon's socket
    #[arg(short = 'r', long, value_name = "PATH", env = "NACRE_RPC_SOCKET")]
    socket: Option<PathBuf>,
}

impl DaemonArgs {
    /// Some cards stop traffic for a moment when PFC or trust changes: refuses while a connection
    /// uses the interface. Without a daemon there is none.
    fn check(&self, iface: &str) -> Result<(), Failure> {
        if self.while_in_use {
            return Ok(());
        }
        let connection = Connection {
            socket: self.socket.clone(),
            timeout: Duration::from_secs(60),
            json: false,
        };
        let mut client = match connection.open() {
            Err(Failure::Daemon(ClientError::Unreachable { .. })) => return Ok(()),
            opened => opened?,
        };
        let peers = peers(&mut client, &Network::here(), iface)?;
        if peers.is_empty() {
            return Ok(());
        }
        Err(Failure::Failed(anyhow!(
            "{iface} is in use by {}: some cards stop traffic for a moment; remedy: change it when they are \
             disconnected, or with --while-in-use",
            peers.into_iter().collect::<Vec<_>>().join(", ")
        )))
    }
}

/// The addresses of this machine, and the physical interfaces below them.
struct Network {
    addresses: Vec<(IpAddr, Vec<String>)>,
}

impl Network {
    fn here() -> Self {
        let roots = Roots::real();
        let present = if_addrs::get_if_addrs().unwrap_or_default();
        let addresses = present.into_iter().map(|of| {
            let mut names = roce::physical(&roots, &of.name);
            names.push(of.name.clone());
            (of.ip(), names)
        });
        Self {
            addresses: addresses.collect(),
        }
    }

    fn is_on(&self, address: IpAddr, iface: &str) -> bool {
        let mut of = self.addresses.iter().filter(|(ip, _)| *ip == address);
        of.any(|(_, names)| names.iter().any(|name| name == iface))
    }
}

/// The hosts and remote targets that are connected over the interface.
fn peers(client: &mut Client, network: &Network, iface: &str) -> Result<BTreeSet<String>, Failure> {
    let ip = |address: &Value| -> Option<IpAddr> {
        let text = address["traddr"].as_str()?;
        text.split('%').next()?.parse().ok()
    };
    let mut peers = BTreeSet::new();
    for subsystem in reply::subsystems(client, None)? {
        let params = SubsystemParams {
            nqn: output::cell(subsystem.get("nqn")),
            tgt_name: None,
        };
        let pairs = client.call_for_json::<GetQpairs, _>(&params)?;
        for pair in pairs.as_array().into_iter().flatten() {
            let local = ip(&pair["listen_address"]);
            if local.is_some_and(|local| network.is_on(local, iface)) {
                peers.insert(pair["hostnqn"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    let params = NvmeControllersParams::default();
    let controllers = client.call_for_json::<GetNvmeControllers, _>(&params)?;
    for controller in controllers.as_array().into_iter().flatten() {
        let name = controller["name"].as_str().unwrap_or_default();
        let paths = controller["ctrlrs"].as_array().into_iter().flatten();
        let mut targets = paths.filter_map(|path| ip(&path["trid"]));
        let here = |to| {
            let to = SocketAddr::new(to, 0);
            System::real().probe.source_for(to).ok()
        };
        if targets.any(|to| here(to).is_some_and(|from| network.is_on(from, iface))) {
            peers.insert(format!("controller {name}"));
        }
    }
    Ok(peers)
}

#[derive(Debug, Args)]
pub(super) struct QosArgs {
    /// The Ethernet interface; several for the members of a bond
    #[arg(long, value_name = "INTERFACE", required = true, value_parser = interface_name)]
    iface: Vec<String>,
    /// The configuration file with [qos], instead of the system's
    #[arg(short = 'c', long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

const STATE: &str = "/var/lib/nacre/qos";

#[derive(Debug, Args)]
pub(super) struct QosPaths {
    /// Where the way back is written down
    #[arg(long, value_name = "DIR", default_value = STATE)]
    state: PathBuf,
    /// Where units of systemd are
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system")]
    units: PathBuf,
}

impl QosPaths {
    fn file(&self, iface: &str) -> PathBuf {
        self.state.join(format!("{iface}.json"))
    }

    fn unit(&self, iface: &str) -> PathBuf {
        self.units.join(unit_name(iface))
    }

    /// The steps that were made and not taken back.
    fn steps(&self, iface: &str) -> Result<Vec<Step>, Failure> {
        let file = self.file(iface);
        let text = match fs::read(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| cannot("read", &file))?,
        };
        let steps = serde_json::from_slice(&text);
        Ok(steps.with_context(|| format!("{} is not of `nacre rdma qos`", file.display()))?)
    }
}

/// A name that the kernel accepts, for it becomes part of paths and of units.
pub(crate) fn interface_name(name: &str) -> Result<String, String> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    if name.is_empty() || name.len() > 15 || name.starts_with(['-', '.']) || name.contains(bad) {
        return Err("it is not the name of a network interface".into());
    }
    Ok(name.to_owned())
}

fn cannot(what: &str, file: &Path) -> String {
    format!("cannot {what} {}", file.display())
}

pub(super) fn run(command: QosCommand) -> Result<(), Failure> {
    match command {
        QosCommand::Plan(wanted) => each(&wanted, |iface, steps| show(iface, steps, wanted.json)),
        QosCommand::Apply {
            wanted,
            yes,
            persist,
            kept,
            daemon,
        } => each(&wanted, |iface, steps| {
            show(iface, steps, wanted.json)?;
            if !yes {
                return output::line("# nothing was changed: --yes makes these changes");
            }
            if !steps.is_empty() {
                daemon.check(iface)?;
            }
            apply(iface, steps, &kept)?;
            if persist {
                persistent(iface, &wanted, &kept)?;
            }
            Ok(())
        }),
        QosCommand::Show { iface, json } => settings(&iface, json),
        QosCommand::Undo {
            iface,
            yes,
            kept,
            daemon,
        } => undo(&iface, yes, &kept, &daemon),
    }
}

fn settings(iface: &str, as_json: bool) -> Result<(), Failure> {
    // An interface without DCB is an error here, with its reason.
    dcb::read(iface).map_err(anyhow::Error::from)?;
    let facts = System::real()
        .probe
        .ethernet(&[iface.to_owned()], Duration::ZERO);
    for facts in &facts {
        if as_json {
            output::json(&serde_json::to_value(facts).expect("facts serialise"))?;
        } else {
            output::line(report::settings_of(&Qos::default(), facts).trim_end())?;
        }
    }
    Ok(())
}

fn each(
    wanted: &QosArgs,
    mut of: impl FnMut(&str, &[Step]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let qos = qos(wanted)?;
    for iface in &wanted.iface {
        let found = Found::read(iface, driver(iface)).map_err(anyhow::Error::from)?;
        of(iface, &plan::plan(iface, &found, &qos))?;
    }
    Ok(())
}

fn qos(wanted: &QosArgs) -> Result<Qos, Failure> {
    let file = wanted.config.clone().or_else(config::system_file);
    let loaded = config::load(file.as_deref(), std::env::vars_os(), &[]);
    let qos = loaded.map_err(anyhow::Error::from)?.settings.qos;
    if qos.is_empty() {
        return Err(Failure::Failed(anyhow!(
            "the configuration has no [qos]: nothing is asked for; remedy: write, for example, \
             [qos] storage = {{ dscp = 26, prio = 3, share = 50 }} and lossless = true"
        )));
    }
    Ok(qos)
}

fn driver(iface: &str) -> Option<String> {
    let link = Roots::real().sys.join("class/net").join(iface);
    let target = fs::read_link(link.join("device/driver")).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

fn show(iface: &str, steps: &[Step], as_json: bool) -> Result<(), Failure> {
    if as_json {
        let steps: Vec<_> = steps
            .iter()
            .map(|step| {
                json!({
                    "about": step.about,
                    "command": plan::command(iface, &step.action),
                    "undo": plan::command(iface, &step.undo),
                })
            })
            .collect();
        return output::json(&json!({ "interface": iface, "steps": steps }));
    }
    if steps.is_empty() {
        return output::line(&format!("# {iface} is set as [qos] says"));
    }
    for step in steps {
        output::line(&format!("# {}", step.about))?;
        output::line(&plan::command(iface, &step.action))?;
    }
    Ok(())
}

/// Writes the way back first: after a crash in between, `undo` still knows it. Steps that were made
/// before, and were lost at a reset of the card, are there already.
fn apply(iface: &str, steps: &[Step], kept: &QosPaths) -> Result<(), Failure> {
    if steps.is_empty() {
        return Ok(());
    }
    let before = kept.steps(iface)?;
    let mut all = before.clone();
    let new = steps.iter().filter(|step| !before.contains(step));
    all.extend(new.cloned());
    keep(kept, iface, &all)?;
    let made = plan::apply(steps, &mut |action| plan::make(iface, action));
    if let Err(failed) = made {
        if failed.left.is_empty() {
            keep(kept, iface, &before)?;
        }
        let remedy = format!("see the commands: `nacre rdma qos plan --iface {iface}`");
        return Err(Failure::Failed(anyhow!("{failed}; remedy: {remedy}")));
    }
    for step in steps {
        if let Action::Vendor(text) = &step.action {
            output::line(&format!("# not done, type it yourself: {text}"))?;
        }
    }
    output::line(&format!(
        "# {iface}: {} changed",
        output::count(steps.len() as u64, "setting")
    ))
}

fn keep(kept: &QosPaths, iface: &str, steps: &[Step]) -> Result<(), Failure> {
    let file = kept.file(iface);
    if steps.is_empty() {
        return match fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Ok(Err(error).with_context(|| cannot("remove", &file))?)
            }
            _ => Ok(()),
        };
    }
    fs::create_dir_all(&kept.state).with_context(|| cannot("make", &kept.state))?;
    let text = serde_json::to_vec_pretty(steps).map_err(anyhow::Error::from)?;
    // A file that is cut off by a crash would lose the way back.
    let new = kept.state.join(format!("{iface}.new"));
    fs::write(&new, text).with_context(|| cannot("write", &new))?;
    Ok(fs::rename(&new, &file).with_context(|| cannot("write", &file))?)
}

fn undo(iface: &str, yes: bool, kept: &QosPaths, daemon: &DaemonArgs) -> Result<(), Failure> {
    let steps = kept.steps(iface)?;
    let unit = kept.unit(iface);
    if steps.is_empty() && !unit.exists() {
        let why = format!("nothing was applied to {iface}, or it was taken back");
        return Err(Failure::Failed(anyhow!("{why}")));
    }
    for step in steps.iter().rev() {
        output::line(&plan::command(iface, &step.undo))?;
    }
    if !yes {
        return output::line("# nothing was changed: --yes makes these changes");
    }
    daemon.check(iface)?;
    if unit.exists() {
        systemctl(&["disable", &unit_name(iface)]);
        fs::remove_file(&unit).with_context(|| cannot("remove", &unit))?;
        systemctl(&["daemon-reload"]);
    }
    let left = plan::undo(&steps, &mut |action| plan::make(iface, action));
    if !left.is_empty() {
        let left = left.join("; ");
        return Err(Failure::Failed(anyhow!("not taken back: {left}")));
    }
    keep(kept, iface, &[])?;
    output::line(&format!("# {iface} is as it was"))
}

fn unit_name(iface: &str) -> String {
    format!("nacre-qos-{}.service", escaped(iface, b"-:_."))
}

/// Escapes text like systemd-escape(1): letters, digits and `keep` stay.
fn escaped(text: &str, keep: &[u8]) -> String {
    let bytes = text.bytes().map(|byte| {
        if byte.is_ascii_alphanumeric() || keep.contains(&byte) {
            char::from(byte).to_string()
        } else {
            format!("\\x{byte:02x}")
        }
    });
    bytes.collect()
}

/// An argument of ExecStart, without the characters that systemd would expand.
fn argument(text: &str) -> String {
    let text = text.replace('%', "%%").replace('$', "$$");
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:=@%$".contains(c);
    if text.chars().all(plain) {
        return text;
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Applies the settings when the interface appears: after boot, and after the card's reset, which
/// has stopped its connections already.
fn unit(iface: &str, program: &Path, config: Option<&Path>, state: &Path) -> String {
    let path = |path: &Path| argument(&path.display().to_string());
    let config = config.map_or(String::new(), |file| format!(" -c {}", path(file)));
    let state = if state == Path::new(STATE) {
        String::new()
    } else {
        format!(" --state {}", path(state))
    };
    let device = format!(
        "sys-subsystem-net-devices-{}.device",
        escaped(iface, b":_.")
    );
    format!(
        "[Unit]\n\
         Description=Network classes of {} for Nacre\n\
         BindsTo={device}\n\
         After={device}\n\
         Before=nacre.service\n\n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         ExecStart={} rdma qos apply --yes --while-in-use --iface {}{config}{state}\n\n\
         [Install]\n\
         WantedBy={device}\n",
        iface.replace('%', "%%"),
        path(program),
        argument(iface)
    )
}

fn persistent(iface: &str, wanted: &QosArgs, kept: &QosPaths) -> Result<(), Failure> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let config = match &wanted.config {
        Some(file) => Some(fs::canonicalize(file).with_context(|| cannot("find", file))?),
        None => None,
    };
    let state = std::path::absolute(&kept.state).with_context(|| cannot("find", &kept.state))?;
    let file = kept.unit(iface);
    fs::create_dir_all(&kept.units).with_context(|| cannot("make", &kept.units))?;
    fs::write(&file, unit(iface, &program, config.as_deref(), &state))
        .with_context(|| cannot("write", &file))?;
    let enabled = systemctl(&["daemon-reload"]) && systemctl(&["enable", &unit_name(iface)]);
    let file = file.display();
    output::line(&if enabled {
        format!("# {file} applies it whenever {iface} appears")
    } else {
        let name = unit_name(iface);
        format!(
            "# {file} is written; `systemctl enable {name}` makes it apply whenever {iface} appears"
        )
    })
}

/// True if it succeeded. Systems without systemd have the file only.
fn systemctl(arguments: &[&str]) -> bool {
    let output = Command::new("systemctl").args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_transport_rdma_link::dcb::{App, Change};

    fn steps() -> Vec<Step> {
        let apps = vec![App::dscp(26, 3)];
        vec![Step {
            about: "packets with our DSCP get our priority".into(),
            action: Action::Dcb(Change::AddApps(apps.clone())),
            undo: Action::Dcb(Change::DeleteApps(apps)),
        }]
    }

    #[test]
    fn undo_steps_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let kept = QosPaths {
            state: dir.path().join("qos"),
            units: dir.path().into(),
        };
        assert_eq!(kept.steps("eth0").unwrap(), []);
        keep(&kept, "eth0", &steps()).unwrap();
        assert_eq!(kept.steps("eth0").unwrap(), steps());
        keep(&kept, "eth0", &[]).unwrap();
        assert!(!kept.file("eth0").exists());
        fs::write(kept.file("eth0"), "not ours").unwrap();
        assert!(kept.steps("eth0").is_err());
    }

    #[test]
    fn the_unit_applies_when_the_interface_appears() {
        let text = unit(
            "ens1f0",
            Path::new("/usr/bin/nacre"),
            None,
            Path::new(STATE),
        );
        assert!(text.contains("BindsTo=sys-subsystem-net-devices-ens1f0.device"));
        let command =
            "ExecStart=/usr/bin/nacre rdma qos apply --yes --while-in-use --iface ens1f0\n";
        assert!(text.contains(command), "{text}");
        // systemd reads `-` in a device's name as `/`, and expands `%`.
        let config = Path::new("/etc/nacre 1/100%.toml");
        let state = Path::new("/srv/qos");
        let text = unit("san-a", Path::new("/usr/bin/nacre"), Some(config), state);
        let device = r"BindsTo=sys-subsystem-net-devices-san\x2da.device";
        assert!(text.contains(device), "{text}");
        let command = "--iface san-a -c \"/etc/nacre 1/100%%.toml\" --state /srv/qos\n";
        assert!(text.contains(command), "{text}");
        assert_eq!(unit_name("a-b@c"), r"nacre-qos-a-b\x40c.service");
    }

    #[test]
    fn an_address_belongs_to_the_interfaces_below_it_too() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let network = Network {
            addresses: vec![
                (ip("192.0.2.1"), vec!["eth0".into(), "bond0.5".into()]),
                (ip("192.0.2.9"), vec!["eth9".into()]),
            ],
        };
        assert!(network.is_on(ip("192.0.2.1"), "eth0"));
        assert!(network.is_on(ip("192.0.2.1"), "bond0.5"));
        assert!(!network.is_on(ip("192.0.2.9"), "eth0"));
        assert!(!network.is_on(ip("192.0.2.7"), "eth0"));
    }

    #[test]
    fn names_become_no_other_path() {
        for good in ["eth0", "ens1f0np0", "san-a", "bond0.100", "a@b"] {
            assert_eq!(interface_name(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "a b",
            "a\nb",
            "-x",
            "sixteen-letters-",
        ] {
            assert!(interface_name(bad).is_err(), "{bad}");
        }
    }
}
