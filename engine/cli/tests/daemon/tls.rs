//! Goal: another machine commands the daemon over TLS as its certificate's role allows, and every
//! call that changes something is in the audit file. Method: the real daemon and the real commands;
//! certificates of the RPC server's tests.

use super::*;

const FILES: [(&str, &str); 10] = [
    (
        "ca.pem",
        include_str!("../../../rpc/src/tls/test_files/ca.pem"),
    ),
    (
        "server.pem",
        include_str!("../../../rpc/src/tls/test_files/server.pem"),
    ),
    (
        "server.key",
        include_str!("../../../rpc/src/tls/test_files/server.key"),
    ),
    (
        "ops.pem",
        include_str!("../../../rpc/src/tls/test_files/ops.pem"),
    ),
    (
        "ops.key",
        include_str!("../../../rpc/src/tls/test_files/ops.key"),
    ),
    (
        "viewer.pem",
        include_str!("../../../rpc/src/tls/test_files/viewer.pem"),
    ),
    (
        "viewer.key",
        include_str!("../../../rpc/src/tls/test_files/viewer.key"),
    ),
    (
        "foreign.pem",
        include_str!("../../../rpc/src/tls/test_files/foreign.pem"),
    ),
    (
        "foreign.key",
        include_str!("../../../rpc/src/tls/test_files/foreign.key"),
    ),
    (
        "clients.crl",
        include_str!("../../../rpc/src/tls/test_files/crl_none.pem"),
    ),
];
/// The list that revokes the certificate of `viewer`.
const CRL_VIEWER: &str = include_str!("../../../rpc/src/tls/test_files/crl_viewer.pem");
/// A list of another authority.
const CRL_FOREIGN: &str = include_str!("../../../rpc/src/tls/test_files/crl_foreign.pem");

/// A place with certificates, and the configuration of a TLS listener at this port.
fn place_with(port: u16, roles: &str) -> Place {
    let place = Place::new();
    for (name, text) in FILES {
        std::fs::write(place.path(name), text).unwrap();
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(place.path(name), mode).unwrap();
    }
    configure(&place, port, roles);
    place
}

fn configure(place: &Place, port: u16, roles: &str) {
    let text = format!(
        "[rpc.tls]\nlisten = \"127.0.0.1:{port}\"\ncert = \"server.pem\"\nkey = \"server.key\"\n\
         client_ca = \"ca.pem\"\nclient_crl = \"clients.crl\"\nroles = {{ {roles} }}\n[log]\nlevel = \"warning\"\n"
    );
    std::fs::write(place.path("nacre.toml"), text).unwrap();
}

impl Place {
    /// A command that calls the daemon at this port with a client's certificate.
    fn remote(&self, port: u16, who: &str, args: &[&str]) -> Output {
        self.nacre()
            .arg("--tls")
            .arg(format!("localhost:{port}"))
            .arg("--cert")
            .arg(self.path(&format!("{who}.pem")))
            .arg("--key")
            .arg(self.path(&format!("{who}.key")))
            .arg("--ca")
            .arg(self.path("ca.pem"))
            .args(args)
            .output()
            .unwrap()
    }
}

/// Output and exit code.
fn outcome(output: &Output) -> (String, Option<i32>) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (String::from_utf8(text).unwrap(), output.status.code())
}

#[test]
fn another_machine_has_the_role_of_its_certificate() {
    let port = local_port();
    let place = place_with(
        port,
        "\"CN=ops\" = \"operator\", \"CN=viewer\" = \"viewer\"",
    );
    let config = place.path("nacre.toml");
    let (daemon, mut root) = place.serve(&["-c", config.to_str().unwrap()]).ready();
    let level = ["rpc", "log_set_level", "level=WARNING"];
    let (text, code) = outcome(&place.remote(port, "ops", &level));
    assert_eq!(code, Some(0), "{text}\n{}", daemon.log());
    let (text, code) = outcome(&place.remote(port, "viewer", &["bdev", "list"]));
    assert_eq!(code, Some(0), "{text}");
    let (text, code) = outcome(&place.remote(port, "viewer", &level));
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("certificate CN=viewer,O=Nacre tests at 127.0.0.1:")
            && text.contains("\"CN=viewer,O=Nacre tests\" = \"operator\""),
        "{text}"
    );
    let (text, code) = outcome(&place.remote(port, "foreign", &["bdev", "list"]));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("the daemon refused the handshake"), "{text}");
    // The client has revocation lists, too: of the daemon's authority, and of another one.
    std::fs::write(place.path("foreign.crl"), CRL_FOREIGN).unwrap();
    let list = |crl: &str| {
        let crl = place.path(crl);
        let words = ["--crl", crl.to_str().unwrap(), "bdev", "list"];
        outcome(&place.remote(port, "ops", &words))
    };
    let (text, code) = list("clients.crl");
    assert_eq!(code, Some(0), "{text}");
    let (text, code) = list("foreign.crl");
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("--crl needs a current revocation list"),
        "{text}"
    );
    let (text, code) = outcome(&place.remote(local_port(), "ops", &["bdev", "list"]));
    assert_eq!(code, Some(3), "{text}");

    let who = root
        .call_by_name("audit_get", json!({ "limit": 10 }))
        .unwrap();
    let who: Vec<Value> = who["calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| {
            json!([
                call["certificate"],
                call["role"],
                call["method"],
                call["result"]
            ])
        })
        .collect();
    assert_eq!(
        who,
        [
            json!(["CN=ops,O=Nacre tests", "operator", "log_set_level", "done"]),
            json!([
                "CN=viewer,O=Nacre tests",
                "viewer",
                "log_set_level",
                "refused"
            ]),
        ]
    );
    // At log level warning, the log has them too.
    assert!(
        daemon.log().contains("CN=ops,O=Nacre tests"),
        "{}",
        daemon.log()
    );

    // SIGHUP applies other roles, and reads the files again.
    configure(&place, port, "\"CN=viewer\" = \"operator\"");
    daemon.signal("HUP");
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let (text, code) = outcome(&place.remote(port, "viewer", &level));
        if code == Some(0) {
            break;
        }
        assert!(Instant::now() < until, "{text}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let (text, code) = outcome(&place.remote(port, "ops", &["bdev", "list"]));
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("has no role"), "{text}");

    // A revoked certificate has no role; the log names the cause, and the doctor has no objection.
    std::fs::write(place.path("clients.crl"), CRL_VIEWER).unwrap();
    daemon.signal("HUP");
    let refused = || {
        let (text, code) = outcome(&place.remote(port, "viewer", &level));
        (code == Some(1)).then_some(text)
    };
    let until = Instant::now() + Duration::from_secs(30);
    let text = loop {
        if let Some(text) = refused() {
            break text;
        }
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(text.contains("CertificateRevoked"), "{text}");
    // A thread of the daemon writes the log.
    let until = Instant::now() + Duration::from_secs(30);
    while !daemon.log().contains("its certificate is revoked") {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let doctor = root.call_by_name("doctor_run", json!({})).unwrap();
    let findings = doctor["findings"].as_array().unwrap();
    let list = findings.iter().find(|of| of["id"] == "tls.revocation");
    assert_eq!(list.unwrap()["status"], "PASS", "{doctor}");

    // A call that kills the daemon has a line.
    let kill = json!({ "sig_name": "SIGKILL" });
    root.call_by_name("spdk_kill_instance", kill).unwrap_err();
    assert_eq!(daemon.ended(), -1);
    let audit = std::fs::read_to_string(place.path("data/audit.log")).unwrap();
    let last: Value = serde_json::from_str(audit.lines().last().unwrap()).unwrap();
    assert_eq!(
        json!([last["method"], last["result"], last["params"]["sig_name"]]),
        json!(["spdk_kill_instance", "started", "SIGKILL"])
    );
}

#[test]
fn wrong_files_end_the_start_with_their_name() {
    let place = place_with(local_port(), "");
    std::fs::write(place.path("ca.pem"), "no certificate").unwrap();
    let config = place.path("nacre.toml");
    let daemon = place.serve(&["-c", config.to_str().unwrap()]);
    let log = daemon.log.clone();
    assert_eq!(daemon.ended(), 1);
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.contains("[rpc.tls] client_ca") && log.contains("a certificate in PEM is needed"),
        "{log}"
    );
}
