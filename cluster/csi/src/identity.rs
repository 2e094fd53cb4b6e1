//! `csi.v1.Identity`: what this driver is, and whether it is ready.

use std::fmt;

use tonic::Status;

use crate::DRIVER_NAME;
use crate::messages::BoolValue;
use crate::messages::identity::{
    ExpansionKind, GetPluginCapabilitiesResponse, GetPluginInfoResponse, PluginCapability,
    PluginFeature, ProbeResponse, Service, ServiceKind, VolumeExpansion,
};

type Check = Box<dyn Fn() -> Result<bool, Status> + Send + Sync>;

pub struct Identity {
    is_ready: Check,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

impl Identity {
    /// `is_ready` is the answer to `Probe`: false while the services of this process cannot work
    /// yet. An error: they cannot, and a restart of the driver may help.
    pub fn new(is_ready: impl Fn() -> Result<bool, Status> + Send + Sync + 'static) -> Self {
        Self {
            is_ready: Box::new(is_ready),
        }
    }

    pub(crate) fn info(&self) -> GetPluginInfoResponse {
        GetPluginInfoResponse {
            name: DRIVER_NAME.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [("interface".to_owned(), "1.13".to_owned())].into(),
        }
    }

    /// The controller service, and online expansion. The same in a process without a controller:
    /// the controller is another process.
    pub(crate) fn capabilities(&self) -> GetPluginCapabilitiesResponse {
        let service = PluginFeature::Service(Service {
            kind: ServiceKind::Controller.into(),
        });
        let expansion = PluginFeature::VolumeExpansion(VolumeExpansion {
            kind: ExpansionKind::Online.into(),
        });
        let features = [service, expansion];
        GetPluginCapabilitiesResponse {
            capabilities: features
                .map(|feature| PluginCapability {
                    feature: Some(feature),
                })
                .into(),
        }
    }

    pub(crate) fn probe(&self) -> Result<ProbeResponse, Status> {
        let value = (self.is_ready)()?;
        Ok(ProbeResponse {
            ready: Some(BoolValue { value }),
        })
    }
}
