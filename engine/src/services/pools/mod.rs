//! Storage pools of the daemon: the open ones, and the block devices of their volumes.
//!
//! ```text
//!   create, import   claim the disk ▸ a keeper on a reactor ▸ every volume is a bdev
//!   disk goes        bdevs removed ▸ keeper ended; imported again when the disk is back
//!   close            queues closed ▸ keeper ended
//! ```
//!
//! The contents of a pool are on its disk. The journal only has `pool/<uuid>`: the import.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::{Removal, Usage};
use nacre_bdev::{Bdev, Holder, Registry as BdevRegistry};
use nacre_bdev_pool::{
    Command, Create, Import, ImportReport, Lvol, LvolInfo, Outcome, PoolError, PoolHandle,
    PoolState, Refusal as Refused,
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
    /// Serialises changes of names, and the registration of volumes under them.
    pub names: Mutex<()>,
    /// The keeper was told to end, and has not ended in time.
    is_closing: Cell<bool>,
}

/// The journal key of a pool.
pub fn key(id: Uuid) -> String {
    format!("pool/{id}")
}

/// The name of a state in answers and metrics.
pub fn state_word(state: PoolState) -> &'static str {
    match state {
        PoolState::Opening => "opening",
        PoolState::Online => "online",
        PoolState::Held => "held",
        PoolState::Closed => "closed",
    }
}

impl Pools {
    /// The pools whose keepers live.
    pub fn list(&self) -> Vec<Rc<OpenPool>> {
        let open = self.open.borrow();
        let live = open.values().filter(|pool| !pool.is_closed());
        live.cloned().collect()
    }

    /// Drops pools without a keeper: their handles claim the disk.
    fn forget_closed(&self) {
        let mut open = self.open.borrow_mut();
        open.retain(|_, pool| !pool.is_closed());
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
    fn is_closed(&self) -> bool {
        self.handle.status().state == PoolState::Closed
    }

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
    pools.forget_closed();
    if pools.find(&name).is_ok() {
        let cause = format!("\"{name}\" is the name of an open pool");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
    }
    let id = id.unwrap_or_else(Uuid::new_v4);
    let is_open = pools.open.borrow().contains_key(&id);
    if is_open || engine.journal.find(&key(id)).is_some() {
        let cause = format!("{id} is the UUID of another pool of this daemon");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    let new = Create {
        id,
        name,
        holder: engine.volumes.holder(),
        force,
    };
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
    let _one = engine.devices.pools.changing.lock().await;
    import_one(engine, disk, id, force).await
}

/// Imports a pool. The caller has the gate of changes.
async fn import_one(
    engine: &Rc<Engine>,
    disk: &str,
    id: Option<Uuid>,
    force: bool,
) -> Result<Rc<OpenPool>, RpcError> {
    let pools = &engine.devices.pools;
    pools.forget_closed();
    if let Some(id) = id
        && let Ok(pool) = pools.of(id)
    {
        if pool.is_closing.get() {
            let cause = format!("pool {id} is still being closed: its disk does not answer");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("uuid")
                .remedy("import it again when pool_list does not have it"));
        }
        if pool.handle.base() == disk {
            return Ok(pool);
        }
        let cause = format!("pool {id} is open on \"{}\"", pool.handle.base());
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    let wanted = Import {
        id,
        open: pools.open.borrow().keys().copied().collect(),
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
    let _names = pool.names.lock().await;
    let old_name = pool.name();
    if old_name == new_name {
        return Ok(());
    }
    if pools.find(&new_name).is_ok() {
        let cause = format!("\"{new_name}\" is the name of an open pool");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("new_name"));
    }
    // Whatever can fail comes before the change.
    let bdevs = &engine.plane()?.bdevs;
    let lvols = pool.lvols().await?;
    let aliases = lvols.iter().filter_map(|lvol| {
        let name = bdevs.lookup(&lvol.id.to_string())?.name().to_owned();
        let (old, new) = (alias(&old_name, &lvol.name), alias(&new_name, &lvol.name));
        Some((name, old, new))
    });
    let aliases: Vec<_> = aliases.collect();
    for (_, _, new) in &aliases {
        check_alias(bdevs, "new_name", new)?;
    }
    pool.run(Command::RenamePool { name: new_name }).await?;
    for (name, old, new) in aliases {
        if let Err(error) = bdevs.rename_alias(&name, &old, &new) {
            warn!(alias = new, %error, "a volume keeps its former alias");
        }
    }
    Ok(())
}

/// Checks that no device has a new alias, before the pool gets the name in it.
pub fn check_alias(bdevs: &BdevRegistry, field: &str, alias: &str) -> Result<(), RpcError> {
    let Some(user) = bdevs.lookup(alias) else {
        return Ok(());
    };
    let cause = format!("\"{alias}\" is already a name of bdev \"{}\"", user.name());
    Err(RpcError::errno(Errno::EEXIST, cause).field(field))
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
        names: Mutex::default(),
        is_closing: Cell::default(),
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
    let _names = pool.names.lock().await;
    for info in pool.lvols().await? {
        register(engine, pool, &info).await?;
    }
    Ok(())
}

/// Registers the device of a volume under its UUID, with the alias `pool/name`. The caller has
/// [`OpenPool::names`].
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
        // An import that failed is forgotten, and a pool whose disk went away.
        let id = Uuid::parse_str(name).ok();
        pools.lost.borrow_mut().retain(|_, lost| Some(*lost) != id);
        let record = id.map(key);
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
async fn close_one(engine: &Rc<Engine>, pool: &Rc<OpenPool>, end: Command) -> Result<(), RpcError> {
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
    let forgets = matches!(end, Command::Close { export: true } | Command::Destroy);
    let handle = pool.handle.clone();
    let mut closing = Box::pin(async move { handle.run(end).await });
    if let Ok(closed) = tokio::time::timeout(PATIENCE, &mut closing).await {
        return close_ended(engine, pool, closed).await;
    }
    pool.is_closing.set(true);
    let (engine, pool) = (Rc::clone(engine), Rc::clone(pool));
    tokio::task::spawn_local(async move {
        let closed = closing.await;
        let _one = engine.devices.pools.changing.lock().await;
        pool.is_closing.set(false);
        if let Err(error) = close_ended(&engine, &pool, closed).await {
            warn!(pool = pool.name(), %error, "the pool is open again");
        } else if forgets && let Err(error) = engine.journal.commit(Change::remove(key(id))).await {
            warn!(%id, %error, "the next start imports a closed pool");
        }
    });
    let cause = "the pool's keeper does not end: its disk does not answer";
    Err(RpcError::errno(Errno::ETIMEDOUT, cause))
}

/// A closing command has ended: the pool is gone, or open again.
async fn close_ended(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    closed: Result<Outcome, PoolError>,
) -> Result<(), RpcError> {
    match closed {
        Ok(_) | Err(PoolError::Closed) => {
            let pools = &engine.devices.pools;
            pools.open.borrow_mut().remove(&pool.handle.id());
            Ok(())
        }
        Err(refused) => {
            // The pool is open without devices: they come back.
            register_all(engine, pool).await?;
            Err(refused.refusal())
        }
    }
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
    let is_on = |pool: &Rc<OpenPool>| pool.handle.base() == disk;
    let is_open = pools.open.borrow().values().any(is_on);
    if !is_open && !pools.lost.borrow().contains_key(disk) {
        return;
    }
    let _one = pools.changing.lock().await;
    let lost = pools.lost.borrow_mut().remove(disk);
    // The journal has no record of a pool that was exported meanwhile.
    let lost = lost.filter(|id| engine.journal.find(&key(*id)).is_some());
    let Some(id) = lost else { return };
    if let Err(error) = import_one(engine, disk, Some(id), false).await {
        warn!(disk, %error, "a disk is back, and its pool is not imported");
        pools.lost.borrow_mut().insert(disk.to_owned(), id);
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
            Self::AlreadyOpen { .. } => of(Errno::EEXIST).field("disk"),
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
