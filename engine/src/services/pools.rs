//! Storage pools of the daemon: the open ones, and the block devices of their volumes.
//!
//! ```text
//!   create, import   claim the disk ▸ a keeper on a reactor ▸ every volume is a bdev
//!   disk goes        bdevs removed ▸ keeper ended; imported again when the disk is back
//!   close            queues closed ▸ keeper ended
//! ```
//!
//! The contents of a pool are on its disk. The journal only has `pool/<uuid>`: the import.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::{Removal, Usage};
use nacre_bdev::{Bdev, Holder};
use nacre_bdev_pool::{
    Command, Create, Import, ImportReport, Lvol, LvolInfo, Outcome, PoolError, PoolHandle,
    Refusal as Refused,
};
use nacre_hugepages::Pool as Memory;
use nacre_reactor::{CoreHandle, ReactorHandle};
use tokio::sync::Mutex;
use tracing::{info, warn};
use uuid::Uuid;

use crate::plane::{Plane, pool_here};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::devices;
use crate::services::engine::Engine;
use crate::store::{Change, Edit, Record};

/// The method that the journal has for a pool.
pub const IMPORT: &str = "pool_import";
/// How long cores may take to close their queues, and a keeper to end.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Pools {
    open: RefCell<BTreeMap<Uuid, Rc<OpenPool>>>,
    /// Pools whose disk went away, by the disk's name.
    lost: RefCell<BTreeMap<String, Uuid>>,
    /// Serialises changes.
    changing: Mutex<()>,
}

pub struct OpenPool {
    pub handle: PoolHandle,
    /// The reactor with its keeper.
    pub reactor: String,
    pub report: ImportReport,
}

/// The journal key of a pool.
pub fn key(id: Uuid) -> String {
    format!("pool/{id}")
}

impl Pools {
    pub fn list(&self) -> Vec<Rc<OpenPool>> {
        self.open.borrow().values().cloned().collect()
    }

    /// Finds an open pool by name or UUID.
    pub fn find(&self, name: &str) -> Result<Rc<OpenPool>, RpcError> {
        let id = Uuid::parse_str(name).ok();
        let pools = self.list();
        let found = pools.iter().find(|pool| {
            let status = pool.handle.status();
            status.name == name || Some(status.id) == id
        });
        found.cloned().ok_or_else(|| {
            RpcError::errno(Errno::ENODEV, format!("there is no open pool \"{name}\""))
                .field("pool")
                .remedy("pool_list lists them; pool_import opens one")
        })
    }

    fn of(&self, id: Uuid) -> Result<Rc<OpenPool>, RpcError> {
        self.find(&id.to_string())
    }
}

impl OpenPool {
    pub fn name(&self) -> String {
        self.handle.status().name
    }

    pub async fn lvols(&self) -> Result<Vec<LvolInfo>, RpcError> {
        match self.run(Command::List).await? {
            Outcome::List(list) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    pub async fn run(&self, command: Command) -> Result<Outcome, RpcError> {
        self.handle.run(command).await.or_refuse()
    }
}

/// Creates a pool on a device.
pub async fn create(
    engine: &Rc<Engine>,
    name: String,
    disk: &str,
    id: Option<Uuid>,
    force: bool,
) -> Result<Rc<OpenPool>, RpcError> {
    check_name("name", &name)?;
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    if pools.find(&name).is_ok() {
        let cause = format!("\"{name}\" is the name of an open pool");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
    }
    let new = Create {
        id: id.unwrap_or_else(Uuid::new_v4),
        name,
        holder: engine.volumes.holder(),
        force,
    };
    let id = new.id;
    let opened = open(engine, disk, id, move |core, memory, claim| async move {
        let handle = nacre_bdev_pool::create(&core, memory, claim, new).await?;
        Ok((handle, ImportReport::default()))
    });
    let pool = opened.await?;
    let text = format!("pool \"{}\" was created on {disk}", pool.name());
    let facts = serde_json::json!({ "id": pool.handle.id() });
    engine.notes.report("pool_create", pool.name(), text, facts);
    Ok(pool)
}

/// Imports the pool on a device, and registers its volumes.
pub async fn import(
    engine: &Rc<Engine>,
    disk: &str,
    id: Option<Uuid>,
    force: bool,
) -> Result<Rc<OpenPool>, RpcError> {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    if let Some(id) = id
        && let Ok(pool) = pools.of(id)
    {
        if pool.handle.base() == disk {
            return Ok(pool);
        }
        let cause = format!("pool {id} is open on \"{}\"", pool.handle.base());
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    let wanted = Import {
        id,
        holder: engine.volumes.holder(),
        force,
    };
    let opened = open(
        engine,
        disk,
        id.unwrap_or_default(),
        move |core, memory, claim| async move {
            nacre_bdev_pool::import(&core, memory, claim, wanted).await
        },
    );
    let pool = opened.await?;
    let registered = register_all(engine, &pool).await;
    if let Err(refused) = registered {
        close_one(engine, &pool, Command::Close { export: false }).await?;
        return Err(refused);
    }
    let (name, report) = (pool.name(), &pool.report);
    info!(
        pool = name,
        disk,
        replayed = report.replayed,
        lost = report.lost,
        "imported"
    );
    let text = format!("pool \"{name}\" was imported from {disk}");
    let facts = serde_json::json!({ "id": pool.handle.id(), "replayed": report.replayed, "lost": report.lost });
    engine.notes.report("pool_import", name, text, facts);
    Ok(pool)
}

/// Gives a pool another name. The devices of its volumes keep their names, which are UUIDs.
pub async fn rename(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    new_name: String,
) -> Result<(), RpcError> {
    check_name("new_name", &new_name)?;
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let old_name = pool.name();
    if old_name == new_name {
        return Ok(());
    }
    if pools.find(&new_name).is_ok() {
        let cause = format!("\"{new_name}\" is the name of an open pool");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("new_name"));
    }
    let rename = Command::RenamePool {
        name: new_name.clone(),
    };
    pool.run(rename).await?;
    let bdevs = &engine.plane()?.bdevs;
    for lvol in pool.lvols().await? {
        let (old, new) = (alias(&old_name, &lvol.name), alias(&new_name, &lvol.name));
        if let Err(error) = bdevs.rename_alias(&lvol.id.to_string(), &old, &new) {
            warn!(alias = new, %error, "a volume keeps its former alias");
        }
    }
    Ok(())
}

/// Opens a pool on a reactor, and stores its import.
async fn open<Work>(
    engine: &Rc<Engine>,
    disk: &str,
    id: Uuid,
    work: impl FnOnce(CoreHandle, Memory, nacre_bdev::Claim) -> Work + Send + 'static,
) -> Result<Rc<OpenPool>, RpcError>
where
    Work: Future<Output = Result<(PoolHandle, ImportReport), PoolError>> + 'static,
{
    let plane = engine.plane()?;
    let holder = Holder::User(if id.is_nil() {
        "a pool".to_owned()
    } else {
        format!("pool {id}")
    });
    let claim = plane.bdevs.claim(disk, holder, Usage::Exclusive);
    let claim = claim.map_err(|error| error.refusal().field("disk"))?;
    let reactor = least_loaded(engine, &plane)
        .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
    let opened = reactor.run_future(move |core| async move {
        match pool_here() {
            Some(memory) => work(core, memory, claim).await,
            None => Err(PoolError::Io {
                what: "the reactor has no buffers".into(),
            }),
        }
    });
    let opened = opened
        .await
        .map_err(|error| RpcError::errno(Errno::EIO, error.to_string()))?;
    let (handle, report) = opened.or_refuse()?;
    let pool = Rc::new(OpenPool {
        handle,
        reactor: reactor.name().to_owned(),
        report,
    });
    let pools = &engine.devices.pools;
    let id = pool.handle.id();
    pools.open.borrow_mut().insert(id, Rc::clone(&pool));
    let record = Record {
        key: key(id),
        method: IMPORT.to_owned(),
        params: serde_json::json!({ "disk": lasting_name(engine, &plane, disk), "uuid": id }),
    };
    if let Err(refused) = engine.journal.commit(Change(vec![Edit::Put(record)])).await {
        close_one(engine, &pool, Command::Close { export: false }).await?;
        return Err(refused);
    }
    Ok(pool)
}

/// The name of the disk that it has after the next start, too.
fn lasting_name(engine: &Engine, plane: &Plane, disk: &str) -> String {
    let layer = plane.bdevs.lookup(disk);
    let name = layer.map_or_else(|| disk.to_owned(), |layer| layer.name().to_owned());
    engine.volumes.lasting_name(&name)
}

/// The reactor with the fewest keepers; among equals the least busy one.
fn least_loaded(engine: &Engine, plane: &Plane) -> Option<ReactorHandle> {
    let pools = engine.devices.pools.list();
    let keepers = |name: &str| pools.iter().filter(|pool| pool.reactor == name).count();
    let load = |reactor: &&ReactorHandle| (keepers(reactor.name()), reactor.stats().busy_ns);
    plane.reactors.iter().min_by_key(load).cloned()
}

async fn register_all(engine: &Rc<Engine>, pool: &OpenPool) -> Result<(), RpcError> {
    for info in pool.lvols().await? {
        register(engine, pool, &info).await?;
    }
    Ok(())
}

/// Registers the device of a volume under its UUID, with the alias `pool/name`.
pub async fn register(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    info: &LvolInfo,
) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let lvol = pool.handle.lvol(info.id).await.or_refuse()?;
    lvol.update(info.clone());
    let layer = plane.bdevs.register(lvol as Arc<dyn Bdev>).or_refuse()?;
    let alias = alias(&pool.name(), &info.name);
    if let Err(error) = plane.bdevs.add_alias(layer.name(), &alias) {
        warn!(alias, %error, "a volume has no alias");
    }
    Ok(())
}

pub fn alias(pool: &str, lvol: &str) -> String {
    format!("{pool}/{lvol}")
}

/// Checks a name of a pool or volume.
pub fn check_name(field: &str, name: &str) -> Result<(), RpcError> {
    let why = if name.contains('/') {
        "a name has no \"/\": it separates the pool from the volume"
    } else if name.is_empty() || name.len() > 63 {
        "a name has 1 to 63 bytes"
    } else {
        return nacre_bdev::registry::check_name(name)
            .map_err(|error| error.refusal().field(field));
    };
    Err(RpcError::errno(Errno::EINVAL, why).field(field))
}

/// A volume or snapshot: by UUID, or as `pool/name`. With its pool.
pub fn find_lvol(
    engine: &Engine,
    field: &str,
    name: &str,
) -> Result<(Rc<OpenPool>, Arc<Lvol>), RpcError> {
    let lvol = devices::find::<Lvol>(engine, name).ok_or_else(|| {
        let cause = format!("there is no volume or snapshot \"{name}\"");
        RpcError::errno(Errno::ENODEV, cause)
            .field(field)
            .remedy("lvol_list lists them: name one by UUID, or as pool/name")
    })?;
    let pool = engine.devices.pools.of(lvol.pool())?;
    Ok((pool, lvol))
}

/// Removes the device of a volume that nothing uses, and waits until its queues are closed.
pub async fn withdraw(engine: &Engine, name: &str) -> Result<(), RpcError> {
    let ticket = engine.plane()?.bdevs.remove(name, Removal::IfUnused);
    let ticket = ticket.map_err(|error| {
        error
            .refusal()
            .remedy("remove its namespaces and the devices on it first")
    })?;
    let late = |_| {
        let cause = format!("queues of \"{name}\" are still open");
        RpcError::errno(Errno::ETIMEDOUT, cause).remedy("try again a little later")
    };
    tokio::time::timeout(PATIENCE, ticket).await.map_err(late)
}

/// Closes a pool that no volume of which is in use. The journal forgets it.
pub async fn close(engine: &Rc<Engine>, name: &str, end: Command) -> Result<(), RpcError> {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let Ok(pool) = pools.find(name) else {
        // An import that failed is forgotten.
        let record = Uuid::parse_str(name).ok().map(key);
        let record = record.filter(|key| engine.journal.find(key).is_some());
        let Some(key) = record else {
            return pools.find(name).map(drop);
        };
        return engine.journal.commit(Change::remove(key)).await;
    };
    let plane = engine.plane()?;
    let lvols = pool.lvols().await?;
    for lvol in &lvols {
        if let Ok(listed) = plane.bdevs.get(&lvol.id.to_string())
            && let Some((holder, _)) = listed.claims.first()
        {
            let cause = format!("\"{}\" is used by {holder}", lvol.name);
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("pool")
                .remedy("remove the namespaces and devices on its volumes first"));
        }
    }
    close_one(engine, &pool, end).await?;
    engine
        .journal
        .commit(Change::remove(key(pool.handle.id())))
        .await
}

/// Removes the devices of a pool and ends its keeper, with a closing command.
async fn close_one(engine: &Rc<Engine>, pool: &OpenPool, end: Command) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let id = pool.handle.id();
    for listed in plane.bdevs.list() {
        let lvol = crate::bdev_modules::device::<Lvol>(listed.layer.module());
        if lvol.is_none_or(|lvol| lvol.pool() != id) {
            continue;
        }
        let name = listed.layer.name().to_owned();
        drop(listed);
        for subsystem in plane.target.subsystems() {
            subsystem.bdev_removed(&name);
        }
        if let Ok(ticket) = plane.bdevs.remove(&name, Removal::Hot)
            && tokio::time::timeout(PATIENCE, ticket).await.is_err()
        {
            warn!(lvol = name, "queues are still open");
        }
    }
    let closed = tokio::time::timeout(PATIENCE, pool.handle.run(end)).await;
    match closed {
        Ok(Ok(_) | Err(PoolError::Closed)) => {}
        Ok(Err(refused)) => {
            // The pool is open without devices: they come back.
            register_all(engine, pool).await?;
            return Err(refused.refusal());
        }
        Err(_) => {
            let cause = "the pool's keeper does not end: its disk does not answer";
            return Err(RpcError::errno(Errno::ETIMEDOUT, cause));
        }
    }
    engine.devices.pools.open.borrow_mut().remove(&id);
    Ok(())
}

/// The disk of a pool goes: its volumes go with it, and its keeper ends.
pub fn disk_gone(engine: &Rc<Engine>, disk: &str) {
    let pools = engine.devices.pools.list();
    let Some(pool) = pools.into_iter().find(|pool| pool.handle.base() == disk) else {
        return;
    };
    let (engine, disk) = (Rc::clone(engine), disk.to_owned());
    tokio::task::spawn_local(async move {
        let pools = &engine.devices.pools;
        let _one = pools.changing.lock().await;
        let (name, id) = (pool.name(), pool.handle.id());
        warn!(pool = name, disk, "the disk went away: the pool is closed");
        let text = format!("pool \"{name}\": its disk {disk} went away");
        engine
            .notes
            .report("pool_lost", name, text, serde_json::json!({ "id": id }));
        if let Err(error) = close_one(&engine, &pool, Command::Close { export: false }).await {
            warn!(disk, %error, "a pool without its disk is not closed yet");
        }
        if engine.journal.find(&key(id)).is_some() {
            pools.lost.borrow_mut().insert(disk, id);
        }
    });
}

/// A disk appeared: if it is a lost one, its pool is imported again.
pub async fn disk_appeared(engine: &Rc<Engine>, disk: &str) {
    let pools = &engine.devices.pools;
    // A disk that returns at once: its pool is being closed, and is noted as lost after that.
    if pools.list().iter().any(|pool| pool.handle.base() == disk) {
        drop(pools.changing.lock().await);
    }
    let lost = pools.lost.borrow_mut().remove(disk);
    let Some(id) = lost else { return };
    if let Err(error) = import(engine, disk, Some(id), false).await {
        warn!(disk, %error, "a disk is back, and its pool is not imported");
    }
}

/// Closes all pools, after the hosts have disconnected.
pub async fn close_all(engine: &Rc<Engine>) {
    for pool in engine.devices.pools.list() {
        let name = pool.name();
        match close_one(engine, &pool, Command::Close { export: false }).await {
            Ok(()) => info!(pool = name, "closed"),
            Err(error) => {
                warn!(pool = name, %error, "not closed in order: the next import replays its log")
            }
        }
    }
}

impl Refusal for PoolError {
    fn refusal(self) -> RpcError {
        use nacre_bdev_pool::ImportError;
        let cause = self.to_string();
        let of = |errno| RpcError::errno(errno, cause.clone());
        match self {
            Self::Import(ImportError::NoSuperblock) => of(Errno::ENOENT)
                .field("disk")
                .remedy("pool_create makes a pool on it"),
            Self::Import(ImportError::Foreign { .. }) => of(Errno::EBUSY).field("disk"),
            Self::Import(ImportError::DiskSize { .. }) => of(Errno::EINVAL).field("disk"),
            Self::Import(_) => of(Errno::EIO).field("disk"),
            Self::Refused(refused) => {
                let errno = match refused {
                    Refused::UnknownVersion => Errno::ENODEV,
                    Refused::OutOfRange | Refused::WrongKind => Errno::EINVAL,
                    Refused::Exists => Errno::EEXIST,
                    Refused::Changing => Errno::EBUSY,
                    Refused::Exported => Errno::ENODEV,
                    Refused::NoSpace { .. } | Refused::TooMany => Errno::ENOSPC,
                    Refused::Damaged | Refused::Medium | Refused::Held => Errno::EIO,
                };
                of(errno)
            }
            Self::Unknown { .. } => of(Errno::ENODEV),
            Self::NotEmpty { .. } => of(Errno::EPERM)
                .field("disk")
                .remedy("look at its data first; force overwrites it"),
            Self::OtherPool { .. } => of(Errno::ENODEV)
                .field("disk")
                .remedy("name the disk with the pool"),
            Self::Unfit { .. } => of(Errno::EINVAL).field("disk"),
            Self::Io { .. } => of(Errno::EIO).field("disk"),
            Self::Closed => of(Errno::ENODEV),
            Self::Busy => of(Errno::EAGAIN).remedy("ask again a little later"),
        }
    }
}
