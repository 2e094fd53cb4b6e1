//! `bdev_nvme_get_controllers`: remote controllers and local drives with their state.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_nvmf::address::adrfam;
use nacre_nvmf_remote::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::no_controller;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Registry, RpcError};
use crate::services::Engine;
use crate::services::drives::{Drive, state_word};
use crate::services::remotes::{Remote, RemotePath};

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetNvmeControllers>();
}

pub struct GetNvmeControllers;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NvmeControllersParams {
    /// Default: all controllers.
    pub name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct NvmeControllerReply {
    name: String,
    /// One element for each path.
    ctrlrs: Vec<Controller>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Controller {
    /// `enabled`, `resetting` (connecting), `disabled`, `failed` or `deleting`.
    state: &'static str,
    trid: Trid,
    cntlid: u16,
    /// Absent for a drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<HostAddressReply>,
    /// Nacre extension, like all that follow: devices of the controller.
    bdevs: Vec<String>,
    /// I/O queues granted. For a remote controller, each core uses one per device; for a drive, one
    /// for all devices.
    io_queues: u16,
    /// Connections made. `losses` counts connections that ended while unflushed writes could be
    /// lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    connects: Option<u64>,
    losses: u64,
    /// The controller has been away for longer than I/O waits; for a drive: it was pulled.
    away: bool,
    /// Identity of the drive, and counters of recoveries.
    #[serde(skip_serializing_if = "Option::is_none")]
    drive: Option<Value>,
    /// Switches from RDMA to TCP; `returns` counts switches back to RDMA.
    #[serde(skip_serializing_if = "Option::is_none")]
    fallbacks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    returns: Option<u64>,
    /// Why the controller is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Namespaces that are not used, with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<RefusedReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Trid {
    /// The transport in use.
    trtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    adrfam: Option<&'static str>,
    traddr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subnqn: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct HostAddressReply {
    nqn: String,
    addr: String,
    svcid: String,
    /// Always false: a controller is always shut down with notification.
    no_shn_notification: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RefusedReply {
    bdev: String,
    why: String,
}

impl Controller {
    fn of(remote: &Remote, path: &RemotePath) -> Self {
        let (attachment, wanted) = (&remote.attachment, &path.wanted);
        let (status, devices) = (path.path.status(), attachment.devices());
        let changed = match status.state {
            State::Live => attachment.refusals_of(&path.path),
            _ => Vec::new(),
        };
        let refused = changed.into_iter().chain(attachment.refusals());
        Self {
            state: status.state.word(),
            trid: Trid {
                trtype: status.transport.to_string(),
                adrfam: Some(adrfam(wanted.address.ip())),
                traddr: wanted.host.clone(),
                trsvcid: Some(wanted.address.port().to_string()),
                subnqn: Some(wanted.subnqn.to_string()),
            },
            cntlid: status.info.cntlid,
            host: Some(HostAddressReply {
                nqn: path.path.config().options.hostnqn.to_string(),
                addr: wanted
                    .hostaddr
                    .map_or_else(String::new, |ip| ip.to_string()),
                svcid: String::new(),
                no_shn_notification: false,
            }),
            bdevs: devices.iter().map(|d| d.name().to_owned()).collect(),
            io_queues: status.io_queues,
            connects: Some(status.connects),
            losses: status.losses,
            away: status.away,
            drive: None,
            fallbacks: status.paths.as_ref().map(|counts| counts.fallbacks),
            returns: status.paths.as_ref().map(|counts| counts.returns),
            error: match &status.state {
                State::Live | State::Closed => None,
                _ if status.causes.is_empty() => None,
                _ => Some(status.causes),
            },
            refused: refused
                .map(|(bdev, why)| RefusedReply { bdev, why })
                .collect(),
        }
    }

    fn of_drive(name: &str, drive: &Drive) -> Self {
        let (info, status) = (drive.controller.info(), drive.controller.status());
        let refused = drive.refused().into_iter();
        Self {
            state: state_word(&status.state),
            trid: Trid {
                trtype: "PCIe".to_owned(),
                adrfam: None,
                traddr: drive.address.clone(),
                trsvcid: None,
                subnqn: None,
            },
            cntlid: info.cntlid,
            host: None,
            bdevs: drive
                .devices()
                .iter()
                .map(|d| d.name().to_owned())
                .collect(),
            io_queues: info.io_queues,
            connects: None,
            losses: status.losses,
            away: status.state == nacre_bdev_nvme::State::Removed,
            fallbacks: None,
            returns: None,
            error: match &status.state {
                nacre_bdev_nvme::State::Failed { reason } => Some(reason.clone()),
                _ => None,
            },
            refused: refused
                .map(|(nsid, why)| RefusedReply {
                    bdev: format!("{name}n{nsid}"),
                    why,
                })
                .collect(),
            drive: Some(json!({ "info": info, "status": status })),
        }
    }
}

impl Method<Engine> for GetNvmeControllers {
    const NAME: &'static str = "bdev_nvme_get_controllers";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Lists attached controllers, of other targets and of drives of this machine, and how each is.";
    const CLASS: Class = Class::Read;
    type Params = NvmeControllersParams;
    type Reply = Vec<NvmeControllerReply>;

    async fn apply(
        params: NvmeControllersParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<NvmeControllerReply>, RpcError> {
        let remotes = engine
            .remotes
            .list()
            .into_iter()
            .map(|(name, remote)| NvmeControllerReply {
                name,
                ctrlrs: remote
                    .paths()
                    .iter()
                    .map(|path| Controller::of(&remote, path))
                    .collect(),
            });
        let drives = engine
            .drives
            .list()
            .into_iter()
            .map(|(name, drive)| NvmeControllerReply {
                ctrlrs: vec![Controller::of_drive(&name, &drive)],
                name,
            });
        let mut all: Vec<NvmeControllerReply> = remotes.chain(drives).collect();
        if let Some(name) = &params.name {
            all.retain(|attached| attached.name == *name);
            if all.is_empty() {
                return Err(no_controller(name).renumbered(Errno::EINVAL));
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}
