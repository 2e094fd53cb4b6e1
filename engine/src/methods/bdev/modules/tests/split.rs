//! Goal: `bdev_split_*` as in SPDK, over starts and saved configurations, and as `[[bdev]]`.

use serde_json::{Value, json};

use crate::config::{Settings, load_text};
use crate::methods::testing::{TestDaemon, test_daemon};
use crate::store::Store;

/// 3 MiB.
fn base(name: &str) -> Value {
    json!({ "name": name, "num_blocks": 6144, "block_size": 512,
        "uuid": "33333333-2222-3333-4444-555555555555" })
}

fn split(base: &str, count: u32, size_mb: u64) -> Value {
    json!({ "base_bdev": base, "split_count": count, "split_size_mb": size_mb })
}

fn names(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.call("bdev_get_bdevs", json!(null));
    let name = |bdev: &Value| bdev["name"].as_str().unwrap().to_owned();
    all.as_array().unwrap().iter().map(name).collect()
}

/// Goal: names, properties, claims and refusals are SPDK's.
#[test]
fn parts_are_made_and_deleted() {
    let daemon = test_daemon();
    daemon.call("bdev_malloc_create", base("m"));
    for (params, code, field) in [
        (split("m", 0, 0), -32602, "split_count"),
        (split("nowhere", 0, 0), -32602, "split_count"),
        (split("m", 1, 4), -32602, "split_size_mb"),
        (json!({ "base_bdev": "m" }), -32602, "split_count"),
        (
            json!({ "base_bdev": "m", "split_count": -1 }),
            -32602,
            "split_count",
        ),
    ] {
        let refused = daemon.refused("bdev_split_create", params.clone());
        assert_eq!(refused.code, code, "{params}");
        assert_eq!(
            refused.data.unwrap().field.as_deref(),
            Some(field),
            "{params}"
        );
    }
    let refused = daemon.refused("bdev_split_create", split("m", 1, 4));
    let said = "Failed to create 1 split bdevs from 'm': Invalid argument";
    assert_eq!(refused.message, said);
    let refused = daemon.refused("bdev_split_delete", json!({ "base_bdev": "m" }));
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (-32602, "No such file or directory")
    );
    assert_eq!(refused.data.unwrap().field.as_deref(), Some("base_bdev"));

    let made = daemon.call(
        "bdev_split_create",
        json!({ "base_bdev": "m", "split_count": 3 }),
    );
    assert_eq!(made, json!(["mp0", "mp1", "mp2"]));
    let refused = daemon.refused("bdev_split_create", split("m", 2, 0));
    let said = "Failed to create 2 split bdevs from 'm': File exists";
    assert_eq!((refused.code, refused.message.as_str()), (-32602, said));
    let part = &daemon.call("bdev_get_bdevs", json!({ "name": "mp2" }))[0];
    assert_eq!(part["product_name"], "Split Disk");
    assert_eq!(
        (&part["num_blocks"], &part["block_size"]),
        (&json!(2048), &json!(512))
    );
    let specific = json!({ "split": { "base_bdev": "m", "offset_blocks": 4096 } });
    assert_eq!(part["driver_specific"], specific);
    let whole = &daemon.call("bdev_get_bdevs", json!({ "name": "m" }))[0];
    assert_eq!(
        (&whole["claimed"], &whole["claim_type"]),
        (&json!(true), &json!("exclusive_write"))
    );
    // The claim keeps others from the base, and parts can be used like any device.
    let pass = |base: &str| json!({ "name": "p", "base_bdev_name": base });
    assert_eq!(daemon.refused("bdev_passthru_create", pass("m")).code, -1);
    daemon.call("bdev_passthru_create", pass("mp1"));
    assert_eq!(
        daemon.call("bdev_split_delete", json!({ "base_bdev": "m" })),
        true
    );
    assert_eq!(names(&daemon), ["m"]);
    assert!(daemon.engine.journal.below("bdev/mp").is_empty());
    // The base takes its parts along.
    daemon.call("bdev_split_create", split("m", 9, 1));
    assert_eq!(names(&daemon), ["m", "mp0", "mp1", "mp2"]);
    daemon.call("bdev_malloc_delete", json!({ "name": "m" }));
    assert!(names(&daemon).is_empty());
    assert!(daemon.engine.journal.below("bdev/").is_empty());
}

/// Goal: as in SPDK, the call before its base answers no names, and the parts come with the base.
#[test]
fn parts_come_with_their_base() {
    let daemon = test_daemon();
    assert_eq!(
        daemon.call("bdev_split_create", split("m", 2, 1)),
        json!([])
    );
    let refused = daemon.refused("bdev_split_create", split("m", 2, 1));
    assert_eq!(refused.code, -32602, "{refused}");
    daemon.call("bdev_malloc_create", base("m"));
    assert_eq!(names(&daemon), ["m", "mp0", "mp1"]);
    daemon.call("bdev_split_delete", json!({ "base_bdev": "m" }));
    assert_eq!(
        daemon.call("bdev_split_create", split("n", 2, 1)),
        json!([])
    );
    daemon.call("bdev_split_delete", json!({ "base_bdev": "n" }));
    assert!(daemon.engine.journal.below("deferred/").is_empty());
}

/// Goal: a stored split has the same parts after a start, and is saved as one call, also for SPDK.
#[test]
fn parts_are_restored_and_saved() {
    let dir = tempfile::tempdir().unwrap();
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
    let uuid = |daemon: &TestDaemon| {
        daemon.call("bdev_get_bdevs", json!({ "name": "mp1" }))[0]["uuid"].clone()
    };
    let before = {
        let daemon = start();
        daemon.call("bdev_malloc_create", base("m"));
        daemon.call("bdev_split_create", split("m", 2, 1));
        daemon.call(
            "bdev_passthru_create",
            json!({ "name": "p", "base_bdev_name": "mp1" }),
        );
        uuid(&daemon)
    };
    let daemon = start();
    assert_eq!(names(&daemon), ["m", "mp0", "mp1", "p"]);
    assert_eq!(uuid(&daemon), before);
    let saved = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let saved = saved.as_array().unwrap().iter();
    let mut saved = saved.filter(|call| call["method"] == "bdev_split_create");
    assert_eq!(saved.next().unwrap()["params"], split("m", 2, 1));
    assert!(saved.next().is_none());
    let (_, left_out) = crate::methods::spdk::export::for_spdk(
        &crate::methods::framework::whole_config(&daemon.engine),
    );
    assert!(left_out.is_empty(), "{left_out:?}");
}

/// Goal: an equal division keeps its places over a start on a file that grew meanwhile. SPDK would
/// divide the larger file anew, so its export leaves the call out.
#[test]
fn parts_of_a_grown_file_stay() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("f.img");
    let size = |bytes| {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&image);
        file.unwrap().set_len(bytes).unwrap();
    };
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
    let place = |daemon: &TestDaemon| {
        let part = &daemon.call("bdev_get_bdevs", json!({ "name": "fp1" }))[0];
        let offset = part["driver_specific"]["split"]["offset_blocks"].clone();
        (offset, part["num_blocks"].clone(), part["uuid"].clone())
    };
    size(3 << 20);
    let before = {
        let daemon = start();
        let file = json!({ "name": "f", "filename": image, "block_size": 512 });
        daemon.call("bdev_aio_create", file);
        daemon.call("bdev_split_create", split("f", 4, 0));
        place(&daemon)
    };
    assert_eq!((&before.0, &before.1), (&json!(1536), &json!(1536)));
    size(8 << 20);
    let daemon = start();
    assert_eq!(place(&daemon), before);
    let (_, left_out) = crate::methods::spdk::export::for_spdk(
        &crate::methods::framework::whole_config(&daemon.engine),
    );
    assert_eq!(
        left_out,
        ["bdev_split_create bdev fp0: SPDK has no part_bytes"]
    );
}

/// Goal: `[[bdev]]` takes the parameters of the call, and refuses what the call would refuse.
#[test]
fn parts_are_declared() {
    let base = "[[bdev]]\nname = \"m\"\ntype = \"malloc\"\nsize = \"3MiB\"\n";
    let settings = |text: &str| load_text(Some(("n.toml", text)), [], &[]);
    let text = format!("{base}[[bdev]]\ntype = \"split\"\nbase_bdev = \"m\"\nsplit_count = 3\n");
    let daemon = TestDaemon::with(settings(&text).unwrap().settings, None);
    assert_eq!(names(&daemon), ["m", "mp0", "mp1", "mp2"]);
    for (keys, said) in [
        (
            "base_bdev = \"m\"",
            "n.toml:5: bdev[1].split_count: \"split_count\" is missing; add it",
        ),
        (
            "base_bdev = \"m\"\nsplit_count = -1",
            "bdev[1].split_count: -1 is not a whole number",
        ),
        (
            "base_bdev = \"m\"\nsplit_count = 2\nsize = 1",
            "bdev[1].size: a device of type \"split\" has no size",
        ),
        (
            "name = \"x\"\nbase_bdev = \"m\"\nsplit_count = 2",
            "bdev[1].name: \"name\" is not known here",
        ),
        (
            "base_bdev = \"m\"\nsplit_count = 2\nbase_name = \"x\"",
            "bdev[1].base_name: \"base_name\" is not known here",
        ),
        (
            "base_bdev = \"m\"\nsplit_cuont = 2",
            "did you mean \"bdev.split_count\"?",
        ),
    ] {
        let text = format!("{base}[[bdev]]\ntype = \"split\"\n{keys}\n");
        let refused = settings(&text).unwrap_err().to_string();
        assert!(refused.contains(said), "{keys}: {refused}");
    }
    let text = format!("{base}base_bdev = \"m\"\n");
    let refused = settings(&text).unwrap_err().to_string();
    assert!(
        refused.contains("bdev[0].base_bdev: a key of devices of another type"),
        "{refused}"
    );
}
