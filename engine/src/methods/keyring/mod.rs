//! RPC methods `keyring_*`: the keys of hosts and controllers, for DH-HMAC-CHAP (NVMe Base 2.0,
//! 8.13) and for TLS. Calls and replies name key files; none contains a secret. [`stored`] has the
//! keys that the daemon stores itself.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::names::check_key_name;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;
use crate::services::keyring::{
    AddError, FileError, KeyPlace, ListedKey, NamedKey, PREFIX, file, no_key,
};
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<AddKey>().add::<RemoveKey>().add::<GetKeys>();
    keys::register(registry);
    stored::register(registry);
}

pub mod keys;
pub mod stored;

fn record_key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

pub struct AddKey;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddKeyParams {
    /// Name for the key: 1 to 128 bytes, no control characters.
    pub name: String,
    /// Absolute path of a file with one secret: `DHHC-1:...` for authentication, or
    /// `NVMeTLSkey-1:...` for TLS. Only the daemon's user may read it.
    pub path: PathBuf,
    /// When the key expires: `2027-01-31` (UTC) or `2027-01-31T12:00:00Z`; left out: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
}

impl Method<Engine> for AddKey {
    const NAME: &'static str = "keyring_file_add_key";
    const ABOUT: &'static str =
        "Gives a name to the key in a file. The file is read at each authentication.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = AddKeyParams;
    type Reply = bool;

    async fn apply(params: AddKeyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_key_name(&params.name)?;
        let expires = keys::moment(params.expires.as_deref())?;
        // A file that is missing at a restart refuses its hosts until it is there again.
        if !crate::journal::is_replaying() && !crate::journal::is_declaring() {
            check_file(&params.path)?;
        }
        let record = json!(params);
        let AddKeyParams { name, path, .. } = params;
        let clock = engine.keyring.clock.clone();
        let key = NamedKey::new(name.clone(), KeyPlace::File(path), clock);
        key.set_expiry(expires);
        let added = engine.keyring.add(key);
        added.map_err(|error| not_added(error, &name))?;
        let change = Change::put(record_key(&name), Self::NAME, record);
        if let Err(refused) = engine.journal.commit(change).await {
            engine.keyring.remove(&name);
            return Err(refused);
        }
        Ok(true)
    }
}

fn not_added(error: AddError, name: &str) -> RpcError {
    let refused = match error {
        AddError::Taken => RpcError::errno(Errno::EEXIST, format!("there is a key \"{name}\"")),
        AddError::Full => RpcError::errno(Errno::ENOSPC, error.to_string())
            .remedy("remove keys that no host uses: `nacre key list` shows them"),
    };
    refused.field("name")
}

fn check_file(path: &Path) -> Result<(), RpcError> {
    file::check(path).map_err(|error| {
        let errno = match error {
            FileError::Missing => Errno::ENOENT,
            FileError::Io(_) => Errno::EIO,
            _ => Errno::EPERM,
        };
        RpcError::errno(errno, format!("{}: {error}", path.display())).field("path")
    })
}

pub struct RemoveKey;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveKeyParams {
    /// Name of the key.
    pub name: String,
}

impl Method<Engine> for RemoveKey {
    const NAME: &'static str = "keyring_file_remove_key";
    const ABOUT: &'static str = "Takes the name from a key. Hosts that use it go on doing so until the daemon's next start. A key file stays; a sealed key is deleted.";
    const CLASS: Class = Class::Secret;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveKeyParams;
    type Reply = bool;

    async fn apply(params: RemoveKeyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if engine.keyring.find(&params.name).is_none() {
            return Err(no_key("name", &params.name));
        }
        engine
            .journal
            .commit(Change::remove(record_key(&params.name)))
            .await?;
        Ok(engine.keyring.remove(&params.name))
    }
}

pub struct GetKeys;

#[derive(Debug, Serialize, JsonSchema)]
pub struct KeyReply {
    name: String,
    /// `keyring_file`; `nacre`: the key is in no file, see `key_list`.
    module: &'static str,
    /// Removed, and still in use.
    removed: bool,
    /// Always false: a key was added by a call.
    probed: bool,
    /// 1, and 1 for each use.
    refcnt: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
}

impl Method<Engine> for GetKeys {
    const NAME: &'static str = "keyring_get_keys";
    const ABOUT: &'static str = "Lists the keys: names and files, no secrets.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = Vec<KeyReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<KeyReply>, RpcError> {
        let reply = |listed: ListedKey| KeyReply {
            name: listed.key.name.clone(),
            module: match listed.key.place() {
                KeyPlace::File(_) => "keyring_file",
                KeyPlace::Credential { .. } | KeyPlace::Sealed { .. } => "nacre",
            },
            removed: listed.removed,
            probed: false,
            refcnt: listed.users,
            path: listed.key.path(),
        };
        Ok(engine.keyring.list().into_iter().map(reply).collect())
    }
}

#[cfg(test)]
mod tests;
