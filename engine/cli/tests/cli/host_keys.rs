//! Tests of `nacre host allow` with new keys: what is called, printed and left behind.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::fake::{Fake, Outcome};

const NQN: &str = "nqn.2026-01.org.example:disk0";
const HOST: &str = "nqn.2026-01.org.example:host1";
const ADD: &str = "nvmf_subsystem_add_host";

/// A daemon that takes keys and hosts; its subsystem has a TCP listener of each TLS mode, and one
/// over RDMA.
fn daemon() -> Fake {
    let listener = |trtype: &str, port: &str, tls: &str| {
        json!({
            "address": { "trtype": trtype, "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": port },
            "options": { "tls": tls },
        })
    };
    let mut plain = listener("TCP", "4420", "off");
    plain.as_object_mut().unwrap().remove("options");
    let listeners = json!([
        plain,
        listener("TCP", "4421", "allow"),
        listener("TCP", "4422", "require"),
        listener("RDMA", "4423", "off"),
    ]);
    Fake::play(move |method, params| match method {
        "nvmf_subsystem_get_listeners" if params["nqn"] == NQN => Ok(listeners.clone()),
        "nvmf_subsystem_get_listeners" if params["nqn"] == "bare" => Ok(json!([])),
        ADD if params["host"] == "refused" => Err(json!({ "code": -17, "message": "File exists" })),
        "keyring_file_add_key" | "keyring_file_remove_key" | ADD => Ok(json!(true)),
        _ => Err(json!({ "code": -19, "message": "No such device" })),
    })
}

/// Runs `nacre host allow` with new keys in a folder.
fn allow(daemon: &Fake, folder: &Path, words: &str) -> Outcome {
    let folder = folder.display();
    daemon.nacre(&format!("host allow {words} --key-folder {folder}"))
}

/// The text in a key file.
fn secret(folder: &Path, name: &str) -> String {
    let file = folder.join(name);
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    std::fs::read_to_string(file).unwrap().trim_end().to_owned()
}

/// The parameters of the one call that allowed the host.
fn allowed(daemon: &Fake) -> Value {
    let asked = daemon.asked();
    let mut added = asked.into_iter().filter(|(method, _)| method == ADD);
    let (_, params) = added.next().expect("the host is allowed");
    assert!(added.next().is_none());
    params
}

/// Goal: no option is dropped: the host gets each key that the command names or makes. Method: the
/// options one by one, and the call that they lead to.
#[test]
fn each_option_reaches_the_daemon() {
    let daemon = daemon();
    for (words, keys) in [
        ("--generate-key k", json!({ "dhchap_key": "k" })),
        (
            "--generate-key k --psk p",
            json!({ "dhchap_key": "k", "psk": "p" }),
        ),
        (
            "--generate-key k --generate-ctrlr-key c",
            json!({ "dhchap_key": "k", "dhchap_ctrlr_key": "c" }),
        ),
        (
            "--generate-key k --mutual",
            json!({ "dhchap_key": "k", "dhchap_ctrlr_key": "k-ctrlr" }),
        ),
        (
            "--generate-key k --tls",
            json!({ "dhchap_key": "k", "psk": "k-tls" }),
        ),
        (
            "--generate-key k --concat",
            json!({ "dhchap_key": "k", "concat": true }),
        ),
        (
            "--generate-key k --tls --mutual",
            json!({ "dhchap_key": "k", "dhchap_ctrlr_key": "k-ctrlr", "psk": "k-tls" }),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let outcome = allow(&daemon, folder.path(), &format!("{NQN} {HOST} {words}"));
        outcome.printed();
        let mut expected = keys;
        expected["nqn"] = NQN.into();
        expected["host"] = HOST.into();
        assert_eq!(allowed(&daemon), expected, "{words}");
    }
    for (words, keys) in [
        (
            "--dhchap-key k --dhchap-ctrlr-key c --psk p",
            json!({ "dhchap_key": "k", "dhchap_ctrlr_key": "c", "psk": "p" }),
        ),
        (
            "--dhchap-key k --concat",
            json!({ "dhchap_key": "k", "concat": true }),
        ),
    ] {
        daemon
            .nacre(&format!("host allow {NQN} {HOST} {words}"))
            .printed();
        let mut expected = keys;
        expected["nqn"] = NQN.into();
        expected["host"] = HOST.into();
        assert_eq!(allowed(&daemon), expected, "{words}");
    }
    // Options without an effect are refused, and nothing is called.
    for words in [
        "--tls",
        "--mutual",
        "--concat",
        "--out /tmp/nacre-none",
        "--key-folder /tmp",
        "--generate-ctrlr-key c",
        "--dhchap-ctrlr-key c",
        "--generate-key k --dhchap-key k",
        "--generate-key k --dhchap-ctrlr-key c",
        "--generate-key k --nsid 1",
        "--generate-key k --tls --psk p",
        "--generate-key k --tls --concat",
        "--generate-key k --psk p --concat",
        "--generate-key k --mutual --generate-ctrlr-key c",
        "--dhchap-key k --nsid 1",
        "--psk p --nsid 1",
    ] {
        let words = format!("{NQN} {HOST} {words}");
        // Should an option be taken, no key gets into the folder of this machine.
        let folder = tempfile::tempdir().unwrap();
        let refused = if words.contains("--generate-key") {
            allow(&daemon, folder.path(), &words)
        } else {
            daemon.nacre(&format!("host allow {words}"))
        };
        assert_eq!(refused.code, 2, "{words}: {refused:?}");
        assert!(daemon.asked().is_empty(), "{words}");
    }
}

/// Goal: the printed commands have the secrets that the files have, and name the listeners that
/// serve the host.
#[test]
fn the_commands_for_the_host_are_printed() {
    let daemon = daemon();
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("new/keys");
    let line = |transport: &str, port: u16, rest: &str| {
        format!(
            "  nvme connect -t {transport} -a 192.0.2.1 -s {port} -n {NQN} --hostnqn {HOST} {rest}"
        )
    };
    let of = |name: &str| format!("key {name}: {}", folder.join(name).display());

    let words = format!("{NQN} {HOST} --generate-key a --generate-ctrlr-key b");
    let printed = allow(&daemon, &folder, &words).printed();
    let (own, other) = (secret(&folder, "a"), secret(&folder, "b"));
    assert!(
        own.starts_with("DHHC-1:01:") && own != other,
        "{own} {other}"
    );
    let secrets = format!("--dhchap-secret '{own}' --dhchap-ctrl-secret '{other}'");
    let expected = [
        of("a"),
        of("b"),
        "on the host:".into(),
        line("tcp", 4420, &secrets),
        line("tcp", 4421, &secrets),
        line("rdma", 4423, &secrets),
    ];
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);

    let printed = allow(
        &daemon,
        &folder,
        &format!("{NQN} {HOST} --generate-key c --tls"),
    );
    let printed = printed.printed();
    let (own, psk) = (secret(&folder, "c"), secret(&folder, "c-tls"));
    assert!(psk.starts_with("NVMeTLSkey-1:01:"), "{psk}");
    let names = format!("--hostnqn {HOST} --subsysnqn {NQN} --keydata '{psk}'");
    let secrets = format!("--dhchap-secret '{own}' --tls");
    let expected = [
        of("c"),
        of("c-tls"),
        "on the host:".into(),
        format!("  nvme check-tls-key --insert {names}"),
        format!("  # With nvme-cli 3: nvme keys insert-tls-psk {names}"),
        line("tcp", 4421, &secrets),
        line("tcp", 4422, &secrets),
    ];
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
    // The daemon got the names and files of the keys, and no secret.
    let asked = daemon.asked();
    let text = format!("{asked:?}");
    assert!(!text.contains(&psk) && !text.contains(&own), "{text}");
    let psk_file = folder.join("c-tls");
    let added = json!({ "name": "c-tls", "path": psk_file });
    assert!(
        asked.contains(&("keyring_file_add_key".into(), added)),
        "{asked:?}"
    );

    let words = format!("{NQN} {HOST} --generate-key d --concat --mutual --json");
    let answer = allow(&daemon, &folder, &words).json();
    let (own, other) = (secret(&folder, "d"), secret(&folder, "d-ctrlr"));
    let secrets = format!("--dhchap-secret '{own}' --dhchap-ctrl-secret '{other}' --concat");
    let expected = json!({
        "files": [folder.join("d"), folder.join("d-ctrlr")],
        "commands": [line("tcp", 4421, &secrets).trim_start()],
        "keyring_commands": [],
    });
    assert_eq!(answer, expected);

    // The text of a key that exists is not known here.
    let words = format!("{NQN} {HOST} --generate-key e --psk p");
    let printed = allow(&daemon, &folder, &words).printed();
    assert!(printed.contains("--keydata 'TEXT-OF-KEY-p'"), "{printed}");
    assert!(printed.contains(" --tls\n"), "{printed}");
    // Version 0 has no place for longer names.
    let long = format!("{HOST}{}", "x".repeat(190));
    let printed = allow(
        &daemon,
        &folder,
        &format!("{NQN} {long} --generate-key f --tls"),
    );
    assert!(
        printed
            .printed()
            .contains("--insert --identity 1 --hostnqn")
    );

    for (words, advice) in [
        ("--generate-key g", "no listener that serves this host"),
        (
            "--generate-key h --tls",
            "no TCP listener with TLS that serves this host",
        ),
    ] {
        let printed = allow(&daemon, &folder, &format!("bare {HOST} {words}")).printed();
        assert!(printed.contains(advice), "{printed}");
    }
}

/// Goal: with `--out`, the secrets are in a new file that only its owner can read, and not on the
/// terminal.
#[test]
fn secrets_go_to_a_new_file() {
    let daemon = daemon();
    let place = tempfile::tempdir().unwrap();
    let (folder, out) = (place.path(), place.path().join("host1.sh"));
    let words = |key: &str, more: &str| {
        let out = out.display();
        format!("{NQN} {HOST} --generate-key {key} --tls --out {out} {more}")
    };
    let printed = allow(&daemon, folder, &words("a", "")).printed();
    let (own, psk) = (secret(folder, "a"), secret(folder, "a-tls"));
    assert!(
        !printed.contains(&own) && !printed.contains(&psk),
        "{printed}"
    );
    let expected = format!("on the host: the commands in {}", out.display());
    assert!(printed.contains(&expected), "{printed}");
    let written = secret(folder, "host1.sh");
    assert!(
        written.contains(&own) && written.contains(&psk),
        "{written}"
    );
    assert_eq!(written.lines().count(), 4, "{written}");

    // A file that exists stays, and nothing is done.
    daemon.asked();
    let refused = allow(&daemon, folder, &words("b", "")).failed(1);
    assert!(refused.contains("host1.sh: File exists"), "{refused}");
    assert_eq!(secret(folder, "host1.sh"), written);
    let asked = daemon.asked();
    assert!(
        asked
            .iter()
            .all(|(method, _)| method.contains("get_listeners")),
        "{asked:?}"
    );
    assert!(!folder.join("b").exists());

    std::fs::remove_file(&out).unwrap();
    let answer = allow(&daemon, folder, &words("c", "--json")).json();
    let files = [folder.join("c"), folder.join("c-tls")];
    assert_eq!(answer, json!({ "files": files, "out": out }));
}

/// Goal: a host that is refused leaves no key, no file and no secret behind.
#[test]
fn a_refused_host_leaves_nothing_behind() {
    let daemon = daemon();
    let place = tempfile::tempdir().unwrap();
    let (folder, out) = (place.path().join("keys"), place.path().join("out"));
    let more = format!("--generate-key k --tls --mutual --out {}", out.display());
    let refused = allow(&daemon, &folder, &format!("{NQN} refused {more}")).failed(4);
    assert!(refused.contains("File exists"), "{refused}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    assert!(!out.exists());
    let asked = daemon.asked();
    let removed = asked
        .iter()
        .filter(|(method, _)| method == "keyring_file_remove_key");
    let removed: Vec<_> = removed.map(|(_, params)| params["name"].clone()).collect();
    assert_eq!(removed, ["k", "k-ctrlr", "k-tls"]);
    // A key file that exists is another key's: it stays, and the key that was made before goes.
    std::fs::write(folder.join("k-tls"), "mine").unwrap();
    let refused = allow(&daemon, &folder, &format!("{NQN} {HOST} {more}")).failed(1);
    assert!(refused.contains("k-tls: File exists"), "{refused}");
    assert_eq!(std::fs::read(folder.join("k-tls")).unwrap(), b"mine");
    assert!(!folder.join("k").exists() && !out.exists());
    let unknown = format!("nqn.none {HOST} --generate-key z");
    allow(&daemon, &folder, &unknown).failed(4);
    assert!(!folder.join("z").exists());
}
