//! The storage pools that this daemon has open, and the bdevs of their lvols.
//!
//! ```text
//!   create, import   claim the disks ▸ a keeper on a reactor ▸ every lvol is a bdev
//!   disk removed     bdevs removed ▸ keeper ended; imported again when the disk is back
//!   close            queues closed ▸ keeper ended
//! ```
//!
//! The contents of a pool are on its disks. The journal has one record per pool, `pool/<uuid>`: the
//! call that imports it.

mod closing;
pub mod copies;
mod copy;
mod cut;
mod disks;
pub mod external;
mod interruption;
mod lvols;
mod refusals;
mod removal;
mod report;
mod space;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Holder};
use nacre_bdev_pool::{
    Command, Create, Import, ImportReport, Lvol, LvolInfo, Outcome, PoolError, PoolHandle,
    PoolState,
};
use nacre_hugepages::Pool as BufferPool;
use nacre_reactor::{CoreHandle, ReactorHandle};
use tokio::sync::{Mutex, RwLock};
use tracing::{info, warn};
use uuid::Uuid;

use crate::bdev_modules;
use crate::plane::{Plane, pool_here};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::deferred;
use crate::services::lifecycle::Phase;
use crate::store::{Change, Edit, Record};

use closing::{Gone, close_one};
pub use closing::{close, close_all, disk_gone, withdraw};
pub use cut::device_cut;
use disks::ImportDisks;
pub use disks::{KnownDisk, add_disk, grow};
pub use lvols::{
    alias, check_alias, check_name, check_same_pool, delete, find_lvol, register, register_new,
    resize, set_parent, set_parent_bdev, snapshot_lvol, undo_growth,
};
pub use removal::{keep_disk, remove_disk};
pub use report::for_doctor;
pub use space::{recount, take_counts};

/// The method of a pool's journal record.
pub const IMPORT: &str = "pool_import";
/// Time limit for reactors to close their queues, and for a disk to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);
/// Factor of the time limit for opening a pool, which reads the whole log.
const OPENINGS: u32 = 6;

pub struct Pools {
    open: RefCell<BTreeMap<Uuid, Rc<OpenPool>>>,
    /// Pools that the journal has and that are not open, because a disk was removed or the import
    /// failed, by the names of their disks.
    lost: RefCell<BTreeMap<String, Uuid>>,
    /// Pools that were closed because a disk was removed, by UUID.
    gone: RefCell<BTreeMap<Uuid, Gone>>,
    /// Devices that pools lack and try to claim again, and those of commands in progress.
    external: external::Pending,
    cut: cut::CutDevices,
    /// A disk of a pool in `lost` appeared while the daemon was starting.
    came_early: Cell<bool>,
    /// Serialises changes. The holder of the lock waits for a disk for at most `patience`.
    changing: Mutex<()>,
    pub copies: copies::Copies,
    pub(crate) patience: Cell<Duration>,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            open: RefCell::default(),
            lost: RefCell::default(),
            gone: RefCell::default(),
            external: external::Pending::default(),
            cut: cut::CutDevices::default(),
            came_early: Cell::default(),
            changing: Mutex::default(),
            copies: copies::Copies::default(),
            patience: Cell::new(PATIENCE),
        }
    }
}

/// The operation in which a disk did not answer in time; `ETIMEDOUT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Late {
    #[error("the disk does not answer: the pool is not open")]
    Open,
    #[error("the pool's disk does not answer: its volumes are not known")]
    Register,
    #[error("the pool's disk does not answer: names change when it does")]
    Rename,
    #[error("the pool's keeper does not end: its disk does not answer")]
    Close,
    #[error("a disk does not answer: the removal begins, or ends, when it does")]
    RemoveDisk,
    #[error("a disk does not answer: the disk joins the pool when it does, or not at all")]
    AddDisk,
}

impl Refusal for Late {
    fn refusal(self) -> RpcError {
        let field = match self {
            Self::Open | Self::AddDisk | Self::RemoveDisk => "disk",
            Self::Register | Self::Rename | Self::Close => "pool",
        };
        RpcError::errno(Errno::ETIMEDOUT, self.to_string())
            .field(field)
            .remedy("look at the disk; remove its device to give the pool up")
    }
}

pub struct OpenPool {
    pub handle: PoolHandle,
    /// The reactor with its keeper.
    pub reactor: String,
    pub report: ImportReport,
    /// Serialises renames, and the registration of lvols under their names.
    pub names: Arc<Mutex<()>>,
    /// Held for reading by snapshots in progress, also by those whose callers gave up.
    cuts: Arc<RwLock<()>>,
    /// The keeper was asked to end and did not end in time.
    is_closing: Cell<bool>,
    /// The pool was deleted, even if its disks did not confirm it.
    is_deleted: Cell<bool>,
    /// The name of a rename in progress.
    new_name: RefCell<Option<String>>,
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
        PoolState::Interrupted => "interrupted",
        PoolState::Closed => "closed",
    }
}

impl Pools {
    /// The pools whose keepers run.
    pub fn list(&self) -> Vec<Rc<OpenPool>> {
        let open = self.open.borrow();
        let live = open.values().filter(|pool| !pool.is_closed());
        live.cloned().collect()
    }

    /// True when a disk of a lost pool has appeared during the start (once), or when all disks of a
    /// lost pool are present.
    pub fn have_come(&self, plane: &Plane) -> bool {
        let lost = self.lost.borrow();
        let is_complete = |id: &Uuid| {
            let mut names = lost.iter().filter(|(_, of)| *of == id);
            names.all(|(name, _)| plane.bdevs.lookup(name).is_some())
        };
        self.came_early.take() || lost.values().any(is_complete)
    }

    /// Drops pools whose keepers have ended; their handles hold claims on the disks.
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
        found.cloned().ok_or_else(|| self.not_open(name))
    }

    fn of(&self, id: Uuid) -> Result<Rc<OpenPool>, RpcError> {
        self.find(&id.to_string())
    }

    /// Names of open pools: present ones, and those of renames in progress.
    fn names(&self) -> Vec<String> {
        let pools = self.list();
        let names = pools.iter();
        let names = names.flat_map(|pool| [Some(pool.name()), pool.new_name.borrow().clone()]);
        names.flatten().collect()
    }

    /// Refuses a name that an open pool has, or gets by a rename in progress.
    fn check_free(&self, field: &str, name: &str) -> Result<(), RpcError> {
        if !self.names().iter().any(|other| other == name) {
            return Ok(());
        }
        let cause = format!("\"{name}\" is the name of an open pool");
        Err(RpcError::errno(Errno::EEXIST, cause).field(field))
    }

    /// Waits for work of a disk, for a caller that holds a lock: at most `patience`, six times as
    /// long for [`Late::Open`].
    async fn in_time<T>(&self, late: Late, work: impl Future<Output = T>) -> Result<T, RpcError> {
        let patience = match late {
            Late::Open => self.patience.get() * OPENINGS,
            _ => self.patience.get(),
        };
        let ended = tokio::time::timeout(patience, work).await;
        ended.map_err(|_| late.refusal())
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

    /// An lvol with its space in use.
    pub async fn lvol(&self, id: Uuid) -> Result<LvolInfo, RpcError> {
        let counted = self.run(Command::Count { lvol: id }).await?;
        let found = match counted {
            Outcome::List(list) => list.into_iter().next(),
            _ => None,
        };
        found.ok_or_else(|| RpcError::errno(Errno::ENODEV, format!("{id} was deleted meanwhile")))
    }

    /// Lvols without the space that they use.
    pub async fn list_names(&self) -> Result<Vec<LvolInfo>, RpcError> {
        match self.run(Command::Names).await? {
            Outcome::List(list) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    /// Waits for snapshots that callers of [`snapshot_lvol`] gave up. Their lvols may appear until
    /// then.
    pub async fn cuts_have_ended(&self) {
        drop(self.cuts.write().await);
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
    pools.check_free("name", &name)?;
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
    let undo = Command::Destroy;
    let plane = engine.plane()?;
    if let Some(layer) = plane.bdevs.lookup(disk).filter(|_| force) {
        disks::refuse_open(engine, &plane, layer).await?;
    }
    let devices = ImportDisks::one(disk);
    let opened = open(
        engine,
        &devices,
        id,
        undo,
        move |core, memory, mut claims| async move {
            let claim = claims.pop().ok_or(PoolError::Closed)?;
            let handle = nacre_bdev_pool::create(&core, memory, claim, new).await?;
            Ok((handle, ImportReport::default()))
        },
    );
    let pool = Rc::new(opened.await?);
    pools.open.borrow_mut().insert(id, Rc::clone(&pool));
    if let Err(refused) = store_import(engine, &pool).await {
        close_one(engine, &pool, Command::Destroy).await?;
        return Err(refused);
    }
    let text = format!("pool \"{}\" was created on {disk}", pool.name());
    let facts = serde_json::json!({ "id": pool.handle.id() });
    engine.notes.report("pool_create", pool.name(), text, facts);
    space::watch(engine, &pool);
    Ok(pool)
}

/// The pool that a caller imports.
#[derive(Debug, Default)]
pub struct ImportRequest {
    /// The pool's UUID. `None`: any pool on the disk.
    pub id: Option<Uuid>,
    /// The name that the pool gets; `None`: it keeps its name.
    pub new_name: Option<String>,
    /// Import the pool even if another daemon may have it open.
    pub force: bool,
    /// The disks as they were last seen.
    pub known: Vec<KnownDisk>,
}

/// Imports the pool on a device, and registers its lvols as bdevs.
pub async fn import(
    engine: &Rc<Engine>,
    disk: &str,
    wanted: ImportRequest,
) -> Result<Rc<OpenPool>, RpcError> {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let (id, known) = (wanted.id, wanted.known.clone());
    let imported = import_one(engine, disk, wanted).await;
    if let (Err(_), Some(id)) = (&imported, id)
        && engine.journal.find(&key(id)).is_some()
    {
        // The pool is imported when its missing disk appears.
        let names = known.into_iter().map(|known| known.name);
        let names = names.chain([disk.to_owned()]);
        pools.lost.borrow_mut().extend(names.map(|name| (name, id)));
    }
    imported
}

/// Imports a pool. The caller holds [`Pools::changing`]. The journal changes last: a failed import
/// leaves an earlier record unchanged.
async fn import_one(
    engine: &Rc<Engine>,
    disk: &str,
    wanted: ImportRequest,
) -> Result<Rc<OpenPool>, RpcError> {
    let ImportRequest {
        id,
        new_name,
        force,
        known,
    } = wanted;
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
        if let Some(new) = new_name.filter(|new| *new != pool.name()) {
            let cause = format!("pool {id} is open as \"{}\", not \"{new}\"", pool.name());
            return Err(RpcError::errno(Errno::EEXIST, cause)
                .field("new_name")
                .remedy("pool_rename gives an open pool another name"));
        }
        let bases = pool.handle.bases();
        if bases.iter().any(|base| base == disk) {
            return Ok(pool);
        }
        let cause = format!("pool {id} is open on \"{}\"", bases.join("\", \""));
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    let mut taken_names = pools.names();
    if let Some(new) = &new_name {
        check_name("new_name", new)?;
        pools.check_free("new_name", new)?;
        // The pool has its own name for a moment, which nothing sees.
        taken_names.clear();
    }
    let import = Import {
        id,
        open: pools.open.borrow().keys().copied().collect(),
        taken_names,
        holder: engine.volumes.holder(),
        force,
    };
    let (holder, undo) = (id.unwrap_or_default(), Command::Close { export: false });
    let devices = disks::find(engine, disk, id, &known).await?;
    let opened = open(
        engine,
        &devices,
        holder,
        undo,
        move |core, memory, claims| async move {
            let imported = nacre_bdev_pool::import(&core, memory, claims, import).await;
            let (handle, report) = imported.map_err(|error| disks::name_missing(error, &known))?;
            if let Some(name) = new_name
                && let Err(refused) = handle.run(Command::RenamePool { name }).await
            {
                // The refusal of the name is the answer.
                let _ = handle.run(Command::Close { export: false }).await;
                return Err(refused);
            }
            Ok((handle, report))
        },
    );
    let pool = Rc::new(opened.await?);
    let id = pool.handle.id();
    pools.open.borrow_mut().insert(id, Rc::clone(&pool));
    let imported = async {
        external::attach_present(engine, &pool).await;
        register_all(engine, &pool).await?;
        store_import(engine, &pool).await
    };
    if let Err(refused) = imported.await {
        close_one(engine, &pool, Command::Close { export: false }).await?;
        return Err(refused);
    }
    pools.lost.borrow_mut().retain(|_, lost| *lost != id);
    pools.gone.borrow_mut().remove(&id);
    let (name, report) = (pool.name(), &pool.report);
    info!(
        pool = name,
        disk,
        replayed = report.replayed,
        lost = report.lost,
        "imported"
    );
    let text = format!("pool \"{name}\" was imported from {disk}");
    let facts = serde_json::json!({ "id": id, "replayed": report.replayed, "lost": report.lost });
    engine.notes.report("pool_import", name, text, facts);
    space::watch(engine, &pool);
    tokio::task::spawn_local(space::count(Rc::clone(engine), Rc::clone(&pool)));
    Ok(pool)
}

/// Renames a pool. The bdevs of its lvols keep their names, which are UUIDs; their aliases change.
///
/// If the disk answers late, the aliases change after the caller has its error.
pub async fn rename(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    new_name: String,
) -> Result<(), RpcError> {
    check_name("new_name", &new_name)?;
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let names = Arc::clone(&pool.names).lock_owned();
    let names = pools.in_time(Late::Rename, names).await?;
    let old_name = pool.name();
    if old_name == new_name {
        return Ok(());
    }
    pools.check_free("new_name", &new_name)?;
    // Whatever can fail comes before the change.
    let plane = engine.plane()?;
    let lvols = lvols_of(&plane, pool.handle.id());
    let aliases = lvols.iter().map(|lvol| {
        let (name, lvol) = (lvol.name().to_owned(), lvol.info().name);
        (name, alias(&old_name, &lvol), alias(&new_name, &lvol))
    });
    let aliases: Vec<_> = aliases.collect();
    drop(lvols);
    for (_, _, new) in &aliases {
        check_alias(&plane.bdevs, "new_name", new)?;
    }
    pool.new_name.replace(Some(new_name.clone()));
    let pool = Rc::clone(pool);
    let renaming = tokio::task::spawn_local(async move {
        let renamed = pool.run(Command::RenamePool { name: new_name }).await;
        pool.new_name.take();
        renamed?;
        for (name, old, new) in aliases {
            if let Err(error) = plane.bdevs.rename_alias(&name, &old, &new) {
                warn!(alias = new, %error, "a volume keeps its former alias");
            }
        }
        drop(names);
        Ok(())
    });
    let renamed = pools.in_time(Late::Rename, renaming).await?;
    renamed.unwrap_or_else(|error| Err(RpcError::internal(error.to_string())))
}

/// Opens a pool on a reactor. A pool that opens after the time limit is closed again by `undo`.
async fn open<Work>(
    engine: &Rc<Engine>,
    devices: &ImportDisks,
    id: Uuid,
    undo: Command,
    work: impl FnOnce(CoreHandle, BufferPool, Vec<nacre_bdev::Claim>) -> Work + Send + 'static,
) -> Result<OpenPool, RpcError>
where
    Work: Future<Output = Result<(PoolHandle, ImportReport), PoolError>> + 'static,
{
    let plane = engine.plane()?;
    let holder = Holder::User(if id.is_nil() {
        "a pool".to_owned()
    } else {
        format!("pool {id}")
    });
    let claims = devices.claim(&plane.bdevs, &holder)?;
    let reactor = least_loaded(engine, &plane)
        .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
    let mut opened = Box::pin(reactor.run_future(move |core| async move {
        match pool_here() {
            Some(memory) => work(core, memory, claims).await,
            None => Err(PoolError::Io {
                what: "the reactor has no buffers".into(),
            }),
        }
    }));
    let pools = &engine.devices.pools;
    let opened = match pools.in_time(Late::Open, &mut opened).await {
        Ok(opened) => opened.map_err(|error| RpcError::errno(Errno::EIO, error.to_string()))?,
        Err(late) => {
            let disk = devices.names.join(", ");
            tokio::task::spawn_local(async move {
                if let Ok(Ok((handle, _))) = opened.await
                    && let Err(error) = handle.run(undo).await
                {
                    warn!(disk, %error, "a pool that opened too late is not closed");
                }
            });
            return Err(late);
        }
    };
    let (handle, report) = opened.or_refuse()?;
    Ok(OpenPool {
        handle,
        reactor: reactor.name().to_owned(),
        report,
        names: Arc::default(),
        cuts: Arc::default(),
        is_closing: Cell::default(),
        is_deleted: Cell::default(),
        new_name: RefCell::default(),
    })
}

/// Stores the import of an open pool.
async fn store_import(engine: &Engine, pool: &OpenPool) -> Result<(), RpcError> {
    let (plane, id) = (engine.plane()?, pool.handle.id());
    let record = Record {
        key: key(id),
        method: IMPORT.to_owned(),
        params: disks::import_params(engine, &plane, pool),
    };
    engine.journal.commit(Change(vec![Edit::Put(record)])).await
}

/// The name of a disk for the journal: the one that it has after the next start.
fn lasting_name(engine: &Engine, plane: &Plane, disk: &str) -> String {
    let layer = plane.bdevs.lookup(disk);
    let name = layer.map_or_else(|| disk.to_owned(), |layer| layer.name().to_owned());
    engine.volumes.lasting_name(&name)
}

/// The reactor with the fewest keepers; among equals the least busy one.
pub fn least_loaded(engine: &Engine, plane: &Plane) -> Option<ReactorHandle> {
    let pools = engine.devices.pools.list();
    let keepers = |name: &str| pools.iter().filter(|pool| pool.reactor == name).count();
    let load = |reactor: &&ReactorHandle| (keepers(reactor.name()), reactor.stats().busy_ns);
    plane.reactors.iter().min_by_key(load).cloned()
}

/// Registers the bdevs of all lvols.
async fn register_all(engine: &Rc<Engine>, pool: &OpenPool) -> Result<(), RpcError> {
    let work = async {
        let _names = pool.names.lock().await;
        for info in pool.list_names().await? {
            register(engine, pool, &info).await?;
        }
        Ok(())
    };
    let pools = &engine.devices.pools;
    pools.in_time(Late::Register, work).await?
}

/// The registered bdevs of a pool's lvols.
fn lvols_of(plane: &Plane, id: Uuid) -> Vec<Arc<Lvol>> {
    let all = plane.bdevs.list();
    let lvols = all
        .iter()
        .filter_map(|listed| bdev_modules::device::<Lvol>(listed.layer.module()));
    lvols.filter(|lvol| lvol.pool() == id).collect()
}

/// Starts to replay the journal records that wait for bdevs of a pool imported after the start.
pub fn replay(engine: &Rc<Engine>) {
    let engine = Rc::clone(engine);
    tokio::task::spawn_local(async move { deferred::replay_waiting(&engine).await });
}

/// Imports a lost pool again when one of its disks appears.
pub async fn disk_appeared(engine: &Rc<Engine>, disk: &str) {
    let pools = &engine.devices.pools;
    // A disk that returns at once: its pool is being closed, and is noted as lost after that.
    let is_on = |pool: &Rc<OpenPool>| pool.handle.bases().iter().any(|base| base == disk);
    let is_open = pools.open.borrow().values().any(is_on);
    if !is_open && !pools.lost.borrow().contains_key(disk) {
        return;
    }
    if engine.lifecycle.phase() != Phase::Runtime {
        // The start goes through the journal again, and imports it in order.
        pools.came_early.set(true);
        return;
    }
    let _one = pools.changing.lock().await;
    let lost = pools.lost.borrow_mut().remove(disk);
    // The journal has no record of a pool that was exported meanwhile.
    let lost = lost.filter(|id| engine.journal.find(&key(*id)).is_some());
    let Some(id) = lost else { return };
    let known = disks::known(engine, id);
    let names: Vec<String> = known.iter().map(|known| known.name.clone()).collect();
    let wanted = ImportRequest {
        id: Some(id),
        known,
        ..ImportRequest::default()
    };
    match import_one(engine, disk, wanted).await {
        Ok(_) => replay(engine),
        Err(error) => {
            warn!(disk, %error, "a disk is back, and its pool is not imported");
            let mut lost = pools.lost.borrow_mut();
            lost.extend(names.into_iter().map(|name| (name, id)));
            lost.insert(disk.to_owned(), id);
            drop(lost);
            engine.journal.restored(&key(id), Err(error));
        }
    }
}
