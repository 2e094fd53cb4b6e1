//! Serves `GET /metrics` and `GET /healthz` over HTTP, to at most [`MAX_CLIENTS`] clients at a
//! time. If `[metrics] token_file` is set, only requests with its token are answered.
//!
//! A request is served in milliseconds, so a client that stays connected is slow or idle. A new
//! client replaces it if all places are taken, see [`Places`]. With `[metrics.tls]` the listener
//! uses TLS, and requires client certificates if `client_ca` is set.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use nacre_reactor::{Clock, Repeats};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use super::Scrape;
use crate::rpc::places::{NetworkPlace, Places};
use crate::rpc::tls;
use crate::services::Engine;
use crate::services::lifecycle::Phase;

/// Most clients at a time.
pub const MAX_CLIENTS: usize = 64;
/// Time limit for a client to send its request and read the reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// Shortest interval between equal log lines about clients.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

#[derive(Debug, thiserror::Error)]
#[error("cannot serve metrics on {address}: {source}; choose another [metrics] listen")]
pub struct BindError {
    pub address: SocketAddr,
    pub source: std::io::Error,
}

pub async fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| BindError { address, source })
}

/// Accepts clients forever.
pub async fn serve(listener: TcpListener, engine: Rc<Engine>) {
    let clients = Places::new(MAX_CLIENTS);
    let mut log_limit = Repeats::new(LOG_INTERVAL);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                if let Some(left_out) = log_limit.admit("accept", Clock::real().now()) {
                    warn!(%error, times = left_out + 1, "cannot accept a metrics client");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (place, gone) = clients.enter(address);
        if let Some(address) = gone
            && let Some(left_out) = log_limit.admit("full", Clock::real().now())
        {
            warn!(
                clients = MAX_CLIENTS,
                %address,
                times = left_out + 1,
                "no place for more metrics clients: the oldest was closed for a new one"
            );
        }
        tokio::task::spawn_local(client(stream, Rc::clone(&engine), place));
        if engine.tunables().http_tls.is_some() {
            tokio::time::sleep(tls::HANDSHAKE_INTERVAL).await;
        }
    }
}

async fn client(stream: TcpStream, engine: Rc<Engine>, place: NetworkPlace) {
    let served = async {
        match engine.tunables().http_tls {
            None => serve_stream(stream, Rc::clone(&engine)).await,
            Some(tls) => match tls::accept(&tls, stream).await {
                Ok((stream, _)) => serve_stream(stream, Rc::clone(&engine)).await,
                Err(error) => debug!(%error, "metrics client refused"),
            },
        }
    };
    tokio::select! {
        served = tokio::time::timeout(2 * PATIENCE, served) => if served.is_err() {
            debug!("metrics client dropped: too slow");
        },
        () = place.must_leave() => debug!("metrics client dropped: another one needs its place"),
    }
}

async fn serve_stream(stream: impl AsyncRead + AsyncWrite + Unpin, engine: Rc<Engine>) {
    let service = service_fn(|request| {
        let engine = Rc::clone(&engine);
        async move { Ok::<_, Infallible>(answer(&engine, &request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .keep_alive(false)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        debug!(%error, "metrics client lost");
    }
}

async fn answer(engine: &Engine, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let text = |status: StatusCode, kind: &'static str, body: String| {
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
        response
    };
    let plain = |status, body: &str| text(status, "text/plain; charset=utf-8", body.to_owned());
    let token = engine.tunables().http_token;
    if token.is_some_and(|token| !token.is_in(request.headers())) {
        let mut refused = plain(StatusCode::UNAUTHORIZED, "a token is needed\n");
        refused.headers_mut().insert(
            header::WWW_AUTHENTICATE,
            header::HeaderValue::from_static("Bearer"),
        );
        return refused;
    }
    if request.method() != Method::GET {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
        refused
            .headers_mut()
            .insert(header::ALLOW, header::HeaderValue::from_static("GET"));
        return refused;
    }
    match request.uri().path() {
        "/metrics" => text(
            StatusCode::OK,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Scrape::of(engine).await.text(),
        ),
        "/healthz"
            if engine.lifecycle.phase() == Phase::Runtime && engine.lifecycle.is_configured() =>
        {
            plain(StatusCode::OK, "ok\n")
        }
        "/healthz" => plain(StatusCode::SERVICE_UNAVAILABLE, "not serving\n"),
        _ => plain(StatusCode::NOT_FOUND, "/metrics or /healthz\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::testing::test_daemon;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn metrics_and_health_and_nothing_else() {
        let daemon = test_daemon();
        daemon.run(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(serve(listener, Rc::clone(&daemon.engine)));
            let ask = async |request: &str| {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream
                    .write_all(format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
                    .await
                    .unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                text
            };
            let metrics = ask("GET /metrics").await;
            assert!(
                metrics.starts_with("HTTP/1.1 200") && metrics.contains("nacre_uptime_seconds "),
                "{metrics}"
            );
            assert!(metrics.ends_with("# EOF\n"), "{metrics}");
            assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 200"));
            assert!(ask("POST /metrics").await.starts_with("HTTP/1.1 405"));
            assert!(ask("GET /other").await.starts_with("HTTP/1.1 404"));
            daemon.engine.lifecycle.set_phase(Phase::Stopping);
            assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 503"));
            let refused = bind(address).await.unwrap_err();
            assert!(refused.to_string().contains("[metrics] listen"));
        });
    }

    /// Goal: with a token, nothing is answered without it. Method: requests with no, a wrong and
    /// the right token.
    #[test]
    fn a_token_is_needed_where_one_is_set() {
        use crate::services::http_token::Token;
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Token::read(&path)
        };
        const TOKEN: &str = "0123456789abcdef";
        for (text, mode, cause) in [
            (TOKEN, 0o644, "chmod 600"),
            ("short", 0o600, "at least 16"),
            ("0123456789 abcdef", 0o600, "letters and digits"),
        ] {
            let refused = write(text, mode).unwrap_err().to_string();
            assert!(refused.contains(cause), "{refused}");
        }
        let token = write(&format!("{TOKEN}\n"), 0o600).unwrap();
        assert_eq!(format!("{token:?}"), "Token");
        let daemon = test_daemon();
        let mut tunables = daemon.engine.tunables();
        tunables.http_token = Some(token);
        daemon.engine.tune(tunables);
        daemon.run(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(serve(listener, Rc::clone(&daemon.engine)));
            let ask = async |path: &str, authorization: &str| {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n");
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                text
            };
            for path in ["/metrics", "/healthz"] {
                for wrong in [
                    "",
                    "Authorization: Bearer\r\n",
                    "Authorization: Bearer \r\n",
                    "Authorization: Bearer 0123456789abcdee\r\n",
                    "Authorization: Bearer 0123456789abcdef0\r\n",
                    "Authorization: Basic 0123456789abcdef\r\n",
                ] {
                    let answer = ask(path, wrong).await;
                    assert!(answer.starts_with("HTTP/1.1 401"), "{wrong}: {answer}");
                    assert!(
                        answer.to_lowercase().contains("www-authenticate: bearer"),
                        "{answer}"
                    );
                    assert!(!answer.contains("nacre_"), "{answer}");
                }
                let answer = ask(path, "authorization: bearer 0123456789abcdef\r\n").await;
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            }
        });
    }

    /// Goal: idle and slow clients do not lock out a health check. Method: more of them than
    /// places, each with half a request, then a check.
    #[test]
    fn idle_clients_do_not_lock_out_health_checks() {
        let daemon = test_daemon();
        daemon.run(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(serve(listener, Rc::clone(&daemon.engine)));
            // Before the first one, which is dropped after PATIENCE.
            let at = Instant::now();
            let mut idle = Vec::new();
            for _ in 0..MAX_CLIENTS + 5 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(b"GET /metrics HT").await.unwrap();
                idle.push(stream);
            }
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200"), "{text}");
            assert!(at.elapsed() < PATIENCE, "{:?}", at.elapsed());
        });
    }

    /// Goal: with `[metrics.tls]` only TLS is served, to clients with a certificate if
    /// `client_ca` is set, and to none with a revoked one. Method: the certificates of the RPC
    /// server's tests.
    #[test]
    fn tls_and_certificates_can_be_required() {
        use crate::rpc::tls::files::{Files, Named, client};
        use std::io::{Read, Write};
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            path
        };
        macro_rules! of_tests {
            ($name:literal) => {
                file(
                    $name,
                    include_str!(concat!("../../rpc/src/tls/test_files/", $name)),
                )
            };
        }
        let (cert, key, ca) = (
            of_tests!("server.pem"),
            of_tests!("server.key"),
            of_tests!("ca.pem"),
        );
        let (ops, ops_key) = (of_tests!("ops.pem"), of_tests!("ops.key"));
        let (viewer, viewer_key) = (of_tests!("viewer.pem"), of_tests!("viewer.key"));
        let crl = of_tests!("crl_viewer.pem");
        let (foreign, foreign_key) = (of_tests!("foreign.pem"), of_tests!("foreign.key"));
        let named = |path| Named { key: "x", path };
        let daemon = test_daemon();
        let mut tunables = daemon.engine.tunables();
        let files = Files {
            cert: named(&cert),
            key: named(&key),
            ca: Some(named(&ca)),
            crl: Some(named(&crl)),
        };
        tunables.http_tls = Some(files.server().unwrap());
        daemon.engine.tune(tunables);
        let good = client(named(&ops), named(&ops_key), named(&ca), None).unwrap();
        let bad = client(named(&foreign), named(&foreign_key), named(&ca), None).unwrap();
        let revoked = client(named(&viewer), named(&viewer_key), named(&ca), None).unwrap();
        daemon.run(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(serve(listener, Rc::clone(&daemon.engine)));
            let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
            let ask = async |config| {
                let work = move || {
                    let name = "localhost".try_into().unwrap();
                    let connection = rustls::ClientConnection::new(config, name).unwrap();
                    let socket = std::net::TcpStream::connect(address).unwrap();
                    let mut stream = rustls::StreamOwned::new(connection, socket);
                    stream.write_all(request)?;
                    let mut text = String::new();
                    stream.read_to_string(&mut text)?;
                    Ok::<_, std::io::Error>(text)
                };
                tokio::task::spawn_blocking(work).await.unwrap()
            };
            let text = ask(good).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200"), "{text}");
            ask(bad).await.unwrap_err();
            ask(revoked).await.unwrap_err();
            let mut plain = TcpStream::connect(address).await.unwrap();
            plain.write_all(request).await.unwrap();
            let mut answer = Vec::new();
            let _ = plain.read_to_end(&mut answer).await;
            assert!(!answer.windows(4).any(|part| part == b"HTTP"));
        });
    }
}
