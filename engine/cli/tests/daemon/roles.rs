//! Goal: each user of the machine may call the methods of its role, and no others. Method: the real
//! daemon, and threads of this process with other user ids, which Linux has per thread.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nacre_engine_rpc::client::ClientError;
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::*;

const VIEWER: u32 = 4003;
const OPERATOR: u32 = 4004;
const STRANGER: u32 = 4005;
const OPERATORS: u32 = 4242;

/// Runs `work` in a thread with this user and these groups.
fn as_user<T: Send + 'static>(
    uid: u32,
    groups: &[u32],
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    let thread = std::thread::spawn(move || {
        let (gid, uid) = (Gid::from_raw(uid), Uid::from_raw(uid));
        set_thread_groups(&groups).unwrap();
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
        work()
    });
    thread.join().unwrap()
}

/// A connection of another user. It keeps the identity of the time of connect.
fn client_of(socket: PathBuf, uid: u32, groups: &[u32]) -> Client {
    as_user(uid, groups, move || {
        Client::connect(&socket, Duration::from_secs(30)).unwrap()
    })
}

fn refusal(outcome: Result<Value, ClientError>) -> (i32, String) {
    match outcome.unwrap_err() {
        ClientError::Refused { error, .. } => (error.code, error.to_string()),
        other => panic!("{other}"),
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn is_skipped(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: {test}: needs root");
    }
    !is_root
}

/// A place that other users may enter, with a configuration of roles.
fn place_with(roles: &str) -> (Place, PathBuf) {
    let place = Place::new();
    let all = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(place.dir.path(), all).unwrap();
    let file = place.path("nacre.toml");
    std::fs::write(&file, roles).unwrap();
    (place, file)
}

const ROLES: &str = "[rpc.access]\noperator = [\"gid:4242\"]\nviewer = [\"uid:4003\"]\n";

#[test]
fn each_role_has_its_methods() {
    if is_skipped("each_role_has_its_methods") {
        return;
    }
    let (place, file) = place_with(ROLES);
    let (daemon, mut root) = place.serve(&["-c", file.to_str().unwrap()]).ready();
    let socket = place.socket();
    assert_eq!(mode(&socket), 0o666);
    let mut viewer = client_of(socket.clone(), VIEWER, &[]);
    let mut operator = client_of(socket.clone(), OPERATOR, &[7, OPERATORS]);
    let disk = json!({ "name": "a", "num_blocks": 64, "block_size": 512 });

    viewer.call_by_name("bdev_get_bdevs", Value::Null).unwrap();
    let level = json!({ "level": "NOTICE" });
    let (code, text) = refusal(viewer.call_by_name("log_set_level", level.clone()));
    assert_eq!(code, -13);
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    let who = format!(
        "user 4003 ({}, process {})",
        comm.trim(),
        std::process::id()
    );
    assert!(
        text.contains(&format!("class operate, and {who} has the role viewer")),
        "{text}"
    );
    assert!(
        text.contains("operator = [\"gid:4242\", \"uid:4003\"]"),
        "{text}"
    );

    operator.call_by_name("log_set_level", level).unwrap();
    let (code, text) = refusal(operator.call_by_name("bdev_malloc_create", disk.clone()));
    assert_eq!(code, -13);
    assert!(text.contains("admin = [\"uid:0\", \"uid:4004\"]"), "{text}");
    root.call_by_name("bdev_malloc_create", disk).unwrap();

    let mut stranger = client_of(socket.clone(), STRANGER, &[7]);
    let (code, text) = refusal(stranger.call_by_name("spdk_get_version", Value::Null));
    assert_eq!(code, -13);
    assert!(
        text.contains("user 4005") && text.contains("viewer = [\"uid:4003\", \"uid:4005\"]"),
        "{text}"
    );

    // What may cost data is for administrators, whatever the class of the method.
    for (method, params) in [
        ("volume_thaw", json!({ "name": "v", "force": "v" })),
        (
            "volume_offline_replica",
            json!({ "name": "v", "replica": "r", "force": "v" }),
        ),
        ("bdev_uring_rescan", json!({ "name": "d", "force": true })),
    ] {
        let (code, text) = refusal(operator.call_by_name(method, params));
        assert_eq!(code, -13, "{method}: {text}");
        assert!(text.contains("class admin"), "{text}");
    }
    let peer = json!({ "peer": "127.0.0.1" });
    let (code, text) = refusal(viewer.call_by_name("doctor_run", peer));
    assert_eq!(code, -13, "{text}");

    // The audit log has the refused call and its user.
    let audit = place.client(&["audit", "--refused", "--json"]);
    let calls: Value = serde_json::from_slice(&audit.stdout).unwrap();
    let of = |n: usize| (calls[n]["uid"].clone(), calls[n]["method"].clone());
    assert_eq!(of(0), (json!(4003), json!("log_set_level")));
    assert_eq!(of(1), (json!(4004), json!("bdev_malloc_create")));
    let table = text_of(place.client(&["audit", "--method", "bdev_malloc_create"]));
    assert!(
        table.contains("refused") && table.contains("done"),
        "{table}"
    );

    // New rules count for connected clients, too.
    std::fs::write(&file, ROLES.replace("viewer = [\"uid:4003\"]\n", "")).unwrap();
    daemon.signal("HUP");
    said(&daemon, "applied: rpc.access.viewer");
    let (code, _) = refusal(viewer.call_by_name("bdev_get_bdevs", Value::Null));
    assert_eq!(code, -13);
    operator
        .call_by_name("bdev_get_bdevs", Value::Null)
        .unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while mode(&socket) != 0o660 {
        assert!(Instant::now() < until, "{:o}", mode(&socket));
        std::thread::sleep(Duration::from_millis(10));
    }
    let group = std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(&socket).unwrap());
    assert_eq!(group, OPERATORS);
    // Now the file system refuses others.
    let denied = as_user(STRANGER, &[], move || {
        UnixStream::connect(socket).unwrap_err()
    });
    assert_eq!(denied.kind(), std::io::ErrorKind::PermissionDenied);
}

fn text_of(output: Output) -> String {
    text(&output.stdout)
}

/// Goal: `ssh -L` gives a remote user the role of its account on this machine. Method: a relay that
/// runs as that account, as sshd does for each login.
#[test]
fn a_forwarded_socket_has_the_role_of_the_account() {
    if is_skipped("a_forwarded_socket_has_the_role_of_the_account") {
        return;
    }
    let (place, file) = place_with(ROLES);
    let (_daemon, _root) = place.serve(&["-c", file.to_str().unwrap()]).ready();
    let far = place.path("far.sock");
    let listener = UnixListener::bind(&far).unwrap();
    let socket = place.socket();
    std::thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let socket = socket.clone();
            let daemon = as_user(OPERATOR, &[OPERATORS], move || UnixStream::connect(socket));
            relay(near, daemon.unwrap());
        }
    });
    let mut client = Client::connect(&far, Duration::from_secs(30)).unwrap();
    client.call_by_name("state_retry", Value::Null).unwrap();
    let disk = json!({ "name": "a", "num_blocks": 64, "block_size": 512 });
    let (code, text) = refusal(client.call_by_name("bdev_malloc_create", disk));
    assert_eq!(code, -13);
    assert!(text.contains("has the role operator"), "{text}");
}

fn relay(near: UnixStream, far: UnixStream) {
    let copy = |mut from: UnixStream, mut to: UnixStream| {
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = from.read(&mut bytes) {
                if n == 0 || to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
    };
    copy(near.try_clone().unwrap(), far.try_clone().unwrap());
    copy(far, near);
}

/// Goal: without further users the socket is private as before, and a name that the machine does
/// not know gives no user a role.
#[test]
fn without_users_the_socket_is_private() {
    let (place, file) = place_with("[rpc.access]\noperator = [\"group:no-such-group\"]\n");
    let (daemon, _client) = place.serve(&["-c", file.to_str().unwrap()]).ready();
    assert_eq!(mode(&place.socket()), 0o600);
    let log = daemon.log();
    assert!(
        log.contains("group:no-such-group: this machine has no such name"),
        "{log}"
    );
}
