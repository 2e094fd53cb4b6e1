//! Goal: parameters, replies and refusals are SPDK's, and devices are restored.

mod deferred;
mod gone;

use serde_json::{Value, json};

use super::super::testing::{TestDaemon, test_daemon};
use crate::config::Settings;
use crate::store::Store;

fn names(daemon: &TestDaemon) -> Vec<String> {
    let list = daemon.call("bdev_get_bdevs", json!(null));
    list.as_array()
        .unwrap()
        .iter()
        .map(|b| b["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_malloc_device_is_described_as_in_spdk() {
    let daemon = test_daemon();
    let uuid = "7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3a";
    // Exactly the parameters that rpc.py sends.
    let made = daemon.call(
        "bdev_malloc_create",
        json!({
            "num_blocks": 256, "block_size": 512, "name": "Malloc0", "uuid": uuid,
            "md_interleave": false, "dif_is_head_of_md": false,
        }),
    );
    assert_eq!(made, "Malloc0");
    insta::assert_json_snapshot!(daemon.call("bdev_get_bdevs", json!({ "name": "Malloc0" })));
    assert_eq!(
        daemon.call("bdev_get_bdevs", json!({ "name": uuid }))[0]["name"],
        "Malloc0"
    );
    assert_eq!(
        daemon.call(
            "bdev_malloc_create",
            json!({ "num_blocks": 8, "block_size": 4096 })
        ),
        "Malloc1"
    );
    insta::assert_json_snapshot!(
        daemon.call("bdev_get_iostat", json!({ "names": ["Malloc0"] }))["bdevs"]
    );
    assert_eq!(
        daemon.call("bdev_malloc_delete", json!({ "name": "Malloc0" })),
        true
    );
    assert_eq!(names(&daemon), ["Malloc1"]);
}

#[test]
fn refusals_have_spdk_codes_with_field_and_cause() {
    let daemon = test_daemon();
    daemon.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    for (method, params, code, message, field) in [
        (
            "bdev_null_create",
            json!({ "name": "n", "num_blocks": 1, "block_size": 512 }),
            -17,
            "File exists",
            "name",
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "num_blocks": 1, "block_size": 500 }),
            -22,
            "Invalid argument",
            "block_size",
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "num_blocks": 0, "block_size": 512 }),
            -22,
            "Invalid argument",
            "num_blocks",
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "num_blocks": 1, "block_size": 512, "md_size": 8 }),
            -95,
            "Operation not supported",
            "md_size",
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "num_blocks": 1, "block_size": 512, "uuid": "x" }),
            -32603,
            "Invalid parameters",
            "uuid",
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "block_size": 512 }),
            -32603,
            "Invalid parameters",
            "num_blocks",
        ),
        (
            "bdev_null_delete",
            json!({ "name": "x" }),
            -19,
            "No such device",
            "name",
        ),
        (
            "bdev_malloc_delete",
            json!({ "name": "n" }),
            -19,
            "No such device",
            "name",
        ),
        (
            "bdev_get_bdevs",
            json!({ "name": "x" }),
            -19,
            "No such device",
            "name",
        ),
        (
            "bdev_get_iostat",
            json!({ "names": ["x"] }),
            -19,
            "No such device",
            "name",
        ),
        (
            "bdev_null_resize",
            json!({ "name": "n", "new_size": 0 }),
            -22,
            "Invalid argument",
            "new_size",
        ),
        (
            "bdev_get_bdevs",
            json!({ "name": "x", "timeout": 1 }),
            -110,
            "Connection timed out",
            "name",
        ),
        (
            "bdev_aio_create",
            json!({ "name": "f", "filename": "/nowhere/at/all" }),
            -2,
            "No such file or directory",
            "filename",
        ),
    ] {
        let error = daemon.refused(method, params.clone());
        let facts = error.data.clone().unwrap_or_default();
        assert_eq!(
            (error.code, error.message.as_str(), facts.field.as_deref()),
            (code, message, Some(field)),
            "{method} {params}: {error}"
        );
    }
    assert_eq!(names(&daemon), ["n"], "refused calls left nothing behind");
    assert_eq!(
        daemon
            .refused("bdev_get_histogram", json!({ "name": "n" }))
            .message,
        "Bad address"
    );
}

/// Goal: no device is created with the nil UUID, which hosts do not accept as an identity.
#[test]
fn the_nil_uuid_is_refused() {
    let daemon = test_daemon();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    for name in ["a", "b"] {
        daemon.call(
            "bdev_malloc_create",
            json!({ "name": name, "num_blocks": 16384, "block_size": 512 }),
        );
    }
    let nil = "00000000-0000-0000-0000-000000000000";
    for (method, mut params) in [
        (
            "bdev_malloc_create",
            json!({ "name": "m", "num_blocks": 8, "block_size": 512 }),
        ),
        (
            "bdev_null_create",
            json!({ "name": "m", "num_blocks": 8, "block_size": 512 }),
        ),
        (
            "bdev_uring_create",
            json!({ "name": "m", "filename": file, "size": 1 << 20 }),
        ),
        (
            "bdev_aio_create",
            json!({ "name": "m", "filename": file, "size": 1 << 20 }),
        ),
        (
            "bdev_passthru_create",
            json!({ "name": "m", "base_bdev_name": "a" }),
        ),
        ("bdev_error_create", json!({ "base_name": "a" })),
        (
            "bdev_raid_create",
            json!({ "name": "m", "raid_level": "raid1", "base_bdevs": ["a", "b"] }),
        ),
        (
            "volume_create",
            json!({ "name": "m", "devices": ["a", "b"] }),
        ),
    ] {
        params["uuid"] = nil.into();
        let refused = daemon.refused(method, params);
        let field = refused.data.as_ref().and_then(|data| data.field.clone());
        assert_eq!(
            (refused.code, field.as_deref()),
            (-22, Some("uuid")),
            "{method}: {refused}"
        );
    }
    assert!(!file.exists(), "no file is created");
    assert_eq!(names(&daemon), ["a", "b"]);
}

#[test]
fn a_refusal_names_the_kind_of_the_device() {
    let daemon = test_daemon();
    daemon.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    let inject = |name: &str| json!({ "name": name, "io_type": "read", "error_type": "failure" });
    let facts_of = |method: &str, params: Value| {
        let refused = daemon.refused(method, params);
        let code = match method {
            "bdev_delay_update_latency" => -32602,
            "bdev_null_resize" => -22,
            _ => -19,
        };
        assert_eq!(refused.code, code);
        let facts = refused.data.unwrap();
        (facts.cause, facts.remedy.unwrap())
    };
    let method = "bdev_error_inject_error";
    assert_eq!(
        facts_of(method, inject("n")),
        (
            "\"n\" is not a fault bdev: it is a device of the kind \"Null disk\"".into(),
            "make one of it with bdev_error_create, and name that".into()
        )
    );
    assert_eq!(
        facts_of(method, inject("x")).0,
        "there is no bdev \"x\"",
        "a device that does not exist"
    );
    daemon.call("bdev_error_create", json!({ "base_name": "n" }));
    assert_eq!(
        facts_of(method, inject("n")).1,
        "the fault bdev on it is \"EE_n\""
    );
    let uuid = daemon.call("bdev_get_bdevs", json!({ "name": "EE_n" }))[0]["uuid"].clone();
    assert_eq!(daemon.call(method, inject(uuid.as_str().unwrap())), true);
    for (method, params) in [
        ("bdev_error_resume_pending", json!({ "name": "n" })),
        ("bdev_aio_rescan", json!({ "name": "n" })),
        ("bdev_uring_rescan", json!({ "name": "n" })),
        ("bdev_null_resize", json!({ "name": "EE_n", "new_size": 9 })),
        (
            "bdev_delay_update_latency",
            json!({ "delay_bdev_name": "n", "latency_type": "avg_read", "latency_us": 1 }),
        ),
    ] {
        let (cause, _) = facts_of(method, params);
        assert!(cause.contains(" is not a"), "{method}: {cause}");
    }
}

/// Goal: the growth of a file reaches everything stacked on it, up to the namespace.
#[test]
fn stacked_devices_grow_with_their_base() {
    let daemon = test_daemon();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    daemon.call(
        "bdev_aio_create",
        json!({ "name": "f", "filename": file.path(), "block_size": 512 }),
    );
    daemon.call(
        "bdev_delay_create",
        json!({
            "name": "d", "base_bdev_name": "f", "avg_read_latency": 1, "p99_read_latency": 2,
            "avg_write_latency": 3, "p99_write_latency": 4,
        }),
    );
    daemon.call(
        "bdev_passthru_create",
        json!({ "name": "p", "base_bdev_name": "d" }),
    );
    daemon.call("bdev_error_create", json!({ "base_name": "p" }));
    let blocks = |name: &str| {
        daemon.call("bdev_get_bdevs", json!({ "name": name }))[0]["num_blocks"].clone()
    };
    let all = ["f", "d", "p", "EE_p"];
    assert_eq!(all.map(blocks), [2048; 4]);
    file.as_file().set_len(4 << 20).unwrap();
    assert_eq!(daemon.call("bdev_aio_rescan", json!({ "name": "f" })), true);
    assert_eq!(all.map(blocks), [8192; 4]);
}

/// Goal: operations are counted between borders once a histogram is enabled.
#[test]
fn histograms_are_counted_between_borders() {
    let daemon = test_daemon();
    daemon.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    let method = "bdev_get_histogram_borders";
    let borders = |borders: &[u64]| json!({ "name": "n", "borders": borders });
    assert_eq!(daemon.refused(method, borders(&[1])).message, "Bad address");
    daemon.call(
        "bdev_enable_histogram",
        json!({ "name": "n", "enable": true }),
    );
    assert_eq!(
        daemon.call(method, borders(&[10, 100])),
        json!({ "borders_count": [0, 0, 0] })
    );
    for wrong in [&[][..], &[2, 1], &[1, 1], &[1; 65]] {
        let refused = daemon.refused(method, borders(wrong));
        assert_eq!(refused.code, -22);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("borders"));
    }
}

/// Goal: every reset mode is accepted. The device is idle, so its counters are not checked.
#[test]
fn every_reset_mode_is_accepted() {
    let daemon = test_daemon();
    daemon.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    for mode in ["all", "maxmin", "error", "none"] {
        let reset = json!({ "name": "n", "mode": mode });
        assert_eq!(daemon.call("bdev_reset_iostat", reset), true, "{mode}");
        let get = json!({ "names": ["n"], "reset_mode": mode });
        let stat = daemon.call("bdev_get_iostat", get);
        assert_eq!(stat["bdevs"][0]["num_read_ops"], 0, "{mode}");
    }
    let other = json!({ "name": "n", "mode": "some" });
    assert_eq!(daemon.refused("bdev_reset_iostat", other).code, -32603);
}

#[test]
fn stacked_devices_are_resized_and_deleted_together() {
    let daemon = test_daemon();
    daemon.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    daemon.call(
        "bdev_delay_create",
        json!({
            "name": "d", "base_bdev_name": "n", "avg_read_latency": 1, "p99_read_latency": 2,
            "avg_write_latency": 3, "p99_write_latency": 4,
        }),
    );
    assert_eq!(
        daemon.call("bdev_error_create", json!({ "base_name": "d" })),
        true
    );
    assert_eq!(
        daemon
            .refused(
                "bdev_passthru_create",
                json!({ "name": "p", "base_bdev_name": "n" })
            )
            .code,
        -1
    );
    assert_eq!(
        daemon.call(
            "bdev_delay_update_latency",
            json!({ "delay_bdev_name": "d", "latency_type": "p99_write", "latency_us": 9 })
        ),
        true
    );
    let error = daemon.refused(
        "bdev_error_inject_error",
        json!({ "name": "EE_d", "io_type": "read", "error_type": "nvme_failure" }),
    );
    assert_eq!(
        error.message,
        "nvme_sct or nvme_sc should be specified for NVMe error injection"
    );
    assert_eq!(
        daemon.call(
            "bdev_error_inject_error",
            json!({ "name": "EE_d", "io_type": "read", "error_type": "failure", "num": 2 })
        ),
        true
    );
    assert_eq!(
        daemon.call("bdev_error_resume_pending", json!({ "name": "EE_d" })),
        true
    );
    let base = &daemon.call("bdev_get_bdevs", json!({ "name": "n" }))[0];
    assert_eq!(
        (&base["claimed"], &base["claim_type"]),
        (&json!(true), &json!("exclusive_write"))
    );

    assert_eq!(
        daemon.call("bdev_null_resize", json!({ "name": "n", "new_size": 2 })),
        true
    );
    assert_eq!(
        daemon.call("bdev_get_bdevs", json!({ "name": "EE_d" }))[0]["num_blocks"],
        4096
    );

    let saved = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let methods: Vec<&str> = saved
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["method"].as_str().unwrap())
        .collect();
    assert_eq!(
        methods,
        [
            "bdev_set_options",
            "bdev_null_create",
            "bdev_delay_create",
            "bdev_error_create",
            "bdev_wait_for_examine"
        ]
    );
    assert_eq!(
        (
            &saved[1]["params"]["num_blocks"],
            &saved[2]["params"]["p99_write_latency"]
        ),
        (&json!(4096), &json!(9))
    );

    assert_eq!(
        daemon.call("bdev_null_delete", json!({ "name": "n" })),
        true
    );
    assert_eq!(names(&daemon), Vec::<String>::new());
    let saved = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved.as_array().unwrap().len(), 2, "{saved}");
    daemon.run(tokio::task::yield_now());
    let notifications = daemon.call("notify_get_notifications", json!(null));
    let kinds: Vec<String> = notifications
        .as_array()
        .unwrap()
        .iter()
        .map(|e| {
            format!(
                "{} {}",
                e["type"].as_str().unwrap(),
                e["ctx"].as_str().unwrap()
            )
        })
        .collect();
    for expected in [
        "bdev_register n",
        "bdev_resize n",
        "bdev_resize EE_d",
        "bdev_unregister EE_d",
        "bdev_unregister n",
    ] {
        assert!(
            kinds.iter().any(|k| k == expected),
            "{expected} in {kinds:?}"
        );
    }
}

#[test]
fn files_are_created_opened_and_rescanned() {
    let daemon = test_daemon();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let aio = json!({ "name": "a", "filename": path, "block_size": 512, "readonly": false, "fallocate": false });
    assert_eq!(daemon.call("bdev_aio_create", aio), "a");
    let info = daemon.call("bdev_get_bdevs", json!({ "name": "a" }));
    assert_eq!(
        (&info[0]["num_blocks"], &info[0]["product_name"]),
        (&json!(2048), &json!("AIO disk"))
    );
    assert_eq!(info[0]["driver_specific"]["aio"]["filename"], json!(path));
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(2 << 20)
        .unwrap();
    assert_eq!(daemon.call("bdev_aio_rescan", json!({ "name": "a" })), true);
    assert_eq!(
        daemon.call("bdev_get_bdevs", json!({ "name": "a" }))[0]["num_blocks"],
        4096
    );
    assert_eq!(
        daemon
            .refused("bdev_uring_rescan", json!({ "name": "a" }))
            .code,
        -19
    );
    let second = daemon.refused(
        "bdev_uring_create",
        json!({ "name": "b", "filename": path }),
    );
    assert_eq!(second.code, -16, "{second}");
    assert_eq!(daemon.call("bdev_aio_delete", json!({ "name": "a" })), true);
    let made = dir.path().join("made");
    assert_eq!(
        daemon.call(
            "bdev_uring_create",
            json!({ "name": "b", "filename": made, "size": 1048576 })
        ),
        "b"
    );
    assert_eq!(std::fs::metadata(&made).unwrap().len(), 1 << 20);
}

#[test]
fn records_survive_restarts_even_if_devices_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let state = dir.path().join("state");
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(&state).unwrap()));
    let before: Value = {
        let daemon = start();
        daemon.call(
            "bdev_malloc_create",
            json!({ "num_blocks": 256, "block_size": 512 }),
        );
        daemon.call(
            "bdev_uring_create",
            json!({ "name": "u", "filename": path, "block_size": 512 }),
        );
        daemon.call(
            "bdev_passthru_create",
            json!({ "name": "p", "base_bdev_name": "u" }),
        );
        daemon.call(
            "bdev_null_create",
            json!({ "name": "gone", "num_blocks": 8, "block_size": 512 }),
        );
        daemon.call("bdev_null_delete", json!({ "name": "gone" }));
        daemon.call("framework_get_config", json!({ "name": "bdev" }))
    };
    {
        let daemon = start();
        assert_eq!(
            daemon.call("framework_get_config", json!({ "name": "bdev" })),
            before,
            "same names, order and identities"
        );
        assert_eq!(names(&daemon), ["Malloc0", "u", "p"]);
    }
    std::fs::rename(&path, dir.path().join("away")).unwrap();
    {
        let daemon = start();
        assert_eq!(
            names(&daemon),
            ["Malloc0"],
            "the missing file and its stacked device do not stop the others"
        );
        let objects = daemon.call("state_get", json!(null))["objects"].clone();
        let states: Vec<&str> = objects
            .as_array()
            .unwrap()
            .iter()
            .map(|o| o["state"].as_str().unwrap())
            .collect();
        assert_eq!(states, ["live", "failed", "failed"], "{objects}");
        assert_eq!(
            daemon.call("framework_get_config", json!({ "name": "bdev" })),
            before,
            "nothing is lost"
        );
        std::fs::rename(dir.path().join("away"), &path).unwrap();
        assert_eq!(
            daemon.call("state_retry", json!(null)),
            json!({ "restored": 2, "failed": 0 })
        );
        assert_eq!(names(&daemon), ["Malloc0", "u", "p"]);
    }
    std::fs::remove_file(&path).unwrap();
    let daemon = start();
    assert_eq!(
        daemon
            .refused("state_forget", json!({ "key": "bdev/Malloc0" }))
            .code,
        -16
    );
    assert_eq!(
        daemon.call("bdev_uring_delete", json!({ "name": "u" })),
        true,
        "a missing device can be deleted"
    );
    assert_eq!(
        daemon
            .refused("state_forget", json!({ "key": "bdev/p" }))
            .code,
        -2,
        "the stacked device is deleted too"
    );
    assert_eq!(
        daemon.call("state_get", json!(null))["objects"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

/// Goal: names may contain slashes, and stacked devices are restored after their bases, whatever
/// their names.
#[test]
fn names_with_slashes_are_restored_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
    {
        let daemon = start();
        daemon.call(
            "bdev_null_create",
            json!({ "name": "a/b", "num_blocks": 2048, "block_size": 512 }),
        );
        daemon.call(
            "bdev_passthru_create",
            json!({ "name": "a", "base_bdev_name": "a/b" }),
        );
    }
    let daemon = start();
    assert_eq!(daemon.engine.journal.waiting(), []);
    assert_eq!(names(&daemon), ["a/b", "a"]);
}

#[test]
fn a_device_can_be_waited_for() {
    let daemon = test_daemon();
    let (waited, made) = daemon.run(async {
        let call = async |method: &str, params: Value| {
            let raw = serde_json::value::to_raw_value(&params).unwrap();
            daemon.engine.call(method, Some(&raw)).await
        };
        futures_util::future::join(
            call("bdev_get_bdevs", json!({ "name": "late", "timeout": 5000 })),
            async {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                call(
                    "bdev_null_create",
                    json!({ "name": "late", "num_blocks": 8, "block_size": 512 }),
                )
                .await
            },
        )
        .await
    });
    assert!(made.is_ok());
    assert!(waited.unwrap().get().contains("\"late\""));
}

/// Goal: the detected block size is exported. SPDK does not detect it, and another machine may
/// detect another one.
#[test]
fn the_detected_block_size_is_exported() {
    let daemon = test_daemon();
    let dir = tempfile::tempdir().unwrap();
    for method in ["bdev_aio_create", "bdev_uring_create"] {
        let path = dir.path().join(method);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        daemon.call(method, json!({ "name": method, "filename": path }));
        let bdevs = daemon.call("bdev_get_bdevs", json!({ "name": method }));
        let saved = daemon.call("framework_get_config", json!({ "name": "bdev" }));
        let mut calls = saved.as_array().unwrap().iter();
        let made = calls.find(|call| call["method"] == method).unwrap();
        assert_eq!(
            made["params"]["block_size"], bdevs[0]["block_size"],
            "{method}"
        );
    }
}
