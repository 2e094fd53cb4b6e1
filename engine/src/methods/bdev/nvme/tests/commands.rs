//! Goal: users read a drive with admin commands, cannot change it with them, and update its
//! firmware from a file. Method: a daemon on the test's thread, and a simulated drive.

use std::path::Path;
use std::sync::Arc;

use base64ct::{Base64Url, Encoding};
use nacre_bdev_nvme_sim::{Drive, IMAGE_MARK, Running};
use nacre_nvmf_wire::commands::admin::{GetFeatures, Identify};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::zerocopy::{FromBytes, IntoBytes};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use serde_json::{Value, json};

use super::drive::{Chassis, PLACE, attach, drive, until, with_chassis};
use crate::methods::testing::TestDaemon;
use crate::rpc::RpcError;

fn attached() -> (TestDaemon, Drive, Running) {
    let chassis = Arc::new(Chassis::default());
    let (drive, running) = drive(PLACE, "S1");
    drive.reconfigure(|config| config.limits.firmware_updates = Some(0));
    chassis.put(PLACE, &drive);
    let daemon = with_chassis(&chassis, None);
    daemon.call("bdev_nvme_attach_controller", attach());
    (daemon, drive, running)
}

fn command(sqe: &Sqe, data_len: usize) -> Value {
    json!({
        "name": "Nvme0",
        "cmd_type": "admin",
        "data_direction": "c2h",
        "cmdbuf": Base64Url::encode_string(sqe.as_bytes()),
        "data_len": data_len,
    })
}

fn completion(reply: &Value) -> Cqe {
    let bytes = Base64Url::decode_vec(reply["cpl"].as_str().unwrap()).unwrap();
    Cqe::read_from_bytes(&bytes).unwrap()
}

fn field(refusal: RpcError) -> (i32, Option<String>) {
    (refusal.code, refusal.data.and_then(|data| data.field))
}

#[test]
fn admin_commands_that_read() {
    let (daemon, _drive, _running) = attached();
    let send = |sqe: &Sqe, len| daemon.try_call("bdev_nvme_send_cmd", command(sqe, len));
    let identify = Identify::new(cns::CONTROLLER).to_sqe(7, 0);
    let reply = send(&identify, 4096).unwrap();
    assert_eq!(completion(&reply), Cqe::success(7));
    let page = Base64Url::decode_vec(reply["data"].as_str().unwrap()).unwrap();
    assert_eq!((page.len(), &page[4..6]), (4096, &b"S1"[..]));

    let feature = GetFeatures::new(fid::VOLATILE_WRITE_CACHE).to_sqe(0, 0);
    let reply = send(&feature, 0).unwrap();
    assert_eq!(completion(&reply).result.get(), 1);
    assert_eq!(reply.get("data"), None);

    // The status of the drive is the answer, not an error of the call.
    let unknown = Identify::new(0x77).to_sqe(0, 0);
    let reply = send(&unknown, 4096).unwrap();
    let status = StatusCode::from_field(completion(&reply).status_phase.get() >> 1);
    assert_eq!(status.code(), StatusCode::INVALID_FIELD);
}

#[test]
fn commands_that_are_refused() {
    let (daemon, drive, _running) = attached();
    let before = drive.stats().admin;
    let identify = Identify::new(cns::CONTROLLER).to_sqe(0, 0);
    let good = command(&identify, 4096);
    let with = |key: &str, value: Value| {
        let mut params = good.clone();
        params[key] = value;
        params
    };
    let opcode = |opcode| command(&Sqe::new(opcode, 0), 0);
    let (eperm, enotsup, einval) = (-1, -95, -32602);
    let cases = [
        (opcode(admin::FORMAT_NVM), eperm, "cmdbuf"),
        (opcode(admin::SANITIZE), eperm, "cmdbuf"),
        (opcode(admin::DELETE_IO_SQ), eperm, "cmdbuf"),
        (opcode(admin::FIRMWARE_COMMIT), eperm, "cmdbuf"),
        (with("cmd_type", json!("io")), enotsup, "cmd_type"),
        (
            with("data_direction", json!("h2c")),
            enotsup,
            "data_direction",
        ),
        (with("cmdbuf", json!("AAAA")), einval, "cmdbuf"),
        (with("cmdbuf", json!("!")), einval, "cmdbuf"),
        (with("data_len", json!(64 << 20)), einval, "data_len"),
    ];
    for (params, code, name) in cases {
        let refusal = daemon.refused("bdev_nvme_send_cmd", params);
        assert_eq!(field(refusal), (code, Some(name.to_owned())));
    }
    let nowhere = daemon.refused("bdev_nvme_send_cmd", with("name", json!("Nvme7")));
    assert!(nowhere.message.contains("not found"), "{nowhere:?}");
    let after = drive.stats().admin;
    for opcode in [admin::FORMAT_NVM, admin::SANITIZE, admin::DELETE_IO_SQ] {
        let opcode = usize::from(opcode);
        assert_eq!(after[opcode], before[opcode], "opcode {opcode:#x}");
    }
}

/// Goal: error injection fails commands of a drive and of a remote controller, with SPDK's answers.
#[test]
fn injected_errors() {
    let (daemon, drive, _running) = attached();
    let (add, remove) = (
        "bdev_nvme_add_error_injection",
        "bdev_nvme_remove_error_injection",
    );
    let rule = |name: &str, more: Value| {
        let mut params = json!({ "name": name, "cmd_type": "admin", "opc": admin::IDENTIFY });
        let all = params.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        params
    };
    let identify = || {
        let identify = Identify::new(cns::CONTROLLER).to_sqe(7, 0);
        let reply = daemon.call("bdev_nvme_send_cmd", command(&identify, 4096));
        StatusCode::from_field(completion(&reply).status_phase.get() >> 1)
    };
    let fault = json!({ "sct": 11, "sc": 33, "err_count": 2 });
    assert_eq!(daemon.call(add, rule("Nvme0", fault)), json!(true));
    // SPDK keeps three bits of the type.
    let expected = StatusCode::new(3, 33);
    assert_eq!([identify(), identify()], [expected; 2]);
    assert!(identify().is_success());
    let sent = drive.stats().admin[usize::from(admin::IDENTIFY)];
    let unsent = json!({ "sct": 0, "sc": 6, "do_not_submit": true, "timeout_in_us": 1000 });
    daemon.call(add, rule("Nvme0", unsent.clone()));
    assert_eq!(identify(), StatusCode::new(0, 6));
    assert_eq!(drive.stats().admin[usize::from(admin::IDENTIFY)], sent);
    daemon.call(add, rule("Nvme0", unsent));
    assert_eq!(daemon.call(remove, rule("Nvme0", json!({}))), json!(true));
    assert!(identify().is_success());
    for method in [add, remove] {
        let nowhere = daemon.refused(method, rule("Nvme7", json!({})));
        assert_eq!(nowhere.code, -19);
        let wrong = daemon.refused(method, rule("Nvme0", json!({ "cmd_type": "both" })));
        assert_eq!(wrong.code, -22);
    }

    let io = json!({ "cmd_type": "io", "opc": 2, "sct": 2, "sc": 0x81, "err_count": 100 });
    let ram = json!({ "name": "ram", "block_size": 512, "num_blocks": 8192 });
    daemon.call("bdev_malloc_create", ram);
    let volume = json!({ "name": "v", "devices": ["Nvme0n1", "ram"], "force": true });
    daemon.call("volume_create", volume);
    daemon.call(add, rule("Nvme0", io));
    daemon.call("volume_verify", json!({ "name": "v" }));
    let errors = || {
        let volume = daemon.call("volume_get", json!({ "name": "v" }));
        volume["replicas"][0]["errors"].as_u64().unwrap()
    };
    until(&daemon, "read errors of the replica", || errors() > 0);
}

fn apply(daemon: &TestDaemon, file: &Path, bdev: &str) -> Result<Value, RpcError> {
    let params = json!({ "filename": file, "bdev_name": bdev });
    daemon.try_call("bdev_nvme_apply_firmware", params)
}

#[test]
fn firmware_from_a_file() {
    let (daemon, _drive, _running) = attached();
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
    let mut image = IMAGE_MARK.to_vec();
    image.extend(b"2.1     ");
    image.resize(5000, 0);
    std::fs::write(&good, &image).unwrap();
    std::fs::write(&bad, b"not an image").unwrap();
    let updated = apply(&daemon, &good, "Nvme0n2").unwrap();
    assert_eq!(updated, "firmware 2.1 runs; it was 1.0");
    let info = daemon.call("bdev_nvme_get_controllers", json!({ "name": "Nvme0" }));
    let drive = &info[0]["ctrlrs"][0]["drive"];
    assert_eq!(drive["info"]["firmware"], "2.1");
    assert_eq!(drive["status"]["resets"], 1);

    let pipe = dir.path().join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    std::fs::write(dir.path().join("odd"), [0; 1021]).unwrap();
    let (eio, einval, enodev, params) = (-5, -22, -19, -32602);
    for (file, bdev, code, name) in [
        (bad, "Nvme0", eio, None),
        (dir.path().join("odd"), "Nvme0", einval, Some("filename")),
        (dir.path().join("none"), "Nvme0", eio, Some("filename")),
        (pipe, "Nvme0", params, Some("filename")),
        (dir.path().to_owned(), "Nvme0", params, Some("filename")),
        (good, "Malloc0", enodev, Some("bdev_name")),
    ] {
        let refusal = apply(&daemon, &file, bdev).unwrap_err();
        let found = (
            refusal.code,
            refusal.data.as_ref().and_then(|data| data.field.clone()),
        );
        assert_eq!(
            found,
            (code, name.map(str::to_owned)),
            "{file:?}: {refusal:?}"
        );
    }
    let info = daemon.call("bdev_nvme_get_controllers", json!({ "name": "Nvme0" }));
    assert_eq!(info[0]["ctrlrs"][0]["drive"]["info"]["firmware"], "2.1");
}
