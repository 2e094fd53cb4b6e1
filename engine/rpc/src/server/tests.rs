//! Goal: the socket behaves like SPDK's. Method: a real socket, a small dispatcher, and comparison
//! of the bytes sent.

use super::*;
use std::io::Write;
use std::path::Path;

use crate::client::Client;

pub(crate) struct Fake;

impl Dispatch for Fake {
    fn admit(&self, caller: &Caller) -> Result<(), RpcError> {
        let Identity::Local(credentials) = &caller.identity else {
            return Ok(());
        };
        match credentials.uid {
            4999 => Err(RpcError::errno(Errno::EACCES, "a stranger")),
            _ => Ok(()),
        }
    }

    fn call(
        self: Rc<Self>,
        caller: Rc<Caller>,
        method: String,
        params: Option<SecretJson>,
    ) -> CallFuture {
        Box::pin(async move {
            match method.as_str() {
                "echo" => Ok(params.as_deref().unwrap_or(RawValue::NULL).to_owned()),
                "slow" => {
                    tokio::time::sleep(Duration::from_millis(60)).await;
                    Ok(RawValue::from_string("\"slow\"".into()).unwrap())
                }
                "wait" => std::future::pending().await,
                "long" => {
                    let text = "x".repeat(100_000);
                    Ok(RawValue::from_string(format!("\"{text}\"")).unwrap())
                }
                "who" => {
                    let text = match &caller.identity {
                        Identity::Local(of) => format!("[{},{},{:?}]", of.uid, of.gid, of.groups),
                        Identity::Certificate { subject, .. } => format!("\"{subject}\""),
                        Identity::Account { name, .. } | Identity::ApiToken { name, .. } => {
                            format!("\"{name}\"")
                        }
                    };
                    Ok(RawValue::from_string(text).unwrap())
                }
                "refuse" => Err(RpcError::invalid_state("no")),
                _ => Err(RpcError::method_not_found("x")),
            }
        })
    }
}

/// Sends `pieces` and half-closes. Returns all lines until the server closes.
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
    run_with(Clients::new(2), with)
}

fn run_with<T>(clients: Rc<Clients>, with: impl AsyncFnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let socket = Socket::bind(&path).unwrap();
        tokio::select! {
            () = socket.serve_clients(Rc::new(Fake), clients) => unreachable!("serves forever"),
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

async fn ask(stream: &mut UnixStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut line = String::new();
    let mut byte = [0];
    while !line.ends_with('\n') {
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_exact(&mut byte));
        read.await
            .expect("an answer comes")
            .expect("the server answers");
        line.push(char::from(byte[0]));
    }
    line
}

/// Goal: idle clients do not lock out others, and the replaced one learns the reason. Method: idle
/// clients in all places, then a new client with a call.
#[test]
fn idle_clients_make_room_for_the_next() {
    run(async |path| {
        let mut first = UnixStream::connect(path).await.unwrap();
        let mut second = UnixStream::connect(path).await.unwrap();
        ask(&mut second, r#"{"method":"echo","id":2}"#).await;
        let mut third = UnixStream::connect(path).await.unwrap();
        let answer = ask(&mut third, r#"{"method":"echo","id":3}"#).await;
        assert!(answer.contains(r#""id":3,"result""#), "{answer}");
        let why = ask(&mut first, "").await;
        assert!(
            why.contains(r#""id":null,"error":{"code":-11"#)
                && why.contains("[rpc] max_clients is 2"),
            "{why}"
        );
        assert_eq!(first.read(&mut [0; 16]).await.unwrap(), 0, "it is closed");
        // The most recently active client keeps its place.
        ask(&mut second, r#"{"method":"echo","id":4}"#).await;
    });
}

/// Goal: if every place has a client with a running call, the next client gets an error that names
/// the key, after a bounded time. It is served once there is room.
#[test]
fn a_client_beyond_busy_ones_is_refused_with_the_reason() {
    run(async |path| {
        let mut busy = Vec::new();
        for _ in 0..2 {
            let mut stream = UnixStream::connect(path).await.unwrap();
            stream
                .write_all(br#"{"method":"wait","id":1}"#)
                .await
                .unwrap();
            busy.push(stream);
        }
        let (at, path) = (Instant::now(), path.to_owned());
        let refused = tokio::task::spawn_blocking({
            let path = path.clone();
            move || {
                let mut client = Client::connect(&path, Duration::from_secs(30)).unwrap();
                client.call_by_name("echo", serde_json::Value::Null)
            }
        });
        let error = refused.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("[rpc] max_clients is 2"), "{error}");
        assert!(at.elapsed() < Duration::from_secs(10));
        drop(busy.pop());
        let mut next = UnixStream::connect(&path).await.unwrap();
        ask(&mut next, r#"{"method":"echo","id":3}"#).await;
    });
}

/// Goal: unread bytes are bounded over all clients; a client beyond the bound gets an error.
/// Method: one client requests much more than sockets hold and reads nothing; another one requests
/// long and short answers.
#[test]
fn unread_answers_are_bounded_in_sum() {
    run_with(Clients::with_unsent(8, 1_000_000), async |path| {
        let mut greedy = UnixStream::connect(path).await.unwrap();
        let long = r#"{"method":"long","id":1}"#;
        greedy.write_all(long.repeat(50).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut other = UnixStream::connect(path).await.unwrap();
        other.write_all(long.repeat(20).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut answers = vec![ask(&mut other, "").await];
        for _ in 1..20 {
            answers.push(ask(&mut other, "").await);
        }
        let refused = |a: &&String| a.contains(r#""code":-11"#);
        let (refused, served): (Vec<_>, Vec<_>) = answers.iter().partition(refused);
        // Sockets buffer a few answers.
        assert!(served.len() < 10, "{} served", served.len());
        assert!(
            refused[0].contains("more than 1000000 bytes"),
            "{}",
            refused[0]
        );
        let short = ask(&mut other, r#"{"method":"echo","id":2}"#).await;
        assert!(short.contains("result"), "{short}");
        drop(greedy);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let answer = ask(&mut other, long).await;
        assert!(answer.len() > 100_000);
    });
}

/// Goal: clients that stop reading make room, whether they close or not.
#[test]
fn clients_that_stop_reading_make_room() {
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

/// Goal: calls carry the credentials of the thread that connected, and a client that the daemon
/// does not admit reads why. Method: threads of this process with other identities.
#[test]
fn calls_carry_the_identity_of_their_client() {
    use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: calls_carry_the_identity_of_their_client: needs root");
        return;
    }
    run(async |path| {
        let of = |path: &Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, mode).unwrap();
        };
        of(path, 0o666);
        of(path.parent().unwrap(), 0o711);
        let call = async |uid: u32, groups: Vec<u32>| {
            let path = path.to_owned();
            let called = tokio::task::spawn_blocking(move || {
                // A thread of its own: the runtime's threads keep their identity.
                let other = std::thread::spawn(move || {
                    let groups: Vec<Gid> = groups.into_iter().map(Gid::from_raw).collect();
                    let (gid, uid) = (Gid::from_raw(uid + 1), Uid::from_raw(uid));
                    set_thread_groups(&groups).unwrap();
                    set_thread_res_gid(gid, gid, gid).unwrap();
                    set_thread_res_uid(uid, uid, uid).unwrap();
                    let mut client = Client::connect(&path, Duration::from_secs(30)).unwrap();
                    client.call_by_name("who", serde_json::Value::Null)
                });
                other.join().unwrap()
            });
            called.await.unwrap()
        };
        let known = call(4000, vec![7, 4242]).await.unwrap();
        assert_eq!(known, serde_json::json!([4000, 4001, [7, 4242]]));
        let refused = call(4999, vec![]).await.unwrap_err().to_string();
        assert!(refused.contains("a stranger"), "{refused}");
    });
}

/// Goal: the end of a client closes its connection, although a call of it still runs. Method: the
/// future of a client is dropped, as a reload does that refuses its certificate.
#[test]
fn a_running_call_keeps_no_connection_open() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (mut near, far) = UnixStream::pair().unwrap();
        let who = Rc::new(admit(&far, &Fake).ok().unwrap());
        let Entry::Admitted(place) = Clients::new(2).enter(origin(&who.identity), Instant::now())
        else {
            panic!("there is a place");
        };
        near.write_all(br#"{"method":"wait","id":1}{"method":"echo","id":2}"#)
            .await
            .unwrap();
        let mut answer = [0; 512];
        let answered = tokio::select! {
            () = client(far, Rc::new(Fake), who, place, None) => panic!("the client is there"),
            answered = near.read(&mut answer) => answered.unwrap(),
        };
        assert!(
            answer[..answered].ends_with(b"\n"),
            "the other call is answered"
        );
        let end = tokio::time::timeout(Duration::from_secs(10), near.read(&mut answer)).await;
        assert_eq!(end.expect("the connection is closed").unwrap(), 0);
    });
}
