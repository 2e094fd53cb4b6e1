//! The TLS listener of the RPC server: management of a daemon from other machines.
//!
//! ```text
//!   accept ─▶ one of MAX_HANDSHAKES places ─▶ handshake, at most HANDSHAKE_LIMIT
//!          ─▶ role of the subject ─▶ one of `[rpc] max_clients` places
//!          ─▶ calls, as on the Unix socket
//! ```
//!
//! The clients of this listener are counted apart from those of the Unix socket, so connections of
//! other machines do not displace local clients. A client without a call for [`IDLE_LIMIT`] is
//! closed. TCP keepalive closes connections to peers that have vanished. A reload of the
//! configuration checks the certificates of connected clients again.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use rustls::pki_types::CertificateDer;
use tokio::net::{TcpListener, TcpStream};
use tracing::warn;

use super::files::ServerTls;
use super::{HANDSHAKE_INTERVAL, HandshakeError};
use crate::access::{Caller, Identity};
use crate::clients::Clients;
use crate::places::{NetworkPlace, Places};
use crate::server::{Admission, Dispatch, LogLine, client, origin};

/// Most clients in their TLS handshake at once.
pub const MAX_HANDSHAKES: usize = 64;
/// A client without a call for this long is closed.
pub const IDLE_LIMIT: Duration = Duration::from_secs(600);
/// Longest time from a reload to the check of connected clients.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Idle time before TCP keepalive probes. A peer that answers none is closed after 60 + 3 x 10 s.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_PROBES: u32 = 3;

#[derive(Debug, thiserror::Error)]
#[error("cannot serve RPC over TLS on {address}: {source}; choose another [rpc.tls] listen")]
pub struct BindError {
    pub address: SocketAddr,
    pub source: std::io::Error,
}

/// A listening socket.
#[derive(Debug)]
pub struct TlsListener(TcpListener);

/// The state that all clients of a listener share.
struct Service<D, C> {
    dispatch: Rc<D>,
    /// The configuration in effect.
    config: C,
    admission: Admission,
    idle_limit: Duration,
}

impl TlsListener {
    pub async fn bind(address: SocketAddr) -> Result<Self, BindError> {
        let bound = TcpListener::bind(address).await;
        bound
            .map(TlsListener)
            .map_err(|source| BindError { address, source })
    }

    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Accepts clients forever, `max_clients` at a time. `config` returns the configuration in
    /// effect, which a reload may change; `None`: no client is served.
    pub async fn serve<D: Dispatch>(
        &self,
        dispatch: Rc<D>,
        config: impl Fn() -> Option<Arc<ServerTls>> + 'static,
        max_clients: usize,
    ) {
        self.serve_idle(dispatch, config, max_clients, IDLE_LIMIT)
            .await;
    }

    pub(crate) async fn serve_idle<D: Dispatch>(
        &self,
        dispatch: Rc<D>,
        config: impl Fn() -> Option<Arc<ServerTls>> + 'static,
        max_clients: usize,
        idle_limit: Duration,
    ) {
        let handshakes = Places::new(MAX_HANDSHAKES);
        let service = Rc::new(Service {
            dispatch,
            config,
            admission: Admission::new(Clients::new(max_clients)),
            idle_limit,
        });
        loop {
            let (stream, address) = match self.0.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely out of descriptors: other connections must end first.
                    service.admission.log(LogLine::Accept, |times| {
                        warn!(%error, times, "cannot accept an RPC client over TLS");
                    });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(tls) = (service.config)() else {
                continue;
            };
            let _ = keep_alive(&stream);
            let (place, gone) = handshakes.enter(address.ip());
            if let Some(gone) = gone {
                service.admission.log(LogLine::HandshakeReplaced(gone), |times| {
                    let most = MAX_HANDSHAKES;
                    warn!(
                        address = %gone, most, times,
                        "RPC over TLS: no place for more handshakes: the oldest was closed for a new one"
                    );
                });
            }
            let service = Rc::clone(&service);
            tokio::task::spawn_local(async move {
                service.greet(stream, address, tls, place).await;
            });
            tokio::time::sleep(HANDSHAKE_INTERVAL).await;
        }
    }
}

impl<D: Dispatch, C: Fn() -> Option<Arc<ServerTls>>> Service<D, C> {
    /// Performs the handshake of a client, determines its role, waits for a place, and serves it.
    async fn greet(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        tls: Arc<ServerTls>,
        place: NetworkPlace,
    ) {
        let accepted = tokio::select! {
            accepted = super::accept(&tls, stream) => accepted,
            () = place.must_leave() => return,
        };
        let (stream, subject) = match accepted {
            Ok((stream, Some(subject))) => (stream, subject),
            Ok((_, None)) => return self.refused(address, &HandshakeError::NoCertificate),
            Err(error) => return self.refused(address, &error),
        };
        let (_, connection) = stream.get_ref();
        let chain = connection.peer_certificates().unwrap_or_default();
        let chain: Vec<_> = chain.iter().map(|der| der.clone().into_owned()).collect();
        let who = Rc::new(Caller {
            identity: Identity::Certificate { subject, address },
            program: String::new(),
        });
        if let Err(error) = self.dispatch.admit(&who) {
            let Identity::Certificate { subject, .. } = &who.identity else {
                return;
            };
            self.admission
                .log(LogLine::NoRole(subject.to_string()), |times| {
                    warn!(%address, times, "RPC client refused: {error}");
                });
            return self.admission.refuse(stream, error);
        }
        let entered = self.admission.enter(origin(&who.identity)).await;
        drop(place);
        match entered {
            Ok(place) => {
                let dispatch = Rc::clone(&self.dispatch);
                let caller = Rc::clone(&who);
                tokio::select! {
                    () = client(stream, dispatch, who, place, Some(self.idle_limit)) => {}
                    // Calls that run already end as they would without their client.
                    error = self.refusal(tls, &chain) => {
                        warn!("RPC client closed after a reload: {caller}: {error}");
                    }
                }
            }
            Err(full) => self.admission.refuse(stream, full),
        }
    }

    /// Resolves with the reason when a reload refuses the certificate chain of a client.
    async fn refusal(
        &self,
        mut tls: Arc<ServerTls>,
        chain: &[CertificateDer<'_>],
    ) -> rustls::Error {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match (self.config)() {
                Some(new) if !Arc::ptr_eq(&new, &tls) => {
                    if let Err(error) = new.check(chain) {
                        return error;
                    }
                    tls = new;
                }
                _ => {}
            }
        }
    }

    fn refused(&self, address: SocketAddr, error: &HandshakeError) {
        let line = LogLine::Handshake(address.ip(), error.kind());
        self.admission.log(line, |times| {
            warn!(%address, times, "RPC client refused over TLS: {error}");
        });
    }
}

fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_PROBES)
}

#[cfg(test)]
mod tests {
    //! Goal: a certificate decides who may call, and the limits of the Unix socket hold. Method:
    //! real sockets, the certificates of [`files::tests`](super::super::files), and the command
    //! line's own client on another thread.

    use std::io::{Read, Write};
    use std::path::Path;
    use std::time::Instant;

    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;
    use crate::client::{Client, ClientError};
    use crate::server::tests::Fake;
    use crate::tls::connect::Remote;
    use crate::tls::files::tests::{folder, server, server_with_lists};

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A client with files of this folder.
    fn remote(dir: &Path, address: SocketAddr, cert: &str, key: &str, ca: &str) -> Remote {
        Remote {
            address: address.to_string(),
            server_name: None,
            cert: dir.join(cert),
            key: dir.join(key),
            ca: dir.join(ca),
            crl: None,
        }
    }

    /// Serves on a free port while `with` runs on another thread.
    fn run<T: Send + 'static>(
        idle_limit: Duration,
        with: impl FnOnce(&Path, SocketAddr) -> T + Send + 'static,
    ) -> T {
        let folder = folder();
        let config = server(folder.path(), "server.pem", "server.key", "ca.pem").unwrap();
        run_in(&folder, idle_limit, move || Some(Arc::clone(&config)), with)
    }

    /// As [`run`], with certificates of this folder, and a configuration that may change.
    fn run_in<T: Send + 'static>(
        folder: &tempfile::TempDir,
        idle_limit: Duration,
        config: impl Fn() -> Option<Arc<ServerTls>> + 'static,
        with: impl FnOnce(&Path, SocketAddr) -> T + Send + 'static,
    ) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let listener = TlsListener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.address().unwrap();
            let dir = folder.path().to_owned();
            let client = tokio::task::spawn_blocking(move || with(&dir, address));
            tokio::select! {
                () = listener.serve_idle(Rc::new(Fake), config, 4, idle_limit) => unreachable!("serves forever"),
                out = client => out.unwrap(),
            }
        })
    }

    #[test]
    fn the_subject_of_the_certificate_is_the_caller() {
        let (who, long) = run(IDLE_LIMIT, |dir, address| {
            let ops = remote(dir, address, "ops.pem", "ops.key", "ca.pem");
            let mut client = Client::over_tls(&ops, PATIENCE).unwrap();
            let who = client.call_by_name("who", Value::Null).unwrap();
            let refused = client.call_by_name("refuse", Value::Null).unwrap_err();
            assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
            (who, client.call_by_name("long", Value::Null).unwrap())
        });
        assert_eq!(who, json!("CN=ops,O=Nacre tests"));
        assert_eq!(long.as_str().unwrap().len(), 100_000);
    }

    /// Goal: every wrong certificate is refused at both ends, with the cause.
    #[test]
    fn other_certificates_are_refused() {
        run(IDLE_LIMIT, |dir, address| {
            for (cert, key, ca, expected) in [
                ("expired.pem", "expired.key", "ca.pem", "CertificateExpired"),
                ("foreign.pem", "foreign.key", "ca.pem", "UnknownCA"),
                // The certificate of a server is no certificate of a client.
                ("server.pem", "server.key", "ca.pem", "refused"),
                ("ops.pem", "ops.key", "foreign_ca.pem", "UnknownIssuer"),
            ] {
                let remote = remote(dir, address, cert, key, ca);
                let outcome = Client::over_tls(&remote, PATIENCE)
                    .and_then(|mut client| client.call_by_name("echo", Value::Null));
                let error = outcome.unwrap_err();
                assert!(
                    matches!(error, ClientError::Handshake { .. }),
                    "{cert}: {error:?}"
                );
                assert!(error.to_string().contains(expected), "{cert}: {error}");
            }
            let mut other = remote(dir, address, "ops.pem", "ops.key", "ca.pem");
            other.server_name = Some("storage.example".into());
            let error = Client::over_tls(&other, PATIENCE).unwrap_err().to_string();
            assert!(error.contains("storage.example"), "{error}");
            other.server_name = Some("localhost".into());
            let mut client = Client::over_tls(&other, PATIENCE).unwrap();
            client.call_by_name("echo", Value::Null).unwrap();
        });
    }

    /// Goal: a client refuses a daemon whose certificate is revoked, or whose authority has no
    /// current list, with the cause and the remedy.
    #[test]
    fn the_certificate_of_a_daemon_is_revoked() {
        for (cert, crl, expected) in [
            ("server", None, None),
            ("revoked", None, None),
            ("server", Some("crl_server.pem"), None),
            ("revoked", Some("crl_none.pem"), None),
            (
                "revoked",
                Some("crl_server.pem"),
                Some("the daemon's certificate is revoked"),
            ),
            (
                "server",
                Some("crl_foreign.pem"),
                Some("--crl needs a current revocation list of every authority"),
            ),
            (
                "server",
                Some("crl_ended.pem"),
                Some("--crl needs a current revocation list"),
            ),
            ("server", Some("ca.pem"), Some("--crl")),
            ("server", Some("none.pem"), Some("No such file")),
        ] {
            let folder = folder();
            let [own, key] = ["pem", "key"].map(|kind| format!("{cert}.{kind}"));
            let config = server(folder.path(), &own, &key, "ca.pem").unwrap();
            let config = move || Some(Arc::clone(&config));
            let outcome = run_in(&folder, IDLE_LIMIT, config, move |dir, address| {
                let mut ops = remote(dir, address, "ops.pem", "ops.key", "ca.pem");
                ops.crl = crl.map(|name| dir.join(name));
                Client::over_tls(&ops, PATIENCE)
                    .and_then(|mut client| client.call_by_name("who", Value::Null))
            });
            match (outcome, expected) {
                (Ok(_), None) => {}
                (Err(error @ ClientError::Handshake { .. }), Some(expected)) => {
                    let error = error.to_string();
                    assert!(error.contains(expected), "{cert} {crl:?}: {error}");
                }
                (outcome, _) => panic!("{cert} {crl:?}: {outcome:?}"),
            }
        }
    }

    /// Goal: idle, silent and plain connections end, and do not keep others out.
    #[test]
    fn silent_connections_keep_no_client_out() {
        run(Duration::from_millis(300), |dir, address| {
            let silent: Vec<_> = (0..MAX_HANDSHAKES + 5)
                .map(|_| std::net::TcpStream::connect(address).unwrap())
                .collect();
            let mut plain = std::net::TcpStream::connect(address).unwrap();
            plain.write_all(b"{\"method\":\"echo\",\"id\":1}").unwrap();
            plain.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut answer = Vec::new();
            // An alert, or a reset; no answer.
            if let Err(error) = plain.read_to_end(&mut answer) {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "still open");
            }
            assert!(!String::from_utf8_lossy(&answer).contains("result"));
            let ops = remote(dir, address, "ops.pem", "ops.key", "ca.pem");
            let mut client = Client::over_tls(&ops, PATIENCE).unwrap();
            client.call_by_name("slow", Value::Null).unwrap();
            let at = Instant::now();
            std::thread::sleep(Duration::from_secs(1));
            let error = client.call_by_name("echo", Value::Null).unwrap_err();
            assert!(matches!(error, ClientError::Broken { .. }), "{error}");
            assert!(at.elapsed() < PATIENCE);
            drop(silent);
        });
    }

    /// Goal: a reload with another revocation list closes the connections of a revoked certificate,
    /// also one with a running call, and refuses new ones; other clients go on.
    #[test]
    fn a_certificate_is_revoked() {
        const FILES: [&str; 3] = ["server.pem", "server.key", "ca.pem"];
        let folder = folder();
        let read = |crl| server_with_lists(folder.path(), FILES, Some(crl)).unwrap();
        let (before, after) = (read("crl_none.pem"), read("crl_viewer.pem"));
        let current = Arc::new(Mutex::new(before));
        let effective = Arc::clone(&current);
        let config = move || Some(Arc::clone(&effective.lock()));
        run_in(&folder, IDLE_LIMIT, config, move |dir, address| {
            let of = |who: &str| {
                let [cert, key] = ["pem", "key"].map(|kind| format!("{who}.{kind}"));
                remote(dir, address, &cert, &key, "ca.pem")
            };
            let call = |client: &mut Client| client.call_by_name("who", Value::Null);
            let (ops, viewer) = (of("ops"), of("viewer"));
            let [mut stays, mut closed, mut waits] =
                [&ops, &viewer, &viewer].map(|remote| Client::over_tls(remote, PATIENCE).unwrap());
            call(&mut stays).unwrap();
            call(&mut closed).unwrap();
            call(&mut waits).unwrap();
            let waiting = std::thread::spawn(move || waits.call_by_name("wait", Value::Null));
            *current.lock() = after;
            let again = Client::over_tls(&viewer, PATIENCE).and_then(|mut new| call(&mut new));
            let refused = again.unwrap_err().to_string();
            assert!(refused.contains("CertificateRevoked"), "{refused}");
            let until = Instant::now() + PATIENCE;
            while call(&mut closed).is_ok() {
                assert!(Instant::now() < until, "the connection is still open");
                std::thread::sleep(Duration::from_millis(50));
            }
            call(&mut stays).unwrap();
            let closed = waiting.join().unwrap().unwrap_err();
            assert!(!matches!(closed, ClientError::Late { .. }), "{closed:?}");
        });
    }
}
