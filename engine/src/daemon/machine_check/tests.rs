//! Goal: the check reports exactly the entries that `nacre serve` would refuse on this machine.
//! Method: configuration files with one fault each, and files, sockets and ports of the tests' own.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;

use serde_json::json;
use uuid::Uuid;

use crate::config;
use crate::journal::seen_key;
use crate::store::{Change, RedbStore, StateStore};

/// The problems of a configuration, whose state, socket and log are in `dir` unless it says
/// otherwise.
fn problems(dir: &Path, toml: &str) -> Vec<String> {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut text = toml.replace("DIR", &dir.display().to_string());
    for (table, key, path) in [("data", "dir", at("data")), ("rpc", "socket", at("socket"))] {
        if !text.contains(&format!("[{table}]")) {
            text.push_str(&format!("\n[{table}]\n{key} = \"{path}\"\n"));
        }
    }
    let file = dir.join("nacre.toml");
    std::fs::write(&file, &text).unwrap();
    let loaded = config::load(Some(&file), [], &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
    super::check(&loaded)
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// The only problem.
#[track_caller]
fn problem(dir: &Path, toml: &str) -> String {
    let all = problems(dir, toml);
    assert_eq!(all.len(), 1, "{toml}: {all:#?}");
    all.into_iter().next().unwrap()
}

#[test]
fn hardware_that_is_not_here() {
    let dir = tempfile::tempdir().unwrap();
    for (toml, cause) in [
        ("[reactor]\ncores = \"0-1023\"", "reactor.cores: "),
        (
            "[memory]\nsize_mb = 16000000",
            "are more than this machine has",
        ),
        (
            "[replication]\niface = [\"name:eth99\"]",
            "no interface of this machine matches \"name:eth99\"",
        ),
        (
            "[rdma]\nrxe = [\"eth99\"]",
            "there is no interface \"eth99\"",
        ),
        (
            "[rdma]\ndevice = \"mlx5_9\"",
            "there is no RDMA device \"mlx5_9\"",
        ),
        (
            "[[nvmf.listener]]\nname = \"a\"\naddress = \"203.0.113.1\"",
            "203.0.113.1 is not an address of this machine",
        ),
        (
            "[nvmf]\nlisten = [\"tcp://203.0.113.1\"]",
            "203.0.113.1 is not an address of this machine",
        ),
        (
            "[metrics]\nlisten = \"203.0.113.1:9464\"",
            "203.0.113.1 is not an address of this machine",
        ),
    ] {
        let said = problem(dir.path(), toml);
        assert!(said.contains(cause), "{toml}: {said}");
    }
}

#[test]
fn paths_that_the_daemon_cannot_take() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("notes"), "precious").unwrap();
    for (toml, cause) in [
        (
            "[data]\ndir = \"DIR/notes\"",
            "notes is a regular file, not a directory",
        ),
        (
            "[data]\ndir = \"DIR/notes/a/b\"",
            "notes is a regular file, not a directory",
        ),
        (
            "[rpc]\nsocket = \"DIR/notes\"",
            "notes is a regular file, not a socket",
        ),
        (
            "[rpc]\nsocket = \"DIR/notes/socket\"",
            "notes is a regular file, not a directory",
        ),
        (
            "[log]\nfile = \"DIR\"",
            "is a directory, not a regular file",
        ),
        ("[log]\nfile = \"DIR/none/log\"", "there is no directory"),
        (
            "[[bdev]]\nname = \"a\"\npath = \"DIR/none\"",
            "there is no file",
        ),
        (
            "[[bdev]]\nname = \"a\"\npath = \"DIR/notes\"\nblock_size = 512",
            "notes",
        ),
    ] {
        let said = problem(dir.path(), toml);
        assert!(said.contains(cause), "{toml}: {said}");
    }
    let notes = std::fs::read_to_string(dir.path().join("notes")).unwrap();
    assert_eq!(notes, "precious");
    assert!(
        !dir.path().join("data").exists(),
        "the check creates nothing"
    );
}

#[test]
fn ports_and_devices_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = format!("[metrics]\nlisten = \"{}\"", other.local_addr().unwrap());
    let said = problem(dir.path(), &metrics);
    assert!(said.contains("another program listens on port"), "{said}");

    std::fs::write(dir.path().join("disk"), vec![0; 1 << 20]).unwrap();
    let bdev = "[[bdev]]\nname = \"a\"\npath = \"DIR/disk\"";
    let config = nacre_bdev_uring::Config::new("other", dir.path().join("disk"));
    let holder = nacre_bdev_uring::create(config).unwrap();
    let said = problem(dir.path(), bdev);
    assert!(said.contains("disk"), "{said}");

    // The running daemon of this configuration holds all that.
    let daemon = UnixListener::bind(dir.path().join("socket")).unwrap();
    assert_eq!(problems(dir.path(), &format!("{metrics}\n{bdev}")), [""; 0]);
    drop((daemon, holder));
    assert_eq!(problems(dir.path(), bdev), [""; 0]);
}

/// Goal: a file that is not the one of the state is reported before the start. Method: a state with
/// the record of another file at this path.
#[test]
fn another_file_under_a_known_identity() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let uuid = Uuid::from_u128(7);
    let bdev = format!("[[bdev]]\nname = \"a\"\npath = \"DIR/disk\"\nuuid = \"{uuid}\"");
    let remember = |identity: serde_json::Value| {
        let mut store = RedbStore::open(&dir.path().join("data")).unwrap();
        let seen = json!({ "path": path, "identity": identity });
        let change = Change::put(seen_key(uuid), "seen", seen);
        store.commit(&change).unwrap();
    };
    remember(json!({ "file": { "inode": 1, "born": [1, 1] } }));
    let said = problem(dir.path(), &bdev);
    assert!(said.contains("another file"), "{said}");

    let config = nacre_bdev_uring::Config::new("a", &path);
    let identity = nacre_bdev_uring::create(config).unwrap().identity().clone();
    remember(serde_json::to_value(identity).unwrap());
    assert_eq!(problems(dir.path(), &bdev), [""; 0]);
}
