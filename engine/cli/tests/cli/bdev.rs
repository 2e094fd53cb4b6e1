//! Tests of `nacre bdev`.

use serde_json::{Value, json};

use super::fake::{Fake, cells, no_such_device};

fn device(name: &str, product: &str, blocks: u64, specific: Value) -> Value {
    json!({
        "name": name, "aliases": [], "product_name": product, "block_size": 512, "num_blocks": blocks,
        "uuid": "6e3c3c1c-0000-4000-8000-000000000001", "claimed": true,
        "supported_io_types": { "read": true, "write": true, "unmap": true, "flush": true, "zcopy": false },
        "driver_specific": specific,
    })
}

/// A daemon with a RAM disk, a null device and a file; everything else is made as asked.
fn daemon() -> Fake {
    let known = [
        device("ram0", "Malloc disk", 131_072, json!({})),
        device("null0", "Null disk", 2048, json!({})),
        device(
            "disk",
            "AIO disk",
            2048,
            json!({ "aio": { "filename": "/nonexistent/disk.img" } }),
        ),
        device("cache", "OCF disk", 2048, json!({})),
        device(
            "drive",
            "NVMe disk",
            2048,
            json!({ "nvme": [{ "trid": { "trtype": "PCIe", "traddr": "0000:5e:00.0" } }] }),
        ),
        device(
            "far",
            "NVMe disk",
            2048,
            json!({ "nvme": [{ "trid": { "trtype": "TCP", "traddr": "192.0.2.7" } }] }),
        ),
    ];
    Fake::play(move |method, params| match method {
        "bdev_get_bdevs" => match params["name"].as_str() {
            None => Ok(json!(known)),
            Some(name) => match known.iter().find(|d| d["name"] == name) {
                Some(device) => Ok(json!([device])),
                None => Err(no_such_device()),
            },
        },
        "bdev_malloc_create" => Ok(params
            .get("name")
            .cloned()
            .unwrap_or_else(|| "Malloc0".into())),
        "bdev_error_create" => Ok(json!(true)),
        create if create.ends_with("_create") => Ok(params["name"].clone()),
        _ => Ok(json!(true)),
    })
}

#[test]
fn devices_are_listed_and_shown() {
    let daemon = daemon();
    let list = daemon.nacre("bdev list").printed();
    assert!(list.starts_with("NAME "), "{list}");
    assert_eq!(
        cells(&list)[0],
        [
            "ram0",
            "malloc",
            "64.0",
            "MiB",
            "512",
            "yes",
            "6e3c3c1c-0000-4000-8000-000000000001"
        ]
    );
    let kinds: Vec<&str> = cells(&list).iter().map(|row| row[1]).collect();
    // A product of another program has its own name.
    assert_eq!(kinds, ["malloc", "null", "file", "OCF", "nvme", "remote"]);
    assert_eq!(daemon.nacre("bdev list --json").json()[2]["name"], "disk");
    assert_eq!(daemon.nacre("bdev --json ls").json()[2]["name"], "disk");
    let shown = daemon.nacre("bdev show disk").printed();
    let shown = cells(&shown);
    assert_eq!(shown[0], ["name", "disk"]);
    assert!(
        shown.contains(&vec![
            "driver_specific.aio.filename",
            "/nonexistent/disk.img"
        ]),
        "{shown:?}"
    );
    assert!(
        shown.contains(&vec!["supported_io_types", "flush,read,unmap,write"]),
        "{shown:?}"
    );
    assert_eq!(
        daemon.nacre("bdev show disk --json").json()["num_blocks"],
        2048
    );
}

/// Each flavour sends what SPDK's method takes, and nothing that was not given.
#[test]
fn devices_are_made() {
    let daemon = daemon();
    let uuid = "6e3c3c1c-0000-4000-8000-00000000000a";
    let file = std::env::current_dir().unwrap().join("x.img");
    for (words, method, params, name) in [
        (
            "malloc --size 64MiB",
            "bdev_malloc_create",
            json!({ "num_blocks": 131_072, "block_size": 512 }),
            "Malloc0",
        ),
        (
            "malloc ram1 --size 1MiB --block-size 1KiB --uuid 6e3c3c1c-0000-4000-8000-00000000000a",
            "bdev_malloc_create",
            json!({ "name": "ram1", "num_blocks": 1024, "block_size": 1024, "uuid": uuid }),
            "ram1",
        ),
        (
            "null n0 --size 1TiB --block-size 4096",
            "bdev_null_create",
            json!({ "name": "n0", "num_blocks": 1u64 << 28, "block_size": 4096 }),
            "n0",
        ),
        (
            "file f0 x.img --size 1GiB",
            "bdev_aio_create",
            json!({ "name": "f0", "filename": file, "size": 1 << 30 }),
            "f0",
        ),
        (
            "file f1 /dev/null --read-only --no-unmap --block-size 4096",
            "bdev_aio_create",
            json!({ "name": "f1", "filename": "/dev/null", "readonly": true, "fallocate": false, "block_size": 4096 }),
            "f1",
        ),
        (
            "delay slow ram0 --read 1ms --read-p99 5ms --write 200us",
            "bdev_delay_create",
            json!({
                "name": "slow", "base_bdev_name": "ram0", "avg_read_latency": 1000, "p99_read_latency": 5000,
                "avg_write_latency": 200, "p99_write_latency": 200,
            }),
            "slow",
        ),
        (
            "error ram0",
            "bdev_error_create",
            json!({ "base_name": "ram0" }),
            "EE_ram0",
        ),
        (
            "passthru p0 ram0",
            "bdev_passthru_create",
            json!({ "name": "p0", "base_bdev_name": "ram0" }),
            "p0",
        ),
        (
            "split ram0 2 --split-size-mb 16",
            "bdev_split_create",
            json!({ "base_bdev": "ram0", "split_count": 2, "split_size_mb": 16 }),
            "ram0p0\nram0p1",
        ),
    ] {
        let outcome = daemon.nacre(&format!("bdev create {words}"));
        assert_eq!(outcome.printed().trim_end(), name, "{words}");
        // A mistyped base is found before: the daemon would wait for it.
        let base = ["base_bdev_name", "base_name", "base_bdev"]
            .iter()
            .find_map(|field| params.get(*field));
        let looked = base.map(|base| ("bdev_get_bdevs".to_owned(), json!({ "name": base })));
        let made = (method.to_owned(), params.clone());
        let asked: Vec<_> = looked.into_iter().chain([made]).collect();
        assert_eq!(daemon.asked(), asked, "{words}");
    }
    let error = daemon
        .nacre("bdev create malloc --size 1GB --block-size 4k")
        .failed(2);
    assert!(
        error.contains("not whole blocks of 4096: 1000001536 are"),
        "{error}"
    );
    assert_eq!(daemon.asked(), []);
    // `error` is the former name of the kind `fault`.
    for kind in ["fault", "error"] {
        let created = daemon.nacre(&format!("bdev create {kind} ram0 --json"));
        assert_eq!(created.json(), json!({ "name": "EE_ram0" }), "{kind}");
    }
}

/// Goal: the product name selects the method of deletion, and a device of an unknown kind is not
/// deleted.
#[test]
fn devices_are_deleted() {
    let daemon = daemon();
    assert_eq!(daemon.nacre("bdev delete ram0 disk").printed(), "");
    let asked: Vec<(String, Value)> = daemon
        .asked()
        .into_iter()
        .filter(|(method, _)| method != "bdev_get_bdevs")
        .collect();
    assert_eq!(
        asked,
        [
            ("bdev_malloc_delete".into(), json!({ "name": "ram0" })),
            ("bdev_aio_delete".into(), json!({ "name": "disk" })),
        ]
    );
    let error = daemon.nacre("bdev delete cache").failed(1);
    assert!(
        error.starts_with(
            "error: cache: \"OCF disk\" is a kind of device that this command does not know"
        ) && !error.contains('\n'),
        "{error}"
    );
    assert_eq!(
        daemon.nacre("bdev delete x").failed(4),
        "error: bdev_get_bdevs: No such device (code -19)"
    );
}

#[test]
fn devices_are_resized() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let file = device(
        "file0",
        "URING bdev",
        2048,
        json!({ "uring": { "filename": path } }),
    );
    let void = device("null0", "Null disk", 2048, json!({}));
    let ram = device("ram0", "Malloc disk", 2048, json!({}));
    let daemon = Fake::play(
        move |method, params| match (method, params["name"].as_str()) {
            ("bdev_get_bdevs", Some("file0")) => Ok(json!([file])),
            ("bdev_get_bdevs", Some("null0")) => Ok(json!([void])),
            ("bdev_get_bdevs", _) => Ok(json!([ram])),
            _ => Ok(json!(true)),
        },
    );
    daemon.nacre("bdev resize file0 2MiB").printed();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    let asked: Vec<String> = daemon
        .asked()
        .into_iter()
        .map(|(method, _)| method)
        .collect();
    assert_eq!(
        asked,
        ["bdev_get_bdevs", "bdev_uring_rescan", "bdev_get_bdevs"]
    );

    let error = daemon.nacre("bdev resize file0 512KiB").failed(1);
    assert!(
        error.contains("--shrink allows losing the data past the new end"),
        "{error}"
    );
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    daemon.asked();
    daemon.nacre("bdev resize file0 512KiB --shrink").printed();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 512 << 10);
    assert_eq!(
        daemon.asked()[1..3],
        [
            (
                "bdev_uring_rescan".into(),
                json!({ "name": "file0", "size": 512 << 10 })
            ),
            ("bdev_uring_rescan".into(), json!({ "name": "file0" })),
        ],
        "asked before it is cut"
    );
    daemon.nacre("bdev rescan file0 --force").printed();

    daemon.asked();
    daemon.nacre("bdev resize null0 4MiB").printed();
    assert_eq!(
        daemon.asked()[1],
        (
            "bdev_null_resize".into(),
            json!({ "name": "null0", "new_size": 4 })
        )
    );
    let error = daemon.nacre("bdev resize null0 4197376").failed(2);
    assert!(error.contains("whole MiB"), "{error}");
    let error = daemon.nacre("bdev resize ram0 4MiB").failed(1);
    assert!(
        error.contains("have a fixed size; create a new one"),
        "{error}"
    );
    let error = daemon.nacre("bdev rescan null0").failed(1);
    assert!(error.contains("only files and block devices"), "{error}");
}

#[test]
fn errors_are_injected() {
    let daemon = daemon();
    for (words, params) in [
        (
            "EE_ram0 read failure --count 10",
            json!({ "name": "EE_ram0", "io_type": "read", "error_type": "failure", "num": 10, "queue_depth": 0 }),
        ),
        (
            "EE_ram0 all nvme-failure --sct 2 --sc 0x80",
            json!({
                "name": "EE_ram0", "io_type": "all", "error_type": "nvme_failure", "num": 1, "queue_depth": 0,
                "nvme_sct": 2, "nvme_sc": 128,
            }),
        ),
        (
            "EE_ram0 write corrupt-data --corrupt-offset 100",
            json!({
                "name": "EE_ram0", "io_type": "write", "error_type": "corrupt_data", "num": 1, "queue_depth": 0,
                "corrupt_offset": 100, "corrupt_value": 255,
            }),
        ),
        (
            "EE_ram0 clear",
            json!({ "name": "EE_ram0", "io_type": "clear", "error_type": "failure", "num": 1 }),
        ),
    ] {
        assert_eq!(daemon.nacre(&format!("bdev inject {words}")).printed(), "");
        let mut asked = daemon.asked();
        let (method, mut sent) = asked.pop().expect("a call");
        assert_eq!(
            (method.as_str(), asked.len()),
            ("bdev_error_inject_error", 0)
        );
        // Parameters that do not belong to the error are 0.
        let sent = sent.as_object_mut().expect("parameters");
        sent.retain(|name, value| *value != 0 || !params[name].is_null());
        assert_eq!(Value::from(sent.clone()), params, "{words}");
    }
    // Without saying which error, it is wrong usage.
    assert_eq!(daemon.nacre("bdev inject EE_ram0 read").code, 2);
    daemon.nacre("bdev resume EE_ram0").printed();
    assert_eq!(
        daemon.asked(),
        [(
            "bdev_error_resume_pending".into(),
            json!({ "name": "EE_ram0" })
        )]
    );
}

#[test]
fn counters_are_shown_once_and_as_rates() {
    let rounds = std::sync::atomic::AtomicU64::new(0);
    let daemon = Fake::play(move |method, params| {
        assert_eq!(method, "bdev_get_iostat");
        let round = rounds.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        let counters = json!({
            "name": "ram0", "thread_id": 7,
            "num_read_ops": round * 1000, "bytes_read": round * 4_096_000, "read_latency_ticks": round * 50_000_000,
            "num_write_ops": 0, "bytes_written": 0, "write_latency_ticks": 0,
            "num_unmap_ops": 3, "io_error": { "failed": 2 },
        });
        let mut answer = json!({ "tick_rate": 1_000_000_000, "ticks": round * 500_000_000 });
        if params["per_channel"] == true {
            answer["channels"] = json!([counters])
        } else {
            answer["bdevs"] = json!([counters])
        }
        Ok(answer)
    });
    let once = daemon.nacre("bdev iostat ram0 --reset").printed();
    assert_eq!(
        cells(&once)[0],
        [
            "ram0", "1000", "3.9", "MiB", "50.0us", "0", "0", "B", "3", "2"
        ]
    );
    assert_eq!(
        daemon.asked()[0].1,
        json!({ "names": ["ram0"], "reset_mode": "all" })
    );
    let channels = daemon.nacre("bdev iostat ram0 --per-channel").printed();
    assert_eq!(cells(&channels)[0][0], "7");
    assert_eq!(
        daemon.asked()[0].1,
        json!({ "names": ["ram0"], "per_channel": true })
    );
    assert_eq!(daemon.nacre("bdev iostat --per-channel").code, 2);

    // 1000 reads in half a second by the daemon's clock.
    let rates = daemon
        .nacre("bdev iostat --interval 10ms --count 2")
        .printed();
    assert_eq!(
        cells(&rates)[0],
        [
            "ram0", "2.00k", "8.19", "MB/s", "50.0us", "0", "0", "B/s", "0"
        ]
    );
    assert_eq!(daemon.asked().len(), 3);
    let lines = daemon
        .nacre("bdev iostat --interval 10ms --count 2 --json")
        .printed();
    let documents: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (documents.len(), &documents[1][0]["read"]["iops"]),
        (2, &json!(2000.0))
    );
}
