//! Goal: a daemon that enforces its sandbox still works, has exactly the capabilities that it
//! reports, and the filter is on all of its threads. Method: the real daemon, used, reloaded and
//! stopped after the filter is installed.

use std::path::Path;

use nacre_engine_sandbox::{CapabilitySet, Status, kernel_has_filters, names};

use super::*;

const NQN: &str = "nqn.2026-01.org.example:sandbox";
/// Tests run side by side, and the discovery service has one port.
const ENFORCE: [(&str, &str); 2] = [
    ("NACRE_SECURITY_SANDBOX", "enforce"),
    ("NACRE_NVMF_DISCOVERY_PORT", "0"),
];

fn is_skipped(test: &str) -> bool {
    let is_without = !kernel_has_filters();
    if is_without {
        eprintln!("SKIPPED: {test}: this kernel has no seccomp filters");
    }
    is_without
}

fn call(client: &mut Client, method: &str, params: Value) -> Value {
    client
        .call_by_name(method, params)
        .unwrap_or_else(|error| panic!("{method}: {error}"))
}

/// A subsystem with this device, and a listener of its own.
fn publish(client: &mut Client, nqn: &str, bdev: &str) -> u16 {
    let port = local_port();
    let listen = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    call(
        client,
        "nvmf_create_subsystem",
        json!({ "nqn": nqn, "allow_any_host": true }),
    );
    call(
        client,
        "nvmf_subsystem_add_ns",
        json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } }),
    );
    call(
        client,
        "nvmf_subsystem_add_listener",
        json!({ "nqn": nqn, "listen_address": listen }),
    );
    port
}

fn verified_io(place: &Place, nqn: &str, port: u16) {
    let uri = format!("tcp://127.0.0.1:{port}/{nqn}?nsid=1");
    let output = place
        .nacre()
        .args(["perf", &uri, "--rw", "randrw", "--verify", "--ios", "500"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// The status of every thread.
fn threads(daemon: &Daemon) -> Vec<Status> {
    let tasks = format!("/proc/{}/task", daemon.child.id());
    let tasks = std::fs::read_dir(tasks).unwrap();
    // A thread may end meanwhile.
    let each = tasks.filter_map(|task| Status::of(&task.ok()?.path().join("status")).ok());
    each.collect()
}

#[test]
fn everything_works_after_the_filter_is_in_effect() {
    if is_skipped("everything_works_after_the_filter_is_in_effect") {
        return;
    }
    let place = Place::new();
    let (log, file) = (place.path("daemon.log"), place.path("nacre.toml"));
    let configured = |more: &str| {
        let text = format!("[log]\nfile = \"{}\"\n{more}", log.display());
        std::fs::write(&file, text).unwrap();
    };
    configured("");
    let args = [
        "-c",
        file.to_str().unwrap(),
        "--metrics-listen",
        "127.0.0.1:0",
    ];
    let (daemon, mut client) = place.serve_with(&args, &ENFORCE).ready();
    let until = Instant::now() + Duration::from_secs(30);
    while !std::fs::read_to_string(&log).unwrap().contains("ready") {
        assert!(Instant::now() < until, "not ready\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }

    let sandbox = call(&mut client, "sandbox_get", Value::Null);
    assert_eq!(sandbox["mode"], "enforce", "{sandbox}");
    assert_eq!(sandbox["complete"], true, "{sandbox}");
    let every = threads(&daemon);
    assert!(every.len() > 2, "{every:?}");
    for status in &every {
        assert!(status.no_new_privs && status.filters >= 2, "{status:?}");
        assert_eq!(json!(names(status.effective)), sandbox["capabilities"]);
        assert_eq!(status.permitted, status.effective);
        assert_eq!(status.ambient, CapabilitySet::empty());
        let dangerous = CapabilitySet::SYS_ADMIN
            | CapabilitySet::SYS_PTRACE
            | CapabilitySet::SYS_MODULE
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::NET_ADMIN;
        assert!(!status.effective.intersects(dangerous), "{status:?}");
        if rustix::process::geteuid().is_root() {
            assert_eq!(status.bounding, status.effective);
        }
    }

    // Devices and listeners that come later.
    let image = place.path("disk.img");
    let disk = |name: &str, path: &Path| json!({ "name": name, "filename": path, "size": 8 << 20, "block_size": 512 });
    call(&mut client, "bdev_aio_create", disk("disk", &image));
    let port = publish(&mut client, NQN, "disk");
    verified_io(&place, NQN, port);

    // A volume: one replica here, one in another daemon.
    let far = Place::new();
    let (other, mut there) = far.serve_with(&[], &ENFORCE).ready();
    call(
        &mut there,
        "bdev_aio_create",
        disk("far", &far.path("far.img")),
    );
    let far_nqn = format!("{NQN}-far");
    let far_port = publish(&mut there, &far_nqn, "far");
    let attached = call(
        &mut client,
        "bdev_nvme_attach_controller",
        json!({ "name": "far", "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1",
            "trsvcid": far_port.to_string(), "subnqn": far_nqn }),
    );
    call(
        &mut client,
        "bdev_aio_create",
        disk("near", &place.path("near.img")),
    );
    let volume = json!({ "name": "volume", "devices": ["near", attached[0]] });
    call(&mut client, "volume_create", volume);
    let volume_nqn = format!("{NQN}-volume");
    let volume_port = publish(&mut client, &volume_nqn, "volume");
    verified_io(&place, &volume_nqn, volume_port);

    // Log rotation, and a reload with a new device, listener and level.
    std::fs::rename(&log, place.path("daemon.log.1")).unwrap();
    configured(&format!(
        "level = \"debug\"\n[[bdev]]\nname = \"later\"\ntype = \"file\"\npath = \"{}\"\nsize = \"4MiB\"\n\
         [[nvmf.listener]]\naddress = \"127.0.0.1\"\nport = {}\n",
        place.path("later.img").display(),
        local_port()
    ));
    daemon.signal("HUP");
    let until = Instant::now() + Duration::from_secs(30);
    while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains("applied: ")) {
        assert!(Instant::now() < until, "not reloaded\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    call(&mut client, "bdev_get_bdevs", json!({ "name": "later" }));

    call(
        &mut client,
        "reactor_set_mode",
        json!({ "mode": "interrupt" }),
    );
    let report = call(&mut client, "doctor_run", json!({}));
    let findings = report["findings"].as_array().unwrap();
    let of = |id: &str| findings.iter().find(|finding| finding["id"] == id).unwrap();
    assert_eq!(of("security.sandbox")["status"], "PASS", "{report}");
    assert_eq!(of("disk.io_uring")["status"], "PASS", "{report}");
    // Threads that came since.
    assert!(threads(&daemon).iter().all(|status| status.filters >= 2));

    daemon.signal("TERM");
    assert_eq!(daemon.ended(), 0);
    other.signal("TERM");
    assert_eq!(other.ended(), 0);
}

#[test]
fn the_other_modes_keep_capabilities() {
    let place = Place::new();
    for (mode, filters) in [("off", 0), ("log", u32::from(kernel_has_filters()))] {
        let environment = [("NACRE_SECURITY_SANDBOX", mode)];
        let (daemon, _client) = place.serve_with(&[], &environment).ready();
        let before = Status::read().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while threads(&daemon)
            .iter()
            .any(|one| one.filters != before.filters + filters)
        {
            assert!(Instant::now() < until, "{mode}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        for status in threads(&daemon) {
            assert_eq!(status.effective, before.effective, "{mode}");
        }
        let shown = text(&place.client(&["info", "sandbox"]).stdout);
        assert!(shown.contains(mode), "{shown}");
        daemon.signal("TERM");
        assert_eq!(daemon.ended(), 0);
    }
}

/// Goal: the unit's exposure stays below 3, and systemd knows every line of it.
#[test]
fn systemd_rates_the_unit_as_protected() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nacre.service");
    let rated = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=30"])
        .arg(&unit)
        .output();
    let rated = match rated {
        Ok(rated) => rated,
        Err(error) => {
            eprintln!("SKIPPED: systemd_rates_the_unit_as_protected: systemd-analyze: {error}");
            return;
        }
    };
    if text(&rated.stderr).contains("unrecognized option") {
        eprintln!("SKIPPED: systemd_rates_the_unit_as_protected: systemd is older than 250");
        return;
    }
    assert!(rated.status.success(), "{}", text(&rated.stdout));
    let verified = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&unit)
        .output();
    let said = text(&verified.unwrap().stderr);
    let wrong = said
        .lines()
        .filter(|line| !line.contains("is not executable"));
    assert_eq!(wrong.collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Goal: a daemon writes no core dumps, unless its configuration allows them. Method: the limits of
/// the process, as the kernel shows them.
#[test]
fn core_dumps_are_off_unless_allowed() {
    let limits = |environment: &[(&str, &str)]| {
        let place = Place::new();
        let (daemon, _client) = place.serve_with(&[], environment).ready();
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.child.id()));
        let limits = limits.expect("a process");
        let line = limits.lines().find(|line| line.starts_with("Max core"));
        let line = line.expect("of Linux").to_owned();
        let words: Vec<&str> = line.split_whitespace().collect();
        // "Max core file size  SOFT  HARD  bytes"
        [words[4].to_owned(), words[5].to_owned()]
    };
    for limit in limits(&[]) {
        assert!(["0", "1"].contains(&limit.as_str()), "{limit}");
    }
    let own = rustix::process::getrlimit(rustix::process::Resource::Core);
    let shown =
        |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
    let allowed = limits(&[("NACRE_SECURITY_CORE_DUMPS", "true")]);
    assert_eq!(allowed, [shown(own.current), shown(own.maximum)]);
}
