//! Events of volumes, and of the devices of their replicas.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::{
    Command, Observer, ReplicaStatus, ResyncKind, VolumeError, VolumeEvent, VolumeEventKind,
};
use nacre_bdev_replica::model::{RESERVED, ReplicaState};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use crate::notify::{Severity, severity};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::is_claimed;
use crate::values::size;

/// Most events that wait for the management thread.
const WAITING: usize = 1024;

/// Receives the events of volumes on reactors, and queues them for the management thread.
pub(super) struct EventSender {
    events: mpsc::Sender<VolumeEvent>,
    lost: Arc<AtomicU64>,
}

pub(super) struct EventReceiver {
    events: mpsc::Receiver<VolumeEvent>,
    lost: Arc<AtomicU64>,
}

impl EventSender {
    pub(super) fn new() -> (Self, EventReceiver) {
        let (sender, events) = mpsc::channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let receiver = EventReceiver {
            events,
            lost: Arc::clone(&lost),
        };
        (
            Self {
                events: sender,
                lost,
            },
            receiver,
        )
    }
}

impl Observer for EventSender {
    fn event(&self, event: VolumeEvent) {
        // Reactors never wait.
        if self.events.try_send(event).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

pub(super) async fn follow(engine: Rc<Engine>, mut receiver: EventReceiver) {
    while let Some(event) = receiver.events.recv().await {
        let lost = receiver.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            warn!(
                lost,
                "events of volumes were lost: there were too many at once"
            );
        }
        act(&engine, &event);
        report(&engine, &event);
    }
}

/// Acts on an event, beyond reporting it.
fn act(engine: &Engine, event: &VolumeEvent) {
    let Ok(plane) = engine.plane() else { return };
    match &event.what {
        // Notify hosts of the new size.
        VolumeEventKind::Grown { .. } => {
            let listed = engine.volumes.find(&event.volume.to_string());
            if let Some(bdev) = listed.ok().and_then(|l| l.bdev().map(str::to_owned))
                && let Err(error) = plane.bdevs.notify_resize(&bdev)
            {
                debug!(%error, "grown, and gone meanwhile");
            }
        }
        // Idle queues must read the new view and release the replica's device.
        VolumeEventKind::ReplicaOut { .. }
        | VolumeEventKind::ReplicaRemoved { .. }
        | VolumeEventKind::ResyncStopped { .. } => poll_queues(&plane),
        _ => {}
    }
}

/// Makes every reactor poll its queues.
pub fn poll_queues(plane: &crate::plane::Plane) {
    plane.target.groups().iter().for_each(|group| group.wake());
}

/// Handles a bdev that appeared, changed or is being removed. Volumes with a replica on the bdev
/// check it. The daemon tries volumes that are not open again.
pub fn device_changed(engine: &Rc<Engine>, device: &str) {
    engine.volumes.again.notify_waiters();
    // The replicas of a cluster's volumes are named by the UUIDs of their namespaces.
    let layer = engine
        .plane()
        .ok()
        .and_then(|plane| plane.bdevs.lookup(device));
    let uuid = layer.map(|layer| layer.uuid().to_string());
    let names = [Some(device.to_owned()), uuid];
    let found = names.into_iter().flatten().find_map(|name| {
        let opened = engine.volumes.with_replica(&name)?;
        Some((opened, name))
    });
    let Some((opened, device)) = found else {
        return;
    };
    let engine = Rc::clone(engine);
    tokio::task::spawn_local(async move {
        let changed = Command::DevicesChanged { device };
        if let Err(error) = opened.handle.run(changed).await {
            debug!(volume = opened.bdev, %error, "a device changed, and was not looked at");
        }
        if let Ok(plane) = engine.plane() {
            poll_queues(&plane);
        }
    });
}

/// Time limit for volumes to record the change of a bdev.
const RECORDED: Duration = Duration::from_secs(10);

/// Makes volumes with a replica on the bdev, or on one stacked on it, check it. Waits until the
/// results are durable.
pub async fn recheck_device(engine: &Engine, device: &str) -> Result<(), RpcError> {
    for device in engine.plane()?.bdevs.stacked_on(device).or_refuse()? {
        let Some(opened) = engine.volumes.with_replica(&device) else {
            continue;
        };
        let looked = opened.handle.run(Command::DevicesChanged {
            device: device.clone(),
        });
        match tokio::time::timeout(RECORDED, looked).await {
            Ok(Ok(()) | Err(VolumeError::Closed { .. })) => {}
            Ok(Err(refused)) => return Err(refused.refusal()),
            Err(_) => {
                let cause = format!(
                    "volume \"{}\" cannot record within {RECORDED:?} what became of its replica on \"{device}\"",
                    opened.bdev
                );
                return Err(RpcError::errno(Errno::ETIMEDOUT, cause)
                    .field("name")
                    .remedy("see volume_get: its store may be full or away"));
            }
        }
    }
    Ok(())
}

/// Refuses to shrink a bdev to `bytes` if a volume would lose its last copy of the data beyond.
pub fn check_other_copies(engine: &Engine, device: &str, bytes: u64) -> Result<(), RpcError> {
    let bdevs = &engine.plane()?.bdevs;
    let devices = bdevs.stacked_on(device).or_refuse()?;
    for volume in engine.volumes.list() {
        let Some(status) = volume.status() else {
            continue;
        };
        let needed = RESERVED + status.blocks * u64::from(status.block_size);
        let in_sync = |m: &&ReplicaStatus| m.state == ReplicaState::InSync;
        let Some(replica) = status
            .replicas
            .iter()
            .filter(in_sync)
            .find(|m| devices.contains(&m.device))
        else {
            continue;
        };
        let whole =
            |m: &&ReplicaStatus| is_claimed(bdevs, m) && m.resync.is_none() && m.id != replica.id;
        let others = status.replicas.iter().filter(in_sync).any(|m| whole(&m));
        if bytes < needed && !others {
            let cause = format!(
                "\"{}\" has the last good replica of volume \"{}\", which needs {needed} bytes of it: data past \
                 {bytes} would be lost for good, and nothing was changed",
                replica.device, status.name
            );
            return Err(RpcError::errno(Errno::EPERM, cause)
                .field("size")
                .remedy("bring another replica in sync first, or delete the volume"));
        }
    }
    Ok(())
}

fn report(engine: &Engine, event: &VolumeEvent) {
    let volume = &event.name;
    let Report { kind, device, text } = words(event);
    let ctx = match device {
        Some(device) => format!("{volume}/{device}"),
        None => volume.clone(),
    };
    let mut facts = serde_json::to_value(event).unwrap_or(Value::Null);
    if let Value::Object(facts) = &mut facts {
        facts.remove("event");
        facts.remove("name");
        facts.insert("volume_name".into(), json!(volume));
    }
    let text = format!("volume \"{volume}\": {text}");
    match severity(kind) {
        Severity::Info => info!("{text}"),
        Severity::Warning | Severity::Error => warn!("{text}"),
    }
    engine.notes.report(kind, ctx, text, facts);
    // A verification that found differences is a warning.
    if let VolumeEventKind::VerifyEnded {
        different_blocks, ..
    } = &event.what
        && *different_blocks > 0
    {
        let text =
            format!("volume \"{volume}\": {different_blocks} blocks differ between replicas");
        engine.notes.report(
            "volume_differences",
            volume.clone(),
            text,
            json!({ "different_blocks": different_blocks }),
        );
    }
}

struct Report<'a> {
    kind: &'static str,
    device: Option<&'a str>,
    text: String,
}

fn words(event: &VolumeEvent) -> Report<'_> {
    let of = |kind, text: String| Report {
        kind,
        device: None,
        text,
    };
    let at = |kind, device, text: String| Report {
        kind,
        device: Some(device),
        text,
    };
    let how = |kind: &ResyncKind| match kind {
        ResyncKind::Partial => "missed writes",
        ResyncKind::Full => "everything",
        ResyncKind::Reconcile => "writes in flight at the stop",
    };
    match &event.what {
        VolumeEventKind::Opened {
            epoch,
            degraded,
            clean,
        } => {
            let degraded = if *degraded { ", degraded" } else { "" };
            let clean = if *clean {
                ""
            } else {
                ", after an unclean stop"
            };
            of(
                "volume_open",
                format!("open in epoch {epoch}{degraded}{clean}"),
            )
        }
        VolumeEventKind::Closed => of("volume_close", "closed".into()),
        VolumeEventKind::ReplicaOut { device, why, .. } => at(
            "replica_out",
            device,
            format!("the replica on \"{device}\" is out of sync: {why}"),
        ),
        VolumeEventKind::ResyncStarted {
            device,
            kind,
            bytes,
            ..
        } => at(
            "replica_resync_start",
            device,
            format!(
                "the replica on \"{device}\" gets {}: {}",
                how(kind),
                size::bytes(*bytes)
            ),
        ),
        VolumeEventKind::ResyncEnded { device, bytes, .. } => at(
            "replica_resync_end",
            device,
            format!(
                "the replica on \"{device}\" is in sync: {} were copied",
                size::bytes(*bytes)
            ),
        ),
        VolumeEventKind::ResyncStopped { device, why, .. } => at(
            "replica_resync_stop",
            device,
            format!("the resync of the replica on \"{device}\" stopped: {why}"),
        ),
        VolumeEventKind::SourceChanged { from, to } => of(
            "replica_source_change",
            format!("the resync has replica {to} as its source instead of {from}"),
        ),
        VolumeEventKind::ReplicaAdded { device, .. } => at(
            "replica_add",
            device,
            format!("there is a new replica on \"{device}\""),
        ),
        VolumeEventKind::ReplicaRemoved { device, .. } => at(
            "replica_remove",
            device,
            format!("there is no replica on \"{device}\" any more"),
        ),
        VolumeEventKind::ReadRepaired {
            replica,
            lba,
            blocks,
        } => of(
            "replica_read_repair",
            format!(
                "{blocks} blocks at {lba} of replica {replica} were rewritten: it could not read them"
            ),
        ),
        VolumeEventKind::Salvaged {
            replica,
            from,
            lba,
            blocks,
        } => of(
            "replica_salvage",
            format!(
                "{blocks} blocks at {lba} of replica {replica}, which the others are made equal to, cannot be read: what replica {from} has there counts"
            ),
        ),
        VolumeEventKind::Frozen { why } => {
            of("volume_frozen", format!("frozen: {why}; hosts wait"))
        }
        VolumeEventKind::Thawed => of("volume_thaw", "serves again".into()),
        VolumeEventKind::Fenced { why } => {
            of("volume_fenced", format!("another holder has it: {why}"))
        }
        VolumeEventKind::StoreLost { why } => of(
            "volume_store_lost",
            format!("the volume store cannot be reached, nothing is acknowledged: {why}"),
        ),
        VolumeEventKind::StoreBack => of("volume_store_back", "the volume store is back".into()),
        VolumeEventKind::VerifyStarted { repair } => of(
            "volume_verify_start",
            match repair {
                true => "replicas are compared, and differences repaired".into(),
                false => "replicas are compared".into(),
            },
        ),
        VolumeEventKind::VerifyEnded {
            compared_bytes,
            different_blocks,
            repaired_blocks,
        } => of(
            "volume_verify_end",
            format!(
                "{} compared, {different_blocks} blocks differed, {repaired_blocks} were repaired",
                size::bytes(*compared_bytes)
            ),
        ),
        VolumeEventKind::Grown { blocks } => {
            of("volume_grow", format!("it has {blocks} blocks now"))
        }
    }
}
