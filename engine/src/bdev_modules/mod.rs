//! The table of bdev modules. The RPC methods that create and delete bdevs derive from it, and so
//! do `nacre bdev create` and `delete`. `[[bdev]]` in the configuration file, and the names and
//! bases in journal records, also derive from it.

pub mod malloc;
pub mod new_bdev;
pub mod null;

use std::any::Any;
use std::sync::{Arc, LazyLock};

use clap::FromArgMatches;
use nacre_bdev::delay::Delay;
use nacre_bdev::fault::FaultDevice;
use nacre_bdev::module::CreateError;
use nacre_bdev::passthru::Passthru;
use nacre_bdev::split::Part;
use nacre_bdev::{Bdev, Module};
use nacre_bdev_uring::Product;
use serde_json::Value;

use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::values::read::{self, Texts};

/// Visits every module of which management can create bdevs.
pub fn visit(to: &mut impl Visitor) {
    to.module::<malloc::RamDisk>(MALLOC);
    to.module::<null::NullDisk>(NULL);
    to.own_methods(AIO);
    to.own_methods(FILE);
    to.module::<Delay>(DELAY);
    to.module::<FaultDevice>(derived::<FaultDevice>());
    to.module::<Passthru>(derived::<Passthru>());
    to.module::<Part>(derived::<Part>());
}

/// Receives each module with its type.
pub trait Visitor {
    /// A module whose create and delete methods derive from its type.
    fn module<M: Module>(&mut self, entry: ModuleEntry)
    where
        M::Error: Refusal;

    /// A module with create and delete methods of its own.
    fn own_methods(&mut self, _entry: ModuleEntry) {}
}

/// The modules without their types.
pub static MODULES: LazyLock<Vec<ModuleEntry>> = LazyLock::new(|| {
    let mut table = Table(Vec::new());
    visit(&mut table);
    table.0
});

struct Table(Vec<ModuleEntry>);

impl Visitor for Table {
    fn module<M: Module>(&mut self, entry: ModuleEntry)
    where
        M::Error: Refusal,
    {
        self.0.push(entry);
    }

    fn own_methods(&mut self, entry: ModuleEntry) {
        self.0.push(entry);
    }
}

pub const MALLOC: ModuleEntry = entry::<malloc::RamDisk>();
pub const NULL: ModuleEntry = ModuleEntry {
    resize: Some(NULL_RESIZE),
    ..entry::<null::NullDisk>()
};
pub const DELAY: ModuleEntry = declared::<Delay>();

/// `bdev_aio_*`: file bdevs.
pub const AIO: ModuleEntry = ModuleEntry {
    kind: "aio",
    product: Product::Aio.name(),
    create: "bdev_aio_create",
    delete: "bdev_aio_delete",
    deleted_by: ("name", "/name"),
    rescan: Some(AIO_RESCAN),
    resize: None,
    filename: Some("/driver_specific/aio/filename"),
    base: None,
    names: |params| {
        let name = params["name"].as_str();
        name.map(str::to_owned).into_iter().collect()
    },
    declared: None,
    command: None,
};

/// `bdev_uring_*`: file bdevs under SPDK's other name; also `type = "file"` in the configuration
/// file.
pub const FILE: ModuleEntry = ModuleEntry {
    kind: "uring",
    product: Product::Uring.name(),
    create: "bdev_uring_create",
    delete: "bdev_uring_delete",
    rescan: Some(URING_RESCAN),
    filename: Some("/driver_specific/uring/filename"),
    ..AIO
};

pub const NULL_RESIZE: &str = "bdev_null_resize";
pub const AIO_RESCAN: &str = "bdev_aio_rescan";
pub const URING_RESCAN: &str = "bdev_uring_rescan";

/// A module, with its types erased.
#[derive(Clone, Copy)]
pub struct ModuleEntry {
    pub kind: &'static str,
    pub product: &'static str,
    pub create: &'static str,
    pub delete: &'static str,
    /// See [`Module::DELETED_BY`].
    pub deleted_by: (&'static str, &'static str),
    pub rescan: Option<&'static str>,
    pub resize: Option<&'static str>,
    /// Path to the file name in the bdev's `driver_specific`.
    pub filename: Option<&'static str>,
    /// The create parameter that names the base bdev.
    pub base: Option<&'static str>,
    /// The names of the bdevs that the create method makes with these parameters.
    pub names: fn(&Value) -> Vec<String>,
    /// For modules whose create parameters are the keys of a `[[bdev]]`.
    pub declared: Option<Declaration>,
    /// For modules whose create parameters are the arguments of `nacre bdev create`.
    pub command: Option<Command>,
}

/// How a `[[bdev]]` of this module is declared.
#[derive(Clone, Copy)]
pub struct Declaration {
    pub schema: fn() -> schemars::Schema,
    /// Finds the first wrong parameter.
    pub check: fn(&Value) -> Option<(read::Place, read::ValueError)>,
}

/// A subcommand of `nacre bdev create`.
#[derive(Clone, Copy)]
pub struct Command {
    pub about: &'static str,
    pub arguments: fn(clap::Command) -> clap::Command,
    /// The parameters of the create method.
    pub params: fn(&clap::ArgMatches) -> Result<Value, clap::Error>,
}

const fn entry<M: Module>() -> ModuleEntry
where
    M::Error: Refusal,
{
    ModuleEntry {
        kind: M::KIND,
        product: M::PRODUCT,
        create: M::CREATE.name,
        delete: M::DELETE.name,
        deleted_by: M::DELETED_BY,
        rescan: None,
        resize: None,
        filename: None,
        base: M::BASE,
        names: |params| {
            let config = serde_json::from_value::<M::Config>(params.clone());
            config.map_or(Vec::new(), |config| M::names(&config))
        },
        declared: None,
        command: None,
    }
}

/// A module whose configuration is also a `[[bdev]]`.
const fn declared<M: Module>() -> ModuleEntry
where
    M::Error: Refusal,
{
    ModuleEntry {
        declared: Some(Declaration {
            schema: || schemars::schema_for!(M::Config),
            check: |params| read::first::<M::Config>(params, Texts::Read).err(),
        }),
        ..entry::<M>()
    }
}

/// A module of which everything derives from its configuration.
const fn derived<M: Module<Config: clap::Args>>() -> ModuleEntry
where
    M::Error: Refusal,
{
    ModuleEntry {
        command: Some(Command {
            about: M::ABOUT,
            arguments: <M::Config as clap::Args>::augment_args,
            params: |matches| {
                let config = M::Config::from_arg_matches(matches)?;
                Ok(serde_json::to_value(config).expect("a configuration is plain data"))
            },
        }),
        ..declared::<M>()
    }
}

/// Kinds that had another name in the last release, which is still accepted: former name, name.
pub const FORMER_KINDS: [(&str, &str); 1] = [("error", "fault")];

/// The present name of a kind, from that or its former name.
pub fn current_kind(text: &str) -> &str {
    let former = FORMER_KINDS.iter().find(|(former, _)| *former == text);
    former.map_or(text, |(_, kind)| kind)
}

pub fn by_kind(kind: &str) -> Option<&'static ModuleEntry> {
    MODULES.iter().find(|module| module.kind == kind)
}

/// The file of a bdev, from its `driver_specific`. `None`: it is not a file bdev.
pub fn file_of(driver_specific: &Value) -> Option<&str> {
    let mut pointers = MODULES.iter().filter_map(|entry| entry.filename);
    let inside = |pointer: &'static str| pointer.strip_prefix("/driver_specific");
    pointers.find_map(|pointer| driver_specific.pointer(inside(pointer)?)?.as_str())
}

/// The module that a create method belongs to.
pub fn by_create(method: &str) -> Option<&'static ModuleEntry> {
    MODULES.iter().find(|module| module.create == method)
}

/// The names of the bdevs that a create call makes.
pub fn names(method: &str, params: &Value) -> Vec<String> {
    by_create(method).map_or(Vec::new(), |module| (module.names)(params))
}

/// The name of the base bdev in a create call.
pub fn base<'a>(method: &str, params: &'a Value) -> Option<&'a str> {
    params.get(by_create(method)?.base?)?.as_str()
}

/// The name of the base bdev in a create call, for replacing it.
pub fn base_mut<'a>(method: &str, params: &'a mut Value) -> Option<&'a mut Value> {
    params.get_mut(by_create(method)?.base?)
}

/// The module's own type of a bdev. `None`: the bdev is of another module.
pub fn device<T: Bdev>(bdev: &Arc<dyn Bdev>) -> Option<Arc<T>> {
    let bdev: Arc<dyn Any + Send + Sync> = Arc::clone(bdev) as _;
    bdev.downcast::<T>().ok()
}

impl Refusal for CreateError {
    fn refusal(self) -> RpcError {
        match self {
            Self::Registry(error) => error.refusal(),
            Self::Parameter {
                field,
                cause,
                remedy,
            } => RpcError::errno(Errno::EINVAL, cause)
                .field(field)
                .remedy(remedy),
        }
    }
}

impl std::fmt::Debug for ModuleEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ModuleEntry").field(&self.kind).finish()
    }
}
