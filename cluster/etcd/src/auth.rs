//! etcd's authentication by user and password: gets tokens, and gets a new one when etcd refuses
//! the present one.
//!
//! etcd forgets tokens (5 minutes without use, a restart, a change of users or roles) and refuses a
//! request with a forgotten token before it executes it. So such a request is sent again with a new
//! token.

use std::time::Duration;

use http::uri::PathAndQuery;
use parking_lot::Mutex;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use crate::messages::{AuthenticateRequest, AuthenticateResponse};

/// Time limit of an authentication. etcd hashes the password, which takes 100 ms and more.
const LIMIT: Duration = Duration::from_secs(5);

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub user: String,
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    /// The password stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Credentials");
        shown.field("user", &self.user).finish_non_exhaustive()
    }
}

/// A token, or none if there are no credentials or etcd's authentication is off.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    value: Option<MetadataValue<Ascii>>,
    number: u64,
}

impl Token {
    pub(crate) fn add_to<T>(&self, request: &mut Request<T>) {
        if let Some(value) = &self.value {
            request.metadata_mut().insert("token", value.clone());
        }
    }
}

#[derive(Debug)]
pub(crate) struct Auth {
    credentials: Option<Credentials>,
    state: Mutex<State>,
    /// One authentication at a time and endpoint: a hash of the password costs etcd much.
    turns: Vec<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Default)]
struct State {
    token: Option<Token>,
    made: u64,
}

impl Auth {
    pub(crate) fn new(credentials: Option<Credentials>, endpoints: usize) -> Self {
        Self {
            credentials,
            state: Mutex::default(),
            turns: (0..endpoints)
                .map(|_| tokio::sync::Mutex::new(()))
                .collect(),
        }
    }

    pub(crate) fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// The token for a request to an endpoint.
    pub(crate) async fn token(&self, endpoint: usize, channel: &Channel) -> Result<Token, Status> {
        let Some(credentials) = &self.credentials else {
            let (value, number) = (None, 0);
            return Ok(Token { value, number });
        };
        let known = || self.state.lock().token.clone();
        if let Some(token) = known() {
            return Ok(token);
        }
        let _turn = self.turns[endpoint].lock().await;
        if let Some(token) = known() {
            return Ok(token);
        }
        let value = match timeout(LIMIT, authenticate(credentials, channel.clone())).await {
            Ok(value) => value?,
            Err(_) => return Err(Status::deadline_exceeded("no answer to the authentication")),
        };
        let mut state = self.state.lock();
        state.made += 1;
        let number = state.made;
        let token = Token { value, number };
        state.token = Some(token.clone());
        Ok(token)
    }

    /// True if `status` refuses `token` only: the same request may succeed with another one.
    pub(crate) fn may_retry(&self, status: &Status, token: &Token) -> bool {
        let is_refused = self.has_credentials() && refuses_token(status);
        if is_refused {
            self.forget(token);
        }
        is_refused
    }

    /// The next request gets another token.
    pub(crate) fn forget(&self, token: &Token) {
        let mut state = self.state.lock();
        if state
            .token
            .as_ref()
            .is_some_and(|now| now.number == token.number)
        {
            state.token = None;
        }
    }
}

fn refuses_token(status: &Status) -> bool {
    let said = status.message();
    match status.code() {
        Code::Unauthenticated => said.contains("invalid auth token"),
        // The second: a request without a token, after the authentication was switched on.
        Code::InvalidArgument => {
            said.contains("revision of auth store is old") || said.contains("user name is empty")
        }
        _ => false,
    }
}

async fn authenticate(
    credentials: &Credentials,
    channel: Channel,
) -> Result<Option<MetadataValue<Ascii>>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::from_error(error.into()))?;
    let request = Request::new(AuthenticateRequest {
        name: credentials.user.clone(),
        password: credentials.password.clone(),
    });
    let path = PathAndQuery::from_static("/etcdserverpb.Auth/Authenticate");
    let codec = ProstCodec::<AuthenticateRequest, AuthenticateResponse>::default();
    match grpc.unary(request, path, codec).await {
        Ok(answer) => {
            let token = MetadataValue::try_from(answer.into_inner().token);
            let value = token.map_err(|_| Status::internal("a token that is no text"))?;
            Ok(Some(value))
        }
        // As etcd's own clients do: the user takes effect when the authentication is switched on.
        Err(status) if status.message().contains("authentication is not enabled") => Ok(None),
        Err(status) if status.message().contains("invalid user ID or password") => {
            let why = format!(
                "wrong password, or there is no user \"{}\"",
                credentials.user
            );
            Err(Status::unauthenticated(why))
        }
        Err(status) => Err(status),
    }
}
