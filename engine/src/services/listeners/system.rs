//! Reads the machine's present state: interfaces from the kernel, and RDMA devices from sysfs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use nacre_transport_rdma_link::{
    CapabilityRequest, Chosen, Environment, Fabric, Reason, Roots, capability,
};
use rustix::io::Errno;

use super::plan::{Interface, Machine, PathProblem};
use crate::services::rdma::Verbs;
use crate::values::address::interface_of_label;
use crate::values::selector::mac;

pub struct System {
    interfaces: Vec<Interface>,
    fabric: Fabric,
    environment: Environment,
    /// Opens RDMA devices, to check that they can be used.
    verbs: Verbs,
}

impl System {
    /// Reads files and queries the kernel; may block. `memory_needed` is the number of bytes that a
    /// device will have to register.
    ///
    /// After an error, assume that the machine is unchanged.
    pub fn read(verbs: Verbs, memory_needed: u64) -> io::Result<Self> {
        let roots = Roots::real();
        let system = Self {
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

    /// Checks that file descriptors are available. Without them, most of `read` would treat
    /// attributes as missing.
    pub fn verify(&self) -> io::Result<()> {
        check_descriptors(&Roots::real().sys)
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

    fn rdma(&self, want: &CapabilityRequest) -> Result<Chosen, PathProblem> {
        let chosen = capability(&self.fabric, want, &self.environment).map_err(lack)?;
        match self.verbs.open() {
            Ok(_) => Ok(chosen),
            Err(absence) => Err(PathProblem {
                reason: absence.reason(),
                evidence: absence.to_string(),
                remedy: absence.remedy(),
            }),
        }
    }
}

fn lack(reason: Reason) -> PathProblem {
    PathProblem {
        reason: reason.word(),
        evidence: reason.evidence(),
        remedy: reason.remedy(),
    }
}

/// Every interface by name, including those without an address.
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

/// All named RDMA devices, or an error if one cannot be read.
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

/// The file names in a folder; none if the kernel has no such folder.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        // Missing permission is permanent; treat the folder as missing.
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

/// Text of an attribute. Kernel errors (a device being removed, an interface without a link layer)
/// mean that the attribute is missing; a lack of resources is an error.
fn attribute(path: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if is_lack_of_resources(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

fn is_lack_of_resources(error: &io::Error) -> bool {
    let means = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| means.contains(&errno))
}

/// Checks that the files needed to read sysfs can be open at the same time.
fn check_descriptors(sys: &Path) -> io::Result<()> {
    let files: io::Result<Vec<File>> = (0..4).map(|_| File::open(sys)).collect();
    files.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the loopback interface, which every machine has, is found and has no RDMA device.
    #[test]
    fn this_machine_has_a_loopback_interface() {
        let system = System::read(Verbs::default(), 0).unwrap();
        let lo = system.interfaces().iter().find(|i| i.name == "lo").unwrap();
        assert!(lo.addresses.contains(&IpAddr::from([127, 0, 0, 1])));
        let want = CapabilityRequest::new("lo", IpAddr::from([127, 0, 0, 1]));
        assert_eq!(system.rdma(&want).unwrap_err().reason, "no_rdma_dev");
        assert_eq!(system.interfaces_of("no such device"), None);
    }

    /// Goal: a missing device class means no devices; an unreadable class is an error.
    #[test]
    fn an_unreadable_class_is_an_error() {
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
        check_descriptors(&class.join("nothing")).unwrap_err();
    }
}
