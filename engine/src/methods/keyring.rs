//! RPC methods `keyring_*`: the keys of hosts and controllers, for DH-HMAC-CHAP (NVMe Base 2.0,
//! 8.13) and for TLS.
//! Calls and replies name key files; none contains a secret.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::names::check_key_name;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::engine::Engine;
use crate::services::keyring::{FileError, FileKey, ListedKey, PREFIX, no_key};
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<AddKey>().add::<RemoveKey>().add::<GetKeys>();
}

fn record_key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

pub struct AddKey;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddKeyParams {
    pub name: String,
    /// Absolute path of a file with one secret: `DHHC-1:...` for authentication, or
    /// `NVMeTLSkey-1:...` for TLS. Only the daemon's user may read it.
    pub path: PathBuf,
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
        let AddKeyParams { name, path } = params;
        check_key_name(&name)?;
        // A file that is missing at a restart refuses its hosts until it is there again.
        if !crate::journal::is_replaying() && !crate::journal::is_declaring() {
            check_file(&path)?;
        }
        let record = json!({ "name": name, "path": path });
        let key = FileKey { name, path };
        let name = key.name.clone();
        if engine.keyring.add(key).is_err() {
            let cause = format!("there is a key \"{name}\"");
            return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
        }
        let change = Change::put(record_key(&name), AddKey::NAME, record);
        if let Err(refused) = engine.journal.commit(change).await {
            engine.keyring.remove(&name);
            return Err(refused);
        }
        Ok(true)
    }
}

fn check_file(path: &Path) -> Result<(), RpcError> {
    FileKey::check(path).map_err(|error| {
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
    pub name: String,
}

impl Method<Engine> for RemoveKey {
    const NAME: &'static str = "keyring_file_remove_key";
    const ABOUT: &'static str = "Takes the name from a key. Hosts that use it go on doing so until the daemon's next start; the file stays.";
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
    /// `keyring_file`.
    module: &'static str,
    /// Removed, and still in use.
    removed: bool,
    /// Always false: a key was added by a call.
    probed: bool,
    /// 1, and 1 for each use.
    refcnt: usize,
    path: PathBuf,
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
            module: "keyring_file",
            removed: listed.removed,
            probed: false,
            refcnt: listed.users,
            path: listed.key.path.clone(),
        };
        Ok(engine.keyring.list().into_iter().map(reply).collect())
    }
}

#[cfg(test)]
mod tests;
