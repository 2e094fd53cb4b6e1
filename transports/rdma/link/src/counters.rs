//! The counters of an RDMA port, and the problems that they indicate. Sysfs has those of the port
//! (`counters`), of the driver (`hw_counters`), and of the network interface.

use std::path::Path;

use serde::Serialize;

use crate::sysfs;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counter {
    pub group: CounterGroup,
    /// Name that the kernel or the driver gives.
    pub name: String,
    pub value: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CounterGroup {
    /// The port counters of IBA (`counters`).
    Port,
    /// The driver's own (`hw_counters`).
    Hardware,
    /// Counters of the network interface behind the port.
    Netdev,
}

/// The problem that growth of a port's counter indicates, the most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Symptom {
    /// Packets were lost until all retries were used up, and a connection ended.
    GivenUp,
    /// Packets were lost, or arrived out of order, and were sent again.
    Loss,
    /// A receiver had no buffer in time, and the sender waited.
    NotReady,
    /// Packets were damaged, or the link failed.
    Damage,
}

impl Symptom {
    /// The counters that indicate this symptom, by the names of IBA, mlx5, rxe, bnxt_re and irdma.
    pub const fn counters(self) -> &'static [&'static str] {
        match self {
            Self::Loss => &[
                "out_of_sequence",
                "packet_seq_err",
                "local_ack_timeout_err",
                "implied_nak_seq_err",
                "duplicate_request",
                "roce_adp_retrans",
                "roce_adp_retrans_to",
                "port_xmit_discards",
                "out_of_seq_request",
                "rcvd_seq_err",
                "completer_retry_err",
                "to_retransmits",
                "seq_err_naks_rcvd",
                "missing_resp",
                "dup_req",
                "rx_roce_discards",
                "tx_roce_discards",
                "tcpRetransSegs",
            ],
            Self::GivenUp => &[
                "req_transport_retries_exceeded",
                "retry_exceeded_err",
                "max_retry_exceeded",
            ],
            Self::NotReady => &[
                "rnr_nak_retry_err",
                "req_rnr_retries_exceeded",
                "out_of_buffer",
                "rcvd_rnr_err",
                "send_rnr_err",
                "retry_rnr_exceeded_err",
                "rnr_naks_rcvd",
            ],
            Self::Damage => &[
                "symbol_error",
                "link_error_recovery",
                "link_downed",
                "port_rcv_errors",
                "port_rcv_remote_physical_errors",
                "local_link_integrity_errors",
                "excessive_buffer_overrun_errors",
                "rx_icrc_encapsulated",
            ],
        }
    }

    pub const ALL: [Self; 4] = [Self::GivenUp, Self::Loss, Self::NotReady, Self::Damage];

    /// The symptom that a counter indicates; `None` for a counter of work, or an unknown one.
    pub fn of(counter: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|sign| sign.counters().contains(&counter))
    }
}

/// All counters of one port, sorted by group and name. Reading them may query the device, so they
/// are not part of [`crate::Fabric`]. `netdev`: adds the counters of this interface.
pub fn counters(
    sysfs_root: impl AsRef<Path>,
    device: &str,
    port: u8,
    netdev: Option<&str>,
) -> Vec<Counter> {
    let root = sysfs_root.as_ref();
    let ib = root.join("class/infiniband").join(device);
    let of_port = ib.join("ports").join(port.to_string());
    let mut all = group(&of_port.join("counters"), CounterGroup::Port);
    all.extend(group(&of_port.join("hw_counters"), CounterGroup::Hardware));
    if let Some(netdev) = netdev {
        let folder = root.join("class/net").join(netdev).join("statistics");
        all.extend(group(&folder, CounterGroup::Netdev));
    }
    all
}

fn group(folder: &Path, group: CounterGroup) -> Vec<Counter> {
    let counter = |name: String| {
        // Settings stand among the counters.
        if name == "lifespan" {
            return None;
        }
        let value = sysfs::number(&folder.join(&name))?;
        Some(Counter { group, name, value })
    };
    sysfs::names(folder)
        .into_iter()
        .filter_map(counter)
        .collect()
}
