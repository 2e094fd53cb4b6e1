//! Goal: each changing call of a client is in the file before its reply, without secrets. Method:
//! calls of simulated clients on an engine with a real file.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::rc::Rc;

use nacre_engine_web::acts::Act;
use serde_json::{Value, json};

use super::AuditLog;
use super::file::AuditFile;
use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::rpc::RpcError;
use crate::rpc::access::{Caller, Credentials, Identity};
use crate::rpc::error::Errno;
use crate::rpc::{Changes, Role};

struct Rig {
    daemon: TestDaemon,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.rpc.access.operator = vec!["gid:50".into()];
        settings.rpc.access.viewer = vec!["gid:60".into()];
        let roles = &mut settings.rpc.tls.roles;
        roles.insert("CN=ops".into(), Role::Operator);
        let audit = AuditLog::to_file(AuditFile::new(dir.path().join("audit.log"), 1 << 20, 2));
        let daemon = TestDaemon::audited(settings, audit);
        Self { daemon, dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("audit.log")
    }

    fn call_as(&self, gid: u32, method: &str, params: Value) -> Result<Value, RpcError> {
        let identity = Identity::Local(Credentials {
            pid: Some(42),
            uid: if gid == 0 { 0 } else { 4000 },
            gid: 4000,
            groups: vec![gid],
        });
        let program = "script".into();
        self.call(Caller { identity, program }, method, params)
    }

    fn call(&self, caller: Caller, method: &str, params: Value) -> Result<Value, RpcError> {
        let raw = serde_json::value::to_raw_value(&params).unwrap();
        let raw = (!params.is_null()).then_some(&*raw);
        let engine = &self.daemon.engine;
        let answer = self
            .daemon
            .run(engine.call_for(&Rc::new(caller), method, raw))?;
        Ok(serde_json::from_str(answer.get()).unwrap())
    }

    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path()).unwrap_or_default();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

const MALLOC: &str = "bdev_malloc_create";

fn disk(name: &str) -> Value {
    json!({ "name": name, "num_blocks": 64, "block_size": 512 })
}

#[test]
fn changing_calls_are_written_and_reads_are_not() {
    let rig = Rig::new();
    rig.call_as(60, "bdev_get_bdevs", Value::Null).unwrap();
    rig.call_as(60, "bdev_get_iostat", json!({})).unwrap();
    assert_eq!(rig.lines(), [Value::Null; 0]);
    // One parameter makes this call a change.
    rig.call_as(0, "bdev_get_iostat", json!({ "reset_mode": "all" }))
        .unwrap();
    let lines = rig.lines();
    assert_eq!((lines.len(), &lines[0]["class"]), (1, &json!("read")));
    std::fs::write(rig.path(), "").unwrap();
    rig.call_as(0, MALLOC, disk("a")).unwrap();
    rig.call_as(0, MALLOC, disk("a")).unwrap_err();
    rig.call_as(0, MALLOC, json!({ "name": "b", "num_blockz": 1 }))
        .unwrap_err();
    let denied = rig.call_as(50, MALLOC, disk("c")).unwrap_err();
    assert_eq!(denied.code, -13);
    rig.call_as(50, "log_set_level", json!({ "level": "ERROR" }))
        .unwrap();
    let lines = rig.lines();
    let brief: Vec<Value> = lines
        .iter()
        .map(|line| {
            json!([
                line["role"],
                line["method"],
                line["object"],
                line["result"],
                line["error"]["code"]
            ])
        })
        .collect();
    assert_eq!(
        brief,
        [
            json!(["admin", MALLOC, "a", "done", null]),
            json!(["admin", MALLOC, "a", "refused", -17]),
            json!(["admin", MALLOC, "b", "refused", -32603]),
            json!(["operator", MALLOC, "c", "refused", -13]),
            json!(["operator", "log_set_level", null, "done", null]),
        ]
    );
    let first = &lines[3];
    assert_eq!(first["gids"], json!([4000, 50]));
    assert_eq!((&first["uid"], &first["pid"]), (&json!(4000), &json!(42)));
    assert_eq!(
        (&first["program"], &first["class"]),
        (&json!("script"), &json!("admin"))
    );
    assert_eq!(first["params"], disk("c"));
    assert!(first["duration_ms"].is_number() && first["time"].is_string());
    // Reading the log needs the role admin.
    assert_eq!(
        rig.call_as(60, "audit_get", Value::Null).unwrap_err().code,
        -13
    );
    let answer = rig
        .call_as(0, "audit_get", json!({ "refused": true, "limit": 2 }))
        .unwrap();
    let methods = answer["calls"].as_array().unwrap();
    assert_eq!(methods.len(), 2);
    assert_eq!(
        (&methods[0]["method"], &methods[1]["method"]),
        (&json!(MALLOC), &json!("audit_get"))
    );
    let about = rig.call_as(
        0,
        "audit_get",
        json!({ "object": "a", "uid": 0, "method": MALLOC }),
    );
    assert_eq!(about.unwrap()["calls"].as_array().unwrap().len(), 2);
    let objects = |params: Value| -> Vec<Value> {
        let answer = rig.call_as(0, "audit_get", params).unwrap();
        let calls = answer["calls"].as_array().unwrap().iter();
        calls.map(|call| call["object"].clone()).collect()
    };
    let of_root = objects(json!({ "user": "0", "method": MALLOC }));
    assert_eq!(of_root, ["a", "a", "b"]);
    assert!(objects(json!({ "user": "ann" })).is_empty());
    let page = objects(json!({ "method": MALLOC, "limit": 1, "skip": 1 }));
    assert_eq!(page, ["b"]);
    assert!(objects(json!({ "method": MALLOC, "skip": 100 })).is_empty());
    let until = |time: &Value| objects(json!({ "method": MALLOC, "until": time })).len();
    assert_eq!(until(&json!("2026-01-01T00:00:00.000Z")), 0);
    assert_eq!(until(&json!("9999")), 4);
    let first = rig
        .call_as(0, "audit_get", json!({ "method": MALLOC }))
        .unwrap();
    assert!((1..=4).contains(&until(&first["calls"][0]["time"])));
    let refused = rig.call_as(0, "audit_get", json!({ "skip": 10_001 }));
    assert_eq!(refused.unwrap_err().code, -32602);
}

/// Goal: secrets are neither in parameters nor in causes of refusals. Method: a key in every place
/// where a name belongs.
#[test]
fn no_secret_is_in_the_log() {
    const KEY: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    let rig = Rig::new();
    let nqn = "nqn.2026-01.org.example:a";
    let file = rig.dir.path().join("key");
    std::fs::write(&file, KEY).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    rig.call_as(
        0,
        "keyring_file_add_key",
        json!({ "name": "k", "path": file }),
    )
    .unwrap();
    rig.call_as(0, "nvmf_create_subsystem", json!({ "nqn": nqn }))
        .unwrap();
    let host = "nqn.2026-01.org.example:host";
    for (method, params) in [
        (
            "nvmf_subsystem_add_host",
            json!({ "nqn": nqn, "host": host, "dhchap_key": KEY }),
        ),
        (
            "nvmf_subsystem_add_host",
            json!({ "nqn": nqn, "host": host, "dhchap_key": "k", "psk": KEY }),
        ),
        (
            "nvmf_subsystem_set_keys",
            json!({ "nqn": nqn, "host": host, "dhchap_key": KEY }),
        ),
        ("keyring_file_add_key", json!({ "name": "x", "path": KEY })),
        (
            "keyring_file_add_key",
            json!({ "name": "x", "path": "/x", "secret": KEY }),
        ),
        ("keyring_file_remove_key", json!({ "name": KEY })),
        ("keyring_file_remove_key", json!([KEY])),
    ] {
        rig.call_as(0, method, params).unwrap_err();
    }
    let text = std::fs::read_to_string(rig.path()).unwrap();
    assert!(!text.contains("AAECAw"), "{text}");
    // A secret call has two lines: before and after.
    let results = rig.lines();
    let of_key = results
        .iter()
        .filter(|line| line["method"] == "keyring_file_add_key");
    let of_key: Vec<&str> = of_key
        .map(|line| line["result"].as_str().unwrap())
        .collect();
    assert_eq!(
        of_key,
        [
            "started", "done", "started", "refused", "started", "refused"
        ]
    );
}

/// Goal: a file that takes no line refuses calls about keys and no others. Method: a folder at its
/// path, then none.
#[test]
fn a_failing_file_refuses_secret_calls_only() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path()).unwrap();
    let remove = || rig.call_as(0, "keyring_file_remove_key", json!({ "name": "k" }));
    let refused = remove().unwrap_err();
    assert!(
        refused.to_string().contains("audit log takes no line"),
        "{refused}"
    );
    assert!(
        refused.to_string().contains("[rpc.audit] file"),
        "{refused}"
    );
    rig.call_as(0, MALLOC, disk("a")).unwrap();
    std::fs::remove_dir(rig.path()).unwrap();
    // ENOKEY: the call itself.
    assert_eq!(remove().unwrap_err().code, -126);
    assert_eq!(rig.lines().len(), 2);
}

/// Goal: viewers see no path of a key file, wherever it would be.
#[test]
fn viewers_see_no_paths_of_key_files() {
    let rig = Rig::new();
    let file = rig.dir.path().join("the \"key\"");
    std::fs::write(
        &file,
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
    )
    .unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    rig.call_as(
        0,
        "keyring_file_add_key",
        json!({ "name": "web1", "path": file }),
    )
    .unwrap();
    for (method, params) in [
        ("keyring_get_keys", Value::Null),
        ("framework_get_config", json!({ "name": "keyring" })),
        ("config_export", Value::Null),
        ("state_get", Value::Null),
    ] {
        for (gid, sees) in [(60, false), (50, true), (0, true)] {
            let answer = rig
                .call_as(gid, method, params.clone())
                .unwrap()
                .to_string();
            assert_eq!(
                answer.contains("the \\\"key\\\""),
                sees,
                "{method} {gid}: {answer}"
            );
            assert_eq!(
                answer.contains("(key web1)"),
                !sees,
                "{method} {gid}: {answer}"
            );
        }
    }
}

/// Goal: methods that a viewer may not call are not offered to it, and parameters do not get around
/// its class.
#[test]
fn roles_decide_about_methods() {
    let rig = Rig::new();
    let current = |gid| {
        let answer = rig
            .call_as(gid, "rpc_get_methods", json!({ "current": true }))
            .unwrap();
        let names = answer.as_array().unwrap().iter();
        names
            .map(|name| name.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let [viewer, operator, admin] = [60, 50, 0].map(current);
    let has = |list: &[String], name: &str| list.iter().any(|of| of == name);
    assert!(has(&viewer, "bdev_get_bdevs") && !has(&viewer, "log_set_level"));
    assert!(has(&operator, "log_set_level") && !has(&operator, MALLOC));
    assert!(has(&admin, MALLOC) && has(&admin, "keyring_file_add_key"));
    for gid in [60, 50] {
        let all = rig.call_as(gid, "rpc_get_methods", Value::Null).unwrap();
        assert!(all.as_array().unwrap().len() > admin.len() - 1);
    }
    let reset = json!({ "reset_mode": "all" });
    let refused = rig
        .call_as(60, "bdev_get_iostat", reset.clone())
        .unwrap_err();
    assert_eq!(
        (refused.code, refused.data.unwrap().field.as_deref()),
        (-13, Some("reset_mode"))
    );
    rig.call_as(50, "bdev_get_iostat", reset).unwrap();
    let refused = rig.call_as(7, "spdk_get_version", Value::Null).unwrap_err();
    assert_eq!(refused.code, -13);
}

/// Goal: a search by object finds every change of an object. Method: each changing method names its
/// object by one of the known parameters, or is one of those without an object.
#[test]
fn changes_name_their_object() {
    const WITHOUT: [&str; 15] = [
        // Settings of the whole daemon, and actions on it.
        "_set_options",
        "_set_config",
        "_set_crdt",
        "_set_max_subsystems",
        "_set_hotplug",
        "reactor_set_mode",
        "log_",
        "doctor_run",
        "spdk_kill_instance",
        // The machine itself.
        "appliance_",
        // Numbers, and transports.
        "alert_",
        "backup_cancel",
        "bdev_lvol_check_shallow_copy",
        "cluster_repair",
        "nvmf_create_transport",
    ];
    // Lists of objects.
    const SEVERAL: [&str; 2] = ["lvol_snapshot", "bdev_get_iostat"];
    let mut unnamed = Vec::new();
    let mut named = 0;
    for entry in crate::methods::all().iter() {
        let schema = Value::from((entry.params_schema)());
        let Some(params) = schema["properties"]
            .as_object()
            .filter(|all| !all.is_empty())
        else {
            continue;
        };
        if entry.changes == Changes::Nothing {
            continue;
        }
        let is_named = super::OBJECTS.iter().any(|name| params.contains_key(*name));
        named += u32::from(is_named);
        let is_without = WITHOUT.iter().any(|part| entry.name.contains(part));
        if !is_named && !is_without && !SEVERAL.contains(&entry.name) {
            unnamed.push(entry.name);
        }
    }
    assert!(named > 100, "{named}");
    assert!(unnamed.is_empty(), "{unnamed:?}");
}

/// Goal: a client over TLS has the role of its certificate, which the line names.
#[test]
fn the_certificate_of_a_client_is_written() {
    let rig = Rig::new();
    let caller = |subject: &str| Caller {
        identity: Identity::Certificate {
            subject: subject.parse().unwrap(),
            address: "192.0.2.7:9".parse().unwrap(),
        },
        program: String::new(),
    };
    let level = json!({ "level": "ERROR" });
    rig.call(caller("CN=ops,O=x"), "log_set_level", level.clone())
        .unwrap();
    let refused = rig.call(caller("CN=web"), "log_set_level", level);
    assert_eq!(refused.unwrap_err().code, -13);
    let [line] = &rig.lines()[..] else {
        panic!("{:?}", rig.lines());
    };
    assert_eq!(
        json!([
            line["certificate"],
            line["address"],
            line["role"],
            line["uid"]
        ]),
        json!(["CN=ops,O=x", "192.0.2.7:9", "operator", null])
    );
}

/// Goal: a user of the page has the role of the account, which the line names, and no password is
/// in any line.
#[test]
fn the_account_of_a_user_of_the_page_is_written() {
    let rig = Rig::new();
    let caller = |name: &str, role| Caller {
        identity: Identity::Account {
            name: name.into(),
            role,
            address: "192.0.2.7:9".parse().unwrap(),
        },
        program: String::new(),
    };
    let (admin, viewer) = (Role::Admin, Role::Viewer);
    let add = json!({ "name": "cid", "role": "viewer", "password": "correct horse battery" });
    let refused = rig.call(caller("ann", admin), "web_account_add", add.clone());
    assert_eq!(refused.unwrap_err().code, -95, "there is no page");
    let refused = rig.call(caller("bob", viewer), "web_account_add", add);
    assert_eq!(refused.unwrap_err().code, -13);
    let lines = rig.lines();
    assert!(lines.iter().all(|line| !line.to_string().contains("horse")));
    for (line, account) in lines.iter().zip(["ann", "ann", "bob"]) {
        assert_eq!(
            json!([
                line["account"],
                line["address"],
                line["uid"],
                line["params"]["password"]
            ]),
            json!([account, "192.0.2.7:9", null, "(secret)"])
        );
    }
    assert_eq!(lines.len(), 3, "{lines:?}");
}

/// Goal: a program has the role of its API token, which the line names. Method: a token of an admin
/// and one of a viewer; the refusal says how to get the role.
#[test]
fn the_api_token_of_a_program_is_written() {
    let rig = Rig::new();
    let caller = |name: &str, role| Caller {
        identity: Identity::ApiToken {
            name: name.into(),
            role,
            address: "192.0.2.7:9".parse().unwrap(),
        },
        program: String::new(),
    };
    let create = json!({ "name": "x", "role": "admin" });
    let refused = rig.call(
        caller("ops", Role::Admin),
        "web_token_create",
        create.clone(),
    );
    assert_eq!(refused.unwrap_err().code, -95, "there is no page");
    let refused = rig.call(caller("probe", Role::Viewer), "web_token_create", create);
    let facts = refused.unwrap_err().data.unwrap();
    assert!(
        facts.cause.contains("API token probe at 192.0.2.7:9"),
        "{facts:?}"
    );
    let remedy = facts.remedy.unwrap();
    assert!(
        remedy.contains("nacre web token create NAME --role admin"),
        "{remedy}"
    );
    let lines = rig.lines();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for (line, token) in lines.iter().zip(["ops", "ops", "probe"]) {
        assert_eq!(
            json!([line["api_token"], line["address"], line["account"]]),
            json!([token, "192.0.2.7:9", null])
        );
    }
}

/// Goal: acts on the page have lines, whose number is limited by account, and by address where they
/// were refused.
#[test]
fn acts_on_the_page_are_written() {
    let rig = Rig::new();
    let act = |account: Option<&str>, outcome| {
        let act = Act {
            name: Act::SIGN_IN,
            account: account.map(str::to_owned),
            api_token: None,
            role: account.map(|_| Role::Viewer),
            address: "192.0.2.7:9".parse().unwrap(),
            outcome,
        };
        let audit = &rig.daemon.engine.calls.audit;
        rig.daemon.run(audit.act(act));
    };
    let wrong = || Err(RpcError::errno(Errno::EACCES, "wrong name or password"));
    act(None, wrong());
    act(Some("bob"), Ok(()));
    let lines = rig.lines();
    let facts = |line: &Value| {
        let of = |key: &str| line[key].as_str().unwrap_or("-").to_owned();
        ["method", "class", "account", "address", "role", "result"].map(of)
    };
    assert_eq!(
        [facts(&lines[0]), facts(&lines[1])],
        [
            [
                "page_sign_in",
                "page",
                "-",
                "192.0.2.7:9",
                "none",
                "refused"
            ],
            [
                "page_sign_in",
                "page",
                "bob",
                "192.0.2.7:9",
                "viewer",
                "done"
            ],
        ]
    );
    assert_eq!(lines[0]["error"]["cause"], "wrong name or password");
    for _ in 0..super::refusals::BURST {
        act(Some("ann"), wrong());
        act(Some("bob"), Ok(()));
    }
    act(Some("cid"), Ok(()));
    let lines = rig.lines();
    assert_eq!(lines.len(), 2 * super::refusals::BURST as usize + 1);
    assert_eq!(lines.last().unwrap()["account"], "cid");
}

/// Goal: a viewer cannot fill the files with calls that it may not make.
#[test]
fn refused_calls_have_a_limited_number_of_short_lines() {
    let rig = Rig::new();
    let long = json!({ "name": "x".repeat(100_000), "num_blocks": 64, "block_size": 512 });
    for _ in 0..super::refusals::BURST + 30 {
        rig.call_as(60, MALLOC, long.clone()).unwrap_err();
    }
    // Another client, and calls that it may make, have their lines, even if these fail.
    let wrong = json!({ "name": "b", "num_blocks": "many" });
    for _ in 0..super::refusals::BURST + 30 {
        rig.call_as(0, MALLOC, wrong.clone()).unwrap_err();
    }
    rig.call_as(0, MALLOC, disk("a")).unwrap();
    let lines = rig.lines();
    let expected = 2 * super::refusals::BURST as usize + 31;
    assert_eq!(lines.len(), expected);
    assert!(lines.iter().all(|line| line.to_string().len() < 2000));
    assert!(lines[0]["params"].as_str().unwrap().ends_with("left out"));
    assert_eq!(lines.last().unwrap()["object"], "a");
}

/// Goal: a viewer cannot fill the files by a method for viewers that one parameter makes a change.
/// Method: more such calls than a client has lines, also with a value that is refused later.
#[test]
fn a_viewers_calls_have_a_limited_number_of_lines() {
    let rig = Rig::new();
    for reset in ["all", "none", "nonsense"] {
        for _ in 0..super::refusals::BURST {
            let _ = rig.call_as(60, "bdev_get_iostat", json!({ "reset_mode": reset }));
        }
    }
    assert_eq!(rig.lines().len(), super::refusals::BURST as usize);
}

/// Goal: a call that ends the daemon has a line before it does.
#[test]
fn the_call_that_ends_the_daemon_is_written_first() {
    let rig = Rig::new();
    // A signal that does not exist.
    rig.call_as(0, "spdk_kill_instance", json!({ "sig_name": "SIGNONE" }))
        .unwrap_err();
    let results: Vec<_> = rig
        .lines()
        .iter()
        .map(|line| line["result"].clone())
        .collect();
    assert_eq!(results, ["started", "refused"]);
}
