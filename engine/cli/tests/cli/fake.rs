//! A scripted daemon: a thread that answers JSON-RPC on its own socket, and records the calls.

use std::io::{BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use assert_cmd::Command;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The answer to a method with its parameters: a result or an error.
type Script = dyn Fn(&str, &Value) -> Result<Value, Value> + Send + Sync;

pub(crate) struct Fake {
    directory: tempfile::TempDir,
    calls: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Fake {
    pub(crate) fn play(
        script: impl Fn(&str, &Value) -> Result<Value, Value> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("rpc.sock")).unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (script, heard): (Arc<Script>, _) = (Arc::new(script), Arc::clone(&calls));
        // Runs until the test's process ends.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (script, heard) = (Arc::clone(&script), Arc::clone(&heard));
                std::thread::spawn(move || serve(stream, &*script, &heard));
            }
        });
        Self { directory, calls }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("rpc.sock")
    }

    /// Runs `nacre` with `words`, as a client of this daemon.
    pub(crate) fn nacre(&self, words: &str) -> Outcome {
        nacre(words, &self.socket())
    }

    /// The calls since the last use of this function.
    pub(crate) fn asked(&self) -> Vec<(String, Value)> {
        std::mem::take(&mut *self.calls.lock())
    }
}

fn serve(stream: UnixStream, script: &Script, heard: &Mutex<Vec<(String, Value)>>) {
    let mut writer = stream.try_clone().unwrap();
    let requests =
        serde_json::Deserializer::from_reader(BufReader::new(stream)).into_iter::<Value>();
    for request in requests.map_while(Result::ok) {
        let method = request["method"].as_str().unwrap().to_owned();
        let params = request.get("params").cloned().unwrap_or_default();
        heard.lock().push((method.clone(), params.clone()));
        let mut answer = json!({ "jsonrpc": "2.0", "id": request["id"] });
        match script(&method, &params) {
            Ok(result) => answer["result"] = result,
            Err(error) => answer["error"] = error,
        }
        if writeln!(writer, "{answer}").is_err() {
            return;
        }
    }
}

/// Exit code and output of a run of the program.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Outcome {
    /// # Panics
    /// When the program failed.
    #[track_caller]
    pub(crate) fn printed(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self.out
    }

    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.printed()).unwrap()
    }

    /// The one line that it failed with.
    #[track_caller]
    pub(crate) fn failed(self, code: i32) -> String {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        self.err.trim_end().to_owned()
    }
}

/// Runs `nacre` with `words` on whatever answers at `socket`.
pub(crate) fn nacre(words: &str, socket: &std::path::Path) -> Outcome {
    let output = Command::new(env!("CARGO_BIN_EXE_nacre"))
        .args(words.split_whitespace())
        // Nothing of this machine's or user's configuration counts.
        .env_clear()
        .env("HOME", "/nonexistent")
        .env("NACRE_RPC_SOCKET", socket)
        .output()
        .unwrap();
    Outcome {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The cells of a printed table, without its header.
pub(crate) fn cells(table: &str) -> Vec<Vec<&str>> {
    table
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect()
}

/// As SPDK refuses a name that it does not know.
pub(crate) fn no_such_device() -> Value {
    json!({ "code": -19, "message": "No such device" })
}
