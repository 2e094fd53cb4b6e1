//! Goal: the daemon starts, refuses invalid settings, survives kills and restarts, and stops as
//! documented. Method: the real program, with its own socket and data directory.

mod bench;
mod pools;
mod roles;
mod sandbox;
mod spdk;
mod tls;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nacre_engine_rpc::client::Client;
use nacre_random_ports::local_port;
use serde_json::{Value, json};

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("nacre.sock")
    }

    /// A command that sees nothing of this machine's or user's configuration.
    fn nacre(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nacre"));
        command
            .env_clear()
            .env("HOME", self.dir.path())
            .env("PATH", "/usr/bin:/bin");
        command
    }

    fn serve(&self, args: &[&str]) -> Daemon {
        self.serve_with(args, &[])
    }

    fn serve_with(&self, args: &[&str], environment: &[(&str, &str)]) -> Daemon {
        let log = std::fs::File::create(self.path("log")).unwrap();
        let mut command = self.nacre();
        command
            .arg("serve")
            .arg("-r")
            .arg(self.socket())
            .arg("--data-dir")
            .arg(self.path("data"));
        command
            .args(["--cores", "auto:1", "--mem-size", "16"])
            .args(args)
            .envs(environment.iter().copied());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Daemon {
            child: command.spawn().unwrap(),
            socket: self.socket(),
            log: self.path("log"),
        }
    }

    fn client(&self, args: &[&str]) -> Output {
        let mut command = self.nacre();
        command.args(args).arg("-r").arg(self.socket());
        command.output().unwrap()
    }
}

struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    /// Connects as soon as the daemon answers, and waits until it is initialized.
    fn ready(self) -> (Self, Client) {
        let mut daemon = self;
        let mut client = daemon.connect();
        client
            .call_by_name("framework_wait_init", Value::Null)
            .unwrap_or_else(|e| panic!("{e}\n{}", daemon.log()));
        (daemon, client)
    }

    fn connect(&mut self) -> Client {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            match Client::connect(&self.socket, Duration::from_secs(30)) {
                Ok(client) => return client,
                Err(error) if Instant::now() > until => panic!("{error}\n{}", self.log()),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args(["-s", name, &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    fn ended(mut self) -> i32 {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(
                Instant::now() < until,
                "the daemon does not end\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_starts_answers_refuses_a_second_and_stops_cleanly() {
    let place = Place::new();
    let pid_file = place.path("pid");
    let (daemon, mut client) = place
        .serve(&[
            "--pid-file",
            pid_file.to_str().unwrap(),
            "--metrics-listen",
            "127.0.0.1:0",
        ])
        .ready();
    assert_eq!(
        std::fs::metadata(place.socket())
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    assert_eq!(
        std::fs::read_to_string(&pid_file).unwrap().trim(),
        daemon.child.id().to_string()
    );
    assert_eq!(
        client.call_by_name("bdev_get_bdevs", Value::Null).unwrap(),
        json!([])
    );

    let second = place
        .nacre()
        .args(["serve", "--data-dir", "none", "-r"])
        .arg(place.socket())
        .output()
        .unwrap();
    let said = text(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("pid {}", daemon.child.id())),
        "{said}"
    );
    let other = place
        .nacre()
        .args(["serve", "-r"])
        .arg(place.path("other.sock"))
        .arg("--data-dir")
        .arg(place.path("data"))
        .arg("--pid-file")
        .arg(&pid_file)
        .output()
        .unwrap();
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    assert_eq!(
        pid.trim(),
        daemon.child.id().to_string(),
        "it is the first's"
    );
    assert!(
        text(&other.stderr).contains("another daemon (pid"),
        "{}",
        text(&other.stderr)
    );

    daemon.signal("TERM");
    assert_eq!(daemon.ended(), 0);
    assert!(!place.socket().exists() && !pid_file.exists());

    let (daemon, mut client) = place.serve(&[]).ready();
    assert_eq!(
        client
            .call_by_name("spdk_kill_instance", json!({ "sig_name": "SIGINT" }))
            .unwrap(),
        true
    );
    assert_eq!(daemon.ended(), 0);
}

/// Goal: systemd is notified when the daemon serves, regularly while it is alive, and when it
/// stops.
/// Method: its socket, and the time that it gives for a sign of life.
#[test]
fn systemd_is_notified() {
    let place = Place::new();
    let path = place.path("notify");
    let systemd = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    systemd
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let wait_for = |wanted: &str| {
        let until = Instant::now() + Duration::from_secs(60);
        let mut seen = Vec::new();
        loop {
            assert!(Instant::now() < until, "no {wanted}, but {seen:?}");
            let mut message = [0; 512];
            let length = systemd.recv(&mut message).unwrap_or_else(|error| {
                panic!("{error} while waiting for {wanted}; so far: {seen:?}")
            });
            let message = text(&message[..length]);
            if message.lines().any(|line| line == wanted) {
                return;
            }
            seen.push(message);
        }
    };
    let environment = [
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("WATCHDOG_USEC", "200000"),
    ];
    let (daemon, mut client) = {
        let mut daemon = place.serve_with(&["--wait-for-rpc"], &environment);
        let client = daemon.connect();
        (daemon, client)
    };
    systemd.set_nonblocking(true).unwrap();
    let early = systemd.recv(&mut [0; 512]);
    assert!(early.is_err(), "it does not serve before it is started");
    systemd.set_nonblocking(false).unwrap();
    client
        .call_by_name("framework_start_init", Value::Null)
        .unwrap();
    wait_for("READY=1");
    wait_for("WATCHDOG=1");
    wait_for("WATCHDOG=1");
    daemon.signal("TERM");
    wait_for("STOPPING=1");
    assert_eq!(daemon.ended(), 0);
}

#[test]
fn acknowledged_changes_survive_kill_9() {
    let place = Place::new();
    let mut acknowledged: Vec<Value> = Vec::new();
    for round in 0..4 {
        let (daemon, mut client) = place.serve(&[]).ready();
        let found = client.call_by_name("bdev_get_bdevs", Value::Null).unwrap();
        for before in &acknowledged {
            let same = found
                .as_array()
                .unwrap()
                .iter()
                .find(|b| b["name"] == before["name"]);
            assert_eq!(
                same.map(|b| &b["uuid"]),
                Some(&before["uuid"]),
                "round {round}: {before}"
            );
        }
        // Killed while calls are under way: whatever was answered must be there afterwards.
        let pid = daemon.child.id();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30 + 17 * round));
            assert!(
                Command::new("kill")
                    .args(["-9", &pid.to_string()])
                    .status()
                    .unwrap()
                    .success()
            );
        });
        for n in 0.. {
            let name = format!("r{round}-{n}");
            let params = json!({ "name": name, "num_blocks": 64, "block_size": 512 });
            if client.call_by_name("bdev_null_create", params).is_err() {
                break;
            }
            match client.call_by_name("bdev_get_bdevs", json!({ "name": name })) {
                Ok(made) => acknowledged.push(made[0].clone()),
                Err(_) => break,
            }
            assert!(n < 100_000, "it was never killed");
        }
        killer.join().unwrap();
    }
    assert!(
        acknowledged.len() > 4,
        "only {} devices were made",
        acknowledged.len()
    );
}

/// A daemon out of descriptors cannot see its interfaces; they are not gone for that, and what
/// listens on them stays.
#[test]
fn listeners_stay_while_interfaces_cannot_be_read() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let place = Place::new();
    let port = local_port();
    let file = place.path("nacre.toml");
    let nqn = "nqn.2026-01.org.example:a";
    let text = format!(
        "[[nvmf.listener]]\niface = [\"name:lo\"]\nport = {port}\n[[nvmf.subsystem]]\nnqn = \"{nqn}\"\nallow_any_host = true\n"
    );
    std::fs::write(&file, text).unwrap();
    let (daemon, mut client) = place.serve(&["-c", file.to_str().unwrap()]).ready();
    let mut listeners = || {
        let params = json!({ "nqn": nqn });
        let answer = client
            .call_by_name("nvmf_subsystem_get_listeners", params)
            .unwrap();
        answer.as_array().unwrap().len()
    };
    let before = listeners();
    assert!(before > 0);

    let pid = Pid::from_child(&daemon.child);
    let none = Rlimit {
        current: Some(1),
        maximum: None,
    };
    let usual = prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit {
            maximum: hard_limit(),
            ..none
        },
    )
    .unwrap();
    assert_eq!(usual.current, usual.maximum, "raised at start");
    said(&daemon, "cannot be looked at");
    assert_eq!(listeners(), before);
    std::net::TcpListener::bind(("127.0.0.1", port)).expect_err("it listens");

    prlimit(Some(pid), Resource::Nofile, usual).unwrap();
    said(&daemon, "can be looked at again");
    assert_eq!(listeners(), before);
    let log = daemon.log();
    assert_eq!(log.matches("cannot be looked at").count(), 1, "{log}");
}

fn hard_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum
}

/// Waits for a line of the log.
fn said(daemon: &Daemon, what: &str) {
    let until = Instant::now() + Duration::from_secs(30);
    while !daemon.log().contains(what) {
        assert!(Instant::now() < until, "not said: {what}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A start by RPC that fails ends the daemon as one that failed, for whoever looks after it.
#[test]
fn a_start_that_fails_ends_the_daemon_as_failed() {
    let place = Place::new();
    let mut daemon = place.serve(&["--wait-for-rpc", "--metrics-listen", "127.0.0.1:0"]);
    let mut client = daemon.connect();
    // More than any machine has.
    client
        .call_by_name(
            "iobuf_set_options",
            json!({ "large_pool_count": 1 << 24, "large_bufsize": 16 << 20 }),
        )
        .unwrap();
    let refused = client.call_by_name("framework_start_init", Value::Null);
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("framework_initialization failed"),
        "{refused}"
    );
    let log = daemon.log.clone();
    assert_eq!(daemon.ended(), 1);
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.contains("error: framework_initialization failed"),
        "{log}"
    );
}

#[test]
fn a_bad_configuration_is_refused_with_its_place() {
    let place = Place::new();
    let file = place.path("nacre.toml");
    std::fs::write(&file, "[reactor]\ncoers = \"1\"\n").unwrap();
    for args in [["serve", "-c"], ["config", "check"]] {
        let output = place.nacre().args(args).arg(&file).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(
                "nacre.toml:2: unknown key \"reactor.coers\"; did you mean \"reactor.cores\"?"
            ),
            "{said}"
        );
    }
    let bad = place.path("bad.json");
    std::fs::write(&bad, r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_null_create","params":{"name":"n"}}]}]}"#).unwrap();
    let output = place
        .nacre()
        .args(["serve", "--data-dir", "none", "--cores", "auto:1", "-r"])
        .arg(place.socket())
        .arg("-c")
        .arg(&bad)
        .output()
        .unwrap();
    assert!(
        text(&output.stderr).contains("bdev_null_create"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(1));
    let shown = place
        .nacre()
        .args(["config", "show", "--json"])
        .env("NACRE_REACTOR_BUSY_POLL_US", "7")
        .output()
        .unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(
        (
            &shown["reactor.busy_poll_us"]["value"],
            &shown["reactor.busy_poll_us"]["origin"]
        ),
        (&json!(7), &json!("$NACRE_REACTOR_BUSY_POLL_US"))
    );
}

#[test]
fn the_command_line_commands_the_daemon() {
    let place = Place::new();
    let unreachable = place.client(&["rpc", "spdk_get_version"]);
    assert_eq!(
        unreachable.status.code(),
        Some(3),
        "{}",
        text(&unreachable.stderr)
    );
    assert_eq!(place.client(&["rpc", "x", "{"]).status.code(), Some(2));

    let (_daemon, _client) = place.serve(&[]).ready();
    let run = |args: &[&str]| {
        let output = place.client(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    };
    assert_eq!(
        run(&[
            "rpc",
            "bdev_malloc_create",
            "name=ram",
            "num_blocks=16384",
            "block_size=512"
        ]),
        "\"ram\"\n"
    );
    let refused = place.client(&["rpc", "bdev_malloc_delete", "name=nothing"]);
    assert_eq!(refused.status.code(), Some(4));
    assert!(
        text(&refused.stderr).contains("there is no bdev \"nothing\""),
        "{}",
        text(&refused.stderr)
    );
    assert!(run(&["state"]).contains("bdev/ram"));
    assert!(run(&["metrics"]).contains("nacre_bdev_size_bytes{bdev=\"ram\"}"));
    assert!(run(&["rpc", "bdev_get_bdevs", "name=ram"]).contains("Malloc disk"));

    for args in [
        &["hugepages", "show", "--json"][..],
        &["completions", "bash"],
        &["config", "sample"],
    ] {
        let output = place.nacre().args(args).output().unwrap();
        assert!(
            output.status.success() && !output.stdout.is_empty(),
            "{args:?}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn raw_bytes_on_the_socket_get_spdks_bytes_back() {
    let place = Place::new();
    let (_daemon, _client) = place.serve(&[]).ready();
    let golden = |request: &str| exchange(&place.socket(), request);
    insta::assert_snapshot!(golden(concat!(
        r#"{"jsonrpc":"2.0","method":"bdev_null_create","id":1,"params":{"name":"n","num_blocks":64,"block_size":512}}"#,
        r#"{"method":"bdev_null_create","id":"2","params":{"name":"n","num_blocks":64,"block_size":512}}"#,
        r#"{"method":"no_such_method","id":3}"#,
        r#"{"method":"bdev_null_delete","id":4,"params":{"nam":"n"}}"#,
        r#"{"method":"bdev_null_delete","id":5,"params":{"name":"n"}} [] {"id":6}"#,
    )));
    insta::assert_snapshot!(golden("{\"method\":}"));
}

/// Sends `request`, half-closes, and gives everything that comes back, sorted: answers may
/// overtake.
fn exchange(socket: &Path, request: &str) -> String {
    use std::io::Read;
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    let mut lines: Vec<&str> = answers.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}
