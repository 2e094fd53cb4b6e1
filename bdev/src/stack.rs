//! The common part of stacked devices (delay, fault, passthru, split): the claim on the base
//! device, and the properties taken over from it.

use std::sync::Arc;

use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::layer::ModuleQueue;
use crate::listing::{ListAnswer, ListQuery};
use crate::queue::Queue;
use crate::registry::{Claim, Holder, Registry, RegistryError, Usage};

/// A device on top of one other. It has the base's properties, except those that it overrides, and
/// except reservations, which it has only if it overrides [`Stacked::reserves`].
pub trait Stacked: Send + Sync + 'static {
    fn base(&self) -> &Base;

    fn name(&self) -> &str;

    fn product_name(&self) -> &'static str;

    fn uuid(&self) -> Uuid;

    /// The queue of one core on top of the base's.
    fn queue(self: Arc<Self>, base: ModuleQueue, pool: &Pool) -> Box<dyn Queue>;

    fn driver_specific(&self) -> serde_json::Value;

    fn geometry(&self) -> Geometry {
        self.base().geometry()
    }

    fn limits(&self) -> Limits {
        self.base().limits()
    }

    /// See [`Bdev::reserves`].
    fn reserves(&self) -> bool {
        false
    }

    /// See [`Bdev::allocated_blocks`]: those of the base, if all its blocks are the device's.
    fn allocated_blocks(&self) -> Option<u64> {
        self.base().module().allocated_blocks()
    }

    /// See [`Bdev::list_allocated`].
    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        self.base().module().list_allocated(query, answer);
    }

    fn present_blocks(&self) -> u64 {
        self.base().module().present_blocks()
    }

    fn least_blocks(&self) -> u64 {
        self.base().module().least_blocks()
    }

    fn forget_least(&self) -> u64 {
        self.base().module().forget_least()
    }
}

impl<T: Stacked> Bdev for T {
    fn name(&self) -> &str {
        Stacked::name(self)
    }

    fn product_name(&self) -> &'static str {
        Stacked::product_name(self)
    }

    fn uuid(&self) -> Uuid {
        Stacked::uuid(self)
    }

    fn geometry(&self) -> Geometry {
        Stacked::geometry(self)
    }

    fn limits(&self) -> Limits {
        Stacked::limits(self)
    }

    fn supports(&self, op: Op) -> Support {
        self.base().module().supports(op)
    }

    fn native_fua(&self) -> bool {
        self.base().module().native_fua()
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let base = self.base().claim.open_module(pool)?;
        Ok(self.queue(base, pool))
    }

    fn bases(&self) -> Vec<String> {
        vec![self.base().name().to_owned()]
    }

    fn losses(&self) -> u64 {
        self.base().module().losses()
    }

    fn cuts(&self) -> u64 {
        self.base().module().cuts()
    }

    fn allocated_blocks(&self) -> Option<u64> {
        Stacked::allocated_blocks(self)
    }

    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        Stacked::list_allocated(self, query, answer);
    }

    fn present_blocks(&self) -> u64 {
        Stacked::present_blocks(self)
    }

    fn least_blocks(&self) -> u64 {
        Stacked::least_blocks(self)
    }

    fn forget_least(&self) -> u64 {
        Stacked::forget_least(self)
    }

    fn reserves(&self) -> bool {
        Stacked::reserves(self)
    }

    fn driver_specific(&self) -> serde_json::Value {
        Stacked::driver_specific(self)
    }
}

/// The base device of a stacked device, claimed exclusively until this is dropped.
pub struct Base {
    claim: Claim,
}

impl Base {
    /// Claims `base` exclusively for the devices named `uppers`, which are made on it.
    pub fn claim(
        registry: &Registry,
        base: &str,
        uppers: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Self, RegistryError> {
        let holder = Holder::Bdevs(uppers.into_iter().map(Into::into).collect());
        let claim = registry.claim(base, holder, Usage::Exclusive)?;
        Ok(Self { claim })
    }

    pub fn name(&self) -> &str {
        self.claim.layer().name()
    }

    pub fn uuid(&self) -> Uuid {
        self.module().uuid()
    }

    /// Returns the base's geometry as announced: its module may have fewer blocks by now.
    pub fn geometry(&self) -> Geometry {
        self.claim.layer().geometry()
    }

    pub fn limits(&self) -> Limits {
        self.module().limits()
    }

    /// The base's limits for a device that holds I/O back: it has no zero-copy reads, and executes
    /// no I/O synchronously.
    pub fn limits_of_held_io(&self) -> Limits {
        Limits {
            zero_copy_blocks: 0,
            immediate: false,
            is_sync: false,
            ..self.limits()
        }
    }

    pub fn is_gone(&self) -> bool {
        self.claim.layer().is_gone()
    }

    pub fn module(&self) -> &dyn Bdev {
        &**self.claim.layer().module()
    }
}

/// The UUID of a stacked device: `given`, or a version 5 UUID of the base's UUID and `name`. The
/// latter is the same after a restart, so that hosts recognize the device.
pub(crate) fn derived_uuid(given: Option<Uuid>, base: Uuid, name: &str) -> Uuid {
    given.unwrap_or_else(|| Uuid::new_v5(&base, name.as_bytes()))
}
