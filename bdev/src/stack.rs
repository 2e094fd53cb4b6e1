//! The claim on the base, which all modules on top of another device share.

use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::layer::ModuleQueue;
use crate::registry::{Claim, Holder, Registry, RegistryError, Usage};

/// The device below, for as long as this lives.
pub(crate) struct Base {
    claim: Claim,
}

impl Base {
    /// Claims `base` for the device `upper` that is made on it.
    pub fn claim(registry: &Registry, base: &str, upper: &str) -> Result<Base, RegistryError> {
        let claim = registry.claim(base, Holder::Bdev(upper.to_owned()), Usage::Exclusive)?;
        Ok(Base { claim })
    }

    pub fn name(&self) -> &str {
        self.claim.layer().name()
    }

    /// As the base is announced: that may be more than its module has by now.
    pub fn geometry(&self) -> Geometry {
        self.claim.layer().geometry()
    }

    pub fn limits(&self) -> Limits {
        self.module().limits()
    }

    /// For a device that keeps I/O, or changes its data, after the base completed it: nothing is
    /// lent, and nothing completes at its submission.
    pub fn limits_of_a_copy(&self) -> Limits {
        Limits {
            lend_blocks: 0,
            immediate: false,
            at_once: false,
            ..self.limits()
        }
    }

    pub fn supports(&self, op: Op) -> Support {
        self.module().supports(op)
    }

    pub fn native_fua(&self) -> bool {
        self.module().native_fua()
    }

    pub fn losses(&self) -> u64 {
        self.module().losses()
    }

    pub fn present_blocks(&self) -> u64 {
        self.module().present_blocks()
    }

    pub fn least_blocks(&self) -> u64 {
        self.module().least_blocks()
    }

    pub fn forget_least(&self) -> u64 {
        self.module().forget_least()
    }

    pub fn reserves(&self) -> bool {
        self.module().reserves()
    }

    pub fn is_gone(&self) -> bool {
        self.claim.layer().is_gone()
    }

    pub fn open(&self, pool: &Pool) -> Result<ModuleQueue, OpenError> {
        self.claim.open_module(pool)
    }

    fn module(&self) -> &dyn Bdev {
        &**self.claim.layer().module()
    }
}

/// The identity of a stacked device that was given none: the same every time it is made on the same
/// base under the same name, so that hosts know it again after a restart.
pub(crate) fn derived_uuid(given: Option<Uuid>, base: Uuid, name: &str) -> Uuid {
    given.unwrap_or_else(|| Uuid::new_v5(&base, name.as_bytes()))
}

impl Base {
    pub fn uuid(&self) -> Uuid {
        self.module().uuid()
    }
}

/// The methods of [`Bdev`] that a device on a `base` passes on unchanged.
macro_rules! as_the_base {
    () => {
        fn geometry(&self) -> $crate::Geometry {
            self.base.geometry()
        }

        fn supports(&self, op: $crate::Op) -> $crate::Support {
            self.base.supports(op)
        }

        fn native_fua(&self) -> bool {
            self.base.native_fua()
        }

        fn bases(&self) -> Vec<String> {
            vec![self.base.name().to_owned()]
        }

        fn losses(&self) -> u64 {
            self.base.losses()
        }

        fn present_blocks(&self) -> u64 {
            self.base.present_blocks()
        }

        fn least_blocks(&self) -> u64 {
            self.base.least_blocks()
        }

        fn forget_least(&self) -> u64 {
            self.base.forget_least()
        }
    };
}

pub(crate) use as_the_base;
