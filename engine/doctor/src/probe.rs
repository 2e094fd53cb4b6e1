//! The machine that this program runs on, as the [`System`] of the checks.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_nvme_vfio::pci;
use nacre_transport_rdma_link::{Environment, Fabric, Modules, Roots};
use nacre_transport_rdma_verbs::{Provider, VerbsError, VerbsProvider};

use super::echo::{self, Echo, EchoError};
use super::{Interface, Probe, System, ethernet, live, peer};
use nacre_engine_values::address::interface_of_label;

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
        live::real_provider()
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
