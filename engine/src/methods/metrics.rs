//! `metrics_get`, a Nacre extension: the current metrics, as Prometheus scrapes them.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::metrics::Scrape;
use crate::rpc::{Method, Order, Registry, RpcError};
use crate::services::engine::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<Get>();
}

struct Get;

#[derive(Debug, Default, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    Json,
    Text,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetParams {
    /// `json`, or `text` in the Prometheus format.
    #[serde(default)]
    format: Format,
}

impl Method<Engine> for Get {
    const NAME: &'static str = "metrics_get";
    const ABOUT: &'static str = "Gives all metrics as of now.";
    const ORDER: Order = Order::Free;
    type Params = GetParams;
    type Reply = Value;

    async fn apply(params: GetParams, engine: Rc<Engine>) -> Result<Value, RpcError> {
        let scrape = Scrape::of(&engine).await;
        Ok(match params.format {
            Format::Json => scrape.json(),
            Format::Text => scrape.text().into(),
        })
    }
}
