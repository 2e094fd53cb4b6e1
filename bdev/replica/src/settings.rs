//! The settings of a volume. Each one is declared once, in the list of `settings!`: the record in
//! the store, the parameters of methods, the options of commands and the reference derive from it.

use nacre_units::read;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most bytes of a volume's description, as UTF-8.
const MAX_DESCRIPTION: usize = 255;

/// Declares [`Settings`] and [`SettingsPatch`] from one list. An entry has the words, the name, the
/// type and the default of a setting. Its option of a command, and attributes of its field in the
/// patch, follow.
macro_rules! settings {
    ($(
        $(#[doc = $words:literal])+
        $name:ident: $type:ty = $default:expr,
        arg($($arg:tt)*)
        $(, $patch:meta)*;
    )+) => {
        /// Settings of a volume that can change live.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Settings {
            $($(#[doc = $words])+ pub $name: $type,)+
        }

        impl Default for Settings {
            fn default() -> Self {
                Self {
                    $($name: $default,)+
                }
            }
        }

        /// Settings of a volume; one left out keeps its value, or its default. Times and sizes are
        /// numbers in the unit of their name, or text such as "5s" and "100MB".
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[cfg_attr(feature = "clap", derive(clap::Args))]
        #[cfg_attr(feature = "clap", command(about = None, long_about = None))]
        #[serde(default, deny_unknown_fields)]
        pub struct SettingsPatch {
            $(
                $(#[doc = $words])+
                #[serde(skip_serializing_if = "Option::is_none")]
                #[cfg_attr(feature = "clap", arg($($arg)*))]
                $(#[$patch])*
                pub $name: Option<$type>,
            )+
        }

        impl SettingsPatch {
            /// Replaces the settings that were given.
            pub fn merge(self, into: &mut Settings) {
                $(if let Some(value) = self.$name {
                    into.$name = value;
                })+
            }
        }
    };
}

settings! {
    /// Replica selection for reads: `local-first`, `least-outstanding` or `round-robin`.
    read_policy: ReadPolicy = ReadPolicy::LocalFirst,
        arg(long, value_name = "POLICY"),
        schemars(with = "Option<String>");
    /// Writes wait while fewer replicas than this are in sync; default 1.
    min_in_sync: u8 = 1,
        arg(long, value_name = "N");
    /// A replica with an I/O that takes longer than this goes out of sync; default 8s (8000).
    deadline_ms: u64 = 8_000,
        arg(long = "deadline", value_name = "TIME", value_parser = nacre_units::time::parse_millis),
        serde(deserialize_with = "read::some_millis");
    /// How long host commands wait while no replica is in sync, before hosts are asked to retry;
    /// default 20s (20000). Linux hosts time out a command after 30 s.
    frozen_hold_ms: u64 = 20_000,
        arg(long = "frozen-hold", value_name = "TIME", value_parser = nacre_units::time::parse_millis),
        serde(deserialize_with = "read::some_millis");
    /// Read errors within an hour that take a replica out of sync; default 16.
    read_errors: u32 = 16,
        arg(long, value_name = "N");
    /// Rate limit of resync, in bytes per second; 0: no limit.
    resync_bytes_per_s: u64 = 0,
        arg(long = "resync-limit", alias = "resync-rate", value_name = "SIZE", value_parser = nacre_units::size::parse_bytes),
        serde(deserialize_with = "read::some_bytes");
    /// Delay before a resync to a returning replica, and after a host with writes in flight left or
    /// the volume was opened; default 500ms (500). Late writes of an old connection arrive within
    /// it.
    settle_ms: u64 = 500,
        arg(long = "settle", value_name = "TIME", value_parser = nacre_units::time::parse_millis),
        serde(deserialize_with = "read::some_millis");
    /// Hours between automatic verifications; 0: none.
    verify_hours: u32 = 0,
        arg(long, value_name = "HOURS"),
        serde(deserialize_with = "read::some_hours");
    /// Transports that hosts may use for a published volume: `inherit` and `any` (every listener),
    /// `rdma-only` or `tcp-only`.
    transport_policy: TransportPolicy = TransportPolicy::Inherit,
        arg(long, value_name = "POLICY"),
        schemars(with = "Option<String>");
    /// Text for people, shown with the volume: one line of at most 255 bytes; "" for none.
    description: String = String::new(),
        arg(long, value_name = "TEXT");
}

/// A setting outside its range.
#[derive(Debug)]
pub(crate) struct InvalidSetting {
    pub what: &'static str,
    pub why: &'static str,
}

impl Settings {
    /// Checks the range of each setting, for a volume with this number of replicas.
    pub(crate) fn check(&self, replicas: usize) -> Result<(), InvalidSetting> {
        let invalid = |what, why| Err(InvalidSetting { what, why });
        if !(1..=replicas.max(1)).contains(&usize::from(self.min_in_sync)) {
            return invalid("min_in_sync", "1 to the number of replicas");
        }
        for (what, millis) in [
            ("deadline_ms", self.deadline_ms),
            ("frozen_hold_ms", self.frozen_hold_ms),
        ] {
            if !(100..=600_000).contains(&millis) {
                return invalid(what, "100 to 600000");
            }
        }
        if self.settle_ms > 60_000 {
            return invalid("settle_ms", "at most 60000");
        }
        if self.read_errors == 0 {
            return invalid("read_errors", "at least 1");
        }
        // A terminal shows it: no control characters, separators of lines, or marks that reorder
        // the text around it.
        let breaks_a_line = |c: char| {
            c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        };
        if self.description.len() > MAX_DESCRIPTION || self.description.contains(breaks_a_line) {
            return invalid(
                "description",
                "one line of at most 255 bytes, without control characters",
            );
        }
        Ok(())
    }
}

/// Which in-sync replica serves a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ReadPolicy {
    /// The replicas on this machine, or all if none of these is in sync. Several share the reads by
    /// stripes of 256 KiB, so that each caches a different part of the volume. The others relieve
    /// one with clearly more work.
    #[default]
    LocalFirst,
    LeastOutstanding,
    RoundRobin,
}

/// Transports that the hosts of a published volume may use. A listener without `tcp_fallback`
/// withholds TCP in addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum TransportPolicy {
    /// Every transport that has a listener (the default).
    #[default]
    Inherit,
    /// The same as `inherit`.
    Any,
    RdmaOnly,
    TcpOnly,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

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
            let patch: SettingsPatch = serde_json::from_value(given.clone()).unwrap();
            let mut settings = Settings::default();
            patch.merge(&mut settings);
            serde_json::to_value(settings).unwrap()
        };
        let default = merge(&json!({}));
        assert_eq!(default, serde_json::to_value(Settings::default()).unwrap());
        let count = |value: &Value| value.as_object().unwrap().len();
        assert_eq!(count(&given), count(&default), "every setting is tried");
        for (name, value) in given.as_object().unwrap() {
            let mut expected = default.clone();
            assert_ne!(&expected[name], value, "{name}");
            expected[name] = value.clone();
            assert_eq!(merge(&json!({ name: value })), expected, "{name}");
        }
        assert_eq!(merge(&given), given);
    }

    /// Goal: the words of a setting name its default. Method: the schema beside the defaults.
    #[test]
    fn the_words_name_the_default() {
        let schema = schemars::schema_for!(SettingsPatch);
        let default = serde_json::to_value(Settings::default()).unwrap();
        let mut named = 0;
        for (name, property) in schema.as_value()["properties"].as_object().unwrap() {
            let words = property["description"].as_str().unwrap();
            let Some((_, words)) = words.split_once("default ") else {
                continue;
            };
            let value = default[name].to_string();
            let found = words.split(|c: char| !c.is_ascii_digit());
            assert!(found.into_iter().any(|n| n == value), "{name}: {value}");
            named += 1;
        }
        assert_eq!(named, 5);
    }

    #[test]
    fn text_has_units() {
        let text = json!({ "deadline_ms": "2s", "resync_bytes_per_s": "1MiB" });
        let patch: SettingsPatch = serde_json::from_value(text).unwrap();
        let mut settings = Settings::default();
        patch.merge(&mut settings);
        let now = (settings.deadline_ms, settings.resync_bytes_per_s);
        assert_eq!(now, (2000, 1 << 20));
    }
}
