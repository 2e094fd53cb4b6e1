//! The settings of a volume, as parameters of methods and options of commands. Each setting is
//! declared here and in [`Settings`], under the same name and type; [`Settings`] has its default,
//! range and effect.

use nacre_bdev_replica::model::{ReadPolicy, Settings, TransportPolicy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::values::{read, size, time};

/// Settings of a volume; one left out keeps its value, or its default. Times and sizes are numbers
/// in the unit of their name, or text such as "5s" and "100MB".
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema, clap::Args)]
#[serde(default, deny_unknown_fields)]
#[command(about = None, long_about = None)]
pub struct SettingsParams {
    /// Replica selection for reads: `local-first`, `least-outstanding` or `round-robin`.
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "POLICY")]
    read_policy: Option<ReadPolicy>,
    /// Writes wait while fewer replicas than this are in sync; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "N")]
    min_in_sync: Option<u8>,
    /// A replica with an I/O that takes longer than this goes out of sync; default 8s (8000).
    #[serde(
        deserialize_with = "read::some_millis",
        skip_serializing_if = "Option::is_none"
    )]
    #[arg(long = "deadline", value_name = "TIME", value_parser = millis)]
    deadline_ms: Option<u64>,
    /// How long host commands wait while no replica is in sync, before hosts are asked to retry;
    /// default 20s (20000). Linux hosts time out a command after 30 s.
    #[serde(
        deserialize_with = "read::some_millis",
        skip_serializing_if = "Option::is_none"
    )]
    #[arg(long = "frozen-hold", value_name = "TIME", value_parser = millis)]
    frozen_hold_ms: Option<u64>,
    /// Read errors within an hour that take a replica out of sync; default 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "N")]
    read_errors: Option<u32>,
    /// Rate limit of resync, in bytes per second; 0: no limit.
    #[serde(
        deserialize_with = "read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    #[arg(long = "resync-limit", alias = "resync-rate", value_name = "SIZE", value_parser = size::parse_bytes)]
    resync_bytes_per_s: Option<u64>,
    /// Delay before a resync to a returning replica, and after a host with writes in flight left or
    /// the volume was opened; default 500ms (500). Late writes of an old connection arrive within
    /// it.
    #[serde(
        deserialize_with = "read::some_millis",
        skip_serializing_if = "Option::is_none"
    )]
    #[arg(long = "settle", value_name = "TIME", value_parser = millis)]
    settle_ms: Option<u64>,
    /// Hours between automatic verifications; 0: none.
    #[serde(
        deserialize_with = "read::some_hours",
        skip_serializing_if = "Option::is_none"
    )]
    #[arg(long, value_name = "HOURS")]
    verify_hours: Option<u32>,
    /// Transports that hosts may use for a published volume: `inherit` and `any` (every listener),
    /// `rdma-only` or `tcp-only`.
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "POLICY")]
    transport_policy: Option<TransportPolicy>,
    /// Text for people, shown with the volume: one line of at most 255 bytes; "" for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
}

impl SettingsParams {
    /// Replaces the settings that were given.
    pub(super) fn merge(&self, into: &mut Settings) {
        let object = |settings| match settings {
            Ok(serde_json::Value::Object(object)) => object,
            _ => unreachable!("settings are an object of plain data"),
        };
        let mut merged = object(serde_json::to_value(&*into));
        merged.extend(object(serde_json::to_value(self)));
        *into = serde_json::from_value(merged.into())
            .expect("the fields of both structs have equal names and types");
    }
}

fn millis(text: &str) -> Result<u64, String> {
    let time = time::parse(text)?;
    Ok(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    fn names(of: &Value) -> BTreeSet<&str> {
        let object = of.as_object().expect("an object");
        object.keys().map(String::as_str).collect()
    }

    /// Goal: no setting is declared in one place only. Method: the parameters' schema beside the
    /// stored form.
    #[test]
    fn both_structs_have_the_same_fields() {
        let schema = schemars::schema_for!(SettingsParams);
        let stored = serde_json::to_value(Settings::default()).unwrap();
        assert_eq!(names(&schema.as_value()["properties"]), names(&stored));
    }

    /// Goal: a merge replaces the given settings only, whatever their type. Method: each field of
    /// settings that differ from the defaults in every field, alone, then all together.
    #[test]
    fn a_merge_replaces_the_given_settings_only() {
        let given = json!({
            "read_policy": "round-robin", "min_in_sync": 2, "deadline_ms": 200,
            "frozen_hold_ms": 300, "read_errors": 4, "resync_bytes_per_s": 5, "settle_ms": 6,
            "verify_hours": 7, "transport_policy": "tcp-only", "description": "of the shop",
        });
        let merge = |given: &Value| {
            let params: SettingsParams = serde_json::from_value(given.clone()).unwrap();
            let mut settings = Settings::default();
            params.merge(&mut settings);
            serde_json::to_value(settings).unwrap()
        };
        let default = merge(&json!({}));
        assert_eq!(default, serde_json::to_value(Settings::default()).unwrap());
        assert_eq!(names(&given), names(&default), "every setting is tried");
        for (name, value) in given.as_object().unwrap() {
            let mut expected = default.clone();
            assert_ne!(&expected[name], value, "{name}");
            expected[name] = value.clone();
            assert_eq!(merge(&json!({ name: value })), expected, "{name}");
        }
        assert_eq!(merge(&given), given);
    }

    #[test]
    fn text_has_units() {
        let text = json!({ "deadline_ms": "2s", "resync_bytes_per_s": "1MiB" });
        let params: SettingsParams = serde_json::from_value(text).unwrap();
        let mut settings = Settings::default();
        params.merge(&mut settings);
        let now = (settings.deadline_ms, settings.resync_bytes_per_s);
        assert_eq!(now, (2000, 1 << 20));
        assert_eq!(millis("1m"), Ok(60_000));
    }
}
