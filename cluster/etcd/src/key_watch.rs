//! A watch: the changes of all keys with a prefix, in order of their revisions, from a gRPC stream
//! of one etcd member.
//!
//! When the stream ends, it is opened again at the next endpoint, from the revision after the last
//! one seen. After 1 s without a message from the member on any stream, one stream requests its
//! progress, and after 2 s each one does. After 3 s, every watch opens its stream again, because a
//! dead member does not answer. A stream that alone is silent requests progress after 10 s, and is
//! opened again after 15 s.
//!
//! If etcd's data was lost or restored from a backup, its revisions are lower than before, and a
//! watch from the next revision would get no event for long. The first answer of a stream has the
//! store's revision, which shows this.

use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tracing::debug;

use crate::auth::Token;
use crate::client::{Client, KeyValue};
use crate::error::described;
use crate::keys::range_end;
use crate::messages::{Empty, NO_PUT, WatchCreateRequest, WatchKind, WatchRequest, WatchResponse};
use crate::pulse::{Pulse, SILENCE, StreamTimes};

const PAUSE: Duration = Duration::from_millis(200);
/// Successive streams that must find a lower revision before the store counts as another one: a
/// read after a pause of etcd may be stale (etcd #20418).
const FINDINGS: u32 = 2;
/// Largest message. etcd splits longer ones (`fragment`).
const MAX_MESSAGE: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    Put(KeyValue),
    /// The key and the revision of its deletion.
    Deleted {
        key: Vec<u8>,
        revision: i64,
    },
    /// Changes are lost: list the keys again, and watch from the revision of that list.
    Compacted {
        revision: i64,
    },
    /// The store is at `revision`, below one that the watch has seen: its data was lost or
    /// restored. Everything that was read before is invalid. The watch continues after this
    /// revision.
    OtherStore {
        revision: i64,
    },
}

/// A watch. Dropping it ends its stream.
#[derive(Debug)]
pub struct Watch {
    client: Arc<Client>,
    prefix: String,
    has_puts: bool,
    /// The revision from which the next stream starts.
    from: i64,
    ready: std::collections::VecDeque<Update>,
    stream: Option<Stream>,
    failed_at: Option<usize>,
    /// Successive streams that found a lower revision.
    findings: u32,
}

#[derive(Debug)]
struct Stream {
    endpoint: usize,
    token: Token,
    questions: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
    times: StreamTimes,
}

impl Watch {
    /// Watches all keys that start with `prefix`, from `revision` on.
    pub fn new(client: Arc<Client>, prefix: &str, revision: i64) -> Self {
        Self {
            client,
            prefix: prefix.to_owned(),
            has_puts: true,
            from: revision,
            ready: std::collections::VecDeque::new(),
            stream: None,
            failed_at: None,
            findings: 0,
        }
    }

    /// Changes the watch to report no [`Update::Put`].
    pub fn only_deletions(self) -> Self {
        Self {
            has_puts: false,
            ..self
        }
    }

    /// Waits for the next update, however long no member answers. Updates may be repeated after the
    /// stream was opened again.
    pub async fn next(&mut self) -> Update {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return update;
            }
            let Some(stream) = &mut self.stream else {
                self.open().await;
                continue;
            };
            match stream.next(self.client.pulse(stream.endpoint)).await {
                Ok(answer) if answer.canceled && answer.compact_revision == 0 => {
                    let why = answer.cancel_reason;
                    debug!(prefix = self.prefix, why, "etcd ended the watch");
                    // A refused token is a reason that etcd does not name.
                    self.client.auth().forget(&stream.token);
                    self.reopen_later().await;
                }
                Ok(answer) if is_younger(&answer, self.from) => self.compare_store().await,
                Ok(answer) => {
                    if answer.created {
                        self.findings = 0;
                    }
                    self.take(answer);
                }
                Err(status) => {
                    let why = described(&status);
                    debug!(prefix = self.prefix, why, "the watch of etcd ended");
                    self.reopen_later().await;
                }
            }
        }
    }

    /// Called when a member does not have the last revision: it lags behind the others, or the
    /// store is another one. Compares with a read that a majority confirms.
    async fn compare_store(&mut self) {
        let last = self.from - 1;
        match self.client.revision(&self.prefix).await {
            // Its changes arrive in order.
            Ok(revision) if revision >= last => self.findings = 0,
            Ok(revision) => {
                self.findings += 1;
                self.reopen_later().await;
                if self.findings >= FINDINGS {
                    self.findings = 0;
                    self.from = revision + 1;
                    self.ready.push_back(Update::OtherStore { revision });
                }
            }
            Err(error) => {
                debug!(prefix = self.prefix, %error, "the revision of etcd is unknown");
                self.reopen_later().await;
            }
        }
    }

    async fn reopen_later(&mut self) {
        self.failed_at = self.stream.take().map(|stream| stream.endpoint);
        tokio::time::sleep(PAUSE).await;
    }

    async fn open(&mut self) {
        let endpoint = self.client.stream_endpoint(self.failed_at);
        let channel = self.client.channel(endpoint);
        let opened = tokio::time::timeout(SILENCE, async {
            let mut grpc =
                tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
            let ready = grpc.ready().await;
            ready.map_err(|error| Status::from_error(error.into()))?;
            let token = self.client.auth().token(endpoint, &channel).await?;
            let (questions, receiver) = mpsc::channel(4);
            let create = WatchKind::Create(WatchCreateRequest {
                key: self.prefix.clone().into(),
                range_end: range_end(self.prefix.as_bytes()),
                start_revision: self.from,
                filters: if self.has_puts { vec![] } else { vec![NO_PUT] },
                fragment: true,
            });
            let first = WatchRequest {
                request: Some(create),
            };
            let _ = questions.try_send(first);
            let requests = futures_util::stream::unfold(receiver, |mut receiver| async {
                receiver.recv().await.map(|request| (request, receiver))
            });
            let mut request = Request::new(requests);
            // A member without a leader ends the stream, rather than being silent.
            let leader = tonic::metadata::MetadataValue::from_static("true");
            request.metadata_mut().insert("hasleader", leader);
            token.add_to(&mut request);
            let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
            let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
            match grpc.streaming(request, path, codec).await {
                Ok(answers) => Ok((token, questions, answers.into_inner())),
                Err(status) => {
                    // A refused token is forgotten; the next attempt gets a new one.
                    self.client.auth().may_retry(&status, &token);
                    Err(status)
                }
            }
        })
        .await;
        match opened {
            Ok(Ok((token, questions, answers))) => {
                let now = Instant::now();
                self.stream = Some(Stream {
                    endpoint,
                    token,
                    questions,
                    answers,
                    times: StreamTimes::new(now),
                });
            }
            Ok(Err(_)) | Err(_) => {
                self.failed_at = Some(endpoint);
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    fn take(&mut self, answer: WatchResponse) {
        if answer.compact_revision != 0 {
            self.stream = None;
            // The caller lists the keys, and starts another watch.
            let revision = answer.compact_revision;
            self.from = self.from.max(revision);
            self.ready.push_back(Update::Compacted { revision });
            return;
        }
        // Answers to questions for progress say nothing more than that the member lives: before
        // 3.4.25 and 3.5.8 their revision may be later than events that are still to come.
        for event in answer.events {
            let Some(kv) = event.kv else { continue };
            let revision = kv.mod_revision;
            // The rest of this revision may be in the next fragment.
            self.from = if answer.fragment {
                revision
            } else {
                revision + 1
            };
            self.ready.push_back(if event.kind == 0 {
                Update::Put(kv)
            } else {
                let key = kv.key;
                Update::Deleted { key, revision }
            });
        }
    }
}

/// True if `answer` is the first one of a stream, and comes from a member that does not have the
/// revision before `from`.
fn is_younger(answer: &WatchResponse, from: i64) -> bool {
    let revision = answer.header.as_ref().map(|header| header.revision);
    answer.created && !answer.canceled && revision.is_some_and(|revision| revision < from - 1)
}

impl Stream {
    /// Waits for the next answer. Fails at the time that [`StreamTimes::silent`] gives.
    async fn next(&mut self, pulse: &Pulse) -> Result<WatchResponse, Status> {
        loop {
            let question = self.times.question(pulse);
            let silent = self.times.silent(pulse);
            tokio::select! {
                answer = self.answers.message() => {
                    let ended = || Status::unavailable("the stream ended");
                    let answer = answer?.ok_or_else(ended)?;
                    self.times.heard(pulse, Instant::now());
                    return Ok(answer);
                }
                () = tokio::time::sleep_until(question) => {
                    if self.times.asks(pulse, Instant::now()) {
                        let request = Some(WatchKind::Progress(Empty {}));
                        // Full: the member does not read, and will be left soon.
                        let _ = self.questions.try_send(WatchRequest { request });
                    }
                }
                () = tokio::time::sleep_until(silent) => {
                    // Another stream may have heard the member.
                    if Instant::now() >= self.times.silent(pulse) {
                        return Err(Status::deadline_exceeded("the member is silent"));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::ResponseHeader;

    /// Goal: only the first answer of a stream is compared. A revision of a later answer says
    /// nothing, and the revision before `from` is that of the list.
    #[test]
    fn the_first_answer_shows_a_younger_store() {
        let answer = |created, revision| WatchResponse {
            header: Some(ResponseHeader {
                revision,
                ..ResponseHeader::default()
            }),
            created,
            ..WatchResponse::default()
        };
        for (created, revision, is) in [
            (true, 8, true),
            (true, 9, false),
            (true, 10, false),
            (true, 11, false),
            (false, 8, false),
        ] {
            assert_eq!(is_younger(&answer(created, revision), 10), is, "{revision}");
        }
        let unknown = WatchResponse {
            created: true,
            ..WatchResponse::default()
        };
        assert!(!is_younger(&unknown, 10));
    }
}
