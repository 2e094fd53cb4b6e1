//! Devices for replicas: existing bdevs by name, or URIs of remote namespaces and drives, which are
//! attached.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_nvmf::address::{AddressError, Grammar};
use serde_json::json;
use tracing::warn;

use super::call;
use crate::rpc::RpcError;
use crate::rpc::client::to_json;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::drives::{DriveUri, DriveUriError};
use crate::services::nvme::ATTACH;
use crate::services::remotes::{attach_params, default_name};

/// Bdevs for new replicas, by their registered names: stored replicas must not depend on an alias.
/// [`Self::detach_attached`] detaches the controllers that were attached for them.
pub(super) struct FoundDevices {
    pub names: Vec<String>,
    /// Controllers that were attached for these devices.
    attached: Vec<String>,
}

impl FoundDevices {
    /// Resolves devices. `field` names the array parameter that lists them, for error messages.
    pub(super) async fn find(
        engine: &Rc<Engine>,
        given: &[String],
        field: &str,
    ) -> Result<Self, RpcError> {
        let mut devices = Self {
            names: Vec::new(),
            attached: Vec::new(),
        };
        for (at, name) in given.iter().enumerate() {
            let found = devices.add(engine, name, &format!("{field}[{at}]")).await;
            if let Err(refused) = found {
                devices.detach_attached(engine).await;
                return Err(refused);
            }
        }
        Ok(devices)
    }

    /// Resolves one device. `field` names the parameter.
    pub(super) async fn one(
        engine: &Rc<Engine>,
        given: &str,
        field: &str,
    ) -> Result<Self, RpcError> {
        let mut devices = Self {
            names: Vec::new(),
            attached: Vec::new(),
        };
        match devices.add(engine, given, field).await {
            Ok(()) => Ok(devices),
            Err(refused) => {
                devices.detach_attached(engine).await;
                Err(refused)
            }
        }
    }

    async fn add(&mut self, engine: &Rc<Engine>, given: &str, field: &str) -> Result<(), RpcError> {
        let name = match given.contains("://") {
            true if DriveUri::is_one(given) => self.attach_drive(engine, given, field).await?,
            true => self.attach(engine, given, field).await?,
            false => match engine.plane()?.bdevs.lookup(given) {
                Some(layer) => layer.name().to_owned(),
                None => return Err(crate::methods::replies::no_device(given).field(field)),
            },
        };
        if self.names.contains(&name) {
            return Err(RpcError::errno(
                Errno::EINVAL,
                format!("\"{name}\" is named twice: each replica has a device of its own"),
            )
            .field(field));
        }
        self.names.push(name);
        Ok(())
    }

    /// Attaches the namespace of a URI, unless it is attached already. Exactly one device must
    /// match.
    async fn attach(
        &mut self,
        engine: &Rc<Engine>,
        uri: &str,
        field: &str,
    ) -> Result<String, RpcError> {
        let refused = |e: AddressError| RpcError::invalid_params(e.to_string()).field(field);
        let uri = Grammar::NAMESPACE.parse(uri).map_err(refused)?;
        let subnqn = uri.subnqn.as_ref().map_or("", |nqn| nqn.as_str());
        let base = default_name(subnqn);
        let names = (1..).map(|n| match n {
            1 => base.clone(),
            n => format!("{base}-{n}"),
        });
        let mut chosen = String::new();
        for name in names {
            match engine.remotes.find(&name) {
                Some(remote)
                    if remote.paths().iter().any(|path| {
                        path.wanted.subnqn.as_str() == subnqn && path.wanted.host == uri.host
                    }) =>
                {
                    let devices = remote.attachment.devices();
                    if let [device] = devices.as_slice() {
                        return Ok(device.name().to_owned());
                    }
                }
                Some(_) => {}
                None => {
                    chosen = name;
                    break;
                }
            }
        }
        let params = attach_params(&uri, Some(chosen.clone()));
        let made = call(engine, ATTACH, to_json(&params)).await;
        let made = made.map_err(|refused| refused.field(field))?;
        self.attached.push(chosen);
        let made = made.as_array().into_iter().flatten();
        let mut made: Vec<String> = made.filter_map(|n| n.as_str().map(Into::into)).collect();
        match (made.pop(), made.len()) {
            (Some(device), 0) => Ok(device),
            (found, others) => Err(RpcError::errno(
                Errno::EINVAL,
                format!(
                    "{subnqn} has {} namespaces: a replica is on one",
                    others + usize::from(found.is_some())
                ),
            )
            .field(field)
            .remedy("name it with ?nsid= or ?uuid=")),
        }
    }

    /// Attaches the drive of a URI, unless it is attached already, and adds its namespace.
    async fn attach_drive(
        &mut self,
        engine: &Rc<Engine>,
        uri: &str,
        field: &str,
    ) -> Result<String, RpcError> {
        let uri: DriveUri = uri
            .parse()
            .map_err(|e: DriveUriError| RpcError::invalid_params(e.to_string()).field(field))?;
        if engine.drives.at(&uri.address).is_none() {
            let name = engine.drives.free_name(engine, DriveUri::NAME);
            let params = uri.attach_params(name.clone());
            let made = call(engine, ATTACH, to_json(&params)).await;
            made.map_err(|refused| refused.field(field))?;
            self.attached.push(name);
        }
        let drive = engine.drives.at(&uri.address);
        let devices = drive.map(|(_, drive)| drive.devices()).unwrap_or_default();
        let wanted = |nsid: u32| uri.nsid.is_none_or(|wanted| wanted == nsid);
        let fitting: Vec<_> = devices.iter().filter(|d| wanted(d.nsid())).collect();
        match fitting.as_slice() {
            [device] => Ok(device.name().to_owned()),
            others => Err(RpcError::errno(
                Errno::EINVAL,
                format!(
                    "{} namespaces of the drive at {} are meant: a replica is on one",
                    others.len(),
                    uri.address
                ),
            )
            .field(field)
            .remedy("name it with ?nsid=: bdev_nvme_get_controllers shows them")),
        }
    }

    /// Detaches the controllers again, if no replica was created.
    pub(super) async fn detach_attached(self, engine: &Rc<Engine>) {
        for name in self.attached {
            let params = json!({ "name": name });
            if let Err(error) = call(engine, "bdev_nvme_detach_controller", params).await {
                warn!(name, %error, "attached for a replica that was not made, and not detached");
            }
        }
    }
}
