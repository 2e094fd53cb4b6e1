//! Goal: `nacre bench` compares, with and without a private daemon, and leaves no process or file
//! behind. Method: the real command with short measurements.

use std::process::{Command, Output};

use super::*;

/// Three lines: reads, a mix, and large writes.
const LINES: [&str; 6] = [
    "--line",
    "4 KiB random read, depth 1",
    "--line",
    "70/30",
    "--line",
    "128 KiB random write",
];

fn bench(place: &Place, args: &[&str]) -> Command {
    let mut command = place.nacre();
    // Its temporary folder is in ours.
    command.env("TMPDIR", place.dir.path()).arg("bench");
    command
        .args(["--seconds", "200ms", "--warmup", "20ms", "--quiet"])
        .arg("--json")
        .arg(place.path("bench.json"))
        .args(args);
    command
}

fn figures(place: &Place, out: &Output) -> Value {
    let written = std::fs::read_to_string(place.path("bench.json")).unwrap();
    serde_json::from_str(&written).unwrap_or_else(|error| {
        panic!("{error}: {}{}", text(&out.stdout), text(&out.stderr));
    })
}

fn names(comparison: &Value) -> Vec<&str> {
    let sides = comparison["sides"].as_array().unwrap();
    sides.iter().map(|s| s["name"].as_str().unwrap()).collect()
}

/// Goal: without a target the command starts its own, measures the device alone and over TCP, and
/// removes daemon and files.
#[test]
fn a_private_target_is_compared() {
    let place = Place::new();
    let html = place.path("bench.html");
    let out = bench(&place, &["--size", "16MiB", "--rounds", "2"])
        .args(LINES)
        .arg("--html")
        .arg(&html)
        .output()
        .unwrap();
    let (table, said) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{table}\n{said}");
    let comparison = figures(&place, &out);
    assert_eq!(comparison["schema"], "nacre-bench/1");
    // RDMA follows where the machine has it.
    assert_eq!(names(&comparison)[..2], ["device", "tcp"]);
    assert_eq!(comparison["sides"][1]["setting"], "loopback");
    let lines = comparison["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 3, "{comparison:#}");
    for line in lines {
        for at in 0..2 {
            let result = &line["results"][at];
            let rounds = result["rounds"].as_array().unwrap();
            assert!(rounds.len() == 2 && rounds.iter().all(|r| r["measured"].is_object()));
            let median = &result["median"];
            assert!(median["iops"].as_f64().unwrap() > 0.0);
            assert!(median["host_cpu_seconds_per_gib"].as_f64().unwrap() > 0.0);
            assert_eq!(
                median["target_cpu_seconds_per_gib"].is_f64(),
                at == 1,
                "{median}"
            );
            let direction = match line["read_percent"].as_u64().unwrap() {
                0 => "write_latency",
                _ => "read_latency",
            };
            let latency = &median[direction];
            let at = |name: &str| latency[name].as_f64().unwrap();
            assert!(at("p50_us") <= at("p99_us") && at("p99_us") <= at("p99.9_us"));
        }
        assert_eq!(line["ratios"][0]["to"], "tcp");
    }
    assert!(table.contains("(loopback, no network; "), "{table}");
    let html = std::fs::read_to_string(html).unwrap();
    assert!(html.contains("<svg ") && !html.contains("http"), "{html}");
    let left = std::fs::read_dir(place.dir.path()).unwrap();
    let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: Vec<String> = left
        .filter(|name| name.starts_with("nacre-bench"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

/// Goal: a device is measured alone and over TCP in turn, though only one process can have it open.
#[test]
fn one_process_at_a_time_has_the_file() {
    let place = Place::new();
    let disk = place.path("disk");
    let out = bench(&place, &["--size", "16MiB", "--rounds", "2"])
        .args(LINES)
        .arg("--file")
        .arg(&disk)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let comparison = figures(&place, &out);
    assert_eq!(names(&comparison)[..2], ["device", "tcp"]);
    assert_eq!(comparison["sides"][0]["target"], json!(disk));
    assert!(!disk.exists(), "a file that it created stays");
}

/// Goal: a volume with one replica is measured like a device.
#[test]
fn a_volume_is_compared() {
    let place = Place::new();
    let out = bench(&place, &["--volume", "--size", "32MiB", "--rounds", "1"])
        .args(LINES)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(figures(&place, &out)["lines"].as_array().unwrap().len(), 3);
}

/// Goal: named targets are only read; one that vanishes fails its measurements, and the others
/// go on.
#[test]
fn a_target_vanishes() {
    let place = Place::new();
    let (daemon, mut client) = place.serve(&[]).ready();
    let nqn = "nqn.2025-01.io.nacre:v";
    let mut call = |method: &str, params: Value| client.call_by_name(method, params).unwrap();
    call(
        "bdev_malloc_create",
        json!({ "name": "ram", "block_size": 4096, "num_blocks": 1024 }),
    );
    call(
        "nvmf_create_subsystem",
        json!({ "nqn": nqn, "allow_any_host": true }),
    );
    call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": nqn, "namespace": { "bdev_name": "ram" } }),
    );
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0" });
    call(
        "nvmf_subsystem_add_listener",
        json!({ "nqn": nqn, "listen_address": address }),
    );
    let listeners = call("nvmf_subsystem_get_listeners", json!({ "nqn": nqn }));
    let port = listeners[0]["address"]["trsvcid"].as_str().unwrap();
    let uri = format!("tcp://127.0.0.1:{port}/{nqn}");
    let disk = place.path("disk");
    std::fs::write(&disk, vec![7; 1 << 20]).unwrap();

    let pid = daemon.child.id().to_string();
    let args = ["--rounds", "5", "--line", "depth 1", "--target-pid", &pid];
    let mut running = bench(&place, &args)
        .arg(&disk)
        .arg(&uri)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first round measures both sides.
    std::thread::sleep(Duration::from_millis(1500));
    drop(daemon);
    assert!(running.try_wait().unwrap().is_none());
    let out = running.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("failed"),
        "{}",
        text(&out.stderr)
    );
    let comparison = figures(&place, &out);
    let lines = comparison["lines"].as_array().unwrap();
    assert!(lines.iter().all(|line| line["read_percent"] == 100));
    let outcomes = |side: usize, word: &str| {
        let rounds = lines
            .iter()
            .flat_map(|line| line["results"][side]["rounds"].as_array());
        rounds
            .flatten()
            .filter(|round| !round[word].is_null())
            .count()
    };
    assert_eq!(outcomes(0, "failed"), 0);
    assert!(
        outcomes(1, "failed") > 0 && outcomes(1, "measured") > 0,
        "{comparison:#}"
    );
    let notes = comparison["notes"].to_string();
    assert!(notes.contains("--overwrite"), "{notes}");
    assert_eq!(std::fs::read(&disk).unwrap(), vec![7; 1 << 20]);
}

#[test]
fn wrong_usage_is_refused() {
    let place = Place::new();
    for (args, cause) in [
        (
            &["auto://192.0.2.1/nqn.2025-01.io.nacre:v"][..],
            "needs one transport",
        ),
        (&["--line", "nonsense"], "chooses no line"),
        (&["tcp://192.0.2.1"], "no subsystem"),
        (&["tcp://127.0.0.1/x", "--volume"], "cannot be used with"),
        (&["/dev/null", "--line", "random write"], "--overwrite"),
    ] {
        let out = bench(&place, args).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(cause), "{args:?}: {said}");
    }
}
