//! The machine as it is now: interfaces from the kernel, RDMA devices from sysfs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use nacre_rdma_link::{Chosen, Environment, Fabric, Reason, Roots, Want, capability};
use rustix::io::Errno;

use super::plan::{Interface, Lack, Machine, interface_of_label};
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
    ///
    /// An error is no news of the machine: what could not be read may be there as before.
    pub fn read(verbs: Verbs, memory_needed: u64) -> io::Result<System> {
        let roots = Roots::real();
        let system = System {
            interfaces: interfaces(&roots.sys)?,
            fabric: fabric(&roots.sys)?,
            environment: Environment {
                memory_needed,
                ..Environment::read(&roots)
            },
            verbs,
        };
        system.verify()?;
        Ok(system)
    }

    /// Much of the above takes a file that cannot be opened for an attribute that a device does not have. For want of
    /// descriptors it would all be missing.
    pub fn verify(&self) -> io::Result<()> {
        room(&Roots::real().sys)
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
fn interfaces(sys: &Path) -> io::Result<Vec<Interface>> {
    let class = sys.join("class/net");
    let mut all: BTreeMap<String, Vec<IpAddr>> = names(&class)?
        .into_iter()
        .map(|n| (n, Vec::new()))
        .collect();
    for address in if_addrs::get_if_addrs()? {
        all.entry(interface_of_label(&address.name).to_owned())
            .or_default()
            .push(address.ip());
    }
    let of = |(name, addresses): (String, Vec<IpAddr>)| {
        let text = attribute(&class.join(&name).join("address"))?;
        Ok(Interface {
            mac: text.and_then(|text| mac(&text)),
            name,
            addresses,
        })
    };
    all.into_iter().map(of).collect()
}

/// The RDMA devices: all of those that have a name, or an error.
fn fabric(sys: &Path) -> io::Result<Fabric> {
    let class = sys.join("class/infiniband");
    let fabric = Fabric::read(sys);
    for name in names(&class)? {
        if fabric.device(&name).is_none()
            && attribute(&class.join(&name).join("node_guid"))?.is_some()
        {
            let cause = format!("the RDMA device {name} appears, or could not be read");
            return Err(io::Error::other(cause));
        }
    }
    Ok(fabric)
}

/// The names in a folder; none if the kernel has no such folder.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        // What is forbidden stays so, and is as good as not there.
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied]
                .contains(&error.kind()) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let name = |entry: io::Result<std::fs::DirEntry>| Ok(entry?.file_name().into_string().ok());
    entries
        .filter_map(|entry| name(entry).transpose())
        .collect()
}

/// The text of an attribute. Refusals of the kernel (a device that is going, an interface without a link layer) are
/// attributes that are not there; a lack of means to read it is not.
fn attribute(path: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if is_lack_of_means(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

fn is_lack_of_means(error: &io::Error) -> bool {
    let means = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| means.contains(&errno))
}

/// Whether as many files can be open at a time as a look at sysfs needs.
fn room(sys: &Path) -> io::Result<()> {
    let files: io::Result<Vec<File>> = (0..4).map(|_| File::open(sys)).collect();
    files.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loopback interface is on every machine that tests run on.
    #[test]
    fn this_machine_has_a_loopback_interface() {
        let system = System::read(Verbs::default(), 0).unwrap();
        let lo = system.interfaces().iter().find(|i| i.name == "lo").unwrap();
        assert!(lo.addresses.contains(&IpAddr::from([127, 0, 0, 1])));
        let want = Want::new("lo", IpAddr::from([127, 0, 0, 1]));
        assert_eq!(system.rdma(&want).unwrap_err().reason, "no_rdma_dev");
        assert_eq!(system.interfaces_of("no such device"), None);
    }

    /// A kernel without a class of devices has none of them; one whose class cannot be read may have many.
    #[test]
    fn what_cannot_be_read_is_not_taken_for_absent() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(fabric(sys.path()).unwrap(), Fabric::default());
        let names: Vec<String> = interfaces(sys.path())
            .unwrap()
            .into_iter()
            .map(|i| i.name)
            .collect();
        assert!(names.contains(&"lo".to_owned()), "{names:?}");
        let class = sys.path().join("class");
        std::fs::create_dir(&class).unwrap();
        std::fs::write(class.join("net"), "no folder").unwrap();
        std::fs::write(class.join("infiniband"), "no folder").unwrap();
        interfaces(sys.path()).unwrap_err();
        fabric(sys.path()).unwrap_err();
        room(&class.join("nothing")).unwrap_err();
    }
}
