//! `key_list` and `key_expire`, Nacre extensions: the keys, their users and their expiry.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::record_key;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::keyring::{KeyPlace, NamedKey, no_key};
use crate::services::remotes::RemoteTls;
use crate::store::Change;
use crate::values::time;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<ListKeys>().add::<Expire>();
}

/// Parses the time of expiry in a call.
pub(super) fn moment(text: Option<&str>) -> Result<Option<SystemTime>, RpcError> {
    let refuse = |cause| RpcError::invalid_params(cause).field("expires");
    text.map(time::parse_moment).transpose().map_err(refuse)
}

pub struct ListKeys;

#[derive(Debug, Serialize, JsonSchema)]
pub struct ListedReply {
    name: String,
    /// `ok`; `expired`; `unreadable`: its secret is missing, damaged, or open to other users.
    state: &'static str,
    /// Why it is unreadable.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// `dhchap` (for authentication), `tls`, or `text` (of another server); left out if unreadable.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// The hash function that ties the key to its owner's name: `none`, `sha256`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    hash: Option<&'static str>,
    /// Eight hexadecimal digits that are the same at the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<String>,
    /// Where the secret is: `file`, `credential` (of the service manager) or `sealed` (in the
    /// daemon's state).
    source: &'static str,
    /// The name of the credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    credential: Option<String>,
    /// The file of the secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// Hosts (`HOST at SUBSYSTEM`), remote controllers (`controller NAME`) and receivers of alerts
    /// (`alert NAME`) that use it.
    used_by: Vec<String>,
    /// When the secret was made: the last change of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    made: Option<String>,
    /// When it expires; left out: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires: Option<String>,
    /// The name was removed, and the key is still in use.
    removed: bool,
}

impl Method<Engine> for ListKeys {
    const NAME: &'static str = "key_list";
    const ABOUT: &'static str =
        "Lists the keys with their kinds, fingerprints, users and ends; no secrets.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Read;
    type Params = NoParams;
    type Reply = Vec<ListedReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<ListedReply>, RpcError> {
        let mut users = users(&engine);
        let listed = engine.keyring.list();
        let keys: Vec<Arc<NamedKey>> = listed.iter().map(|one| Arc::clone(&one.key)).collect();
        // Reads files.
        let facts = tokio::task::spawn_blocking(move || {
            let facts = keys.iter().map(|key| key.facts());
            facts.collect::<Vec<_>>()
        });
        let facts = facts.await.map_err(|e| RpcError::internal(e.to_string()))?;
        let reply = listed.into_iter().zip(facts).map(|(one, facts)| {
            let key = &one.key;
            let why = facts.as_ref().err().map(ToString::to_string);
            let facts = facts.ok();
            let known = facts.as_ref();
            let (source, credential) = match key.place() {
                KeyPlace::File(_) => ("file", None),
                KeyPlace::Credential { name, .. } => ("credential", Some(name)),
                KeyPlace::Sealed { .. } => ("sealed", None),
            };
            ListedReply {
                name: key.name.clone(),
                state: match known {
                    None => "unreadable",
                    Some(_) if key.is_expired() => "expired",
                    Some(_) => "ok",
                },
                why,
                kind: known.map(|facts| facts.kind),
                hash: known.and_then(|facts| facts.hash),
                fingerprint: known.and_then(|facts| facts.fingerprint.clone()),
                source,
                credential,
                path: key.path().map(|path| path.display().to_string()),
                used_by: if one.removed {
                    Vec::new()
                } else {
                    users.remove(&key.name).unwrap_or_default()
                },
                made: known.and_then(|facts| facts.made).map(time::moment),
                expires: key.expires().map(time::moment),
                removed: one.removed,
            }
        });
        Ok(reply.collect())
    }
}

/// The users of each key, by its name.
fn users(engine: &Engine) -> BTreeMap<String, Vec<String>> {
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut add = |name: Option<String>, user: &str| {
        let Some(name) = name else { return };
        let of = users.entry(name).or_default();
        if !of.iter().any(|one| one == user) {
            of.push(user.to_owned());
        }
    };
    if let Ok(plane) = engine.plane() {
        for subsystem in plane.target.subsystems() {
            for host in subsystem.hosts() {
                let user = format!("{host} at {}", subsystem.nqn());
                for keys in subsystem.keys_of(&host) {
                    let (own, controller) = keys.names();
                    add(own, &user);
                    add(controller, &user);
                }
                for psk in subsystem.psks_of(&host) {
                    add(psk.name(), &user);
                }
            }
        }
    }
    for task in engine.alerts.receivers() {
        let user = format!("alert {}", task.receiver.name());
        for (_, key) in task.receiver.keys() {
            add(Some(key.to_owned()), &user);
        }
    }
    for (name, remote) in engine.remotes.list() {
        let user = format!("controller {name}");
        for path in remote.paths() {
            let keys: &dyn nacre_nvmf::auth::KeySource = &*path.wanted.authentication.keys;
            let (own, controller) = keys.names();
            add(own, &user);
            add(controller, &user);
            if let RemoteTls::Psk(psk) = &path.wanted.tls {
                add(psk.name(), &user);
            }
        }
    }
    users
}

pub struct Expire;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpireParams {
    /// Name of the key.
    pub name: String,
    /// When the key expires: `2027-01-31` (UTC) or `2027-01-31T12:00:00Z`; left out: never.
    pub expires: Option<String>,
}

impl Method<Engine> for Expire {
    const NAME: &'static str = "key_expire";
    const ABOUT: &'static str = "Sets when a key expires. From then on it proves nothing: hosts with it are refused, and connections that exist go on.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = ExpireParams;
    type Reply = bool;

    async fn apply(params: ExpireParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let ExpireParams { name, expires } = params;
        let at = moment(expires.as_deref())?;
        let key = engine.keyring.find(&name);
        let key = key.ok_or_else(|| no_key("name", &name))?;
        let own = record_key(&name);
        let Some(mut entry) = engine.journal.find(&own).filter(|entry| entry.durable) else {
            let cause = format!("the configuration file declares key \"{name}\"");
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("name")
                .remedy("write `expires` there, below [[key]], and reload the configuration"));
        };
        let params = entry.record.params.as_object_mut();
        if let Some(params) = params {
            match expires {
                Some(text) => drop(params.insert("expires".into(), text.into())),
                None => drop(params.remove("expires")),
            }
        }
        let change = Change::put(own, entry.record.method, entry.record.params);
        engine.journal.commit(change).await?;
        key.set_expiry(at);
        Ok(true)
    }
}
