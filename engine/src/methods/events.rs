//! `events_*`, a Nacre extension: events with their details, by category.

use std::rc::Rc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::notify::{Category, EventDetails, KEPT};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::lifecycle::Phase;
use crate::values::read;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetEvents>().add::<SubscribeEvents>();
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Events {
    /// Oldest first.
    events: Vec<EventDetails>,
    /// The `from` of the next call.
    next: u64,
    /// Number of events from `from` on that are no longer stored.
    lost: u64,
}

/// Selects events by id and category.
fn choose(engine: &Engine, from: u64, max: Option<u64>, categories: &[Category]) -> Events {
    let max = usize::try_from(max.unwrap_or(u64::MAX))
        .unwrap_or(usize::MAX)
        .min(KEPT);
    let wanted = |e: &EventDetails| categories.is_empty() || categories.contains(&e.category);
    let events = engine.notes.after(from, max, wanted);
    let next = match events.last() {
        Some(last) if events.len() == max => last.id + 1,
        // All stored events were examined. An id of an earlier daemon starts again.
        _ => engine.notes.next(),
    };
    Events {
        lost: engine.notes.oldest().saturating_sub(from),
        events,
        next,
    }
}

pub struct GetEvents;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetEventsParams {
    /// Id of the first event to return.
    #[serde(default)]
    pub from: u64,
    /// Maximum number of events; default: all.
    pub max: Option<u64>,
    /// Only these categories; default: all.
    #[serde(default)]
    pub categories: Vec<Category>,
}

impl Method<Engine> for GetEvents {
    const NAME: &'static str = "events_get";
    const ABOUT: &'static str = "Gives the events from an id on; the last 1024 are kept.";
    const CLASS: Class = Class::Read;
    type Params = GetEventsParams;
    type Reply = Events;

    async fn apply(params: GetEventsParams, engine: Rc<Engine>) -> Result<Events, RpcError> {
        Ok(choose(&engine, params.from, params.max, &params.categories))
    }
}

pub struct SubscribeEvents;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SubscribeEventsParams {
    /// Id of the first event to return; default: the next one that occurs.
    pub from: Option<u64>,
    /// Maximum number of events; default: all.
    pub max: Option<u64>,
    /// Only these categories; default: all.
    #[serde(default)]
    pub categories: Vec<Category>,
    /// How long to wait for an event in milliseconds; default 30 seconds, less than the RPC
    /// deadline.
    #[serde(default, deserialize_with = "read::some_millis")]
    pub wait_ms: Option<u64>,
}

impl Method<Engine> for SubscribeEvents {
    const NAME: &'static str = "events_subscribe";
    const ABOUT: &'static str = "Waits for events: answers as soon as there is one, or with none when the time is over. To be called again from \
         `next` on; nothing is missed in between, unless `lost` says so.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = SubscribeEventsParams;
    type Reply = Events;

    async fn apply(params: SubscribeEventsParams, engine: Rc<Engine>) -> Result<Events, RpcError> {
        // An id beyond `next` belongs to an earlier daemon: return all stored events.
        let next = engine.notes.next();
        let from = params.from.filter(|from| *from <= next);
        let from = from.unwrap_or_else(|| if params.from.is_some() { 0 } else { next });
        let most = engine.deadline().saturating_sub(Duration::from_secs(1));
        let wait = Duration::from_millis(params.wait_ms.unwrap_or(30_000)).min(most);
        let look = || choose(&engine, from, params.max, &params.categories);
        let happens = async {
            loop {
                let more = engine.notes.more();
                let found = look();
                if !found.events.is_empty() || found.lost > 0 {
                    return;
                }
                more.await;
            }
        };
        tokio::select! {
            _ = tokio::time::timeout(wait, happens) => {}
            () = engine.lifecycle.reached(Phase::Stopping) => {}
        }
        Ok(look())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::test_daemon;
    use crate::notify::KEPT;
    use serde_json::{Value, json};

    fn ids(answer: &Value) -> Vec<u64> {
        let events = answer["events"].as_array().unwrap();
        events.iter().map(|e| e["id"].as_u64().unwrap()).collect()
    }

    #[test]
    fn events_are_chosen_by_id_and_category() {
        let daemon = test_daemon();
        let notes = &daemon.engine.notes;
        notes.send("bdev_register", "a");
        notes.send("transport_downgraded", "eth0");
        notes.report(
            "replica_out",
            "v/a".into(),
            "it went".into(),
            json!({ "why": "gone" }),
        );
        let all = daemon.call("events_get", json!({}));
        assert_eq!((ids(&all), &all["next"]), (vec![0, 1, 2], &json!(3)));
        let mut last = all["events"][2].clone();
        assert!(last["time"].take().as_str().unwrap().ends_with('Z'));
        assert_eq!(
            last,
            json!({ "id": 2, "time": null, "category": "replica", "severity": "warning",
                "type": "replica_out", "ctx": "v/a", "text": "it went", "facts": { "why": "gone" } })
        );
        let some = daemon.call(
            "events_get",
            json!({ "categories": ["transport", "device"] }),
        );
        assert_eq!((ids(&some), &some["next"]), (vec![0, 1], &json!(3)));
        let one = daemon.call("events_get", json!({ "from": 1, "max": 1 }));
        assert_eq!((ids(&one), &one["next"]), (vec![1], &json!(2)));
        let refused = daemon.refused("events_get", json!({ "categories": ["weather"] }));
        assert_eq!(
            refused.data.unwrap().field.as_deref(),
            Some("categories[0]")
        );
        for _ in 0..KEPT {
            daemon.engine.notes.send("bdev_register", "a");
        }
        assert_eq!(daemon.call("events_get", json!({}))["lost"], 3);
    }

    /// Goal: a subscriber waits for its category, keeps waiting after other events, and misses none
    /// between two calls.
    #[test]
    fn subscribers_wait() {
        let daemon = test_daemon();
        let none = daemon.call("events_subscribe", json!({ "wait_ms": 10 }));
        assert_eq!((ids(&none), &none["next"]), (vec![], &json!(0)));
        let engine = &daemon.engine;
        let params = serde_json::value::to_raw_value(&json!({ "categories": ["volume"] })).unwrap();
        let (answer, ()) = daemon.run(async {
            tokio::join!(engine.call("events_subscribe", Some(&params)), async {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                engine.notes.send("bdev_register", "a");
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                engine.notes.send("volume_open", "v");
                engine.notes.send("volume_close", "v");
            })
        });
        let answer: Value = serde_json::from_str(answer.unwrap().get()).unwrap();
        assert_eq!((ids(&answer), &answer["next"]), (vec![1, 2], &json!(3)));
        let from = json!({ "from": 2, "wait_ms": 10 });
        assert_eq!(ids(&daemon.call("events_subscribe", from)), [2]);
        // The id of an earlier daemon process: all stored events are returned.
        let from = json!({ "from": 99, "wait_ms": 10 });
        assert_eq!(ids(&daemon.call("events_subscribe", from)), [0, 1, 2]);
    }
}
