//! `state_*`, a Nacre extension: stored objects, objects that could not be restored, and retries.

use std::rc::Rc;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::journal::EntryState;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetState>()
        .add::<Retry>()
        .add::<Forget>()
        .add::<ExportConfig>();
}

pub struct GetState;

#[derive(Debug, Serialize, JsonSchema)]
pub struct StateReply {
    /// Path of the store; none: state ends with the daemon.
    store: Option<String>,
    objects: Vec<Object>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Object {
    key: String,
    method: String,
    params: Value,
    /// `live`, `waiting` or `failed`.
    state: &'static str,
    /// `store`, or `config` for objects of the configuration file.
    kept_in: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_for_s: Option<u64>,
}

impl Method<Engine> for GetState {
    const NAME: &'static str = "state_get";
    const ABOUT: &'static str =
        "Lists every configured object, where it is kept, and what could not be restored.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = StateReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<StateReply, RpcError> {
        let describe = |entry: crate::journal::JournalEntry| {
            let (state, error, attempts, failed_for_s) = match entry.state {
                EntryState::Live => ("live", None, None, None),
                EntryState::Waiting => {
                    let plane = engine.plane().ok();
                    let base = plane.as_ref().and_then(|plane| {
                        crate::services::deferred::missing_base(plane, &entry.record)
                    });
                    let error = base.map(|base| format!("there is no bdev \"{base}\" yet"));
                    ("waiting", error, None, None)
                }
                EntryState::Failed {
                    error,
                    since,
                    attempts,
                } => {
                    let age = SystemTime::now().duration_since(since).unwrap_or_default();
                    (
                        "failed",
                        Some(error.to_string()),
                        Some(attempts),
                        Some(age.as_secs()),
                    )
                }
            };
            Object {
                key: entry.record.key,
                method: entry.record.method,
                params: entry.record.params,
                state,
                kept_in: if entry.durable { "store" } else { "config" },
                error,
                attempts,
                failed_for_s,
            }
        };
        let declared = engine
            .declared
            .missing()
            .into_iter()
            .map(|(call, error)| Object {
                key: call.what,
                method: call.method.to_owned(),
                params: call.params,
                state: "failed",
                kept_in: "config",
                error: Some(error.to_string()),
                attempts: None,
                failed_for_s: None,
            });
        Ok(StateReply {
            store: engine.journal.store_path().map(|p| p.display().to_string()),
            objects: engine
                .journal
                .entries()
                .into_iter()
                .map(describe)
                .chain(declared)
                .collect(),
        })
    }
}

pub struct Retry;

#[derive(Debug, Serialize, JsonSchema)]
pub struct Retried {
    restored: usize,
    failed: usize,
}

impl Method<Engine> for Retry {
    const NAME: &'static str = "state_retry";
    const ABOUT: &'static str = "Tries now to restore what could not be restored before.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Retried;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Retried, RpcError> {
        let before = engine.journal.waiting();
        for record in &before {
            engine.replay(record).await;
        }
        let failed = engine.journal.waiting().len();
        Ok(Retried {
            restored: before.len() - failed.min(before.len()),
            failed,
        })
    }
}

pub struct Forget;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForgetParams {
    /// The key in `state_get`.
    pub key: String,
}

impl Method<Engine> for Forget {
    const NAME: &'static str = "state_forget";
    const ABOUT: &'static str =
        "Gives up an object that could not be restored, with the objects in it or on it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ForgetParams;
    type Reply = bool;

    async fn apply(params: ForgetParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        match engine.journal.find(&params.key) {
            None => Err(RpcError::errno(Errno::ENOENT, "no such object")
                .field("key")
                .remedy("state_get lists them")),
            Some(entry) if entry.state == EntryState::Live => {
                Err(RpcError::errno(Errno::EBUSY, "the object is live")
                    .field("key")
                    .remedy("delete it instead"))
            }
            Some(_) => {
                let edits = super::bdev::forget_lost(&engine, &params.key)
                    .unwrap_or_else(|| super::nvmf::forget_lost(&params.key));
                engine.journal.commit(Change(edits)).await.map(|()| true)
            }
        }
    }
}

pub struct ExportConfig;

impl Method<Engine> for ExportConfig {
    const NAME: &'static str = "config_export";
    const ABOUT: &'static str =
        "Gives the whole configuration as a file that -c, load_config and SPDK read.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Value;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Value, RpcError> {
        Ok(super::framework::whole_config(&engine))
    }
}

#[cfg(test)]
mod tests {
    //! Goal: retries of failed objects and simultaneous calls of clients do not interfere. Method:
    //! both at once, in either order.

    use super::super::testing::TestDaemon;
    use super::*;
    use crate::config::Settings;
    use crate::store::Store;
    use serde_json::json;
    use std::path::Path;

    /// A daemon with an unrestored disk whose file exists by now.
    fn waiting(dir: &Path) -> TestDaemon {
        let (path, state) = (dir.join("disk"), dir.join("state"));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let start = || TestDaemon::with(Settings::default(), Some(Store::open(&state).unwrap()));
        start().call("bdev_aio_create", disk(dir));
        std::fs::remove_file(&path).unwrap();
        let daemon = start();
        assert_eq!(daemon.engine.journal.waiting().len(), 1);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        daemon
    }

    fn disk(dir: &Path) -> Value {
        json!({ "name": "u", "filename": dir.join("disk"), "block_size": 512 })
    }

    fn raw(params: &Value) -> Box<serde_json::value::RawValue> {
        serde_json::value::to_raw_value(params).unwrap()
    }

    #[test]
    fn an_object_deleted_during_a_retry_is_not_restored() {
        let dir = tempfile::tempdir().unwrap();
        let name = raw(&json!({ "name": "u" }));
        for at_once in [true, false] {
            let daemon = waiting(dir.path());
            let (engine, record) = (&daemon.engine, daemon.engine.journal.waiting().remove(0));
            let delete = engine.call("bdev_aio_delete", Some(&name));
            let (deleted, ()) = daemon.run(async {
                if at_once {
                    tokio::join!(delete, engine.replay(&record))
                } else {
                    (delete.await, engine.replay(&record).await)
                }
            });
            deleted.unwrap();
            assert_eq!(daemon.call("bdev_get_bdevs", json!(null)), json!([]));
            assert_eq!(daemon.engine.journal.len(), 0);
            drop(daemon);
            std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        }
    }

    /// Goal: a forgotten object is forgotten with its parts; an object created later under its name
    /// has none of them.
    #[test]
    fn an_object_is_forgotten_with_its_parts() {
        const NQN: &str = "nqn.2026-01.org.example:a";
        let dir = tempfile::tempdir().unwrap();
        let start =
            || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
        {
            let daemon = start();
            daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
            let host = json!({ "nqn": NQN, "host": "nqn.2026-01.org.example:host" });
            daemon.call("nvmf_subsystem_add_host", host);
        }
        let daemon = start();
        let journal = &daemon.engine.journal;
        let parts: Vec<String> = journal
            .entries()
            .into_iter()
            .map(|e| e.record.key)
            .collect();
        // Marks the objects as failed.
        for key in &parts {
            journal.restored(key, Err(RpcError::internal("it could not be made")));
        }
        daemon.call("state_forget", json!({ "key": parts[0] }));
        assert_eq!(journal.len(), 0);
        drop(daemon);
        assert_eq!(start().engine.journal.len(), 0);
    }

    #[test]
    fn an_object_created_during_a_retry_is_live() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = waiting(dir.path());
        let (engine, record) = (&daemon.engine, daemon.engine.journal.waiting().remove(0));
        let params = raw(&disk(dir.path()));
        let made = engine.call("bdev_aio_create", Some(&params));
        let (made, ()) = daemon.run(async { tokio::join!(made, engine.replay(&record)) });
        made.unwrap();
        assert_eq!(daemon.engine.journal.waiting(), []);
    }
}
