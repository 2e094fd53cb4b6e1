//! `bdev_aio_*` and `bdev_uring_*`: files and block devices. Both use the io_uring module.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::Bdev;
use nacre_bdev::module::ByName;
use nacre_bdev::registry::Shrink;
use nacre_bdev_uring::{Config, CreateError, Product, UringBdev};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;
use uuid::Uuid;

use super::{ANNOUNCED, no_device_of_kind};
use crate::bdev_modules::{AIO, AIO_RESCAN, FILE, URING_RESCAN};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::access;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::device_records;
use crate::services::devices::known_files;
use crate::values::{flattened, read};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AioCreate>()
        .add::<AioDelete>()
        .add::<AioRescan>()
        .add::<UringCreate>()
        .add::<UringDelete>()
        .add::<UringRescan>();
}

impl Refusal for CreateError {
    fn refusal(self) -> RpcError {
        let field = match &self {
            Self::BlockSize { .. } | Self::BelowSector { .. } => "block_size",
            Self::PartialBlock { is_block: true, .. } => "block_size",
            Self::CreateSize { .. } | Self::NoSpace { .. } => "size",
            _ => "filename",
        };
        RpcError::os(self.errno(), self.to_string()).field(field)
    }
}

pub struct AioCreate;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct AioCreateParams {
    /// Name of the new bdev: 1 to 255 bytes.
    pub name: String,
    /// Absolute path of a file or block device of this machine.
    pub filename: PathBuf,
    /// Refuse writes; default false.
    #[serde(default)]
    pub readonly: bool,
    /// Offer unmap and write zeroes; default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallocate: Option<bool>,
    /// Accepted: io_uring does not block.
    #[serde(default)]
    pub nowait: bool,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: NewFileOptions,
}

flattened!(AioCreateParams, options, without nulls);

/// Options of a new device of a file. The only declaration of these parameters of bdev_aio_create
/// and bdev_uring_create.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NewFileOptions {
    /// 0: chosen for the file or device.
    #[serde(skip_serializing_if = "is_zero")]
    pub block_size: u32,
    /// Default: derived from the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
    /// Nacre extension: creates a missing file with this size in bytes.
    #[serde(
        deserialize_with = "read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    pub size: Option<u64>,
    /// Nacre extension, set by the daemon: the size in bytes that hosts know. A smaller file keeps
    /// this size, and I/O past its end fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announced_size: Option<u64>,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Absolute path of the file, so that it does not depend on the working directory.
fn absolute_path(path: &Path) -> Result<PathBuf, RpcError> {
    crate::values::files::absolute(path).map_err(|error| {
        let cause = format!("{}: {error}", path.display());
        // Same error as the kernel returns for an empty path.
        let errno = if path.as_os_str().is_empty() {
            Errno::ENOENT
        } else {
            Errno::EINVAL
        };
        RpcError::errno(errno, cause).field("filename")
    })
}

/// Opens the file of a new bdev. `adjust` sets properties that only one method has. Returns the
/// parameters with which the next start opens the file again.
async fn open_new(
    engine: &Engine,
    name: &str,
    filename: &mut PathBuf,
    options: &mut NewFileOptions,
    adjust: impl FnOnce(&mut Config),
) -> Result<Arc<UringBdev>, RpcError> {
    crate::methods::replies::refuse_nil(options.uuid)?;
    super::refuse_taken(engine, name)?;
    *filename = absolute_path(filename)?;
    let mut config = Config::new(name.to_owned(), filename.clone());
    config.block_size = (options.block_size != 0).then_some(options.block_size);
    config.size = options.size;
    config.uuid = options.uuid;
    let expected = known_files::expected(engine, options.uuid);
    (config.identity, config.contents) = (expected.identity, expected.contents);
    adjust(&mut config);
    let bdev = open(engine, config).await?;
    options.uuid = Some(bdev.uuid());
    // Stored so that the device keeps its layout on disks with other sectors.
    options.block_size = bdev.geometry().block_size;
    // The file exists now. If it is missing at the next start (e.g. not mounted), it must not be
    // replaced by an empty file under the same UUID.
    options.size = None;
    Ok(bdev)
}

/// Opens the file on another thread: it may wait for a lock or for a disk to spin up.
async fn open(engine: &Engine, config: Config) -> Result<Arc<UringBdev>, RpcError> {
    let opened = on_other_thread(engine, move || nacre_bdev_uring::create(config)).await?;
    opened.or_refuse()
}

/// Runs `work` on another thread, with a time limit. Some disks and network file systems never
/// answer, and all other changes wait for this one.
async fn on_other_thread<T: Send + 'static>(
    engine: &Engine,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RpcError> {
    let patience = super::patience(engine);
    let done = tokio::time::timeout(patience, tokio::task::spawn_blocking(work)).await;
    let late = |_| {
        let cause = format!("it does not answer within {patience:?}");
        RpcError::errno(Errno::ETIMEDOUT, cause)
            .field("filename")
            .remedy("see whether its disk or file server is well")
    };
    done.map_err(late)?
        .map_err(|e| RpcError::internal(e.to_string()))
}

impl Method<Engine> for AioCreate {
    const NAME: &'static str = AIO.create;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a device of a file or block device, and answers its name.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AioCreateParams;
    type Reply = String;

    async fn apply(mut params: AioCreateParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        let (readonly, fallocate) = (params.readonly, params.fallocate);
        let (filename, options) = (&mut params.filename, &mut params.options);
        let bdev = open_new(&engine, &params.name, filename, options, |config| {
            config.readonly = readonly;
            config.fallocate = fallocate;
            config.product = Product::Aio;
        })
        .await?;
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let made = super::create(&engine, vec![bdev], Self::NAME, record).await?;
        Ok(made.into_iter().next().unwrap_or_default())
    }
}

pub struct UringCreate;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct UringCreateParams {
    /// Name of the new bdev: 1 to 255 bytes.
    pub name: String,
    /// Absolute path of a file or block device of this machine.
    pub filename: PathBuf,
    /// Nacre extension: writes are refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub readonly: bool,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: NewFileOptions,
}

flattened!(UringCreateParams, options, without nulls);

impl Method<Engine> for UringCreate {
    const NAME: &'static str = FILE.create;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a device of a file or block device, and answers its name.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = UringCreateParams;
    type Reply = String;

    async fn apply(mut params: UringCreateParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        let readonly = params.readonly;
        let (filename, options) = (&mut params.filename, &mut params.options);
        let bdev = open_new(&engine, &params.name, filename, options, |config| {
            config.readonly = readonly;
        })
        .await?;
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let made = super::create(&engine, vec![bdev], Self::NAME, record).await?;
        Ok(made.into_iter().next().unwrap_or_default())
    }
}

pub struct AioDelete;

impl Method<Engine> for AioDelete {
    const NAME: &'static str = AIO.delete;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Closes a file or block device, and deletes the devices stacked on it; the file stays.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ByName;
    type Reply = bool;

    async fn apply(params: ByName, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, Product::Aio.name()).await
    }
}

pub struct UringDelete;

impl Method<Engine> for UringDelete {
    const NAME: &'static str = FILE.delete;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Closes a file or block device, and deletes the devices stacked on it; the file stays.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ByName;
    type Reply = bool;

    async fn apply(params: ByName, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, Product::Uring.name()).await
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RescanParams {
    /// The file bdev: its name, alias or UUID.
    pub name: String,
    /// Nacre extension: use at most this many bytes. Call this before truncating the file.
    #[serde(default, deserialize_with = "read::some_bytes")]
    pub size: Option<u64>,
    /// Nacre extension: accept a smaller size while hosts are connected; they lose the data past
    /// its end. A volume records it first, and refuses it for its last good replica.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

async fn rescan(engine: &Engine, params: RescanParams, product: Product) -> Result<bool, RpcError> {
    if params.force {
        access::require(Class::Admin, "force")?;
    }
    let plane = engine.plane()?;
    let name = params.name.as_str();
    let found = device_records::find::<UringBdev>(engine, name);
    let Some(bdev) = found.filter(|bdev| bdev.config().product == product) else {
        let (kind, maker) = match product {
            Product::Aio => ("an aio device", AioCreate::NAME),
            Product::Uring => ("a uring device", UringCreate::NAME),
        };
        return Err(no_device_of_kind(engine, name, kind, maker));
    };
    if let Some(size) = params.size {
        if params.force {
            crate::services::volumes::check_other_copies(engine, name, size)?
        } else {
            plane.bdevs.may_shrink(name, size).or_refuse()?
        }
    }
    read_size(engine, &bdev, params.size).await?;
    let how = if params.force {
        Shrink::Forced
    } else {
        Shrink::IfUnused
    };
    let taken = plane.bdevs.take_size(name, how);
    // The volume must record the smaller replica before the reply permits truncating the file.
    let known = crate::services::volumes::recheck_device(engine, name).await;
    if (taken.is_err() || known.is_err()) && params.size.is_some() {
        // A host or volume came to depend on the data meanwhile: undo the reduction.
        read_size(engine, &bdev, None).await?;
        plane.bdevs.notify_resize(name).or_refuse()?;
    }
    taken.or_refuse()?;
    known?;
    if let Err(error) = remember_size(engine, bdev.name()).await {
        warn!(bdev = name, %error, "after a restart it is announced as it was before");
    }
    Ok(true)
}

/// Reads the present size, on another thread because a disk may be slow. `most` limits it.
async fn read_size(
    engine: &Engine,
    bdev: &Arc<UringBdev>,
    most: Option<u64>,
) -> Result<(), RpcError> {
    let bdev = Arc::clone(bdev);
    on_other_thread(engine, move || bdev.rescan(most))
        .await?
        .or_refuse()?;
    Ok(())
}

/// Stores the announced size for the next start, unless the configuration file declares the device.
async fn remember_size(engine: &Engine, name: &str) -> Result<(), RpcError> {
    let stored = engine
        .journal
        .find(&super::key(name))
        .filter(|entry| entry.durable);
    let (Some(entry), Some(layer)) = (stored, engine.plane()?.bdevs.lookup(name)) else {
        return Ok(());
    };
    let mut params = entry.record.params;
    params[ANNOUNCED] = layer.geometry().bytes().into();
    super::update(engine, name, params).await
}

struct AioRescan;

impl Method<Engine> for AioRescan {
    const NAME: &'static str = AIO_RESCAN;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Takes over the present size of a file or block device, and notifies hosts. A smaller size is refused \
         while a connected host knows the larger one, or a volume has the device.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = RescanParams;
    type Reply = bool;

    async fn apply(params: RescanParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        rescan(&engine, params, Product::Aio).await
    }
}

struct UringRescan;

impl Method<Engine> for UringRescan {
    const NAME: &'static str = URING_RESCAN;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Takes over the present size of a file or block device, and notifies hosts. A smaller size is refused \
         while a connected host knows the larger one, or a volume has the device.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = RescanParams;
    type Reply = bool;

    async fn apply(params: RescanParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        rescan(&engine, params, Product::Uring).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::TestDaemon;
    use super::on_other_thread;
    use crate::config::Settings;

    /// Goal: a file system that never responds blocks only the call that opens a file on it.
    #[test]
    fn opening_a_file_times_out() {
        let mut settings = Settings::default();
        settings.rpc.deadline_s = 1;
        let daemon = TestDaemon::with(settings, None);
        let (go, stuck) = std::sync::mpsc::channel::<()>();
        let opened = daemon.run(on_other_thread(&daemon.engine, move || stuck.recv()));
        let refused = opened.unwrap_err();
        assert_eq!(refused.code, -110);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("filename"));
        drop(go);
        let opened = daemon.run(on_other_thread(&daemon.engine, || 7));
        assert_eq!(opened.unwrap(), 7);
    }
}
