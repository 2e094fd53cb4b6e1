//! SPDK's configuration files, which `serve -c` executes at start.
//!
//! A file is an ordered list of calls. If state is stored, a start restores the stored objects
//! before it executes the file. Calls that would create a restored object are then skipped, so the
//! object keeps its stored configuration.
//!
//! Parameters may contain secrets, so they are not logged, and keys in error texts are replaced.

use std::path::Path;
use std::rc::Rc;

use anyhow::Context;
use serde_json::Value;
use tracing::{info, warn};

use crate::audit::redact;
use crate::bdev_modules;
use crate::daemon::ServeOptions;
use crate::journal::JournalEntry;
use crate::rpc::secret::{SecretJson, SecretValue};
use crate::services::Engine;
use crate::services::keyring;
use crate::store::Record;

/// SPDK's subsystems that this daemon implements: an unknown method of theirs is an error. Entries
/// of other subsystems (iscsi, nbd, vhost, fsdev, …) are skipped.
const SUBSYSTEMS: [&str; 6] = ["scheduler", "sock", "iobuf", "accel", "bdev", "nvmf"];

/// Methods that set options of modules that do not exist here. SPDK saves them even without
/// devices.
const IDLE_OPTIONS: [&str; 2] = ["bdev_iscsi_set_options", "bdev_virtio_blk_set_hotplug"];

/// One entry of a configuration file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileCall {
    pub subsystem: String,
    pub method: String,
    pub params: SecretValue,
}

/// Parses a JSON configuration, with comments as SPDK allows them. The result is `None` if the text
/// is not JSON. Then the file is not named `.json`, and the text begins with neither a brace nor a
/// slash (a TOML file does not).
pub fn read(path: &Path, text: &str) -> Option<serde_json::Result<Value>> {
    let named = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("json"));
    let json = named || text.trim_start().starts_with(['{', '/']);
    json.then(|| serde_json::from_str(&without_comments(text)))
}

/// The text with blanks in place of comments, so that errors name the right line and column.
fn without_comments(text: &str) -> String {
    #[derive(PartialEq)]
    enum In {
        Json,
        String,
        Line,
        Block,
    }
    let mut within = In::Json;
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let next = chars.peek().copied();
        let (is, comment, pair) = match (&within, c, next) {
            (In::Json, '/', Some('/')) => (In::Line, true, true),
            (In::Json, '/', Some('*')) => (In::Block, true, true),
            (In::Json, '"', _) => (In::String, false, false),
            (In::String, '\\', Some(_)) => (In::String, false, true),
            (In::String, '"', _) => (In::Json, false, false),
            (In::Line, '\n', _) => (In::Json, false, false),
            (In::Block, '*', Some('/')) => (In::Json, true, true),
            (In::Line | In::Block, ..) => (within, true, false),
            (In::Json | In::String, ..) => (within, false, false),
        };
        within = is;
        for c in std::iter::once(c).chain(chars.next_if(|_| pair)) {
            plain.push(if comment && c != '\n' { ' ' } else { c });
        }
    }
    // The parser refuses an unterminated block comment.
    if within == In::Block {
        plain.push('/');
    }
    plain
}

/// The calls of an SPDK configuration file, in order, with batches flattened.
pub fn calls(config: &Value) -> anyhow::Result<Vec<FileCall>> {
    anyhow::ensure!(config.is_object(), "the file is not an object in braces");
    let subsystems = match config.get("subsystems") {
        Some(Value::Array(subsystems)) => subsystems.as_slice(),
        Some(_) => anyhow::bail!("\"subsystems\" is not an array"),
        None => {
            warn!("the configuration has no \"subsystems\": nothing is configured");
            &[]
        }
    };
    let mut calls = Vec::new();
    for subsystem in subsystems {
        let name = subsystem.get("subsystem").and_then(Value::as_str);
        let name = name.context("an entry of \"subsystems\" without its name (\"subsystem\")")?;
        let elements = subsystem
            .get("config")
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        for element in elements {
            for call in element
                .as_array()
                .map_or_else(|| std::slice::from_ref(element), Vec::as_slice)
            {
                let method = call
                    .get("method")
                    .and_then(Value::as_str)
                    .with_context(|| {
                        format!("subsystem \"{name}\": an entry without a \"method\"")
                    })?;
                calls.push(FileCall {
                    subsystem: name.to_owned(),
                    method: method.to_owned(),
                    params: SecretValue(call.get("params").cloned().unwrap_or(Value::Null)),
                });
            }
        }
    }
    Ok(calls)
}

/// Executes the calls. Skips those that would create one of the `restored` objects.
pub async fn carry_out(
    engine: &Rc<Engine>,
    calls: Vec<FileCall>,
    options: &ServeOptions,
    restored: &[JournalEntry],
) -> anyhow::Result<()> {
    for FileCall {
        subsystem,
        method,
        params,
    } in calls
    {
        let here = SUBSYSTEMS.contains(&subsystem.as_str());
        let idle = IDLE_OPTIONS.contains(&method.as_str());
        if (!here || idle) && engine.registry.find(&method).is_none() {
            info!(
                subsystem,
                method, "entry skipped: there is no such subsystem or module here"
            );
            continue;
        }
        if stands(engine, restored, &method, &params.0) {
            info!(
                method,
                "entry skipped: its object is in the state already, and stays as it is there"
            );
            continue;
        }
        let raw = match &params.0 {
            Value::Null => None,
            Value::Object(map) if map.is_empty() => None,
            params => Some(SecretJson::from(serde_json::value::to_raw_value(params)?)),
        };
        let outcome = engine.call(&method, raw.as_deref()).await;
        if let Err(refused) = outcome.map(SecretJson::from) {
            let refused = redact::text(&refused.to_string());
            let path = options
                .json_config
                .as_ref()
                .map(|(p, _)| p.display().to_string())
                .unwrap_or_default();
            if !options.ignore_json_errors {
                anyhow::bail!(
                    "{path}: {method}: {refused}; --json-ignore-init-errors carries on regardless"
                );
            }
            warn!(method, refused, "{path}: entry skipped");
        }
    }
    Ok(())
}

/// True if one of the `restored` objects is the one that the call would create.
fn stands(engine: &Engine, restored: &[JournalEntry], method: &str, params: &Value) -> bool {
    let text = |at: &str| params.pointer(at).and_then(Value::as_str);
    let same = |record: &Record, at: &[&str]| {
        record.method == method
            && at.iter().all(|at| {
                match (params.pointer(at), record.params.pointer(at)) {
                    // Transports and address families are case-insensitive.
                    (Some(Value::String(asked)), Some(Value::String(is))) => {
                        asked.eq_ignore_ascii_case(is)
                    }
                    (asked, is) => asked == is,
                }
            })
    };
    let any = |at: &[&str]| restored.iter().any(|entry| same(&entry.record, at));
    let waits = |name: &str| {
        let key = crate::services::deferred::key(name);
        restored.iter().any(|entry| entry.record.key == key)
    };
    let device = |name: String| {
        let key = format!("bdev/{name}");
        waits(&name) || restored.iter().any(|entry| entry.record.key == key)
    };
    let address = |at: &'static str| ["trtype", "traddr", "trsvcid"].map(|f| format!("/{at}/{f}"));
    let any_at = |at: &'static str, other: &str| {
        let address = address(at);
        let mut all: Vec<&str> = address.iter().map(String::as_str).collect();
        all.push(other);
        any(&all)
    };
    match method {
        "bdev_nvme_attach_controller" | "bdev_nvme_start_discovery" => any(&["/name"]),
        "bdev_raid_create" | "volume_create" => {
            text("/name").is_some_and(|name| engine.volumes.find(name).is_ok() || waits(name))
        }
        _ if bdev_modules::by_create(method).is_some() => bdev_modules::names(method, params)
            .into_iter()
            .next()
            .is_some_and(device),
        // A key may have moved from its file to the state since.
        "keyring_file_add_key" | "key_import" | "key_generate" => {
            text("/name").is_some_and(|name| {
                let key = format!("{}{name}", keyring::PREFIX);
                restored.iter().any(|entry| entry.record.key == key)
            })
        }
        "alert_set_webhook" | "alert_set_mail" => text("/name").is_some_and(|name| {
            let key = format!("{}{name}", crate::services::alerts::PREFIX);
            restored.iter().any(|entry| entry.record.key == key)
        }),
        "nvmf_create_transport" => any(&["/trtype"]),
        "nvmf_create_subsystem" => any(&["/nqn"]),
        "nvmf_subsystem_add_host" => any(&["/nqn", "/host"]),
        "nvmf_ns_add_host" => any(&["/nqn", "/nsid", "/host"]),
        "nvmf_subsystem_add_ns" => match params.pointer("/namespace/nsid") {
            Some(nsid) if nsid.as_u64() != Some(0) => any(&["/nqn", "/namespace/nsid"]),
            _ => any(&["/nqn", "/namespace/bdev_name"]),
        },
        "nvmf_subsystem_add_listener" => any_at("listen_address", "/nqn"),
        "nvmf_discovery_add_referral" => any_at("address", "/subnqn"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    //! Goal: everything that SPDK parses is parsed. Method: texts with the extensions that its
    //! parser accepts.

    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::config::{Personality, Settings, load_text};
    use crate::daemon::reload;
    use crate::methods::testing::TestDaemon;
    use crate::store::Store;

    fn parsed(name: &str, text: &str) -> Option<Value> {
        read(Path::new(name), text).map(|read| read.unwrap_or_else(|e| panic!("{text}: {e}")))
    }

    #[test]
    fn comments_are_blanks() {
        let plain = serde_json::json!({ "a": "/* no // comment \\\" */", "b": [1, 2] });
        for text in [
            r#"{"a":"/* no // comment \\\" */","b":[1,2]}"#,
            r#"/* first */ {"a":"/* no // comment \\\" */",/**/"b":[1,/* two: * / */2]} // end"#,
            "// a line\n{\"a\":\"/* no // comment \\\\\\\" */\",\n// another \"\n\"b\":[1,2]}\n// last",
        ] {
            assert_eq!(parsed("c", text), Some(plain.clone()), "{text}");
        }
        // Neither a division nor an unterminated comment is a comment.
        for text in ["{\"a\": 1 / 2}", "{} /* open", "{} /", "/"] {
            assert!(read(Path::new("c"), text).unwrap().is_err(), "{text}");
        }
        let error = read(Path::new("c"), "// é\n{ /* x */ \"a\": }")
            .unwrap()
            .unwrap_err();
        assert_eq!((error.line(), error.column()), (2, 16));
    }

    #[test]
    fn a_json_file_name_selects_json() {
        assert_eq!(read(Path::new("c.toml"), "[log]\n").map(|_| ()), None);
        assert_eq!(read(Path::new("c"), "# text\n[log]\n").map(|_| ()), None);
        assert!(read(Path::new("c.json"), "[log]\n").unwrap().is_err());
        assert!(read(Path::new("C.JSON"), "# text").unwrap().is_err());
    }

    #[test]
    fn calls_keep_their_order_and_subsystem() {
        let config = serde_json::json!({ "subsystems": [
            { "subsystem": "vmd", "config": null },
            { "subsystem": "bdev", "config": [{ "method": "a" }, [{ "method": "b", "params": { "x": 1 } }]] },
        ], "other": 1 });
        let call = |method: &str, params| FileCall {
            subsystem: "bdev".into(),
            method: method.into(),
            params: SecretValue(params),
        };
        let expected = vec![
            call("a", Value::Null),
            call("b", serde_json::json!({ "x": 1 })),
        ];
        assert_eq!(calls(&config).unwrap(), expected);
        assert_eq!(calls(&serde_json::json!({})).unwrap(), vec![]);
        for wrong in [
            serde_json::json!([]),
            serde_json::json!({ "subsystems": {} }),
            serde_json::json!({ "subsystems": [{ "config": [] }] }),
            serde_json::json!({ "subsystems": [{ "subsystem": "bdev", "config": [{}] }] }),
        ] {
            assert!(calls(&wrong).is_err(), "{wrong}");
        }
    }

    /// Goal: a key of the file is made once, whatever has become of it, and no log line has a
    /// secret. Method: the calls of a file at two starts on one state, some of them refused.
    #[test]
    fn keys_are_made_once_and_not_logged() {
        const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let folder = tempfile::tempdir().unwrap();
        let (state, file) = (folder.path().join("state"), folder.path().join("c"));
        std::fs::write(&file, TEXT).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        let call = |method, params| serde_json::json!({ "method": method, "params": params });
        let config = serde_json::json!({ "subsystems": [{ "subsystem": "keyring", "config": [
            call("key_import", serde_json::json!({ "name": "a", "text": TEXT })),
            call("key_generate", serde_json::json!({ "name": "b", "kind": "tls", "reveal": true })),
            call("keyring_file_add_key", serde_json::json!({ "name": "c", "path": file })),
            // A key where another word belongs.
            call("key_generate", serde_json::json!({ "name": "d", "kind": TEXT })),
            call("keyring_file_remove_key", serde_json::json!({ "name": TEXT })),
            call("alert_set_webhook", serde_json::json!({ "name": "e", "url": "http://127.0.0.1:1/" })),
            call("alert_set_mail", serde_json::json!({ "name": "f", "server": "127.0.0.1:1", "tls": "off", "from": "a@example.org", "to": ["b@example.org"] })),
        ]}]});
        let calls = calls(&config).unwrap();
        let loaded = || load_text(None, [], &[]).map_err(anyhow::Error::from);
        let options = |ignore_json_errors| ServeOptions {
            personality: Personality::Nacre,
            loaded: loaded().unwrap(),
            source: reload::Source::new(loaded),
            json_config: Some(("/etc/c.json".into(), Value::Null)),
            ignore_json_errors,
            wait_for_rpc: false,
            pid_file: None,
        };
        let log = Log::default();
        let start = |options: &ServeOptions| {
            let (log, calls) = (log.clone(), calls.clone());
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::TRACE)
                .with_writer(move || log.clone());
            tracing::subscriber::with_default(subscriber.finish(), || {
                let store = Some(Store::open(&state).unwrap());
                let daemon = TestDaemon::with(Settings::default(), store);
                let restored = daemon.engine.journal.select(|entry| entry.durable);
                let outcome = daemon.run(carry_out(&daemon.engine, calls, options, &restored));
                let keys = daemon.call("key_list", Value::Null);
                let prints = keys.as_array().unwrap().iter();
                let prints = prints.map(|key| key["fingerprint"].clone());
                let prints: Vec<Value> = prints.collect();
                if keys[2]["source"] == "file" {
                    daemon.call("key_seal", serde_json::json!({ "name": "c" }));
                }
                (outcome, prints)
            })
        };
        let (first, keys) = start(&options(true));
        first.unwrap();
        assert_eq!(keys.len(), 3);
        assert_eq!(start(&options(true)).1, keys);
        let (refused, _) = start(&options(false));
        let refused = format!("{:#}", refused.unwrap_err());
        let log = String::from_utf8(log.0.lock().clone()).unwrap();
        assert_eq!(log.matches("stays as it is there").count(), 8, "{log}");
        assert!(refused.contains("key_generate: "), "{refused}");
        assert!(log.contains("/etc/c.json: entry skipped"), "{log}");
        for text in [log, refused, format!("{calls:?}")] {
            assert!(!text.contains("AAECAwQF"), "{text}");
        }
    }

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
}
