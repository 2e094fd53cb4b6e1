//! The RoCE checks of one interface. Pure functions of its settings and counters, and of the
//! settings that the operator requires.

use nacre_transport_rdma_link::dcb::{Dcb, Ets, Pfc, Priorities, Selector};
use nacre_transport_rdma_link::qos::Qos;

use super::{Facts, SwitchSettings, is_vlan, linked};
use crate::{Finding, Scope, System};

/// Pause frames per second and priority that a healthy network may have.
const PAUSES_PER_SECOND: f64 = 100.0;
/// Share of the time that a priority may be paused.
const PAUSED: f64 = 0.1;

/// An interface with everything that its checks need.
pub(super) struct Examined<'a> {
    facts: &'a Facts,
    qos: &'a Qos,
    /// The byte that RDMA packets are marked with, if they are.
    tos: u8,
    has_vlan: bool,
    has_gateway: bool,
    resyncs: u64,
}

impl<'a> Examined<'a> {
    pub(super) fn of(system: &System, scope: &'a Scope, facts: &'a Facts) -> Self {
        let upper = linked(&system.roots, &facts.interface, "upper_");
        Examined {
            facts,
            qos: &scope.marking.qos,
            tos: scope.storage_tos(),
            has_vlan: upper.iter().any(|netdev| is_vlan(system, netdev)),
            has_gateway: has_gateway(system, &facts.interface),
            resyncs: scope.resyncs,
        }
    }

    fn interface(&self) -> &str {
        &self.facts.interface
    }

    fn driver(&self) -> &str {
        self.facts.driver.as_deref().unwrap_or("unknown")
    }

    /// The priorities that pause, or should.
    fn lossless(&self) -> Priorities {
        if self.qos.is_empty() {
            self.pfc().map(|pfc| pfc.enabled).unwrap_or_default()
        } else {
            self.qos.lossless_priorities()
        }
    }

    fn pfc(&self) -> Option<Pfc> {
        self.facts.dcb.as_ref()?.pfc
    }

    fn plan(&self) -> String {
        format!("`nacre rdma qos plan --iface {}`", self.interface())
    }
}

/// An IPv4 route of the interface that leaves by a gateway.
fn has_gateway(system: &System, netdev: &str) -> bool {
    let routes = system.text(system.roots.proc.join("net/route"));
    routes.unwrap_or_default().lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        matches!(fields[..], [name, _, gateway, ..] if name == netdev && gateway != "00000000")
    })
}

pub(super) fn all(of: &Examined<'_>) -> Vec<Finding> {
    let Some(dcb) = &of.facts.dcb else {
        return vec![without_dcb(of)];
    };
    let mut findings = vec![
        dcbx(of, dcb),
        pfc_set(of, dcb),
        pfc(of, dcb),
        ets(of, dcb),
        trust(of, dcb),
        ecn(of),
        pause_global(of),
        pause_rate(of),
        buffer(of, dcb),
        counters(of),
    ];
    let summary = lossless(of, &findings);
    findings.push(summary);
    findings
}

/// The network may still be lossless for a virtual function, whose settings are the host's.
fn without_dcb(of: &Examined<'_>) -> Finding {
    const ID: &str = "roce.lossless";
    let why = of.facts.no_dcb.as_deref().unwrap_or("no DCB");
    let evidence = format!("{why} (driver {}): PFC and ETS cannot be read", of.driver());
    if !of.qos.lossless {
        return Finding::skip(ID, evidence);
    }
    Finding::fail(
        ID,
        format!("{evidence}; `[qos] lossless = true` asks for PFC"),
        "set PFC where this interface's settings are (the hypervisor, the card's firmware), or set lossless = false",
    )
}

fn dcbx(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.dcbx";
    let neighbour = of.facts.neighbour.neighbour();
    if let Some(neighbour) = neighbour.filter(|neighbour| neighbour.cee && !neighbour.has_dcbx()) {
        return Finding::fail(
            ID,
            format!("{neighbour} speaks only the older DCBX (CEE)"),
            "set the switch port to IEEE DCBX (802.1Qaz), or turn DCBX off there and set both ends by hand",
        );
    }
    let Some(mode) = dcb.mode else {
        return Finding::skip(
            ID,
            format!("driver {} does not say who negotiates", of.driver()),
        );
    };
    // mlx5 has no word for its firmware's agent: the host is missing.
    if mode.is_firmware() || !mode.is_host() {
        let remedy = match of.driver() {
            "ice" => format!(
                "`ethtool --set-priv-flags {} fw-lldp-agent off`",
                of.interface()
            ),
            "mlx5_core" => "`mlxconfig -d DEVICE set LLDP_NB_DCBX_P1=0 LLDP_NB_RX_MODE_P1=0 LLDP_NB_TX_MODE_P1=0`, then reset the card".into(),
            "bnxt_en" => "`bnxtnvm -dev=DEVICE setoption=dcbx_mode:0:0` (or niccli), then reboot".into(),
            _ => format!("`dcb dcbx set dev {} host ieee`, or turn the firmware's agent off", of.interface()),
        };
        return Finding::warn(
            ID,
            format!("{mode}: the firmware may overwrite the settings of this machine"),
            remedy,
        );
    }
    let willing = dcb.ets.is_some_and(|ets| ets.willing);
    let differs = neighbour
        .and_then(|neighbour| neighbour.pfc)
        .is_some_and(|pfc| pfc.enabled != of.lossless());
    if willing && differs {
        return Finding::warn(
            ID,
            format!(
                "{mode}, willing: an agent here may take over the switch's settings, which differ"
            ),
            of.plan(),
        );
    }
    let willing = if willing { ", willing" } else { "" };
    Finding::pass(ID, format!("{mode}{willing}"))
}

fn pfc_set(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.pfc.set";
    let Some(pfc) = dcb.pfc else {
        return Finding::skip(ID, format!("driver {} has no PFC", of.driver()));
    };
    let (enabled, wanted) = (pfc.enabled, of.lossless());
    let evidence = if of.qos.is_empty() {
        format!("priorities with PFC: {enabled}")
    } else {
        format!("priorities with PFC: {enabled}; [qos] asks for: {wanted}")
    };
    if enabled == Priorities(0xff) {
        let why = "all eight pause: whatever one receiver cannot take stops everything";
        return Finding::fail(ID, format!("{evidence}; {why}"), of.plan());
    }
    if wanted != enabled && of.qos.lossless {
        return Finding::fail(ID, evidence, of.plan());
    }
    if enabled.len() > 2 {
        let why = "each lossless priority takes buffers from the others";
        return Finding::warn(ID, format!("{evidence}; {why}"), of.plan());
    }
    if wanted != enabled {
        return Finding::warn(ID, evidence, of.plan());
    }
    Finding::pass(ID, evidence)
}

/// Compares the card's priorities with the switch's.
fn pfc(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.pfc";
    let Some(ours) = dcb.pfc else {
        return Finding::skip(ID, format!("driver {} has no PFC", of.driver()));
    };
    let ours = ours.enabled;
    let (theirs, name) = match (&of.facts.neighbour, dcb.peer_pfc) {
        (SwitchSettings::Neighbour(neighbour), peer) => {
            match neighbour
                .pfc
                .map(|pfc| pfc.enabled)
                .or_else(|| peer.map(|pfc| pfc.enabled))
            {
                Some(theirs) => (theirs, neighbour.to_string()),
                None => {
                    return Finding::warn(
                        ID,
                        format!("{neighbour} announces no PFC"),
                        "turn DCBX (IEEE) on for that switch port, or compare the settings by hand",
                    );
                }
            }
        }
        (_, Some(peer)) => (peer.enabled, "the card's agent".to_owned()),
        (SwitchSettings::NotListened, None) => {
            return Finding::skip(
                ID,
                format!("ours: {ours}; the switch was not asked: `nacre doctor --wait 35s`"),
            );
        }
        (SwitchSettings::Unable(why), None) => {
            return Finding::skip(ID, format!("ours: {ours}; {why}"));
        }
        (SwitchSettings::Bad(why), None) => {
            return Finding::warn(
                ID,
                format!("ours: {ours}; a malformed LLDP frame arrived: {why}"),
                "find the sender: `tcpdump -e -i INTERFACE ether proto 0x88cc`",
            );
        }
        (SwitchSettings::Silence(wait), None) => {
            return Finding::warn(
                ID,
                format!(
                    "ours: {ours}; no LLDP frame arrived in {} s",
                    wait.as_secs()
                ),
                format!(
                    "turn LLDP on at the switch; or an agent in the card's firmware takes the frames: \
                     `ethtool --show-priv-flags {}`",
                    of.interface()
                ),
            );
        }
    };
    let evidence = format!("ours: {ours}; {name}: {theirs}");
    if ours == theirs {
        return Finding::pass(ID, evidence);
    }
    Finding::fail(
        ID,
        format!("{evidence}: packets of a priority with PFC at one end only are lost"),
        format!(
            "set the same priorities on the switch port (`priority-flow-control`), or here: {}",
            of.plan()
        ),
    )
}

fn ets(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.ets";
    let Some(ets) = dcb.ets else {
        return Finding::skip(ID, format!("driver {} has no ETS", of.driver()));
    };
    let evidence = ets_in_words(&ets);
    if ets.has_shares() && ets.sum() != 100 {
        let why = format!("the shares are {} percent together, not 100", ets.sum());
        return Finding::fail(ID, format!("{evidence}; {why}"), of.plan());
    }
    let default = ets.class(of.qos.default_priority());
    for (name, class) in of.qos.classes() {
        let Some(prio) = class.prio else {
            continue;
        };
        let own = ets.class(prio);
        if own == default && prio != of.qos.default_priority() {
            let why = format!("{name} (priority {prio}) shares class {own} with all other traffic");
            return Finding::warn(ID, format!("{evidence}; {why}"), of.plan());
        }
        let got = ets.share[usize::from(own & 7)];
        if let Some(share) = class.share.filter(|share| *share > got)
            && ets.algorithm[usize::from(own & 7)] == nacre_transport_rdma_link::dcb::Algorithm::Ets
        {
            let why = format!("{name} has {got} percent, [qos] asks for {share}");
            return Finding::warn(ID, format!("{evidence}; {why}"), of.plan());
        }
    }
    let shared = of
        .lossless()
        .iter()
        .find(|prio| ets.class(*prio) == default);
    if let Some(prio) = shared.filter(|_| of.qos.is_empty()) {
        let why = format!("lossless priority {prio} shares class {default} with all other traffic");
        return Finding::warn(ID, format!("{evidence}; {why}"), of.plan());
    }
    Finding::pass(ID, evidence)
}

/// The classes that have priorities.
pub(crate) fn ets_in_words(ets: &Ets) -> String {
    use nacre_transport_rdma_link::dcb::Algorithm;
    let classes = (0..8u8).filter(|class| !ets.priorities(*class).is_empty());
    let classes = classes.map(|class| {
        let at = usize::from(class);
        let how = match ets.algorithm[at] {
            Algorithm::Strict => "strict".to_owned(),
            Algorithm::CreditShaper => "credit shaper".to_owned(),
            Algorithm::Ets => format!("{} %", ets.share[at]),
            Algorithm::Other(code) => format!("algorithm {code}"),
        };
        format!("class {class}: priorities {}, {how}", ets.priorities(class))
    });
    classes.collect::<Vec<_>>().join("; ")
}

/// Follows a packet of ours to its priority.
fn trust(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.trust";
    let trusted = dcb.trusted();
    let words: Vec<String> = trusted.iter().map(Selector::to_string).collect();
    let words = if words.is_empty() {
        "nothing".into()
    } else {
        words.join(", then ")
    };
    let wanted = of.qos.storage.prio;
    let dscp = of.tos >> 2;
    if trusted.first() == Some(&Selector::Dscp) {
        // Without an entry the class selector decides (RFC 2474): its upper three bits.
        let entry = dcb.priority_of_dscp(dscp);
        let priority = entry.unwrap_or(dscp >> 3);
        let how = if entry.is_some() {
            ""
        } else {
            ", without an entry"
        };
        let evidence = format!("trusts {words}; DSCP {dscp} has priority {priority}{how}");
        return match wanted {
            Some(wanted) if wanted != priority => Finding::fail(
                ID,
                format!(
                    "{evidence}, [qos] asks for {wanted}: our packets land in another priority"
                ),
                // DSCP 0 is all other traffic.
                match dscp {
                    0 => String::from("mark RDMA packets: dscp in [qos] storage, or tos in [rdma]"),
                    _ => format!(
                        "`dcb app replace dev {} dscp-prio {dscp}:{wanted}`",
                        of.interface()
                    ),
                },
            ),
            None if !of.lossless().is_empty() && !of.lossless().contains(priority) => {
                Finding::warn(
                    ID,
                    format!("{evidence}, which does not pause ({})", of.lossless()),
                    "mark RDMA packets: [qos] storage = { dscp = 26, prio = 3 } or tos in [rdma]",
                )
            }
            _ => Finding::pass(ID, evidence),
        };
    }
    let evidence = format!("trusts {words}");
    let entry = match wanted {
        Some(wanted) if dscp != 0 => format!("{dscp}:{wanted}"),
        _ => "DSCP:PRIO".into(),
    };
    let remedy = format!(
        "trust DSCP: `dcb app add dev {0} dscp-prio {entry}` and `dcb apptrust set dev {0} order dscp pcp` (mlx5: `mlnx_qos -i {0} --trust dscp`)",
        of.interface()
    );
    if of.tos != 0 && of.qos.storage.prio.is_some() && !of.has_vlan {
        return Finding::fail(
            ID,
            format!(
                "{evidence}, and our packets carry DSCP {dscp} without a VLAN tag: they have priority 0"
            ),
            remedy,
        );
    }
    if !of.has_vlan && !of.lossless().is_empty() {
        let why = "no VLAN is on the interface: without a tag every packet has priority 0";
        return Finding::warn(ID, format!("{evidence}; {why}"), remedy);
    }
    if of.has_gateway {
        let why = "a route of it leaves by a gateway, which removes the tag";
        return Finding::warn(ID, format!("{evidence}; {why}"), remedy);
    }
    Finding::pass(ID, evidence)
}

fn ecn(of: &Examined<'_>) -> Finding {
    const ID: &str = "roce.ecn";
    let Some(ecn) = of.facts.ecn else {
        return match of.driver() {
            "mlx5_core" => Finding::warn(
                ID,
                "the driver shows no ECN settings",
                "`mlxconfig -d DEVICE query | grep ROCE_CC`; the driver of the kernel shows less than the vendor's",
            ),
            driver => Finding::skip(
                ID,
                format!("driver {driver} shows no ECN settings; see the vendor's tool"),
            ),
        };
    };
    let priorities = match of.qos.storage.prio {
        Some(prio) => [prio].into_iter().collect(),
        None => of.lossless(),
    };
    let priorities = if priorities.is_empty() {
        Priorities(1)
    } else {
        priorities
    };
    let off: Priorities = priorities
        .iter()
        .filter(|prio| {
            let at = usize::from(*prio);
            !ecn.notifies[at] || !ecn.reacts[at]
        })
        .collect();
    let number =
        |value: Option<u8>| value.map_or_else(|| "unknown".into(), |value| value.to_string());
    let evidence = format!(
        "priorities {priorities}: ECN {}; notifications have DSCP {}, priority {}",
        if off.is_empty() {
            "on".into()
        } else {
            format!("off for {off}")
        },
        number(ecn.cnp_dscp),
        number(ecn.cnp_priority)
    );
    let remedy = format!(
        "`echo 1 > /sys/class/net/{0}/ecn/roce_np/enable/N` and `…/roce_rp/enable/N` for N of {off}; \
         mark congested queues on the switch too",
        of.interface()
    );
    match (off.is_empty(), of.qos.lossless || !of.lossless().is_empty()) {
        (true, _) => Finding::pass(ID, evidence),
        (false, true) => Finding::warn(
            ID,
            format!("{evidence}: only pauses hold senders back"),
            remedy,
        ),
        (false, false) => Finding::fail(
            ID,
            format!("{evidence}: nothing holds senders back on this lossy network"),
            remedy,
        ),
    }
}

fn pause_global(of: &Examined<'_>) -> Finding {
    const ID: &str = "roce.pause.global";
    let Some(pause) = of.facts.pause else {
        return Finding::skip(
            ID,
            format!("driver {} has no whole-port pause", of.driver()),
        );
    };
    let word = |on: bool| if on { "on" } else { "off" };
    let evidence = format!(
        "whole-port pause: received {}, sent {}",
        word(pause.rx),
        word(pause.tx)
    );
    if (pause.rx || pause.tx) && !of.lossless().is_empty() {
        return Finding::fail(
            ID,
            format!(
                "{evidence}, together with PFC on {}: one excludes the other",
                of.lossless()
            ),
            format!("`ethtool -A {} autoneg off rx off tx off`", of.interface()),
        );
    }
    Finding::pass(ID, evidence)
}

fn pause_rate(of: &Examined<'_>) -> Finding {
    const ID: &str = "roce.pause.rate";
    let (before, Some(after)) = (&of.facts.before, &of.facts.after) else {
        return Finding::skip(ID, "not measured: `nacre doctor --wait 10s`");
    };
    let seconds = after.seconds.max(0.001);
    if after.pauses_received(0).is_none() {
        return Finding::skip(ID, format!("driver {} counts no pause frames", of.driver()));
    }
    let mut storms = after.counters.loss.iter().filter(|(name, count)| {
        let then = before.counters.loss.get(*name).copied().unwrap_or(0);
        name.contains("storm") && **count > then
    });
    if let Some((name, _)) = storms.next_back() {
        return Finding::fail(
            ID,
            format!("{name} grew within {seconds:.0} s"),
            "a machine or switch port pauses without end: look for one with a hung CPU or a full receive buffer",
        );
    }
    // Repairs of volumes fill the network, and some pauses are then normal.
    let limit = match of.resyncs {
        0 => PAUSES_PER_SECOND,
        _ => 2.0 * PAUSES_PER_SECOND,
    };
    let mut highest = (0, 0.0);
    for priority in 0..8u8 {
        let moved =
            |of: &dyn Fn(&super::Sample) -> Option<u64>| of(after)?.checked_sub(of(before)?);
        let received = moved(&|sample| sample.pauses_received(priority)).unwrap_or(0);
        let sent = moved(&|sample| sample.pauses_sent(priority)).unwrap_or(0);
        let rate = (received + sent) as f64 / seconds;
        if rate > highest.1 {
            highest = (priority, rate);
        }
        let at = usize::from(priority);
        let paused = moved(&|sample| sample.counters.rx[at].pause_us).unwrap_or(0);
        let share = paused as f64 / 1e6 / seconds;
        if share > PAUSED {
            return Finding::fail(
                ID,
                format!(
                    "priority {priority} was paused for {:.0} % of {seconds:.0} s",
                    share * 100.0
                ),
                "another receiver is too slow, or a link is too slow for its senders: see the pause counters of the switch ports",
            );
        }
    }
    let (priority, rate) = highest;
    let evidence = match rate {
        0.0 => format!("no pause frame in {seconds:.0} s"),
        rate => format!(
            "at most {rate:.0} pause frames per second (priority {priority}) over {seconds:.0} s"
        ),
    };
    if rate < limit {
        return Finding::pass(ID, evidence);
    }
    Finding::warn(
        ID,
        format!("{evidence}, more than {limit:.0}"),
        "pauses that rise fast are a sign of a wrong setting: compare roce.pfc, roce.ets and roce.trust on every machine and port",
    )
}

fn buffer(of: &Examined<'_>, dcb: &Dcb) -> Finding {
    const ID: &str = "roce.buffer";
    let Some(buffers) = dcb.buffers else {
        return Finding::skip(
            ID,
            format!("driver {} does not show its buffers", of.driver()),
        );
    };
    let lossless = of.lossless();
    if lossless.is_empty() {
        return Finding::pass(ID, "no priority pauses");
    }
    let default = of.qos.default_priority();
    let delay = u64::from(dcb.pfc.map_or(0, |pfc| pfc.delay));
    for prio in lossless.iter() {
        let buffer = buffers.buffer_of[usize::from(prio)];
        let size = buffers.bytes[usize::from(buffer & 7)];
        let evidence = format!("priority {prio} has buffer {buffer} of {size} bytes");
        if buffer == buffers.buffer_of[usize::from(default)] {
            return Finding::fail(
                ID,
                format!("{evidence}, together with all other traffic, which does not pause"),
                format!(
                    "`dcb buffer set dev {} prio-buffer {prio}:1 buffer-size 1:SIZE`, or {}",
                    of.interface(),
                    of.plan()
                ),
            );
        }
        // Bits on the way after a pause was sent, and a frame begun at each end.
        let needed = delay / 8 + 2 * u64::from(of.facts.mtu.unwrap_or(1500));
        if u64::from(size) < needed {
            return Finding::warn(
                ID,
                format!("{evidence}; a delay of {delay} bits needs {needed}"),
                format!(
                    "`dcb buffer set dev {} buffer-size {buffer}:{needed}` or more",
                    of.interface()
                ),
            );
        }
    }
    Finding::pass(
        ID,
        format!("priorities {lossless} have buffers of their own"),
    )
}

/// Whether traffic can be followed by priority.
fn counters(of: &Examined<'_>) -> Finding {
    const ID: &str = "rdma.counters";
    let counters = &of.facts.before.counters;
    if !counters.has_bytes() && !counters.has_pauses() {
        return Finding::skip(
            ID,
            format!(
                "driver {} counts neither bytes nor pauses by priority that are known here; a newer driver and firmware may",
                of.driver()
            ),
        );
    }
    let used = |side: &[nacre_transport_rdma_link::ethtool::PriorityCount]| -> Priorities {
        let used = (0..8u8).filter(|prio| side[usize::from(*prio)].bytes.is_some_and(|b| b > 0));
        used.collect()
    };
    Finding::pass(
        ID,
        format!(
            "by priority; traffic so far: received on {}, sent on {}",
            used(&counters.rx),
            used(&counters.tx)
        ),
    )
}

fn lossless(of: &Examined<'_>, findings: &[Finding]) -> Finding {
    use crate::Status;
    const ID: &str = "roce.lossless";
    let lossless = of.lossless();
    if lossless.is_empty() {
        return Finding::pass(
            ID,
            "lossy RoCE: slow restart and adaptive retransmission are what protects it",
        );
    }
    let decisive = [
        "roce.pfc.set",
        "roce.pfc",
        "roce.trust",
        "roce.pause.global",
        "roce.buffer",
    ];
    let bad: Vec<&str> = findings
        .iter()
        .filter(|finding| decisive.contains(&finding.id) && finding.status >= Status::Warn)
        .map(|finding| finding.id)
        .collect();
    if bad.is_empty() {
        return Finding::pass(
            ID,
            format!("priorities {lossless} pause instead of losing packets"),
        );
    }
    Finding::warn(
        ID,
        format!(
            "priorities {lossless} should not lose packets, and may: see {}",
            bad.join(", ")
        ),
        "correct these; or set lossless = false and rely on ECN, and test with `nacre rdma perf`",
    )
}

/// Members of a bond carry the same connections: their settings must be the same.
pub(super) fn members(members: &[&Facts]) -> Finding {
    const ID: &str = "roce.members";
    let names: Vec<&str> = members.iter().map(|of| of.interface.as_str()).collect();
    let settings = |of: &Facts| {
        let dcb = of.dcb.as_ref()?;
        let pfc = dcb.pfc.map(|pfc| pfc.enabled);
        Some((pfc, dcb.ets, dcb.apps.clone(), dcb.trusted()))
    };
    let mut all = members.iter().map(|of| settings(of));
    let first = all.next().flatten();
    if first.is_none() {
        return Finding::skip(ID, format!("{}: no DCB", names.join(", ")));
    }
    if all.all(|other| other == first) {
        return Finding::pass(ID, format!("{} have the same settings", names.join(", ")));
    }
    Finding::fail(
        ID,
        format!(
            "{} have different PFC, ETS, applications or trust",
            names.join(", ")
        ),
        format!(
            "`nacre rdma qos plan --iface {}` for each",
            names.join(" --iface ")
        ),
    )
}
