//! `appliance_*`, Nacre extensions: the system of a machine that runs Nacre from its image.
//!
//! The daemon reads the slots, but writes none: it leaves a request, for which systemd starts
//! `nacre appliance obey`.

use std::path::PathBuf;
use std::rc::Rc;

use nacre_engine_appliance::acts::{self, Request, RequestError, UPLOAD};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status::{self, StatusError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rpc::error::Errno;
use crate::rpc::method::NoParams;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<Get>()
        .add::<Update>()
        .add::<Rollback>()
        .add::<Restart>();
}

struct Get;

#[derive(Debug, Default, Serialize, JsonSchema)]
struct Reply {
    /// False: the machine does not run from the image, and all other fields are empty.
    appliance: bool,
    /// The version that runs.
    version: Option<String>,
    /// Versions on the disk: version, state, boot entry, tries left and failed.
    slots: Vec<Value>,
    /// The entry that the boot menu starts whatever the tries say.
    pinned_entry: Option<String>,
    /// Free bytes of the partition for state.
    free_bytes: Option<u64>,
    /// The uploaded bundle.
    upload: Option<PathBuf>,
    /// The request that waits for its turn.
    request: Option<Value>,
    /// Updates, rollbacks and restarts, the newest first: act, state, the version that ran, file,
    /// text, percent, begin and end in milliseconds since 1970.
    acts: Vec<Value>,
}

impl Method<Engine> for Get {
    const NAME: &'static str = "appliance_get";
    const ABOUT: &'static str = "Shows the system of an appliance: both slots with their tries, the running act with its \
         progress, and the last acts.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Reply;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Reply, RpcError> {
        blocking(|| reply(&Places::system())).await
    }
}

fn reply(places: &Places) -> Result<Reply, RpcError> {
    let status = match status::status(places) {
        Ok(status) => status,
        Err(StatusError::NoAppliance { .. }) => return Ok(Reply::default()),
        Err(error) => return Err(RpcError::errno(Errno::EIO, error.to_string())),
    };
    let upload = places.uploads().join(UPLOAD);
    Ok(Reply {
        appliance: true,
        version: Some(status.version.to_string()),
        slots: status.slots.iter().map(value).collect(),
        pinned_entry: status.pinned_entry,
        free_bytes: Some(status.free_bytes),
        upload: upload.is_file().then_some(upload),
        request: acts::waiting(places).as_ref().map(value),
        acts: acts::history(places).iter().map(value).collect(),
    })
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

struct Update;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateParams {
    /// The bundle, as an absolute path on this machine; default: the uploaded one.
    file: Option<PathBuf>,
    /// Install a version older than the one that runs.
    #[serde(default)]
    allow_older: bool,
    /// Also while volumes depend on this node.
    #[serde(default)]
    force: bool,
}

impl Method<Engine> for Update {
    const NAME: &'static str = "appliance_update";
    const ABOUT: &'static str = "Has the appliance check a signed update bundle and write it to the other slot; the next \
         restart boots it. The call returns at once: `appliance_get` shows progress and result.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = UpdateParams;
    type Reply = bool;

    async fn apply(params: UpdateParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let UpdateParams {
            file,
            allow_older,
            force,
        } = params;
        ask(move |places| Request::Update {
            file: file.unwrap_or_else(|| places.uploads().join(UPLOAD)),
            allow_older,
            force,
        })
        .await
    }
}

struct Rollback;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollbackParams {
    /// Also if the other version failed in all its tries.
    #[serde(default)]
    force: bool,
}

impl Method<Engine> for Rollback {
    const NAME: &'static str = "appliance_rollback";
    const ABOUT: &'static str =
        "Has the appliance boot the other version from the next restart on.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RollbackParams;
    type Reply = bool;

    async fn apply(params: RollbackParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        ask(move |_| Request::Rollback {
            force: params.force,
        })
        .await
    }
}

struct Restart;

impl Method<Engine> for Restart {
    const NAME: &'static str = "appliance_restart";
    const ABOUT: &'static str =
        "Restarts the appliance. Hosts lose their connections until it serves again.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        ask(|_| Request::Restart).await
    }
}

async fn ask(request: impl FnOnce(&Places) -> Request + Send + 'static) -> Result<bool, RpcError> {
    blocking(|| {
        let places = Places::system();
        let request = request(&places);
        acts::ask(&places, &request).map_err(refusal)?;
        Ok(true)
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| RpcError::internal(error.to_string()))?
}

fn refusal(error: RequestError) -> RpcError {
    let cause = error.to_string();
    match error {
        RequestError::Status(StatusError::NoAppliance { .. }) => {
            RpcError::errno(Errno::ENOTSUP, cause)
                .remedy("update the package of this machine: docs/operate/upgrade.md")
        }
        RequestError::Waiting | RequestError::Running { .. } => {
            RpcError::errno(Errno::EBUSY, cause).remedy("`appliance_get` shows its progress")
        }
        RequestError::File { .. } => RpcError::errno(Errno::ENOENT, cause)
            .field("file")
            .remedy("upload a bundle, or name one on this machine"),
        RequestError::Status(_)
        | RequestError::Io { .. }
        | RequestError::Malformed { .. }
        | RequestError::Lock(_) => RpcError::errno(Errno::EIO, cause),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nacre_engine_appliance::acts::{ActKind, ActState, Entry};
    use serde_json::json;

    use super::*;
    use crate::methods::testing::test_daemon;

    /// Goal: a machine without the image says so, and refuses each act with a remedy.
    #[test]
    fn a_machine_without_the_image_has_no_slots() {
        if status::image(&Places::system()).is_ok() {
            eprintln!("SKIPPED: a_machine_without_the_image_has_no_slots: this is an appliance");
            return;
        }
        let daemon = test_daemon();
        let found = daemon.call("appliance_get", Value::Null);
        assert_eq!(found["appliance"], false);
        assert_eq!(found["slots"], json!([]));
        for (method, params) in [
            ("appliance_update", json!({ "file": "/x.tar" })),
            ("appliance_rollback", json!({ "force": true })),
            ("appliance_restart", Value::Null),
        ] {
            let refused = daemon.refused(method, params);
            let text = serde_json::to_string(&refused).unwrap();
            assert!(text.contains("no appliance"), "{method}: {text}");
        }
    }

    /// Goal: the answer has the slots, the upload and the acts. Method: a machine in a folder.
    #[test]
    fn an_appliance_shows_its_slots_and_acts() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        for folder in [
            places.os_release().parent().unwrap().to_owned(),
            places.entries(),
            places.labels(),
            places.state(),
            places.uploads(),
        ] {
            fs::create_dir_all(folder).unwrap();
        }
        let release = "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n";
        fs::write(places.os_release(), release).unwrap();
        fs::write(places.entries().join("nacre_0.1.0.efi"), "kernel").unwrap();
        fs::write(places.uploads().join(UPLOAD), "bundle").unwrap();
        let entry = Entry::begin(&places, ActKind::Rollback, None).unwrap();
        entry.end(ActState::Done, "done").unwrap();
        let found = serde_json::to_value(reply(&places).unwrap()).unwrap();
        assert_eq!(found["version"], "0.1.0");
        assert_eq!(found["slots"][0]["version"], "0.1.0");
        assert_eq!(found["acts"][0]["act"], "rollback");
        assert_eq!(found["acts"][0]["state"], "done");
        assert!(found["upload"].as_str().unwrap().ends_with(UPLOAD));
        assert_eq!(found["request"], Value::Null);
    }
}
