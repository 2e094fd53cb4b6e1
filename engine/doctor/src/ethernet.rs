//! Reads the settings and counters of Ethernet interfaces from the running machine, for the RoCE
//! checks.

use std::time::{Duration, Instant};

use nacre_transport_rdma_link::Roots;
use nacre_transport_rdma_link::dcb::{self, Dcb, PRIORITIES};
use nacre_transport_rdma_link::ethtool::{self, Pause, PriorityCounters};
use nacre_transport_rdma_link::lldp::{self, Neighbour};
use nacre_transport_rdma_verbs::netdev::{LldpSocket, Statistics};
use serde::{Deserialize, Serialize};

/// The settings and counters of one interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Facts {
    pub interface: String,
    /// The driver; `None` for virtual interfaces.
    pub driver: Option<String>,
    /// The DCB settings (PFC, ETS, table of DSCPs). If `None`, `no_dcb` has the reason.
    pub dcb: Option<Dcb>,
    pub no_dcb: Option<String>,
    pub pause: Option<Pause>,
    pub before: Sample,
    /// A second sample; `None` without a waiting time.
    pub after: Option<Sample>,
    pub neighbour: SwitchSettings,
    pub ecn: Option<Ecn>,
    pub mtu: Option<u32>,
    /// Link speed in Mb/s.
    pub speed: Option<u32>,
}

/// The counters of an interface at one time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the first sample.
    pub seconds: f64,
    pub counters: PriorityCounters,
    /// DCB's counters of PFC frames received, by priority.
    pub received: Option<[u64; PRIORITIES]>,
    /// DCB's counters of PFC frames sent, by priority.
    pub sent: Option<[u64; PRIORITIES]>,
}

impl Sample {
    /// PFC frames received for a priority: the driver's counter, or DCB's if there is none.
    pub fn pauses_received(&self, priority: u8) -> Option<u64> {
        let at = usize::from(priority);
        self.counters.rx[at]
            .pauses
            .or_else(|| Some(self.received?[at]))
    }

    pub fn pauses_sent(&self, priority: u8) -> Option<u64> {
        let at = usize::from(priority);
        self.counters.tx[at].pauses.or_else(|| Some(self.sent?[at]))
    }
}

/// The switch's own settings, from its LLDP frames.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchSettings {
    /// There was no time to listen.
    #[default]
    NotListened,
    /// LLDP frames could not be received, for this reason.
    Unable(String),
    /// No frame arrived within this time.
    Silence(Duration),
    /// The switch sent a malformed frame, with this error.
    Bad(String),
    Neighbour(Box<Neighbour>),
}

impl SwitchSettings {
    pub fn neighbour(&self) -> Option<&Neighbour> {
        match self {
            Self::Neighbour(neighbour) => Some(neighbour),
            _ => None,
        }
    }
}

/// Congestion notification, as mlx5 shows it in sysfs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ecn {
    /// Notification point by priority: answers ECN marks with CNPs.
    pub notifies: [bool; PRIORITIES],
    /// Reaction point by priority: reduces the rate on CNPs.
    pub reacts: [bool; PRIORITIES],
    pub cnp_dscp: Option<u8>,
    pub cnp_priority: Option<u8>,
}

/// Reads the settings of these interfaces. Receives LLDP frames for `wait`, and reads the counters
/// before and after that time.
pub(crate) fn gather(roots: &Roots, interfaces: &[String], wait: Duration) -> Vec<Facts> {
    let start = Instant::now();
    let mut all: Vec<Facts> = interfaces
        .iter()
        .map(|interface| settings(roots, interface))
        .collect();
    if wait.is_zero() {
        return all;
    }
    // One thread per interface, because each waits for LLDP frames.
    std::thread::scope(|scope| {
        let listeners: Vec<_> = interfaces
            .iter()
            .map(|interface| scope.spawn(move || listen(interface, wait)))
            .collect();
        for (facts, listener) in all.iter_mut().zip(listeners) {
            let heard = listener.join();
            facts.neighbour =
                heard.unwrap_or_else(|_| SwitchSettings::Unable("the listener ended".into()));
        }
    });
    // Wait for the rest of the time even if a frame arrived early: the rates need it.
    std::thread::sleep(wait.saturating_sub(start.elapsed()));
    for facts in &mut all {
        let mut after = sample(&facts.interface, dcb::read(&facts.interface).ok().as_ref());
        after.seconds = start.elapsed().as_secs_f64();
        facts.after = Some(after);
    }
    all
}

fn settings(roots: &Roots, interface: &str) -> Facts {
    let folder = roots.sys.join("class/net").join(interface);
    let text = |name: &str| {
        let text = std::fs::read_to_string(folder.join(name)).ok()?;
        Some(text.trim().to_owned())
    };
    let driver = std::fs::read_link(folder.join("device/driver")).ok();
    let (dcb, no_dcb) = match dcb::read(interface) {
        Ok(dcb) => (Some(dcb), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Facts {
        interface: interface.to_owned(),
        driver: driver.and_then(|target| Some(target.file_name()?.to_str()?.to_owned())),
        pause: ethtool::pause(interface).ok().flatten(),
        before: sample(interface, dcb.as_ref()),
        after: None,
        neighbour: SwitchSettings::NotListened,
        ecn: ecn(&text),
        mtu: text("mtu").and_then(|mtu| mtu.parse().ok()),
        // -1 without a link.
        speed: text("speed").and_then(|speed| speed.parse().ok()),
        dcb,
        no_dcb,
    }
}

fn sample(interface: &str, dcb: Option<&Dcb>) -> Sample {
    let statistics = Statistics::open(interface).and_then(|mut statistics| statistics.read());
    let pfc = dcb.and_then(|dcb| dcb.pfc);
    Sample {
        seconds: 0.0,
        counters: PriorityCounters::of(&statistics.unwrap_or_default()),
        received: pfc.map(|pfc| pfc.received),
        sent: pfc.map(|pfc| pfc.sent),
    }
}

fn ecn(text: &dyn Fn(&str) -> Option<String>) -> Option<Ecn> {
    let enabled = |side: &str| -> Option<[bool; PRIORITIES]> {
        let mut enabled = [false; PRIORITIES];
        for (priority, is) in enabled.iter_mut().enumerate() {
            *is = text(&format!("ecn/{side}/enable/{priority}"))? == "1";
        }
        Some(enabled)
    };
    let number = |name: &str| text(name).and_then(|text| text.parse().ok());
    Some(Ecn {
        notifies: enabled("roce_np")?,
        reacts: enabled("roce_rp")?,
        cnp_dscp: number("ecn/roce_np/cnp_dscp"),
        cnp_priority: number("ecn/roce_np/cnp_802p_prio"),
    })
}

fn listen(interface: &str, wait: Duration) -> SwitchSettings {
    let frames = LldpSocket::open(interface).and_then(|socket| socket.receive(wait, 1));
    match frames {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            SwitchSettings::Unable("not permitted: listening for LLDP takes CAP_NET_RAW".into())
        }
        Err(error) => SwitchSettings::Unable(error.to_string()),
        Ok(frames) => match frames.last().map(|frame| lldp::parse(frame)) {
            None => SwitchSettings::Silence(wait),
            Some(Ok(neighbour)) => SwitchSettings::Neighbour(Box::new(neighbour)),
            Some(Err(error)) => SwitchSettings::Bad(error.to_string()),
        },
    }
}
