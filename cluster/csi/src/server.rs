//! The driver's socket, to which the orchestrator's helpers connect. [`serve`] creates it, replaces
//! it if no process serves it any more, answers calls on it, and removes it at the end.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use nacre_engine_rpc::socket::{is_served, obstacle};
use nacre_engine_values::files::Inode;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;
use tonic::transport::Server;
use tracing::{info, warn};

use crate::route::{Driver, MAX_CALLS, MAX_PROBES, Router};

/// Time at the end for running calls to be answered.
const DRAIN: Duration = Duration::from_secs(20);
/// Time for the last answers to leave.
const FLUSH: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(20);
/// Pause after a failed accept: the process may be out of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Access for the owner only: a process that may connect can mount and delete volumes.
const SOCKET_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The address of the socket: `unix:///path/csi.sock`, or the path alone. The path is absolute and
/// ends with `.sock`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(PathBuf);

impl Endpoint {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix://");
        let path = path.or_else(|| text.strip_prefix("unix:"));
        let path = Path::new(path.unwrap_or(text));
        let is_good = path.is_absolute() && path.extension().is_some_and(|end| end == "sock");
        if is_good {
            Ok(Self(path.to_owned()))
        } else {
            Err(format!(
                "\"{text}\" is not the address of a socket: give unix:///DIRECTORY/NAME.sock"
            ))
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{}: a process serves this socket already; end it, or name another socket", .0.display())]
    Served(PathBuf),
    #[error("{}: this is {kind} and no socket; remove it, or name another path", path.display())]
    NoSocket { path: PathBuf, kind: &'static str },
    #[error("cannot make the socket {}: {source}", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("cannot serve the socket: {0}")]
    Transport(#[from] tonic::transport::Error),
    #[error("calls still ran {} s after the end was asked for", DRAIN.as_secs())]
    Busy,
}

/// Serves the socket until `end`, then lets running calls end, for at most 20 s
/// ([`ServeError::Busy`]).
pub async fn serve(
    endpoint: &Endpoint,
    driver: Arc<Driver>,
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let path = endpoint.path();
    let socket = |source| ServeError::Socket {
        path: path.to_owned(),
        source,
    };
    clear(path)?;
    let listener = bind(path).map_err(socket)?;
    info!(socket = %path.display(), "serving CSI");
    let inode = Inode::at(path).map_err(socket)?;
    let incoming = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        if let Err(error) = &accepted {
            warn!(%error, "cannot accept a connection");
            tokio::time::sleep(PAUSE).await;
        }
        Some((accepted, listener))
    });
    let (ended, asked) = tokio::sync::oneshot::channel();
    let end = async move {
        end.await;
        let _ = ended.send(());
    };
    let router = Router::new(driver);
    let idle = router.idle();
    // Calls are refused by the router, not made to wait here.
    let most = 2 * MAX_CALLS + MAX_PROBES;
    let server = Server::builder()
        .concurrency_limit_per_connection(most)
        .max_concurrent_streams(u32::try_from(most).ok())
        .serve_with_incoming_shutdown(router, incoming, end);
    // A client may keep its connection: the calls count.
    let drain = async {
        if asked.await.is_err() {
            std::future::pending::<()>().await;
        }
        drained(&idle).await
    };
    let outcome = tokio::select! {
        outcome = server => match outcome {
            // A call goes on when its caller has left.
            Ok(()) => drained(&idle).await,
            Err(error) => Err(error.into()),
        },
        outcome = drain => outcome,
    };
    // Another process may have taken the path meanwhile: then it is not ours to remove.
    if let Some(inode) = inode {
        inode.remove(path);
    }
    outcome
}

/// Waits until no call runs, for at most [`DRAIN`], and then for [`FLUSH`].
async fn drained(idle: &impl Fn() -> bool) -> Result<(), ServeError> {
    let until = tokio::time::Instant::now() + DRAIN;
    while !idle() {
        if tokio::time::Instant::now() >= until {
            return Err(ServeError::Busy);
        }
        tokio::time::sleep(LOOK).await;
    }
    tokio::time::sleep(FLUSH).await;
    Ok(())
}

/// Removes a socket that no process serves. Anything else is refused.
fn clear(path: &Path) -> Result<(), ServeError> {
    let failed = |source| ServeError::Socket {
        path: path.to_owned(),
        source,
    };
    if let Some(kind) = obstacle(path).map_err(failed)? {
        let path = path.to_owned();
        return Err(ServeError::NoSocket { path, kind });
    }
    if is_served(path) {
        return Err(ServeError::Served(path.to_owned()));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// The file gets its mode as it is made, so that no other user connects meanwhile. The mask of the
/// process stays: other threads make files.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, SOCKET_MODE)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_socket() {
        for good in [
            "unix:///csi/csi.sock",
            "unix:/csi/csi.sock",
            "/csi/csi.sock",
        ] {
            let endpoint: Endpoint = good.parse().expect(good);
            assert_eq!(endpoint.path(), Path::new("/csi/csi.sock"));
        }
        for bad in [
            "",
            "csi.sock",
            "tcp://127.0.0.1:9",
            "unix:///csi/csi",
            "unix://csi.sock",
        ] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}
