//! A node as a process: this test program, started again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Endpoints, Prefix, Tls};
use nacre_cluster_node::{Description, Me, Node, NodeState};
use rustix::process::{Pid, Signal, kill_process};
use uuid::Uuid;

use crate::fake::{Fake, live};

const PREFIX: &str = "NACRE_TEST_NODE_";

pub(crate) struct Process {
    pub(crate) id: NodeId,
    how: Start,
    process: Uuid,
    /// The folder of the test.
    lab: PathBuf,
    dir: PathBuf,
    endpoints: Endpoints,
    child: Child,
}

/// A node to start.
#[derive(Clone, Copy)]
pub(crate) struct Start {
    pub(crate) node: u128,
    pub(crate) machine: u128,
    /// A copy of the data directory: the lock of the directory is another one.
    pub(crate) is_copy: bool,
    /// The version of the daemon.
    pub(crate) version: u32,
}

impl Start {
    pub(crate) fn node(node: u128) -> Self {
        Self {
            node,
            machine: node,
            is_copy: false,
            version: 1,
        }
    }
}

fn again(test: &str, values: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([test, "--exact", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    for (name, value) in values {
        command.env(format!("{PREFIX}{name}"), value);
    }
    command.spawn().expect("it starts")
}

/// False: this is the harness itself, not a process of a test.
fn is_started() -> bool {
    std::env::var_os(format!("{PREFIX}ID")).is_some()
}

fn value(name: &str) -> String {
    optional(name).expect("started by a test")
}

fn optional(name: &str) -> Option<String> {
    std::env::var(format!("{PREFIX}{name}")).ok()
}

impl Process {
    pub(crate) fn start(dir: &Path, endpoints: &Endpoints, how: Start) -> Self {
        let id = NodeId(Uuid::from_u128(how.node));
        let process = Uuid::new_v4();
        let text = |path: &Path| path.display().to_string();
        let own = if how.is_copy {
            let copy = dir.join("copy");
            std::fs::create_dir_all(&copy).expect("a folder");
            copy
        } else {
            dir.to_owned()
        };
        let mut values = vec![
            ("ID", id.0.to_string()),
            ("MACHINE", Uuid::from_u128(how.machine).to_string()),
            ("PROCESS", process.to_string()),
            ("VERSION", how.version.to_string()),
            ("DIR", text(&own)),
            ("ETCD", endpoints.urls.join(",")),
        ];
        if let Some(Tls { ca, identity }) = &endpoints.tls {
            let pem = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("PEM");
            values.push(("CA", pem(ca)));
            if let Some((certificate, key)) = identity {
                values.extend([("CERTIFICATE", pem(certificate)), ("KEY", pem(key))]);
            }
        }
        let child = again("process::node_process", &values);
        Self {
            id,
            how,
            process,
            lab: dir.to_owned(),
            dir: own,
            endpoints: endpoints.clone(),
            child,
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a signal");
    }

    /// As `kill -9`. The process is no zombie afterwards.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the node to leave, and waits for its end.
    pub(crate) fn leave(&mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().expect("it ends");
        assert!(ended.success(), "{ended}");
    }

    /// The state and the events that the process wrote last.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(said_file(&self.dir, self.process)).unwrap_or_default()
    }

    /// Starts another version of the daemon after its end, on the same data directory.
    pub(crate) fn upgrade(&mut self, version: u32) {
        self.how.version = version;
        self.restart();
    }

    /// Starts the node again after its end, on the same data directory.
    pub(crate) fn restart(&mut self) {
        let lab = self.lab.clone();
        let endpoints = self.endpoints.clone();
        *self = Self::start(&lab, &endpoints, self.how);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn said_file(dir: &Path, process: Uuid) -> PathBuf {
    dir.join(format!("said-{process}"))
}

fn endpoints() -> Endpoints {
    let pem = |name: &str| Some(optional(name)?.into_bytes());
    Endpoints {
        urls: value("ETCD").split(',').map(str::to_owned).collect(),
        tls: pem("CA").map(|ca| Tls {
            ca,
            identity: pem("CERTIFICATE").zip(pem("KEY")),
        }),
        credentials: None,
        deadline: Duration::from_secs(2),
    }
}

fn uuid(name: &str) -> Uuid {
    value(name).parse().expect("an id")
}

pub(crate) fn prefix() -> Prefix {
    Prefix::new("lab").expect("a name")
}

/// The node itself. It ends when its input does.
#[test]
fn node_process() {
    if !is_started() {
        return;
    }
    let (id, process) = (NodeId(uuid("ID")), uuid("PROCESS"));
    let dir = PathBuf::from(value("DIR"));
    let _lock = live(&dir, id);
    let me = Me {
        id,
        machine: Some(uuid("MACHINE")),
        process,
        cluster: None,
        description: Description {
            name: format!("node{}", id.0.as_u128()),
            version: value("VERSION"),
            ..Description::default()
        },
        is_balanced: false,
    };
    let place = dir.clone();
    let endpoints = endpoints();
    let node = Node::start(&endpoints, prefix(), me, |link| {
        Box::new(Fake::new(&place, id, link, &endpoints))
    });
    let node = node.expect("a thread");
    let (sender, ended) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        drop(sender);
    });
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().expect("a runtime");
    let operator = node.operator();
    let say = |state: NodeState| {
        let mut text = format!("{state:?}\n");
        if matches!(state, NodeState::In { is_good: true, .. }) {
            let status = runtime.block_on(operator.status());
            let nodes = status.map(|status| status.nodes).unwrap_or_default();
            for node in nodes {
                text.push_str(&format!("{:?} {:?}\n", node.id, node.lease));
            }
        }
        for event in node.events().after(0) {
            text.push_str(&format!("{:?}\n", event.what));
        }
        let file = said_file(&dir, process);
        let new = file.with_extension("new");
        std::fs::write(&new, text).expect("a file");
        std::fs::rename(new, file).expect("a file");
    };
    while let Err(std::sync::mpsc::RecvTimeoutError::Timeout) =
        ended.recv_timeout(Duration::from_millis(200))
    {
        say(node.state());
    }
    node.leave();
}
