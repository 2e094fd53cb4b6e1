//! `bdev_nvme_get_controllers`.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_remote::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::no_controller;
use crate::engine::Engine;
use crate::remotes::Remote;
use crate::rpc::{Method, Registry, RpcError};

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetControllers>();
}

struct GetControllers;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetParams {
    /// All unless given.
    name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Attached {
    name: String,
    /// One: a controller has one path here.
    ctrlrs: Vec<Controller>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Controller {
    /// `enabled`, `resetting` (it is being connected), `failed` or `deleting`.
    state: &'static str,
    trid: Trid,
    cntlid: u16,
    host: Host,
    /// Our own, all that follow: its devices.
    bdevs: Vec<String>,
    /// I/O queues granted: each core takes one for each device that it uses.
    io_queues: u16,
    /// Times that it was connected, and connections that ended with what may not have been flushed.
    connects: u64,
    losses: u64,
    /// It has been away for longer than I/O waits.
    away: bool,
    /// Times that it fell back to TCP, and returned to RDMA.
    #[serde(skip_serializing_if = "Option::is_none")]
    fallbacks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    returns: Option<u64>,
    /// Why it is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Namespaces that are not used, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<Refused>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Trid {
    /// That in use.
    trtype: String,
    adrfam: &'static str,
    traddr: String,
    trsvcid: String,
    subnqn: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Host {
    nqn: String,
    addr: String,
    svcid: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Refused {
    bdev: String,
    why: String,
}

impl Controller {
    fn of(remote: &Remote) -> Controller {
        let (attachment, wanted) = (&remote.attachment, &remote.wanted);
        let (status, devices) = (attachment.status(), attachment.devices());
        let changed = devices.iter().filter_map(|device| {
            let why = device.refusal()?;
            Some((device.name().to_owned(), why))
        });
        let refused = changed.chain(attachment.refusals());
        Controller {
            state: status.state.word(),
            trid: Trid {
                trtype: status.transport.to_string(),
                adrfam: if wanted.address.is_ipv4() {
                    "IPv4"
                } else {
                    "IPv6"
                },
                traddr: wanted.host.clone(),
                trsvcid: wanted.address.port().to_string(),
                subnqn: wanted.subnqn.to_string(),
            },
            cntlid: status.info.cntlid,
            host: Host {
                nqn: attachment.config().options.hostnqn.to_string(),
                addr: wanted
                    .hostaddr
                    .map_or_else(String::new, |ip| ip.to_string()),
                svcid: String::new(),
            },
            bdevs: devices.iter().map(|d| d.name().to_owned()).collect(),
            io_queues: status.io_queues,
            connects: status.connects,
            losses: status.losses,
            away: status.away,
            fallbacks: status.paths.as_ref().map(|counts| counts.fallbacks),
            returns: status.paths.as_ref().map(|counts| counts.returns),
            error: match &status.state {
                State::Live | State::Closed => None,
                _ if status.causes.is_empty() => None,
                _ => Some(status.causes),
            },
            refused: refused.map(|(bdev, why)| Refused { bdev, why }).collect(),
        }
    }
}

impl Method<Engine> for GetControllers {
    const NAME: &'static str = "bdev_nvme_get_controllers";
    const ABOUT: &'static str =
        "Lists attached controllers of other targets, and how each is connected.";
    type Params = GetParams;
    type Reply = Vec<Attached>;

    async fn apply(params: GetParams, on: Rc<Engine>) -> Result<Vec<Attached>, RpcError> {
        let mut all = on.remotes.list();
        if let Some(name) = &params.name {
            all.retain(|(known, _)| known == name);
            if all.is_empty() {
                return Err(no_controller(name));
            }
        }
        let attached = |(name, remote): (String, Rc<Remote>)| Attached {
            name,
            ctrlrs: vec![Controller::of(&remote)],
        };
        Ok(all.into_iter().map(attached).collect())
    }
}
