//! Namespaces: `nvmf_subsystem_add_ns`, `_remove_ns`, `_set_ns_ana_group`, `nvmf_ns_add_host`,
//! `_remove_host`, and their removal and return with the device.
//!
//! A namespace's record includes its NSID and identifiers, so that hosts recognise it after a
//! restart. While its bdev is missing, the NSID stays reserved, and the namespace returns under it.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::Bdev;
use nacre_nvmf::subsystems::{NamespaceConfig, NamespaceIds, Subsystem, SubsystemError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{PATIENCE, host_nqn, key, nvm_subsystem, wait_until};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::reservations;
use crate::services::subsystems::{ADD_NAMESPACE, find_namespace, forget_namespace, named};
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AddNamespace>()
        .add::<RemoveNamespace>()
        .add::<SetAnaGroup>()
        .add::<AddNamespaceHost>()
        .add::<RemoveNamespaceHost>();
}

pub struct AddNamespace;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddNamespaceParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The namespace: its bdev and its identifiers.
    pub namespace: NamespaceParams,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamespaceParams {
    /// 0 or left out: the lowest free id.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nsid: u32,
    /// Name, alias or UUID of the device.
    pub bdev_name: String,
    /// 32 hexadecimal digits; default: the digits of the UUID.
    pub nguid: Option<String>,
    /// 16 hexadecimal digits.
    pub eui64: Option<String>,
    /// Default: the device's UUID.
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
    /// File for reservations that persist through power loss, in SPDK's format. Left out: the
    /// daemon's state, if it has one.
    pub ptpl_file: Option<String>,
    /// Default: the namespace id.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub anagrpid: u32,
    /// Visible only to hosts added with nvmf_ns_add_host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_auto_visible: bool,
    /// Accepted: devices have no metadata here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[allow(dead_code)]
    pub hide_metadata: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Method<Engine> for AddNamespace {
    const NAME: &'static str = ADD_NAMESPACE;
    const ABOUT: &'static str =
        "Adds a namespace on a block device to a subsystem; answers its id.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AddNamespaceParams;
    type Reply = u32;

    async fn apply(params: AddNamespaceParams, engine: Rc<Engine>) -> Result<u32, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let spec = params.namespace;
        let nqn = subsystem.nqn().clone();
        let device = plane
            .bdevs
            .get(&spec.bdev_name)
            .map_err(|e| refused_device(&e.to_string()))?
            .layer;
        let ids = identifiers(&spec, device.uuid())?;
        let nsid = choose_nsid(&engine, &subsystem, &spec, device.name(), &ids)?;
        let ana_group = (spec.anagrpid != 0).then_some(spec.anagrpid);
        let file = spec.ptpl_file.as_deref().filter(|file| !file.is_empty());
        let file = file.map(reservations::located).transpose()?;
        let file = file.as_deref();
        let reservations = reservations::initial(&engine, (&nqn, nsid, &ids), file)?;
        let config = NamespaceConfig {
            nsid: Some(nsid),
            bdev_name: device.name().to_owned(),
            backing: plane
                .backing(device.name(), format!("namespace {nsid} of {nqn}"))
                .map_err(|error| refused_device(&error.to_string()))?,
            ids,
            ana_group,
            auto_visible: !spec.no_auto_visible,
            reservations,
        };
        plane.target.add_namespace(&nqn, config).or_refuse()?;
        let mut namespace = json!({
            "nsid": nsid,
            "bdev_name": engine.volumes.lasting_name(device.name()),
            "nguid": hex(&ids.nguid),
            "uuid": ids.uuid,
            "no_auto_visible": spec.no_auto_visible,
        });
        if ids.eui64 != [0; 8] {
            namespace["eui64"] = hex(&ids.eui64).into();
        }
        if let Some(group) = ana_group {
            namespace["anagrpid"] = group.into();
        }
        if let Some(file) = file {
            namespace["ptpl_file"] = file.into();
        }
        let record = json!({ "nqn": nqn.as_str(), "namespace": namespace });
        let stored = engine
            .journal
            .commit(Change::put(key::namespace(&nqn, nsid), Self::NAME, record))
            .await;
        if let Err(refused) = stored {
            subsystem.remove_namespace(nsid).or_refuse()?;
            return Err(refused);
        }
        if find_namespace(&subsystem, nsid).is_err() {
            // The device went away while the record was being stored, so the removal found no
            // record to mark.
            let cause = format!("device \"{}\" went away", spec.bdev_name);
            let away = RpcError::errno(Errno::ENODEV, cause);
            engine
                .journal
                .restored(&key::namespace(&nqn, nsid), Err(away));
        }
        engine
            .notes
            .send("nvmf_namespace_change", named(&nqn, nsid));
        Ok(nsid)
    }
}

fn refused_device(cause: &str) -> RpcError {
    RpcError::invalid_params(cause)
        .field("namespace.bdev_name")
        .remedy("bdev_get_bdevs lists the devices and their users")
}

fn identifiers(spec: &NamespaceParams, own: Uuid) -> Result<NamespaceIds, RpcError> {
    let mut ids = NamespaceIds::from_uuid(spec.uuid.unwrap_or(own));
    let wrong = |field: &str, cause: String| {
        RpcError::invalid_params_text(format!("Invalid {field}"))
            .cause(cause)
            .field(format!("namespace.{field}"))
    };
    if ids.uuid.is_nil() {
        return Err(wrong("uuid", "the nil UUID identifies nothing".into())
            .remedy("leave it out to use the device's"));
    }
    if let Some(text) = &spec.nguid {
        ids.nguid = unhex(text)
            .ok_or_else(|| wrong("nguid", format!("\"{text}\" is not 32 hexadecimal digits")))?;
    }
    if let Some(text) = &spec.eui64 {
        ids.eui64 = unhex(text)
            .ok_or_else(|| wrong("eui64", format!("\"{text}\" is not 16 hexadecimal digits")))?;
    }
    Ok(ids)
}

/// Upper-case hexadecimal digits, as in SPDK.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02X}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut out = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(out)
}

/// The requested NSID, or the lowest free one. NSIDs in records of namespaces with a missing bdev
/// are not free.
fn choose_nsid(
    engine: &Engine,
    subsystem: &Subsystem,
    spec: &NamespaceParams,
    bdev: &str,
    ids: &NamespaceIds,
) -> Result<u32, RpcError> {
    let (nqn, max) = (subsystem.nqn(), subsystem.config.max_namespaces);
    let live: Vec<u32> = subsystem
        .namespaces()
        .iter()
        .map(|n| n.namespace.nsid)
        .collect();
    let kept = |nsid: u32| {
        engine
            .journal
            .find(&key::namespace(nqn, nsid))
            .filter(|_| !live.contains(&nsid))
    };
    if spec.nsid == 0 {
        let free = |nsid: &u32| !live.contains(nsid) && kept(*nsid).is_none();
        let none = || {
            SubsystemError::NamespacesFull {
                nqn: nqn.to_string(),
                max,
            }
            .refusal()
        };
        return (1..=max).find(free).ok_or_else(none);
    }
    let Some(entry) = kept(spec.nsid) else {
        return Ok(spec.nsid);
    };
    let params = &entry.record.params;
    let text = |at: &str| {
        params
            .pointer(at)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let (its_device, its_uuid) = (text("/namespace/bdev_name"), text("/namespace/uuid"));
    // The record may name the device by an alias or by its UUID.
    let same_device = its_device == bdev || its_device == spec.bdev_name;
    if same_device && its_uuid == ids.uuid.to_string() {
        return Ok(spec.nsid);
    }
    Err(RpcError::invalid_params(format!(
        "namespace id {} is kept for device \"{its_device}\" (UUID {its_uuid}), which is away",
        spec.nsid
    ))
    .field("namespace.nsid")
    .remedy("take another id, or remove that namespace first"))
}

pub struct RemoveNamespace;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Namespace id, from 1.
    pub nsid: u32,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

impl Method<Engine> for RemoveNamespace {
    const NAME: &'static str = "nvmf_subsystem_remove_ns";
    const ABOUT: &'static str = "Takes a namespace from a subsystem.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveParams;
    type Reply = bool;

    async fn apply(params: RemoveParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, nsid) = (subsystem.nqn(), params.nsid);
        let own = key::namespace(nqn, nsid);
        let live = find_namespace(&subsystem, nsid);
        // A namespace whose device is away can be removed.
        if let (Err(refused), None) = (&live, engine.journal.find(&own)) {
            return Err(refused.clone());
        }
        engine.journal.commit(forget_namespace(&own)).await?;
        if let Ok(entry) = live {
            let device = Arc::downgrade(&entry.namespace);
            drop(entry);
            subsystem.remove_namespace(nsid).or_refuse()?;
            engine.notes.send("nvmf_namespace_change", named(nqn, nsid));
            // A host command may have stored a reservation since the record was removed.
            if engine.journal.find(&key::reservation(nqn, nsid)).is_some() {
                engine.journal.commit(forget_namespace(&own)).await?;
            }
            // The device is free once the reactors have closed their queues. Slow I/O delays the
            // reply for `PATIENCE` at most.
            wait_until(PATIENCE, || device.upgrade().is_none()).await;
        } else {
            subsystem.forget_reservation(nsid);
        }
        Ok(true)
    }
}

struct SetAnaGroup;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AnaGroupParams {
    /// NQN of the subsystem.
    nqn: String,
    /// Namespace id, from 1.
    nsid: u32,
    /// The ANA group: 1 to max_namespaces of the subsystem.
    anagrpid: u32,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
}

impl Method<Engine> for SetAnaGroup {
    const NAME: &'static str = "nvmf_subsystem_set_ns_ana_group";
    const ABOUT: &'static str =
        "Moves a namespace to another ANA group, whose states on the listeners count from then on.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = AnaGroupParams;
    type Reply = bool;

    async fn apply(params: AnaGroupParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, nsid, group) = (subsystem.nqn(), params.nsid, params.anagrpid);
        let before = subsystem
            .set_ana_group(nsid, group)
            .map_err(|error| match &error {
                SubsystemError::AnaGroupOutOfRange { max, .. } => {
                    let range = format!("groups are 1 to {max}, the subsystem's max_namespaces");
                    error.refusal().field("anagrpid").remedy(range)
                }
                _ => error.refusal(),
            })?;
        if before == group {
            return Ok(true);
        }
        let own = key::namespace(nqn, nsid);
        if let Some(entry) = engine.journal.find(&own) {
            let apart = key::ana_group(nqn, nsid);
            let change = if entry.durable {
                let mut record = entry.record.params;
                record["namespace"]["anagrpid"] = group.into();
                Change::put(own, AddNamespace::NAME, record).and(Change::remove(apart))
            } else {
                let record = json!({ "nqn": nqn.as_str(), "nsid": nsid, "anagrpid": group });
                Change::put(apart, Self::NAME, record)
            };
            let stored = engine.journal.commit(change).await;
            if let Err(refused) = stored {
                subsystem.set_ana_group(nsid, before).or_refuse()?;
                return Err(refused);
            }
        }
        engine.notes.send("nvmf_ana_change", nqn.to_string());
        Ok(true)
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamespaceHostParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Namespace id, from 1.
    pub nsid: u32,
    /// The host's NQN.
    pub host: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

pub struct AddNamespaceHost;

impl Method<Engine> for AddNamespaceHost {
    const NAME: &'static str = "nvmf_ns_add_host";
    const ABOUT: &'static str = "Shows a namespace that is not visible to all to a host.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = NamespaceHostParams;
    type Reply = bool;

    async fn apply(params: NamespaceHostParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, nsid, host) = (subsystem.nqn(), params.nsid, host_nqn(&params.host)?);
        match subsystem.add_namespace_host(nsid, &host) {
            // Idempotent as in SPDK, because configurations are loaded more than once.
            Err(SubsystemError::HostExists { .. }) => return Ok(true),
            added => added.or_refuse()?,
        }
        let record = json!({ "nqn": nqn.as_str(), "nsid": nsid, "host": host.as_str() });
        let stored = engine
            .journal
            .commit(Change::put(
                key::namespace_host(nqn, nsid, &host),
                Self::NAME,
                record,
            ))
            .await;
        if let Err(refused) = stored {
            subsystem.remove_namespace_host(nsid, &host).or_refuse()?;
            return Err(refused);
        }
        Ok(true)
    }
}

pub struct RemoveNamespaceHost;

impl Method<Engine> for RemoveNamespaceHost {
    const NAME: &'static str = "nvmf_ns_remove_host";
    const ABOUT: &'static str = "Hides a namespace from a host again.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = NamespaceHostParams;
    type Reply = bool;

    async fn apply(params: NamespaceHostParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, nsid, host) = (subsystem.nqn(), params.nsid, host_nqn(&params.host)?);
        let own = key::namespace_host(nqn, nsid, &host);
        match find_namespace(&subsystem, nsid) {
            Ok(entry) if entry.auto_visible => {
                return Err(SubsystemError::AutoVisible { nsid }.refusal());
            }
            Ok(entry) if !entry.hosts.contains(&host) => return Ok(true),
            Ok(_) => {}
            // The namespace's device is away.
            Err(_) if engine.journal.find(&own).is_some() => {
                return engine
                    .journal
                    .commit(Change::remove(own))
                    .await
                    .map(|()| true);
            }
            Err(refused) => return Err(refused),
        }
        engine.journal.commit(Change::remove(own)).await?;
        subsystem.remove_namespace_host(nsid, &host).or_refuse()?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_digits_round_trip() {
        let bytes = [0x00, 0x1f, 0xa0, 0xff];
        assert_eq!(hex(&bytes), "001FA0FF");
        assert_eq!(unhex::<4>("001fA0ff"), Some(bytes));
        for wrong in [
            "",
            "001fa0f",
            "001fa0ff0",
            "001fa0fg",
            "+01fa0ff",
            "001fa0é",
        ] {
            assert_eq!(unhex::<4>(wrong), None, "{wrong}");
        }
    }
}
