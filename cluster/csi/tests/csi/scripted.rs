//! A daemon that answers as a test says: late, wrongly, or not at all.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nacre_cluster_csi::{Controller, Daemon, Driver, Identity};
use nacre_engine_rpc::client::Client;
use serde_json::{Value, json};

use crate::client::Served;

/// What happens to one call.
pub(crate) enum Reply {
    Result(Value),
    /// An error with this code.
    Refuse(i32),
    /// Text that is no JSON-RPC.
    Garbage,
    /// The connection ends in the middle of the answer.
    Cut,
    Silence,
    Late(Duration, Value),
}

pub(crate) struct Scripted {
    pub driver: Served,
    pub calls: Arc<AtomicUsize>,
    /// The daemon's socket.
    pub daemon: PathBuf,
    _dir: tempfile::TempDir,
}

type Script = dyn Fn(&str, &Value) -> Reply + Send + Sync;

/// The driver with this daemon, whose answers it waits for 500 ms.
pub(crate) fn start(script: impl Fn(&str, &Value) -> Reply + Send + Sync + 'static) -> Scripted {
    let dir = tempfile::tempdir().expect("a directory");
    let socket: PathBuf = dir.path().join("nacre.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let script: Arc<Script> = Arc::new(script);
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (script, counter) = (Arc::clone(&script), Arc::clone(&counter));
            std::thread::spawn(move || answer(stream, &*script, &counter));
        }
    });
    let timeout = Duration::from_millis(500);
    let path = socket.clone();
    let daemon = Daemon::new(move || Client::connect(&socket, timeout));
    let driver = Driver {
        identity: Identity::new(|| Ok(true)),
        controller: Some(Controller::new(daemon)),
        node: None,
    };
    Scripted {
        driver: Served::start(driver),
        calls,
        daemon: path,
        _dir: dir,
    }
}

fn answer(mut stream: UnixStream, script: &Script, calls: &AtomicUsize) {
    let mut reader = BufReader::new(stream.try_clone().expect("a copy"));
    // The client sends one request without an end of line, and waits.
    let mut request = Vec::new();
    loop {
        let Ok(more) = reader.fill_buf() else { return };
        if more.is_empty() {
            return;
        }
        request.extend_from_slice(more);
        let length = more.len();
        reader.consume(length);
        let Ok(asked) = serde_json::from_slice::<Value>(&request) else {
            continue;
        };
        request.clear();
        calls.fetch_add(1, Ordering::Relaxed);
        let method = asked["method"].as_str().unwrap_or_default();
        let result = |value: Value| {
            let answer = json!({ "jsonrpc": "2.0", "id": asked["id"], "result": value });
            format!("{answer}\n")
        };
        let text = match script(method, &asked["params"]) {
            Reply::Result(value) => result(value),
            Reply::Refuse(code) => {
                let error =
                    json!({ "code": code, "message": "refused", "data": { "cause": "why" } });
                format!(
                    "{}\n",
                    json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error })
                )
            }
            Reply::Garbage => "neither\n".to_owned(),
            Reply::Cut => {
                let _ = stream.write_all(b"{\"jsonrpc\":");
                return;
            }
            Reply::Silence => {
                // Until the client leaves.
                let _ = stream.read(&mut [0]);
                return;
            }
            Reply::Late(time, value) => {
                std::thread::sleep(time);
                result(value)
            }
        };
        if stream.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}
