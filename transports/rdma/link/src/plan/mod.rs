//! Computes the steps from the present DCB settings of an interface to the requested traffic
//! classes ([`Qos`]). A step is a netlink change with its undo, or a vendor's command that the
//! operator has to run. [`command`] gives the equivalent command of a change.
//!
//! Order: the vendor's command, DCBX to the host, whole-port pause off, buffers, ETS, old entries
//! removed, new entries, trust, PFC. PFC is last, so that no pause affects a class that still
//! carries all traffic. The undo runs in the reverse order.

use serde::{Deserialize, Serialize};

use crate::dcb::{self, Algorithm, App, Buffers, Change, Dcb, DcbError, DcbxMode, Ets, PRIORITIES};
use crate::dcb::{Pfc, Selector};
use crate::ethtool::{self, Pause};
use crate::qos::Qos;

/// One step of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub about: String,
    pub action: Action,
    /// The change that undoes the step; for a vendor's command, an empty [`Action::Vendor`].
    pub undo: Action,
}

/// A change over netlink, or one that only the vendor's tool can make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Dcb(Change),
    Pause(Pause),
    /// A vendor's command for the operator to run.
    Vendor(String),
}

/// The present settings of an interface that a plan may change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Found {
    pub driver: Option<String>,
    pub dcb: Dcb,
    pub pause: Option<Pause>,
}

impl Found {
    pub fn read(interface: &str, driver: Option<String>) -> Result<Self, DcbError> {
        Ok(Self {
            driver,
            dcb: dcb::read(interface)?,
            pause: ethtool::pause(interface).ok().flatten(),
        })
    }
}

/// The steps to `qos`; empty if all settings match already.
pub fn plan(interface: &str, found: &Found, qos: &Qos) -> Vec<Step> {
    let dcb = &found.dcb;
    let mut steps = Vec::new();
    let mut change = |about: &str, to: Change, back: Change| {
        steps.push(Step {
            about: about.into(),
            action: Action::Dcb(to),
            undo: Action::Dcb(back),
        });
    };
    if let Some(mode) = dcb.mode.filter(|mode| *mode != DcbxMode::HOST_IEEE) {
        let about = "this machine decides, not the firmware or the switch";
        // mlx5 returns the decision to its firmware's agent at mode 0, and refuses its own mode
        // value.
        let back = match found.driver.as_deref() {
            Some("mlx5_core") if !mode.is_host() => DcbxMode(0),
            _ => mode,
        };
        change(about, Change::Mode(DcbxMode::HOST_IEEE), Change::Mode(back));
    }
    // mlx5 sizes its buffers automatically when PFC is set. Setting a size manually stops that
    // until the driver is reloaded, which no undo can revert.
    let sizes_itself = found.driver.as_deref() == Some("mlx5_core");
    if let Some((before, after)) = buffers(dcb, qos).filter(|_| !sizes_itself) {
        let about = "lossless priorities get a receive buffer of their own";
        change(about, Change::Buffers(after), Change::Buffers(before));
    }
    if let Some((before, after)) = shares(dcb, qos) {
        change(
            "classes and their shares",
            Change::Ets(after),
            Change::Ets(before),
        );
    }
    let (old, new) = apps(dcb, qos);
    if !old.is_empty() {
        let about = "entries that give our DSCP another priority";
        change(about, Change::DeleteApps(old.clone()), Change::AddApps(old));
    }
    if !new.is_empty() {
        let about = "packets with our DSCP get our priority";
        change(about, Change::AddApps(new.clone()), Change::DeleteApps(new));
    }
    if let Some(trust) = dcb.trust.clone().filter(|trust| {
        trust.first() != Some(&Selector::Dscp) && qos.classes().any(|(_, c)| c.dscp.is_some())
    }) {
        let order = vec![Selector::Dscp, Selector::Pcp];
        let about = "the DSCP decides, so that routers keep the marking";
        change(about, Change::Trust(order), Change::Trust(trust));
    }
    if let Some(pfc) = dcb
        .pfc
        .filter(|pfc| pfc.enabled != qos.lossless_priorities())
    {
        let enabled = qos.lossless_priorities();
        // Counters are not settings: without them, equal settings give equal steps.
        let pfc = Pfc {
            sent: [0; PRIORITIES],
            received: [0; PRIORITIES],
            ..pfc
        };
        let about = format!("priorities that pause: {enabled}");
        change(
            &about,
            Change::Pfc(Pfc { enabled, ..pfc }),
            Change::Pfc(pfc),
        );
    }
    let pause = found.pause.map(|pause| Pause {
        rx_frames: None,
        tx_frames: None,
        ..pause
    });
    if let Some(pause) = pause
        && (pause.rx || pause.tx)
        && !qos.lossless_priorities().is_empty()
    {
        let off = Pause {
            autoneg: false,
            rx: false,
            tx: false,
            ..pause
        };
        let at = usize::from(dcb.mode.is_some_and(|mode| mode != DcbxMode::HOST_IEEE));
        let step = Step {
            about: "whole-port pause excludes PFC".into(),
            action: Action::Pause(off),
            undo: Action::Pause(pause),
        };
        steps.insert(at, step);
    }
    vendor(interface, found, qos, &mut steps);
    steps
}

/// mlx5 has no trust setting: it trusts the DSCP once an entry for a DSCP exists, and with older
/// kernels not even then.
fn vendor(interface: &str, found: &Found, qos: &Qos, steps: &mut Vec<Step>) {
    let wants_dscp = qos.classes().any(|(_, class)| class.dscp.is_some());
    let text = match found.driver.as_deref() {
        Some("mlx5_core") if wants_dscp && found.dcb.trusted().first() != Some(&Selector::Dscp) => {
            format!("mlnx_qos -i {interface} --trust dscp")
        }
        Some("ice") if found.dcb.mode.is_some_and(DcbxMode::is_firmware) => {
            format!("ethtool --set-priv-flags {interface} fw-lldp-agent off")
        }
        Some("bnxt_en") if found.dcb.mode.is_some_and(DcbxMode::is_firmware) => {
            format!("niccli --dev {interface} nvm --setoption dcbx_mode --value 0 --scope 0")
        }
        _ => return,
    };
    let step = Step {
        about: "the vendor's tool, which netlink cannot replace".into(),
        action: Action::Vendor(text),
        undo: Action::Vendor(String::new()),
    };
    steps.insert(0, step);
}

/// The classes: one per configured priority, the rest in class 0. Without any share in `qos`, ETS
/// stays unchanged.
fn shares(dcb: &Dcb, qos: &Qos) -> Option<(Ets, Ets)> {
    let before = dcb.ets?;
    let wanted = qos.shares();
    if wanted.iter().all(Option::is_none) {
        return None;
    }
    let mut priorities: Vec<u8> = qos.classes().filter_map(|(_, class)| class.prio).collect();
    priorities.retain(|priority| *priority != qos.default_priority());
    priorities.sort_unstable();
    priorities.dedup();
    let configured: u8 = wanted.iter().flatten().sum();
    // Classes without a share, and the default class, divide the rest.
    let without = priorities
        .iter()
        .filter(|priority| wanted[usize::from(**priority)].is_none());
    let each = (100 - configured) / (without.count() as u8 + 1);
    let mut after = Ets {
        willing: false,
        share: [0; PRIORITIES],
        algorithm: [Algorithm::Strict; PRIORITIES],
        class_of: [0; PRIORITIES],
        ..before
    };
    for (index, priority) in priorities.iter().enumerate() {
        // The class has the priority's number if the device has that many classes.
        let fits = before.classes == 0 || priorities.iter().all(|p| *p < before.classes);
        let class = if fits && !priorities.contains(&0) {
            *priority
        } else {
            index as u8 + 1
        };
        let at = usize::from(class & 7);
        after.class_of[usize::from(*priority)] = class;
        after.algorithm[at] = Algorithm::Ets;
        after.share[at] = wanted[usize::from(*priority)].unwrap_or(each);
    }
    after.algorithm[0] = Algorithm::Ets;
    let ours: u8 = after.share.iter().sum();
    after.share[0] = 100 - ours;
    // Some drivers report shares of strict classes too (mlx5: 100 each); those shares have no
    // meaning.
    let mut found = before;
    for (share, algorithm) in found.share.iter_mut().zip(before.algorithm) {
        if algorithm != Algorithm::Ets {
            *share = 0;
        }
    }
    let same = Ets {
        willing: before.willing,
        ..after
    };
    // Newer drivers and dcb(8) refuse such shares as a setting.
    let sum: u32 = before.share.iter().map(|share| u32::from(*share)).sum();
    let back = if sum > 100 { found } else { before };
    (found != same).then_some((back, after))
}

/// Entries to delete (configured DSCPs with another priority), and entries to add.
fn apps(dcb: &Dcb, qos: &Qos) -> (Vec<App>, Vec<App>) {
    let mut wanted: Vec<App> = qos
        .classes()
        .filter_map(|(_, class)| Some(App::dscp(class.dscp?, class.prio?)))
        .collect();
    wanted.dedup();
    let ours = |app: &App| {
        wanted
            .iter()
            .any(|ours| (ours.selector, ours.value) == (app.selector, app.value))
    };
    let old = dcb.apps.iter().filter(|app| ours(app));
    let old = old.filter(|app| !wanted.contains(app)).copied().collect();
    let new = wanted.iter().filter(|app| !dcb.apps.contains(app));
    (old, new.copied().collect())
}

/// A lossless priority in the default buffer moves to buffer 1, which gets half of the space.
fn buffers(dcb: &Dcb, qos: &Qos) -> Option<(Buffers, Buffers)> {
    let before = dcb.buffers?;
    let default = before.buffer_of[usize::from(qos.default_priority())];
    let shared = qos
        .lossless_priorities()
        .iter()
        .any(|prio| before.buffer_of[usize::from(prio)] == default);
    if !shared {
        return None;
    }
    let mut after = before;
    let lossless = if default == 1 { 0 } else { 1 };
    for prio in qos.lossless_priorities().iter() {
        after.buffer_of[usize::from(prio)] = lossless;
    }
    let (from, to) = (usize::from(default & 7), usize::from(lossless));
    let both = before.bytes[from].saturating_add(before.bytes[to]);
    after.bytes[to] = both / 2;
    after.bytes[from] = both - both / 2;
    Some((before, after))
}

/// A failed step, and the result of undoing the steps before it.
#[derive(Debug, thiserror::Error)]
#[error("{about}: {}", self.in_words())]
pub struct Failed {
    pub about: String,
    pub cause: String,
    /// Steps that could not be undone, with the reason.
    pub left: Vec<String>,
}

impl Failed {
    fn in_words(&self) -> String {
        if self.left.is_empty() {
            format!("{}; the steps before it were taken back", self.cause)
        } else {
            format!("{}; not taken back: {}", self.cause, self.left.join("; "))
        }
    }
}

/// Makes the changes in order, each by `make`. After a failure, undoes the changes already made.
pub fn apply(
    steps: &[Step],
    make: &mut dyn FnMut(&Action) -> Result<(), String>,
) -> Result<(), Failed> {
    for (index, step) in steps.iter().enumerate() {
        if let Err(cause) = make(&step.action) {
            return Err(Failed {
                about: step.about.clone(),
                cause,
                left: undo(&steps[..index], make),
            });
        }
    }
    Ok(())
}

/// Undoes the changes in reverse order. Returns those that failed, with the reason.
pub fn undo(steps: &[Step], make: &mut dyn FnMut(&Action) -> Result<(), String>) -> Vec<String> {
    let mut left = Vec::new();
    for step in steps.iter().rev() {
        if let Err(cause) = make(&step.undo) {
            left.push(format!("{}: {cause}", step.about));
        }
    }
    left
}

/// Makes one change on the running machine. Does nothing for a vendor's command, which the operator
/// runs.
pub fn make(interface: &str, action: &Action) -> Result<(), String> {
    match action {
        Action::Dcb(change) => {
            dcb::apply(interface, change).map_err(|error| match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            })
        }
        Action::Pause(pause) => {
            ethtool::set_pause(interface, pause).map_err(|error| error.to_string())
        }
        Action::Vendor(_) => Ok(()),
    }
}

/// The equivalent command for an operator.
pub fn command(interface: &str, action: &Action) -> String {
    let change = match action {
        Action::Dcb(change) => change,
        Action::Pause(pause) => {
            let word = |on: bool| if on { "on" } else { "off" };
            return format!(
                "ethtool -A {interface} autoneg {} rx {} tx {}",
                word(pause.autoneg),
                word(pause.rx),
                word(pause.tx)
            );
        }
        Action::Vendor(text) => return text.clone(),
    };
    let list = |of: &dyn Fn(usize) -> Option<String>| -> String {
        let all: Vec<String> = (0..PRIORITIES)
            .filter_map(|at| Some(format!("{at}:{}", of(at)?)))
            .collect();
        all.join(" ")
    };
    match change {
        Change::Mode(DcbxMode(0)) => {
            format!("# dcb has no command that gives DCBX of {interface} back to its firmware")
        }
        Change::Mode(mode) => format!("dcb dcbx set dev {interface} {mode}"),
        Change::Ets(ets) => {
            let other = |at: usize| match ets.algorithm[at] {
                Algorithm::Ets => Some("ets".to_owned()),
                Algorithm::CreditShaper => Some("cbs".to_owned()),
                Algorithm::Other(255) => Some("vendor".to_owned()),
                Algorithm::Strict | Algorithm::Other(_) => None,
            };
            let share = |at: usize| {
                (ets.algorithm[at] == Algorithm::Ets).then(|| ets.share[at].to_string())
            };
            let class = |at: usize| (ets.class_of[at] != 0).then(|| ets.class_of[at].to_string());
            let words = [
                format!(
                    "dcb ets set dev {interface} willing {} tc-tsa all:strict",
                    on_off(ets.willing)
                ),
                list(&other),
                // dcb(8) refuses old shares that do not add up, also without an ETS class.
                format!("tc-bw all:0 {}", list(&share)),
                format!("prio-tc all:0 {}", list(&class)),
            ];
            let words: Vec<&str> = words.iter().map(|word| word.trim()).collect();
            words
                .into_iter()
                .filter(|word| !word.is_empty())
                .collect::<Vec<_>>()
                .join(" ")
        }
        Change::Pfc(pfc) => {
            let on = |at: usize| pfc.enabled.contains(at as u8).then(|| "on".to_owned());
            format!("dcb pfc set dev {interface} prio-pfc all:off {}", list(&on))
                .trim()
                .to_owned()
        }
        Change::Buffers(buffers) => format!(
            "dcb buffer set dev {interface} prio-buffer {} buffer-size {}",
            list(&|at| Some(buffers.buffer_of[at].to_string())),
            list(&|at| Some(buffers.bytes[at].to_string()))
        ),
        Change::AddApps(apps) => format!("dcb app add dev {interface} {}", entries(apps)),
        Change::DeleteApps(apps) => format!("dcb app del dev {interface} {}", entries(apps)),
        Change::Trust(order) => {
            let order: Vec<String> = order.iter().map(Selector::to_string).collect();
            format!("dcb apptrust set dev {interface} order {}", order.join(" "))
        }
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn entries(apps: &[App]) -> String {
    let entries = apps.iter().map(|app| match app.selector {
        Selector::Ethertype if app.value == 0 => format!("default-prio {}", app.priority),
        selector => format!("{selector}-prio {}:{}", app.value, app.priority),
    });
    entries.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
