//! The disks of pools: a further one joins, and an import finds all of them.
//!
//! The superblock of a device names its pool and its disk, so an import finds the disks under any
//! bdev names. The journal keeps the last names, for the error about a missing disk.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Claim, Holder, Layer, Registry};
use nacre_bdev_pool::{Command, ImportError, Label, PoolError, identify};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::warn;
use uuid::Uuid;

use super::{Late, OpenPool, external, key, lasting_name, least_loaded, store_import};
use crate::plane::{Plane, pool_here};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Time limit for reading the superblocks of a device.
const LABEL: Duration = Duration::from_secs(5);
/// Most devices whose superblocks are read at the same time.
const LABEL_READS: usize = 32;

/// A disk of a pool as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KnownDisk {
    /// The disk's id in its pool.
    #[schemars(with = "String")]
    pub uuid: Uuid,
    /// The name of its device.
    pub name: String,
    /// The serial number of its device, if that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// Adds a device to an open pool. `force`: overwrites foreign contents.
pub async fn add_disk(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    disk: &str,
    force: bool,
) -> Result<(), RpcError> {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let plane = engine.plane()?;
    let layer = plane.bdevs.lookup(disk).ok_or_else(|| {
        RpcError::errno(
            Errno::ENODEV,
            format!("there is no block device \"{disk}\""),
        )
        .field("disk")
        .remedy("nacre bdev list shows the devices")
    })?;
    let name = layer.name().to_owned();
    if pool.handle.bases().contains(&name) {
        // A call that is repeated after its answer was lost.
        return store_import(engine, pool).await;
    }
    let id = pool.handle.id();
    let addition = external::Addition::begin(engine, id, &name);
    if external::is_on_pool(engine, &plane, &layer, id) {
        let cause = format!("\"{name}\" is a volume of the pool itself, or depends on one");
        return Err(RpcError::errno(Errno::EINVAL, cause).field("disk"));
    }
    refuse_open(engine, &plane, layer).await?;
    let holder = Holder::User(format!("pool {id}"));
    let claim = plane.bdevs.claim(&name, holder, Usage::Exclusive);
    let claim = claim.map_err(|error| error.refusal().field("disk"))?;
    let joining = join(Rc::clone(engine), Rc::clone(pool), addition, claim, force);
    let joining = tokio::task::spawn_local(joining);
    let joined = pools.in_time(Late::AddDisk, joining).await?;
    joined.map_err(|error| RpcError::internal(error.to_string()))?
}

/// Adds a claimed device. Goes on if the caller stops waiting.
async fn join(
    engine: Rc<Engine>,
    pool: Rc<OpenPool>,
    _addition: external::Addition,
    claim: Claim,
    force: bool,
) -> Result<(), RpcError> {
    let layer = Arc::clone(claim.layer());
    let name = layer.name().to_owned();
    let joined = pool.handle.add_disk(claim, force).await;
    if layer.is_gone() {
        // It was removed before the pool had it.
        super::disk_gone(&engine, &name);
    }
    let id = pool.handle.id();
    if let Err(error) = &joined {
        warn!(pool = pool.name(), disk = name, %error, "a disk did not join");
    }
    joined.or_refuse()?;
    let text = format!("pool \"{}\" has {name} as a further disk", pool.name());
    let facts = serde_json::json!({ "id": id, "disk": name });
    engine
        .notes
        .report("pool_add_disk", pool.name(), text, facts);
    if engine.journal.find(&key(id)).is_none() {
        // The pool was exported meanwhile.
        return Ok(());
    }
    // The superblocks have it; the journal has its name for the case that it is missing.
    store_import(&engine, &pool).await
}

/// Refuses a device with the superblock of a disk that is in use here: `force` would overwrite that
/// pool.
pub(super) async fn refuse_open(
    engine: &Rc<Engine>,
    plane: &Plane,
    layer: Arc<Layer>,
) -> Result<(), RpcError> {
    let name = layer.name().to_owned();
    let Some(label) = read_label(engine, plane, layer).await else {
        return Ok(());
    };
    let open = engine.devices.pools.list().into_iter().find(|pool| {
        let status = pool.handle.status();
        let mut disks = status.disks.iter();
        status.id == label.pool && disks.any(|disk| disk.id == label.disk)
    });
    let Some(pool) = open else { return Ok(()) };
    let cause = format!(
        "\"{name}\" is a disk of the open pool \"{}\", or a copy of one",
        pool.name()
    );
    Err(RpcError::errno(Errno::EBUSY, cause)
        .field("disk")
        .remedy("name another device; wipe the disk if it is a copy"))
}

/// The devices that an import claims.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ImportDisks {
    pub names: Vec<String>,
    /// Disks that have left the pool and were not erased. They are claimed if possible, to be
    /// erased.
    pub leftovers: Vec<String>,
}

impl ImportDisks {
    pub(super) fn one(name: &str) -> Self {
        Self {
            names: vec![name.to_owned()],
            leftovers: Vec::new(),
        }
    }

    /// Claims all devices exclusively, except for leftovers that are in use.
    pub(super) fn claim(&self, bdevs: &Registry, holder: &Holder) -> Result<Vec<Claim>, RpcError> {
        let claim = |name: &String| bdevs.claim(name, holder.clone(), Usage::Exclusive);
        let of_pool = self.names.iter().map(claim);
        let of_pool = of_pool.map(|claim| claim.map_err(|error| error.refusal().field("disk")));
        let mut claims = of_pool.collect::<Result<Vec<Claim>, RpcError>>()?;
        for name in &self.leftovers {
            match claim(name) {
                Ok(claim) => claims.push(claim),
                Err(error) => {
                    warn!(disk = name, %error, "a disk that has left its pool is not erased")
                }
            }
        }
        Ok(claims)
    }
}

/// Finds the devices of the pool that is on `disk`: under the last names of its disks, and among
/// unclaimed writable devices.
pub(super) async fn find(
    engine: &Rc<Engine>,
    disk: &str,
    id: Option<Uuid>,
    known: &[KnownDisk],
) -> Result<ImportDisks, RpcError> {
    let plane = engine.plane()?;
    let lookup = |name: &str| plane.bdevs.lookup(name);
    let present = known.iter().filter_map(|known| lookup(&known.name));
    // The disk that the import names may be the one that is away.
    let Some(first) = lookup(disk).or_else(|| present.clone().next()) else {
        return Ok(ImportDisks::one(disk));
    };
    let label = read_label(engine, &plane, Arc::clone(&first)).await;
    let of_one = label.as_ref().is_none_or(|label| label.disks.len() < 2);
    let pool = id.or_else(|| label.as_ref().map(|label| label.pool));
    let Some(pool) = pool.filter(|_| !of_one || known.len() > 1) else {
        return Ok(ImportDisks::one(first.name()));
    };
    let listed = plane.bdevs.list();
    let free = listed.iter().filter(|listed| listed.claims.is_empty());
    let writable = free.filter(|listed| !listed.layer.limits().read_only);
    let others = present.chain(writable.map(|listed| Arc::clone(&listed.layer)));
    let mut new: Vec<Arc<Layer>> = Vec::new();
    for other in others {
        let is_known = |known: &Arc<Layer>| known.name() == other.name();
        if !is_known(&first) && !new.iter().any(is_known) {
            new.push(other);
        }
    }
    // All are read, as one may be a copy of another: the import refuses both.
    let reads = futures_util::stream::iter(new).map(|device| async {
        let name = device.name().to_owned();
        Some((name, read_label(engine, &plane, device).await?))
    });
    let read: Vec<_> = reads.buffered(LABEL_READS).collect().await;
    let label = label.map(|label| (first.name().to_owned(), label));
    let mut labels: Vec<(String, Label)> = label.into_iter().collect();
    labels.extend(read.into_iter().flatten());
    let mut devices = disks_among(labels, pool);
    if devices.names.is_empty() {
        return Ok(ImportDisks::one(first.name()));
    }
    let is_writable = |layer: Arc<Layer>| !layer.limits().read_only;
    devices
        .leftovers
        .retain(|name| lookup(name).is_some_and(is_writable));
    Ok(devices)
}

/// Selects the devices of the disks that the pool's first disk lists; disks that were leaving are
/// leftovers. Without the first disk, selects all devices of the pool, and the import reports the
/// missing one.
fn disks_among(mut labels: Vec<(String, Label)>, pool: Uuid) -> ImportDisks {
    labels.retain(|(_, label)| label.pool == pool);
    let roots = labels.iter().map(|(_, label)| label);
    let roots = roots.filter(|label| label.disks.first() == Some(&label.disk));
    let root = roots.max_by_key(|label| label.sequence);
    let disks = root.map(|root| root.disks.clone());
    let is_in = |label: &Label| {
        let disks = disks.as_ref();
        disks.is_none_or(|disks| disks.contains(&label.disk))
    };
    let (ours, others): (Vec<_>, Vec<_>) = labels.into_iter().partition(|(_, of)| is_in(of));
    let left = others.into_iter().filter(|(_, label)| label.is_leaving);
    ImportDisks {
        names: ours.into_iter().map(|(name, _)| name).collect(),
        leftovers: left.map(|(name, _)| name).collect(),
    }
}

/// Reads the superblocks of a device. `None` if it has none, fails, or takes longer than [`LABEL`].
async fn read_label(engine: &Rc<Engine>, plane: &Plane, layer: Arc<Layer>) -> Option<Label> {
    let reactor = least_loaded(engine, plane)?;
    let reading = reactor.run_future(move |core| async move {
        let memory = pool_here()?;
        identify(&core, memory, &layer).await.ok().flatten()
    });
    tokio::time::timeout(LABEL, reading).await.ok()?.ok()?
}

/// The disks of a pool as the journal has them.
pub(super) fn known(engine: &Engine, id: Uuid) -> Vec<KnownDisk> {
    let record = engine.journal.find(&key(id));
    let known = record.and_then(|record| record.record.params.get("known_disks").cloned());
    let known = known.and_then(|known| serde_json::from_value(known).ok());
    known.unwrap_or_default()
}

/// The parameters of the journal's import call. Only a pool of several disks has `known_disks`.
pub(super) fn import_params(engine: &Engine, plane: &Plane, pool: &OpenPool) -> Value {
    let status = pool.handle.status();
    let mut params = serde_json::json!({
        "disk": lasting_name(engine, plane, &status.disk),
        "uuid": status.id,
    });
    if status.disks.len() > 1 {
        let disks = status.disks.iter().map(|disk| KnownDisk {
            uuid: disk.id,
            name: lasting_name(engine, plane, &disk.name),
            serial: plane.bdevs.lookup(&disk.name).and_then(serial),
        });
        let disks: Vec<KnownDisk> = disks.collect();
        params["known_disks"] = serde_json::json!(disks);
    }
    params
}

/// The serial number of a device's drive.
fn serial(layer: Arc<Layer>) -> Option<String> {
    find_serial(&layer.driver_specific())
}

fn find_serial(facts: &Value) -> Option<String> {
    let here = |name: &str| facts.get(name).and_then(Value::as_str);
    if let Some(serial) = here("serial_number").or_else(|| here("serial")) {
        return Some(serial.trim().to_owned());
    }
    match facts {
        Value::Object(fields) => fields.values().find_map(find_serial),
        Value::Array(items) => items.iter().find_map(find_serial),
        _ => None,
    }
}

/// Replaces the error about a missing disk by one with the last name and serial number of its
/// device.
pub(super) fn name_missing(error: PoolError, known: &[KnownDisk]) -> PoolError {
    let PoolError::Import(ImportError::DiskMissing { disk, number, of }) = error else {
        return error;
    };
    let last = known.iter().find(|known| known.uuid == disk);
    let Some(KnownDisk { name, serial, .. }) = last else {
        return ImportError::DiskMissing { disk, number, of }.into();
    };
    let serial = serial.as_ref().map(|serial| format!(", serial {serial}"));
    let last = format!("\"{name}\"{}", serial.unwrap_or_default());
    PoolError::DiskAway {
        disk,
        number,
        of,
        last,
    }
}

/// Extends a pool to the present sizes of all of its disks.
pub async fn grow(pool: &OpenPool) -> Result<(), RpcError> {
    loop {
        let before = pool.handle.status().total_bytes;
        pool.run(Command::Grow).await?;
        if pool.handle.status().total_bytes == before {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(pool: u128, disk: u128, sequence: u64, disks: &[u128]) -> Label {
        Label {
            pool: Uuid::from_u128(pool),
            name: "pool0".to_owned(),
            sequence,
            disk: Uuid::from_u128(disk),
            disks: disks.iter().map(|id| Uuid::from_u128(*id)).collect(),
            is_leaving: false,
        }
    }

    /// Goal: an import takes the disks of the pool, and copies, and nothing else. Method: labels of
    /// a first disk, of a copy, of a disk that never joined, and of another pool.
    #[test]
    fn disks_are_those_of_the_newest_root() {
        let of = |labels: &[(&str, Label)]| {
            let labels = labels.iter();
            let labels = labels.map(|(name, label)| ((*name).to_owned(), label.clone()));
            disks_among(labels.collect(), Uuid::from_u128(1))
        };
        let names = |labels: &[(&str, Label)]| {
            let found = of(labels);
            assert_eq!(found.leftovers, Vec::<String>::new());
            found.names
        };
        let first = ("first", label(1, 10, 9, &[10, 11]));
        let old_first = ("old", label(1, 10, 3, &[10]));
        let second = ("second", label(1, 11, 5, &[10, 11]));
        let copy = ("copy", label(1, 11, 5, &[10, 11]));
        let never = ("never", label(1, 12, 6, &[10, 11, 12]));
        let other = ("other", label(2, 20, 90, &[20]));
        let all = [first.clone(), second.clone(), never.clone(), other.clone()];
        assert_eq!(names(&all), ["first", "second"]);
        assert_eq!(
            names(&[second.clone(), first, copy]),
            ["second", "first", "copy"]
        );
        assert_eq!(names(&[old_first, second.clone()]), ["old"]);
        assert_eq!(names(&[second, never, other.clone()]), ["second", "never"]);
        assert_eq!(names(&[other]), Vec::<String>::new());
        let left = Label {
            is_leaving: true,
            ..label(1, 12, 6, &[10, 11, 12])
        };
        let of_one = ("first", label(1, 10, 9, &[10]));
        assert_eq!(of(&[of_one, ("left", left)]), with_leftover());
    }

    fn with_leftover() -> ImportDisks {
        ImportDisks {
            leftovers: vec!["left".to_owned()],
            ..ImportDisks::one("first")
        }
    }

    /// Goal: a disk that has left its pool, and that something else uses, does not prevent the
    /// import. Method: claims of both devices, while each of them is in use.
    #[test]
    fn a_leftover_in_use_is_left_out() {
        let bdevs = Registry::new();
        for name in ["first", "left"] {
            let config = serde_json::json!({
                "name": name, "block_size": 512, "num_blocks": 2048,
            });
            let config = serde_json::from_value(config).unwrap();
            let device = nacre_bdev::malloc::create(config).unwrap();
            bdevs.register(device as Arc<dyn Bdev>).unwrap();
        }
        let claimed = || {
            let claims = with_leftover().claim(&bdevs, &Holder::User("pool".into()))?;
            let names = claims.iter().map(|claim| claim.layer().name().to_owned());
            Ok::<Vec<String>, RpcError>(names.collect())
        };
        let hold = |name| bdevs.claim(name, Holder::User("other".into()), Usage::Exclusive);
        assert_eq!(claimed().unwrap(), ["first", "left"]);
        let held = hold("left").unwrap();
        assert_eq!(claimed().unwrap(), ["first"]);
        drop(held);
        let _held = hold("first").unwrap();
        assert!(claimed().is_err());
    }
}
