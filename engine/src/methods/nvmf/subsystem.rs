//! `nvmf_create_subsystem`, `nvmf_delete_subsystem`, `nvmf_get_subsystems`: subsystems.

use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::{
    ControllerModel, MAX_CNTLID, NamespaceEntry, Subsystem, SubsystemConfig, SubsystemKind,
    SubsystemOptions, Target,
};
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use super::address::AddressReply;
use super::namespace::hex;
use super::{
    PATIENCE, any_subsystem, check_target, check_target_of_subsystem, key, nvm_subsystem, refusal,
    wait_until,
};
use crate::config::Personality;
use crate::config::host_keys::HostKeyNames;
use crate::journal::is_declaring;
use crate::refusal::OrRefuse;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::subsystems::CREATE_SUBSYSTEM;
use crate::store::{Change, Edit};
use crate::values::flattened;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateSubsystem>()
        .add::<DeleteSubsystem>()
        .add::<GetSubsystems>();
}

pub struct CreateSubsystem;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct CreateSubsystemParams {
    /// NQN of the new subsystem, at most 223 bytes.
    pub nqn: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// Must be empty: the extended discovery log is not supported.
    pub admin_label: Option<String>,
    /// Maximum number of namespaces, and the largest namespace id; 0: 32. With ana_reporting, Linux
    /// hosts need 36 bytes of max_io_size per namespace and disable ANA if that is exceeded: 3640
    /// fit 128 KiB, 29126 fit 1 MiB.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub max_namespaces: u32,
    /// 0 or the default that SPDK saves: deallocation is limited only by the size of the device.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub dmrsl: u32,
    /// 0 or the default that SPDK saves: the target sets the limit of Write Zeroes.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub wzsl: u8,
    /// Must be false: commands are never passed through to the device.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub passthrough: bool,
    /// Must be false: one host cannot reset the subsystem for all hosts.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub enable_nssr: bool,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: SubsystemOptions,
}

flattened!(CreateSubsystemParams, options);

/// SPDK's defaults. Every configuration that it saves has them, so they are not a request.
const SAVED_DMRSL: u32 = 2_097_152;
const SAVED_WZSL: u8 = 12;

/// Default serial number, derived from the NQN. Stable per name and distinct between names, because
/// hosts distinguish devices by it.
pub fn derived_serial_number(nqn: &str) -> String {
    let digest = Uuid::new_v5(&Uuid::NAMESPACE_OID, nqn.as_bytes())
        .simple()
        .to_string();
    format!("NCR{}", digest[..17].to_ascii_uppercase())
}

impl Method<Engine> for CreateSubsystem {
    const NAME: &'static str = CREATE_SUBSYSTEM;
    const ABOUT: &'static str = "Makes a subsystem.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = CreateSubsystemParams;
    type Reply = bool;

    async fn apply(params: CreateSubsystemParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let label = params.admin_label.as_deref().unwrap_or_default();
        for (field, asked, why) in [
            (
                "admin_label",
                !label.is_empty(),
                "the extended discovery log, which shows it, is not kept",
            ),
            (
                "dmrsl",
                ![0, SAVED_DMRSL].contains(&params.dmrsl),
                "deallocation has no limit of its own",
            ),
            (
                "wzsl",
                ![0, SAVED_WZSL].contains(&params.wzsl),
                "the limit of Write Zeroes is the same for all subsystems",
            ),
            (
                "passthrough",
                params.passthrough,
                "commands are not passed on to devices",
            ),
            (
                "enable_nssr",
                params.enable_nssr,
                "a host cannot reset the subsystem",
            ),
        ] {
            if asked {
                return Err(RpcError::errno(Errno::ENOTSUP, why)
                    .field(field)
                    .remedy("leave it out"));
            }
        }
        let nqn = Nqn::new(&params.nqn).map_err(|error| {
            refusal::failed(
                format!("Unable to create subsystem {}", params.nqn),
                error.to_string(),
            )
            .field("nqn")
        })?;
        let mut options = params.options;
        if engine.personality == Personality::Nacre {
            let derived = || derived_serial_number(nqn.as_str());
            options.serial_number.get_or_insert_with(derived);
        }
        let (min, max) = options.cntlids();
        if min == 0 || min > max || max > MAX_CNTLID {
            return Err(RpcError::invalid_params_text(format!(
                "Invalid cntlid range [{min}-{max}]"
            ))
            .cause(format!("it must lie within 1..={MAX_CNTLID}"))
            .field("min_cntlid"));
        }
        let config = SubsystemConfig {
            max_namespaces: match params.max_namespaces {
                0 => SubsystemConfig::DEFAULT_MAX_NAMESPACES,
                most => most,
            },
            ..SubsystemConfig::with(nqn.clone(), options)
        };
        let record = record_of(&config);
        let plane = engine.plane()?;
        plane.target.create_subsystem(config).or_refuse()?;
        let mut change = Change::put(key::subsystem(&nqn), Self::NAME, record);
        // Drops settings that RPC made about a file-declared subsystem of this name: this call is
        // complete.
        let file_settings = key::allow_any_host(&nqn);
        if !is_declaring() && engine.journal.find(&file_settings).is_some() {
            change = change.and(Change::remove(file_settings));
        }
        let stored = engine.journal.commit(change).await;
        if let Err(refused) = stored {
            plane.target.delete_subsystem(&nqn).or_refuse()?;
            return Err(refused);
        }
        engine.notes.send("nvmf_subsystem_add", nqn.as_str());
        Ok(true)
    }
}

fn record_of(config: &SubsystemConfig) -> serde_json::Value {
    let mut record = json!({
        "nqn": config.nqn.as_str(),
        "allow_any_host": config.allow_any_host,
        "serial_number": config.serial_number,
        "model_number": config.model_number,
        "max_namespaces": config.max_namespaces,
        "min_cntlid": config.min_cntlid,
        "max_cntlid": config.max_cntlid,
        "ana_reporting": config.ana_reporting,
    });
    // Written only if static, because SPDK, which may load the saved configuration, does not know
    // the parameter.
    if let Some(model) = non_default_model(config) {
        record["controller_model"] = json!(model);
    }
    record
}

/// `None` for dynamic controllers, the default.
fn non_default_model(config: &SubsystemConfig) -> Option<ControllerModel> {
    let model = config.controller_model;
    (model != ControllerModel::default()).then_some(model)
}

pub struct DeleteSubsystem;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteSubsystemParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

impl Method<Engine> for DeleteSubsystem {
    const NAME: &'static str = "nvmf_delete_subsystem";
    const ABOUT: &'static str =
        "Deletes a subsystem with its namespaces and listeners, and disconnects its hosts.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = DeleteSubsystemParams;
    type Reply = bool;

    async fn apply(params: DeleteSubsystemParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        check_target_of_subsystem(params.tgt_name.as_deref())?;
        let found = nvm_subsystem(&plane, None, &params.nqn);
        let subsystem = match (found, Nqn::new(&params.nqn)) {
            (Ok(subsystem), _) => Some(subsystem),
            // A subsystem that could not be restored can be deleted.
            (Err(_), Ok(nqn)) if engine.journal.find(&key::subsystem(&nqn)).is_some() => None,
            (Err(refused), _) => return Err(refused),
        };
        let nqn = Nqn::new(&params.nqn)
            .map_err(|error| RpcError::invalid_params(error.to_string()).field("nqn"))?;
        let own = key::subsystem(&nqn);
        // Records go first: after a crash in between, the subsystem must not return.
        engine
            .journal
            .commit(Change(vec![
                Edit::RemoveAll(key::below(&own)),
                Edit::Remove(own),
            ]))
            .await?;
        let Some(subsystem) = subsystem else {
            return Ok(true);
        };
        let devices: Vec<_> = subsystem
            .namespaces()
            .iter()
            .map(|n| Arc::downgrade(&n.namespace))
            .collect();
        drop(subsystem);
        let deleted = plane.target.delete_subsystem(&nqn).or_refuse()?;
        engine.listeners.failover_tests.forget(&nqn);
        // A host command may have stored a reservation since the records were removed.
        let below = key::below(&key::subsystem(&nqn));
        if !engine.journal.below(&below).is_empty() {
            let change = Change(vec![Edit::RemoveAll(below)]);
            engine.journal.commit(change).await?;
        }
        engine.notes.send("nvmf_subsystem_remove", nqn.as_str());
        if !wait_until(PATIENCE, || deleted.controllers().is_empty()).await {
            let left = deleted.controllers().len();
            return Err(RpcError::errno(
                Errno::ETIMEDOUT,
                format!(
                    "the subsystem is deleted, but {left} of its controllers still have I/O under way"
                ),
            ));
        }
        drop(deleted);
        // The devices are free once the reactors have closed their queues.
        wait_until(PATIENCE, || devices.iter().all(|d| d.upgrade().is_none())).await;
        Ok(true)
    }
}

pub struct GetSubsystems;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetSubsystemsParams {
    /// Only this subsystem; all when left out.
    pub nqn: Option<String>,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct SubsystemReply {
    nqn: String,
    /// Unique name of the discovery subsystem, if it has one. Hosts can connect by this or by the
    /// well-known name.
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_nqn: Option<String>,
    /// `NVMe` or `Discovery`.
    subtype: &'static str,
    listen_addresses: Vec<AddressReply>,
    allow_any_host: bool,
    hosts: Vec<HostReply>,
    #[serde(flatten)]
    nvm: Option<NvmReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct HostReply {
    nqn: String,
    #[serde(flatten)]
    keys: HostKeyNames,
}

/// Fields of NVM subsystems.
#[derive(Debug, Serialize, JsonSchema)]
struct NvmReply {
    serial_number: String,
    model_number: String,
    max_namespaces: u32,
    passthrough: bool,
    min_cntlid: u16,
    max_cntlid: u16,
    /// Present only if `static`.
    #[serde(skip_serializing_if = "Option::is_none")]
    controller_model: Option<ControllerModel>,
    dmrsl: u32,
    wzsl: u8,
    namespaces: Vec<NamespaceReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct NamespaceReply {
    nsid: u32,
    bdev_name: String,
    /// Same as `bdev_name`, for older clients.
    name: String,
    nguid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    eui64: Option<String>,
    uuid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    anagrpid: Option<u32>,
}

impl Method<Engine> for GetSubsystems {
    const NAME: &'static str = "nvmf_get_subsystems";
    const ABOUT: &'static str = "Lists the subsystems, the discovery subsystem first.";
    const CLASS: Class = Class::Read;
    type Params = GetSubsystemsParams;
    type Reply = Vec<SubsystemReply>;

    async fn apply(
        params: GetSubsystemsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<SubsystemReply>, RpcError> {
        let plane = engine.plane()?;
        check_target_of_subsystem(params.tgt_name.as_deref())?;
        if let Some(nqn) = &params.nqn {
            let one = any_subsystem(&plane, None, nqn)?;
            return Ok(vec![describe(&one, &plane.target)]);
        }
        let target = &plane.target;
        let mut all = vec![describe(target.discovery(), target)];
        all.extend(target.subsystems().iter().map(|s| describe(s, target)));
        Ok(all)
    }
}

fn describe(subsystem: &Subsystem, target: &Target) -> SubsystemReply {
    let config = &subsystem.config;
    let namespace = |entry: NamespaceEntry| {
        let ids = entry.namespace.ids;
        NamespaceReply {
            nsid: entry.namespace.nsid,
            name: entry.bdev_name.clone(),
            bdev_name: entry.bdev_name,
            nguid: hex(&ids.nguid),
            eui64: (ids.eui64 != [0; 8]).then(|| hex(&ids.eui64)),
            uuid: ids.uuid.to_string(),
            anagrpid: config.ana_reporting.then_some(entry.namespace.ana_group()),
        }
    };
    let nvm = || NvmReply {
        serial_number: config.serial_number.clone(),
        model_number: config.model_number.clone(),
        max_namespaces: config.max_namespaces,
        passthrough: false,
        min_cntlid: config.min_cntlid,
        max_cntlid: config.max_cntlid,
        controller_model: non_default_model(config),
        dmrsl: 0,
        wzsl: 0,
        namespaces: subsystem.namespaces().into_iter().map(namespace).collect(),
    };
    let is_nvm = subsystem.kind == SubsystemKind::Nvm;
    let unique = target.unique_discovery_nqn().filter(|_| !is_nvm);
    SubsystemReply {
        nqn: subsystem.nqn().to_string(),
        unique_nqn: unique.map(|nqn| nqn.to_string()),
        subtype: if is_nvm { "NVMe" } else { "Discovery" },
        listen_addresses: subsystem
            .listeners()
            .iter()
            .map(|l| AddressReply::new(l.transport, &l.address))
            .collect(),
        allow_any_host: subsystem.allows_any_host(),
        hosts: subsystem
            .hosts()
            .into_iter()
            .map(|nqn| {
                let keys = subsystem.host_keys(&nqn);
                let (dhchap_key, dhchap_ctrlr_key) = keys.map_or((None, None), |k| k.names());
                HostReply {
                    nqn: nqn.to_string(),
                    keys: HostKeyNames {
                        dhchap_key,
                        dhchap_ctrlr_key,
                        psk: subsystem.host_psk(&nqn).and_then(|key| key.name()),
                        concat: subsystem.host_must_concat(&nqn).then_some(true),
                    },
                }
            })
            .collect(),
        nvm: is_nvm.then(nvm),
    }
}
