//! Goal: a local drive is attached, listed, monitored, restored and detached by the same calls as a
//! remote controller. Method: a daemon on the test's thread, and simulated drives on a simulated
//! bus.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev_nvme::Function;
use nacre_bdev_nvme_sim::{CacheSurvival, Config, Drive, Identity, NamespaceConfig, Pace, Running};
use nacre_hugepages::{Arena, RegisterError};
use parking_lot::Mutex;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::drives::{Bus, Drives};
use crate::store::Store;

pub(crate) const PLACE: &str = "0000:5e:00.0";
const OTHER: &str = "0000:5f:00.0";

/// A bus with simulated drives in some slots.
#[derive(Default)]
pub(crate) struct Chassis {
    places: Mutex<BTreeMap<String, Drive>>,
}

impl Chassis {
    pub(crate) fn put(&self, place: &str, drive: &Drive) {
        self.places.lock().insert(place.to_owned(), drive.clone());
    }

    fn pull(&self, place: &str) {
        let drive = self.places.lock().remove(place).unwrap();
        drive.pull(CacheSurvival::Nothing);
    }
}

impl Bus for Chassis {
    fn open(&self, address: &str, arenas: &[Arena]) -> Result<Arc<dyn Function>, RpcError> {
        let places = self.places.lock();
        let drive = places.get(address).ok_or_else(|| {
            RpcError::errno(Errno::ENODEV, format!("nothing at {address}")).field("traddr")
        })?;
        let function = drive.plug();
        for arena in arenas {
            match arena.register(function.slot(), function.hook()) {
                Ok(()) | Err(RegisterError::SlotTaken { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        Ok(function)
    }

    fn ready(&self) -> Vec<String> {
        self.places.lock().keys().cloned().collect()
    }
}

/// A drive with two namespaces of 4 MiB and 16 MiB and different block sizes.
pub(crate) fn drive(place: &str, serial: &str) -> (Drive, Running) {
    let namespace = |nsid, block_size, blocks| NamespaceConfig {
        uuid: Some(Uuid::new_v5(
            &Uuid::NAMESPACE_OID,
            format!("{serial} {nsid}").as_bytes(),
        )),
        // The drive was in use before, and deallocation does not clear its data.
        contents: 0x6b,
        ignores_advice: true,
        ..NamespaceConfig::new(nsid, block_size, blocks)
    };
    let drive = Drive::new(Config {
        address: place.to_owned(),
        identity: Identity {
            serial: serial.to_owned(),
            ..Identity::default()
        },
        namespaces: vec![namespace(1, 512, 8192), namespace(2, 4096, 4096)],
        ..Config::default()
    });
    let running = drive.spawn();
    (drive, running)
}

pub(crate) fn with_chassis(chassis: &Arc<Chassis>, dir: Option<&Path>) -> TestDaemon {
    let store = dir.map(|dir| Store::open(dir).unwrap());
    let bus = Arc::clone(chassis) as Arc<dyn Bus>;
    let mut settings = Settings::default();
    settings.data.retry_s = 1;
    TestDaemon::with_drives(settings, store, Drives::on(bus))
}

pub(crate) fn attach() -> Value {
    json!({ "name": "Nvme0", "trtype": "PCIe", "traddr": "5E:00.0" })
}

fn controller(daemon: &TestDaemon) -> Value {
    let mut all = daemon.call("bdev_nvme_get_controllers", json!({ "name": "Nvme0" }));
    all[0]["ctrlrs"][0].take()
}

pub(super) fn until(daemon: &TestDaemon, what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "timeout: {what}");
        daemon.run(async { tokio::time::sleep(Duration::from_millis(10)).await });
    }
}

fn state(daemon: &TestDaemon) -> String {
    let one = controller(daemon);
    one["drive"]["status"]["state"].as_str().unwrap().to_owned()
}

fn kinds(daemon: &TestDaemon) -> Vec<String> {
    let notes = daemon.call("notify_get_notifications", Value::Null);
    let notes = notes.as_array().unwrap().iter();
    notes
        .map(|note| note["type"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn attached_listed_reset_and_detached() {
    let chassis = Arc::new(Chassis::default());
    let (drive, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &drive);
    let daemon = with_chassis(&chassis, None);
    assert_eq!(
        daemon.call("bdev_nvme_attach_controller", attach()),
        json!(["Nvme0n1", "Nvme0n2"])
    );
    let device = daemon.call("bdev_get_bdevs", json!({ "name": "Nvme0n2" }))[0].take();
    assert_eq!(
        (
            &device["product_name"],
            &device["block_size"],
            &device["num_blocks"]
        ),
        (&json!("NVMe disk"), &json!(4096), &json!(4096))
    );
    let one = controller(&daemon);
    assert_eq!(one["trid"], json!({ "trtype": "PCIe", "traddr": PLACE }));
    assert_eq!(one["state"], "enabled");
    assert_eq!(one["bdevs"], json!(["Nvme0n1", "Nvme0n2"]));
    assert_eq!(one["drive"]["info"]["serial"], "S1");
    assert_eq!(one["host"], Value::Null);

    for (again, field) in [
        (attach(), "name"),
        (
            json!({ "name": "b", "trtype": "pcie", "traddr": PLACE }),
            "traddr",
        ),
    ] {
        let refused = daemon.refused("bdev_nvme_attach_controller", again);
        assert_eq!(
            (refused.code, refused.data.unwrap().field.as_deref()),
            (-17, Some(field))
        );
    }

    let reset = |params| daemon.try_call("bdev_nvme_reset_controller", params);
    assert_eq!(reset(json!({ "name": "Nvme0" })).unwrap(), true);
    assert_eq!(controller(&daemon)["drive"]["status"]["resets"], 1);
    assert_eq!(
        reset(json!({ "name": "Nvme0", "cntlid": 4711 }))
            .unwrap_err()
            .code,
        -19
    );
    until(&daemon, "an event of the reset", || {
        kinds(&daemon).iter().any(|k| k == "nvme_reset")
    });

    let wrong = json!({ "name": "Nvme0", "traddr": OTHER });
    assert_eq!(
        daemon.refused("bdev_nvme_detach_controller", wrong).code,
        -19
    );
    let right = json!({ "name": "Nvme0", "trtype": "PCIe", "traddr": PLACE });
    assert_eq!(daemon.call("bdev_nvme_detach_controller", right), true);
    assert_eq!(
        drive.stats().normal_shutdowns,
        1,
        "no shutdown notification"
    );
    until(&daemon, "the drive is returned to the kernel", || {
        drive.is_given_back()
    });
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})), json!([]));
    assert_eq!(
        daemon.call("bdev_nvme_get_controllers", json!({})),
        json!([])
    );
    drive.check();
}

/// Goal: a slow drive delays only its own call, and its name and address are reserved meanwhile.
#[test]
fn a_slow_drive_delays_only_its_own_call() {
    let chassis = Arc::new(Chassis::default());
    let slow = Drive::new(Config {
        address: PLACE.to_owned(),
        pace: Pace {
            ready_after: Duration::from_secs(3),
            ..Pace::default()
        },
        namespaces: vec![NamespaceConfig::new(1, 512, 8192)],
        ..Config::default()
    });
    let _running = slow.spawn();
    chassis.put(PLACE, &slow);
    let daemon = with_chassis(&chassis, None);
    let call = async |method: &str, params: Value| {
        let raw = serde_json::value::to_raw_value(&params).unwrap();
        daemon.engine.call(method, Some(&raw)).await
    };
    let disk = json!({ "name": "M", "block_size": 512, "num_blocks": 64 });
    let mut same_place = attach();
    same_place["name"] = json!("b");
    daemon.run(async {
        let attached = async {
            let names = call("bdev_nvme_attach_controller", attach()).await.unwrap();
            assert_eq!(names.get(), r#"["Nvme0n1"]"#);
        };
        let others = async {
            while !daemon.engine.drives.is_coming("Nvme0") {
                tokio::task::yield_now().await;
            }
            call("bdev_malloc_create", disk).await.unwrap();
            let same = [
                (call("bdev_nvme_attach_controller", attach()).await, -17),
                (call("bdev_nvme_attach_controller", same_place).await, -17),
                (
                    call("bdev_nvme_detach_controller", json!({ "name": "Nvme0" })).await,
                    -16,
                ),
            ];
            assert!(
                daemon.engine.drives.is_coming("Nvme0"),
                "other calls waited for the drive"
            );
            for (outcome, code) in same {
                assert_eq!(outcome.unwrap_err().code, code);
            }
        };
        tokio::join!(attached, others);
    });
    assert!(!daemon.engine.drives.is_coming("Nvme0"));
    let detach = json!({ "name": "Nvme0" });
    assert_eq!(daemon.call("bdev_nvme_detach_controller", detach), true);
    // A drive that never becomes ready releases its name and its address.
    slow.never_ready(true);
    slow.reconfigure(|config| {
        config.ready_timeout = Duration::from_secs(2);
        config.pace.ready_after = Duration::ZERO;
    });
    assert_eq!(
        daemon.refused("bdev_nvme_attach_controller", attach()).code,
        -5
    );
    assert!(!daemon.engine.drives.is_coming("Nvme0"));
    slow.never_ready(false);
    daemon.call("bdev_nvme_attach_controller", attach());
}

#[test]
fn health_logs_and_metrics() {
    let chassis = Arc::new(Chassis::default());
    let (drive, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &drive);
    drive.set_health(|log| log.percentage_used = 91);
    let daemon = with_chassis(&chassis, None);
    daemon.call("bdev_nvme_attach_controller", attach());
    let health = daemon.call(
        "bdev_nvme_get_controller_health_info",
        json!({ "name": "Nvme0" }),
    );
    assert_eq!(
        (
            &health["serial_number"],
            &health["percentage_used"],
            &health["traddr"]
        ),
        (&json!("S1"), &json!(91), &json!(PLACE))
    );
    let logs = daemon.call("bdev_nvme_get_controller_logs", json!({ "name": "Nvme0" }));
    assert_eq!(logs["controller"]["serial"], "S1");
    assert_eq!(logs["firmware"]["active_slot"], 1);
    until(&daemon, "a warning about wear", || {
        kinds(&daemon)
            .iter()
            .any(|kind| kind == "nvme_health_warning")
    });
    let scraped = daemon.call("metrics_get", Value::Null).to_string();
    for family in [
        "nacre_nvme_info",
        "nacre_nvme_state",
        "nacre_nvme_percentage_used",
    ] {
        assert!(scraped.contains(family), "{family}");
    }
    let refused = daemon.refused(
        "bdev_nvme_get_controller_health_info",
        json!({ "name": "x" }),
    );
    assert_eq!(refused.code, -32603);
}

/// Goal: a start gives no other drive the name and the namespaces of the one that was attached.
/// Method: two drives exchange their places while the daemon is down, and return.
#[test]
fn a_start_takes_no_other_drive() {
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    let (stranger, _other) = drive(PLACE, "S2");
    let dir = tempfile::tempdir().unwrap();
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, Some(dir.path()));
    let mut wanted = attach();
    wanted["serial"] = json!("S2");
    let refused = daemon.refused("bdev_nvme_attach_controller", wanted);
    assert_eq!(
        (refused.code, refused.data.unwrap().field.as_deref()),
        (-19, Some("serial"))
    );
    let devices = |daemon: &TestDaemon| {
        let all = daemon.call("bdev_get_bdevs", json!({}));
        all.as_array().unwrap().len()
    };
    assert_eq!(devices(&daemon), 0);
    daemon.call("bdev_nvme_attach_controller", attach());
    drop(daemon);

    chassis.put(PLACE, &stranger);
    let daemon = with_chassis(&chassis, Some(dir.path()));
    assert_eq!(devices(&daemon), 0);
    let stored = daemon.call("state_get", Value::Null).to_string();
    assert!(
        stored.contains("has the serial number \\\"S2\\\""),
        "{stored}"
    );
    chassis.put(PLACE, &mine);
    until(&daemon, "the drive is back", || devices(&daemon) == 2);
}

/// Goal: a pulled drive keeps its devices, and only the same drive brings them back.
#[test]
fn a_pulled_drive_returns_with_its_devices() {
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    let (stranger, _other) = drive(PLACE, "S2");
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, None);
    daemon.call(
        "bdev_nvme_set_hotplug",
        json!({ "enable": false, "period_us": 10_000 }),
    );
    daemon.call("bdev_nvme_attach_controller", attach());
    chassis.pull(PLACE);
    until(&daemon, "the removal of the drive", || {
        state(&daemon) == "removed"
    });
    assert_eq!(
        daemon
            .call("bdev_get_bdevs", json!({}))
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(controller(&daemon)["away"], true);
    assert!(kinds(&daemon).iter().any(|kind| kind == "nvme_removed"));

    chassis.put(PLACE, &stranger);
    daemon.run(async { tokio::time::sleep(Duration::from_millis(100)).await });
    assert_eq!(state(&daemon), "removed");
    chassis.pull(PLACE);
    chassis.put(PLACE, &mine);
    until(&daemon, "the return of the drive", || {
        state(&daemon) == "live"
    });
    assert_eq!(controller(&daemon)["losses"], 1);
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "Nvme0" }));
}

/// Goal: a namespace with a new identity, for example after a format, is a new device under the
/// same name. Cached facts about the old one do not apply.
#[test]
fn a_new_namespace_with_the_same_nsid_is_a_new_device() {
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, None);
    daemon.call("bdev_nvme_attach_controller", attach());
    let found = || {
        let all = daemon.call("bdev_get_bdevs", json!({}));
        let all = all.as_array().unwrap().iter();
        let first = all.filter(|bdev| bdev["name"] == "Nvme0n1");
        first.map(|bdev| bdev["uuid"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(found().len(), 1);
    let uuid = Uuid::from_u128(7);
    mine.change_namespace(1, |namespace| namespace.uuid = Some(uuid));
    until(&daemon, "the other device", || found() == [json!(uuid)]);
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "Nvme0" }));
    assert!(found().is_empty());
}

/// Goal: a drive is restored after a restart, also if it appears later.
#[test]
fn a_drive_is_restored_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, Some(dir.path()));
    daemon.call("bdev_nvme_attach_controller", attach());
    drop(daemon);
    assert_eq!(
        mine.stats().normal_shutdowns,
        1,
        "the daemon ended without a shutdown notification"
    );
    let daemon = with_chassis(&chassis, Some(dir.path()));
    assert_eq!(controller(&daemon)["bdevs"], json!(["Nvme0n1", "Nvme0n2"]));
    drop(daemon);

    chassis.pull(PLACE);
    let daemon = with_chassis(&chassis, Some(dir.path()));
    assert_eq!(
        daemon.call("bdev_nvme_get_controllers", json!({})),
        json!([])
    );
    let waits = daemon.call("state_get", Value::Null)["objects"].to_string();
    assert!(waits.contains("Nvme0"), "{waits}");
    chassis.put(PLACE, &mine);
    until(&daemon, "the attachment", || {
        daemon.engine.drives.find("Nvme0").is_some()
    });
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "Nvme0" }));
}

#[test]
fn new_drives_are_attached_with_hotplug() {
    let dir = tempfile::tempdir().unwrap();
    let chassis = Arc::new(Chassis::default());
    let daemon = with_chassis(&chassis, Some(dir.path()));
    daemon.call(
        "bdev_nvme_set_hotplug",
        json!({ "enable": true, "period_us": 10_000 }),
    );
    let ((first, _first), (second, _second)) = (drive(PLACE, "S1"), drive(OTHER, "S2"));
    chassis.put(PLACE, &first);
    until(&daemon, "the first drive", || {
        daemon.engine.drives.find("HotInNvme0").is_some()
    });
    chassis.put(OTHER, &second);
    until(&daemon, "the second drive", || {
        daemon.engine.drives.find("HotInNvme1").is_some()
    });
    drop(daemon);
    let daemon = with_chassis(&chassis, Some(dir.path()));
    let names = daemon.engine.drives.list();
    let names: Vec<_> = names
        .iter()
        .map(|(name, drive)| (name.as_str(), drive.address.as_str()))
        .collect();
    assert_eq!(names, [("HotInNvme0", PLACE), ("HotInNvme1", OTHER)]);
    for wrong in [9_999, 10_000_001] {
        let params = json!({ "enable": true, "period_us": wrong });
        assert_eq!(daemon.refused("bdev_nvme_set_hotplug", params).code, -32602);
    }
}

/// Goal: a volume uses a namespace of a drive by its URI, and survives a controller reset.
#[test]
fn a_replica_on_a_drive_survives_a_reset() {
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, None);
    let ram = json!({ "name": "ram", "block_size": 512, "num_blocks": 8192 });
    daemon.call("bdev_malloc_create", ram);
    let mut both = json!({ "name": "v", "devices": [format!("pcie://{PLACE}?nsid=1"), "ram"] });
    let facts = daemon.refused("volume_create", both.clone()).data.unwrap();
    assert!(facts.cause.contains("holds data"), "{facts}");
    both["force"] = true.into();
    daemon.call("volume_create", both);
    // Nothing was copied: the drive writes zeroes.
    let volume = daemon.call("volume_get", json!({ "name": "v" }));
    assert_eq!(volume["state"], "healthy", "{volume}");
    daemon.call("bdev_nvme_reset_controller", json!({ "name": "Nvme0" }));
    daemon.call("volume_verify", json!({ "name": "v" }));
    until(&daemon, "the comparison", || {
        let volume = daemon.call("volume_get", json!({ "name": "v" }));
        volume["verify"]["running"] == false && volume["state"] == "healthy"
    });
    let volume = daemon.call("volume_get", json!({ "name": "v" }));
    assert_eq!(volume["verify"]["different_blocks"], 0, "{volume}");

    for (uri, says) in [
        (format!("pcie://{PLACE}?nsid=9"), "0 namespaces"),
        (format!("vfio://{PLACE}"), "2 namespaces"),
        (format!("pcie://{OTHER}"), "nothing at"),
        ("pcie://nvme0".to_owned(), "not a place"),
    ] {
        let params = json!({ "name": "w", "devices": [uri] });
        let facts = daemon.refused("volume_create", params).data.unwrap();
        assert!(facts.cause.contains(says), "{facts}");
    }
}

#[test]
fn impossible_requests_are_refused() {
    let chassis = Arc::new(Chassis::default());
    let (mine, _running) = drive(PLACE, "S1");
    chassis.put(PLACE, &mine);
    let daemon = with_chassis(&chassis, None);
    for (params, field, code) in [
        (json!({ "traddr": "nvme0" }), "traddr", -32602),
        (json!({ "traddr": OTHER }), "traddr", -19),
        (
            json!({ "traddr": PLACE, "subnqn": "nqn.x" }),
            "subnqn",
            -32602,
        ),
        (
            json!({ "traddr": PLACE, "prchk_guard": true }),
            "prchk_guard",
            -95,
        ),
        (json!({ "traddr": PLACE, "name": "" }), "name", -32602),
    ] {
        let mut all = json!({ "name": "Nvme0", "trtype": "PCIe" });
        all.as_object_mut()
            .unwrap()
            .extend(params.as_object().unwrap().clone());
        let refused = daemon.refused("bdev_nvme_attach_controller", all);
        let facts = refused.data.unwrap();
        assert_eq!(
            (refused.code, facts.field.as_deref()),
            (code, Some(field)),
            "{facts}"
        );
    }
    mine.never_ready(true);
    let refused = daemon.refused("bdev_nvme_attach_controller", attach());
    let facts = refused.data.unwrap();
    assert!(facts.cause.contains("CSTS.RDY"), "{facts}");
    assert_eq!(daemon.call("state_get", Value::Null)["objects"], json!([]));
    mine.never_ready(false);
    daemon.call("bdev_nvme_attach_controller", attach());
}
