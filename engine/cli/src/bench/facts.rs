//! Describes the machine, and the path to each target: network hardware, emulation, or loopback.

use std::net::{IpAddr, Ipv6Addr};

use nacre_engine_bench::{Machine, Setting};
use nacre_engine_doctor::{System, rdma_path};
use nacre_transport_rdma_link::{Device, Port};

/// Drivers of network cards that a hypervisor provides.
const PARAVIRTUAL: [&str; 5] = ["virtio_net", "vmxnet3", "hv_netvsc", "xen_netfront", "ena"];

pub(super) fn machine() -> Machine {
    let processor = read("/proc/cpuinfo");
    let value = |key: &str| {
        let line = processor.lines().find(|line| line.starts_with(key));
        Some(line?.split_once(':')?.1.trim().to_owned())
    };
    let memory = read("/proc/meminfo");
    let memory = memory.lines().next().and_then(|line| {
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    });
    let flags = value("flags").unwrap_or_default();
    Machine {
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        processor: value("model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory,
        is_virtual: flags.split(' ').any(|flag| flag == "hypervisor"),
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The path to a target: its kind, and the network or RDMA device of this machine that it uses.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub setting: Setting,
    pub description: String,
    pub link_bits_per_second: Option<u64>,
}

impl Route {
    fn new(setting: Setting, description: impl Into<String>) -> Self {
        Self {
            setting,
            description: description.into(),
            link_bits_per_second: None,
        }
    }

    pub(super) fn to(system: &System, target: IpAddr, rdma: bool) -> Self {
        let source = match system.probe.source_for((target, 0).into()) {
            Ok(source) => source,
            Err(error) => return Self::new(Setting::Unknown, format!("no route: {error}")),
        };
        let Some(interface) = system.interface_of(source).map(|found| &found.name) else {
            let description = format!("{source} is on no interface that is known");
            return Self::new(Setting::Unknown, description);
        };
        let is_here = target.is_loopback() || system.interface_of(target).is_some();
        if !rdma {
            return tcp(system, interface, is_here);
        }
        match rdma_path(system, interface, source) {
            Err(reason) => {
                let description = format!("{}: {}", reason.word(), reason.evidence());
                Self::new(Setting::Unknown, description)
            }
            Ok(chosen) => match system.fabric.device(&chosen.device) {
                Some(device) => rdma_device(device, device.port(chosen.port), is_here),
                None => Self::new(Setting::Unknown, chosen.device),
            },
        }
    }
}

fn tcp(system: &System, interface: &str, is_here: bool) -> Route {
    if is_here {
        return Route::new(
            Setting::Loopback,
            "the kernel's TCP, both ends on this machine",
        );
    }
    let folder = system.roots.sys.join("class/net").join(interface);
    let driver = std::fs::read_link(folder.join("device/driver")).ok();
    let driver = driver
        .as_deref()
        .and_then(|path| path.file_name()?.to_str());
    let megabits = system.text(folder.join("speed"));
    let megabits: Option<u64> = megabits.and_then(|text| text.parse().ok());
    let mut path = match driver {
        Some(driver) if PARAVIRTUAL.contains(&driver) => Route::new(
            Setting::Unknown,
            format!("{interface} ({driver}), a card of the hypervisor"),
        ),
        Some(driver) => Route::new(Setting::Hardware, format!("{interface} ({driver})")),
        None => Route::new(
            Setting::Unknown,
            format!("{interface}, a virtual interface"),
        ),
    };
    if path.setting == Setting::Hardware {
        path.link_bits_per_second = megabits.map(|megabits| megabits * 1_000_000);
    }
    path
}

fn rdma_device(device: &Device, port: Option<&Port>, is_here: bool) -> Route {
    let driver = device.driver.as_deref().unwrap_or("unknown driver");
    let name = format!("{} ({driver})", device.name);
    if device.is_software() {
        let description = format!("{name}, the kernel's RDMA in software");
        return Route::new(Setting::SoftwareRdma, description);
    }
    if is_here {
        let description = format!("{name}, both ends on one card");
        return Route::new(Setting::Loopback, description);
    }
    let rate = port.and_then(|port| port.rate.as_deref());
    let mut path = Route::new(
        Setting::Hardware,
        match rate {
            Some(rate) => format!("{name}, {rate}"),
            None => name,
        },
    );
    path.link_bits_per_second = rate.and_then(gigabits).map(|g| (g * 1e9) as u64);
    path
}

/// `100 Gb/sec (4X EDR)`
fn gigabits(rate: &str) -> Option<f64> {
    let (number, unit) = rate.split_once(' ')?;
    unit.starts_with("Gb/sec").then(|| number.parse().ok())?
}

/// An address of this machine with RDMA; a card's before one in software. `Err`: the cause and its
/// remedy.
pub(super) fn rdma_address(system: &System) -> Result<IpAddr, String> {
    if let Some(missing) = &system.environment.no_device {
        return Err(format!("{missing}; {}", missing.remedy()));
    }
    let is_usable = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => *ip != Ipv6Addr::LOCALHOST && !ip.is_unicast_link_local(),
    };
    let mut usable = Vec::new();
    let mut cause = None;
    let interfaces = system.interfaces.iter();
    for interface in interfaces.filter(|interface| is_usable(&interface.ip)) {
        match rdma_path(system, &interface.name, interface.ip) {
            Ok(chosen) => usable.push((chosen.software, interface.ip.is_ipv6(), interface.ip)),
            Err(reason) => {
                let has_device = system.fabric.ports_of(&interface.name).next().is_some();
                if has_device || cause.is_none() {
                    cause = Some(format!("{}; {}", reason.evidence(), reason.remedy()));
                }
            }
        }
    }
    usable.sort();
    match usable.first() {
        Some((_, _, ip)) => Ok(*ip),
        None => Err(cause.unwrap_or_else(|| {
            "no interface has an address for it; `nacre doctor --rdma` shows more".into()
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_ports() {
        assert_eq!(gigabits("100 Gb/sec (4X EDR)"), Some(100.0));
        assert_eq!(gigabits("2.5 Gb/sec (1X SDR)"), Some(2.5));
        assert_eq!(gigabits("unknown"), None);
    }

    /// Goal: both ends on this machine are never shown as a network.
    #[test]
    fn loopback_is_named() {
        let path = Route::to(&System::real(), "127.0.0.1".parse().unwrap(), false);
        assert_eq!(path.setting, Setting::Loopback);
        assert_eq!(path.link_bits_per_second, None);
    }

    #[test]
    fn this_machine() {
        let machine = machine();
        assert!(machine.processors > 0 && !machine.kernel.is_empty());
        assert!(machine.memory_bytes.unwrap() > 1 << 20);
    }
}
