//! Drives that are pulled, put back or new.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_nvme::State;
use serde_json::json;
use tracing::{info, warn};

use super::{Drive, refusal};
use crate::engine::Engine;
use crate::store::Record;

/// What `bdev_nvme_set_hotplug` set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotPlug {
    /// Whether new drives are attached by themselves. Those that are attached are watched in any case.
    pub enabled: bool,
    pub period: Duration,
}

impl Default for HotPlug {
    fn default() -> HotPlug {
        HotPlug {
            enabled: false,
            period: Duration::from_secs(1),
        }
    }
}

/// Looks after drives for as long as the data plane lives. Nothing is looked at while there is none.
pub async fn watch(engine: Rc<Engine>) {
    // New drives that could not be attached: tried again when they were away in between.
    let mut refused: Vec<String> = Vec::new();
    // Those that were there when it was last looked: what is configured for one that comes is tried at once.
    let mut present: Vec<String> = Vec::new();
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
        for (name, drive) in &attached {
            look_at(&engine, name, drive, &ready).await;
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

/// What is configured and not attached, by address.
fn waiting(on: &Engine) -> Vec<(String, Record)> {
    let waiting = on.journal.waiting().into_iter();
    waiting
        .filter_map(|record| {
            let address = crate::methods::bdev::nvme::address_of(&record)?;
            Some((address, record))
        })
        .collect()
}

async fn look_at(on: &Rc<Engine>, name: &str, drive: &Rc<Drive>, ready: &[String]) {
    let is_there = ready.contains(&drive.address);
    let away = drive.controller.status().state == State::Removed;
    if !is_there && !away {
        drive.controller.removed();
    }
    if !(is_there && away) {
        return;
    }
    let returned = async {
        let function = on.drives.open(on, &drive.address).await?;
        let back = drive.controller.returned(function).await;
        back.map_err(refusal)
    };
    match returned.await {
        Ok(()) => info!(
            controller = name,
            address = drive.address,
            "a drive is back"
        ),
        Err(error) => {
            warn!(controller = name, address = drive.address, %error, "not the drive that was pulled, or not well")
        }
    }
}

/// As the call would, so that it is attached under the same name after a restart.
async fn attach(on: &Rc<Engine>, address: &str) -> Result<(), String> {
    let mut names = (0..).map(|n| format!("HotInNvme{n}"));
    let is_free = |name: &String| {
        on.drives.find(name).is_none()
            && on.remotes.find(name).is_none()
            && on
                .journal
                .find(&crate::methods::bdev::nvme::key(name))
                .is_none()
    };
    let name = names.find(is_free).expect("names do not end");
    let params = json!({ "name": name, "trtype": "PCIe", "traddr": address });
    let raw = serde_json::value::to_raw_value(&params).map_err(|error| error.to_string())?;
    let attached = on.own_call("bdev_nvme_attach_controller", Some(&raw)).await;
    attached.map(drop).map_err(|error| error.to_string())
}
