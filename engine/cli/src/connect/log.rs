//! Parses the discovery log that `nvme discover -o json` prints, into the paths that it lists.

use std::fmt;
use std::net::IpAddr;

use nacre_nvmf::address::IpTransport;
use serde::Deserialize;

use super::Plan;

use nacre_engine_values::address::ScopedIp;

/// Paths beyond the number that a host can use are not tried.
const MOST_PATHS: usize = 32;

#[derive(Debug, Deserialize)]
pub(super) struct Log {
    records: Vec<Record>,
}

#[derive(Debug, Deserialize)]
struct Record {
    trtype: String,
    subtype: String,
    traddr: String,
    trsvcid: String,
    subnqn: String,
}

impl Log {
    /// None: another program's output, or an unknown format.
    pub(super) fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The paths to a subsystem in the plan's order, and the omitted ones, each with the reason.
    /// `from` is the address of the discovery controller.
    pub(super) fn paths(
        &self,
        nqn: &str,
        from: &ScopedIp,
        plan: &Plan,
        check_rdma_route: &dyn Fn(IpAddr) -> Result<(), String>,
    ) -> (Vec<Path>, Vec<String>) {
        let mut paths: Vec<Path> = Vec::new();
        let mut skipped = Vec::new();
        for transport in &plan.order {
            let ours = self.records.iter().filter(|record| {
                record.subnqn == nqn
                    && record.subtype == "nvme subsystem"
                    && record.trtype == transport.word()
            });
            for record in ours {
                let Some(mut path) = record.path(*transport) else {
                    continue;
                };
                let ip = path.address.parse::<IpAddr>();
                if let Ok(ip) = ip {
                    let Some(on_link) = ScopedIp::announced_by(ip, from) else {
                        skipped.push(format!(
                            "not connecting {path}: it is a link-local address, and {from} does not say of which link; \
                             discover at the link-local address"
                        ));
                        continue;
                    };
                    path.address = on_link.to_string();
                }
                let rdma_route = match (transport, ip) {
                    (IpTransport::Rdma, Ok(ip)) if !plan.by_name => check_rdma_route(ip),
                    _ => Ok(()),
                };
                match rdma_route {
                    Err(why) => skipped.push(format!("not connecting {path}: {why}")),
                    Ok(()) if paths.contains(&path) => {}
                    Ok(()) if paths.len() == MOST_PATHS => {
                        skipped.push(format!(
                            "not connecting {path}: {MOST_PATHS} paths are enough"
                        ));
                    }
                    Ok(()) => paths.push(path),
                }
            }
        }
        (paths, skipped)
    }
}

impl Record {
    fn path(&self, transport: IpTransport) -> Option<Path> {
        Some(Path {
            transport,
            address: self.traddr.trim().to_owned(),
            port: self.trsvcid.trim().parse().ok()?,
        })
    }
}

/// One address of a subsystem over one transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Path {
    pub transport: IpTransport,
    /// IP address in nvme-cli's format.
    pub address: String,
    pub port: u16,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, port) = (self.transport.word(), self.port);
        if self.address.contains(':') {
            write!(f, "{transport}://[{}]:{port}", self.address)
        } else {
            write!(f, "{transport}://{}:{port}", self.address)
        }
    }
}
