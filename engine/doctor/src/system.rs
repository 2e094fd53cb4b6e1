//! The input of all checks: the machine's files below a root, which tests replace, and a [`Probe`]
//! for values that only the running machine has.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_nvme_vfio::pci;
use nacre_hugepages::NodePages;
use nacre_transport_rdma_link::{Environment, Fabric, Modules, Roots};
use nacre_transport_rdma_verbs::{Provider, VerbsError};

use super::echo::{Echo, EchoError};
use super::{ethernet, session};

/// A network interface with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub ip: IpAddr,
    pub prefix: u8,
}

/// A limit of this process; `None`: unlimited.
pub type Limit = Option<u64>;

/// Queries and actions on the running machine. Tests replace it.
pub trait Probe {
    /// The local address that the routing table selects for this destination; the port is ignored.
    fn source_for(&self, to: SocketAddr) -> io::Result<IpAddr>;
    /// Succeeds if a TCP connection to this address is accepted. The wait is bounded.
    fn connect(&self, to: SocketAddr) -> io::Result<()>;
    /// Runs a program and returns its standard output. Fails if the program is missing, or exits
    /// with an error (its standard error is the text then).
    fn output(&self, program: &str, arguments: &[&str]) -> io::Result<String>;
    /// Sends an ICMP echo in an IP packet of `size` bytes that must not be fragmented.
    fn echo(&self, to: SocketAddr, size: u32) -> Result<Echo, EchoError>;
    /// Reads the settings of the peer from its responder, and exchanges packets that are marked
    /// with the DSCP of each class in `question`.
    fn peer(&self, question: &session::Question) -> Result<session::Answer, session::AskError>;
    /// The provider of RDMA verbs. An error names the missing library or kernel part.
    fn rdma(&self) -> Result<Arc<dyn Provider>, VerbsError>;
    /// The io_uring mode that this kernel supports; an error says why it supports none.
    fn io_uring(&self) -> Result<&'static str, String>;
    /// The settings and counters of these interfaces, and the LLDP frames received within `wait`.
    fn ethernet(&self, interfaces: &[String], wait: Duration) -> Vec<ethernet::Facts>;
}

/// A machine: its files, interfaces and limits, and a probe of the running system.
pub struct System {
    pub roots: Roots,
    pub fabric: Fabric,
    pub modules: Modules,
    pub environment: Environment,
    pub interfaces: Vec<Interface>,
    pub hugepages: Vec<NodePages>,
    pub pci: pci::System,
    pub probe: Box<dyn Probe>,
}

impl System {
    /// The interface with the address.
    pub fn interface_of(&self, ip: IpAddr) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.ip == ip)
    }

    /// The addresses of the interface `name`.
    pub fn addresses_of(&self, name: &str) -> impl Iterator<Item = &Interface> {
        self.interfaces
            .iter()
            .filter(move |interface| interface.name == name)
    }

    /// A file's text without white space at its ends; `None` if it cannot be read.
    pub fn text(&self, path: PathBuf) -> Option<String> {
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().to_owned())
    }

    /// The MTU of the interface `name` in bytes, from sysfs.
    pub fn netdev_mtu(&self, name: &str) -> Option<u32> {
        let file = self.roots.sys.join("class/net").join(name).join("mtu");
        self.text(file)?.parse().ok()
    }

    /// The names of all interfaces, including those without an address.
    pub fn netdevs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.roots.sys.join("class/net"));
        let mut names: Vec<String> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }
}
