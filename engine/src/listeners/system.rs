//! The machine as it is now: interfaces from the kernel, RDMA devices from sysfs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use nacre_rdma_link::{Chosen, Environment, Fabric, Reason, Roots, Want, capability};

use super::plan::{Interface, Lack, Machine};
use crate::config::listener::mac;
use crate::rdma::Verbs;

pub struct System {
    interfaces: Vec<Interface>,
    fabric: Fabric,
    environment: Environment,
    /// What a device is used by, whatever it can.
    verbs: Verbs,
}

impl System {
    /// Reads files and asks the kernel: for a thread that may block. `memory_needed`: bytes that a device will have to
    /// register.
    pub fn read(verbs: Verbs, memory_needed: u64) -> System {
        let roots = Roots::real();
        System {
            interfaces: interfaces(&roots.sys),
            fabric: Fabric::read(&roots.sys),
            environment: Environment {
                memory_needed,
                ..Environment::read(&roots)
            },
            verbs,
        }
    }
}

impl Machine for System {
    fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    fn interfaces_of(&self, device: &str) -> Option<Vec<String>> {
        self.fabric.device(device)?;
        let all = self.interfaces.iter().map(|i| &i.name);
        let carried = all.filter(|name| {
            let mut ports = self.fabric.ports_of(name);
            ports.any(|(found, _)| found.name == device)
        });
        Some(carried.cloned().collect())
    }

    fn rdma_devices(&self) -> Vec<String> {
        let mut names: Vec<String> = self.fabric.ports().map(|(d, _)| d.name.clone()).collect();
        names.dedup();
        names
    }

    fn rdma(&self, want: &Want) -> Result<Chosen, Lack> {
        let chosen = capability(&self.fabric, want, &self.environment).map_err(lack)?;
        match self.verbs.open() {
            Ok(_) => Ok(chosen),
            Err(absence) => Err(Lack {
                reason: absence.reason(),
                evidence: absence.to_string(),
                remedy: absence.remedy(),
            }),
        }
    }
}

fn lack(reason: Reason) -> Lack {
    Lack {
        reason: reason.word(),
        evidence: reason.evidence(),
        remedy: reason.remedy(),
    }
}

/// Every interface, in the order of their names; those without an address, too.
fn interfaces(sys: &Path) -> Vec<Interface> {
    let class = sys.join("class/net");
    let names = std::fs::read_dir(&class).into_iter().flatten().flatten();
    let mut all: BTreeMap<String, Vec<IpAddr>> = names
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, Vec::new())))
        .collect();
    match if_addrs::get_if_addrs() {
        Ok(found) => {
            for address in found {
                all.entry(address.name.clone())
                    .or_default()
                    .push(address.ip());
            }
        }
        Err(error) => tracing::warn!(%error, "the addresses of this machine cannot be read"),
    }
    let of = |(name, addresses): (String, Vec<IpAddr>)| {
        let text = std::fs::read_to_string(class.join(&name).join("address"));
        Interface {
            mac: text.ok().and_then(|text| mac(&text)),
            name,
            addresses,
        }
    };
    all.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loopback interface is on every machine that tests run on.
    #[test]
    fn this_machine_has_a_loopback_interface() {
        let system = System::read(Verbs::default(), 0);
        let lo = system.interfaces().iter().find(|i| i.name == "lo").unwrap();
        assert!(lo.addresses.contains(&IpAddr::from([127, 0, 0, 1])));
        let want = Want::new("lo", IpAddr::from([127, 0, 0, 1]));
        assert_eq!(system.rdma(&want).unwrap_err().reason, "no_rdma_dev");
        assert_eq!(system.interfaces_of("no such device"), None);
    }
}
