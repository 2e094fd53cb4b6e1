//! `bdev_nvme_set_options`: options of controllers attached afterwards.

use std::rc::Rc;

use serde_json::Value;

use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::nvme::options::{KEY, Options, UNDECODABLE};
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetOptions>();
}

struct SetOptions;

impl Method<Engine> for SetOptions {
    const NAME: &'static str = "bdev_nvme_set_options";
    const UNDECODABLE: i32 = UNDECODABLE;
    const ABOUT: &'static str = "Sets options of controllers that are attached from then on. Options left out keep their value.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = Options;
    type Reply = bool;

    async fn apply(params: Options, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let mut merged =
            serde_json::to_value(Options::of(&engine)).expect("options are plain data");
        let given = serde_json::to_value(&params).expect("options are plain data");
        if let (Some(all), Value::Object(given)) = (merged.as_object_mut(), given) {
            all.extend(given);
        }
        let options: Options = serde_json::from_value(merged.clone())
            .map_err(|error| RpcError::internal(error.to_string()))?;
        options.check(&engine.settings.replication)?;
        let change = Change::put(KEY, Self::NAME, merged);
        engine.journal.commit(change).await.map(|()| true)
    }
}
