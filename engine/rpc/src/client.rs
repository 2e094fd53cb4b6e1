//! JSON-RPC 2.0 client of the daemon's management socket or TLS listener, for the command line.
//! Blocking; one call at a time.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::{INVALID_STATE, RpcError, STARTING};
use super::folder;
use super::method::Method;
use super::tls::connect::{self, ConnectError, HandshakeFailure, Remote};

/// Why a call failed: no connection, a broken connection, no reply in time, or an error reply.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no daemon answers at {}: {source}; start one with `nacre serve`, or name its socket with -r", path.display())]
    Unreachable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("no daemon answers at {address}: {source}; its [rpc.tls] listen must be this address")]
    Remote {
        address: String,
        source: std::io::Error,
    },
    #[error("TLS with {address}: {source}")]
    Handshake {
        address: String,
        source: Box<HandshakeFailure>,
    },
    #[error("the connection to the daemon broke during {method}: {source}")]
    Broken {
        method: String,
        source: std::io::Error,
    },
    #[error("the daemon did not answer {method} within {} s", .after.as_secs())]
    Late { method: String, after: Duration },
    #[error("{method}: {error}")]
    Refused { method: String, error: RpcError },
    #[error("the daemon's answer to {method} cannot be read: {text}")]
    Strange { method: String, text: String },
}

/// A connection to the management socket.
#[derive(Debug)]
pub struct Client {
    stream: Stream,
    received: Vec<u8>,
    next_id: u64,
    timeout: Duration,
}

#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tls(Box<connect::Stream>, Remote),
}

impl Stream {
    fn set_read_timeout(&self, limit: Duration) -> std::io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(Some(limit)),
            Self::Tls(stream, _) => stream.sock.set_read_timeout(Some(limit)),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(bytes),
            Self::Tls(stream, _) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }

    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(into),
            Self::Tls(stream, _) => stream.read(into),
        }
    }
}

impl Client {
    /// Connects to the UNIX socket at `path`. `timeout` limits the wait for each reply.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream =
            (folder::trust(path).and_then(|()| UnixStream::connect(path))).map_err(|source| {
                ClientError::Unreachable {
                    path: path.to_owned(),
                    source,
                }
            })?;
        Ok(Self::on(Stream::Unix(stream), timeout))
    }

    /// Connects to the TLS listener of a daemon. `timeout` limits the handshake and the wait for
    /// each reply.
    pub fn over_tls(remote: &Remote, timeout: Duration) -> Result<Self, ClientError> {
        let address = || remote.address.clone();
        let stream = remote.connect(timeout).map_err(|error| match error {
            ConnectError::Unreachable(source) => ClientError::Remote {
                address: address(),
                source,
            },
            ConnectError::Handshake(source) => ClientError::Handshake {
                address: address(),
                source,
            },
        });
        let stream = Box::new(stream?);
        Ok(Self::on(Stream::Tls(stream, remote.clone()), timeout))
    }

    fn on(stream: Stream, timeout: Duration) -> Self {
        Self {
            stream,
            received: Vec::new(),
            next_id: 1,
            timeout,
        }
    }

    /// The error of a failed read or write. A daemon that refuses the client's certificate reports
    /// that only after the client's part of the handshake.
    fn broken(&self, method: &str, source: std::io::Error) -> ClientError {
        if let Stream::Tls(_, remote) = &self.stream
            && source.kind() != std::io::ErrorKind::UnexpectedEof
            && let Some(failure) = remote.failure(&source)
        {
            return ClientError::Handshake {
                address: remote.address.clone(),
                source: Box::new(failure),
            };
        }
        ClientError::Broken {
            method: method.to_owned(),
            source,
        }
    }

    /// Calls method `M` and parses its reply. A reply of another shape is
    /// [`ClientError::Strange`].
    pub fn call<M, C>(&mut self, params: &M::Params) -> Result<M::Reply, ClientError>
    where
        M: Method<C>,
        M::Params: Serialize,
        M::Reply: DeserializeOwned,
        C: 'static,
    {
        let answer = self.call_for_json::<M, C>(params)?;
        serde_json::from_value(answer.clone()).map_err(|_| ClientError::Strange {
            method: M::NAME.to_owned(),
            text: answer.to_string(),
        })
    }

    /// Like [`Client::call`], but returns the reply unparsed: a daemon of another version may
    /// reply with other fields.
    pub fn call_for_json<M, C>(&mut self, params: &M::Params) -> Result<Value, ClientError>
    where
        M: Method<C>,
        M::Params: Serialize,
        C: 'static,
    {
        self.call_by_name(M::NAME, to_json(params))
    }

    /// Calls a method whose name is known only at run time; null `params` means no parameters. If
    /// the daemon is still starting, waits for the start and calls again.
    pub fn call_by_name(&mut self, method: &str, params: Value) -> Result<Value, ClientError> {
        let is_starting = |error: &RpcError| {
            let facts = error.data.as_ref();
            error.code == INVALID_STATE && facts.is_some_and(|f| f.cause == STARTING)
        };
        match self.call_once(method, params.clone()) {
            Err(ClientError::Refused { error, .. }) if is_starting(&error) => {
                self.call_once("framework_wait_init", Value::Null)?;
                self.call_once(method, params)
            }
            outcome => outcome,
        }
    }

    fn call_once(&mut self, method: &str, params: Value) -> Result<Value, ClientError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = serde_json::json!({ "jsonrpc": "2.0", "method": method, "id": id });
        // Like rpc.py, omit empty parameters; methods without parameters refuse them.
        if params.as_object().is_some_and(|p| !p.is_empty()) || params.is_array() {
            request["params"] = params;
        }
        let until = Instant::now() + self.timeout;
        if let Err(error) = self.stream.send(request.to_string().as_bytes()) {
            // Before it closes a connection, the daemon sends the reason.
            return match self.receive(method, until).map(refusal) {
                Ok(Some(error)) => Err(ClientError::Refused {
                    method: method.to_owned(),
                    error,
                }),
                Err(refused @ ClientError::Handshake { .. }) => Err(refused),
                _ => Err(self.broken(method, error)),
            };
        }
        loop {
            let answer = self.receive(method, until)?;
            if answer["id"] != id && !answer["id"].is_null() {
                continue;
            }
            if let Some(result) = answer.get("result") {
                return Ok(result.clone());
            }
            let text = answer.to_string();
            return match refusal(answer) {
                Some(error) => Err(ClientError::Refused {
                    method: method.to_owned(),
                    error,
                }),
                None => Err(ClientError::Strange {
                    method: method.to_owned(),
                    text,
                }),
            };
        }
    }

    /// Receives the next reply, which is one line, before the deadline `until`.
    fn receive(&mut self, method: &str, until: Instant) -> Result<Value, ClientError> {
        let late = || ClientError::Late {
            method: method.to_owned(),
            after: self.timeout,
        };
        let mut walked = 0;
        loop {
            if let Some(end) = self.received[walked..].iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.received.drain(..=walked + end).collect();
                return serde_json::from_slice(&line).map_err(|_| ClientError::Strange {
                    method: method.to_owned(),
                    text: String::from_utf8_lossy(&line).into_owned(),
                });
            }
            walked = self.received.len();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            if let Err(error) = self.stream.set_read_timeout(left) {
                return Err(self.broken(method, error));
            }
            let mut chunk = [0; 16 * 1024];
            match self.stream.read(&mut chunk) {
                Ok(0) => {
                    let end = std::io::ErrorKind::UnexpectedEof.into();
                    return Err(self.broken(method, end));
                }
                Ok(n) => self.received.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Err(late()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.broken(method, e)),
            }
        }
    }
}

/// Parameters as JSON for a request, without the members that are null.
pub fn to_json(params: &impl Serialize) -> Value {
    let mut params = serde_json::to_value(params).expect("parameters are plain data");
    drop_nulls(&mut params);
    params
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn refusal(mut answer: Value) -> Option<RpcError> {
    serde_json::from_value(answer["error"].take()).ok()
}
