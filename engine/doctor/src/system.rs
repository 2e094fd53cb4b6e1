//! The input of all checks: the machine's files below a root, which tests replace, and a [`Probe`]
//! for values that only the running machine has.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_nvme_vfio::pci;
use nacre_hugepages::NodePages;
use nacre_transport_rdma_link::{Environment, Fabric, Modules, Roots};
use nacre_transport_rdma_verbs::{Provider, VerbsError, VerbsProvider};

use nacre_engine_values::address::interface_of_label;

use super::echo::{self, Echo, EchoError};
use super::{ethernet, peer};

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
    /// The source address for this destination; its port does not matter.
    fn source_for(&self, to: SocketAddr) -> io::Result<IpAddr>;
    /// Succeeds if something accepts connections there.
    fn connect(&self, to: SocketAddr) -> io::Result<()>;
    /// The output of a program.
    fn output(&self, program: &str, arguments: &[&str]) -> io::Result<String>;
    /// Sends an ICMP echo in an IP packet of `size` bytes that must not be fragmented.
    fn echo(&self, to: SocketAddr, size: u32) -> Result<Echo, EchoError>;
    /// Asks the responder at the peer for its settings and sends marked packets both ways.
    fn peer(&self, question: &peer::Question) -> Result<peer::Answer, peer::AskError>;
    /// Devices to connect and move data with, or the missing part.
    fn rdma(&self) -> Result<Arc<dyn Provider>, VerbsError>;
    /// The usable io_uring mode, or why it is unusable.
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
    /// This machine in its current state.
    pub fn real() -> Self {
        let roots = Roots::real();
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        Self {
            fabric: Fabric::read(&roots.sys),
            modules: Modules::read(&roots),
            environment: environment(&roots),
            interfaces: interfaces.into_iter().map(Interface::from).collect(),
            hugepages: nacre_hugepages::show(),
            pci: pci::System::real(),
            probe: Box::new(RealProbe),
            roots,
        }
    }

    /// The interface with the address.
    pub fn interface_of(&self, ip: IpAddr) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.ip == ip)
    }

    pub fn addresses_of(&self, name: &str) -> impl Iterator<Item = &Interface> {
        self.interfaces
            .iter()
            .filter(move |interface| interface.name == name)
    }

    /// A file's text, trimmed.
    pub fn text(&self, path: PathBuf) -> Option<String> {
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().to_owned())
    }

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

impl From<if_addrs::Interface> for Interface {
    fn from(interface: if_addrs::Interface) -> Self {
        let (ip, prefix) = match &interface.addr {
            if_addrs::IfAddr::V4(v4) => (IpAddr::V4(v4.ip), v4.prefixlen),
            if_addrs::IfAddr::V6(v6) => (IpAddr::V6(v6.ip), v6.prefixlen),
        };
        Self {
            name: interface_of_label(&interface.name).to_owned(),
            ip,
            prefix,
        }
    }
}

/// The environment of this process. Loading the libraries shows whether they are installed.
fn environment(roots: &Roots) -> Environment {
    let mut environment = Environment::read(roots);
    if !environment.uverbs.is_empty() {
        let opened = VerbsProvider::open();
        environment.library = opened.err().map(|error| error.to_string());
    }
    environment
}

/// The machine that this program runs on.
pub struct RealProbe;

/// Time limit for one reply of the network.
const PATIENCE: Duration = Duration::from_secs(2);

impl Probe for RealProbe {
    fn source_for(&self, mut to: SocketAddr) -> io::Result<IpAddr> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a datagram socket looks up the route and sends nothing.
        let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
        to.set_port(9);
        socket.connect(to)?;
        Ok(socket.local_addr()?.ip())
    }

    fn connect(&self, to: SocketAddr) -> io::Result<()> {
        TcpStream::connect_timeout(&to, PATIENCE).map(drop)
    }

    fn output(&self, program: &str, arguments: &[&str]) -> io::Result<String> {
        let output = run(program, arguments)?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(io::Error::other(
                String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            ))
        }
    }

    fn echo(&self, to: SocketAddr, size: u32) -> Result<Echo, EchoError> {
        echo::echo(to, size)
    }

    fn peer(&self, question: &peer::Question) -> Result<peer::Answer, peer::AskError> {
        peer::ask(question, &|| peer::count(&question.interfaces))
    }

    fn rdma(&self) -> Result<Arc<dyn Provider>, VerbsError> {
        super::live::real_provider()
    }

    fn io_uring(&self) -> Result<&'static str, String> {
        nacre_bdev_uring::probe()
    }

    fn ethernet(&self, interfaces: &[String], wait: Duration) -> Vec<ethernet::Facts> {
        ethernet::gather(&Roots::real(), interfaces, wait)
    }
}

/// Debian packages of the programs used here; most other distributions use the same names.
const PACKAGES: [(&str, &str); 2] = [("nft", "nftables"), ("nvme", "nvme-cli")];

/// Runs a program to its end. A missing program is named, with its package.
fn run(program: &str, arguments: &[&str]) -> io::Result<std::process::Output> {
    let outcome = Command::new(program).args(arguments).output();
    outcome.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::NotFound, absent(program)),
        _ => error,
    })
}

fn absent(program: &str) -> String {
    let package = PACKAGES.iter().find(|(name, _)| *name == program);
    let package = package.map_or(program, |(_, package)| package);
    format!("there is no {program} here: install the package {package}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_is_named_with_its_package() {
        let error = run("none-such-program", &[]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("there is no none-such-program here"),
            "{error}"
        );
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(
            absent("nft"),
            "there is no nft here: install the package nftables"
        );
    }
}
