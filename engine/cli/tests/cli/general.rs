//! Tests of the common behaviour of commands: exit codes, errors, completions; and of the commands
//! that do not call the daemon.

use serde_json::json;

use super::fake::{Fake, nacre};

/// Goal: a failure is one line with its subject, cause and remedy, and has an exit code of its own.
#[test]
fn failures_have_their_codes() {
    let nowhere = tempfile::tempdir().unwrap();
    let socket = nowhere.path().join("no.sock");
    for words in ["bdev list", "subsystem list", "listener list", "host list"] {
        let error = nacre(words, &socket).failed(3);
        assert!(
            error.starts_with("error: no daemon answers at ") && error.contains("`nacre serve`"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
    assert_eq!(nacre("bdev create malloc", &socket).code, 2);
    assert_eq!(
        nacre("bdev create malloc --size 12parsecs", &socket).code,
        2
    );
    assert_eq!(nacre("bdev", &socket).code, 2);
    let error = nacre(
        "perf tcp://127.0.0.1:1/nqn.2026-01.io.nacre:v --size 8GiB",
        &socket,
    );
    assert_eq!(error.code, 2, "{error:?}");

    let refusing = Fake::play(|_, _| {
        let data = json!({ "field": "name", "cause": "there is no bdev \"x\"", "remedy": "bdev_get_bdevs lists them" });
        Err(json!({ "code": -19, "message": "No such device", "data": data }))
    });
    assert_eq!(
        refusing.nacre("bdev show x").failed(4),
        "error: name: there is no bdev \"x\"; `nacre bdev list` lists them"
    );
}

/// Goal: the usage line of an error lists the arguments that are missing, and no option
/// that the environment has set.
#[test]
fn a_usage_line_lists_only_what_is_missing() {
    let socket = std::path::Path::new("/nonexistent/rpc.sock");
    let refusal = nacre("bdev create file", socket);
    assert_eq!(refusal.code, 2, "{refusal:?}");
    let help = nacre("bdev create file --help", socket).printed();
    let usage = |text: &str| {
        text.lines()
            .find(|line| line.starts_with("Usage: "))
            .map(str::to_owned)
    };
    assert!(usage(&help).is_some(), "{help}");
    assert_eq!(usage(&refusal.err), usage(&help), "{refusal:?}");
}

/// Goal: a command waits for a daemon that starts, and not for one that needs framework_start_init.
/// Method: play both, and list the calls.
#[test]
fn a_daemon_that_starts_is_waited_for() {
    let started = std::sync::atomic::AtomicBool::new(false);
    let starting = Fake::play(move |method, _| {
        use std::sync::atomic::Ordering::SeqCst;
        match method {
            "framework_wait_init" => {
                started.store(true, SeqCst);
                Ok(json!(true))
            }
            _ if started.load(SeqCst) => Ok(json!([])),
            _ => {
                let data = json!({ "cause": "the daemon is starting" });
                Err(
                    json!({ "code": -1, "message": "Method may only be called after", "data": data }),
                )
            }
        }
    });
    starting.nacre("bdev list").printed();
    let asked = starting.asked();
    let methods: Vec<&str> = asked.iter().map(|(method, _)| method.as_str()).collect();
    assert_eq!(
        methods,
        ["bdev_get_bdevs", "framework_wait_init", "bdev_get_bdevs"]
    );
    let paused =
        Fake::play(|_, _| Err(json!({ "code": -1, "message": "Method may only be called after" })));
    paused.nacre("bdev list").failed(4);
    assert_eq!(paused.asked().len(), 1);
}

#[test]
fn completions_know_every_command() {
    let nowhere = std::path::Path::new("/nonexistent");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = nacre(&format!("completions {shell}"), nowhere).printed();
        for word in [
            "add-namespace",
            "connections",
            "allow-any",
            "hugepages",
            "reserve",
            "iostat",
            "passthru",
            "inject",
        ] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

/// Goal: both forms of the output list the same pools, on any machine.
#[test]
fn hugepages_are_shown() {
    let nowhere = std::path::Path::new("/nonexistent");
    let pools = nacre("hugepages show --json", nowhere).json();
    let table = nacre("hugepages show", nowhere).printed();
    let lines = table
        .lines()
        .skip(1)
        .filter(|line| !line.starts_with("no huge pages"))
        .count();
    assert_eq!(lines, pools.as_array().unwrap().len());
    let none = pools
        .as_array()
        .unwrap()
        .iter()
        .all(|pool| pool["available"] == 0);
    assert_eq!(none, table.contains("nacre hugepages reserve"));
    // Pages of 3 MiB are on no machine; the answer says which are.
    let error = nacre("hugepages reserve 3MiB 1", nowhere).failed(1);
    assert!(
        error.starts_with("error: this kernel has no 3 MiB pages"),
        "{error}"
    );
    let error = nacre("hugepages reserve 2MiB 1 --node 4000", nowhere).failed(1);
    assert!(error.contains("no NUMA node 4000"), "{error}");
}

/// Goal: a sealed key whose text cannot be written is removed, and the error tells whether the
/// daemon still has it.
#[test]
fn the_text_of_a_sealed_key_cannot_be_written() {
    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    for (is_removed, expected) in [
        (true, "key web1 was created and then deleted"),
        (false, "key web1 exists in the daemon, but its text is lost"),
    ] {
        let daemon = Fake::play(move |method, _| match method {
            "key_generate" => Ok(json!({ "name": "web1", "text": TEXT })),
            "keyring_file_remove_key" if is_removed => Ok(json!(true)),
            _ => Err(json!({ "code": -5, "message": "Input/output error" })),
        });
        let failed = daemon.nacre("key generate web1 --sealed --out /dev/null/web1");
        assert_eq!(failed.code, 1, "{failed:?}");
        assert!(failed.err.contains(expected), "{failed:?}");
        assert!(
            failed.err.contains("/dev/null/web1: Not a directory"),
            "{failed:?}"
        );
        assert!(!format!("{failed:?}").contains("AAECAwQF"));
    }
}
