//! Goal: every method has an example, and every example is a call that works. Method: one daemon
//! with simulated drives and RDMA devices serves the calls of `examples.json` in order.

use std::net::TcpListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::sim::attributes;
use serde_json::{Map, Value, json};

use super::{Example, REST, all, of};
use crate::methods::bdev::nvme::tests::drive::{Chassis, PLACE, drive};
use crate::methods::testing::TestDaemon;
use crate::services::drives::{Bus, Drives};

/// Folder and port in the examples; the test substitutes its own.
const FOLDER: &str = "/srv/nacre";
const PORT: &str = "4420";

/// Fields that differ per run or machine: only their type is compared.
const VARIES: &[&str] = &[
    "bytes_allocated",
    "busy",
    "cntlid",
    "connects",
    "cpumask",
    "dirty_regions",
    "elapsed",
    "epoch",
    "hostid",
    "id",
    "free_bytes",
    "idle",
    "in_interrupt",
    "last_resync",
    "lcore",
    "pid",
    "queues",
    "reactor",
    "read_latency_us",
    "replayed_records",
    "resync",
    "revision",
    "seconds",
    "sys",
    "thread",
    "tick_rate",
    "ticks",
    "tid",
    "time",
    "tsc_rate",
    "unsettled_records",
    "usr",
    "uuid",
    "verify",
    "write_latency_us",
];

struct Session {
    daemon: TestDaemon,
    dir: tempfile::TempDir,
    port: String,
}

impl Session {
    fn new() -> Self {
        let mut daemon = TestDaemon::waiting();
        let engine = Rc::get_mut(&mut daemon.engine).expect("not shared yet");
        let chassis = Arc::new(Chassis::default());
        engine.drives = Drives::on(Arc::clone(&chassis) as Arc<dyn Bus>);
        let (simulated, running) = drive(PLACE, "S4EWNX0M123456");
        chassis.put(PLACE, &simulated);
        // Keep the drive running until the test ends.
        std::mem::forget(running);
        let address = "192.0.2.10".parse().unwrap();
        daemon
            .fabric
            .add_device(attributes("sim0"), &[address])
            .unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        Self {
            daemon,
            dir: tempfile::tempdir().unwrap(),
            port: free.local_addr().unwrap().port().to_string(),
        }
    }

    /// Makes the call of an example. In the reply, the test's folder and port are replaced by the
    /// example's.
    fn call(&self, example: &Example) -> (Value, Value) {
        let folder = self.dir.path().to_str().unwrap();
        let params = example.params.to_string();
        let params = params.replace(FOLDER, folder).replace(PORT, &self.port);
        let params = serde_json::from_str(&params).unwrap();
        let (answer, error) = match self.daemon.try_call(&example.call, params) {
            Ok(answer) => (answer, Value::Null),
            Err(e) => (Value::Null, json!({ "code": e.code, "message": e.message })),
        };
        let restore = |value: Value| {
            let text = value.to_string();
            let text = text.replace(folder, FOLDER).replace(&self.port, PORT);
            serde_json::from_str(&text).unwrap()
        };
        (restore(answer), restore(error))
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
    set("not_run", json!(example.not_run));
    set("until", json!(example.until));
    if example.error.is_null()
        && example.not_run.is_none()
        && !example.hidden
        && example.until.is_none()
    {
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
        if let Some(why) = &example.not_run {
            eprintln!("SKIPPED: example of {}: {why}", example.call);
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
        let (answer, error) = session.call(example);
        let same = if example.hidden {
            error.is_null()
        } else {
            is_like(&example.answer, &answer, example.varies)
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
