//! Goal: every method has an example, and every example is a call that works. Method: a client
//! makes the calls of `examples.json` in order. The daemon has a state, an audit log, the
//! administration page, simulated drives and RDMA devices. A second daemon is a node of a cluster.

mod cluster_session;

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_random_ports::local_port;
use nacre_transport_rdma_verbs::sim::attributes;
use serde_json::{Map, Value, json};

use self::cluster_session::ClusterSession;
use super::{Example, REST, all, of};
use crate::audit::AuditLog;
use crate::audit::file::AuditFile;
use crate::config::Settings;
use crate::methods::bdev::nvme::tests::drive::{Chassis, PLACE, drive};
use crate::methods::testing::TestDaemon;
use crate::rpc::access::{Caller, Credentials, Identity};
use crate::rpc::{Changes, RpcError};
use crate::services::drives::{Bus, Drives};
use crate::services::lifecycle::Phase;
use crate::store::Store;

/// Folder and port in the examples; the test substitutes its own.
const FOLDER: &str = "/srv/nacre";
const PORT: &str = "4420";
/// Keys for authentication, which the examples add from files in `FOLDER`.
const KEYS: [(&str, &str); 2] = [
    (
        "host1.key",
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
    ),
    (
        "host1b.key",
        "DHHC-1:00:QEFCQ0RFRkdISUpLTE1OT1BRUlNUVVZXWFlaW1xdXl9YjiZe:",
    ),
];
/// A firmware image of the simulated drive.
const FIRMWARE: &[u8] = b"SIMFIRMW2.1     ";

/// Fields that differ per run or machine: only their type is compared.
const VARIES: &[&str] = &[
    "bytes_allocated",
    "busy",
    "cntlid",
    "created_ms",
    "connects",
    "cpumask",
    "dirty_regions",
    "duration_ms",
    "elapsed",
    "epoch",
    "fingerprint",
    "gids",
    "hostid",
    "id",
    "free_bytes",
    "idle",
    "in_interrupt",
    "last_resync",
    "lcore",
    "made",
    "pid",
    "queues",
    "reactor",
    "read_latency_us",
    "replayed_records",
    "resync",
    "revision",
    "seconds",
    "setup_code",
    "store_key",
    "sys",
    "thread",
    "tick_rate",
    "ticks",
    "tid",
    "time",
    "tsc_rate",
    "uid",
    "unsettled_records",
    "until",
    "usr",
    "uuid",
    "verify",
    "write_latency_us",
];

struct Session {
    daemon: TestDaemon,
    /// `None`: the machine has no etcd.
    cluster: Option<ClusterSession>,
    /// Values that differ in each run: the text that the examples show, and the value of this run.
    shown: RefCell<Vec<(String, String)>>,
    _dir: tempfile::TempDir,
}

impl Session {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.web.listen = vec!["https://127.0.0.1:0".into()];
        let state = dir.path().join("state");
        let mut daemon = TestDaemon::waiting_on(settings, Store::open(&state).unwrap());
        let engine = Rc::get_mut(&mut daemon.engine).expect("not shared yet");
        let file = AuditFile::new(dir.path().join("audit.log"), 1 << 20, 2);
        engine.calls.audit = AuditLog::to_file(file);
        let chassis = Arc::new(Chassis::default());
        engine.drives = Drives::on(Arc::clone(&chassis) as Arc<dyn Bus>);
        let (simulated, running) = drive(PLACE, "S4EWNX0M123456");
        simulated.reconfigure(|config| config.limits.firmware_updates = Some(0));
        chassis.put(PLACE, &simulated);
        // Keep the drive running until the test ends.
        std::mem::forget(running);
        let address = "192.0.2.10".parse().unwrap();
        daemon
            .fabric
            .add_device(attributes("sim0"), &[address])
            .unwrap();
        daemon
            .run(crate::services::web::start(&daemon.engine, Some(&state)))
            .expect("the page starts");
        make_files(dir.path());
        let port = local_port().to_string();
        let page = daemon.engine.calls.page.listen().remove(0);
        let folder = dir.path().to_str().unwrap().to_owned();
        let mut shown = vec![
            (FOLDER.to_owned(), folder),
            ("https://127.0.0.1:8443".to_owned(), page),
            (PORT.to_owned(), port),
        ];
        let cluster = ClusterSession::start("every_example_gets_its_reply");
        if let Some(cluster) = &cluster {
            let etcd = "http://127.0.0.1:2379".to_owned();
            shown.push((etcd, cluster.endpoint.clone()));
            shown.push((PORT.to_owned(), cluster.port.clone()));
        }
        Self {
            daemon,
            cluster,
            shown: RefCell::new(shown),
            _dir: dir,
        }
    }

    /// Makes the call of an example as a client of the socket. In the reply, values of this run are
    /// replaced by those of the example.
    fn call(&self, example: &Example) -> (Value, Value) {
        let daemon = match (example.cluster, &self.cluster) {
            (true, Some(cluster)) => cluster.before(&example.call),
            _ => &self.daemon,
        };
        let mut params = example.params.to_string();
        for (shown, value) in self.shown.borrow().iter() {
            params = params.replace(shown, value);
        }
        let params = serde_json::from_str(&params).unwrap();
        let (answer, error) = match call_as_client(daemon, &example.call, &params) {
            Ok(answer) => (answer, Value::Null),
            Err(e) => (Value::Null, json!({ "code": e.code, "message": e.message })),
        };
        for (pointer, shown) in &example.bind {
            if let Some(value) = answer.pointer(pointer).and_then(Value::as_str) {
                let mut all = self.shown.borrow_mut();
                all.retain(|(text, _)| text != shown);
                all.push((shown.clone(), value.to_owned()));
            }
        }
        let restore = |value: Value| {
            let mut text = value.to_string();
            for (shown, value) in self.shown.borrow().iter() {
                text = text.replace(value, shown);
            }
            serde_json::from_str(&text).unwrap()
        };
        (restore(answer), restore(error))
    }

    /// The configuration of the daemon that serves the example, if it is running.
    fn configuration(&self, example: &Example) -> Option<Value> {
        let is_running = self.daemon.engine.lifecycle.phase() == Phase::Runtime;
        (is_running && !example.cluster).then(|| self.daemon.call("config_export", Value::Null))
    }

    /// Repeats the call until its reply has `wanted` at `pointer`; on timeout returns the last
    /// reply.
    fn wait(&self, example: &Example, pointer: &str, wanted: &Value) -> Result<(), Value> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let (answer, error) = self.call(example);
            if answer.pointer(pointer) == Some(wanted) {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(json!([answer, error]));
            }
            self.daemon
                .run(async { tokio::time::sleep(Duration::from_millis(10)).await });
        }
    }
}

/// Writes the files that examples name.
fn make_files(folder: &Path) {
    for (name, text) in KEYS {
        let file = rustix::fs::open(
            folder.join(name),
            rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        );
        let mut file = std::fs::File::from(file.unwrap());
        file.write_all(text.as_bytes()).unwrap();
    }
    let mut image = FIRMWARE.to_vec();
    image.resize(8192, 0);
    std::fs::write(folder.join("fw-2.1.bin"), image).unwrap();
}

/// A call by a client of the socket: the daemon checks its role, and writes the audit log.
fn call_as_client(daemon: &TestDaemon, method: &str, params: &Value) -> Result<Value, RpcError> {
    let caller = Rc::new(Caller {
        identity: Identity::Local(Credentials {
            pid: Some(4242),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: Vec::new(),
        }),
        program: "nacre".into(),
    });
    let raw = serde_json::value::to_raw_value(params).expect("plain data");
    let raw = (!params.is_null()).then_some(&*raw);
    let answer = daemon.run(daemon.engine.call_for(&caller, method, raw))?;
    Ok(serde_json::from_str(answer.get()).expect("an answer is JSON"))
}

/// True if `actual` matches the reply of an example.
fn is_like(expected: &Value, actual: &Value, varies: bool) -> bool {
    match (expected, actual) {
        (Value::String(e), _) if e == REST => true,
        (Value::String(e), Value::String(a)) if e.ends_with(REST) => {
            varies || a.starts_with(e.trim_end_matches(REST))
        }
        (Value::Array(e), Value::Array(a)) => {
            let (shown, more) = match e.split_last() {
                Some((last, shown)) if last == REST => (shown, true),
                _ => (e.as_slice(), varies),
            };
            (more || shown.len() == a.len())
                && (varies || shown.len() <= a.len())
                && shown.iter().zip(a).all(|(e, a)| is_like(e, a, varies))
        }
        (Value::Object(e), Value::Object(a)) => {
            let shown = e.iter().filter(|(key, _)| *key != REST);
            let more = e.contains_key(REST);
            (more || varies || e.len() == a.len())
                && shown.into_iter().all(|(key, e)| match a.get(key) {
                    Some(a) => is_like(e, a, varies || VARIES.contains(&key.as_str())),
                    None => varies,
                })
        }
        (Value::Null, _) | (_, Value::Null) if varies => true,
        _ if varies => std::mem::discriminant(expected) == std::mem::discriminant(actual),
        _ => expected == actual,
    }
}

/// A reply short enough to read.
fn shortened(answer: &Value, depth: usize) -> Value {
    match answer {
        Value::Array(items) => {
            let plain = items.iter().all(|i| !i.is_object() && !i.is_array());
            let most = if plain { 6 } else { 1 };
            let mut short: Vec<Value> = items
                .iter()
                .take(most)
                .map(|i| shortened(i, depth + 1))
                .collect();
            if items.len() > most {
                short.push(REST.into());
            }
            short.into()
        }
        Value::Object(fields) => {
            let most = if depth == 0 { 40 } else { 24 };
            let mut short: Map<String, Value> = fields
                .iter()
                .take(most)
                .map(|(key, value)| (key.clone(), shortened(value, depth + 1)))
                .collect();
            if fields.len() > most {
                short.insert(REST.into(), REST.into());
            }
            short.into()
        }
        Value::String(text) if text.chars().count() > 200 => {
            let start: String = text.chars().take(160).collect();
            format!("{start}{REST}").into()
        }
        other => other.clone(),
    }
}

fn written(example: &Example) -> Value {
    let mut out = Map::new();
    out.insert("call".into(), json!(example.call));
    let mut set = |key: &str, value: Value| {
        if value != Value::Null && value != json!(false) {
            out.insert(key.into(), value);
        }
    };
    set("params", example.params.clone());
    set("error", example.error.clone());
    set("varies", json!(example.varies));
    set("hidden", json!(example.hidden));
    set("cluster", json!(example.cluster));
    if !example.bind.is_empty() {
        set("bind", json!(example.bind));
    }
    set("until", json!(example.until));
    if example.error.is_null() && !example.hidden && example.until.is_none() {
        out.insert("answer".into(), example.answer.clone());
    }
    out.into()
}

#[test]
fn every_method_has_an_example() {
    let examples = all();
    let registry = crate::methods::all();
    let missing: Vec<&str> = registry
        .iter()
        .map(|entry| entry.name)
        .filter(|name| of(&examples, name).is_none())
        .collect();
    assert!(missing.is_empty(), "add to examples.json: {missing:?}");
    let unknown: Vec<&Example> = examples
        .iter()
        .filter(|e| registry.find(&e.call).is_none())
        .collect();
    assert!(unknown.is_empty(), "no such methods: {unknown:?}");
}

#[test]
fn every_example_gets_its_reply() {
    let session = Session::new();
    let registry = crate::methods::all();
    let write = std::env::var_os("NACRE_WRITE_EXAMPLES").is_some();
    let mut wrong = Vec::new();
    // Read at run time, so that a changed call needs no new build.
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/methods/examples/examples.json"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let mut examples: Vec<Example> = serde_json::from_str(&text).unwrap();
    for example in &mut examples {
        if example.cluster && session.cluster.is_none() {
            continue;
        }
        if let Some((pointer, wanted)) = &example.until {
            if let Err(last) = session.wait(example, pointer, wanted) {
                wrong.push(format!(
                    "{}: no {wanted} at {pointer}: {last}",
                    example.call
                ));
            }
            continue;
        }
        let before = session.configuration(example);
        let (answer, error) = session.call(example);
        let changes = registry.find(&example.call).map(|entry| entry.changes);
        if changes == Some(Changes::Nothing) && before != session.configuration(example) {
            wrong.push(format!(
                "{} says that it changes nothing, and changes the configuration",
                example.call
            ));
        }
        let same = if example.hidden {
            error.is_null()
        } else {
            let has_reply = !example.answer.is_null() || !example.error.is_null();
            has_reply
                && is_like(&example.answer, &answer, example.varies)
                && is_like(&example.error, &error, false)
        };
        if same {
            continue;
        }
        wrong.push(format!(
            "{} {}: {answer} {error}",
            example.call, example.params
        ));
        if !example.hidden {
            (example.answer, example.error) = (shortened(&answer, 0), error);
        }
    }
    if write {
        let lines: Vec<String> = examples.iter().map(|e| written(e).to_string()).collect();
        let text = format!("[\n{}\n]\n", lines.join(",\n"));
        std::fs::write(path, text).unwrap();
        println!("{}", wrong.join("\n"));
        return;
    }
    assert!(
        wrong.is_empty(),
        "examples.json is out of date; write it again with NACRE_WRITE_EXAMPLES=1 and check the difference:\n{}",
        wrong.join("\n")
    );
}

/// Goal: the comparison finds a changed value, and a missing and a new field; it accepts values
/// that vary.
#[test]
fn differences_are_found() {
    let expected = json!({ "name": "a", "list": [1, REST], "time": 5 });
    let like = |actual| is_like(&expected, &actual, false);
    assert!(like(json!({ "name": "a", "list": [1, 2, 3], "time": 6 })));
    assert!(!like(json!({ "name": "b", "list": [1], "time": 5 })));
    assert!(!like(json!({ "name": "a", "list": [2], "time": 5 })));
    assert!(!like(json!({ "name": "a", "list": [1], "time": "5" })));
    assert!(!like(
        json!({ "name": "a", "list": [1], "time": 5, "more": 1 })
    ));
    assert!(!like(json!({ "name": "a", "time": 5 })));
}
