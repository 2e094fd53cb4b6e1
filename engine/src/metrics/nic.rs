//! Metrics of network interfaces: bytes, pauses and loss by priority, as their drivers count them.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};
use crate::services::nics::NicCounters;

family!(
    BYTES,
    "nacre_nic_prio_bytes",
    Counter,
    "Bytes of an interface by Ethernet priority and direction (`rx`, `tx`), of all its users.",
    ["iface", "prio", "dir"]
);
family!(
    PAUSES,
    "nacre_nic_pause_frames",
    Counter,
    "Pause frames by priority (PFC) and direction; `port` is pause of the whole port.",
    ["iface", "prio", "dir"]
);
family!(
    PAUSED,
    "nacre_nic_pause_duration_us",
    Counter,
    "Microseconds for which a priority was paused: `rx` by the other end, `tx` the other end.",
    ["iface", "prio", "dir"]
);
family!(
    DISCARDS,
    "nacre_nic_prio_discards",
    Counter,
    "Packets of a priority that were lost for want of a buffer.",
    ["iface", "prio", "dir"]
);
family!(
    LOSS,
    "nacre_nic_loss",
    Counter,
    "The driver's own counters of lost packets and of pause storms, by its names.",
    ["iface", "counter"]
);

#[derive(Debug)]
pub struct NicMetrics;

impl MetricsSource for NicMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 5] = [&BYTES, &PAUSES, &PAUSED, &DISCARDS, &LOSS];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for nic in &of.nics {
            emit(nic, into);
        }
    }
}

fn emit(nic: &NicCounters, into: &mut Scrape) {
    let iface = nic.interface.as_str();
    let mut count = |desc: &'static Desc, prio: &str, dir: &str, value: Option<u64>| {
        if let Some(value) = value {
            into.value(desc, &[iface, prio, dir], value);
        }
    };
    for (dir, counts) in [("rx", &nic.counters.rx), ("tx", &nic.counters.tx)] {
        for (prio, of) in counts.iter().enumerate() {
            let prio = prio.to_string();
            count(&BYTES, &prio, dir, of.bytes);
            count(&PAUSES, &prio, dir, of.pauses);
            count(&PAUSED, &prio, dir, of.pause_us);
            count(&DISCARDS, &prio, dir, of.discards);
        }
    }
    count(&PAUSES, "port", "rx", nic.port.0);
    count(&PAUSES, "port", "tx", nic.port.1);
    for (name, value) in &nic.counters.loss {
        into.value(&LOSS, &[iface, name], *value);
    }
}

#[cfg(test)]
mod tests {
    use nacre_transport_rdma_link::ethtool::PriorityCounters;

    use super::super::testing;
    use super::*;

    #[test]
    fn counters_of_a_driver_become_samples() {
        let statistics = [
            ("rx_prio3_bytes", 100),
            ("tx_prio3_pause", 7),
            ("rx_prio3_pause_duration", 5000),
            ("rx_prio4_discards", 2),
            ("rx_discards_phy", 9),
            ("rx_unrelated", 1),
        ];
        let statistics = statistics.map(|(name, value)| (name.to_owned(), value));
        let nic = NicCounters {
            interface: "ens1f0".into(),
            counters: PriorityCounters::of(&statistics),
            port: (Some(1), None),
        };
        let mut scrape = Scrape::default();
        emit(&nic, &mut scrape);
        let text = scrape.text();
        testing::check(&text);
        for line in [
            "nacre_nic_prio_bytes_total{iface=\"ens1f0\",prio=\"3\",dir=\"rx\"} 100",
            "nacre_nic_pause_frames_total{iface=\"ens1f0\",prio=\"3\",dir=\"tx\"} 7",
            "nacre_nic_pause_frames_total{iface=\"ens1f0\",prio=\"port\",dir=\"rx\"} 1",
            "nacre_nic_pause_duration_us_total{iface=\"ens1f0\",prio=\"3\",dir=\"rx\"} 5000",
            "nacre_nic_prio_discards_total{iface=\"ens1f0\",prio=\"4\",dir=\"rx\"} 2",
            "nacre_nic_loss_total{iface=\"ens1f0\",counter=\"rx_discards_phy\"} 9",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(
            !text.contains("unrelated") && !text.contains("prio=\"0\""),
            "{text}"
        );
    }
}
