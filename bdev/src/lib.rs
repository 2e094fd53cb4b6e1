//! Block devices (bdevs): the trait [`Bdev`], the layer above every device, the registry, and some
//! modules. The modules need no other crate: null, malloc, delay, fault, passthru and split.
//!
//! ```text
//!   Registry   names, claims, events, removal          control plane
//!     └ Layer      one per device: checks, splits, emulates, limits, counts; a LayerQueue per core
//!         └ Bdev       a module: null, malloc, delay, fault, passthru, split, uring, …
//!             └ Queue      its I/O queue on one core
//! ```

#![forbid(unsafe_code)]

pub mod config;
pub mod conformance;
pub mod delay;
pub mod device;
mod due_queue;
pub mod fault;
mod immediate;
pub mod injection;
pub mod io;
pub mod layer;
pub mod listing;
pub mod malloc;
pub mod module;
pub mod null;
pub mod passthru;
pub mod pending;
pub mod qos;
pub mod queue;
pub mod registry;
pub mod reservation;
pub mod size;
pub mod split;
mod stack;
pub mod stats;

pub use config::{BLOCK_SIZES, ConfigError, is_block_size};
pub use device::{Bdev, Geometry, Limits, OpenError, Support};
pub use io::{Completion, Extents, Flags, Io, Op, Status, Token};
pub use layer::{Layer, LayerQueue, ModuleQueue};
pub use module::{MethodDoc, Module, Single};
pub use pending::Pending;
pub use queue::{Busy, Done, Queue};
pub use registry::{Claim, DeleteTicket, Event, Holder, Registry, RegistryError, Removal, Usage};
pub use size::Size;
pub use stack::{Base, Stacked};
