//! [`Properties`]: the attributes and limits of a controller, as read when it was initialised.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::identify::controller::Oncs;
use nacre_nvmf_wire::registers::Version;

use crate::data::SglSupport;
use crate::function::Function;
use crate::info::ControllerInfo;
use crate::link::Grant;
use crate::memory::MemoryError;
use crate::ring::{Doorbell, Rings, Shadows};

/// Attributes read while the controller was initialised, and values derived from them.
#[derive(Default)]
pub(crate) struct Properties {
    pub info: ControllerInfo,
    pub version: Version,
    /// Doorbell stride in bytes (CAP.DSTRD).
    pub stride: u32,
    /// Most I/O queue pairs.
    pub queues: u16,
    /// Entries of an I/O queue.
    pub entries: u16,
    /// Vectors in use; vector 0 is the admin queue's.
    pub vectors: u16,
    pub sgl: Option<SglSupport>,
    /// `None`: the controller has no shadow doorbells (Doorbell Buffer Config).
    pub shadows: Option<Arc<Shadows>>,
    /// Bytes of memory for the PRP or SGL list of one command.
    pub list_bytes: usize,
    /// Most bytes of data of a command.
    pub max_transfer: u32,
    pub page_bytes_min: u64,
    pub awupf: u16,
    pub acwu: u16,
    pub oncs: Oncs,
    pub aerl: u8,
    pub rtd3e: Duration,
    /// Delays before a retry, indexed by CRD: none, CRDT1 to CRDT3.
    pub delays: [Duration; 4],
    // The limits of commands that MDTS does not limit, as in CNS 06h.
    pub wzsl: u8,
    pub vsl: u8,
    pub dmrsl: u32,
    pub dmsl: u64,
    pub elpe: u8,
    pub warning_kelvin: u16,
}

impl Properties {
    /// Allocates memory for queue pair `qid` and returns its resources.
    pub(crate) fn grant(
        &self,
        function: &Arc<dyn Function>,
        qid: u16,
    ) -> Result<Grant, MemoryError> {
        let rings = Rings::allocate(function, self.entries, self.list_bytes)?;
        Ok(self.regrant(function, qid, Arc::new(rings)))
    }

    /// The resources of queue pair `qid` with existing memory.
    pub(crate) fn regrant(
        &self,
        function: &Arc<dyn Function>,
        qid: u16,
        rings: Arc<Rings>,
    ) -> Grant {
        Grant {
            function: Arc::clone(function),
            rings,
            sq: Doorbell::submission(qid, self.stride),
            cq: Doorbell::completion(qid, self.stride),
            shadows: self.shadows.clone(),
            sgl: self.sgl.unwrap_or(SglSupport::No),
            vector: None,
            key: function.slot(),
            delays: self.delays,
        }
    }
}
