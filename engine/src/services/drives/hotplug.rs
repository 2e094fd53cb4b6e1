//! Watches for local NVMe drives that are removed, returned or added.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_bdev_nvme::State;
use serde_json::json;
use tracing::{info, warn};

use super::{Drive, refusal};
use crate::services::Engine;
use crate::services::nvme::{ATTACH, address_of};
use crate::store::Record;

/// The settings of `bdev_nvme_set_hotplug`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotPlug {
    /// Attach new drives automatically. Attached drives are watched in any case.
    pub enabled: bool,
    pub period: Duration,
}

/// Longest interval between checks of an unexpected drive in the slot of a pulled one. Each check
/// resets that drive.
const LOOK_MAX: Duration = Duration::from_secs(60);

/// Slots with a drive other than the expected one, and the time of their next check. The intervals
/// grow; a newly inserted drive is checked at once.
#[derive(Default)]
struct OtherDrives(BTreeMap<String, (Instant, Duration)>);

impl OtherDrives {
    fn is_due(&self, address: &str) -> bool {
        let next = self.0.get(address).map(|(next, _)| *next);
        next.is_none_or(|next| Instant::now() >= next)
    }

    fn met(&mut self, address: &str, first: Duration) {
        let delay = self.0.get(address).map_or(first, |(_, delay)| *delay);
        let next = (Instant::now() + delay, (2 * delay).min(LOOK_MAX));
        self.0.insert(address.to_owned(), next);
    }

    fn keep_those_in(&mut self, places: &[String]) {
        self.0.retain(|address, _| places.contains(address));
    }
}

impl Default for HotPlug {
    fn default() -> Self {
        Self {
            enabled: false,
            period: Duration::from_secs(1),
        }
    }
}

/// Watches drives until the data plane ends.
pub async fn watch(engine: Rc<Engine>) {
    // New drives that could not be attached; retried after they were removed and put back.
    let mut refused: Vec<String> = Vec::new();
    // The drives of the last round: a configured drive that appears is replayed at once.
    let mut present: Vec<String> = Vec::new();
    let mut strangers = OtherDrives::default();
    loop {
        let plug = engine.drives.hot_plug.get();
        tokio::time::sleep(plug.period).await;
        if engine.plane().is_err() {
            return;
        }
        let attached = engine.drives.list();
        let waiting = waiting(&engine);
        if attached.is_empty() && waiting.is_empty() && !plug.enabled {
            continue;
        }
        let bus = engine.drives.bus();
        let Ok(ready) = tokio::task::spawn_blocking(move || bus.ready()).await else {
            continue;
        };
        strangers.keep_those_in(&ready);
        for (name, drive) in &attached {
            let is_there = ready.contains(&drive.address);
            let is_pulled = drive.controller.status().state == State::Removed;
            if !is_pulled && !is_there {
                drive.controller.removed();
            }
            let is_due = is_pulled && is_there && strangers.is_due(&drive.address);
            if is_due && !take_back(&engine, name, drive).await {
                strangers.met(&drive.address, plug.period);
            }
        }
        for (address, record) in &waiting {
            let came = ready.contains(address) && !present.contains(address);
            if came && engine.drives.at(address).is_none() {
                engine.replay(record).await;
            }
        }
        present.clone_from(&ready);
        refused.retain(|address| ready.contains(address));
        if !plug.enabled {
            continue;
        }
        for address in ready {
            let known = engine.drives.at(&address).is_some()
                || waiting.iter().any(|(wanted, _)| *wanted == address);
            if known || refused.contains(&address) {
                continue;
            }
            if let Err(why) = attach(&engine, &address).await {
                warn!(address, why, "a new drive is not attached");
                refused.push(address);
            }
        }
    }
}

/// Stored drives that are not attached, by address.
fn waiting(engine: &Engine) -> Vec<(String, Record)> {
    let waiting = engine.journal.waiting().into_iter();
    waiting
        .filter_map(|record| {
            let address = address_of(&record)?;
            Some((address, record))
        })
        .collect()
}

/// Resumes a pulled drive. True if its slot contains that same drive and it works.
async fn take_back(engine: &Rc<Engine>, name: &str, drive: &Rc<Drive>) -> bool {
    let returned = async {
        let function = engine.drives.open(engine, &drive.address).await?;
        let back = drive.controller.returned(function).await;
        back.map_err(refusal)
    };
    let (controller, address) = (name, &drive.address);
    match returned.await {
        Ok(()) => info!(controller, address, "a drive is back"),
        Err(error) => {
            warn!(controller, address, %error, "not the drive that was pulled, or not well");
            return false;
        }
    }
    true
}

/// Attaches a new drive by an RPC call, so that it is stored and keeps its name.
async fn attach(engine: &Rc<Engine>, address: &str) -> Result<(), String> {
    let name = engine.drives.free_name(engine, "HotInNvme");
    let params = json!({ "name": name, "trtype": "PCIe", "traddr": address });
    let raw = serde_json::value::to_raw_value(&params).map_err(|error| error.to_string())?;
    let attached = engine.own_call(ATTACH, Some(&raw)).await;
    attached.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a wrong drive is checked at growing intervals, and a replacement at once.
    #[test]
    fn wrong_drives_are_checked_at_growing_intervals() {
        let mut strangers = OtherDrives::default();
        let first = Duration::from_secs(20);
        assert!(strangers.is_due("a"));
        strangers.met("a", first);
        assert!(!strangers.is_due("a") && strangers.is_due("b"));
        strangers.met("a", first);
        strangers.met("a", first);
        assert_eq!(strangers.0["a"].1, LOOK_MAX);
        strangers.keep_those_in(&["a".to_owned()]);
        assert!(!strangers.is_due("a"));
        strangers.keep_those_in(&[]);
        assert!(strangers.is_due("a"));
    }
}
