//! A client of etcd's gRPC interface: requests to one of several endpoints, with deadlines.
//!
//! A request goes to the endpoint that answered last. If it is silent for 150 ms, a copy goes to
//! the next one, and so on; the first answer counts. A member that is stopped or unreachable so
//! costs 150 ms once, not a timeout per request. A transaction with [`Copies::One`] goes to one
//! endpoint only.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::time::Instant;
use tonic::Request;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic_prost::ProstCodec;

use crate::auth::{Auth, Credentials};
use crate::error::{Error, Failure, classify, described};
use crate::keys::range_end;
use crate::messages::*;
use crate::pulse::Pulse;

pub use crate::messages::KeyValue;

/// Time without an answer after which a copy of the request goes to the next endpoint.
const HEDGE: Duration = Duration::from_millis(150);
/// Time after which copies go to all endpoints again: a follower forwards a request to a dead
/// leader, and waits for it for longer than an election takes.
const AGAIN: Duration = Duration::from_millis(500);
/// Most copies of a request in flight, divided by the number of endpoints.
const COPIES: usize = 3;
/// Most failures that the error of an unanswered request names.
const NOTES: usize = 6;
/// Pause after every endpoint has failed and no copy is in flight.
const PAUSE: Duration = Duration::from_millis(100);
/// Attempts to connect that fit into the deadline of a request; each may last an equal part of it.
/// A member that starts accepts connections, and answers later: a long attempt would outlast the
/// lease of a node.
const ATTEMPTS: u32 = 5;
/// etcd's default limit of a request (`--max-request-bytes`).
const MAX_REQUEST: usize = 1536 * 1024;
/// Largest accepted answer. Pages of [`PAGE`] records stay far below.
const MAX_ANSWER: usize = 16 << 20;
/// Keys per Range request of [`Client::list`].
const PAGE: i64 = 500;
/// The start of a certificate in PEM.
const CERTIFICATE: &[u8] = b"-----BEGIN CERTIFICATE-----";
const STATUS: &str = "/etcdserverpb.Maintenance/Status";
/// Most endpoints.
const MAX_ENDPOINTS: usize = 16;

/// The addresses of etcd's members, and how to connect to them.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// `http://HOST:PORT`, or `https://HOST:PORT` with [`Endpoints::tls`].
    pub urls: Vec<String>,
    pub tls: Option<Tls>,
    /// `None`: a client certificate, or nothing, identifies this client.
    pub credentials: Option<Credentials>,
    /// Time limit of each request, copies included.
    pub deadline: Duration,
}

/// Certificates and key as PEM.
#[derive(Clone)]
pub struct Tls {
    /// The authority of the members' certificates.
    pub ca: Vec<u8>,
    /// The client's certificate and key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for Tls {
    /// The key stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let has_identity = self.identity.is_some();
        let mut shown = f.debug_struct("Tls");
        shown.field("has_identity", &has_identity).finish()
    }
}

/// How often a request may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// Again, and to several endpoints: for requests whose second execution changes nothing.
    Several,
    /// Once, to one endpoint: for all other requests.
    One,
}

/// A client of one etcd cluster, with a gRPC channel per endpoint. A request without an answer
/// fails with [`Error::Unanswered`]: its change may have been made or not.
#[derive(Debug)]
pub struct Client {
    /// URL and channel of each endpoint.
    channels: Vec<(String, Channel)>,
    /// For each endpoint: when a watch last received a message from it, and when one last requested
    /// its progress.
    pulses: Vec<Pulse>,
    /// The endpoint that answered last.
    preferred: AtomicUsize,
    auth: Auth,
    deadline: Duration,
}

/// An answer, and whether more than one copy of its request was sent.
#[derive(Debug)]
struct Answer<T> {
    message: T,
    is_copied: bool,
}

/// A member's answer to a Status request, or the lack of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its URL.
    pub endpoint: String,
    /// Time from the request to the answer or the error.
    pub took: Duration,
    /// `Err`: why there is no status.
    pub status: Result<MemberStatus, String>,
}

/// The status that a member reports.
#[derive(Debug, Clone, PartialEq)]
pub struct MemberStatus {
    pub version: String,
    /// False: the member reaches no majority, and executes nothing.
    pub has_leader: bool,
    pub is_leader: bool,
    /// Size of its database in bytes.
    pub size: u64,
    /// The bytes of the database that are in use.
    pub in_use: u64,
    /// Largest size of the database in bytes; `None`: before etcd 3.6, members do not report it.
    pub quota: Option<u64>,
    /// Alarms, such as `NOSPACE`.
    pub errors: Vec<String>,
}

impl From<StatusResponse> for MemberStatus {
    fn from(answer: StatusResponse) -> Self {
        let bytes = |size: i64| u64::try_from(size).unwrap_or(0);
        Self {
            has_leader: answer.leader != 0,
            is_leader: answer.leader != 0
                && answer.header.is_some_and(|h| h.member_id == answer.leader),
            size: bytes(answer.db_size),
            in_use: bytes(answer.db_size_in_use),
            quota: Some(bytes(answer.db_size_quota)).filter(|quota| *quota > 0),
            errors: {
                // `has_leader` says it.
                let alarms = answer.errors.into_iter();
                alarms.filter(|text| !text.contains("no leader")).collect()
            },
            version: answer.version,
        }
    }
}

impl MemberStatus {
    /// True if its version of etcd is known to lose data or changes.
    pub fn loses_data(&self) -> bool {
        loses_data(&self.version)
    }
}

/// All keys with a prefix, at one revision of the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    pub revision: i64,
    pub keys: Vec<KeyValue>,
}

/// A transaction: conditions (`if_…`), and the changes to make if all hold. Otherwise the
/// transaction reads the keys of [`Self::read_on_failure`].
#[derive(Debug, Clone, Default)]
pub struct Txn {
    compare: Vec<Compare>,
    success: Vec<RequestOp>,
    failure: Vec<RequestOp>,
}

impl Txn {
    fn compare(mut self, key: &str, result: Comparison, target: Target, operand: Operand) -> Self {
        self.compare.push(Compare {
            result: result.into(),
            target: target.into(),
            key: key.into(),
            operand: Some(operand),
            range_end: Vec::new(),
        });
        self
    }

    /// Condition: no key that starts with `prefix` was created after `revision`.
    pub fn if_none_created_after(mut self, prefix: &str, revision: i64) -> Self {
        self.compare.push(Compare {
            result: Comparison::Less.into(),
            target: Target::Create.into(),
            key: prefix.into(),
            operand: Some(Operand::CreateRevision(revision + 1)),
            range_end: range_end(prefix.as_bytes()),
        });
        self
    }

    /// Condition: the key was created at `revision`; 0: it does not exist.
    pub fn if_created(self, key: &str, revision: i64) -> Self {
        let operand = Operand::CreateRevision(revision);
        self.compare(key, Comparison::Equal, Target::Create, operand)
    }

    /// Condition: the key does not exist, or was created at another revision; 0: it exists.
    pub fn if_not_created(self, key: &str, revision: i64) -> Self {
        let operand = Operand::CreateRevision(revision);
        self.compare(key, Comparison::NotEqual, Target::Create, operand)
    }

    /// Condition: the key was last written at `revision`; 0: it does not exist.
    pub fn if_modified(self, key: &str, revision: i64) -> Self {
        let operand = Operand::ModRevision(revision);
        self.compare(key, Comparison::Equal, Target::Mod, operand)
    }

    pub fn put(mut self, key: &str, value: Vec<u8>) -> Self {
        let key = key.into();
        let request = Some(Operation::Put(PutRequest { key, value }));
        self.success.push(RequestOp { request });
        self
    }

    pub fn delete(mut self, key: &str) -> Self {
        let request = Some(Operation::Delete(DeleteRangeRequest {
            key: key.into(),
            range_end: Vec::new(),
        }));
        self.success.push(RequestOp { request });
        self
    }

    /// Reads a key if a condition does not hold.
    pub fn read_on_failure(mut self, key: &str) -> Self {
        let request = Some(Operation::Range(RangeRequest {
            key: key.into(),
            ..RangeRequest::default()
        }));
        self.failure.push(RequestOp { request });
        self
    }
}

/// The outcome of a transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct TxnAnswer {
    /// True if all conditions held, and the changes were made.
    pub is_made: bool,
    /// The revision of the changes, or the current one.
    pub revision: i64,
    /// True if several copies were sent: an earlier one may have been executed.
    pub is_copied: bool,
    /// The keys of [`Txn::read_on_failure`], in order; empty if the changes were made.
    pub found: Vec<Option<KeyValue>>,
}

impl Client {
    /// Connects when a request needs it. Call it within a tokio runtime. Fails for a wrong URL, for
    /// `https` without [`Endpoints::tls`], for no or more than 16 endpoints, and for certificates
    /// that are not PEM.
    pub fn new(endpoints: &Endpoints) -> Result<Self, Error> {
        let count = endpoints.urls.len();
        if !(1..=MAX_ENDPOINTS).contains(&count) {
            return Err(Error::Endpoint {
                endpoint: endpoints.urls.join(","),
                why: format!("{count} endpoints; name 1 to {MAX_ENDPOINTS}"),
            });
        }
        let mut channels = Vec::new();
        for url in &endpoints.urls {
            channels.push((url.clone(), channel(url, endpoints)?));
        }
        Ok(Self {
            channels,
            pulses: std::iter::repeat_with(Pulse::new).take(count).collect(),
            preferred: AtomicUsize::new(0),
            auth: Auth::new(endpoints.credentials.clone(), count),
            deadline: endpoints.deadline,
        })
    }

    pub async fn get(&self, key: &str) -> Result<Option<KeyValue>, Error> {
        let request = RangeRequest {
            key: key.into(),
            ..RangeRequest::default()
        };
        let answer = self.range(request).await?;
        Ok(answer.kvs.into_iter().next())
    }

    /// The revision of the store, confirmed by a majority of its members. The user may have access
    /// to keys with `prefix` only.
    pub async fn revision(&self, prefix: &str) -> Result<i64, Error> {
        let request = RangeRequest {
            key: prefix.into(),
            ..RangeRequest::default()
        };
        let answer = self.range(request).await?;
        Ok(answer.header.map_or(0, |header| header.revision))
    }

    /// The number of keys that start with `prefix`, and the revision at which they were counted.
    pub async fn count(&self, prefix: &str) -> Result<(usize, i64), Error> {
        let request = RangeRequest {
            key: prefix.into(),
            range_end: range_end(prefix.as_bytes()),
            count_only: true,
            ..RangeRequest::default()
        };
        let answer = self.range(request).await?;
        let count = usize::try_from(answer.count).unwrap_or(0);
        Ok((count, answer.header.map_or(0, |header| header.revision)))
    }

    /// All keys that start with `prefix`, at one revision, read in pages. If a compaction removes
    /// that revision meanwhile, the read starts again, at most twice.
    pub async fn list(&self, prefix: &str) -> Result<Page, Error> {
        const ATTEMPTS: usize = 3;
        for _ in 1..ATTEMPTS {
            match self.list_at(prefix, 0).await {
                Err(Error::Compacted { .. }) => {}
                other => return other,
            }
        }
        self.list_at(prefix, 0).await
    }

    /// All keys that start with `prefix` as they were at `revision`; 0: as they are now. Fails with
    /// [`Error::Compacted`] if the revision is gone.
    pub async fn list_at(&self, prefix: &str, revision: i64) -> Result<Page, Error> {
        let mut page = Page {
            revision,
            keys: Vec::new(),
        };
        let mut from = prefix.as_bytes().to_vec();
        loop {
            let request = RangeRequest {
                key: from,
                range_end: range_end(prefix.as_bytes()),
                limit: PAGE,
                revision: page.revision,
                count_only: false,
            };
            let answer = self.range(request).await?;
            if page.revision == 0 {
                page.revision = answer.header.map_or(0, |header| header.revision);
            }
            page.keys.extend(answer.kvs);
            match page.keys.last() {
                Some(last) if answer.more => {
                    from = last.key.clone();
                    from.push(0);
                }
                _ => return Ok(page),
            }
        }
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Error> {
        let revision = request.revision;
        let range = "/etcdserverpb.KV/Range";
        let answer = self
            .call(range, &request, revision, Copies::Several)
            .await?;
        Ok(answer.message)
    }

    /// Executes a transaction. Conditions that do not hold are no error: see
    /// [`TxnAnswer::is_made`].
    pub async fn transact(&self, txn: Txn, copies: Copies) -> Result<TxnAnswer, Error> {
        let request = TxnRequest {
            compare: txn.compare,
            success: txn.success,
            failure: txn.failure,
        };
        let answer = self
            .call("/etcdserverpb.KV/Txn", &request, 0, copies)
            .await?;
        let TxnResponse {
            header,
            succeeded,
            responses,
        } = answer.message;
        let found = responses.into_iter().filter_map(|op| match op.response {
            Some(OpOutcome::Range(range)) => Some(range.kvs.into_iter().next()),
            _ => None,
        });
        Ok(TxnAnswer {
            is_made: succeeded,
            revision: header.map_or(0, |header| header.revision),
            is_copied: answer.is_copied,
            found: found.collect(),
        })
    }

    /// Compacts the history: discards old versions of keys up to `revision`. Succeeds if that was
    /// done before.
    pub async fn compact(&self, revision: i64) -> Result<(), Error> {
        let request = CompactionRequest {
            revision,
            physical: false,
        };
        let path = "/etcdserverpb.KV/Compact";
        let answer: Result<Answer<Empty>, Error> =
            self.call(path, &request, revision, Copies::Several).await;
        match answer {
            // Another copy, or another node, was faster.
            Ok(_) | Err(Error::Compacted { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Fails with [`Error::Version`] if the member that answers has a version of etcd with known
    /// loss of data. Succeeds if etcd refuses the Status request to this user.
    pub async fn check_version(&self) -> Result<(), Error> {
        let answer: Result<Answer<StatusResponse>, Error> =
            self.call(STATUS, &Empty {}, 0, Copies::Several).await;
        let found = match answer {
            Ok(answer) => answer.message.version,
            // etcd may report its version to administrators only.
            Err(Error::Denied { .. }) if self.auth.has_credentials() => return Ok(()),
            Err(error) => return Err(error),
        };
        if loses_data(&found) {
            return Err(Error::Version { found });
        }
        Ok(())
    }

    /// The status of each member, with the time that its answer took.
    pub async fn members(&self) -> Vec<Member> {
        let ask = |index| async move {
            let began = Instant::now();
            let asked = self.attempt::<Empty, StatusResponse>(index, STATUS, Empty {});
            let status = match tokio::time::timeout(self.deadline, asked).await {
                Ok((_, Ok(answer))) => Ok(MemberStatus::from(answer)),
                Ok((_, Err(status))) => Err(described(&status)),
                Err(_) => Err(format!("no answer within {:?}", self.deadline)),
            };
            Member {
                endpoint: self.channels[index].0.clone(),
                took: began.elapsed(),
                status,
            }
        };
        futures_util::future::join_all((0..self.channels.len()).map(ask)).await
    }

    /// The index of the endpoint for a new stream: the one that answered last. With the endpoint
    /// `after` of a stream that failed: the next one.
    pub(crate) fn stream_endpoint(&self, after: Option<usize>) -> usize {
        let preferred = self.preferred.load(Ordering::Relaxed);
        after.map_or(preferred, |failed| failed + 1) % self.channels.len()
    }

    pub(crate) fn channel(&self, endpoint: usize) -> Channel {
        self.channels[endpoint].1.clone()
    }

    pub(crate) fn pulse(&self, endpoint: usize) -> &Pulse {
        &self.pulses[endpoint]
    }

    pub(crate) fn auth(&self) -> &Auth {
        &self.auth
    }

    async fn call<Q, A>(
        &self,
        path: &'static str,
        request: &Q,
        revision: i64,
        copies: Copies,
    ) -> Result<Answer<A>, Error>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let bytes = request.encoded_len();
        if bytes > MAX_REQUEST {
            return Err(Error::TooLarge { bytes });
        }
        let end = Instant::now() + self.deadline;
        let first = self.preferred.load(Ordering::Relaxed);
        let mut said: Vec<String> = Vec::new();
        let mut attempts = FuturesUnordered::new();
        let mut sent = 0;
        let mut next_at = Instant::now();
        loop {
            let may_send = match copies {
                Copies::One => sent == 0,
                Copies::Several => attempts.len() < COPIES * self.channels.len(),
            };
            tokio::select! {
                biased;
                Some((index, result)) = attempts.next() => match result {
                    Ok(message) => {
                        self.preferred.store(index, Ordering::Relaxed);
                        let is_copied = sent > 1;
                        return Ok(Answer { message, is_copied });
                    }
                    Err(status) => {
                        match classify(&status, revision, bytes) {
                            Failure::Final(error) => return Err(error),
                            Failure::Passing(why) => self.note(&mut said, index, &why),
                        }
                        if copies == Copies::One {
                            return Err(self.unanswered(&said));
                        }
                        if sent % self.channels.len() != 0 {
                            next_at = Instant::now();
                        } else if attempts.is_empty() {
                            next_at = Instant::now() + PAUSE;
                        }
                    }
                },
                () = tokio::time::sleep_until(next_at), if may_send => {
                    let index = (first + sent) % self.channels.len();
                    attempts.push(self.attempt::<Q, A>(index, path, request.clone()));
                    sent += 1;
                    let is_round_over = sent % self.channels.len() == 0;
                    next_at = Instant::now() + if is_round_over { AGAIN } else { HEDGE };
                }
                () = tokio::time::sleep_until(end) => return Err(self.unanswered(&said)),
            }
        }
    }

    fn unanswered(&self, said: &[String]) -> Error {
        Error::Unanswered {
            after_ms: u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX),
            said: said.join("; "),
        }
    }

    /// Adds the reason of an endpoint's failure to `said`, once, up to [`NOTES`] reasons. A refused
    /// certificate may be the reason of the first attempt only.
    fn note(&self, said: &mut Vec<String>, index: usize, why: &str) {
        let line = format!("{}: {why}", self.channels[index].0);
        if said.len() < NOTES && !said.contains(&line) {
            said.push(line);
        }
    }

    async fn attempt<Q, A>(
        &self,
        index: usize,
        path: &'static str,
        request: Q,
    ) -> (usize, Result<A, tonic::Status>)
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let channel = self.channel(index);
        let answer = async {
            let mut grpc =
                tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(MAX_ANSWER);
            let mut is_retry = false;
            loop {
                let ready = grpc.ready().await;
                ready.map_err(|error| tonic::Status::from_error(error.into()))?;
                let token = self.auth.token(index, &channel).await?;
                let mut request = Request::new(request.clone());
                // Beyond it, the server need not execute the request any more.
                request.set_timeout(self.deadline);
                token.add_to(&mut request);
                let path = PathAndQuery::from_static(path);
                let codec = ProstCodec::<Q, A>::default();
                match grpc.unary(request, path, codec).await {
                    Err(status) if !is_retry && self.auth.may_retry(&status, &token) => {
                        is_retry = true;
                    }
                    answer => return Ok(answer?.into_inner()),
                }
            }
        };
        (index, answer.await)
    }
}

/// An endpoint, as its URL names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointAddress {
    pub is_https: bool,
    pub host: String,
}

impl EndpointAddress {
    pub fn parse(url: &str) -> Result<Self, Error> {
        let refused = || Error::Endpoint {
            endpoint: url.to_owned(),
            why: "not a URL like https://HOST:2379".to_owned(),
        };
        let uri: http::Uri = url.parse().map_err(|_| refused())?;
        let is_https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(refused()),
        };
        let host = uri.host().filter(|host| !host.is_empty());
        // A path or a user would be ignored.
        let is_bare = uri.path() == "/" && uri.query().is_none() && !url.contains('@');
        match host {
            Some(host) if is_bare => Ok(Self {
                is_https,
                host: host.to_owned(),
            }),
            _ => Err(refused()),
        }
    }
}

fn channel(url: &str, endpoints: &Endpoints) -> Result<Channel, Error> {
    let (tls, connect) = (endpoints.tls.as_ref(), endpoints.deadline / ATTEMPTS);
    let refused = |why: &str| Error::Endpoint {
        endpoint: url.to_owned(),
        why: why.to_owned(),
    };
    let place = EndpointAddress::parse(url)?;
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|_| refused("not a URL like https://HOST:2379"))?;
    let endpoint = match (place.is_https, tls) {
        (false, _) => endpoint,
        (true, None) => return Err(refused("https needs `ca`")),
        (true, Some(tls)) => {
            if !tls
                .ca
                .windows(CERTIFICATE.len())
                .any(|part| part == CERTIFICATE)
            {
                let why = "`ca` has no certificate in PEM".to_owned();
                return Err(Error::Certificates { why });
            }
            let mut config = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(&tls.ca))
                .timeout(connect);
            if let Some((certificate, key)) = &tls.identity {
                config = config.identity(Identity::from_pem(certificate, key));
            }
            let configured = endpoint.tls_config(config);
            configured.map_err(|error| Error::Certificates {
                why: described(&tonic::Status::from_error(error.into())),
            })?
        }
    };
    Ok(endpoint
        .connect_timeout(connect)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(Duration::from_secs(5)))
        .connect_lazy())
}

/// Versions below 3.4.22, and 3.5.0 to 3.5.5: their members' data may differ after a crash.
fn loses_data(version: &str) -> bool {
    let mut parts = version.split(['.', '-', '+']).map(str::parse::<u32>);
    let mut next = || parts.next().and_then(Result::ok).unwrap_or(0);
    let version = (next(), next(), next());
    version < (3, 4, 22) || ((3, 5, 0)..(3, 5, 6)).contains(&version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_lose_data() {
        for version in ["3.4.21", "3.5.0", "3.5.5", "3.3.27", "2.3.8"] {
            assert!(loses_data(version), "{version}");
        }
        for version in ["3.4.23", "3.5.6", "3.6.0-rc.1", "3.7.0"] {
            assert!(!loses_data(version), "{version}");
        }
    }
}
