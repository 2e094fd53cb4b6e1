//! Lists of tables in the configuration file, and the keys of their items.

use serde::Serialize;

use super::alert::{MailSettings, WebhookSettings};
use super::listener::Listener;
use super::remote::RemoteTarget;
use super::settings::{Bdev, Host, Key, Namespace, Subsystem};
use crate::attach::{AttachParams, OF_ADDRESS};
use crate::bdev_modules::MODULES;

/// The default item of each list of tables, used to check the keys of a file.
pub(super) fn item_template(list: &str) -> Option<serde_json::Value> {
    fn json(value: impl Serialize) -> Option<serde_json::Value> {
        Some(serde_json::to_value(value).expect("settings are plain data"))
    }
    match list {
        "alert.webhook" => json(WebhookSettings::default()),
        "alert.mail" => json(MailSettings::default()),
        "key" => json(Key::default()),
        "remote" => json(RemoteTarget::default()),
        "bdev" => json(Bdev::default()),
        "nvmf.listener" => json(Listener::default()),
        "nvmf.subsystem" => json(Subsystem::default()),
        "nvmf.subsystem.host" => json(Host::default()),
        "nvmf.subsystem.namespace" => json(Namespace::default()),
        _ => None,
    }
}

/// The keys that an item of a list of tables may have, by name.
pub(super) fn known_keys(list: &str) -> Option<serde_json::Value> {
    let mut known = item_template(list)?;
    let schemas: Vec<schemars::Schema> = match list {
        "bdev" => {
            let declared = MODULES.iter().filter_map(|module| module.declared);
            declared.map(|declared| (declared.schema)()).collect()
        }
        "remote" => vec![schemars::schema_for!(AttachParams)],
        _ => Vec::new(),
    };
    for schema in schemas.into_iter().map(serde_json::Value::from) {
        for (key, _) in schema["properties"].as_object().into_iter().flatten() {
            let is_written_otherwise =
                OF_ADDRESS.contains(&key.as_str()) || key == "multipath_opts";
            if list == "remote" && is_written_otherwise {
                continue;
            }
            let known = known.as_object_mut()?.entry(key.clone());
            known.or_insert_with(Default::default);
        }
    }
    Some(known)
}
