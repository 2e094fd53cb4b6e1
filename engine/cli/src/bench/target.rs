//! The private daemon of `nacre bench`: its own socket and folder, one device, and listeners on
//! this machine for the measuring host only.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nacre_bdev::module::ByName;
use nacre_engine::bdev_modules::malloc::{MallocCreateParams, RamDisk};
use nacre_engine::methods::bdev::file::{
    NewFileOptions, UringCreate, UringCreateParams, UringDelete,
};
use nacre_engine::methods::bdev::modules::CreateModule;
use nacre_engine::methods::framework::WaitInit;
use nacre_engine::methods::nvmf::address::TransportAddress;
use nacre_engine::methods::nvmf::host::{AddHost, AddHostParams};
use nacre_engine::methods::nvmf::listener::{
    AddListener, AddListenerParams, GetSubsystemListeners, SubsystemListenersParams,
};
use nacre_engine::methods::nvmf::namespace::{
    AddNamespace, AddNamespaceParams, NamespaceParams, RemoveNamespace, RemoveParams,
};
use nacre_engine::methods::nvmf::subsystem::{CreateSubsystem, CreateSubsystemParams};
use nacre_engine::methods::volume::create::options::NewVolumeOptions;
use nacre_engine::methods::volume::create::{self as volume, CreateParams as VolumeParams};
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_rpc::method::NoParams;
use nacre_reactor::CoreSet;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

/// Longest time of a start, and of an RPC.
const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(10);
const BLOCK_SIZE: u32 = 4096;
const DISK: &str = "disk";
const VOLUME: &str = "volume";
const NSID: u32 = 1;

/// Why there is no daemon to measure.
#[derive(Debug, thiserror::Error)]
pub(super) enum TargetError {
    #[error("cannot make a folder for the daemon: {0}")]
    Folder(std::io::Error),
    #[error("cannot start the daemon: {0}")]
    Spawn(std::io::Error),
    #[error("the daemon ended at its start ({status}):\n{log}")]
    Ended { status: ExitStatus, log: String },
    #[error("the daemon does not answer: {error}\n{log}")]
    Silent { error: ClientError, log: String },
    #[error(transparent)]
    Refused(#[from] ClientError),
    #[error("the daemon has no listener on {0}")]
    NoListener(&'static str),
}

/// The device that the private daemon serves.
#[derive(Debug, Clone)]
pub(super) enum Served {
    Memory {
        bytes: u64,
    },
    /// A file or block device. A file is created with `size`, if that is set.
    Path {
        path: PathBuf,
        size: Option<u64>,
        read_only: bool,
    },
}

/// A running daemon. It is stopped on drop.
pub(super) struct PrivateTarget {
    child: Child,
    client: Client,
    device: Served,
    nqn: String,
    /// The identifier of the only host that the daemon admits.
    hostid: Uuid,
    // Removed last.
    _folder: tempfile::TempDir,
}

impl PrivateTarget {
    /// Starts the daemon on `cores` and creates the device, and a volume with one replica on it
    /// if `volume` is set.
    pub(super) fn start(
        device: Served,
        volume: bool,
        cores: &CoreSet,
    ) -> Result<Self, TargetError> {
        let folder = tempfile::Builder::new()
            .prefix("nacre-bench-")
            .tempdir()
            .map_err(TargetError::Folder)?;
        let (socket, log) = (folder.path().join("rpc.sock"), folder.path().join("log"));
        let mut child = spawn(folder.path(), &socket, &log, cores)?;
        let client = match connect(&mut child, &socket, &log) {
            Ok(client) => client,
            Err(error) => {
                stop(&mut child);
                return Err(error);
            }
        };
        let mut target = Self {
            child,
            client,
            device,
            nqn: format!("nqn.2025-01.io.nacre:bench-{}", Uuid::new_v4()),
            hostid: Uuid::new_v4(),
            _folder: folder,
        };
        target.configure(volume)?;
        Ok(target)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn hostid(&self) -> Uuid {
        self.hostid
    }

    pub(super) fn hostnqn(&self) -> String {
        format!("nqn.2014-08.org.nvmexpress:uuid:{}", self.hostid)
    }

    /// The URI of its namespace on a listener of 127.0.0.1.
    pub(super) fn listen_tcp(&mut self) -> Result<String, TargetError> {
        let port = self.listen("TCP", IpAddr::V4(Ipv4Addr::LOCALHOST))?;
        Ok(format!("tcp://127.0.0.1:{port}/{}", self.nqn))
    }

    /// The URI of its namespace on an RDMA listener of `ip`.
    pub(super) fn listen_rdma(&mut self, ip: IpAddr) -> Result<String, TargetError> {
        let port = self.listen("RDMA", ip)?;
        Ok(format!("rdma://{}/{}", SocketAddr::new(ip, port), self.nqn))
    }

    /// Closes the device, so that this process can open it.
    pub(super) fn release(&mut self) -> Result<(), ClientError> {
        self.call::<RemoveNamespace>(&RemoveParams {
            nqn: self.nqn.clone(),
            nsid: NSID,
            tgt_name: None,
        })?;
        self.call::<UringDelete>(&ByName { name: DISK.into() })?;
        Ok(())
    }

    /// Opens the device again.
    pub(super) fn hold(&mut self) -> Result<(), ClientError> {
        self.open_device()?;
        self.add_namespace(DISK)
    }

    fn configure(&mut self, volume: bool) -> Result<(), ClientError> {
        self.open_device()?;
        let mut name = DISK;
        if volume {
            self.client
                .call_for_json::<volume::Create, _>(&VolumeParams {
                    name: VOLUME.into(),
                    devices: vec![DISK.into()],
                    options: NewVolumeOptions {
                        force: true,
                        ..NewVolumeOptions::default()
                    },
                    ..VolumeParams::default()
                })?;
            name = VOLUME;
        }
        self.call::<CreateSubsystem>(&CreateSubsystemParams {
            nqn: self.nqn.clone(),
            ..CreateSubsystemParams::default()
        })?;
        self.call::<AddHost>(&AddHostParams {
            nqn: self.nqn.clone(),
            host: self.hostnqn(),
            ..AddHostParams::default()
        })?;
        self.add_namespace(name)
    }

    fn open_device(&mut self) -> Result<(), ClientError> {
        match self.device.clone() {
            Served::Memory { bytes } => {
                self.call::<CreateModule<RamDisk>>(&MallocCreateParams {
                    name: Some(DISK.into()),
                    block_size: BLOCK_SIZE,
                    num_blocks: bytes / u64::from(BLOCK_SIZE),
                    ..MallocCreateParams::default()
                })?;
            }
            Served::Path {
                path,
                size,
                read_only,
            } => {
                self.call::<UringCreate>(&UringCreateParams {
                    name: DISK.into(),
                    filename: path,
                    readonly: read_only,
                    options: NewFileOptions {
                        size,
                        ..NewFileOptions::default()
                    },
                })?;
            }
        }
        Ok(())
    }

    fn add_namespace(&mut self, bdev: &str) -> Result<(), ClientError> {
        self.call::<AddNamespace>(&AddNamespaceParams {
            nqn: self.nqn.clone(),
            namespace: NamespaceParams {
                nsid: NSID,
                bdev_name: bdev.into(),
                ..NamespaceParams::default()
            },
            tgt_name: None,
        })?;
        Ok(())
    }

    /// Adds a listener on any free port, and returns the port.
    fn listen(&mut self, trtype: &'static str, ip: IpAddr) -> Result<u16, TargetError> {
        self.call::<AddListener>(&AddListenerParams {
            nqn: self.nqn.clone(),
            listen_address: TransportAddress {
                trtype: trtype.into(),
                adrfam: None,
                traddr: ip.to_string(),
                trsvcid: Some("0".into()),
            },
            ..AddListenerParams::default()
        })?;
        let listeners = self.call::<GetSubsystemListeners>(&SubsystemListenersParams {
            nqn: self.nqn.clone(),
            tgt_name: None,
        })?;
        let mut addresses = listeners.iter().map(|listener| &listener.address);
        let ours = addresses.find(|address| address.trtype == trtype);
        let port = ours.and_then(|address| address.trsvcid.parse().ok());
        port.ok_or(TargetError::NoListener(trtype))
    }

    fn call<M>(&mut self, params: &M::Params) -> Result<M::Reply, ClientError>
    where
        M: Method<Engine, Params: Serialize, Reply: DeserializeOwned>,
    {
        self.client.call::<M, Engine>(params)
    }
}

impl Drop for PrivateTarget {
    fn drop(&mut self) {
        stop(&mut self.child);
        if let Served::Path {
            path,
            size: Some(_),
            ..
        } = &self.device
        {
            let _ = fs::remove_file(path);
        }
    }
}

fn spawn(folder: &Path, socket: &Path, log: &Path, cores: &CoreSet) -> Result<Child, TargetError> {
    let config = folder.join("nacre.toml");
    fs::write(&config, "[nvmf]\ndiscovery_port = 0\n").map_err(TargetError::Folder)?;
    let out = File::create(log).map_err(TargetError::Folder)?;
    let program = std::env::current_exe().map_err(TargetError::Spawn)?;
    let mut command = Command::new(program);
    command
        .args(["serve", "--data-dir", "none", "-m", &format!("[{cores}]")])
        .arg("-c")
        .arg(&config)
        .arg("-r")
        .arg(socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(out)
        // Ctrl-C ends the measurement first, and then the daemon.
        .process_group(0);
    // Settings of the user are for the user's daemon.
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"NACRE_") {
            command.env_remove(name);
        }
    }
    command.spawn().map_err(TargetError::Spawn)
}

fn connect(child: &mut Child, socket: &Path, log: &Path) -> Result<Client, TargetError> {
    let said = || fs::read_to_string(log).unwrap_or_default();
    let until = Instant::now() + START_LIMIT;
    loop {
        if let Some(status) = child.try_wait().map_err(TargetError::Spawn)? {
            let log = said();
            return Err(TargetError::Ended { status, log });
        }
        let outcome = Client::connect(socket, START_LIMIT).and_then(|mut client| {
            client.call::<WaitInit, _>(&NoParams {})?;
            Ok(client)
        });
        match outcome {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > until => {
                let log = said();
                return Err(TargetError::Silent { error, log });
            }
            Err(_) => sleep(Duration::from_millis(20)),
        }
    }
}

/// Asks the process to end, and kills it if it does not.
fn stop(child: &mut Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::TERM);
    }
    let until = Instant::now() + STOP_LIMIT;
    while Instant::now() < until {
        match child.try_wait() {
            Ok(None) => sleep(Duration::from_millis(10)),
            _ => return,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
}
