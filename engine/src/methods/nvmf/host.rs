//! Host access to a subsystem: `nvmf_subsystem_add_host`, `_remove_host`, `_allow_any_host`,
//! `_set_keys`.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::auth::KeySource;
use nacre_nvmf::subsystems::{Association, HostSecrets, Phase, SecretKind, SubsystemError};
use nacre_nvmf::tls::PskKey;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{PATIENCE, host_nqn, key, nvm_subsystem, refusal, wait_until};
use crate::config::host_keys::HostKeyNames;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::services::keyring;
use crate::store::{Change, Edit};
use crate::values::{flatten, flattened};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AddHost>()
        .add::<RemoveHost>()
        .add::<AllowAnyHost>()
        .add::<SetHostKeys>();
}

/// The TLS key that a call names, with SPDK's error code.
pub(super) fn psk_of(
    engine: &Engine,
    name: Option<&str>,
) -> Result<Option<Arc<dyn PskKey>>, RpcError> {
    let found = keyring::host_psk(engine, name);
    if let (Err(refused), Some(name)) = (&found, name)
        && let Some(key) = keyring::restored_key(engine, name, refused)
    {
        return Ok(Some(key));
    }
    found.map_err(|refused| RpcError {
        data: refused.data,
        ..refusal::failed("Internal error", "")
    })
}

/// The keys that a call names, with SPDK's error codes: an unknown key is an invalid parameter, a
/// controller's key without a host's key an internal error.
pub(super) fn keys_of(
    engine: &Engine,
    host: Option<&str>,
    controller: Option<&str>,
) -> Result<Option<Arc<dyn KeySource>>, RpcError> {
    let found = keyring::host_keys(engine, host, controller);
    if let (Err(refused), Some(name)) = (&found, host)
        && let Some(host) = keyring::restored_key(engine, name, refused)
    {
        let controller = controller.and_then(|name| keyring::restored_key(engine, name, refused));
        return Ok(Some(Arc::new(keyring::HostKeys { host, controller })));
    }
    found.map_err(|refused| RpcError {
        data: refused.data,
        ..match (host, controller) {
            (None, Some(name)) if engine.keyring.find(name).is_some() => {
                refusal::failed("Internal error", "")
            }
            _ => RpcError::invalid_params(""),
        }
    })
}

/// Parses a host NQN for the list of allowed hosts. SPDK uses a different error code here.
fn listed_name(host: &str) -> Result<Nqn, RpcError> {
    host_nqn(host).map_err(|refused| RpcError {
        data: refused.data,
        ..refusal::failed("Internal error", "")
    })
}

pub struct AddHost;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct AddHostParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The host's NQN.
    pub host: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub keys: HostKeyNames,
}

flattened!(AddHostParams, keys, without nulls);

impl Method<Engine> for AddHost {
    const NAME: &'static str = "nvmf_subsystem_add_host";
    const ABOUT: &'static str = "Allows a host to use a subsystem.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AddHostParams;
    type Reply = bool;

    async fn apply(params: AddHostParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, host) = (subsystem.nqn(), listed_name(&params.host)?);
        cluster::refuse_by_hand(&engine, nqn, Some(&host))?;
        let names = &params.keys;
        let (own, other) = (&names.dhchap_key, &names.dhchap_ctrlr_key);
        let keys = keys_of(&engine, own.as_deref(), other.as_deref())?;
        let psk = psk_of(&engine, names.psk.as_deref())?;
        let concat = names.must_concat();
        check_concat(concat, keys.is_some(), psk.is_some())?;
        let secrets = HostSecrets { keys, psk, concat };
        plane
            .target
            .add_host_with(nqn, &host, secrets)
            .or_refuse()?;
        let names = HostKeyNames {
            concat: concat.then_some(true),
            ..names.clone()
        };
        let record = host_record(nqn, &host, &names);
        let stored = engine
            .journal
            .commit(Change::put(key::host(nqn, &host), Self::NAME, record))
            .await;
        if let Err(refused) = stored {
            plane.target.remove_host(nqn, &host).or_refuse()?;
            return Err(refused);
        }
        Ok(true)
    }
}

/// Refuses secure channel concatenation without a DH-HMAC-CHAP key, from which the TLS key is
/// generated, and beside a TLS pre-shared key.
fn check_concat(concat: bool, has_key: bool, has_psk: bool) -> Result<(), RpcError> {
    let refuse = |cause: &str, remedy: &str| {
        let refused = RpcError::invalid_params(cause).field("concat");
        Err(refused.remedy(remedy))
    };
    match (concat, has_key, has_psk) {
        (true, false, _) => refuse("the host has no key to authenticate with", "set dhchap_key"),
        (true, _, true) => refuse(
            "the host has a psk, so it makes no key for TLS",
            "leave out psk or concat",
        ),
        _ => Ok(()),
    }
}

/// The parameters of a call that names a host and its keys.
fn host_record(nqn: &Nqn, host: &Nqn, names: &HostKeyNames) -> Value {
    let mut record = flatten::present(names);
    record.insert("nqn".to_owned(), nqn.as_str().into());
    record.insert("host".to_owned(), host.as_str().into());
    record.into()
}

pub struct RemoveHost;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveHostParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The host's NQN.
    pub host: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// How long to wait until the host's connections are closed; default 10 seconds.
    pub timeout_ms: Option<u64>,
}

impl Method<Engine> for RemoveHost {
    const NAME: &'static str = "nvmf_subsystem_remove_host";
    const ABOUT: &'static str =
        "Takes a host's permission, and disconnects it unless any host is allowed.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveHostParams;
    type Reply = bool;

    async fn apply(params: RemoveHostParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, host) = (subsystem.nqn(), listed_name(&params.host)?);
        if !subsystem.hosts().contains(&host) {
            return Err(SubsystemError::NoHost {
                host: host.to_string(),
            }
            .refusal());
        }
        engine
            .journal
            .commit(Change(vec![
                Edit::RemoveAll(key::below(&key::host(nqn, &host))),
                Edit::Remove(key::host(nqn, &host)),
            ]))
            .await?;
        plane.target.remove_host(nqn, &host).or_refuse()?;
        engine.keyring.rotations.forget(nqn, &host);
        let patience = params
            .timeout_ms
            .map_or(PATIENCE, Duration::from_millis)
            .min(engine.deadline());
        let leaving = |a: &Arc<Association>| a.hostnqn == host && a.phase() == Phase::Closing;
        if wait_until(patience, || !subsystem.controllers().iter().any(leaving)).await {
            return Ok(true);
        }
        Err(refusal::failed(
            "Timeout reached during host removal",
            "the host may not use the subsystem any more; I/O of its last connections is still under way",
        ))
    }
}

pub struct AllowAnyHost;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllowAnyHostParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// True: every host may connect; false: only hosts that were added.
    pub allow_any_host: bool,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

impl Method<Engine> for AllowAnyHost {
    const NAME: &'static str = "nvmf_subsystem_allow_any_host";
    const ABOUT: &'static str =
        "Allows any host, or only those in the list; others are disconnected.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = AllowAnyHostParams;
    type Reply = bool;

    async fn apply(params: AllowAnyHostParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let nqn = subsystem.nqn();
        if params.allow_any_host {
            cluster::refuse_by_hand(&engine, nqn, None)?;
        }
        let (own, apart) = (key::subsystem(nqn), key::allow_any_host(nqn));
        if let Some(entry) = engine.journal.find(&own) {
            let mut record = entry.record;
            let change = if entry.durable {
                record.params["allow_any_host"] = params.allow_any_host.into();
                Change::put(own, record.method, record.params).and(Change::remove(apart))
            } else {
                let record =
                    json!({ "nqn": nqn.as_str(), "allow_any_host": params.allow_any_host });
                Change::put(apart, Self::NAME, record)
            };
            engine.journal.commit(change).await?;
        }
        plane
            .target
            .set_allow_any_host(nqn, params.allow_any_host)
            .or_refuse()?;
        Ok(true)
    }
}

struct SetHostKeys;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetHostKeysParams {
    /// NQN of the subsystem.
    nqn: String,
    /// The host's NQN.
    host: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    tgt_name: Option<String>,
    /// Name of the key with which the host authenticates itself from now on; left out: it need not.
    dhchap_key: Option<String>,
    /// Name of the key with which the subsystem authenticates itself to the host; left out: none.
    dhchap_ctrlr_key: Option<String>,
}

impl Method<Engine> for SetHostKeys {
    const NAME: &'static str = "nvmf_subsystem_set_keys";
    const ABOUT: &'static str = "Sets the keys of an allowed host, or clears those that are left out. Its connections go on.";
    const CLASS: Class = Class::Secret;
    const ORDER: Order = Order::Exclusive;
    type Params = SetHostKeysParams;
    type Reply = bool;

    async fn apply(params: SetHostKeysParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, host) = (subsystem.nqn(), host_nqn(&params.host)?);
        if !subsystem.hosts().contains(&host) {
            let cause = format!("host {host} is not in the list");
            return Err(RpcError::errno(Errno::EINVAL, cause).field("host"));
        }
        let (own, other) = (&params.dhchap_key, &params.dhchap_ctrlr_key);
        let keys = keys_of(&engine, own.as_deref(), other.as_deref())?;
        // A record of its own at the end of the list: the keys may be newer than the host.
        let key = key::host_keys(nqn, &host);
        let names = HostKeyNames {
            dhchap_key: params.dhchap_key,
            dhchap_ctrlr_key: params.dhchap_ctrlr_key,
            ..HostKeyNames::default()
        };
        let record = host_record(nqn, &host, &names);
        let mut change = Change::put(&key, Self::NAME, record);
        if !crate::journal::is_replaying() {
            let rotation = key::rotation(nqn, &host, "dhchap");
            change = Change::remove(rotation)
                .and(Change::remove(&key))
                .and(change);
        }
        engine.journal.commit(change).await?;
        let place = (nqn.clone(), host.clone(), SecretKind::Keys);
        engine.keyring.rotations.set(place, None);
        plane.target.set_host_keys(nqn, &host, keys).or_refuse()?;
        Ok(true)
    }
}
