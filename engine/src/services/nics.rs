//! Reads counters of network interfaces from their drivers, for metrics.
//!
//! ```text
//!   listeners, hosts, remote targets ─▶ Used ─▶ Nics::read ─▶ the physical interfaces below them
//!   management thread                           a thread that may block, every 5 s at most
//! ```
//!
//! The kernel holds a global lock while a driver reports its statistics. So a read within
//! [`MAX_AGE`] of the last one gets the same counters.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use nacre_nvmf::transport::Address;
use nacre_transport_rdma_link::Roots;
use nacre_transport_rdma_link::dcb;
use nacre_transport_rdma_link::ethtool::{self, PriorityCount, PriorityCounters};
use nacre_transport_rdma_verbs::netdev::Statistics;
use parking_lot::Mutex;

use super::Engine;
use crate::doctor::roce;
use crate::plane::Plane;

/// Age from which counters are read again.
const MAX_AGE: Duration = Duration::from_secs(5);

/// The interfaces and addresses that this process uses for NVMe-oF.
#[derive(Debug, Default)]
pub struct Used {
    interfaces: BTreeSet<String>,
    local: BTreeSet<IpAddr>,
    remote: BTreeSet<SocketAddr>,
}

impl Used {
    pub fn of(engine: &Engine, plane: Option<&Plane>) -> Self {
        let mut used = Self::default();
        for status in engine.listeners.statuses(engine) {
            if status.is_listening() {
                used.interfaces.insert(status.path.iface);
            }
        }
        let controllers = plane
            .into_iter()
            .flat_map(|plane| plane.target.subsystems())
            .flat_map(|subsystem| subsystem.controllers());
        for queue in controllers.flat_map(|controller| controller.queues()) {
            if let Address::Ip(local) = queue.local {
                used.local.insert(local.ip().to_canonical());
            }
        }
        for (_, remote) in engine.remotes.list() {
            let addresses = remote.paths().into_iter().map(|path| path.wanted.address);
            used.remote.extend(addresses);
        }
        used
    }

    /// The physical interfaces below the used ones: the members of a bond, the parent of a VLAN.
    fn physical(&self, roots: &Roots) -> BTreeSet<String> {
        let mut local = self.local.clone();
        // Asks for the route; sends nothing.
        local.extend(self.remote.iter().filter_map(|remote| {
            let any: SocketAddr = match remote {
                SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
                SocketAddr::V6(_) => ([0u16; 8], 0).into(),
            };
            let socket = UdpSocket::bind(any).ok()?;
            socket.connect(remote).ok()?;
            Some(socket.local_addr().ok()?.ip())
        }));
        let mut names = self.interfaces.clone();
        let present = if_addrs::get_if_addrs().unwrap_or_default();
        let used = present.into_iter().filter(|of| local.contains(&of.ip()));
        names.extend(used.map(|of| of.name));
        let physical = names.iter().flat_map(|name| roce::physical(roots, name));
        physical.collect()
    }
}

/// The counters of one interface.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NicCounters {
    pub interface: String,
    pub counters: PriorityCounters,
    /// Received and sent pause frames of the port, not by priority; `None`: unknown.
    pub port: (Option<u64>, Option<u64>),
}

/// The last counters, and the interfaces' statistics names.
#[derive(Default)]
pub struct Nics(Mutex<OpenNics>);

/// The last counters, and the open interfaces.
#[derive(Default)]
struct OpenNics {
    read: Option<(Instant, Vec<NicCounters>)>,
    /// By name and index: a re-created interface has a new index.
    open: HashMap<(String, u32), Statistics>,
}

impl Nics {
    /// The counters of the used interfaces. Blocks.
    pub fn read(&self, used: &Used) -> Vec<NicCounters> {
        let mut state = self.0.lock();
        if let Some((at, counters)) = &state.read
            && at.elapsed() < MAX_AGE
        {
            return counters.clone();
        }
        let roots = Roots::real();
        let interfaces = used.physical(&roots);
        state.open.retain(|(name, _), _| interfaces.contains(name));
        let counters: Vec<NicCounters> = interfaces
            .into_iter()
            .map(|interface| {
                let statistics = state.statistics(&roots, &interface);
                let pfc = dcb::read(&interface).ok().and_then(|dcb| dcb.pfc);
                let pause = ethtool::pause(&interface).ok().flatten();
                let mut counters = PriorityCounters::of(&statistics);
                // Of a driver whose names are unknown, DCB has the pauses.
                if let Some(pfc) = pfc.filter(|_| !counters.has_pauses()) {
                    set_pauses(&mut counters.rx, pfc.received);
                    set_pauses(&mut counters.tx, pfc.sent);
                }
                NicCounters {
                    interface,
                    counters,
                    port: pause.map_or((None, None), |pause| (pause.rx_frames, pause.tx_frames)),
                }
            })
            .collect();
        state.read = Some((Instant::now(), counters.clone()));
        counters
    }
}

impl OpenNics {
    fn statistics(&mut self, roots: &Roots, interface: &str) -> Vec<(String, u64)> {
        let file = roots.sys.join("class/net").join(interface).join("ifindex");
        let index = std::fs::read_to_string(file).ok();
        let index = index.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let key = (interface.to_owned(), index);
        if !self.open.contains_key(&key) {
            self.open.retain(|(name, _), _| name != interface);
            let Ok(statistics) = Statistics::open(interface) else {
                return Vec::new();
            };
            self.open.insert(key.clone(), statistics);
        }
        let statistics = self.open.get_mut(&key).expect("just inserted");
        statistics.read().unwrap_or_default()
    }
}

fn set_pauses(counts: &mut [PriorityCount; dcb::PRIORITIES], pauses: [u64; dcb::PRIORITIES]) {
    for (count, pauses) in counts.iter_mut().zip(pauses) {
        count.pauses = Some(pauses);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_again_after_a_while_only() {
        let nics = Nics::default();
        let used = Used {
            interfaces: ["lo".to_owned()].into(),
            ..Used::default()
        };
        let first = nics.read(&used);
        assert_eq!(first.len(), 1);
        assert_eq!(nics.read(&Used::default()), first, "from before");
        if let Some((at, _)) = &mut nics.0.lock().read {
            *at -= MAX_AGE;
        }
        assert_eq!(nics.read(&Used::default()), []);
    }
}
