//! A simulated machine for tests of this crate and of its callers.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nacre_transport_rdma_link::testing::Tree;
use nacre_transport_rdma_link::{Environment, Fabric, Memlock, Modules};
use nacre_transport_rdma_verbs::{Provider, VerbsError};

use super::{Echo, EchoError, Interface, Probe, System, peer, roce};

/// A [`Probe`] with fixed answers: a network, programs, RDMA devices and io_uring.
#[derive(Default)]
pub struct ScriptedProbe {
    /// The source address of this machine for every destination; `None`: no route.
    pub source: Option<IpAddr>,
    /// The TCP ports that accept connections, at every address.
    pub open: Vec<u16>,
    /// The largest ICMP echo that passes, in bytes; `None`: no echo passes.
    pub echo: Option<u32>,
    /// This process may not send ICMP echoes.
    pub echo_refused: bool,
    /// The answer of the peer's responder; `None`: there is none.
    pub peer: Option<peer::Answer>,
    /// The output of each program that exists, by its name.
    pub output: HashMap<&'static str, &'static str>,
    /// Simulated devices; `None`: the libraries are missing.
    pub rdma: Option<nacre_transport_rdma_verbs::sim::Fabric>,
    /// The error of io_uring; `None`: it works.
    pub io_uring_refused: Option<&'static str>,
    /// Facts of Ethernet interfaces. An interface without an entry has no DCB.
    pub ethernet: Vec<roce::Facts>,
}

impl Probe for ScriptedProbe {
    fn source_for(&self, _: SocketAddr) -> io::Result<IpAddr> {
        self.source
            .ok_or_else(|| io::ErrorKind::NetworkUnreachable.into())
    }
    fn connect(&self, to: SocketAddr) -> io::Result<()> {
        if self.open.contains(&to.port()) {
            Ok(())
        } else {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
    }
    fn output(&self, program: &str, _: &[&str]) -> io::Result<String> {
        let text = self.output.get(program);
        text.map(|text| (*text).to_owned())
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
    fn echo(&self, _: SocketAddr, size: u32) -> Result<Echo, EchoError> {
        if self.echo_refused {
            return Err(EchoError::NotPermitted { range: None });
        }
        Ok(match self.echo {
            Some(largest) if size <= largest => Echo::Answered(Duration::from_micros(250)),
            _ => Echo::Silent,
        })
    }
    fn peer(&self, _: &peer::Question) -> Result<peer::Answer, peer::AskError> {
        let answer = self.peer.clone();
        answer.ok_or_else(|| peer::AskError::NoResponder(io::ErrorKind::ConnectionRefused.into()))
    }
    fn rdma(&self) -> Result<Arc<dyn Provider>, VerbsError> {
        let missing = || VerbsError::Unavailable {
            what: "there are no libraries here".into(),
            remedy: "install them".into(),
        };
        self.rdma
            .as_ref()
            .map(|fabric| fabric.provider())
            .ok_or_else(missing)
    }
    fn io_uring(&self) -> Result<&'static str, String> {
        self.io_uring_refused
            .map_or(Ok("plain"), |why| Err(why.to_owned()))
    }
    fn ethernet(&self, interfaces: &[String], _: Duration) -> Vec<roce::Facts> {
        let facts = |interface: &String| {
            let of = self.ethernet.iter().find(|of| of.interface == *interface);
            of.cloned().unwrap_or_else(|| roce::Facts {
                interface: interface.clone(),
                no_dcb: Some("the driver has no DCB".into()),
                ..roce::Facts::default()
            })
        };
        interfaces.iter().map(facts).collect()
    }
}

/// A machine with the files of `tree` and the interfaces `addresses`: (name, IP address), each
/// with a prefix of 24 bits.
pub fn system(tree: &Tree, addresses: &[(&str, &str)], scripted: ScriptedProbe) -> System {
    let roots = tree.roots();
    let interfaces = addresses.iter().map(|(name, address)| Interface {
        name: (*name).to_owned(),
        ip: address.parse().expect("an address"),
        prefix: 24,
    });
    System {
        fabric: Fabric::read(&roots.sys),
        modules: Modules::read(&roots),
        environment: Environment {
            memlock: Memlock::default(),
            ..Environment::read(&roots)
        },
        interfaces: interfaces.collect(),
        hugepages: Vec::new(),
        pci: nacre_bdev_nvme_vfio::pci::System::below(tree.path("")),
        probe: Box::new(scripted),
        roots,
    }
}
