//! A real etcd cluster for tests: its members are processes on loopback, with their data in a
//! temporary folder. All functions panic on errors, except that a missing program skips the test.

#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nacre_cluster_etcd::{Endpoints, Tls};
use nacre_random_ports::local_port;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Time limit of a request to etcd, in [`Members::endpoints`].
pub const DEADLINE: Duration = Duration::from_secs(8);

/// The program `etcd`, from `NACRE_TEST_ETCD` or the search path. If there is none, the output
/// names the skipped test, and the result is `None`.
pub fn program(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("NACRE_TEST_ETCD").map(PathBuf::from);
    let found = named.or_else(|| find("etcd"));
    if found.is_none() {
        skip(
            test,
            "no etcd (apt-get install etcd-server, or name one in NACRE_TEST_ETCD)",
        );
    }
    found
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    places.find(|place| place.is_file())
}

fn skip(test: &str, why: &str) {
    // The harness captures only the print macros.
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {why}");
}

/// A cluster of etcd members, each addressed by its index from 0. Dropping it kills them.
pub struct Members {
    program: PathBuf,
    dir: TempDir,
    /// Client port, peer port.
    ports: Vec<(u16, u16)>,
    processes: Vec<Option<Child>>,
    arguments: Vec<String>,
    scheme: &'static str,
    tls: Option<Tls>,
}

impl Members {
    /// Starts `count` members, without TLS. `arguments`: further options of each member.
    pub fn start(program: PathBuf, count: usize, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self::start_in(dir, program, count, arguments, None)
    }

    fn start_in(
        dir: TempDir,
        program: PathBuf,
        count: usize,
        arguments: &[&str],
        tls: Option<Tls>,
    ) -> Self {
        let mut members = Self {
            program,
            dir,
            ports: (0..count).map(|_| (local_port(), local_port())).collect(),
            processes: (0..count).map(|_| None).collect(),
            arguments: arguments.iter().map(|a| (*a).to_owned()).collect(),
            scheme: if tls.is_some() { "https" } else { "http" },
            tls,
        };
        members.run_all();
        members
    }

    /// Starts one member that requires client certificates. If `openssl` is missing, the output
    /// names the skipped test, and the result is `None`.
    pub fn start_with_tls(test: &str, program: PathBuf) -> Option<(Self, Certificates)> {
        let dir = tempfile::tempdir().expect("a folder");
        let Some(certificates) = Certificates::make(dir.path()) else {
            skip(test, "openssl is not installed (apt-get install openssl)");
            return None;
        };
        let path = |name: &str| dir.path().join(name).display().to_string();
        let (ca, cert, key) = (path("ca.crt"), path("server.crt"), path("server.key"));
        let arguments = [
            "--client-cert-auth",
            "--trusted-ca-file",
            &ca,
            "--cert-file",
            &cert,
            "--key-file",
            &key,
        ];
        let tls = certificates.tls("client");
        let members = Self::start_in(dir, program, 1, &arguments, Some(tls));
        Some((members, certificates))
    }

    /// Starts all members that were killed, with the data that they have.
    pub fn run_all(&mut self) {
        for index in 0..self.processes.len() {
            if self.processes[index].is_none() {
                self.run(index);
            }
        }
    }

    /// Starts the member, with the data that it has.
    pub fn run(&mut self, index: usize) {
        let peer = |index: usize| format!("http://127.0.0.1:{}", self.ports[index].1);
        let client = format!("{}://127.0.0.1:{}", self.scheme, self.ports[index].0);
        let all: Vec<String> = (0..self.ports.len())
            .map(|index| format!("m{index}={}", peer(index)))
            .collect();
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

    /// The client URLs of all members, with the TLS client `client` if the member requires one.
    pub fn endpoints(&self) -> Endpoints {
        let url = |(client, _): &(u16, u16)| format!("{}://127.0.0.1:{client}", self.scheme);
        Endpoints {
            urls: self.ports.iter().map(url).collect(),
            tls: self.tls.clone(),
            credentials: None,
            deadline: DEADLINE,
        }
    }

    /// The folder with the data of the members (`m0` and so on) and their logs (`m0.log`).
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Kills the member with SIGKILL, and waits for its end. It keeps its data.
    pub fn kill(&mut self, index: usize) {
        if let Some(mut child) = self.processes[index].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// All members lose their data, and start again as a new etcd at the same addresses.
    pub fn lose_all(&mut self) {
        for index in 0..self.processes.len() {
            self.kill(index);
            let data = self.dir.path().join(format!("m{index}"));
            std::fs::remove_dir_all(data).expect("removed");
        }
        self.run_all();
    }

    /// Stops the process of the member with SIGSTOP: its connections stay open, and it does not
    /// answer.
    pub fn stop(&self, index: usize) {
        self.signal(index, Signal::STOP);
    }

    /// Resumes a stopped member, with SIGCONT.
    pub fn go_on(&self, index: usize) {
        self.signal(index, Signal::CONT);
    }

    pub fn pid(&self, index: usize) -> u32 {
        self.processes[index].as_ref().expect("it runs").id()
    }

    fn signal(&self, index: usize, signal: Signal) {
        let child = self.processes[index].as_ref().expect("it runs");
        let pid = Pid::from_child(child);
        kill_process(pid, signal).expect("a signal");
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|index| self.kill(index));
    }
}

/// Sends `body` to `/v3/{path}` of etcd's JSON interface: our client has no methods of
/// administration. `url`: `http://` with host and port; `token`: empty without authentication.
/// Returns the HTTP response with its headers. Panics unless its status is 200.
pub fn administer(url: &str, path: &str, token: &str, body: &str) -> String {
    let host = url.strip_prefix("http://").expect("a URL");
    let mut stream = TcpStream::connect(host).expect("connected");
    let token = match token {
        "" => String::new(),
        token => format!("Authorization: {token}\r\n"),
    };
    write!(
        stream,
        "POST /v3/{path} HTTP/1.1\r\nHost: {host}\r\n{token}\
         Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let is_good = answer.starts_with("HTTP/1.1 200");
    assert!(is_good, "{path}: {answer}");
    answer
}

/// Two certificate authorities. One signed the certificates of the server and of a client, the
/// other that of another client.
pub struct Certificates {
    ca: Vec<u8>,
    other_ca: Vec<u8>,
    client: (Vec<u8>, Vec<u8>),
    other: (Vec<u8>, Vec<u8>),
}

impl Certificates {
    fn make(dir: &Path) -> Option<Self> {
        find("openssl")?;
        for name in ["ca", "other-ca"] {
            let subject = format!("/CN={name}");
            let (key, cert) = (format!("{name}.key"), format!("{name}.crt"));
            openssl(
                dir,
                &[
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                    "-days",
                    "2",
                    "-subj",
                    &subject,
                    "-keyout",
                    &key,
                    "-out",
                    &cert,
                ],
            );
        }
        let usage = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n";
        std::fs::write(dir.join("usage"), usage).expect("written");
        for (name, ca) in [("server", "ca"), ("client", "ca"), ("other", "other-ca")] {
            let subject = format!("/CN={name}");
            let [key, request, cert] = ["key", "csr", "crt"].map(|end| format!("{name}.{end}"));
            let (ca_cert, ca_key) = (format!("{ca}.crt"), format!("{ca}.key"));
            openssl(
                dir,
                &[
                    "req",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                    "-subj",
                    &subject,
                    "-keyout",
                    &key,
                    "-out",
                    &request,
                ],
            );
            openssl(
                dir,
                &[
                    "x509",
                    "-req",
                    "-days",
                    "2",
                    "-in",
                    &request,
                    "-CA",
                    &ca_cert,
                    "-CAkey",
                    &ca_key,
                    "-CAcreateserial",
                    "-extfile",
                    "usage",
                    "-out",
                    &cert,
                ],
            );
        }
        let read = |name: &str| std::fs::read(dir.join(name)).expect("a file of openssl");
        let pair = |name: &str| (read(&format!("{name}.crt")), read(&format!("{name}.key")));
        Some(Self {
            ca: read("ca.crt"),
            other_ca: read("other-ca.crt"),
            client: pair("client"),
            other: pair("other"),
        })
    }

    /// The TLS settings of a client that trusts the server. Its certificate is `client`, `other`
    /// (of the other authority), or none for any other name.
    pub fn tls(&self, identity: &str) -> Tls {
        let identity = match identity {
            "client" => Some(self.client.clone()),
            "other" => Some(self.other.clone()),
            _ => None,
        };
        let ca = self.ca.clone();
        Tls { ca, identity }
    }

    /// The TLS settings of `client`, which trusts only the other authority, so not the server.
    pub fn tls_of_other_ca(&self) -> Tls {
        Tls {
            ca: self.other_ca.clone(),
            identity: Some(self.client.clone()),
        }
    }
}

fn openssl(dir: &Path, arguments: &[&str]) {
    let mut command = Command::new("openssl");
    let said = command.args(arguments).current_dir(dir).output();
    let said = said.expect("openssl runs");
    let error = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.success(), "openssl {arguments:?}: {error}");
}
