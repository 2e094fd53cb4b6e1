//! Tests of the description of a volume.

use serde_json::json;

use super::super::super::testing::TestDaemon;
use super::{facts, file, until};
use crate::config::Settings;
use crate::store::Store;

/// Goal: a volume has the description that it was given, at its creation and later, over a restart;
/// text that would disturb a terminal or is too long is refused.
#[test]
fn a_description_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let start = || {
        let store = Store::open(&dir.path().join("state")).unwrap();
        TestDaemon::with(Settings::default(), Some(store))
    };
    let set = |text: &str| json!({ "name": "v", "settings": { "description": text } });
    let daemon = start();
    file(&daemon, dir.path(), "a", 8);
    let made = daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": ["a"], "settings": { "description": "für alle" } }),
    );
    assert_eq!(made["settings"]["description"], "für alle");
    let longest = "ü".repeat(127);
    daemon.call("volume_set", set(&longest));
    // Another setting leaves it as it is.
    let other = json!({ "name": "v", "settings": { "read_errors": 5 } });
    daemon.call("volume_set", other);
    for wrong in ["a\nb", "\u{1b}[2J", "a\u{202e}b", &"ü".repeat(128)] {
        let refused = daemon.refused("volume_set", set(wrong));
        assert_eq!(facts(&refused), (-22, Some("description")), "{wrong:?}");
    }
    drop(daemon);
    let daemon = start();
    let listed = daemon.call("volume_list", json!(null));
    assert_eq!(listed[0]["settings"]["description"], longest);
    let records = daemon.call("volume_get_records", json!(null));
    let stored = &records["volumes"][0]["settings"]["description"];
    assert_eq!(stored, &longest);
    until(&daemon, "open", |v| v["state"] == "healthy");
    let none = daemon.call("volume_set", set(""));
    assert_eq!(none["settings"]["description"], "");
}
