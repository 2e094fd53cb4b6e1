//! Perform: the clients of the socket, and the answers. Generic over who answers.
//!
//! A client's requests run side by side and are answered as they finish, one line each; at most
//! [`MAX_INFLIGHT`] at once, then the client is not read. A client that does not take its answers
//! within [`WRITE_DEADLINE`] is dropped. A client that half-closes still gets its answers.

use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc};
use tracing::{debug, warn};

use super::error::RpcError;
use super::frame::{Call, Decoder, Element, Frame};
use super::method::{Answer, CallFuture};
use super::socket::Socket;

pub const MAX_INFLIGHT: usize = 64;
/// Longest answer: as SPDK's send buffer.
pub const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;
const WRITE_DEADLINE: Duration = Duration::from_secs(60);

/// Who answers calls. Must bound each call's time itself.
pub trait Dispatch: 'static {
    fn call(self: Rc<Self>, method: String, params: Option<Box<RawValue>>) -> CallFuture;
}

impl Socket {
    /// Accepts clients for ever, `max_clients` at a time.
    pub async fn serve<D: Dispatch>(&self, dispatch: Rc<D>, max_clients: usize) {
        let places = Rc::new(Semaphore::new(max_clients));
        loop {
            let place = Rc::clone(&places).acquire_owned_local().await;
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let dispatch = Rc::clone(&dispatch);
                    tokio::task::spawn_local(async move {
                        let _place = place;
                        if admit(&stream) {
                            client(stream, dispatch).await;
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors, most likely: others must finish first.
                    warn!(%error, "cannot accept an RPC client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// Only the daemon's own user and root may command it, whatever the socket's mode became.
fn admit(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == ours => true,
        Ok(peer) => {
            warn!(
                uid = peer.uid(),
                pid = peer.pid(),
                "RPC client refused: neither root nor our user"
            );
            false
        }
        Err(error) => {
            warn!(%error, "RPC client refused: its credentials are unknown");
            false
        }
    }
}

async fn client<D: Dispatch>(stream: UnixStream, dispatch: Rc<D>) {
    let (mut read, write) = stream.into_split();
    let (answers, queue) = mpsc::channel::<Vec<u8>>(MAX_INFLIGHT);
    let mut writer = tokio::task::spawn_local(send(write, queue));
    let inflight = Rc::new(Semaphore::new(MAX_INFLIGHT));
    let mut decoder = Decoder::default();
    let mut chunk = vec![0; 64 * 1024];
    'stream: loop {
        loop {
            let frame = match decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => {
                    let _ = answers
                        .send(line(&answer(None, Err(RpcError::parse(error.to_string())))))
                        .await;
                    break 'stream;
                }
            };
            let place = Rc::clone(&inflight).acquire_owned_local().await;
            let (answers, dispatch) = (answers.clone(), Rc::clone(&dispatch));
            tokio::task::spawn_local(async move {
                let _place = place;
                if let Some(text) = perform(frame, dispatch).await {
                    // The writer is gone when the client is.
                    let _ = answers.send(line(&text)).await;
                }
            });
        }
        tokio::select! {
            received = receive(&mut read, &mut chunk) => match received {
                0 => break,
                n => decoder.push(&chunk[..n]),
            },
            // It is lost or was dropped: nobody takes its answers.
            _ = &mut writer => return,
        }
    }
    drop(answers);
    let _ = writer.await;
}

/// Bytes received, 0 at the end of the stream or when it broke.
async fn receive(read: &mut OwnedReadHalf, chunk: &mut [u8]) -> usize {
    read.read(chunk).await.unwrap_or_else(|error| {
        debug!(%error, "RPC client lost");
        0
    })
}

async fn send(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = queue.recv().await {
        match tokio::time::timeout(WRITE_DEADLINE, write.write_all(&bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return debug!(%error, "RPC client lost"),
            Err(_) => return warn!("RPC client dropped: it does not read its answers"),
        }
    }
}

async fn perform<D: Dispatch>(frame: Frame, dispatch: Rc<D>) -> Option<String> {
    match frame {
        Frame::One(element) => one(element, dispatch).await,
        Frame::Batch(elements) => {
            let mut running: FuturesUnordered<_> = elements
                .into_iter()
                .map(|e| one(e, Rc::clone(&dispatch)))
                .collect();
            let mut answers = Vec::new();
            while let Some(answer) = running.next().await {
                answers.extend(answer);
            }
            (!answers.is_empty()).then(|| format!("[{}]", answers.join(",")))
        }
    }
}

async fn one<D: Dispatch>(element: Element, dispatch: Rc<D>) -> Option<String> {
    match element {
        Err(invalid) => Some(answer(None, Err(RpcError::invalid_request(invalid.cause)))),
        Ok(Call { id, method, params }) => match dispatch.call(method, params).await {
            // A notification's result is not sent; its error is, as SPDK does.
            Ok(_) if id.is_none() => None,
            outcome => Some(answer(id.as_deref(), outcome)),
        },
    }
}

fn answer(id: Option<&RawValue>, outcome: Answer) -> String {
    let id = id.map_or("null", RawValue::get);
    let outcome = outcome.and_then(|result| {
        if result.get().len() <= MAX_ANSWER_BYTES {
            return Ok(result);
        }
        let cause = format!(
            "an answer of {} bytes, more than {MAX_ANSWER_BYTES}",
            result.get().len()
        );
        Err(RpcError::internal(cause).remedy("ask for less: name one object"))
    });
    match outcome {
        Ok(result) => format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{}}}"#, result.get()),
        Err(error) => {
            let error = serde_json::to_string(&error).expect("an RpcError is plain data");
            format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)
        }
    }
}

fn line(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(b'\n');
    bytes
}

/// A place in a bounded number, held by a local task.
struct Place(Rc<Semaphore>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

trait AcquireLocal {
    async fn acquire_owned_local(self) -> Place;
}

impl AcquireLocal for Rc<Semaphore> {
    async fn acquire_owned_local(self) -> Place {
        self.acquire().await.expect("never closed").forget();
        Place(self)
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
