//! Goal: parameters, answers and refusals are SPDK's, and what was made is made again.

use serde_json::{Value, json};

use super::super::testing::{Bench, bench};
use crate::config::Settings;
use crate::store::Store;

fn names(bench: &Bench) -> Vec<String> {
    let list = bench.call("bdev_get_bdevs", json!(null));
    list.as_array()
        .unwrap()
        .iter()
        .map(|b| b["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_malloc_device_has_spdks_shape() {
    let bench = bench();
    let uuid = "7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3a";
    // Exactly what rpc.py sends.
    let made = bench.call(
        "bdev_malloc_create",
        json!({
            "num_blocks": 256, "block_size": 512, "name": "Malloc0", "uuid": uuid,
            "md_interleave": false, "dif_is_head_of_md": false,
        }),
    );
    assert_eq!(made, "Malloc0");
    insta::assert_json_snapshot!(bench.call("bdev_get_bdevs", json!({ "name": "Malloc0" })));
    assert_eq!(
        bench.call("bdev_get_bdevs", json!({ "name": uuid }))[0]["name"],
        "Malloc0"
    );
    assert_eq!(
        bench.call(
            "bdev_malloc_create",
            json!({ "num_blocks": 8, "block_size": 4096 })
        ),
        "Malloc1"
    );
    insta::assert_json_snapshot!(
        bench.call("bdev_get_iostat", json!({ "names": ["Malloc0"] }))["bdevs"]
    );
    assert_eq!(
        bench.call("bdev_malloc_delete", json!({ "name": "Malloc0" })),
        true
    );
    assert_eq!(names(&bench), ["Malloc1"]);
}

#[test]
fn refusals_carry_spdks_codes_and_our_facts() {
    let bench = bench();
    bench.call(
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
        let error = bench.refused(method, params.clone());
        let facts = error.data.clone().unwrap_or_default();
        assert_eq!(
            (error.code, error.message.as_str(), facts.field.as_deref()),
            (code, message, Some(field)),
            "{method} {params}: {error}"
        );
    }
    assert_eq!(names(&bench), ["n"], "what was refused left nothing behind");
    assert_eq!(
        bench
            .refused("bdev_get_histogram", json!({ "name": "n" }))
            .message,
        "Bad address"
    );
}

/// What is for devices of one kind says so of those of another, and finds its own by any name.
/// Hosts make no identity of the nil UUID: no device is made with it.
#[test]
fn the_nil_uuid_is_refused() {
    let bench = bench();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    for name in ["a", "b"] {
        bench.call(
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
        let refused = bench.refused(method, params);
        let field = refused.data.as_ref().and_then(|data| data.field.clone());
        assert_eq!(
            (refused.code, field.as_deref()),
            (-22, Some("uuid")),
            "{method}: {refused}"
        );
    }
    assert!(!file.exists(), "no file is made for it");
    assert_eq!(names(&bench), ["a", "b"]);
}

#[test]
fn a_device_of_another_kind_is_called_that() {
    let bench = bench();
    bench.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    let inject = |name: &str| json!({ "name": name, "io_type": "read", "error_type": "failure" });
    let told = |method: &str, params: Value| {
        let refused = bench.refused(method, params);
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
        told(method, inject("n")),
        (
            "\"n\" is not an error device: it is a device of the kind \"Null disk\"".into(),
            "make one of it with bdev_error_create, and name that".into()
        )
    );
    assert_eq!(
        told(method, inject("x")).0,
        "there is no bdev \"x\"",
        "one that is not there at all"
    );
    bench.call("bdev_error_create", json!({ "base_name": "n" }));
    assert_eq!(
        told(method, inject("n")).1,
        "the error device on it is \"EE_n\""
    );
    let uuid = bench.call("bdev_get_bdevs", json!({ "name": "EE_n" }))[0]["uuid"].clone();
    assert_eq!(bench.call(method, inject(uuid.as_str().unwrap())), true);
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
        let (cause, _) = told(method, params);
        assert!(cause.contains(" is not a"), "{method}: {cause}");
    }
}

/// A file that grows is seen by everything that stands on it, up to the namespace.
#[test]
fn what_is_stacked_grows_with_its_base() {
    let bench = bench();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    bench.call(
        "bdev_aio_create",
        json!({ "name": "f", "filename": file.path(), "block_size": 512 }),
    );
    bench.call(
        "bdev_delay_create",
        json!({
            "name": "d", "base_bdev_name": "f", "avg_read_latency": 1, "p99_read_latency": 2,
            "avg_write_latency": 3, "p99_write_latency": 4,
        }),
    );
    bench.call(
        "bdev_passthru_create",
        json!({ "name": "p", "base_bdev_name": "d" }),
    );
    bench.call("bdev_error_create", json!({ "base_name": "p" }));
    let blocks =
        |name: &str| bench.call("bdev_get_bdevs", json!({ "name": name }))[0]["num_blocks"].clone();
    let all = ["f", "d", "p", "EE_p"];
    assert_eq!(all.map(blocks), [2048; 4]);
    file.as_file().set_len(4 << 20).unwrap();
    assert_eq!(bench.call("bdev_aio_rescan", json!({ "name": "f" })), true);
    assert_eq!(all.map(blocks), [8192; 4]);
}

/// Borders are counted between once a histogram was started.
#[test]
fn histograms_are_counted_between_borders() {
    let bench = bench();
    bench.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    let method = "bdev_get_histogram_borders";
    let borders = |borders: &[u64]| json!({ "name": "n", "borders": borders });
    assert_eq!(bench.refused(method, borders(&[1])).message, "Bad address");
    bench.call(
        "bdev_enable_histogram",
        json!({ "name": "n", "enable": true }),
    );
    assert_eq!(
        bench.call(method, borders(&[10, 100])),
        json!({ "borders_count": [0, 0, 0] })
    );
    for wrong in [&[][..], &[2, 1], &[1, 1], &[1; 65]] {
        let refused = bench.refused(method, borders(wrong));
        assert_eq!(refused.code, -22);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("borders"));
    }
}

/// Each mode forgets its part, here of a device that did nothing: the call is understood.
#[test]
fn every_reset_mode_is_taken() {
    let bench = bench();
    bench.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    for mode in ["all", "maxmin", "error", "none"] {
        let reset = json!({ "name": "n", "mode": mode });
        assert_eq!(bench.call("bdev_reset_iostat", reset), true, "{mode}");
        let get = json!({ "names": ["n"], "reset_mode": mode });
        let stat = bench.call("bdev_get_iostat", get);
        assert_eq!(stat["bdevs"][0]["num_read_ops"], 0, "{mode}");
    }
    let other = json!({ "name": "n", "mode": "some" });
    assert_eq!(bench.refused("bdev_reset_iostat", other).code, -32603);
}

#[test]
fn devices_are_stacked_resized_and_taken_down_together() {
    let bench = bench();
    bench.call(
        "bdev_null_create",
        json!({ "name": "n", "num_blocks": 2048, "block_size": 512 }),
    );
    bench.call(
        "bdev_delay_create",
        json!({
            "name": "d", "base_bdev_name": "n", "avg_read_latency": 1, "p99_read_latency": 2,
            "avg_write_latency": 3, "p99_write_latency": 4,
        }),
    );
    assert_eq!(
        bench.call("bdev_error_create", json!({ "base_name": "d" })),
        true
    );
    assert_eq!(
        bench
            .refused(
                "bdev_passthru_create",
                json!({ "name": "p", "base_bdev_name": "n" })
            )
            .code,
        -1
    );
    assert_eq!(
        bench.call(
            "bdev_delay_update_latency",
            json!({ "delay_bdev_name": "d", "latency_type": "p99_write", "latency_us": 9 })
        ),
        true
    );
    let error = bench.refused(
        "bdev_error_inject_error",
        json!({ "name": "EE_d", "io_type": "read", "error_type": "nvme_failure" }),
    );
    assert_eq!(
        error.message,
        "nvme_sct or nvme_sc should be specified for NVMe error injection"
    );
    assert_eq!(
        bench.call(
            "bdev_error_inject_error",
            json!({ "name": "EE_d", "io_type": "read", "error_type": "failure", "num": 2 })
        ),
        true
    );
    assert_eq!(
        bench.call("bdev_error_resume_pending", json!({ "name": "EE_d" })),
        true
    );
    let base = &bench.call("bdev_get_bdevs", json!({ "name": "n" }))[0];
    assert_eq!(
        (&base["claimed"], &base["claim_type"]),
        (&json!(true), &json!("exclusive_write"))
    );

    assert_eq!(
        bench.call("bdev_null_resize", json!({ "name": "n", "new_size": 2 })),
        true
    );
    assert_eq!(
        bench.call("bdev_get_bdevs", json!({ "name": "EE_d" }))[0]["num_blocks"],
        4096
    );

    let saved = bench.call("framework_get_config", json!({ "name": "bdev" }));
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

    assert_eq!(bench.call("bdev_null_delete", json!({ "name": "n" })), true);
    assert_eq!(names(&bench), Vec::<String>::new());
    let saved = bench.call("framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved.as_array().unwrap().len(), 2, "{saved}");
    bench.run(tokio::task::yield_now());
    let told = bench.call("notify_get_notifications", json!(null));
    let kinds: Vec<String> = told
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
fn files_are_made_opened_and_rescanned() {
    let bench = bench();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let aio = json!({ "name": "a", "filename": path, "block_size": 512, "readonly": false, "fallocate": false });
    assert_eq!(bench.call("bdev_aio_create", aio), "a");
    let info = bench.call("bdev_get_bdevs", json!({ "name": "a" }));
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
    assert_eq!(bench.call("bdev_aio_rescan", json!({ "name": "a" })), true);
    assert_eq!(
        bench.call("bdev_get_bdevs", json!({ "name": "a" }))[0]["num_blocks"],
        4096
    );
    assert_eq!(
        bench
            .refused("bdev_uring_rescan", json!({ "name": "a" }))
            .code,
        -19
    );
    let second = bench.refused(
        "bdev_uring_create",
        json!({ "name": "b", "filename": path }),
    );
    assert_eq!(second.code, -16, "{second}");
    assert_eq!(bench.call("bdev_aio_delete", json!({ "name": "a" })), true);
    let made = dir.path().join("made");
    assert_eq!(
        bench.call(
            "bdev_uring_create",
            json!({ "name": "b", "filename": made, "size": 1048576 })
        ),
        "b"
    );
    assert_eq!(std::fs::metadata(&made).unwrap().len(), 1 << 20);
}

#[test]
fn what_was_made_survives_and_what_cannot_come_back_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let state = dir.path().join("state");
    let start = || Bench::with(Settings::default(), Some(Store::open(&state).unwrap()));
    let before: Value = {
        let bench = start();
        bench.call(
            "bdev_malloc_create",
            json!({ "num_blocks": 256, "block_size": 512 }),
        );
        bench.call(
            "bdev_uring_create",
            json!({ "name": "u", "filename": path, "block_size": 512 }),
        );
        bench.call(
            "bdev_passthru_create",
            json!({ "name": "p", "base_bdev_name": "u" }),
        );
        bench.call(
            "bdev_null_create",
            json!({ "name": "gone", "num_blocks": 8, "block_size": 512 }),
        );
        bench.call("bdev_null_delete", json!({ "name": "gone" }));
        bench.call("framework_get_config", json!({ "name": "bdev" }))
    };
    {
        let bench = start();
        assert_eq!(
            bench.call("framework_get_config", json!({ "name": "bdev" })),
            before,
            "same names, order and identities"
        );
        assert_eq!(names(&bench), ["Malloc0", "u", "p"]);
    }
    std::fs::rename(&path, dir.path().join("away")).unwrap();
    {
        let bench = start();
        assert_eq!(
            names(&bench),
            ["Malloc0"],
            "the missing file and what stands on it do not stop the others"
        );
        let objects = bench.call("state_get", json!(null))["objects"].clone();
        let states: Vec<&str> = objects
            .as_array()
            .unwrap()
            .iter()
            .map(|o| o["state"].as_str().unwrap())
            .collect();
        assert_eq!(states, ["live", "failed", "failed"], "{objects}");
        assert_eq!(
            bench.call("framework_get_config", json!({ "name": "bdev" })),
            before,
            "nothing is lost"
        );
        std::fs::rename(dir.path().join("away"), &path).unwrap();
        assert_eq!(
            bench.call("state_retry", json!(null)),
            json!({ "restored": 2, "failed": 0 })
        );
        assert_eq!(names(&bench), ["Malloc0", "u", "p"]);
    }
    std::fs::remove_file(&path).unwrap();
    let bench = start();
    assert_eq!(
        bench
            .refused("state_forget", json!({ "key": "bdev/Malloc0" }))
            .code,
        -16
    );
    assert_eq!(
        bench.call("bdev_uring_delete", json!({ "name": "u" })),
        true,
        "a lost device can be deleted"
    );
    assert_eq!(
        bench
            .refused("state_forget", json!({ "key": "bdev/p" }))
            .code,
        -2,
        "and what stood on it went along"
    );
    assert_eq!(
        bench.call("state_get", json!(null))["objects"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

/// A name may have slashes; a device that stands on another is made after it, whatever they are called.
#[test]
fn names_with_slashes_are_made_again_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let start = || Bench::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
    {
        let bench = start();
        bench.call(
            "bdev_null_create",
            json!({ "name": "a/b", "num_blocks": 2048, "block_size": 512 }),
        );
        bench.call(
            "bdev_passthru_create",
            json!({ "name": "a", "base_bdev_name": "a/b" }),
        );
    }
    let bench = start();
    assert_eq!(bench.engine.journal.waiting(), []);
    assert_eq!(names(&bench), ["a/b", "a"]);
}

#[test]
fn a_device_can_be_waited_for() {
    let bench = bench();
    let (waited, made) = bench.run(async {
        let call = async |method: &str, params: Value| {
            let raw = serde_json::value::to_raw_value(&params).unwrap();
            bench.engine.call(method, Some(&raw)).await
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

/// SPDK finds no block size of a file by itself, and another machine may find another one.
#[test]
fn the_block_size_that_was_found_is_exported() {
    let bench = bench();
    let dir = tempfile::tempdir().unwrap();
    for method in ["bdev_aio_create", "bdev_uring_create"] {
        let path = dir.path().join(method);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        bench.call(method, json!({ "name": method, "filename": path }));
        let bdevs = bench.call("bdev_get_bdevs", json!({ "name": method }));
        let saved = bench.call("framework_get_config", json!({ "name": "bdev" }));
        let mut calls = saved.as_array().unwrap().iter();
        let made = calls.find(|call| call["method"] == method).unwrap();
        assert_eq!(
            made["params"]["block_size"], bdevs[0]["block_size"],
            "{method}"
        );
    }
}
