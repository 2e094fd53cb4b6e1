//! RPC methods `keyring_*`: the DH-HMAC-CHAP keys of hosts and controllers (NVMe Base 2.0, 8.13).
//! Calls and replies name key files; none contains a secret.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::auth::KeySource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::rpc::error::Errno;
use crate::rpc::{Method, NoParams, Order, Registry, RpcError, When};
use crate::services::engine::Engine;
use crate::services::keyring::{FileError, FileKey, HostKeys, ListedKey, PREFIX, check_name};
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<AddKey>().add::<RemoveKey>().add::<GetKeys>();
}

/// Linux errno `ENOKEY`: the error code for an unknown key.
const ENOKEY: i32 = 126;

fn record_key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// The error for a key that does not exist.
pub fn no_key(field: &'static str, name: &str) -> RpcError {
    RpcError::os(ENOKEY, format!("there is no key \"{name}\""))
        .field(field)
        .remedy("`nacre key list` shows the keys, `nacre key generate` makes one")
}

/// Looks up the keys that a call names: `host` (`dhchap_key`) and `controller`
/// (`dhchap_ctrlr_key`). `None` if it names none. Refuses an unknown key and a controller key
/// without a host key. Reads each secret once, so that a damaged file fails here and not at the
/// host's next connection.
pub fn host_keys(
    engine: &Engine,
    host: Option<&str>,
    controller: Option<&str>,
) -> Result<Option<Arc<dyn KeySource>>, RpcError> {
    let named = |field, name: &str| engine.keyring.find(name).ok_or_else(|| no_key(field, name));
    let Some(host) = host else {
        let controller = controller.map(|name| named("dhchap_ctrlr_key", name));
        return match controller.transpose()? {
            None => Ok(None),
            Some(_) => Err(RpcError::errno(
                Errno::EINVAL,
                "the controller proves itself only to a host that proves itself",
            )
            .field("dhchap_ctrlr_key")
            .remedy("give dhchap_key, too")),
        };
    };
    let host = named("dhchap_key", host)?;
    let controller = controller.map(|name| named("dhchap_ctrlr_key", name));
    let keys = HostKeys {
        host,
        controller: controller.transpose()?,
    };
    // As in `keyring_file_add_key`: a missing file must not undo a restart.
    if !crate::journal::is_replaying() {
        let check = |field, key: &FileKey| {
            let refuse = |error: nacre_nvmf::auth::KeyError| {
                RpcError::errno(Errno::EINVAL, error.to_string()).field(field)
            };
            key.secret().map(drop).map_err(refuse)
        };
        check("dhchap_key", &keys.host)?;
        if let Some(key) = &keys.controller {
            check("dhchap_ctrlr_key", key)?;
        }
    }
    Ok(Some(Arc::new(keys)))
}

struct AddKey;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddKeyParams {
    name: String,
    /// Absolute path of a file with one secret (`DHHC-1:...`). Only the daemon's user may read it.
    path: PathBuf,
}

impl Method<Engine> for AddKey {
    const NAME: &'static str = "keyring_file_add_key";
    const ABOUT: &'static str =
        "Gives a name to the key in a file. The file is read at each authentication.";
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Exclusive;
    type Params = AddKeyParams;
    type Reply = bool;

    async fn apply(params: AddKeyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let AddKeyParams { name, path } = params;
        check_name(&name)?;
        // A file that is missing at a restart refuses its hosts until it is there again.
        if !crate::journal::is_replaying() {
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

struct RemoveKey;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveKeyParams {
    name: String,
}

impl Method<Engine> for RemoveKey {
    const NAME: &'static str = "keyring_file_remove_key";
    const ABOUT: &'static str = "Takes the name from a key. Hosts that use it go on doing so until the daemon's next start; the file stays.";
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

struct GetKeys;

#[derive(Debug, Serialize, JsonSchema)]
struct KeyReply {
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
