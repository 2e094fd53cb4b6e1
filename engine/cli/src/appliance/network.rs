//! `nacre appliance network`: changes the settings of network interfaces, and undoes the change
//! after a minute unless it is confirmed.

use std::net::IpAddr;

use clap::{Args, Subcommand};
use nacre_engine_appliance::acts::ActKind;
use nacre_engine_appliance::network::{
    self, Addressing, HostAddress, Interface, Settings, TIME_TO_CONFIRM_S,
};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::run::{Programs, Run};
use nacre_engine_appliance::status;

use super::Noted;
use crate::{Failure, output};

#[derive(Debug, Subcommand)]
pub(crate) enum NetworkCommand {
    /// Show the interfaces and their settings
    Show,
    /// Put settings in force, for a minute unless confirmed
    #[command(
        after_help = "Without `nacre appliance network confirm` the former settings return after 60 s, or at the next start.\n\n\
                      Example: nacre appliance network set enp1s0 --address 192.0.2.7/24 --gateway 192.0.2.1"
    )]
    Set(SetArgs),
    /// Keep the new settings
    Confirm,
    /// Undo the new settings now
    Revert {
        /// Change files only: at a boot, before the network starts
        #[arg(long)]
        at_boot: bool,
        /// The time to confirm is over: for the timer
        #[arg(long, hide = true, conflicts_with = "at_boot")]
        not_kept: bool,
    },
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("how").required(true))]
pub(crate) struct SetArgs {
    /// The interface
    interface: Interface,
    /// Take addresses, routes and name servers from the network
    #[arg(long, group = "how")]
    dhcp: bool,
    /// An address with its prefix; several times for several addresses
    #[arg(long, value_name = "ADDRESS/PREFIX", group = "how")]
    address: Vec<HostAddress>,
    /// The default gateway, one for IPv4 and one for IPv6
    #[arg(long, value_name = "ADDRESS", conflicts_with = "dhcp")]
    gateway: Vec<IpAddr>,
    /// A name server, up to three
    #[arg(long, value_name = "ADDRESS")]
    dns: Vec<IpAddr>,
    /// Largest packet in bytes, such as 9000
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
}

pub(crate) fn run(
    command: NetworkCommand,
    places: &Places,
    programs: &Programs,
) -> Result<(), Failure> {
    match command {
        NetworkCommand::Show => show(places),
        NetworkCommand::Set(args) => {
            let settings = Settings {
                addressing: if args.dhcp {
                    Addressing::Dhcp
                } else {
                    Addressing::Static {
                        addresses: args.address,
                        gateways: args.gateway,
                    }
                },
                dns: args.dns,
                mtu: args.mtu,
            };
            settings
                .check()
                .map_err(|error| Failure::Usage(error.to_string()))?;
            // Other systems have their own files for this.
            status::image(places).map_err(anyhow::Error::from)?;
            noted(places, || {
                change(places, programs, &args.interface, &settings)
            })
        }
        NetworkCommand::Confirm => noted(places, || keep(places, programs)),
        NetworkCommand::Revert { at_boot, not_kept } => {
            // Each boot asks for it.
            if let Ok(None) = network::pending(places) {
                return output::line(NONE_WAITS);
            }
            noted(places, || {
                let done = revert(places, programs, !at_boot)?;
                Ok(match (at_boot, not_kept) {
                    (false, false) => done,
                    (true, _) => format!("the machine started before they were kept: {done}"),
                    (_, true) => format!("not kept within {TIME_TO_CONFIRM_S} s: {done}"),
                })
            })
        }
    }
}

const NONE_WAITS: &str = "no change waits for a confirmation";

/// Executes a change with an entry in the history, and says its result.
pub(super) fn noted(
    places: &Places,
    act: impl FnOnce() -> Result<String, Failure>,
) -> Result<(), Failure> {
    output::line(&with_entry(places, act)?)
}

/// Executes a change with an entry in the history.
pub(crate) fn with_entry(
    places: &Places,
    act: impl FnOnce() -> Result<String, Failure>,
) -> Result<String, Failure> {
    let entry = Noted::begin(places, ActKind::Network, None);
    let done = act();
    entry.end(done.as_ref().map(Clone::clone));
    done
}

pub(super) fn change(
    places: &Places,
    programs: &impl Run,
    interface: &Interface,
    settings: &Settings,
) -> Result<String, Failure> {
    let program = program()?;
    network::set(places, programs, &program, interface, settings).map_err(anyhow::Error::from)?;
    Ok(format!(
        "the new settings of {} are in force for {TIME_TO_CONFIRM_S} s; `nacre appliance network confirm` keeps them",
        interface.name()
    ))
}

pub(crate) fn keep(places: &Places, programs: &impl Run) -> Result<String, Failure> {
    let interface = network::confirm(places, programs).map_err(anyhow::Error::from)?;
    Ok(format!("the new settings of {interface} stay"))
}

pub(crate) fn revert(
    places: &Places,
    programs: &impl Run,
    has_networkd: bool,
) -> Result<String, Failure> {
    let reverted = network::revert(places, programs, has_networkd);
    Ok(match reverted.map_err(anyhow::Error::from)? {
        Some(interface) => format!("the former settings of {interface} are back"),
        None => NONE_WAITS.into(),
    })
}

/// This program's path, for the timer that undoes a change.
pub(crate) fn program() -> Result<String, Failure> {
    let path = std::env::current_exe()?;
    match path.to_str() {
        Some(path) => Ok(path.to_owned()),
        None => Err(Failure::Usage(format!(
            "{}: the path is not UTF-8",
            path.display()
        ))),
    }
}

/// A line about a change that waits for its confirmation.
pub(crate) fn pending_line(places: &Places) -> Result<Option<String>, Failure> {
    let pending = network::pending(places).map_err(anyhow::Error::from)?;
    Ok(pending.map(|pending| {
        format!(
            "network: new settings of {} wait for `nacre appliance network confirm`",
            pending.interface
        )
    }))
}

fn show(places: &Places) -> Result<(), Failure> {
    let addresses = if_addrs::get_if_addrs()?;
    for name in network::interfaces(places).map_err(anyhow::Error::from)? {
        let own: Vec<String> = addresses
            .iter()
            .filter(|address| address.name == name)
            .map(|address| address.ip().to_string())
            .collect();
        let own = if own.is_empty() {
            "no address".into()
        } else {
            own.join(", ")
        };
        output::line(&format!("{name}: {own}"))?;
        let text = network::show(places, &name);
        let lines = text.as_deref().unwrap_or_default().lines();
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            output::line(&format!("    {line}"))?;
        }
    }
    match pending_line(places)? {
        Some(line) => output::line(&line),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::{FromArgMatches, Subcommand};

    use super::*;

    fn parse(line: &str) -> Result<NetworkCommand, clap::Error> {
        let command = NetworkCommand::augment_subcommands(clap::Command::new("network"));
        let words = std::iter::once("network").chain(line.split(' '));
        NetworkCommand::from_arg_matches(&command.try_get_matches_from(words)?)
    }

    #[test]
    fn settings_on_the_command_line() {
        for good in [
            "set eth0 --dhcp",
            "set eth0 --dhcp --dns 192.0.2.1 --mtu 9000",
            "set eth0 --address 192.0.2.7/24 --address 2001:db8::7/64 --gateway 192.0.2.1",
            "revert --at-boot",
            "revert --not-kept",
        ] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in [
            "set eth0",
            "set eth0 --dhcp --address 192.0.2.7/24",
            "set eth0 --dhcp --gateway 192.0.2.1",
            "set eth0 --gateway 192.0.2.1",
            "set eth0 --address 192.0.2.7",
            "set ../x --dhcp",
            "revert --at-boot --not-kept",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
