//! Goal: the page of a real engine signs in, calls with the account's role and name, and shows
//! changes. Method: requests over loopback; no `[web]`: nothing runs.

use nacre_engine_web::server::Listener;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::config::load_text;
use crate::methods::testing::{TestDaemon, test_daemon};

const PASSWORD: &str = "correct horse battery";

fn with_page() -> TestDaemon {
    let text = "[web]\nlisten = \"http://127.0.0.1:0\"\n";
    let settings = load_text(Some(("/n.toml", text)), [], &[])
        .unwrap()
        .settings;
    TestDaemon::with(settings, None)
}

async fn post(host: &str, path: &str, cookie: &str, body: &Value) -> (String, Value) {
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nX-Nacre: 1\r\nCookie: {cookie}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    let mut stream = tokio::net::TcpStream::connect(host).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), serde_json::from_str(body).unwrap())
}

#[test]
fn the_page_of_an_engine() {
    let daemon = with_page();
    let folder = tempfile::tempdir().unwrap();
    daemon
        .run(start(&daemon.engine, Some(folder.path())))
        .unwrap();
    let status = daemon.call("web_get_status", json!(null));
    let code = status["setup_code"].as_str().unwrap().to_owned();
    let host = status["listen"][0].as_str().unwrap();
    let host = host.strip_prefix("http://").unwrap().to_owned();
    let cookie = daemon.run(async {
        let setup = json!({ "code": code, "name": "ann", "password": PASSWORD });
        let (head, session) = post(&host, "/api/setup", "", &setup).await;
        assert_eq!(session["role"], "admin", "{session}");
        let cookie = head
            .lines()
            .find_map(|line| line.strip_prefix("set-cookie: "));
        cookie.unwrap().split(';').next().unwrap().to_owned()
    });
    let status = daemon.call("web_get_status", json!(null));
    assert_eq!(
        (&status["setup"], &status["setup_code"]),
        (&json!(false), &json!(null))
    );
    let add = json!({ "name": "bob", "role": "viewer", "password": PASSWORD });
    assert_eq!(daemon.call("web_account_add", add), true);
    daemon.engine.calls.page.changed.set(0);
    daemon.run(async {
        let call = |method: &str, params: Value| json!({ "method": method, "params": params });
        let malloc = json!({ "name": "m0", "num_blocks": 64, "block_size": 512 });
        let create = call("bdev_malloc_create", malloc);
        let (_, made) = post(&host, "/api/rpc", &cookie, &create).await;
        assert_eq!(made["result"], "m0", "{made}");
        let login = json!({ "name": "bob", "password": PASSWORD });
        let (head, _) = post(&host, "/api/login", "", &login).await;
        let bob = head
            .lines()
            .find_map(|line| line.strip_prefix("set-cookie: "));
        let bob = bob.unwrap().split(';').next().unwrap().to_owned();
        let delete = call("bdev_malloc_delete", json!({ "name": "m0" }));
        let (head, refused) = post(&host, "/api/rpc", &bob, &delete).await;
        assert!(head.starts_with("HTTP/1.1 403"), "{head}");
        let facts = &refused["error"]["data"];
        let cause = facts["cause"].as_str().unwrap();
        assert!(cause.contains("account bob at 127.0.0.1"), "{cause}");
        assert!(
            facts["remedy"]
                .as_str()
                .unwrap()
                .contains("nacre web account change bob")
        );
        let (_, status) = post(&host, "/api/rpc", &bob, &call("web_get_status", json!({}))).await;
        assert_eq!(status["result"]["listen"][0], format!("http://{host}"));
    });
    assert!(daemon.engine.take_changed().contains(&"bdevs"));
    let list = daemon.call("web_account_list", json!(null));
    assert_eq!(list[1]["name"], "bob");
    let refused = daemon.refused("web_account_remove", json!({ "name": "ann" }));
    assert_eq!(refused.data.unwrap().field.as_deref(), Some("name"));
    assert_eq!(
        daemon.call("web_account_remove", json!({ "name": "bob" })),
        true
    );
    // The accounts are there after a restart.
    let again = Logins::open(Some(folder.path()), Cost::default(), Clock::real()).unwrap();
    assert!(!again.wants_setup());
}

/// Goal: a program with an API token has the token's role, also after a restart. Only the first
/// answer has the secret.
#[test]
fn programs_call_with_a_token() {
    let daemon = with_page();
    let folder = tempfile::tempdir().unwrap();
    daemon
        .run(start(&daemon.engine, Some(folder.path())))
        .unwrap();
    let create = json!({ "name": "probe", "role": "viewer", "validity_s": 3600 });
    let created = daemon.call("web_token_create", create.clone());
    let secret = created["token"].as_str().unwrap().to_owned();
    let refused = daemon.refused("web_token_create", create);
    assert_eq!(refused.data.unwrap().field.as_deref(), Some("name"));
    let short = json!({ "name": "short", "role": "viewer", "validity_s": 59 });
    let refused = daemon.refused("web_token_create", short);
    assert_eq!(refused.data.unwrap().field.as_deref(), Some("validity_s"));
    let list = daemon.call("web_token_list", json!(null));
    let (made, end) = (&list[0]["created_ms"], &list[0]["expires_ms"]);
    assert_eq!(end.as_u64().unwrap() - made.as_u64().unwrap(), 3_600_000);
    assert!(!list.to_string().contains(&secret[6..]));
    let again = with_page();
    again
        .run(start(&again.engine, Some(folder.path())))
        .unwrap();
    for daemon in [&daemon, &again] {
        let status = daemon.call("web_get_status", json!(null));
        let host = status["listen"][0].as_str().unwrap();
        let host = host.strip_prefix("http://").unwrap();
        let post = |method: &str| {
            let body = json!({ "method": method, "params": {} }).to_string();
            let length = body.len();
            let request = format!(
                "POST /api/rpc HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {secret}\r\n\
                 Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
            daemon.run(async {
                let mut stream = tokio::net::TcpStream::connect(host).await.unwrap();
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                text
            })
        };
        let bdevs = post("bdev_get_bdevs");
        assert!(bdevs.ends_with("{\"result\":[]}"), "{bdevs}");
        let refused = post("web_token_list");
        assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
        assert!(
            refused.contains("API token probe at 127.0.0.1"),
            "{refused}"
        );
        daemon.call("web_token_delete", json!({ "name": "probe" }));
        let gone = post("bdev_get_bdevs");
        assert!(gone.starts_with("HTTP/1.1 401"), "{gone}");
    }
}

#[test]
fn nothing_runs_without_the_setting() {
    let daemon = test_daemon();
    daemon.run(start(&daemon.engine, None)).unwrap();
    assert!(daemon.engine.calls.page.running.get().is_none());
    let refused = daemon.refused("web_account_list", json!(null));
    assert!(
        refused
            .data
            .unwrap()
            .remedy
            .unwrap()
            .contains("[web] listen")
    );
    assert_eq!(
        daemon.call("web_get_status", json!(null))["listen"],
        json!([])
    );
    // An address in use ends the start.
    let daemon = with_page();
    daemon.run(async {
        let taken = Listener::bind("http://127.0.0.1:0".parse().unwrap())
            .await
            .unwrap();
        let endpoint = taken.endpoint().unwrap();
        let refused = Listener::bind(endpoint).await.unwrap_err();
        assert!(refused.to_string().contains("[web] listen"), "{refused}");
    });
}

/// Goal: a reload reads the certificate, and a damaged one changes nothing.
#[test]
fn a_reload_reads_the_certificate() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path
    };
    let cert = file(
        "c.pem",
        include_str!("../../../rpc/src/tls/test_files/server.pem"),
    );
    let key = file(
        "k.pem",
        include_str!("../../../rpc/src/tls/test_files/server.key"),
    );
    let text = "[web]\nlisten = \"https://127.0.0.1:0\"\n";
    let settings = load_text(Some(("/n.toml", text)), [], &[])
        .unwrap()
        .settings;
    let daemon = TestDaemon::with(settings, None);
    daemon.run(start(&daemon.engine, None)).unwrap();
    let page = &daemon.engine.calls.page;
    let own = page.fingerprint().unwrap();
    assert!(own.starts_with("SHA256:"), "{own}");
    let mut settings = daemon.engine.settings.web.clone();
    (settings.cert, settings.key) = (Some(cert.clone()), Some(key));
    daemon.run(page.reload(&settings)).unwrap();
    let given = page.fingerprint().unwrap();
    assert_ne!(given, own);
    std::fs::write(&cert, "damaged").unwrap();
    let refused = daemon.run(page.reload(&settings));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("[web] cert"), "{refused}");
    assert_eq!(page.fingerprint().unwrap(), given);
}

/// Goal: the page and its own certificate follow the machine's name. A failure is tried again.
/// Method: the folder of the state goes away for one check.
#[test]
fn the_certificate_follows_the_name() {
    let text = "[web]\nlisten = \"https://127.0.0.1:0\"\n";
    let settings = load_text(Some(("/n.toml", text)), [], &[])
        .unwrap()
        .settings;
    let daemon = TestDaemon::with(settings, None);
    let root = tempfile::tempdir().unwrap();
    let (folder, aside) = (root.path().join("state"), root.path().join("aside"));
    std::fs::create_dir(&folder).unwrap();
    daemon.run(start(&daemon.engine, Some(&folder))).unwrap();
    let page = &daemon.engine.calls.page;
    let stored = || std::fs::read_to_string(folder.join("web-certificate.pem")).unwrap();
    let first = page.fingerprint().unwrap();
    let check = |name: &str, at| daemon.run(page.check(name.into(), at));
    check(&host_name(), SystemTime::now());
    assert_eq!(page.fingerprint().unwrap(), first);
    let running = page.running.get().unwrap();
    let last_error = || running.last_error.borrow().clone();
    std::fs::rename(&folder, &aside).unwrap();
    for _ in 0..2 {
        check("storage-7", SystemTime::now());
        assert_eq!(page.fingerprint().unwrap(), first);
        assert!(last_error().unwrap().contains("cannot be stored"));
        assert_eq!(*running.host.borrow(), "storage-7", "the page shows it");
    }
    std::fs::rename(&aside, &folder).unwrap();
    check("storage-7", SystemTime::now());
    assert_eq!(last_error(), None);
    let second = page.fingerprint().unwrap();
    assert_ne!(second, first);
    let text = stored();
    let head = text.lines().next().unwrap();
    assert!(head.contains("storage-7"), "{head}");
    check("storage-7", SystemTime::now());
    assert_eq!(page.fingerprint().unwrap(), second);
    // The end is looked at once a day.
    let made = || {
        let certificate = running.certificate.borrow();
        certificate.as_ref().and_then(|of| of.renew_at).unwrap()
    };
    let (renew_at, today) = (made(), SystemTime::now());
    let moment = Duration::from_secs(1);
    running.end_checked.set(renew_at - moment);
    assert!(!running.is_ending(renew_at + moment));
    running.end_checked.set(today);
    assert!(running.is_ending(renew_at + moment));
    assert!(!running.is_ending(renew_at + 2 * moment));
    assert!(!running.is_ending(today), "the clock was set back");
}

#[test]
fn samples_are_differences() {
    let mut sum = Sum::default();
    assert_eq!(sum.percentile(0.5), None);
    sum.operations = 100;
    sum.bytes = 409_600;
    sum.latency[3] = 98;
    sum.latency[10] = 2;
    assert_eq!(sum.percentile(0.49), Some(6.0));
    assert!((512.0..=1024.0).contains(&sum.percentile(0.99).unwrap()));
    let now = HostIo([sum, Sum::default()]);
    let json = now.json(&HostIo::default(), 0.5, 7);
    assert_eq!(
        (&json["read_ops"], &json["read_bytes"]),
        (&json!(200.0), &json!(819_200.0))
    );
    assert_eq!(
        (&json["write_ops"], &json["write_p99_us"]),
        (&json!(0.0), &json!(null))
    );
    assert_eq!(json["latency_us"], json!([[8.0, 98], [1024.0, 2]]));
    // A subsystem that is gone makes no negative rate.
    let json = HostIo::default().json(&now, 1.0, 7);
    assert_eq!(
        (&json["read_ops"], &json["latency_us"]),
        (&json!(0.0), &json!([]))
    );
}

#[test]
fn methods_have_kinds() {
    let page = Page::default();
    for (method, kinds) in [
        ("bdev_malloc_create", vec!["bdevs"]),
        ("volume_create", vec!["bdevs", "volumes"]),
        ("nvmf_create_subsystem", vec!["subsystems"]),
        ("log_set_level", vec![]),
    ] {
        page.note(method);
        let changed = page.changed.replace(0);
        assert_eq!(changed, bits(&kinds), "{method}");
    }
}
