//! The node's part in a rebuild of the cluster's store: its copy of the keys, and its report.
//!
//! ```text
//!   keys change ─▶ keep_copy ─▶ cluster-copy.json       while the node has a lease
//!   etcd has no cluster and a rebuild runs: copy, labels of all local devices ─▶ found/N
//! ```

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_bdev::registry::{Holder, Listed, Usage};
use nacre_bdev_replica::format::{
    BLOCK, Label, LabelCopy, LabelError, LabelState, label_offset, newest,
};
use nacre_cluster_node::rebuild::{
    Device, Found, LabelFacts, LabelRead, LabelReplicaFacts, ReplicaFact,
};
use nacre_cluster_node::{Description, Error, NodeState};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{info, warn};
use uuid::Uuid;

use super::copy::{self, FILE};
use super::{Running, describe, joined, seconds};
use crate::plane::Plane;
use crate::services::Engine;
use crate::services::backup::device::{ClaimedDevice, Range};
use crate::services::pools;
use crate::services::volumes::is_local;
use crate::values::files;

/// Time without further changes before a copy is written, so that a copy has all keys of one
/// action.
const QUIET: Duration = Duration::from_millis(100);
/// Longest wait for the end of changes, and shortest time between two copies.
const LATEST: Duration = Duration::from_secs(1);
/// The wait after a copy is at least this many times as long as writing it took.
const SHARE: u32 = 10;
/// Pause after a failed copy, and interval of the checks for a rebuild.
const LOOK: Duration = Duration::from_millis(500);
/// Interval of reports to a rebuild: devices may appear later.
const AGAIN: Duration = Duration::from_secs(2);
/// Time limit for the labels of all devices.
const LABELS: Duration = Duration::from_secs(5);
/// Most devices that are read at the same time; two blocks of each are read.
const AT_ONCE: usize = 256;
/// `product_name` of the bdevs of volumes. They are not searched for labels: hosts wrote their
/// contents.
const VOLUME: &str = "Replicated volume";

/// Writes the copy after changes of the cluster's keys. Runs until the daemon ends.
pub(super) async fn keep_copy(engine: Rc<Engine>, running: Rc<Running>) {
    let Some(dir) = engine.journal.store_path().map(Path::to_owned) else {
        return;
    };
    let is_ending = || running.is_ending.get() || engine.plane().is_err();
    loop {
        running.operator.copy_news().await;
        let latest = Instant::now() + LATEST;
        loop {
            let end = latest.min(Instant::now() + QUIET);
            let news = timeout_at(end, running.operator.copy_news()).await;
            if news.is_err() || end == latest {
                break;
            }
        }
        let begun = Instant::now();
        while !is_ending() {
            match write_copy(&dir, &running).await {
                Ok(true) => {
                    running.not_copied.clear(&());
                    break;
                }
                Ok(false) => {}
                Err(error) => {
                    let said = format!("{error:#}");
                    if running.not_copied.is_new(&(), &said) {
                        warn!("no copy of the cluster's keys; it is tried again: {said}");
                    }
                }
            }
            sleep(LOOK).await;
        }
        if is_ending() {
            return;
        }
        sleep(LATEST.max(begun.elapsed() * SHARE)).await;
    }
}

/// Writes the present keys. Returns false, and leaves the file unchanged, if the node has no lease
/// or has not read all keys.
async fn write_copy(dir: &Path, running: &Running) -> anyhow::Result<bool> {
    let Some(cluster) = running.cluster() else {
        return Ok(false);
    };
    let Some(copy) = running.operator.copy(cluster, seconds()).await? else {
        return Ok(false);
    };
    let file = dir.join(FILE);
    let write = move || files::replace_private(&file, &copy.encode());
    tokio::task::spawn_blocking(write).await??;
    Ok(true)
}

/// Reports to a rebuild of the store while etcd has no cluster. Runs until the daemon ends.
pub(super) async fn report(engine: Rc<Engine>, running: Rc<Running>) {
    // The last report, and the run that it was sent to.
    let mut sent: Option<(Uuid, Found)> = None;
    let mut described: Option<Description> = None;
    let mut wait = LOOK;
    loop {
        sleep(wait).await;
        wait = LOOK;
        if running.is_ending.get() || engine.plane().is_err() {
            return;
        }
        if !has_no_cluster(&running) {
            sent = None;
            continue;
        }
        // An error is the obstacle that the node's state shows, or passes.
        let Ok(Some(request)) = running.operator.rebuild_request().await else {
            sent = None;
            continue;
        };
        let description = described.get_or_insert_with(|| describe(&engine, running.me));
        // Labels are read again at times only.
        wait = AGAIN;
        let failed = |said: String| {
            if running.not_reported.is_new(&(), &said) {
                warn!("no report to the rebuild of the cluster's store; it is tried again: {said}");
            }
        };
        let found = match found(&engine, &running, description).await {
            Ok(found) => found,
            Err(error) => {
                failed(format!("{error:#}"));
                continue;
            }
        };
        let former = sent.as_ref();
        if former.is_some_and(|(run, sent)| *run == request.run && *sent == found) {
            continue;
        }
        match running.operator.report_found(request, &found).await {
            Ok(true) => {
                let devices = found.devices.len();
                info!(run = %request.run, devices, "reported to the rebuild of the cluster's store");
                running.not_reported.clear(&());
                sent = Some((request.run, found));
            }
            Ok(false) => {}
            Err(error) => failed(error.to_string()),
        }
    }
}

/// True if the node serves nothing because etcd has no cluster.
fn has_no_cluster(running: &Running) -> bool {
    let node = running.node.borrow();
    let Some(node) = node.as_ref() else {
        return false;
    };
    let why = match node.state() {
        NodeState::Joining { obstacle } => obstacle,
        NodeState::Out { why } => Some(why),
        NodeState::In { .. } | NodeState::Left => None,
    };
    matches!(
        why,
        Some(Error::NoCluster { .. } | Error::LostCluster { .. })
    )
}

async fn found(
    engine: &Rc<Engine>,
    running: &Running,
    description: &Description,
) -> anyhow::Result<Found> {
    let dir = engine.journal.store_path().context("no data directory")?;
    let name = engine.settings.cluster.name.clone().unwrap_or_default();
    let (file, dir) = (dir.join(FILE), dir.to_owned());
    let read = move || anyhow::Ok((joined::read(&dir, &name)?, copy::read(&file)));
    let (joined, copy) = tokio::task::spawn_blocking(read).await??;
    let devices = labels(engine).await?;
    let description = description.clone();
    Ok(Found::new(running.me, description, joined, copy, devices))
}

/// The local devices with readable or damaged labels.
async fn labels(engine: &Rc<Engine>) -> anyhow::Result<Vec<Device>> {
    let plane = engine.plane().map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut listed = plane.bdevs.list();
    listed.retain(|one| may_be_replica(&plane, one));
    let names = listed.iter().map(|one| one.layer.name().to_owned());
    let read = async |name: String| label(engine, &plane, &name).await;
    let read = side_by_side(names.collect(), LABELS, read).await;
    let device = |(listed, read): (Listed, Result<Option<Label>, String>)| {
        let label = match read {
            Ok(None) => return None,
            Ok(Some(label)) => LabelRead::Label(facts(label)),
            Err(why) => LabelRead::Unreadable(why),
        };
        let mut aliases = listed.aliases.clone();
        aliases.push(listed.layer.uuid().to_string());
        Some(Device {
            name: listed.layer.name().to_owned(),
            aliases,
            label,
        })
    };
    Ok(listed.into_iter().zip(read).filter_map(device).collect())
}

/// Reads up to [`AT_ONCE`] devices at a time; the results are in the order of `names`. A device
/// without a result after `limit` gets an error.
async fn side_by_side<T>(
    names: Vec<String>,
    limit: Duration,
    read: impl AsyncFn(String) -> Result<T, String>,
) -> Vec<Result<T, String>> {
    let end = Instant::now() + limit;
    let places = Semaphore::new(AT_ONCE);
    let (places, read) = (&places, &read);
    let each = names.into_iter().map(|name| async move {
        let read = async {
            let _place = places.acquire().await;
            read(name).await
        };
        let read = timeout_at(end, read).await;
        read.unwrap_or_else(|_| Err(format!("no answer within {limit:?}")))
    });
    join_all(each).await
}

/// True for a bdev of this machine that can be a replica's device. False for bdevs of volumes,
/// read-only bdevs, and bdevs that another bdev or an exclusive user has claimed.
fn may_be_replica(plane: &Plane, listed: &Listed) -> bool {
    let layer = &listed.layer;
    let is_in_use =
        |(holder, usage): &(Holder, Usage)| *usage != Usage::Shared || !holder.bdevs().is_empty();
    let geometry = layer.geometry();
    is_local(&plane.bdevs, layer)
        && layer.product_name() != VOLUME
        && !layer.limits().read_only
        && !listed.claims.iter().any(is_in_use)
        && geometry.block_size as usize <= BLOCK
        && geometry.bytes() >= nacre_bdev_replica::model::RESERVED
}

/// The newer of the two labels of a device. `None`: the device has no label.
pub(super) async fn label(
    engine: &Rc<Engine>,
    plane: &Plane,
    name: &str,
) -> Result<Option<Label>, String> {
    let holder = Holder::User("a rebuild of the cluster's store".to_owned());
    let claim = plane.bdevs.claim(name, holder, Usage::Shared);
    let claim = claim.map_err(|error| error.to_string())?;
    let reactor = pools::least_loaded(engine, plane);
    let device = ClaimedDevice::new(claim, reactor.ok_or("there is no reactor")?);
    let places = [LabelCopy::A, LabelCopy::B].into_iter().enumerate();
    let ranges = places.map(|(at, place)| Range {
        offset: label_offset(place),
        at: at * BLOCK,
        bytes: BLOCK,
    });
    let read = device.read(ranges.collect(), vec![0; 2 * BLOCK]).await;
    let data = read.map_err(|status| format!("{status:?}"))?;
    let (a, b) = data.split_at(BLOCK);
    match newest(a, b) {
        Ok((label, _)) => Ok(Some(label)),
        Err(LabelError::NotALabel | LabelError::Foreign) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn facts(label: Label) -> LabelFacts {
    let replicas = label.replicas.iter().map(|one| LabelReplicaFacts {
        id: one.id,
        slot: one.slot,
        state: match one.state {
            LabelState::InSync => ReplicaFact::InSync,
            LabelState::Out => ReplicaFact::Out,
            LabelState::Filling => ReplicaFact::Filling,
        },
    });
    LabelFacts {
        replicas: replicas.collect(),
        volume: label.volume,
        name: label.name,
        replica: label.replica,
        epoch: label.stamp.epoch,
        revision: label.stamp.revision,
        sequence: label.sequence,
        block_size: label.block_size,
        blocks: label.blocks,
        region_shift: label.region_shift,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: devices that hang cost one time limit together, and hide no other device. Method: many
    /// never answer, in front of some that answer.
    #[tokio::test]
    async fn devices_that_hang_share_a_deadline() {
        let names = (0..AT_ONCE + 8).map(|at| at.to_string());
        let (hang, limit) = (AT_ONCE - 1, Duration::from_millis(300));
        let begun = Instant::now();
        let read = side_by_side(names.collect(), limit, async |name: String| {
            let at: usize = name.parse().expect("a number");
            if at < hang {
                std::future::pending::<()>().await;
            }
            Ok(at)
        });
        let read = read.await;
        assert!(begun.elapsed() < limit * 100, "{:?}", begun.elapsed());
        let (hung, answered) = read.split_at(hang);
        let late = Err("no answer within 300ms".to_owned());
        assert!(hung.iter().all(|one| *one == late), "{hung:?}");
        let expected: Vec<_> = (hang..AT_ONCE + 8).map(Ok).collect();
        assert_eq!(answered, expected);
    }
}
