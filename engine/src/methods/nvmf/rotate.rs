//! `host_rotate`, a Nacre extension: gives a host a new key, and accepts the former one for a time.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use nacre_nvmf::auth::KeySource;
use nacre_nvmf::subsystems::{Rotation, SecretKind, Subsystem};
use nacre_nvmf::tls::PskKey;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::host::{keys_of, psk_of};
use super::{host_nqn, key, nvm_subsystem};
use crate::refusal::OrRefuse;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::keyring::{self, rotation, text::kind_name};
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Rotate>();
}

/// Default time for which both keys are accepted.
const OVERLAP: Duration = Duration::from_secs(24 * 3600);

pub struct Rotate;

#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The host's NQN.
    pub host: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// Name of the host's new key. It replaces the key of its kind: the one for authentication, or
    /// the pre-shared key of TLS.
    pub key: String,
    /// Name of the controller's new key, for authentication; left out: it stays.
    pub dhchap_ctrlr_key: Option<String>,
    /// How long the host may also use its former key; default 1 day. The former key ends earlier
    /// once the host uses the new one on every queue. 0: it ends now.
    pub overlap_s: Option<u64>,
    /// The kind of the key; left out: that of its text.
    pub kind: Option<KeyKind>,
    /// When the former key ends, in place of `overlap_s`: seconds since 1970.
    pub until: Option<u64>,
    /// Name of the former key; left out: the present one.
    pub former_key: Option<String>,
    /// Name of the controller's former key; left out: the present one.
    pub former_ctrlr_key: Option<String>,
}

/// The kind of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeyKind {
    /// For authentication (DH-HMAC-CHAP).
    Dhchap,
    /// A pre-shared key of TLS.
    Tls,
}

impl From<KeyKind> for SecretKind {
    fn from(kind: KeyKind) -> Self {
        match kind {
            KeyKind::Dhchap => Self::Keys,
            KeyKind::Tls => Self::Psk,
        }
    }
}

/// Names of a host's key and of the controller's.
type KeyNames = (String, Option<String>);

impl Method<Engine> for Rotate {
    const NAME: &'static str = rotation::ROTATE;
    const ABOUT: &'static str = "Gives an allowed host a new key, and accepts its former one for a while. Connections go on.";
    const CLASS: Class = Class::Secret;
    const ORDER: Order = Order::Exclusive;
    type Params = RotateParams;
    type Reply = bool;

    async fn apply(params: RotateParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let subsystem = nvm_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let (nqn, host) = (subsystem.nqn().clone(), host_nqn(&params.host)?);
        if !subsystem.hosts().contains(&host) {
            let cause = format!("host {host} is not in the list");
            return Err(RpcError::errno(Errno::EINVAL, cause).field("host"));
        }
        let kind = kind_of(&engine, &params)?;
        let place = (nqn.clone(), host.clone(), kind);
        let present = names(&subsystem, &host, kind).ok_or_else(|| no_present(&host, kind))?;
        let under_way = engine.keyring.rotations.find(&place);
        let controller = match (kind, &params.dhchap_ctrlr_key) {
            (SecretKind::Psk, Some(_)) => return Err(no_controller_key()),
            (SecretKind::Keys, None) => present.1.clone(),
            (_, named) => named.clone(),
        };
        let new: KeyNames = (params.key.clone(), controller);
        let now = engine.keyring.clock.now();
        let until = match (params.until, params.overlap_s) {
            (Some(until), _) => UNIX_EPOCH + Duration::from_secs(until),
            (None, Some(overlap)) => now + Duration::from_secs(overlap.min(keyring::LONGEST_S)),
            (None, None) => now + OVERLAP,
        };
        let named = params.former_key.clone();
        let named = named.map(|former| (former, params.former_ctrlr_key.clone()));
        // The same key once more changes the end of the former one.
        let before = under_way
            .filter(|_| present == new)
            .map(|rotation| rotation.former);
        let former = named.or(before).unwrap_or_else(|| present.clone());
        let former = Some(former).filter(|former| until > now && *former != new);
        let change = made(&engine, &subsystem, &host, kind, &new, former.as_ref())?;
        let record = record(&nqn, &host, kind, &new, former.as_ref(), until);
        let own = key::rotation(&nqn, &host, kind_name(kind));
        let stored = Change::put(&own, Self::NAME, record);
        // At the end of the list: the keys may be newer than the host.
        let stored = if crate::journal::is_replaying() {
            stored
        } else {
            Change::remove(&own).and(stored)
        };
        engine.journal.commit(stored).await?;
        plane.target.rotate(&nqn, &host, change).or_refuse()?;
        let rotation = former.map(|former| rotation::Rotation {
            keys: new,
            former,
            until,
            may_end_early: !crate::journal::is_replaying(),
        });
        engine.keyring.rotations.set(place, rotation);
        Ok(true)
    }
}

fn kind_of(engine: &Engine, params: &RotateParams) -> Result<SecretKind, RpcError> {
    if let Some(kind) = params.kind {
        return Ok(kind.into());
    }
    let found = engine.keyring.find(&params.key);
    let found = found.ok_or_else(|| keyring::no_key("key", &params.key))?;
    let text = found.text();
    let refuse = |error: nacre_nvmf::auth::KeyError| {
        RpcError::errno(Errno::EINVAL, error.to_string()).field("key")
    };
    text.map(|text| text.kind()).map_err(refuse)
}

/// The names of a host's present keys.
fn names(subsystem: &Subsystem, host: &Nqn, kind: SecretKind) -> Option<KeyNames> {
    match kind {
        SecretKind::Keys => {
            let (own, controller) = subsystem.host_keys(host)?.names();
            Some((own.unwrap_or_default(), controller))
        }
        SecretKind::Psk => Some((subsystem.host_psk(host)?.name().unwrap_or_default(), None)),
    }
}

fn no_present(host: &Nqn, kind: SecretKind) -> RpcError {
    let (cause, remedy) = match kind {
        SecretKind::Keys => (
            format!("host {host} has no key for authentication to rotate"),
            "give it the first one with nvmf_subsystem_set_keys",
        ),
        SecretKind::Psk => (
            format!("host {host} has no TLS key to rotate"),
            "give it the first one with nvmf_subsystem_remove_host and nvmf_subsystem_add_host",
        ),
    };
    RpcError::errno(Errno::EINVAL, cause)
        .field("key")
        .remedy(remedy)
}

fn no_controller_key() -> RpcError {
    RpcError::errno(
        Errno::EINVAL,
        "a TLS key has no key of the controller beside it",
    )
    .field("dhchap_ctrlr_key")
    .remedy("leave it out, or rotate the host's key for authentication")
}

/// The change of the target's keys. Keeps the object of a key that stays, because connections are
/// compared with it.
fn made(
    engine: &Engine,
    subsystem: &Subsystem,
    host: &Nqn,
    kind: SecretKind,
    new: &KeyNames,
    former: Option<&KeyNames>,
) -> Result<Rotation, RpcError> {
    let of_key = |refused: RpcError| refused.field("key");
    match kind {
        SecretKind::Keys => {
            let present = subsystem.keys_of(host);
            let of = |(own, controller): &KeyNames| -> Result<Arc<dyn KeySource>, RpcError> {
                let wanted = (Some(own.clone()), controller.clone());
                if let Some(same) = present.iter().find(|keys| keys.names() == wanted) {
                    return Ok(Arc::clone(same));
                }
                let found = keys_of(engine, Some(own), controller.as_deref()).map_err(of_key)?;
                found.ok_or_else(|| keyring::no_key("key", own))
            };
            let former = former.map(of).transpose()?;
            Ok(Rotation::Keys {
                new: of(new)?,
                former,
            })
        }
        SecretKind::Psk => {
            let present = subsystem.psks_of(host);
            let of = |(own, _): &KeyNames| -> Result<Arc<dyn PskKey>, RpcError> {
                if let Some(same) = present.iter().find(|psk| psk.name().as_ref() == Some(own)) {
                    return Ok(Arc::clone(same));
                }
                let found = psk_of(engine, Some(own)).map_err(of_key)?;
                found.ok_or_else(|| keyring::no_key("key", own))
            };
            let former = former.map(of).transpose()?;
            Ok(Rotation::Psk {
                new: of(new)?,
                former,
            })
        }
    }
}

/// The parameters of the call that restores this state.
fn record(
    nqn: &Nqn,
    host: &Nqn,
    kind: SecretKind,
    (key, controller): &KeyNames,
    former: Option<&KeyNames>,
    until: std::time::SystemTime,
) -> serde_json::Value {
    let mut record = serde_json::json!({
        "nqn": nqn.as_str(), "host": host.as_str(), "kind": kind_name(kind), "key": key,
    });
    if let Some(controller) = controller {
        record["dhchap_ctrlr_key"] = controller.as_str().into();
    }
    let Some((former, former_controller)) = former else {
        record["overlap_s"] = 0.into();
        return record;
    };
    let until = until.duration_since(UNIX_EPOCH).unwrap_or_default();
    record["until"] = until.as_secs().into();
    record["former_key"] = former.as_str().into();
    if let Some(controller) = former_controller {
        record["former_ctrlr_key"] = controller.as_str().into();
    }
    record
}
