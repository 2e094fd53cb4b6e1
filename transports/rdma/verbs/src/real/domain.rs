//! [`Domain`]: a protection domain, which creates completion queues and shared receive queues.

use std::any::Any;
use std::sync::Arc;

use nacre_hugepages::RegisterHook;

use super::context::OpenDevice;
use super::pd::Pd;
use super::queue::{IbvCq, IbvSrq};
use crate::provider::{CompletionQueue, ProtectionDomain, SharedReceiveQueue};
use crate::types::{Access, DeviceAttributes, DeviceId, Registrations, VerbsError};

/// A protection domain, as the [`ProtectionDomain`] trait presents it.
pub(super) struct Domain {
    pub(super) pd: Arc<Pd>,
}

impl Domain {
    pub(super) fn new(device: Arc<OpenDevice>, access: Access) -> Result<Self, VerbsError> {
        let pd = Arc::new(Pd::new(device, access)?);
        Ok(Self { pd })
    }
}

impl ProtectionDomain for Domain {
    fn device(&self) -> DeviceId {
        self.pd.device.id
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.pd.device.attributes
    }

    fn access(&self) -> Access {
        self.pd.access
    }

    fn hook(&self) -> Arc<dyn RegisterHook> {
        Arc::clone(&self.pd) as Arc<dyn RegisterHook>
    }

    fn registrations(&self) -> Registrations {
        self.pd.registrations()
    }

    fn completion_queue(&self, entries: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(Arc::new(IbvCq::new(Arc::clone(&self.pd.device), entries)?))
    }

    fn shared_receive_queue(
        &self,
        entries: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let srq = IbvSrq::new(Arc::clone(&self.pd), entries, max_sge, limit)?;
        Ok(Arc::new(srq))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
