//! `notify_*`: SPDK's polled notifications.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::notify::{Event, TYPES};
use crate::rpc::{Class, Method, NoParams, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetTypes>().add::<GetNotifications>();
}

struct GetTypes;

impl Method<Engine> for GetTypes {
    const NAME: &'static str = "notify_get_types";
    const ABOUT: &'static str = "Lists the types of notifications.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<&'static str>;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Vec<&'static str>, RpcError> {
        Ok(TYPES.iter().map(|(name, ..)| *name).collect())
    }
}

struct GetNotifications;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetNotificationsParams {
    /// Id of the first notification to return.
    #[serde(default)]
    id: u64,
    /// Maximum number of notifications; default: all.
    max: Option<u64>,
}

impl Method<Engine> for GetNotifications {
    const NAME: &'static str = "notify_get_notifications";
    const ABOUT: &'static str = "Gives the notifications from an id on; the last 1024 are kept.";
    const CLASS: Class = Class::Read;
    type Params = GetNotificationsParams;
    type Reply = Vec<Event>;

    async fn apply(
        params: GetNotificationsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<Event>, RpcError> {
        Ok(engine
            .notes
            .since(params.id, params.max.unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::test_daemon;
    use serde_json::json;

    #[test]
    fn notifications_are_read_from_an_id() {
        let daemon = test_daemon();
        daemon.engine.notes.send("bdev_register", "a");
        daemon.engine.notes.send("bdev_unregister", "a");
        assert_eq!(
            daemon.call("notify_get_notifications", json!({ "id": 1, "max": 5 })),
            json!([{ "type": "bdev_unregister", "ctx": "a", "id": 1 }])
        );
        assert!(
            daemon
                .call("notify_get_types", json!(null))
                .as_array()
                .unwrap()
                .contains(&json!("bdev_resize"))
        );
    }
}
