//! Serves `GET /metrics` and `GET /healthz` over HTTP, to a bounded number of clients at a time. If
//! `[metrics] token_file` is set, only requests with its token are answered.
//!
//! Serving takes milliseconds, so a client that stays is slow or idle. If all places are taken, a
//! new client replaces the oldest client of the address with the most clients. So slow or idle
//! clients cannot lock out health checks.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use nacre_reactor::{Clock, Repeats};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::Scrape;
use crate::services::engine::Engine;
use crate::services::lifecycle::Phase;

/// Most clients at a time.
pub const MAX_CLIENTS: usize = 64;
/// Limit for a client to send its request and read its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Shortest interval between equal log lines about clients.
const SAID_AGAIN: Duration = Duration::from_secs(600);

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

/// Connected clients in order of arrival.
#[derive(Default)]
struct Clients {
    open: RefCell<BTreeMap<u64, (IpAddr, Rc<Notify>)>>,
    next: Cell<u64>,
}

/// A client's place, freed on drop.
struct Place {
    id: u64,
    leave: Rc<Notify>,
    clients: Rc<Clients>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clients.open.borrow_mut().remove(&self.id);
    }
}

impl Clients {
    /// Takes a place; also returns the address of the client that was replaced, if any.
    fn enter(self: &Rc<Clients>, address: IpAddr) -> (Place, Option<IpAddr>) {
        let mut open = self.open.borrow_mut();
        let full = open.len() >= MAX_CLIENTS;
        let gone = full.then(|| {
            let mut of_address = HashMap::<IpAddr, usize>::new();
            for (address, _) in open.values() {
                *of_address.entry(*address).or_default() += 1;
            }
            // Keys ascend with time: the first of an address is its oldest.
            let most = open
                .iter()
                .min_by_key(|(id, (address, _))| (std::cmp::Reverse(of_address[address]), **id));
            *most.expect("it is full").0
        });
        let gone = gone
            .and_then(|id| open.remove(&id))
            .map(|(address, leave)| {
                leave.notify_one();
                address
            });
        let id = self.next.get();
        self.next.set(id + 1);
        let leave = Rc::new(Notify::new());
        open.insert(id, (address, Rc::clone(&leave)));
        let clients = Rc::clone(self);
        (Place { id, leave, clients }, gone)
    }
}

/// Accepts clients forever.
pub async fn serve(listener: TcpListener, engine: Rc<Engine>) {
    let clients = Rc::new(Clients::default());
    let mut said = Repeats::new(SAID_AGAIN);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                if let Some(left_out) = said.admit("accept", Clock::real().now()) {
                    warn!(%error, times = left_out + 1, "cannot accept a metrics client");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (place, gone) = clients.enter(address);
        if let Some(address) = gone
            && let Some(left_out) = said.admit("full", Clock::real().now())
        {
            warn!(
                clients = MAX_CLIENTS,
                %address,
                times = left_out + 1,
                "no place for more metrics clients: the oldest was closed for a new one"
            );
        }
        tokio::task::spawn_local(client(stream, Rc::clone(&engine), place));
    }
}

async fn client(stream: TcpStream, engine: Rc<Engine>, place: Place) {
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
    tokio::select! {
        served = tokio::time::timeout(2 * PATIENCE, connection) => match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "metrics client lost"),
            Err(_) => debug!("metrics client dropped: too slow"),
        },
        () = place.leave.notified() => debug!("metrics client dropped: another one needs its place"),
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
            let mut idle = Vec::new();
            for _ in 0..MAX_CLIENTS + 5 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(b"GET /metrics HT").await.unwrap();
                idle.push(stream);
            }
            let at = Instant::now();
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200"), "{text}");
            assert!(at.elapsed() < PATIENCE / 2, "{:?}", at.elapsed());
        });
    }

    #[test]
    fn the_address_with_most_clients_makes_room() {
        let clients = Rc::new(Clients::default());
        let [lone, many]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|a| a.parse().unwrap());
        let mut places = vec![clients.enter(lone).0];
        for _ in 1..MAX_CLIENTS {
            let (place, gone) = clients.enter(many);
            assert_eq!(gone, None);
            places.push(place);
        }
        assert_eq!(clients.enter(lone).1, Some(many));
        assert!(!clients.open.borrow().contains_key(&1), "its oldest");
        drop(places);
        assert!(clients.open.borrow().is_empty());
    }
}
