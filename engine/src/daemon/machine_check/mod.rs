//! Checks a configuration on this machine: finds entries that `nacre serve` would refuse here, or
//! retry forever.

mod files;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use crate::config::Personality;
use crate::config::settings::{Bdev, BdevKind};
use crate::config::{Loaded, Problem, Settings, in_order, origin_of};
use crate::plane::demand::IobufOptions;
use crate::services::listeners::plan::{Machine, interface_of, matches};
use crate::services::listeners::system::System;
use crate::values::address::ScopedIp;
use crate::values::selector::Selector;
use nacre_hugepages::HugepagePolicy;
use nacre_nvmf::address::IpTransport;

/// Takes the key of an entry, the cause, and the remedy, which may be empty.
type Refuse<'a> = dyn FnMut(&str, String, String) + 'a;

/// Checks the settings against this machine. Reads files and queries the kernel; changes nothing.
pub fn check(loaded: &Loaded) -> Vec<Problem> {
    let settings = &loaded.settings;
    let mut problems = Vec::new();
    let refuse: &mut Refuse<'_> = &mut |key: &str, cause: String, remedy: String| {
        let origin = origin_of(&loaded.origins, key);
        let problem = Problem::new(origin, key, format!("{key}: {cause}"));
        problems.push(if remedy.is_empty() {
            problem
        } else {
            problem.remedy(remedy)
        });
    };
    let (options, nacre) = (IobufOptions::default(), Personality::Nacre);
    let plane = crate::plane::demand::data_path(settings, &options, nacre);
    if let Err(error) = plane.and_then(|plane| crate::plane::arenas(&plane)) {
        let key = match error {
            crate::plane::PlaneError::Cores { .. } => "reactor.cores",
            crate::plane::PlaneError::NoReactor { .. } => "memory.numa_mb",
            _ => "memory.size_mb",
        };
        refuse(key, error.to_string(), String::new());
    }
    for (key, asked) in [
        ("memory.size_mb", settings.memory.size_mb),
        ("memory.numa_mb", settings.memory.numa_mb.iter().sum()),
    ] {
        if let Some(cause) = beyond_memory(asked) {
            let remedy = "choose less; the default suits most machines".into();
            refuse(key, cause, remedy);
        }
    }
    files::check(settings, refuse);
    if let Some((cause, remedy)) = no_pages(settings) {
        refuse("memory.hugepages", cause, remedy);
    }
    if let Some(address) = settings.metrics.listen
        && let Err(cause) = has_address(address)
    {
        let remedy = "use an address of this machine, 0.0.0.0:PORT or [::]:PORT".into();
        refuse("metrics.listen", cause, remedy);
    }
    for (at, bdev) in settings.bdev.iter().enumerate() {
        if let Some(cause) = file_missing(bdev) {
            let remedy = "mount it, correct the path, or add size = \"…\" to make the file".into();
            refuse(&format!("bdev[{at}].path"), cause, remedy);
        }
    }
    match crate::services::listeners::check_here(settings) {
        Ok((machine, listeners)) => {
            on_network(settings, &machine, refuse);
            problems.extend(
                listeners
                    .into_iter()
                    .map(|problem| located(problem, loaded)),
            );
        }
        Err(error) => {
            let cause = format!("the interfaces of this machine cannot be read: {error}");
            refuse("nvmf.listener", cause, String::new());
        }
    }
    in_order(&mut problems);
    problems
}

fn on_network(settings: &Settings, machine: &System, refuse: &mut Refuse<'_>) {
    let interfaces = machine.interfaces();
    let names: Vec<&str> = interfaces.iter().map(|i| i.name.as_str()).collect();
    let have = format!("there are: {}", names.join(", "));
    let selectors = settings.replication.iface.iter();
    let parsed = selectors.map(|text| (text, text.parse::<Selector>()));
    for (at, (text, selector)) in parsed.enumerate() {
        let Ok(selector) = selector else { continue };
        if matches(&selector, machine).is_empty() {
            let key = format!("replication.iface[{at}]");
            let cause = format!("no interface of this machine matches \"{text}\"");
            refuse(&key, cause, have.clone());
        }
    }
    for (at, netdev) in settings.rdma.rxe.iter().enumerate() {
        if !names.contains(&netdev.as_str()) {
            let cause = format!("there is no interface \"{netdev}\"");
            refuse(&format!("rdma.rxe[{at}]"), cause, have.clone());
        }
    }
    let devices = machine.rdma_devices();
    let missing = |device: &str| {
        let present = devices.iter().any(|one| one == device);
        // The device may be a soft-RoCE device that is created at start.
        let made = device.starts_with("rxe") && !settings.rdma.rxe.is_empty();
        (!present && !made).then(|| {
            let remedy = if devices.is_empty() {
                "there is none; `nacre doctor --rdma` names the reason".to_owned()
            } else {
                format!("there are: {}", devices.join(", "))
            };
            (format!("there is no RDMA device \"{device}\""), remedy)
        })
    };
    if let Some((cause, remedy)) = settings.rdma.device.as_deref().and_then(missing) {
        refuse("rdma.device", cause, remedy);
    }
    for (at, listener) in settings.nvmf.listener.iter().enumerate() {
        if !listener.uses(IpTransport::Rdma) {
            continue;
        }
        if let Some((cause, remedy)) = listener.rdma_device.as_deref().and_then(missing) {
            refuse(&format!("nvmf.listener[{at}].rdma_device"), cause, remedy);
        }
    }
    let is_local = |address: &ScopedIp| {
        let bound = || address.socket(0).map(has_address);
        address.ip.is_unspecified()
            || interface_of(address, machine).is_some()
            || bound().is_ok_and(|bound| bound.is_ok())
    };
    for (at, listener) in settings.nvmf.listener.iter().enumerate() {
        if listener.iface.is_empty() && !is_local(&listener.address) {
            let key = format!("nvmf.listener[{at}].address");
            let cause = format!("{} is not an address of this machine", listener.address);
            refuse(&key, cause, have_addresses(machine));
        }
    }
    for (at, listener) in settings.nvmf.listen.iter().enumerate() {
        let Ok(listener) = crate::config::listener::Listener::short(at + 1, listener) else {
            continue;
        };
        if !is_local(&listener.address) {
            let key = format!("nvmf.listen[{at}]");
            let cause = format!("{} is not an address of this machine", listener.address);
            refuse(&key, cause, have_addresses(machine));
        }
    }
}

fn have_addresses(machine: &System) -> String {
    let all = machine.interfaces().iter();
    let all = all.flat_map(|interface| {
        let addresses = interface.addresses.iter();
        addresses.map(|ip| {
            let ip = ScopedIp::of_interface(*ip, &interface.name);
            format!("{} {ip}", interface.name)
        })
    });
    format!("there are: {}", all.collect::<Vec<_>>().join(", "))
}

/// Adds the line of the listener to a problem that names the listener.
fn located(problem: Problem, loaded: &Loaded) -> Problem {
    let all = loaded.settings.nvmf.listener.iter().enumerate();
    let named = |name: &str| problem.origin == format!("listener \"{name}\"");
    let mut its = all.filter(|(_, listener)| named(&listener.name));
    match its.next() {
        None => problem,
        Some((at, _)) => {
            let key = format!("nvmf.listener[{at}]");
            Problem {
                origin: origin_of(&loaded.origins, &key),
                cause: format!("{key}: {}", problem.cause),
                key,
                remedy: problem.remedy,
            }
        }
    }
}

/// The problem if `asked` bytes are more memory than this machine has.
fn beyond_memory(asked: u64) -> Option<String> {
    let there = nacre_hugepages::machine_memory()? >> 20;
    (asked > there).then(|| format!("{asked} MiB are more than this machine has ({there} MiB)"))
}

/// The problem if huge pages are required and the machine has none of the size. Counts pages in
/// use, because the running daemon may have them.
fn no_pages(settings: &Settings) -> Option<(String, String)> {
    let (size, name) = match settings.memory.hugepages {
        HugepagePolicy::TwoMiB => (2 << 20, "2MiB"),
        HugepagePolicy::OneGiB => (1 << 30, "1GiB"),
        HugepagePolicy::Auto | HugepagePolicy::Off => return None,
    };
    let pools = nacre_hugepages::show();
    let any = pools.iter().any(|pool| {
        let can_be = pool.total > 0 || pool.available() > 0;
        pool.size == size && can_be
    });
    (!any).then(|| {
        let cause = format!("this machine has no pages of {name}");
        let remedy = format!("`nacre hugepages reserve {name} COUNT`, or hugepages = \"auto\"");
        (cause, remedy)
    })
}

/// Checks that a socket can bind to the address. Ignores the port, which the running daemon may
/// use.
fn has_address(address: SocketAddr) -> Result<(), String> {
    let mut any_port = address;
    any_port.set_port(0);
    match TcpListener::bind(any_port) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => Err(format!(
            "{} is not an address of this machine",
            ScopedIp::from(&address)
        )),
        Err(error) => Err(format!(
            "{} cannot be listened on: {error}",
            ScopedIp::from(&address)
        )),
    }
}

fn file_missing(bdev: &Bdev) -> Option<String> {
    let path = bdev
        .path
        .as_deref()
        .filter(|_| bdev.kind == BdevKind::FILE)?;
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Some(format!("{shown} is a directory")),
        Ok(_) => None,
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Some(format!("{shown} cannot be read: {error}"))
        }
        Err(_) if bdev.size.is_none() => Some(format!("there is no file {shown}")),
        Err(_) => {
            let folder = path.parent().unwrap_or_else(|| Path::new("/"));
            let is_folder = folder.as_os_str().is_empty() || folder.is_dir();
            (!is_folder).then(|| format!("there is no directory {}", folder.display()))
        }
    }
}

#[cfg(test)]
mod tests;
