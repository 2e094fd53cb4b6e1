//! Goal: receivers get the events that they select, once, whatever happens to other receivers.
//! Method: webhooks on loopback whose answers the tests choose; no pause between attempts.

use std::collections::VecDeque;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

use super::*;
use crate::config::{Settings, load_text};
use crate::methods::testing::{TestDaemon, test_daemon};
use crate::metrics::Scrape;
use crate::services::calls::for_viewer;

const FAST: DeliveryPace = DeliveryPace {
    attempt: Duration::from_secs(10),
    first_pause: Duration::from_millis(1),
    longest_pause: Duration::from_millis(2),
};

fn settings(text: &str) -> Settings {
    load_text(Some(("/n.toml", text)), [], &[])
        .unwrap()
        .settings
}

/// A receiver that gathers for no time.
fn webhook(name: &str, port: u16, more: &str) -> String {
    format!(
        "[[alert.webhook]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}/\"\ngather_s = 0\n{more}\n"
    )
}

/// A webhook.
#[derive(Clone, Default)]
struct Server {
    /// Statuses of the next answers; 200 after them; 0: no answer ever.
    answers: Rc<RefCell<VecDeque<u16>>>,
    bodies: Rc<RefCell<Vec<Value>>>,
}

impl Server {
    async fn start(answers: &[u16]) -> (Self, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Self::default();
        server.answers.borrow_mut().extend(answers);
        let serving = server.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let server = serving.clone();
                tokio::task::spawn_local(async move {
                    let mut stream = BufReader::new(stream);
                    let (mut head, mut length) = (String::new(), 0);
                    while stream.read_line(&mut head).await.unwrap() > 2 {
                        let line = head.lines().last().unwrap();
                        if let Some(value) = line.strip_prefix("content-length: ") {
                            length = value.parse().unwrap();
                        }
                    }
                    let mut body = vec![0; length];
                    stream.read_exact(&mut body).await.unwrap();
                    let body = serde_json::from_slice(&body).unwrap();
                    server.bodies.borrow_mut().push(body);
                    let status = server.answers.borrow_mut().pop_front().unwrap_or(200);
                    if status == 0 {
                        std::future::pending::<()>().await;
                    }
                    let answer = format!("HTTP/1.1 {status} x\r\n\r\n");
                    let _ = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        (server, port)
    }

    /// Waits for this number of requests.
    async fn bodies(&self, count: usize) -> Vec<Value> {
        while self.bodies.borrow().len() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.bodies.borrow().clone()
    }
}

/// The subjects of the events in a message.
fn subjects(body: &Value) -> Vec<String> {
    let events = body["events"].as_array().unwrap();
    events
        .iter()
        .map(|e| e["ctx"].as_str().unwrap().to_owned())
        .collect()
}

fn declare(daemon: &TestDaemon, text: &str) {
    let alerts = &daemon.engine.alerts;
    alerts.set_pace(FAST);
    alerts.declare(&daemon.engine, &settings(text).alert);
}

/// Waits until the receiver's state is as wanted.
async fn until(
    daemon: &TestDaemon,
    name: &str,
    wanted: impl Fn(&DeliveryState) -> bool,
) -> DeliveryState {
    loop {
        let all = daemon.engine.alerts.receivers();
        let one = all.iter().find(|running| running.receiver.name() == name);
        let state = one.unwrap().state();
        if wanted(&state) {
            return state;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn receivers_get_what_they_select() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    daemon.run(async {
        let (some, some_port) = Server::start(&[]).await;
        let (all, all_port) = Server::start(&[]).await;
        // Before the receivers exist: they get these, too.
        notes.send("bdev_register", "info");
        notes.send("nvme_failed", "error");
        let choice = "categories = [\"device\"]\nexcept = [\"nvme_reset\"]";
        declare(
            &daemon,
            &[
                webhook("some", some_port, choice),
                webhook("all", all_port, "severity = \"info\""),
            ]
            .concat(),
        );
        let first = all.bodies(1).await;
        assert_eq!(subjects(&first[0]), ["info", "error"]);
        assert_eq!(first[0]["type"], "events");
        let text = first[0]["text"].as_str().unwrap();
        assert!(
            text.contains(": error: nvme failed: error (and 1 more)"),
            "{text}"
        );
        assert_eq!(subjects(&some.bodies(1).await[0]), ["error"]);
        notes.send("nvme_reset", "excepted");
        notes.send("replica_out", "other category");
        notes.send("nvme_timeout", "warning");
        assert_eq!(subjects(&some.bodies(2).await[1]), ["warning"]);
        let more = all.bodies(2).await;
        assert_eq!(subjects(&more[1])[0], "excepted");
        assert_ne!(more[0]["id"], more[1]["id"]);
        let state = until(&daemon, "some", |state| state.delivered == 2).await;
        assert_eq!((state.dropped, state.error), (0, None));
    });
}

/// Goal: a message is sent again with the same id until it is accepted; the others learn about the
/// outage once, and the receiver itself does not.
#[test]
fn failures_are_tried_again_and_reported_once() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    daemon.run(async {
        let (flaky, flaky_port) = Server::start(&[503; 6]).await;
        let (good, good_port) = Server::start(&[]).await;
        declare(
            &daemon,
            &[
                webhook("flaky", flaky_port, "severity = \"info\""),
                webhook(
                    "good",
                    good_port,
                    "severity = \"info\"\ncategories = [\"state\"]",
                ),
            ]
            .concat(),
        );
        notes.send("nvme_failed", "n");
        let bodies = flaky.bodies(7).await;
        assert!(bodies.iter().all(|body| *body == bodies[0]), "{bodies:#?}");
        let state = until(&daemon, "flaky", |state| state.delivered == 1).await;
        assert_eq!((state.dropped, state.error), (0, None));
        let mut reported = Vec::new();
        while reported.len() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let bodies = good.bodies.borrow();
            let events = bodies
                .iter()
                .flat_map(|body| body["events"].as_array().unwrap());
            reported = events
                .map(|e| (e["type"].clone(), e["ctx"].clone()))
                .collect();
        }
        let flaky_is = |kind: &str| (Value::from(kind), Value::from("flaky"));
        assert_eq!(
            reported,
            [flaky_is("alert_failed"), flaky_is("alert_recovered")]
        );
        notes.send("nvme_failed", "later");
        assert_eq!(subjects(&flaky.bodies(8).await[7]), ["later"]);
    });
}

/// Goal: a receiver that refuses or hangs delays no other, and its message is given up.
#[test]
fn a_failed_receiver_delays_no_other() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    daemon.run(async {
        let (_, refusing) = Server::start(&[404]).await;
        let (hanging, hanging_port) = Server::start(&[0]).await;
        let (good, good_port) = Server::start(&[]).await;
        let only = "categories = [\"device\"]";
        declare(
            &daemon,
            &[
                webhook("refusing", refusing, only),
                webhook("hanging", hanging_port, &format!("{only}\nretry_for_s = 0")),
                webhook("good", good_port, only),
            ]
            .concat(),
        );
        notes.send("nvme_failed", "first");
        let refused = until(&daemon, "refusing", |state| state.dropped == 1).await;
        assert!(refused.error.unwrap().contains("404"));
        good.bodies(1).await;
        hanging.bodies(1).await;
        notes.send("nvme_failed", "second");
        assert_eq!(subjects(&good.bodies(2).await[1]), ["second"]);
        let state = until(&daemon, "refusing", |state| state.delivered == 1).await;
        assert_eq!((state.error, state.failing_since), (None, None));
    });
}

/// Goal: a reload changes nothing for a receiver with the same settings. One with other settings
/// continues, and a new one gets the events from then on.
#[test]
fn receivers_continue_after_a_reload() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    daemon.run(async {
        let (same, same_port) = Server::start(&[0]).await;
        let (other, other_port) = Server::start(&[200, 0]).await;
        let (new, new_port) = Server::start(&[]).await;
        let same_text = webhook("same", same_port, "");
        declare(
            &daemon,
            &format!("{same_text}{}", webhook("other", other_port, "")),
        );
        notes.send("nvme_failed", "first");
        until(&daemon, "other", |state| state.delivered == 1).await;
        notes.send("nvme_failed", "second");
        other.bodies(2).await;
        same.bodies(1).await;
        // Not wanted after the change.
        notes.send("nvme_reset", "third");
        let before = daemon.engine.alerts.receivers();
        let changed = webhook("other", other_port, "except = [\"nvme_reset\"]");
        let added = webhook("new", new_port, "");
        declare(&daemon, &format!("{added}{changed}{same_text}"));
        let after = daemon.engine.alerts.receivers();
        assert!(Rc::ptr_eq(&before[0], &after[2]));
        notes.send("nvme_failed", "fourth");
        // The message that was not accepted comes again.
        let bodies = other.bodies(3).await;
        assert_eq!(subjects(&bodies[2]), ["second", "fourth"]);
        until(&daemon, "other", |state| state.delivered == 2).await;
        assert_eq!(subjects(&new.bodies(1).await[0]), ["fourth"]);
        assert_eq!(
            same.bodies.borrow().len(),
            1,
            "the first attempt still waits"
        );
        assert_eq!(after[2].pending(), 4);
    });
}

/// Goal: the next message has the number of events that were given up.
#[test]
fn lost_events_are_reported() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    daemon.run(async {
        let (server, port) = Server::start(&[404, 404]).await;
        declare(&daemon, &webhook("a", port, ""));
        notes.send("pool_lost", "a");
        notes.send("pool_lost", "b");
        notes.send("bdev_register", "not wanted");
        until(&daemon, "a", |state| state.dropped == 1).await;
        for (n, lost) in [2, 3, 0].into_iter().enumerate() {
            notes.send("pool_lost", "c");
            let bodies = server.bodies(n + 2).await;
            assert_eq!(bodies[n + 1]["lost"], lost);
            let sent = n as u64;
            until(&daemon, "a", |state| {
                state.dropped + state.delivered == sent + 2
            })
            .await;
        }
        let text = Scrape::of(&daemon.engine).await.text();
        for (metric, value) in [
            ("delivered_messages_total", 2),
            ("failed_attempts_total", 2),
            ("dropped_messages_total", 2),
            ("pending_events", 0),
        ] {
            let line = format!("nacre_alert_{metric}{{receiver=\"a\"}} {value}.0\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    });
}

/// Goal: whether an event is silenced is decided when it occurs.
#[test]
fn silences_count_when_events_occur() {
    let daemon = test_daemon();
    let notes = &daemon.engine.notes;
    let (server, port) = daemon.run(async {
        let (server, port) = Server::start(&[0]).await;
        daemon.engine.alerts.set_pace(FAST);
        declare(&daemon, &webhook("a", port, ""));
        notes.send("nvme_failed", "first");
        server.bodies(1).await;
        notes.send("nvme_failed", "before");
        (server, port)
    });
    let types = ["nvme_failed", "pool_lost", "nvme_failed"];
    let silence = json!({ "duration_s": 3600, "types": types });
    let silence = daemon.call("alert_silence", silence);
    assert_eq!(silence["types"], json!(["nvme_failed", "pool_lost"]));
    notes.send("nvme_failed", "silenced");
    assert_eq!(
        daemon.call("alert_list", json!(null))["receivers"][0]["pending"],
        2
    );
    daemon.call("alert_unsilence", json!({ "id": 1 }));
    daemon.run(async {
        notes.send("nvme_failed", "after");
        // A change of settings ends the attempt that hangs.
        declare(&daemon, &webhook("a", port, "severity = \"error\""));
        let bodies = server.bodies(2).await;
        assert_eq!(subjects(&bodies[1]), ["first", "before", "after"]);
    });
}

/// Goal: files of a disk that hangs occupy one helper thread of a receiver, whatever attempts and
/// tests follow.
#[test]
fn a_receiver_reads_its_files_once_at_a_time() {
    let daemon = test_daemon();
    daemon.run(async {
        let (_, port) = Server::start(&[]).await;
        declare(&daemon, &webhook("a", port, ""));
        let task = daemon.engine.alerts.receivers().remove(0);
        let hanging = Arc::clone(&task.permit).try_acquire_owned().unwrap();
        let short = DeliveryPace {
            attempt: Duration::from_millis(20),
            ..FAST
        };
        daemon.engine.alerts.set_pace(short);
        let failure = daemon
            .engine
            .alerts
            .test(&daemon.engine, &task)
            .await
            .unwrap_err();
        assert!(matches!(failure, Failure::Late(_)), "{failure}");
        // A receiver with other settings reads the same files.
        declare(&daemon, &webhook("a", port, "severity = \"error\""));
        let task = daemon.engine.alerts.receivers().remove(0);
        assert_eq!(task.permit.available_permits(), 0);
        drop(hanging);
        daemon
            .engine
            .alerts
            .test(&daemon.engine, &task)
            .await
            .unwrap();
    });
}

/// Goal: secrets do not cross the network in clear, and certificates come from regular files.
#[test]
fn files_of_receivers_are_checked() {
    let daemon = test_daemon();
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().join("url");
    std::fs::write(&url, "http://192.0.2.1/s3cret\n").unwrap();
    std::fs::set_permissions(&url, PermissionsExt::from_mode(0o600)).unwrap();
    let receiver = |more: &str| format!("[[alert.webhook]]\nname = \"a\"\n{more}\n");
    let https = "url = \"https://127.0.0.1:1/\"\nca = ";
    for (text, expected) in [
        (
            format!("url_file = \"{}\"", url.display()),
            "the URL is a secret",
        ),
        (
            format!("{https}\"/dev/zero\""),
            "/dev/zero: it is not a regular file",
        ),
        (format!("{https}\"/nonexistent\""), "it does not exist"),
        (
            format!("{https}\"{}\"", url.display()),
            "there is no certificate",
        ),
    ] {
        daemon.run(async { declare(&daemon, &receiver(&text)) });
        let error = daemon.call("alert_test", json!({}))[0]["error"].clone();
        let error = error.as_str().unwrap();
        assert!(
            error.contains(expected) && !error.contains("s3cret"),
            "{error}"
        );
    }
}

#[test]
fn silenced_events_are_not_sent() {
    let daemon = test_daemon();
    let silence = |params: Value| daemon.call("alert_silence", params);
    let first = silence(json!({ "duration_s": 3600, "types": ["nvme_failed"], "object": "n1" }));
    assert_eq!(first["id"], 1);
    silence(json!({ "duration_s": 3600, "types": ["pool_lost"] }));
    for (params, field) in [
        (json!({ "duration_s": 0 }), "duration_s"),
        (json!({ "duration_s": 2_592_001 }), "duration_s"),
        (json!({ "duration_s": 1, "types": ["storm"] }), "types[0]"),
    ] {
        let refused = daemon.refused("alert_silence", params);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
    }
    daemon.run(async {
        let (server, port) = Server::start(&[]).await;
        declare(&daemon, &webhook("a", port, ""));
        let notes = &daemon.engine.notes;
        notes.send("nvme_failed", "n1");
        notes.send("pool_lost", "p");
        notes.send("nvme_failed", "n2");
        assert_eq!(subjects(&server.bodies(1).await[0]), ["n2"]);
    });
    assert_eq!(daemon.call("alert_unsilence", json!({ "id": 1 })), true);
    daemon.refused("alert_unsilence", json!({ "id": 1 }));
    let listed = daemon.call("alert_list", json!(null));
    assert_eq!(listed["silences"].as_array().unwrap().len(), 1);
    assert_eq!(listed["receivers"][0]["delivered"], 1);
    assert_eq!(listed["receivers"][0]["pending"], 0);
}

#[test]
fn test_messages_return_the_cause_of_a_failure() {
    let daemon = test_daemon();
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "short\n").unwrap();
    let mode = |mode| std::fs::set_permissions(&secret, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o644);
    let file = format!("secret_file = \"{}\"", secret.display());
    let (server, port) = daemon.run(async {
        let (server, port) = Server::start(&[200, 500]).await;
        declare(
            &daemon,
            &[webhook("good", port, ""), webhook("signed", port, &file)].concat(),
        );
        (server, port)
    });
    let test = |name: &str| daemon.call("alert_test", json!({ "name": name }))[0].clone();
    let good = test("good");
    assert_eq!(
        (&good["delivered"], &good["error"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(server.bodies.borrow()[0]["type"], "test");
    assert_eq!(test("good")["error"], "the webhook answered 500");
    for (mode_now, expected) in [(0o644, "chmod 600"), (0o600, "24 to 64 random bytes")] {
        mode(mode_now);
        let error = test("signed")["error"].as_str().unwrap().to_owned();
        assert!(
            error.contains("secret_file") && error.contains(expected),
            "{error}"
        );
    }
    let both = daemon.call("alert_test", json!({}));
    assert_eq!(both.as_array().unwrap().len(), 2);
    let refused = daemon.refused("alert_test", json!({ "name": "x" }));
    assert_eq!(refused.data.unwrap().field.as_deref(), Some("name"));
    let listed = daemon.call("alert_list", json!(null));
    let target = listed["receivers"][0]["target"].as_str().unwrap();
    assert_eq!(target, format!("http://127.0.0.1:{port}"));
}

/// Goal: receivers of calls have sealed secrets, survive a restart and a rotation of the store key,
/// and never change those of the file.
#[test]
fn receivers_of_calls() {
    let folder = tempfile::tempdir().unwrap();
    let on = || {
        let store = crate::store::Store::open(folder.path()).unwrap();
        TestDaemon::with(Settings::default(), Some(store))
    };
    let daemon = on();
    let (server, port) = daemon.run(Server::start(&[]));
    let url = format!("http://127.0.0.1:{port}/hidden-path");
    let text = |name: &str, text: &str| {
        let params = json!({ "name": name, "kind": "text", "text": text });
        daemon.call("key_import", params)
    };
    let made = text("pager-url", &format!("{url}\n"));
    assert_eq!(made, json!({ "name": "pager-url", "kind": "text" }));
    text("pager-token", "s3cret");
    daemon.call("key_generate", json!({ "name": "nvme", "kind": "tls" }));
    daemon.run(async { declare(&daemon, &webhook("of-file", port, "")) });
    let pager = json!({ "name": "pager", "url_key": "pager-url", "token_key": "pager-token" });
    daemon.call("alert_set_webhook", pager.clone());
    daemon.call("key_store_rotate", Value::Null);
    let tested = daemon.call("alert_test", json!({ "name": "pager" }));
    assert_eq!(tested[0]["delivered"], true, "{tested}");
    assert_eq!(server.bodies.borrow()[0]["type"], "test");

    let mail = json!({ "name": "ops", "server": "127.0.0.1:1", "tls": "off", "from": "a@example.org", "to": ["b@example.org"], "severity": "error", "gather_s": 0 });
    let with = |key: &str, value: Value| {
        let mut mail = mail.clone();
        mail[key] = value;
        mail
    };
    for (method, params, code, field) in [
        (
            "alert_set_webhook",
            json!({ "name": "of-file", "url": "http://127.0.0.1/" }),
            -17,
            "name",
        ),
        ("alert_set_webhook", json!({ "name": "x" }), -32602, "url"),
        (
            "alert_set_webhook",
            json!({ "name": "x", "url": "ftp://h/" }),
            -32602,
            "url",
        ),
        (
            "alert_set_webhook",
            json!({ "name": "x", "url_key": "none" }),
            -126,
            "url_key",
        ),
        (
            "alert_set_webhook",
            json!({ "name": "x", "url_key": "nvme" }),
            -22,
            "url_key",
        ),
        (
            "alert_set_webhook",
            json!({ "name": "x", "url_file": "f" }),
            -32602,
            "url_file",
        ),
        ("alert_set_mail", with("to", json!([])), -32602, "to"),
        (
            "alert_set_mail",
            with("user", json!("u")),
            -32602,
            "password_file",
        ),
        (
            "alert_set_mail",
            with("except", json!(["storm"])),
            -32602,
            "except[0]",
        ),
        ("alert_set_mail", with("name", json!("")), -32602, "name"),
        ("alert_remove", json!({ "name": "of-file" }), -22, "name"),
        ("alert_remove", json!({ "name": "x" }), -2, "name"),
    ] {
        let refused = daemon.refused(method, params.clone());
        assert_eq!(refused.code, code, "{params}: {refused:?}");
        let of = refused.data.unwrap().field;
        assert_eq!(of.as_deref(), Some(field), "{params}");
    }
    // Nor is a text the key of a host.
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    for field in ["dhchap_key", "psk"] {
        let host = json!({ "nqn": nqn, "host": "nqn.2014-08.org.a:h", field: "pager-token" });
        let refused = daemon.refused("nvmf_subsystem_add_host", host);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
    }
    daemon.call("alert_set_mail", mail.clone());
    daemon.call("alert_set_mail", with("severity", json!("info")));
    let names = |daemon: &TestDaemon| {
        let listed = daemon.call("alert_list", Value::Null);
        let listed = listed["receivers"].as_array().unwrap().clone();
        let of = |one: &Value| (one["name"].clone(), one["declared"].clone());
        listed.iter().map(of).collect::<Vec<_>>()
    };
    let expected = |all: &[(&str, bool)]| -> Vec<(Value, Value)> {
        all.iter()
            .map(|(name, declared)| (json!(name), json!(declared)))
            .collect()
    };
    let three = [("of-file", true), ("pager", false), ("ops", false)];
    assert_eq!(names(&daemon), expected(&three));
    let users = |daemon: &TestDaemon| {
        let keys = daemon.call("key_list", Value::Null);
        let find = |key: &&Value| key["name"] == "pager-token";
        keys.as_array().unwrap().iter().find(find).unwrap().clone()
    };
    let key = users(&daemon);
    assert_eq!(key["used_by"], json!(["alert pager"]));
    assert_eq!(
        (&key["kind"], key.get("fingerprint")),
        (&json!("text"), None)
    );
    let answers = ["alert_list", "state_get", "key_list", "events_get"];
    for answer in answers.map(|method| daemon.call(method, Value::Null).to_string()) {
        assert!(
            !answer.contains("s3cret") && !answer.contains("hidden-path"),
            "{answer}"
        );
    }

    // A receiver of the file with the name of one that a call added does not take its place.
    daemon.run(async { declare(&daemon, &webhook("pager", port, "")) });
    assert_eq!(names(&daemon), expected(&three[1..]));
    drop(daemon);
    let daemon = on();
    assert_eq!(names(&daemon), expected(&three[1..]));
    let listed = daemon.call("alert_list", Value::Null);
    assert_eq!(listed["receivers"][0]["settings"], {
        let mut settings = pager;
        settings["severity"] = json!("warning");
        settings["categories"] = json!([]);
        settings["except"] = json!([]);
        settings["gather_s"] = json!(2);
        settings["retry_for_s"] = json!(3600);
        settings
    });
    assert_eq!(listed["receivers"][1]["severity"], "info");
    // A key that is gone is named, and one that is back counts.
    daemon.call("keyring_file_remove_key", json!({ "name": "pager-token" }));
    let tested = daemon.call("alert_test", json!({ "name": "pager" }));
    assert_eq!(
        tested[0]["error"],
        "token_key pager-token: there is no such key"
    );
    daemon.call("alert_remove", json!({ "name": "pager" }));
    assert_eq!(names(&daemon), expected(&three[2..]));
}

#[test]
fn events_go_to_a_receiver_of_a_call() {
    let daemon = test_daemon();
    let (server, port) = daemon.run(Server::start(&[]));
    daemon.run(async { declare(&daemon, "") });
    let origin = format!("http://127.0.0.1:{port}");
    let params = json!({ "name": "a", "url": format!("{origin}/hidden/path"), "gather_s": 0 });
    daemon.call("alert_set_webhook", params);
    for method in ["alert_list", "state_get"] {
        let answer = daemon.call(method, Value::Null).to_string();
        assert!(answer.contains("hidden"), "{method}");
        let answer = RawValue::from_string(answer).unwrap();
        let viewed = for_viewer(&daemon.engine, Ok(answer)).unwrap();
        let viewed = viewed.get();
        assert!(
            viewed.contains(&origin) && !viewed.contains("hidden"),
            "{viewed}"
        );
    }
    daemon.run(async {
        daemon.engine.notes.send("nvme_failed", "n1");
        assert_eq!(subjects(&server.bodies(1).await[0]), ["n1"]);
    });
}
