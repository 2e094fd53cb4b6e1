//! A namespace as a bdev.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::controller::Controller;

pub struct NvmeBdev {
    name: String,
    nsid: u32,
    uuid: Uuid,
    controller: Arc<Controller>,
    blocks: AtomicU64,
    block_size: u32,
    limits: Limits,
}

impl NvmeBdev {
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    pub fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }
}

impl Bdev for NvmeBdev {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            blocks: self.blocks.load(Ordering::Relaxed),
            physical_block_size: self.block_size,
        }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::Read | Op::Write | Op::Flush => Support::Native,
            _ => Support::No,
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Err(OpenError {
            bdev: self.name.clone(),
            what: "open a queue of a controller that is not attached".to_owned(),
            source: std::io::ErrorKind::NotConnected.into(),
        })
    }
}
