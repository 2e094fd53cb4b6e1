//! Options of every command that connects to a controller as a host does.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nacre_nvmf::host::HostOptions;
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::tcp::Digests;

use super::Failure;
use crate::initiator::{Connector, Identity, Remote, Session, TcpConnector};

/// Exit code: there is no connection to be had.
pub const CANNOT_CONNECT: u8 = 3;

#[derive(Debug, Clone, Args)]
pub struct RemoteArgs {
    /// The controller: tcp://ADDRESS[:PORT][/NQN][?nsid=N]
    #[arg(value_name = "URI", required_unless_present = "traddr", conflicts_with_all = ["transport", "traddr", "trsvcid"])]
    uri: Option<String>,
    /// Transport: tcp
    #[arg(short = 't', long, value_name = "TYPE", default_value = "tcp")]
    transport: String,
    /// Address of the controller, or a name that has one
    #[arg(short = 'a', long, value_name = "ADDRESS")]
    traddr: Option<String>,
    /// Port [default: 4420; of discovery controllers 8009]
    #[arg(short = 's', long, value_name = "PORT")]
    trsvcid: Option<String>,
    /// Name of the subsystem
    #[arg(short = 'n', long, value_name = "NQN")]
    nqn: Option<String>,
    /// Namespace, where there are several
    #[arg(long, value_name = "ID")]
    nsid: Option<String>,
    /// Name of this host [default: that of nvme-cli, else one made from the machine's identity]
    #[arg(short = 'q', long, value_name = "NQN", env = "NACRE_HOSTNQN")]
    hostnqn: Option<String>,
    /// Identifier of this host, a UUID [default: the one that goes with the name]
    #[arg(short = 'I', long, value_name = "UUID", env = "NACRE_HOSTID")]
    hostid: Option<String>,
    /// Header digests (CRC32C)
    #[arg(short = 'g', long, visible_alias = "hdr-digest")]
    hdgst: bool,
    /// Data digests (CRC32C)
    #[arg(short = 'G', long, visible_alias = "data-digest")]
    ddgst: bool,
    /// For a connection to be made
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
    connect_timeout: Duration,
    /// Keep-alive timeout; 0s for none
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = humantime::parse_duration)]
    keep_alive: Duration,
}

/// A controller that was named, and how to get there.
pub struct Target {
    pub remote: Remote,
    pub options: HostOptions,
    pub connector: Arc<dyn Connector>,
}

impl RemoteArgs {
    /// Where that is, without a default for what is missing.
    pub fn remote(&self) -> Result<Remote, Failure> {
        let mut remote = match (&self.uri, &self.traddr) {
            (Some(uri), _) => uri.parse().map_err(usage)?,
            (None, Some(host)) => Remote {
                kind: Remote::parse_transport(&self.transport).map_err(usage)?,
                host: host.trim_matches(['[', ']']).to_owned(),
                port: None,
                subnqn: None,
                nsid: None,
            },
            (None, None) => return Err(Failure::Usage("say where: a URI, or --traddr".into())),
        };
        if let Some(port) = &self.trsvcid {
            remote.port = Some(Remote::parse_port(port).map_err(usage)?);
        }
        if let Some(nqn) = &self.nqn {
            remote.subnqn = Some(Remote::parse_nqn(nqn).map_err(usage)?);
        }
        if let Some(nsid) = &self.nsid {
            remote.nsid = Some(Remote::parse_nsid(nsid).map_err(usage)?);
        }
        Ok(remote)
    }

    /// The target, with `subnqn` and `port` where none are named, for queues of `entries` entries.
    pub fn target(&self, subnqn: Option<Nqn>, port: u16, entries: u16) -> Result<Target, Failure> {
        let mut remote = self.remote()?;
        remote.subnqn = remote.subnqn.or(subnqn);
        remote.port = remote.port.or(Some(port));
        let Some(nqn) = remote.subnqn.clone() else {
            let hint = "say which subsystem: --nqn, or in the URI; `nacre discover` lists them";
            return Err(Failure::Usage(hint.into()));
        };
        let identity =
            Identity::find(self.hostnqn.as_deref(), self.hostid.as_deref()).map_err(usage)?;
        let mut options = HostOptions::new(identity.nqn, identity.id, nqn);
        options.queue_entries = entries;
        options.connect_timeout = self.connect_timeout;
        options.keep_alive = self.keep_alive;
        let digests = Digests {
            header: self.hdgst,
            data: self.ddgst,
        };
        let connector: Arc<dyn Connector> = match remote.kind {
            TransportType::Tcp => {
                let address = remote.resolve(port).map_err(cannot_connect)?;
                Arc::new(TcpConnector::new(address, digests, entries))
            }
            kind => {
                return Err(Failure::Usage(format!(
                    "{kind} is not a transport of this command"
                )));
            }
        };
        Ok(Target {
            remote,
            options,
            connector,
        })
    }
}

impl Target {
    pub fn connect(&self) -> Result<Session, Failure> {
        let remote = self.remote.to_string();
        Session::connect(&remote, self.options.clone(), &self.connector).map_err(cannot_connect)
    }
}

pub fn cannot_connect(error: impl Into<anyhow::Error>) -> Failure {
    Failure::Exit {
        code: CANNOT_CONNECT,
        error: error.into(),
    }
}

pub fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::Usage(error.to_string())
}
