//! Tests of files at paths that the administrator gives: the daemon overwrites no foreign file and
//! does not confuse two files.

use nacre_tests::daemon::Place;
use serde_json::{Value, json};

/// Goal: a path of a foreign file is refused, and the file stays. Method: a text file in place of
/// the socket, of its lock and of the pid file, and the pid file of a running process.
#[test]
fn a_start_overwrites_no_file() {
    let place = Place::new();
    let notes = place.path("notes.txt");
    std::fs::write(&notes, "precious").expect("room");
    std::fs::write(place.path("Cargo.lock"), "version = 4").expect("room");
    let theirs = place.path("theirs.pid");
    std::fs::write(&theirs, format!("{}\n", std::process::id())).expect("room");
    let data = place.path("data");
    let refused = |socket: &str, pid_file: Option<&std::path::Path>| {
        let mut command = place.serve_command(&place.path(socket), &data);
        if let Some(path) = pid_file {
            command.arg("--pid-file").arg(path);
        }
        let output = command.output().expect("nacre runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        said
    };
    let said = refused("notes.txt", None);
    assert!(said.contains("is no socket"), "{said}");
    let said = refused("Cargo", None);
    assert!(said.contains("Cargo.lock"), "{said}");
    let said = refused("s", Some(&notes));
    assert!(said.contains("pid file"), "{said}");
    let said = refused("s", Some(&theirs));
    let us = format!("process {}", std::process::id());
    assert!(said.contains(&us), "{said}");
    for (path, text) in [
        (&notes, "precious"),
        (&place.path("Cargo.lock"), "version = 4"),
    ] {
        assert_eq!(std::fs::read_to_string(path).expect("it is there"), text);
    }
    assert!(!place.path("s").exists(), "the socket is removed again");
}

/// Goal: a relative path in a call leads to the same file after a restart in any other directory.
/// Method: two directories with a file of the same name.
#[test]
fn a_device_stays_on_its_file_from_any_directory() {
    let place = Place::new();
    for (name, fill) in [("x", b'x'), ("y", b'y')] {
        std::fs::create_dir(place.path(name)).expect("room");
        let image = place.path(name).join("disk.img");
        std::fs::write(image, vec![fill; 1 << 20]).expect("room");
    }
    let run = |directory: &str| {
        let mut command = place.serve_command(&place.socket(), &place.path("data"));
        command
            .current_dir(place.path(directory))
            .stderr(std::process::Stdio::null());
        place.started(command)
    };
    let mut daemon = run("x");
    daemon.call(
        "bdev_aio_create",
        json!({ "name": "d", "filename": "disk.img", "block_size": 512 }),
    );
    let list = |daemon: &mut nacre_tests::daemon::Daemon| -> Value {
        daemon.call("bdev_get_bdevs", json!({ "name": "d" }))[0].take()
    };
    let before = list(&mut daemon);
    daemon.stop();
    let mut daemon = run("y");
    let after = list(&mut daemon);
    assert_eq!(before["uuid"], after["uuid"]);
    let path = after.pointer("/driver_specific/aio/filename");
    let expected = place.path("x").canonicalize().expect("there");
    assert_eq!(
        path.and_then(Value::as_str),
        expected.join("disk.img").to_str()
    );
    daemon.stop();
}
