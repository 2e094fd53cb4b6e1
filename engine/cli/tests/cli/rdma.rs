//! Tests of the commands that read the machine: on any machine they print a table and JSON, and
//! exit with the right code.

use serde_json::Value;

use super::fake::nacre;

fn nowhere() -> &'static std::path::Path {
    std::path::Path::new("/nonexistent")
}

#[test]
fn the_doctor_fails_when_a_check_does() {
    let well = nacre(
        "doctor --listener ip:127.0.0.1 --memory 4KiB --json",
        nowhere(),
    );
    let sick = nacre("doctor --listener name:none-such --json", nowhere());
    for (outcome, status) in [(&well, "PASS"), (&sick, "FAIL")] {
        let report: Value = serde_json::from_str(&outcome.out).expect("a report in JSON");
        let findings = report["findings"].as_array().expect("findings");
        let failed = findings.iter().filter(|f| f["status"] == "FAIL").count();
        assert_eq!(report["failed"], failed);
        assert_eq!(outcome.code, i32::from(failed > 0), "{outcome:?}");
        let exists = findings.iter().find(|f| f["id"] == "net.iface.exists");
        assert_eq!(
            exists.expect("a finding for the interface")["status"],
            status
        );
        for finding in findings {
            let bad = finding["status"] == "FAIL" || finding["status"] == "WARN";
            assert_eq!(finding["remedy"].is_string(), bad, "{finding}");
        }
    }
    let table = nacre("doctor --listener name:none-such", nowhere());
    assert!(
        table
            .out
            .contains("FAIL  net.iface.exists [name:none-such]: no interface matches"),
        "{table:?}"
    );
    // How many depends on the machine.
    assert!(table.err.contains(" failed"), "{table:?}");
}

/// Goal: on a node of a cluster, the command checks the cluster, and fails while etcd does not
/// answer. Method: a port without a listener.
#[test]
fn the_doctor_examines_the_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("nacre.toml");
    let text = "[store]\nendpoints = [\"http://127.0.0.1:1\"]\n[cluster]\nname = \"lab\"\n";
    std::fs::write(&config, text).unwrap();
    let command = format!("doctor --config {} --json", config.display());
    let outcome = nacre(&command, nowhere());
    let report: Value = serde_json::from_str(&outcome.out).expect("a report in JSON");
    let findings = report["findings"].as_array().expect("findings");
    let joined = findings.iter().find(|f| f["id"] == "cluster.joined");
    assert_eq!(joined.expect("a finding for the cluster")["status"], "FAIL");
    assert_eq!(outcome.code, 1);
}

#[test]
fn devices_are_those_of_the_kernel() {
    let kernel = std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
    let devices = nacre("rdma devices --json", nowhere()).json();
    assert_eq!(devices.as_array().map(Vec::len), Some(kernel));
    let error = nacre("rdma gids none-such", nowhere()).failed(1);
    assert!(error.starts_with("error: there is no RDMA device \"none-such\"; have: "));
    let error = nacre("rdma rxe del none-such", nowhere()).failed(1);
    assert!(error.starts_with("error: there is no RDMA device \"none-such\"; have: "));
    assert_eq!(nacre("rdma counters --watch 0", nowhere()).code, 2);
}

#[test]
fn the_needs_of_a_load_are_printed() {
    let need = nacre(
        "rdma size --hosts 1 --queues 4 --depth 128 --reactors 1 --srq 0 --json",
        nowhere(),
    )
    .json();
    assert_eq!(need["queue_pairs"], 5);
    assert_eq!(need["cqes"], 4 * (512 + 128) + 128 + 32);
    assert_eq!(need["exceeded"], serde_json::json!([]));
}

#[test]
fn connecting_can_be_tried_dry() {
    let printed = nacre(
        "connect [::1]:4421 -n nqn.2026-01.io.nacre:v --transport tcp --dry-run",
        nowhere(),
    )
    .printed();
    assert_eq!(
        printed,
        "modprobe nvme-tcp\n\
         nvme discover -t tcp -a ::1 -s 4421 -o json\n\
         nvme connect -t tcp -a ::1 -s 4421 -n nqn.2026-01.io.nacre:v\n"
    );
    let both = "connect ::1 -n nqn.2026-01.io.nacre:v --transport rdma --fallback tcp --dry-run";
    let lines = nacre(both, nowhere()).printed();
    let connects = |line: &&str| line.starts_with("nvme connect ");
    let commands: Vec<&str> = lines.lines().filter(connects).collect();
    assert_eq!(commands.len(), 2, "{lines}");
    assert!(commands[0].contains("-t rdma") && commands[1].contains("-t tcp"));
}
