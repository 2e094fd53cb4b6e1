//! `bdev_accept`, a Nacre extension, and the stored facts about the original file of each bdev.
//!
//! A path may lead to another file at the next start: a copy, another disk, or none. Hosts identify
//! the device by its UUID and must not get other data under it. A device is therefore restored only
//! on its original file, and a missing file is never replaced by a new one. `bdev_accept` lets an
//! administrator confirm the change.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::key;
use crate::journal::{EntryState, seen_key};
use crate::methods::replies::no_device;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::store::{Edit, Record};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Accept>();
}

/// The edit that removes the facts about the file of a deleted bdev. `None` for a bdev of the
/// configuration file, which returns at the next start.
pub(super) fn forget_file(engine: &Engine, name: &str) -> Option<Edit> {
    let entry = engine
        .journal
        .find(&key(name))
        .filter(|entry| entry.durable)?;
    uuid_of(&entry.record.params).map(|uuid| Edit::Remove(seen_key(uuid)))
}

fn uuid_of(params: &Value) -> Option<Uuid> {
    params.get("filename")?;
    params.get("uuid")?.as_str()?.parse().ok()
}

pub struct Accept;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceptParams {
    /// A file or block device that could not be restored.
    pub name: String,
}

impl Method<Engine> for Accept {
    const NAME: &'static str = "bdev_accept";
    const ABOUT: &'static str = "Takes the file or disk that is at the path of a device now in place of the one that was there; where there is none \
         and `[[bdev]]` has a size, makes an empty one.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = AcceptParams;
    type Reply = bool;

    async fn apply(params: AcceptParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let name = params.name.as_str();
        let (stored, uuid) = find(&engine, name)?;
        let before = engine.journal.set_seen(uuid, None);
        let made = match &stored {
            Some(record) => {
                engine.replay(record).await;
                outcome(&engine, name)
            }
            None => {
                engine.declared.make(&engine).await;
                engine.declared.refusal_of_bdev(name).map_or(Ok(()), Err)
            }
        };
        if let Err(refused) = made {
            engine.journal.set_seen(uuid, before);
            return Err(refused);
        }
        // Retries waiting objects now, because devices on top of this one may be among them.
        for record in engine.journal.waiting() {
            engine.replay(&record).await;
        }
        Ok(true)
    }
}

/// UUID and record of a bdev that could not be restored; a bdev of the configuration file has no
/// record.
fn find(engine: &Engine, name: &str) -> Result<(Option<Record>, Uuid), RpcError> {
    if engine.plane()?.bdevs.lookup(name).is_some() {
        let cause = format!("\"{name}\" is there, on the file that it was on");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
    }
    let stored = engine.journal.find(&key(name)).map(|entry| entry.record);
    let params = match &stored {
        Some(record) => Some(record.params.clone()),
        None => engine.declared.missing_bdev(name),
    };
    let uuid = params.as_ref().and_then(uuid_of);
    match (params, uuid) {
        (None, _) => Err(no_device(name).remedy("state_get lists what could not be made again")),
        (Some(_), None) => {
            let cause = format!("\"{name}\" is on no file");
            Err(RpcError::errno(Errno::EINVAL, cause).field("name"))
        }
        (Some(_), Some(uuid)) => Ok((stored, uuid)),
    }
}

fn outcome(engine: &Engine, name: &str) -> Result<(), RpcError> {
    match engine.journal.find(&key(name)).map(|entry| entry.state) {
        Some(EntryState::Failed { error, .. }) => Err(error),
        Some(EntryState::Waiting) => Err(RpcError::errno(Errno::EAGAIN, "the daemon is starting")),
        Some(EntryState::Live) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a UUID known to hosts never leads to another file, or to an empty file in place of a
    //! missing one. Method: successive daemons share one state; the file changes between them.

    use std::path::Path;

    use serde_json::json;

    use super::super::super::testing::TestDaemon;
    use super::*;
    use crate::config::{Settings, load_text};
    use crate::store::Store;

    fn start(dir: &Path, text: &str) -> TestDaemon {
        let settings = load_text(Some(("n.toml", text)), [], &[]).unwrap().settings;
        let store = Store::open(&dir.join("state")).unwrap();
        TestDaemon::with(settings, Some(store))
    }

    fn uuid(daemon: &TestDaemon) -> Value {
        daemon.call("bdev_get_bdevs", json!({ "name": "d" }))[0]["uuid"].clone()
    }

    /// Why the device is missing.
    fn missing(daemon: &TestDaemon) -> String {
        let refused = daemon.refused("bdev_get_bdevs", json!({ "name": "d" }));
        assert_eq!(refused.code, -19);
        let objects = daemon.call("state_get", json!(null))["objects"].clone();
        let failed = objects.as_array().unwrap().iter();
        let mut failed = failed.filter(|object| object["state"] == "failed");
        failed.next().unwrap()["error"].as_str().unwrap().to_owned()
    }

    #[test]
    fn a_device_of_rpc_is_restored_only_on_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, copy) = (dir.path().join("disk"), dir.path().join("copy"));
        let known = {
            let daemon = start(dir.path(), "");
            daemon.call(
                "bdev_aio_create",
                json!({ "name": "d", "filename": file, "size": 1 << 20 }),
            );
            uuid(&daemon)
        };
        std::fs::copy(&file, &copy).unwrap();
        std::fs::remove_file(&file).unwrap();
        {
            let daemon = start(dir.path(), "");
            let said = missing(&daemon);
            assert!(said.contains("no such file"), "{said}");
            // Nothing to accept; the next file is still compared.
            let refused = daemon.refused("bdev_accept", json!({ "name": "d" }));
            assert_eq!(refused.code, -2);
            std::fs::rename(&copy, &file).unwrap();
            daemon.call("state_retry", json!(null));
            let said = missing(&daemon);
            assert!(said.contains("nacre bdev accept d"), "{said}");
            daemon.call("bdev_accept", json!({ "name": "d" }));
            assert_eq!(uuid(&daemon), known);
            let refused = daemon.refused("bdev_accept", json!({ "name": "d" }));
            assert_eq!(refused.code, -17);
        }
        let daemon = start(dir.path(), "");
        assert_eq!(uuid(&daemon), known, "the acceptance is stored");
        daemon.call("bdev_aio_delete", json!({ "name": "d" }));
        let uuid = known.as_str().unwrap().parse().unwrap();
        assert_eq!(daemon.engine.journal.seen(uuid), None);
        let refused = daemon.refused("bdev_accept", json!({ "name": "d" }));
        assert_eq!(refused.code, -19);
    }

    #[test]
    fn a_missing_declared_file_is_not_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let text =
            format!("[[bdev]]\nname = \"d\"\npath = {file:?}\nsize = \"1MiB\"\nblock_size = 512\n");
        let known = uuid(&start(dir.path(), &text));
        assert_eq!(uuid(&start(dir.path(), &text)), known, "the device exists");
        std::fs::remove_file(&file).unwrap();
        {
            let daemon = start(dir.path(), &text);
            let said = missing(&daemon);
            assert!(said.contains("nacre bdev accept d"), "{said}");
            assert!(!file.exists(), "no file is created");
            daemon.call("bdev_accept", json!({ "name": "d" }));
            assert_eq!(uuid(&daemon), known);
        }
        std::fs::rename(&file, dir.path().join("old")).unwrap();
        std::fs::write(&file, vec![7; 1 << 20]).unwrap();
        let daemon = start(dir.path(), &text);
        let said = missing(&daemon);
        assert!(said.contains("another file"), "{said}");
        drop(daemon);
        // A daemon without stored state does not compare files.
        let settings = load_text(Some(("n.toml", &text)), [], &[])
            .unwrap()
            .settings;
        assert_eq!(uuid(&TestDaemon::with(settings, None)), known);
    }

    /// Goal: a device that a client creates uses any file that the client names.
    #[test]
    fn a_new_device_is_not_compared_with_an_earlier_file() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = TestDaemon::with(Settings::default(), None);
        let params = |file: &str| {
            let uuid = "11111111-2222-4333-8444-555555555555";
            let filename = dir.path().join(file);
            json!({ "name": "d", "filename": filename, "size": 1 << 20, "uuid": uuid })
        };
        for file in ["a", "b"] {
            daemon.call("bdev_uring_create", params(file));
            daemon.call("bdev_uring_delete", json!({ "name": "d" }));
        }
    }
}
