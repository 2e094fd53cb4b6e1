//! `metrics_get`, a Nacre extension: the current metrics, as Prometheus scrapes them.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::metrics::Scrape;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetMetrics>();
}

pub struct GetMetrics;

#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MetricsFormat {
    #[default]
    Json,
    Text,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetMetricsParams {
    /// `json`, or `text` in the Prometheus format.
    #[serde(default)]
    pub format: MetricsFormat,
}

impl Method<Engine> for GetMetrics {
    const NAME: &'static str = "metrics_get";
    const ABOUT: &'static str = "Gives all metrics as of now.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = GetMetricsParams;
    type Reply = Value;

    async fn apply(params: GetMetricsParams, engine: Rc<Engine>) -> Result<Value, RpcError> {
        let scrape = Scrape::of(&engine).await;
        Ok(match params.format {
            MetricsFormat::Json => scrape.json(),
            MetricsFormat::Text => scrape.text().into(),
        })
    }
}
