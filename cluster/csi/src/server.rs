//! The socket that the orchestrator's helpers connect to: made, replaced if it is a stale one of
//! ours, served, and removed at the end.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream as Stream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use rustix::fs::Mode;
use tokio::net::UnixListener;
use tonic::transport::Server;
use tracing::info;

use crate::route::{Driver, MAX_CALLS, Router};

/// Time for calls that run at the end to be answered.
const DRAIN: Duration = Duration::from_secs(20);
/// Time for the last answers to leave.
const FLUSH: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(20);
/// The owner only: a writer of the socket can mount and delete volumes.
const SOCKET_MODE: u32 = 0o600;

/// `unix:///path/csi.sock`, or the path alone.
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
    #[error("{}: this is no socket; remove it, or name another path", .0.display())]
    NoSocket(PathBuf),
    #[error("cannot make the socket {}: {source}", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("cannot serve the socket: {0}")]
    Transport(#[from] tonic::transport::Error),
    #[error("calls still ran {} s after the end was asked for", DRAIN.as_secs())]
    Busy,
}

/// Serves the socket until `end`, then lets running calls end.
pub async fn serve(
    endpoint: &Endpoint,
    driver: Arc<Driver>,
    end: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    let path = endpoint.path();
    let socket = |source| ServeError::Socket {
        path: path.to_owned(),
        source,
    };
    clear(path)?;
    let listener = bind(path).map_err(socket)?;
    info!(socket = %path.display(), "serving CSI");
    let incoming = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    let (ended, drained) = tokio::sync::oneshot::channel();
    let end = async move {
        end.await;
        let _ = ended.send(());
    };
    let router = Router::new(driver);
    let idle = router.idle();
    let server = Server::builder()
        .concurrency_limit_per_connection(MAX_CALLS)
        .max_concurrent_streams(u32::try_from(MAX_CALLS).ok())
        .serve_with_incoming_shutdown(router, incoming, end);
    // A client may keep its connection: the calls count.
    let drain = async {
        if drained.await.is_err() {
            std::future::pending::<()>().await;
        }
        let until = tokio::time::Instant::now() + DRAIN;
        while !idle() {
            if tokio::time::Instant::now() >= until {
                return Err(ServeError::Busy);
            }
            tokio::time::sleep(LOOK).await;
        }
        tokio::time::sleep(FLUSH).await;
        Ok(())
    };
    let outcome = tokio::select! {
        outcome = server => outcome.map_err(ServeError::from),
        outcome = drain => outcome,
    };
    // Another process may have taken the path meanwhile: then it is not ours to remove.
    if is_stale(path) {
        let _ = std::fs::remove_file(path);
    }
    outcome
}

/// Removes a socket that no process serves. Anything else is refused.
fn clear(path: &Path) -> Result<(), ServeError> {
    let found = match path.symlink_metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            let path = path.to_owned();
            return Err(ServeError::Socket { path, source });
        }
    };
    if !found.file_type().is_socket() {
        return Err(ServeError::NoSocket(path.to_owned()));
    }
    if !is_stale(path) {
        return Err(ServeError::Served(path.to_owned()));
    }
    std::fs::remove_file(path).map_err(|source| ServeError::Socket {
        path: path.to_owned(),
        source,
    })
}

fn is_stale(path: &Path) -> bool {
    matches!(Stream::connect(path), Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}

/// The mode is set before the socket exists under its name: nobody else can connect meanwhile.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
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
