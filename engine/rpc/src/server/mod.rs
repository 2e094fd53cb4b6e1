//! The server of the management socket: reads calls from its clients, runs them, and sends the
//! replies. Generic over the dispatcher of calls.
//!
//! A client's requests run in parallel and are answered as they finish, one line each. With
//! [`MAX_INFLIGHT`] in progress, the server stops reading from that client. A client that does not
//! read its answers within [`WRITE_DEADLINE`] is dropped; one that half-closes still gets its
//! answers. [`super::clients`] limits connections and unsent bytes.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use nacre_engine_peer::credentials;
use nacre_reactor::{Clock, Repeats};
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tracing::{debug, warn};
use zeroize::{Zeroize, Zeroizing};

use super::access::{Caller, Identity};
use super::clients::{Charge, Clients, Entry, Origin, Peer, Place};
use super::error::{Errno, RpcError};
use super::frame::{Call, Decoder, Element, Frame};
use super::method::{Answer, CallFuture};
use super::secret::SecretJson;
use super::socket::Socket;

/// Most requests of one client in progress; a batch is one.
pub const MAX_INFLIGHT: usize = 64;
/// Largest result of one call, in bytes: the size of SPDK's send buffer. A call with a larger one
/// gets an error.
pub const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;
const WRITE_DEADLINE: Duration = Duration::from_secs(60);
/// Time for which a refused client may read the reason.
const FAREWELL: Duration = Duration::from_millis(500);
/// Most refused clients that get the reason at the same time.
const REFUSED_AT_ONCE: usize = 64;
/// Shortest interval between equal log lines about refused or replaced clients.
const SAID_AGAIN: Duration = Duration::from_secs(600);

/// Executes calls. An implementation must limit each call's time.
pub trait Dispatch: 'static {
    /// Called for each new client. An error refuses it: it may not call anything.
    fn admit(&self, caller: &Caller) -> Result<(), RpcError>;

    fn call(
        self: Rc<Self>,
        caller: Rc<Caller>,
        method: String,
        params: Option<SecretJson>,
    ) -> CallFuture;
}

impl Socket {
    /// Accepts clients forever, `max_clients` and some reserved ones at a time; see
    /// [`super::clients`].
    pub async fn serve<D: Dispatch>(&self, dispatch: Rc<D>, max_clients: usize) {
        self.serve_clients(dispatch, Clients::new(max_clients))
            .await;
    }

    async fn serve_clients<D: Dispatch>(&self, dispatch: Rc<D>, clients: Rc<Clients>) {
        let admission = Admission::new(clients);
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let who = match admit(&stream, &*dispatch) {
                        Ok(who) => Rc::new(who),
                        Err(Refusal { uid, error }) => {
                            admission.log(LogLine::Stranger(uid), |times| {
                                warn!(uid, times, "RPC client refused: {error}");
                            });
                            admission.refuse(stream, error);
                            continue;
                        }
                    };
                    match admission.enter(origin(&who.identity)).await {
                        Ok(place) => {
                            let dispatch = Rc::clone(&dispatch);
                            tokio::task::spawn_local(client(stream, dispatch, who, place, None));
                        }
                        Err(full) => admission.refuse(stream, full),
                    }
                }
                Err(error) => {
                    // Most likely out of descriptors: other connections must end first.
                    admission.log(LogLine::Accept, |times| {
                        warn!(%error, times, "cannot accept an RPC client");
                    });
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

pub(super) fn origin(identity: &Identity) -> Origin {
    match identity {
        Identity::Local(credentials) => Origin::Process(credentials.pid),
        Identity::Certificate { address, .. }
        | Identity::Account { address, .. }
        | Identity::ApiToken { address, .. } => Origin::Address(address.ip()),
    }
}

/// Admits or refuses connected clients, within the limit `max_clients`.
pub(super) struct Admission {
    clients: Rc<Clients>,
    /// Number of refused clients whose error message is being sent.
    refused: Rc<Cell<usize>>,
    log_limit: RefCell<Repeats<LogLine>>,
}

/// The log lines of the admission, each with its own rate limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LogLine {
    Accept,
    Stranger(u32),
    /// A client over TLS without a role, by its subject.
    NoRole(String),
    /// A client whose handshake failed, by its address and the kind of failure.
    Handshake(IpAddr, &'static str),
    /// A client whose handshake had to make room, by its address.
    HandshakeReplaced(IpAddr),
    Full,
    Replaced,
}

impl Admission {
    pub(super) fn new(clients: Rc<Clients>) -> Self {
        Self {
            clients,
            refused: Rc::default(),
            log_limit: RefCell::new(Repeats::new(SAID_AGAIN)),
        }
    }

    /// Calls `write` with the number of the line's occurrences, unless the line was written
    /// recently.
    pub(super) fn log(&self, line: LogLine, write: impl FnOnce(u64)) {
        if let Some(suppressed) = self.log_limit.borrow_mut().admit(line, Clock::real().now()) {
            write(suppressed + 1);
        }
    }

    /// Waits for a slot. Fails if all clients stay busy.
    pub(super) async fn enter(&self, origin: Origin) -> Result<Place, RpcError> {
        let max_clients = self.clients.max();
        loop {
            let changed = self.clients.changed();
            match self.clients.enter(origin, Instant::now()) {
                Entry::Admitted(place) => return Ok(place),
                Entry::Replaced(place, of) => {
                    self.log(LogLine::Replaced, |times| {
                        warn!(
                            max_clients,
                            of = ?of,
                            times,
                            "every place of [rpc] max_clients is taken: an idle RPC client was closed for a new one; \
                             close connections after use, or raise max_clients"
                        );
                    });
                    return Ok(place);
                }
                Entry::Wait(until) => {
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep_until(until.into()) => {}
                    }
                }
                Entry::Full => {
                    self.log(LogLine::Full, |times| {
                        warn!(
                            max_clients,
                            times,
                            "every place of [rpc] max_clients is taken by a busy RPC client: a new one was refused; \
                             raise max_clients"
                        );
                    });
                    return Err(full(max_clients));
                }
            }
        }
    }

    /// Sends a client the reason of its refusal, then closes the connection. Without the reason if
    /// too many clients are being refused.
    pub(super) fn refuse(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        error: RpcError,
    ) {
        if self.refused.get() >= REFUSED_AT_ONCE {
            return;
        }
        let refused = Rc::clone(&self.refused);
        refused.set(refused.get() + 1);
        tokio::task::spawn_local(async move {
            let _ = tokio::time::timeout(FAREWELL, farewell(stream, error)).await;
            refused.set(refused.get() - 1);
        });
    }
}

fn full(max_clients: usize) -> RpcError {
    let cause = format!("[rpc] max_clients is {max_clients}, and all of these clients are busy");
    RpcError::errno(Errno::EAGAIN, cause)
        .remedy("close other clients, or raise [rpc] max_clients in the configuration")
}

fn replaced(max_clients: usize) -> RpcError {
    let cause = format!(
        "[rpc] max_clients is {max_clients}, and this client was idle when another one needed a place"
    );
    RpcError::errno(Errno::EAGAIN, cause)
        .remedy("connect again, or raise [rpc] max_clients in the configuration")
}

/// Sends the error, then waits until the client closes the connection: closing it with unread data
/// from the client would reset it, and the reason would be lost.
async fn farewell(mut stream: impl AsyncRead + AsyncWrite + Unpin, error: RpcError) {
    let told = stream.write_all(&line(&answer(None, Err(error)))).await;
    if told.is_ok() && stream.shutdown().await.is_ok() {
        let mut chunk = [0; 4096];
        while stream.read(&mut chunk).await.is_ok_and(|n| n > 0) {}
    }
}

struct Refusal {
    uid: u32,
    error: RpcError,
}

/// The client of the connection; an error if it may not call anything.
fn admit<D: Dispatch>(stream: &UnixStream, dispatch: &D) -> Result<Caller, Refusal> {
    let credentials = credentials(stream).map_err(|error| Refusal {
        uid: u32::MAX,
        error: RpcError::io("the client's credentials are unknown", &error),
    })?;
    let comm = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let program = credentials.pid.and_then(comm).unwrap_or_default();
    let uid = credentials.uid;
    let caller = Caller {
        program: program.trim().to_owned(),
        identity: Identity::Local(credentials),
    };
    match dispatch.admit(&caller) {
        Ok(()) => Ok(caller),
        Err(error) => Err(Refusal { uid, error }),
    }
}

/// Serves one client. `idle_limit`: time without a call after which the client is closed.
pub(super) async fn client<D: Dispatch>(
    stream: impl AsyncRead + AsyncWrite + 'static,
    dispatch: Rc<D>,
    who: Rc<Caller>,
    place: Place,
    idle_limit: Option<Duration>,
) {
    let me = &place.0;
    let (mut read, write) = tokio::io::split(stream);
    let (answers, queue) = mpsc::channel::<Text>(MAX_INFLIGHT);
    let mut writer = Writer(tokio::task::spawn_local(send(write, queue, Rc::clone(me))));
    let inflight = Rc::new(Semaphore::new(MAX_INFLIGHT));
    let mut decoder = Decoder::default();
    let mut chunk = Zeroizing::new(vec![0; 64 * 1024]);
    let leave = me.must_leave();
    tokio::pin!(leave);
    let idle = async {
        match idle_limit {
            Some(limit) => me.idles_for(limit).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(idle);
    'stream: loop {
        loop {
            let frame = match decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => {
                    let text = answer(None, Err(RpcError::parse(error.to_string())));
                    let _ = answers.send(Text::short(text)).await;
                    break 'stream;
                }
            };
            let turn = Rc::clone(&inflight).acquire_owned_local().await;
            let running = me.begin(Instant::now());
            let (answers, me) = (answers.clone(), Rc::clone(me));
            let ends = (Rc::clone(&dispatch), Rc::clone(&who));
            tokio::task::spawn_local(async move {
                let _turn = turn;
                let text = perform(frame, ends, &me).await;
                drop(running);
                if let Some(text) = text {
                    // The writer is gone when the client is.
                    let _ = answers.send(text).await;
                }
            });
        }
        tokio::select! {
            received = receive(&mut read, &mut chunk) => match received {
                0 => break,
                n => {
                    decoder.push(&chunk[..n]);
                    chunk[..n].zeroize();
                }
            },
            // The client is lost or was dropped: its answers have no reader.
            _ = &mut writer.0 => return,
            () = &mut idle => {
                debug!("RPC client closed: it was idle");
                return;
            }
            () = &mut leave => {
                let why = answer(None, Err(replaced(me.max_clients())));
                let _ = answers.try_send(Text::short(why));
                drop(answers);
                let _ = tokio::time::timeout(FAREWELL, &mut writer.0).await;
                return;
            }
        }
    }
    drop(answers);
    tokio::select! {
        _ = &mut writer.0 => {}
        // The client does not read its answers.
        () = &mut leave => {}
    }
}

/// The task that sends a client's replies. It ends with the client: otherwise running calls would
/// keep the connection open, and send replies to a client that may not call any more.
struct Writer(JoinHandle<()>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The number of bytes received; 0 at the end of the stream or after an error.
async fn receive(read: &mut (impl AsyncRead + Unpin), chunk: &mut [u8]) -> usize {
    read.read(chunk).await.unwrap_or_else(|error| {
        debug!(%error, "RPC client lost");
        0
    })
}

async fn send(mut write: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Text>, me: Rc<Peer>) {
    while let Some(Text { mut text, charge }) = queue.recv().await {
        text.push('\n');
        let taken = take_all(&mut write, text.as_bytes(), &me);
        match tokio::time::timeout(WRITE_DEADLINE, taken).await {
            Ok(Ok(())) => drop(charge),
            Ok(Err(error)) => return debug!(%error, "RPC client lost"),
            Err(_) => return warn!("RPC client dropped: it does not read its answers"),
        }
    }
    let _ = tokio::time::timeout(FAREWELL, write.shutdown()).await;
}

async fn take_all(
    write: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    me: &Peer,
) -> std::io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match write.write(&bytes[sent..]).await? {
            0 => return Err(std::io::ErrorKind::WriteZero.into()),
            n => sent += n,
        }
        me.touch(Instant::now());
    }
    // A TLS stream may hold records that the socket has not taken.
    write.flush().await
}

/// A reply, with its share of the unsent bytes.
struct Text {
    text: Zeroizing<String>,
    charge: Vec<Charge>,
}

impl Text {
    /// A reply that is too short to be counted.
    fn short(text: Zeroizing<String>) -> Self {
        Self {
            text,
            charge: Vec::new(),
        }
    }
}

/// The executor of calls, and the client that makes them.
type Ends<D> = (Rc<D>, Rc<Caller>);

async fn perform<D: Dispatch>(frame: Frame, ends: Ends<D>, me: &Rc<Peer>) -> Option<Text> {
    match frame {
        Frame::One(element) => one(element, ends, me).await,
        Frame::Batch(elements) => {
            let mut running: FuturesUnordered<_> = elements
                .into_iter()
                .map(|e| one(e, ends.clone(), me))
                .collect();
            let (mut answers, mut charge) = (Vec::new(), Vec::new());
            while let Some(answer) = running.next().await {
                if let Some(answer) = answer {
                    answers.push(answer.text);
                    charge.extend(answer.charge);
                }
            }
            let text = batch(&answers);
            (!answers.is_empty()).then_some(Text { text, charge })
        }
    }
}

/// The reply to a batch of calls.
fn batch(answers: &[Zeroizing<String>]) -> Zeroizing<String> {
    let bytes: usize = answers.iter().map(|answer| answer.len() + 1).sum();
    let mut text = with_room_for(bytes + 1);
    for (at, answer) in answers.iter().enumerate() {
        text.push(if at == 0 { '[' } else { ',' });
        text.push_str(answer);
    }
    text.push(']');
    text
}

/// An empty string with room for a reply of `bytes` and a line end. The reply may contain a secret,
/// and a reallocation would leave a copy of it in freed memory.
fn with_room_for(bytes: usize) -> Zeroizing<String> {
    Zeroizing::new(String::with_capacity(bytes + 1))
}

async fn one<D: Dispatch>(
    element: Element,
    (dispatch, caller): Ends<D>,
    me: &Rc<Peer>,
) -> Option<Text> {
    let Call { id, method, params } = match element {
        Err(invalid) => {
            let error = RpcError::invalid_request(invalid.cause);
            return Some(Text::short(answer(None, Err(error))));
        }
        Ok(call) => call,
    };
    match dispatch.call(caller, method, params).await {
        // As in SPDK, a notification's result is not sent, but its error is.
        Ok(_) if id.is_none() => None,
        Err(error) => Some(Text::short(answer(id.as_deref(), Err(error)))),
        Ok(result) => match me.charge(result.get().len()) {
            Some(charge) => Some(Text {
                text: answer(id.as_deref(), Ok(result)),
                charge: vec![charge],
            }),
            None => {
                let error = too_much_unsent(result.get().len(), me.unsent_limit());
                Some(Text::short(answer(id.as_deref(), Err(error))))
            }
        },
    }
}

fn too_much_unsent(bytes: usize, limit: usize) -> RpcError {
    let cause = format!(
        "an answer of {bytes} bytes: with it, answers that clients have not read yet would be more than \
         {limit} bytes"
    );
    RpcError::errno(Errno::EAGAIN, cause)
        .remedy("read answers before asking for more, or ask for less: name one object")
}

fn answer(id: Option<&RawValue>, outcome: Answer) -> Zeroizing<String> {
    let id = id.map_or("null", RawValue::get);
    let outcome = outcome.map(SecretJson::from).and_then(|result| {
        if result.get().len() <= MAX_ANSWER_BYTES {
            return Ok(result);
        }
        let cause = format!(
            "an answer of {} bytes, more than {MAX_ANSWER_BYTES}",
            result.get().len()
        );
        Err(RpcError::internal(cause).remedy("ask for less: name one object"))
    });
    let error;
    let (key, value) = match &outcome {
        Ok(result) => ("result", result.get()),
        Err(refused) => {
            error = serde_json::to_string(refused).expect("an RpcError is plain data");
            ("error", error.as_str())
        }
    };
    let parts = [
        r#"{"jsonrpc":"2.0","id":"#,
        id,
        r#",""#,
        key,
        r#"":"#,
        value,
        "}",
    ];
    let mut text = with_room_for(parts.iter().map(|part| part.len()).sum());
    text.extend(parts);
    text
}

fn line(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(b'\n');
    bytes
}

/// One of the bounded number of concurrent calls of a client, held by a local task.
struct Turn(Rc<Semaphore>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

trait AcquireLocal {
    async fn acquire_owned_local(self) -> Turn;
}

impl AcquireLocal for Rc<Semaphore> {
    async fn acquire_owned_local(self) -> Turn {
        self.acquire().await.expect("never closed").forget();
        Turn(self)
    }
}

#[cfg(test)]
pub(crate) mod tests;
