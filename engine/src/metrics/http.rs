//! Perform: `GET /metrics` and `GET /healthz` over HTTP, a bounded number of clients at a time.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tracing::{debug, warn};

use super::Scrape;
use crate::engine::{Engine, Phase};

/// Clients served at once; more wait to be accepted.
const MAX_CLIENTS: usize = 16;
/// A client that has not sent its request or taken its answer by then is dropped.
const PATIENCE: Duration = Duration::from_secs(10);

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

/// Serves for ever.
pub async fn serve(listener: TcpListener, engine: Rc<Engine>) {
    let places = Rc::new(tokio::sync::Semaphore::new(MAX_CLIENTS));
    loop {
        let Ok(permit) = places.acquire().await else {
            return;
        };
        permit.forget();
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "cannot accept a metrics client");
                places.add_permits(1);
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (engine, places) = (Rc::clone(&engine), Rc::clone(&places));
        tokio::task::spawn_local(async move {
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
            match tokio::time::timeout(2 * PATIENCE, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, "metrics client lost"),
                Err(_) => debug!("metrics client dropped: too slow"),
            }
            places.add_permits(1);
        });
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
        "/healthz" if engine.phase() == Phase::Runtime && engine.is_configured() => {
            plain(StatusCode::OK, "ok\n")
        }
        "/healthz" => plain(StatusCode::SERVICE_UNAVAILABLE, "not serving\n"),
        _ => plain(StatusCode::NOT_FOUND, "/metrics or /healthz\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::testing::bench;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn metrics_and_health_and_nothing_else() {
        let bench = bench();
        bench.run(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(serve(listener, Rc::clone(&bench.engine)));
            let ask = async |request: &str| {
                let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
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
            bench.engine.set_phase(Phase::Stopping);
            assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 503"));
            let refused = bind(address).await.unwrap_err();
            assert!(refused.to_string().contains("[metrics] listen"));
        });
    }
}
