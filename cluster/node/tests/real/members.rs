//! Members of an etcd cluster: processes on loopback, with their data in a temporary folder.

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nacre_cluster_etcd::Endpoints;
use tempfile::TempDir;

/// The program: `NACRE_TEST_ETCD` names it, or it is installed. `None`, said aloud: there is none.
pub(crate) fn program(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("NACRE_TEST_ETCD").map(PathBuf::from);
    let found = named.or_else(|| find("etcd"));
    if found.is_none() {
        // The harness captures only the print macros.
        let _ = writeln!(
            std::io::stderr().lock(),
            "SKIPPED: {test}: no etcd (apt-get install etcd-server, or name one in NACRE_TEST_ETCD)"
        );
    }
    found
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    places.find(|place| place.is_file())
}

pub(crate) struct Members {
    program: PathBuf,
    dir: TempDir,
    /// Client port, peer port.
    ports: Vec<(u16, u16)>,
    processes: Vec<Option<Child>>,
    arguments: Vec<String>,
}

impl Members {
    /// Members that [`Members::run`] starts.
    pub(crate) fn new(program: PathBuf, count: usize, arguments: &[&str]) -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let listeners: Vec<_> = (0..count).map(|_| (bind(), bind())).collect();
        let port = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        Self {
            program,
            dir: tempfile::tempdir().expect("a folder"),
            ports: listeners.iter().map(|(a, b)| (port(a), port(b))).collect(),
            processes: (0..count).map(|_| None).collect(),
            arguments: arguments.iter().map(|a| (*a).to_owned()).collect(),
        }
    }

    /// Starts all members that do not run, with the data that they have.
    pub(crate) fn run(&mut self) {
        let peer = |index: usize| format!("http://127.0.0.1:{}", self.ports[index].1);
        let all: Vec<String> = (0..self.ports.len())
            .map(|index| format!("m{index}={}", peer(index)))
            .collect();
        for index in 0..self.ports.len() {
            if self.processes[index].is_some() {
                continue;
            }
            let client = format!("http://127.0.0.1:{}", self.ports[index].0);
            let log = std::fs::File::create(self.dir.path().join(format!("m{index}.log")));
            let child = Command::new(&self.program)
                .args(["--name", &format!("m{index}"), "--data-dir"])
                .arg(self.dir.path().join(format!("m{index}")))
                .args(["--listen-client-urls", &client])
                .args(["--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer(index)])
                .args(["--initial-advertise-peer-urls", &peer(index)])
                .args(["--initial-cluster", &all.join(",")])
                .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
                .args(["--logger", "zap"])
                .args(&self.arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log.expect("a log"))
                .spawn()
                .expect("etcd starts");
            self.processes[index] = Some(child);
        }
    }

    pub(crate) fn endpoints(&self) -> Endpoints {
        let url = |(client, _): &(u16, u16)| format!("http://127.0.0.1:{client}");
        Endpoints {
            urls: self.ports.iter().map(url).collect(),
            tls: None,
            credentials: None,
            deadline: Duration::from_secs(8),
        }
    }

    /// As `kill -9`.
    pub(crate) fn kill(&mut self, index: usize) {
        if let Some(mut child) = self.processes[index].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|index| self.kill(index));
    }
}
