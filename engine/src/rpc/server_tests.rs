//! Goal: the socket behaves as SPDK's does. Method: a real socket, a dispatcher of a few lines,
//! and the bytes on the wire.

use super::*;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

struct Fake;

impl Dispatch for Fake {
    fn call(self: Rc<Self>, method: String, params: Option<Box<RawValue>>) -> CallFuture {
        Box::pin(async move {
            match method.as_str() {
                "echo" => {
                    Ok(params.unwrap_or_else(|| RawValue::from_string("null".into()).unwrap()))
                }
                "slow" => {
                    tokio::time::sleep(Duration::from_millis(60)).await;
                    Ok(RawValue::from_string("\"slow\"".into()).unwrap())
                }
                "refuse" => Err(RpcError::invalid_state("no")),
                _ => Err(RpcError::method_not_found("x")),
            }
        })
    }
}

/// Sends `pieces` and half-closes; all that comes back until the server closes.
fn exchange(pieces: &[&str]) -> Vec<String> {
    run(async |path| {
        let mut stream = UnixStream::connect(path).await.unwrap();
        for piece in pieces {
            stream.write_all(piece.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        stream.shutdown().await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text.split_inclusive('\n').map(str::to_owned).collect()
    })
}

fn run<T>(with: impl AsyncFnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let socket = Socket::bind(&path).unwrap();
        tokio::select! {
            () = socket.serve(Rc::new(Fake), 2) => unreachable!("serves for ever"),
            out = with(&path) => out,
        }
    })
}

#[test]
fn back_to_back_and_split_requests_are_answered_line_by_line() {
    assert_eq!(
        exchange(&[
            r#"{"method":"echo","params":{"a":1},"id":1}{"met"#,
            r#"hod":"echo","id":"two"}"#
        ]),
        [
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"a\":1}}\n",
            "{\"jsonrpc\":\"2.0\",\"id\":\"two\",\"result\":null}\n",
        ]
    );
}

#[test]
fn answers_come_as_they_finish() {
    let lines = exchange(&[r#"{"method":"slow","id":1}{"method":"echo","id":2}"#]);
    assert!(
        lines[0].contains("\"id\":2") && lines[1].contains("\"id\":1"),
        "{lines:?}"
    );
}

#[test]
fn batches_are_answered_in_one_array_in_completion_order() {
    let lines = exchange(&[
        r#"[{"method":"slow","id":1},{"method":"echo","id":2},{"method":"echo"},7,{"method":"refuse"}]"#,
    ]);
    assert_eq!(lines.len(), 1);
    let answers: Vec<serde_json::Value> = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(
        answers.len(),
        4,
        "the successful notification has no answer: {answers:?}"
    );
    assert_eq!(answers[3]["id"], 1);
    assert!(
        answers
            .iter()
            .any(|a| a["error"]["code"] == -32600 && a["id"].is_null())
    );
    assert!(
        answers
            .iter()
            .any(|a| a["error"]["code"] == -1 && a["id"].is_null()),
        "a notification's error is sent"
    );
}

#[test]
fn notifications_and_empty_batches() {
    assert_eq!(
        exchange(&[r#"{"method":"echo"}[{"method":"echo","id":null}]"#]),
        Vec::<String>::new()
    );
    let lines = exchange(&["[]"]);
    assert!(
        lines[0].starts_with(
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Invalid request""#
        ),
        "{lines:?}"
    );
}

#[test]
fn a_syntax_error_is_answered_and_ends_the_connection() {
    let lines = run(async |path| {
        let mut stream = UnixStream::connect(path).await.unwrap();
        stream.write_all(b"{\"method\": oops").await.unwrap();
        let mut text = String::new();
        // Not half-closed: the server must not wait for more.
        stream.read_to_string(&mut text).await.unwrap();
        text
    });
    assert!(
        lines.starts_with(
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error""#
        ),
        "{lines}"
    );
}

#[test]
fn more_clients_than_places_wait_their_turn() {
    run(async |path| {
        let first = UnixStream::connect(path).await.unwrap();
        let second = UnixStream::connect(path).await.unwrap();
        let mut third = UnixStream::connect(path).await.unwrap();
        third
            .write_all(br#"{"method":"echo","id":3}"#)
            .await
            .unwrap();
        let mut byte = [0];
        let early =
            tokio::time::timeout(Duration::from_millis(50), third.read_exact(&mut byte)).await;
        assert!(
            early.is_err(),
            "the third client is not served while two are"
        );
        drop((first, second));
        let since = Instant::now();
        third.read_exact(&mut byte).await.unwrap();
        assert!(since.elapsed() < Duration::from_secs(5));
    });
}

/// Clients that take no answers any more make room, whether they close or not.
#[test]
fn clients_that_take_no_answers_make_room() {
    run(async |path| {
        let mut gone = Vec::new();
        for _ in 0..2 {
            let stream = std::os::unix::net::UnixStream::connect(path).unwrap();
            stream.shutdown(std::net::Shutdown::Read).unwrap();
            (&stream).write_all(br#"{"method":"echo","id":1}"#).unwrap();
            gone.push(stream);
        }
        let mut other = UnixStream::connect(path).await.unwrap();
        other
            .write_all(br#"{"method":"echo","id":3}"#)
            .await
            .unwrap();
        let mut byte = [0];
        let served = other.read_exact(&mut byte);
        let served = tokio::time::timeout(Duration::from_secs(10), served).await;
        served.expect("it is served").unwrap();
    });
}
