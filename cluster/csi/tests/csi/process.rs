//! `nacre csi` as a process: its socket, its end, and a second one.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::Nothing;
use nacre_cluster_csi::messages::identity::ProbeResponse;
use nacre_cluster_csi::messages::node::NodeGetInfoResponse;
use nacre_tests::daemon::{Place, nacre_binary};
use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;

use crate::client::{HOST, Orchestrator};

const PATIENCE: Duration = Duration::from_secs(60);

struct Driver(Child);

impl Driver {
    fn start(endpoint: &str, more: &[&str]) -> Self {
        let mut command = Command::new(nacre_binary());
        command.args(["csi", "--endpoint", endpoint]).args(more);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        Self(command.spawn().expect("nacre starts"))
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("our child");
    }

    /// Exit code and log.
    fn ended(&mut self) -> (Option<i32>, String) {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.0.try_wait().expect("our child") {
                break status;
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut log = String::new();
        let mut errors = self.0.stderr.take().expect("it is piped");
        errors.read_to_string(&mut log).expect("its log");
        (status.code(), log)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until_served(socket: &Path) -> Orchestrator {
    let end = Instant::now() + PATIENCE;
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < end, "it does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    Orchestrator::connect(socket)
}

/// Goal: only the owner can use the socket. A stale socket is replaced; a served one and another
/// file are refused. SIGTERM ends the process in order, also while an orchestrator is connected.
#[test]
fn the_socket_has_one_server_and_an_end() {
    let place = Place::new();
    let socket = place.path("csi.sock");
    let endpoint = format!("unix://{}", socket.display());
    let state = place.path("state");
    let state = state.to_str().expect("text");
    let more = ["--node", "--node-id", HOST, "--state-dir", state];
    let mut first = Driver::start(&endpoint, &more);
    let orchestrator = until_served(&socket);
    let mode = socket.metadata().expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let info: NodeGetInfoResponse = orchestrator
        .call("Node/NodeGetInfo", Nothing {})
        .expect("it");
    assert_eq!(info.node_id, HOST);
    orchestrator.refused(
        "Controller/ControllerGetCapabilities",
        Nothing {},
        Code::Unimplemented,
    );

    let (code, log) = Driver::start(&endpoint, &more).ended();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("serves this socket already"), "{log}");

    first.signal(Signal::KILL);
    first.ended();
    assert!(socket.exists(), "it is left");
    let mut second = Driver::start(&endpoint, &more);
    let orchestrator = until_served(&socket);
    second.signal(Signal::TERM);
    let (code, log) = second.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(!socket.exists());
    drop(orchestrator);

    std::fs::write(&socket, "data").expect("written");
    let (code, log) = Driver::start(&endpoint, &more).ended();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("a regular file and no socket"), "{log}");
    assert_eq!(std::fs::read(&socket).expect("it stays"), b"data");
    // "Plugins SHALL NOT create additional files or directories adjacent to the UNIX socket".
    let names = std::fs::read_dir(socket.parent().expect("a directory")).expect("a directory");
    let names = names.map(|entry| entry.expect("one").file_name());
    let mut names: Vec<_> = names.filter(|name| name != "state").collect();
    names.sort();
    assert_eq!(names, ["csi.sock"]);
}

/// Goal: a wrong option is a usage error (2), and a state directory that has failed is a failure
/// (1) that names the file.
#[test]
fn a_failed_state_directory_is_no_usage_error() {
    let place = Place::new();
    let endpoint = format!("unix://{}", place.path("csi.sock").display());
    let state = place.path("state");
    std::fs::create_dir(&state).expect("made");
    let text = state.to_str().expect("text");
    let ended = |id| {
        let more = ["--node", "--node-id", id, "--state-dir", text];
        Driver::start(&endpoint, &more).ended()
    };
    let (code, log) = ended("h");
    assert_eq!(code, Some(2), "{log}");
    let kept = state.join("host");
    std::fs::write(&kept, "").expect("written");
    let (code, log) = ended(HOST);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains(kept.to_str().expect("text")), "{log}");
    std::fs::remove_file(&kept).expect("removed");
    std::fs::create_dir(&kept).expect("made");
    let (code, log) = ended(HOST);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains(kept.to_str().expect("text")), "{log}");
}

/// Goal: a controller is ready once its daemon answers, in whatever order both start.
#[test]
fn a_controller_waits_for_its_daemon() {
    let place = Place::new();
    let socket = place.path("csi.sock");
    let endpoint = format!("unix://{}", socket.display());
    let daemon = place.socket();
    let daemon = daemon.to_str().expect("text");
    let _driver = Driver::start(&endpoint, &["--controller", "-r", daemon]);
    let orchestrator = until_served(&socket);
    let is_ready = || {
        let found: ProbeResponse = orchestrator.call("Identity/Probe", Nothing {}).expect("it");
        found.ready.map(|ready| ready.value)
    };
    assert_eq!(is_ready(), Some(false));
    orchestrator.refused("Node/NodeGetInfo", Nothing {}, Code::Unimplemented);
    let process = place.start();
    assert_eq!(is_ready(), Some(true));
    process.kill();
    assert_eq!(
        is_ready(),
        Some(true),
        "a restart of the driver would not help"
    );
}
