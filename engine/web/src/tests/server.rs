//! Goal: the server answers good clients and refuses hostile ones. Method: requests as bytes over
//! loopback.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nacre_engine_rpc::Role;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::rig::{Rig, exchange};
use crate::certificate::Certificate;
use crate::testing::{PASSWORD, run};
use crate::web::{Limits, MAX_CLIENTS};

#[test]
fn the_first_account_is_made_with_the_code() {
    run(async {
        let rig = Rig::new().await;
        let session = rig.get("/api/session", "").await;
        assert_eq!(
            session.json(),
            json!({ "setup": true, "signed_in": false, "name": null, "role": null,
                "version": "1.2.3", "host": "store1" })
        );
        assert_eq!(session.header("cache-control"), Some("no-store"));
        let body = |code: &str| json!({ "code": code, "name": "ann", "password": PASSWORD });
        let wrong = rig.post("/api/setup", "", &body("AAAA-AAAA-AAAA")).await;
        assert_eq!(
            (wrong.status, &wrong.json()["error"]["data"]["wait_ms"]),
            (401, &json!(0))
        );
        let code = rig.web.logins.setup_code().unwrap();
        let short = json!({ "code": *code, "name": "ann", "password": "short" });
        let short = rig.post("/api/setup", "", &short).await;
        assert_eq!(short.status, 400);
        assert_eq!(short.json()["error"]["data"]["field"], "password");
        let made = rig
            .post("/api/setup", "", &body(&code.to_lowercase()))
            .await;
        assert_eq!(made.status, 200, "{}", made.body);
        assert_eq!(made.json()["role"], "admin");
        let cookie = made.header("set-cookie").unwrap();
        assert!(cookie.starts_with("nacre=") && cookie.ends_with("HttpOnly; SameSite=Strict"));
        let cookie = format!("Cookie: {}\r\n", made.cookie());
        let session = rig.get("/api/session", &cookie).await.json();
        assert_eq!(
            (&session["setup"], &session["name"]),
            (&json!(false), &json!("ann"))
        );
        assert_eq!(rig.post("/api/setup", "", &body(&code)).await.status, 409);
    });
}

/// Goal: each act that is no call is noted, refused ones too. A name without an account is left
/// out.
#[test]
fn acts_are_noted() {
    run(async {
        let rig = Rig::with_accounts().await;
        rig.fake.acts.take();
        let bob = rig.login("bob").await;
        let login = |name: &str, password: &str| json!({ "name": name, "password": password });
        rig.post("/api/login", "", &login("ann", "wrong")).await;
        rig.post("/api/login", "", &login("my password", "x")).await;
        let new = json!({ "old": PASSWORD, "new": "another fine password" });
        let changed = rig.post("/api/password", &bob, &new).await;
        let bob = changed.cookie();
        rig.post("/api/logout", &bob, &json!({})).await;
        rig.post("/api/logout", &bob, &json!({})).await;
        let setup = json!({ "code": "AAAA-AAAA-AAAA", "name": "eve", "password": PASSWORD });
        rig.post("/api/setup", "", &setup).await;
        let acts = rig.fake.acts.take();
        let facts = acts.iter().map(|act| {
            (
                act.name,
                act.account.as_deref(),
                act.role,
                act.outcome.is_ok(),
            )
        });
        let (admin, viewer) = (Some(Role::Admin), Some(Role::Viewer));
        assert_eq!(
            facts.collect::<Vec<_>>(),
            [
                ("page_sign_in", Some("bob"), viewer, true),
                ("page_sign_in", Some("ann"), admin, false),
                ("page_sign_in", None, None, false),
                ("page_password", Some("bob"), viewer, true),
                ("page_sign_out", Some("bob"), viewer, true),
                ("page_set_up", None, None, false),
            ]
        );
    });
}

#[test]
fn calls_need_a_session_and_a_role() {
    run(async {
        let rig = Rig::with_accounts().await;
        let call = |method: &str| json!({ "method": method, "params": { "a": 1 } });
        assert_eq!(rig.post("/api/rpc", "", &call("echo")).await.status, 401);
        let forged = format!("nacre={}", "0".repeat(64));
        assert_eq!(
            rig.post("/api/rpc", &forged, &call("echo")).await.status,
            401
        );
        let (ann, bob) = (rig.login("ann").await, rig.login("bob").await);
        let got = rig.post("/api/rpc", &ann, &call("change")).await;
        assert_eq!(
            (got.status, got.json()["result"].clone()),
            (
                200,
                json!({ "method": "change", "name": "ann", "params": "{\"a\":1}" })
            )
        );
        let refused = rig.post("/api/rpc", &bob, &call("change")).await;
        assert_eq!(refused.status, 403);
        let error = refused.json()["error"].clone();
        assert_eq!(
            (&error["code"], &error["data"]["remedy"]),
            (&json!(-13), &json!("ask"))
        );
        for params in [json!({}), json!(null)] {
            let got = rig
                .post(
                    "/api/rpc",
                    &bob,
                    &json!({ "method": "echo", "params": params }),
                )
                .await;
            assert_eq!(got.json()["result"]["params"], json!(null));
        }
        // A session ends with a log-out, and its cookie is of no use after that.
        let out = rig.post("/api/logout", &bob, &json!({})).await;
        assert_eq!(
            (out.status, out.json()["signed_in"].clone()),
            (200, json!(false))
        );
        assert!(
            out.header("set-cookie")
                .unwrap()
                .contains("nacre=; Path=/; Max-Age=0")
        );
        assert_eq!(rig.post("/api/rpc", &bob, &call("echo")).await.status, 401);
        // A session ends by time.
        rig.clock.advance(Duration::from_secs(31 * 60));
        assert_eq!(rig.post("/api/rpc", &ann, &call("echo")).await.status, 401);
        // Requests of the page itself do not prolong it.
        let ann = rig.login("ann").await;
        for _ in 0..3 {
            rig.clock.advance(Duration::from_secs(11 * 60));
            let headers = format!("X-Nacre: background\r\nCookie: {ann}\r\n");
            rig.get("/api/session", &headers).await;
        }
        assert_eq!(rig.post("/api/rpc", &ann, &call("echo")).await.status, 401);
    });
}

#[test]
fn wrong_passwords_are_refused_and_wait() {
    run(async {
        let rig = Rig::with_accounts().await;
        let try_with = async |name: &str, password: &str| {
            let body = json!({ "name": name, "password": password });
            rig.post("/api/login", "", &body).await
        };
        let mut waits = Vec::new();
        for name in ["ann", "nobody"] {
            for n in 0..6 {
                let got = try_with(name, "wrong password").await;
                assert!(got.status == 401 && got.header("set-cookie").is_none());
                let error = got.json()["error"].clone();
                assert_eq!(error["data"]["cause"], "wrong name or password");
                let wait = error["data"]["wait_ms"].as_u64().unwrap();
                assert_eq!(wait > 0, n >= 4, "{name} {n}");
                waits.push(wait);
            }
        }
        assert_eq!(waits[..6], waits[6..]);
        assert_eq!(try_with("ann", PASSWORD).await.status, 401);
        rig.clock.advance(Duration::from_secs(60));
        let cookie = try_with("ann", PASSWORD).await.cookie();
        let change = json!({ "old": PASSWORD, "new": "another password" });
        let changed = rig.post("/api/password", &cookie, &change).await;
        assert_eq!(changed.status, 200, "{}", changed.body);
        assert_ne!(changed.cookie(), cookie);
        let call = json!({ "method": "echo" });
        assert_eq!(
            rig.post("/api/rpc", &cookie, &call).await.status,
            401,
            "replayed"
        );
        assert_eq!(
            rig.post("/api/rpc", &changed.cookie(), &call).await.status,
            200
        );
        assert_eq!(try_with("ann", "another password").await.status, 200);
    });
}

/// Goal: a token that is deleted while the body of its request arrives makes no call. Method: the
/// body comes after the deletion.
#[test]
fn a_token_may_end_during_a_request() {
    run(async {
        let rig = Rig::with_accounts().await;
        let create = rig.web.logins.create_api_token("probe", Role::Admin, None);
        let secret = create.await.unwrap();
        let body = json!({ "method": "change" }).to_string();
        let (host, length, secret) = (&rig.host, body.len(), &*secret);
        let head = format!(
            "POST /api/rpc HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {secret}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        let mut stream = rig.connect().await;
        stream.write_all(head.as_bytes()).await.unwrap();
        // The server has read the head, or refuses it: both are right.
        tokio::time::sleep(Duration::from_millis(100)).await;
        rig.web.logins.delete_api_token("probe").await.unwrap();
        let got = exchange(stream, &body).await;
        assert_eq!(got.status, 401, "{}", got.body);
    });
}

/// Goal: a program calls with its API token, without a session and without the headers of the page,
/// as long as the token exists. A wrong token is refused, also beside a good cookie.
#[test]
fn programs_call_with_a_token() {
    run(async {
        let rig = Rig::with_accounts().await;
        let logins = &rig.web.logins;
        let create = logins.create_api_token("probe", Role::Viewer, None);
        let secret = create.await.unwrap();
        let bearer = |secret: &str| format!("Authorization: Bearer {secret}\r\n");
        let good = bearer(&secret);
        let session = rig.get("/api/session", &good).await.json();
        assert_eq!(
            json!([session["signed_in"], session["name"], session["role"]]),
            json!([true, "probe", "viewer"])
        );
        let json_type = "Content-Type: application/json\r\n";
        let call = json!({ "method": "echo", "params": { "a": 1 } }).to_string();
        let post = |path: &'static str, headers: String| {
            let (rig, call) = (&rig, &call);
            async move { rig.post_with(path, &headers, call).await }
        };
        let answered = post("/api/rpc", format!("{json_type}{good}")).await;
        assert_eq!(answered.status, 200, "{}", answered.body);
        assert_eq!(answered.json()["result"]["name"], "token probe");
        assert_eq!(post("/api/rpc", good.clone()).await.status, 403, "no type");
        for path in ["/api/login", "/api/logout", "/api/password", "/api/setup"] {
            let refused = post(path, format!("{json_type}{good}")).await;
            assert_eq!(refused.status, 403, "{path}: {}", refused.body);
        }
        let cookie = rig.login("ann").await;
        let page = format!(
            "{json_type}Origin: http://{}\r\nX-Nacre: 1\r\nCookie: {cookie}\r\n",
            rig.host
        );
        let zeroes = format!("nacre_{}", "0".repeat(64));
        let session_secret = cookie.split_once('=').unwrap().1;
        for wrong in [
            bearer(&zeroes),
            bearer(session_secret),
            bearer(&format!("nacre_{session_secret}")),
            bearer(""),
            "Authorization: Bearer\r\n".to_owned(),
            format!("{good}{good}"),
        ] {
            let refused = post("/api/rpc", format!("{page}{wrong}")).await;
            assert_eq!(refused.status, 401, "{wrong}: {}", refused.body);
            assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
            let refused = rig.get("/api/live", &wrong).await;
            assert_eq!(refused.status, 401, "{wrong}");
        }
        // A proxy's own authentication leaves the session to its cookie, and opens none.
        let basic = format!("Authorization: Basic {}\r\n", *secret);
        let of_page = post("/api/rpc", format!("{page}{basic}")).await;
        assert_eq!(of_page.json()["result"]["name"], "ann");
        let alone = post("/api/rpc", format!("{json_type}{basic}")).await;
        assert_eq!(alone.status, 403, "without the headers of the page");
        // The secret is no cookie.
        let as_cookie = format!("Cookie: nacre={}\r\n", &secret[6..]);
        let session = rig.get("/api/session", &as_cookie).await.json();
        assert_eq!(session["signed_in"], false);
        // A stream of live data ends with the token.
        let mut stream = rig.stream("", &good).await;
        assert!(stream.until("event: snapshot").await);
        logins.delete_api_token("probe").await.unwrap();
        stream.ends().await;
        let refused = post("/api/rpc", format!("{json_type}{good}")).await;
        assert_eq!(refused.status, 401);
    });
}

#[test]
fn pages_of_other_origins_are_refused() {
    run(async {
        let rig = Rig::with_accounts().await;
        let cookie = rig.login("ann").await;
        let host = &rig.host;
        let body = json!({ "method": "change" }).to_string();
        let good = [
            "Content-Type: application/json; charset=utf-8".to_owned(),
            "X-Nacre: 1".to_owned(),
            format!("Origin: http://{host}"),
        ];
        let send = async |lines: &[String]| {
            let headers = format!("{}\r\nCookie: {cookie}\r\n", lines.join("\r\n"));
            rig.post_with("/api/rpc", &headers, &body).await
        };
        assert_eq!(send(&good).await.status, 200);
        for missing in 0..3 {
            let mut lines = good.to_vec();
            lines.remove(missing);
            let got = send(&lines).await;
            assert_eq!(
                (got.status, got.json()["error"]["code"].clone()),
                (403, json!(-13))
            );
        }
        for (at, line) in [
            (0, "Content-Type: text/plain".to_owned()),
            (0, "Content-Type: application/jsonp".to_owned()),
            (2, "Origin: null".to_owned()),
            (2, "Origin: http://evil.example".to_owned()),
            (2, format!("Origin: https://{host}")),
            (2, format!("Origin: http://{host}0")),
            (2, format!("Origin: http://{host}\r\nOrigin: http://{host}")),
        ] {
            let mut lines = good.to_vec();
            lines[at] = line;
            assert_eq!(send(&lines).await.status, 403, "{lines:?}");
        }
    });
}

#[test]
fn files_are_served_by_name_only() {
    run(async {
        let rig = Rig::new().await;
        let page = rig.get("/", "Accept-Encoding: gzip\r\n").await;
        assert_eq!(page.status, 200);
        assert_eq!(page.header("content-encoding"), Some("gzip"));
        let policy = page.header("content-security-policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'"),
            "{policy}"
        );
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(page.header("strict-transport-security"), None);
        let etag = page.header("etag").unwrap();
        let known = rig
            .get("/", &format!("If-None-Match: \"x\", {etag}\r\n"))
            .await;
        assert_eq!(
            (known.status, &*known.body, known.header("etag")),
            (304, "", Some(etag))
        );
        let other = rig.get("/", "If-None-Match: \"x\"\r\n").await;
        assert_eq!(other.status, 200);
        let host = &rig.host;
        let close = format!("Host: {host}\r\nConnection: close\r\n\r\n");
        let head = rig.raw(&format!("HEAD / HTTP/1.1\r\n{close}")).await;
        assert_eq!((head.status, &*head.body), (200, ""));
        assert_eq!(head.header("content-length"), page.header("content-length"));
        assert_eq!(rig.get("/", "Accept-Encoding: br\r\n").await.status, 406);
        for path in [
            "/../Cargo.toml",
            "/assets/../../etc/passwd",
            "/%2e%2e/etc/passwd",
            "//etc/passwd",
            "/index.html/..",
            "/list.rs",
            "/index.html.gz",
        ] {
            assert_eq!(rig.get(path, "").await.status, 404, "{path}");
        }
        assert_eq!(rig.get("/?a=b", "").await.status, 200);
        assert_eq!(rig.get("/api/other", "").await.status, 404);
        for (request, status, allow) in [
            ("DELETE /", 405, Some("GET, HEAD")),
            ("POST /api/session", 405, Some("GET, HEAD")),
            ("GET /api/rpc", 405, Some("POST")),
            ("POST /api/live", 405, Some("GET")),
            ("GET http://other.example/", 200, None),
        ] {
            let got = rig.raw(&format!("{request} HTTP/1.1\r\n{close}")).await;
            assert_eq!(
                (got.status, got.header("allow")),
                (status, allow),
                "{request}"
            );
        }
    });
}

#[test]
fn hostile_requests_are_refused() {
    run(async {
        let rig = Rig::with_accounts().await;
        let cookie = rig.login("ann").await;
        let host = &rig.host;
        let host = format!("Host: {host}\r\n");
        let api = format!(
            "{host}Content-Type: application/json\r\nX-Nacre: 1\r\nOrigin: http://{}\r\nCookie: {cookie}\r\n",
            rig.host
        );
        let call = r#"{"method":"change"}"#;
        let length = call.len();
        let hidden = format!("GET /hidden HTTP/1.1\r\n{host}\r\n");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
            (format!("GET / HTTP/1.1\r\n{host}{host}\r\n"), 400),
            (
                format!("GET / HTTP/1.1\r\n{host}X: {}\r\n\r\n", "a".repeat(20_000)),
                431,
            ),
            (
                format!("GET / HTTP/1.1\r\n{host}{}\r\n", "X: a\r\n".repeat(100)),
                431,
            ),
            (format!("GET / HTTP/1.1\r\n{host} X: folded\r\n\r\n"), 400),
            (format!("GET / HTTP/1.1\r\n{host}X : space\r\n\r\n"), 400),
            (format!("GET / HTTP/9.9\r\n{host}\r\n"), 400),
            ("\u{16}\u{3}\u{1}".repeat(10) + "\r\n\r\n", 400),
            // Where does the body end? Each server must say the same.
            (
                format!(
                    "POST /api/rpc HTTP/1.1\r\n{api}Transfer-Encoding: chunked\r\nContent-Length: {length}\r\n\r\n0\r\n\r\n{hidden}"
                ),
                411,
            ),
            (
                format!(
                    "POST /api/rpc HTTP/1.1\r\n{api}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
                ),
                411,
            ),
            (
                format!(
                    "POST /api/rpc HTTP/1.1\r\n{api}Content-Length: {length}\r\nContent-Length: 0\r\n\r\n{call}"
                ),
                400,
            ),
            (
                format!("POST /api/rpc HTTP/1.1\r\n{api}Content-Length: +{length}\r\n\r\n{call}"),
                400,
            ),
            (format!("POST /api/rpc HTTP/1.1\r\n{api}\r\n"), 411),
            (
                format!("POST /api/rpc HTTP/1.1\r\n{api}Content-Length: 9999999\r\n\r\n"),
                413,
            ),
            (
                format!("POST /api/login HTTP/1.1\r\n{api}Content-Length: 9000\r\n\r\n"),
                413,
            ),
        ] {
            let got = rig.raw(&request).await;
            let start = &request[..request.len().min(300)];
            assert_eq!(got.status, status, "{start}: {}", got.head);
            // One answer: what hides behind the request is not read as another one.
            assert!(!got.body.contains("HTTP/1.1"), "{start}: {}", got.body);
        }
        for body in [
            "",
            "{",
            "[]",
            r#"{"method":1}"#,
            r#"{"method":"a","more":1}"#,
            "\u{0}",
        ] {
            let headers = api.replace(&host, "");
            let got = rig.post_with("/api/rpc", &headers, body).await;
            assert_eq!(got.status, 400, "{body}");
            assert!(got.json()["error"]["code"].is_i64(), "{body}");
        }
        let deep = "[".repeat(100_000);
        let got = rig
            .post_with("/api/rpc", &api.replace(&host, ""), &deep)
            .await;
        assert_eq!(got.status, 400);
    });
}

#[test]
fn slow_and_idle_clients_are_dropped() {
    run(async {
        let limits = Limits {
            head: Duration::from_millis(30),
            body: Duration::from_millis(30),
            ..Limits::default()
        };
        let rig = Rig::with(limits).await;
        // Half a head is closed, half a body is answered.
        let got = rig.raw("GET / HT").await;
        assert!(matches!(got.status, 0 | 408), "{}", got.head);
        let headers = format!(
            "Host: {0}\r\nContent-Type: application/json\r\nX-Nacre: 1\r\nOrigin: http://{0}\r\n",
            rig.host
        );
        let half = format!("POST /api/login HTTP/1.1\r\n{headers}Content-Length: 100\r\n\r\n{{");
        assert_eq!(rig.raw(&half).await.status, 408);
        // More clients than places: the newest is served.
        let mut idle = Vec::new();
        for _ in 0..MAX_CLIENTS + 5 {
            idle.push(rig.connect().await);
        }
        assert_eq!(rig.get("/", "").await.status, 200);
    });
}

fn client(
    certificates: RootCertStore,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(certificates)
        .with_no_client_auth();
    Arc::new(config)
}

#[test]
fn https_with_the_own_certificate() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let rig = Rig::with_accounts().await;
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let own = Certificate::own(Some(folder.path()), &names, SystemTime::now()).unwrap();
        rig.certificate.replace(Some(own));
        let pem = folder.path().join("web-certificate.pem");
        let mut roots = RootCertStore::empty();
        let trusted = CertificateDer::from_pem_file(&pem).unwrap();
        roots.add(trusted).unwrap();
        let tls13 = client(roots, &[&rustls::version::TLS13]);
        let connect = async || {
            let connector = tokio_rustls::TlsConnector::from(Arc::clone(&tls13));
            let stream = TcpStream::connect(&rig.secure).await.unwrap();
            let name = ServerName::try_from("127.0.0.1").unwrap();
            connector.connect(name, stream).await.unwrap()
        };
        let host = &rig.secure;
        let body = json!({ "name": "ann", "password": PASSWORD }).to_string();
        let request = |origin: &str| {
            let length = body.len();
            format!(
                "POST /api/login HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nX-Nacre: 1\r\n\
                 Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )
        };
        let insecure = exchange(connect().await, &request(&format!("http://{host}"))).await;
        assert_eq!(insecure.status, 403);
        let got = exchange(connect().await, &request(&format!("https://{host}"))).await;
        assert_eq!(got.status, 200, "{}", got.body);
        let cookie = got.header("set-cookie").unwrap();
        assert!(cookie.starts_with("__Host-nacre="), "{cookie}");
        assert!(
            cookie.contains("; Secure") && cookie.contains("Path=/;"),
            "{cookie}"
        );
        assert_eq!(
            got.header("strict-transport-security"),
            None,
            "browsers could not go back"
        );
        // The cookie of HTTPS opens nothing in clear.
        let session = rig
            .get("/api/session", &format!("Cookie: {}\r\n", got.cookie()))
            .await;
        assert_eq!(session.json()["signed_in"], false);
        // Plain HTTP on the port of HTTPS gets no answer.
        let stream = TcpStream::connect(host).await.unwrap();
        let plain = exchange(stream, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        assert_eq!(plain.status, 0);
    });
}

/// Goal: TLS older than 1.3 is refused. Method: the hello of a client that offers TLS 1.1 or 1.2
/// only, as bytes.
#[test]
fn old_tls_is_refused() {
    run(async {
        let rig = Rig::new().await;
        for version in [1, 2, 3] {
            let mut hello = vec![3, version];
            hello.extend([7; 32]);
            // No session; ECDHE with AES-GCM, and with CBC; no compression.
            hello.extend([0, 0, 6, 0xc0, 0x2b, 0xc0, 0x09, 0x00, 0x2f, 1, 0]);
            // Groups P-256; point formats; signatures of ECDSA with SHA-256.
            let extensions = [
                0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 4, 0, 2, 4, 3,
            ];
            hello.extend([0, u8::try_from(extensions.len()).unwrap()]);
            hello.extend(extensions);
            let length = u8::try_from(hello.len()).unwrap();
            let record = [&[22, 3, 1, 0, length + 4, 1, 0, 0, length][..], &hello].concat();
            let mut stream = TcpStream::connect(&rig.secure).await.unwrap();
            stream.write_all(&record).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            // A fatal alert: protocol_version.
            assert_eq!(
                (answer[0], &answer[5..]),
                (21, &[2, 70][..]),
                "TLS 1.{version}"
            );
        }
    });
}
