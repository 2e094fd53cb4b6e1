//! The options of all commands that connect to a remote controller as a host.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, FromArgMatches};
use nacre_nvmf::address::{
    Endpoint, Fallback, Grammar, Scheme, Select, TransportChoice, parse_nqn, parse_nsid, parse_port,
};
use nacre_nvmf::auth::Offer;
use nacre_nvmf::host::{Connector, ControllerId, HostAuth, HostOptions, PathOptions};
use nacre_nvmf::subsystems::MAX_CNTLID;
use nacre_nvmf::tls::{Derivation, PskKey};
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;
use nacre_transport_connect::{HostTls, PathConnector, Rdma, RdmaTuning, Session, TcpConnector};
use nacre_transport_tcp::Marking;

use super::Failure;
use super::address::{fallback, hostnqn};
use super::attempts::Attempts;
use nacre_engine::services::drives::{DriveUri, DriveUriError};
use nacre_engine::services::keyring::{HostKeys, NamedKey};
use nacre_engine_doctor::{System, check_rdma_route};
use nacre_engine_values::address::socket_of;
use nacre_engine_values::host_identity::{Identity, Names};

/// Jobs of authentication that may wait. The controller is the only owner, and gets half of them:
/// one for each of up to 1024 queues.
const KEY_JOBS: usize = 2048;

/// Exit code: no connection could be established.
pub(crate) const CANNOT_CONNECT: u8 = 3;

#[derive(Debug, Clone, Args)]
pub(crate) struct RemoteArgs {
    /// The controller: ADDRESS[:PORT], or tcp://ADDRESS[:PORT][/NQN][?nsid=N], or rdma://…, or
    /// auto://…
    #[arg(value_name = "URI", required_unless_present = "traddr", conflicts_with_all = ["traddr", "trsvcid"])]
    uri: Option<String>,
    /// Transport where the URI names none: tcp, rdma, or auto: RDMA if the route to the target
    /// supports it, else TCP [default: tcp]
    #[arg(short = 't', long, value_name = "TYPE")]
    transport: Option<String>,
    /// What to use when RDMA fails [default: tcp with auto, else none]
    #[arg(long, value_name = "FALLBACK", value_parser = fallback())]
    fallback: Option<Fallback>,
    #[command(flatten)]
    attempts: Attempts,
    /// Address of the controller, or a host name
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
    /// Id of the controller to connect to, where controllers are static, or "any" [default: a
    /// dynamic one]
    #[arg(long, value_name = "ID", value_parser = parse_cntlid)]
    cntlid: Option<ControllerId>,
    #[command(flatten)]
    host: HostIdentityArgs,
    #[command(flatten)]
    keys: KeyFiles,
    /// File with the pre-shared key of TLS (`NVMeTLSkey-1:…`): the connections use TLS over TCP
    #[arg(long, value_name = "FILE")]
    psk: Option<PathBuf>,
    /// Header digests (CRC32C)
    #[arg(short = 'g', long, visible_alias = "hdr-digest")]
    hdgst: bool,
    /// Data digests (CRC32C)
    #[arg(short = 'G', long, visible_alias = "data-digest")]
    ddgst: bool,
    /// Type of service of the packets: DSCP times 4
    #[arg(long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// Longest time to connect
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = nacre_engine_values::time::parse)]
    connect_timeout: Duration,
    /// Keep-alive timeout; 0s for none
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = nacre_engine_values::time::parse)]
    keep_alive: Duration,
}

/// The names of this host to targets.
#[derive(Debug, Clone, Args)]
pub(crate) struct HostIdentityArgs {
    /// Name of this host [default: that of nvme-cli, else one made from the machine's identity]
    #[arg(short = 'q', long, value_name = "NQN", env = "NACRE_HOSTNQN")]
    pub hostnqn: Option<String>,
    /// Identifier of this host, a UUID [default: the one that goes with the name]
    #[arg(short = 'I', long, value_name = "UUID", env = "NACRE_HOSTID")]
    pub hostid: Option<String>,
}

/// The keys of authentication, in files.
#[derive(Debug, Clone, Args)]
pub(crate) struct KeyFiles {
    /// File with the key with which this host authenticates itself (`DHHC-1:…`)
    #[arg(long, value_name = "FILE")]
    pub dhchap_key: Option<PathBuf>,
    /// File with the key with which the target must authenticate itself
    #[arg(long, value_name = "FILE", requires = "dhchap_key")]
    pub dhchap_ctrlr_key: Option<PathBuf>,
}

/// A named controller, and its connectors.
pub(crate) struct Target {
    pub remote: Endpoint,
    /// The namespace that the user names.
    pub nsid: Option<u32>,
    pub options: HostOptions,
    pub connector: Arc<dyn Connector>,
}

/// The properties of a connection that differ by command.
#[derive(Debug, Clone, Default)]
pub(crate) struct Needs {
    /// The subsystem and the port unless named.
    pub subnqn: Option<Nqn>,
    pub port: u16,
    /// Entries of each queue.
    pub entries: u16,
    /// Bytes of memory that RDMA devices register from the first connection on.
    pub memory: usize,
}

/// The connector of a target, and the options for its choice between RDMA and TCP, if it has one.
type Ways = (Arc<dyn Connector>, Option<PathOptions>);

impl RemoteArgs {
    /// One path of a subsystem: its own transport without a fallback, one attempt.
    pub(crate) fn of_path(uri: String, own: &OwnHost) -> Result<Self, Failure> {
        let defaults = Self::typed([uri])?;
        Ok(Self {
            attempts: Attempts {
                retries: 1,
                cm_timeout: own.connect_timeout,
                ..defaults.attempts
            },
            host: own.host.clone(),
            keys: own.keys.clone(),
            connect_timeout: own.connect_timeout,
            ..defaults
        })
    }

    /// The options as `words` of a command line: for commands with several targets.
    pub(crate) fn typed(words: impl IntoIterator<Item = String>) -> Result<Self, Failure> {
        let command = clap::Command::new("target").no_binary_name(true);
        let matches = Self::augment_args(command).try_get_matches_from(words);
        let args = matches.and_then(|matches| Self::from_arg_matches(&matches));
        args.map_err(usage)
    }

    /// The drive of this machine that the URI names, if it is such a URI; it may be invalid.
    pub(crate) fn drive(&self) -> Option<Result<DriveUri, DriveUriError>> {
        let uri = self.uri.as_deref().filter(|uri| DriveUri::is_one(uri))?;
        Some(uri.parse().and_then(|mut drive: DriveUri| {
            if let Some(nsid) = &self.nsid {
                drive.nsid = Some(parse_nsid(nsid)?);
            }
            Ok(drive)
        }))
    }

    /// The controller's address. The scheme is set; nothing else has a default yet.
    pub(crate) fn remote(&self) -> Result<Endpoint, Failure> {
        let mut remote = match (&self.uri, &self.traddr) {
            (Some(uri), _) => Grammar::CONTROLLER.parse(uri).map_err(usage)?,
            (None, Some(host)) => Endpoint::of_host(host),
            (None, None) => {
                return Err(Failure::Usage("no address: give a URI, or --traddr".into()));
            }
        };
        let asked = self.transport.as_deref().map(str::parse::<TransportChoice>);
        let asked = asked.transpose().map_err(usage)?;
        remote.scheme = match (remote.choice(), asked) {
            (Some(named), Some(asked)) if named != asked => {
                return Err(usage(format!(
                    "the URI names {named} and --transport names {asked}: leave one of them out"
                )));
            }
            (Some(_), _) => remote.scheme,
            (None, asked) => Some(asked.unwrap_or(TransportChoice::Tcp).into()),
        };
        if let Some(port) = &self.trsvcid {
            remote.port = Some(parse_port(port).map_err(usage)?);
        }
        if let Some(nqn) = &self.nqn {
            remote.subnqn = Some(parse_nqn("--nqn", nqn).map_err(usage)?);
        }
        if let Some(nsid) = &self.nsid {
            remote.select = Select::Nsid(parse_nsid(nsid).map_err(usage)?);
        }
        Ok(remote)
    }

    /// The target, and its connectors.
    pub(crate) fn target(&self, needs: Needs) -> Result<Target, Failure> {
        let mut remote = self.remote()?;
        remote.subnqn = remote.subnqn.or_else(|| needs.subnqn.clone());
        remote.port = remote.port.or(Some(needs.port));
        let Some(nqn) = remote.subnqn.clone() else {
            let hint = "no subsystem: give --nqn, or a URI that names one; `nacre discover` lists \
                them";
            return Err(Failure::Usage(hint.into()));
        };
        let nsid = match remote.select {
            Select::All => None,
            Select::Nsid(nsid) => Some(nsid),
            Select::Uuid(_) => {
                let hint = "uuid names a namespace to attach: name this one with nsid";
                return Err(Failure::Usage(hint.into()));
            }
        };
        let hostnqn = hostnqn(self.host.hostnqn.as_deref(), &remote)?;
        let identity = Identity::find(
            Names::OPTIONS,
            hostnqn.as_deref(),
            self.host.hostid.as_deref(),
        );
        let identity = identity.map_err(usage)?;
        let tls = self.tls(&identity.nqn, &nqn)?;
        let mut options = HostOptions::new(identity.nqn, identity.id, nqn);
        options.controller = self.cntlid.unwrap_or_default();
        options.queue_entries = needs.entries;
        options.connect_timeout = self.connect_timeout;
        options.keep_alive = self.keep_alive;
        options.authentication = self.authentication()?;
        let address = socket_of(&remote, needs.port).map_err(cannot_connect)?;
        let scheme = remote.scheme.unwrap_or(Scheme::Tcp);
        let (connector, paths) = self.ways(scheme, address, &needs, tls)?;
        if let Some(paths) = &paths {
            // A connection still has to be enabled and identified.
            let least = self.attempts.cm_timeout + Duration::from_secs(5);
            options.connect_timeout = self.connect_timeout.max(least);
            if paths.fallback.is_none() && paths.connection_retries == 0 {
                options.loss_timeout = None;
            }
        }
        options.paths = paths;
        Ok(Target {
            remote,
            nsid,
            options,
            connector,
        })
    }

    /// The keys, and a thread to use them on.
    fn authentication(&self) -> Result<Option<HostAuth>, Failure> {
        let Some(own) = &self.keys.dhchap_key else {
            return Ok(None);
        };
        let key = |path: &PathBuf| {
            let key = key_file(path)?;
            // A damaged file is found before the target is asked.
            key.secret().map_err(usage)?;
            Ok::<_, Failure>(Arc::new(key))
        };
        let keys = HostKeys {
            host: key(own)?,
            controller: self.keys.dhchap_ctrlr_key.as_ref().map(key).transpose()?,
        };
        let helper = Helper::new("nacre-auth", KEY_JOBS);
        helper.start()?;
        Ok(Some(HostAuth {
            keys: Arc::new(keys),
            offer: Offer::default(),
            helper: Arc::new(helper),
        }))
    }

    /// The key of TLS. The first handshake is prepared here, not on the thread that polls.
    fn tls(&self, host: &Nqn, subsystem: &Nqn) -> Result<Option<HostTls>, Failure> {
        let Some(path) = &self.psk else {
            return Ok(None);
        };
        let psk = key_file(path)?.psk().map_err(usage)?;
        nacre_transport_tcp::warm_up_tls().map_err(anyhow::Error::from)?;
        Ok(Some(HostTls {
            identity: psk.offer(host, subsystem),
            psk,
            derivation: Derivation::Standard,
            helper: None,
        }))
    }

    fn ways(
        &self,
        scheme: Scheme,
        address: SocketAddr,
        needs: &Needs,
        tls: Option<HostTls>,
    ) -> Result<Ways, Failure> {
        let digests = Digests {
            header: self.hdgst,
            data: self.ddgst,
        };
        let marking = Marking {
            tos: self.tos,
            priority: None,
        };
        let choice = scheme.choice().unwrap_or(TransportChoice::Tcp);
        if tls.is_some() && choice != TransportChoice::Tcp {
            let hint = "--psk: TLS is for TCP, and this controller may be reached over RDMA";
            return Err(Failure::Usage(hint.into()));
        }
        let tcp = TcpConnector::new(address, digests, needs.entries)
            .marked(marking)
            .secured(tls);
        let fallback = self.fallback.or_else(|| scheme.fallback());
        let fallback = fallback.unwrap_or_else(|| choice.default_fallback());
        let fallback = match (choice, fallback) {
            (TransportChoice::Tcp, _) => return Ok((Arc::new(tcp), None)),
            (_, Fallback::Tcp) => Some(tcp),
            (_, Fallback::None) if digests != Digests::NONE => {
                let hint = "digests belong to TCP: RDMA networks have checksums of their own";
                return Err(Failure::Usage(hint.into()));
            }
            (_, Fallback::None) => None,
        };
        let tuning = RdmaTuning {
            entries: needs.entries.max(32),
            cm_timeout: self.attempts.cm_timeout,
        };
        let (rdma, fallback) = match (Rdma::open(tuning), fallback) {
            (Ok(rdma), fallback) => (rdma, fallback),
            (Err(error), None) => return Err(cannot_connect(error)),
            (Err(error), Some(tcp)) => {
                eprintln!("note: {error}; connecting over TCP");
                return Ok((Arc::new(tcp), None));
            }
        };
        let mut paths = PathOptions::new(
            TransportType::Rdma,
            fallback.as_ref().map(|_| TransportType::Tcp),
        );
        paths.connection_retries = self.attempts.retries;
        paths.retry_delay = self.attempts.retry_delay;
        // Requested by name it is tried in any case: the device may appear later.
        if choice == TransportChoice::Auto && fallback.is_some() {
            paths.unusable = check_rdma_route(&System::real(), address.ip()).err();
            if let Some(why) = &paths.unusable {
                eprintln!("note: no RDMA from here to the target: {why}; connecting over TCP");
            }
        }
        rdma.reserve(needs.memory + Session::MEMORY)
            .map_err(cannot_connect)?;
        let connector = PathConnector::new(Arc::new(rdma), address, fallback);
        Ok((Arc::new(connector.marked(self.tos)), Some(paths)))
    }
}

impl Target {
    pub(crate) fn connect(&self) -> Result<Session, Failure> {
        let remote = self.remote.to_string();
        let (options, connector) = (self.options.clone(), &self.connector);
        Session::connect_reporting(&remote, options, connector, |failure| {
            eprintln!("{failure}")
        })
        .map_err(cannot_connect)
    }
}

fn key_file(path: &Path) -> Result<NamedKey, Failure> {
    let path = std::path::absolute(path).map_err(usage)?;
    Ok(NamedKey::in_file(path.display().to_string(), path))
}

/// A static controller.
pub(crate) fn parse_cntlid(text: &str) -> Result<ControllerId, String> {
    match text.parse::<u16>() {
        Ok(id) if id <= MAX_CNTLID => Ok(ControllerId::Static(id)),
        Err(_) if text.eq_ignore_ascii_case("any") => Ok(ControllerId::AnyStatic),
        _ => Err(format!("write \"any\", or an id of at most {MAX_CNTLID}")),
    }
}

pub(crate) fn cannot_connect(error: impl Into<anyhow::Error>) -> Failure {
    Failure::Exit {
        code: CANNOT_CONNECT,
        error: error.into(),
    }
}

pub(crate) fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::Usage(error.to_string())
}

/// Options of this program's own connections.
#[derive(Debug, Clone, Args)]
pub(crate) struct OwnHost {
    #[command(flatten)]
    pub host: HostIdentityArgs,
    #[command(flatten)]
    pub keys: KeyFiles,
    /// Longest time to connect one path
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = nacre_engine_values::time::above_zero)]
    pub connect_timeout: Duration,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        remote: RemoteArgs,
    }

    fn target(line: &[&str]) -> Result<Target, Failure> {
        let nqn = [
            "-q",
            "nqn.2025-01.io.nacre:host",
            "-n",
            "nqn.2025-01.io.nacre:v",
        ];
        let words = ["nacre"].iter().chain(line).chain(&nqn);
        let line = Line::try_parse_from(words).map_err(|e| Failure::Usage(e.to_string()))?;
        line.remote.target(Needs {
            port: 4420,
            entries: 128,
            ..Needs::default()
        })
    }

    fn refused(line: &[&str]) -> (u8, String) {
        let failure = target(line).err().expect("it is refused");
        (failure.exit_code(), failure.to_string())
    }

    /// Old command lines keep their meaning: TCP, one attempt, no RDMA device opened.
    #[test]
    fn tcp_as_ever() {
        for line in [
            &["-a", "127.0.0.1"][..],
            &["tcp://127.0.0.1"],
            &["127.0.0.1:4420"],
            &["::1", "-t", "tcp"],
            &["tcp://127.0.0.1", "-t", "tcp"],
            &["-t", "TCP", "-a", "::1"],
        ] {
            let target = target(line).unwrap();
            assert_eq!(target.options.paths, None);
            assert_eq!(target.options.connect_timeout, Duration::from_secs(5));
            assert_eq!(target.remote.scheme, Some(Scheme::Tcp));
        }
    }

    /// A URI with a fallback and a host name means the same to tools as to the daemon.
    #[test]
    fn parts_of_a_uri() {
        let uri = "nvmf+tcp://127.0.0.1/v?nsid=7&hostnqn=nqn.2025-01.io.example:h";
        let line = Line::try_parse_from(["nacre", uri]).unwrap().remote;
        let target = line.target(Needs {
            port: 4420,
            entries: 128,
            ..Needs::default()
        });
        let target = target.unwrap();
        assert_eq!(target.nsid, Some(7));
        assert_eq!(target.options.hostnqn.as_str(), "nqn.2025-01.io.example:h");
        assert_eq!(target.options.subnqn.as_str(), "v");
    }

    #[test]
    fn controllers() {
        for (line, controller) in [
            (&["tcp://127.0.0.1"][..], ControllerId::Dynamic),
            (
                &["tcp://127.0.0.1", "--cntlid", "any"],
                ControllerId::AnyStatic,
            ),
            (
                &["tcp://127.0.0.1", "--cntlid", "7"],
                ControllerId::Static(7),
            ),
        ] {
            assert_eq!(target(line).unwrap().options.controller, controller);
        }
        for text in ["65520", "65535", "-1", "x"] {
            let (code, said) = refused(&["tcp://127.0.0.1", &format!("--cntlid={text}")]);
            assert!(code == 2 && said.contains("65519"), "{text}: {said}");
        }
    }

    #[test]
    fn refusals() {
        let (code, text) = refused(&["-t", "fc", "-a", "127.0.0.1"]);
        assert_eq!(code, 2);
        assert!(text.contains("tcp, rdma or auto"), "{text}");
        let (code, text) = refused(&["tcp://127.0.0.1", "-t", "rdma"]);
        assert!(
            code == 2 && text.contains("leave one of them out"),
            "{text}"
        );
        let uuid = "tcp://127.0.0.1?uuid=8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11";
        let other = "tcp://127.0.0.1?hostnqn=nqn.2025-01.io.nacre:other";
        let (code, text) = refused(&[other]);
        assert!(code == 2 && text.contains("names the host"), "{text}");
        let (code, text) = refused(&[uuid]);
        assert!(code == 2 && text.contains("with nsid"), "{text}");
        let (code, text) = refused(&["rdma://127.0.0.1", "--hdr-digest"]);
        assert_eq!(code, 2);
        assert!(text.contains("digests belong to TCP"), "{text}");
    }

    /// Without the libraries `rdma` reports the missing ones and the remedy, and everything else
    /// uses TCP; with them connecting makes the choice.
    #[test]
    fn rdma_by_name() {
        let tuning = RdmaTuning {
            entries: 128,
            cm_timeout: Duration::from_secs(5),
        };
        let absent = Rdma::open(tuning).err().map(|error| error.to_string());
        let only = target(&["-t", "rdma", "-a", "127.0.0.1", "--retries", "0"]);
        let auto = target(&["auto://127.0.0.1"]).unwrap().options;
        match absent {
            Some(absent) => {
                let failure = only.err().expect("there is nothing to open");
                assert_eq!(failure.exit_code(), CANNOT_CONNECT);
                assert!(failure.to_string().contains(&absent), "{failure}");
                assert_eq!(auto.paths, None);
            }
            None => {
                let only = only.unwrap().options;
                let paths = only.paths.unwrap();
                assert_eq!((paths.fallback, paths.connection_retries), (None, 0));
                assert_eq!(only.loss_timeout, None, "forever");
                assert!(only.connect_timeout > Duration::from_secs(5));
                let paths = auto.paths.unwrap();
                assert_eq!(paths.fallback, Some(TransportType::Tcp));
            }
        }
    }
}
