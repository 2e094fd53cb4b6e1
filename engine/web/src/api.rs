//! The requests below `/api/` with JSON in the request or the reply: session, set-up, sign-in,
//! sign-out, change of password, and RPC calls. [`crate::pages`] has checked the origin and the
//! session.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use hyper::StatusCode;
use nacre_engine_rpc::RpcError;
use nacre_engine_rpc::access::{Caller, Identity};
use nacre_engine_rpc::error::{
    Errno, INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, INVALID_STATE, METHOD_NOT_FOUND,
    PARSE_ERROR,
};
use nacre_engine_rpc::secret::{SecretJson, SecretText};
use nacre_engine_rpc::server::MAX_ANSWER_BYTES;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use serde_json::value::RawValue;
use zeroize::Zeroizing;

use crate::accounts::AccountError;
use crate::acts::Act;
use crate::api_tokens::TokenError;
use crate::logins::{By, LoginError, Logins, SignedIn};
use crate::passwords::PasswordError;
use crate::sessions::Token;
use crate::web::{Backend, Web};

/// The reply to a POST.
#[derive(Debug)]
pub(crate) enum Reply {
    /// A session was opened; the response sets its cookie.
    SignedIn(Token),
    SignedOut,
    Json(String),
    Failed(StatusCode, String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetUp {
    code: SecretText,
    name: String,
    password: SecretText,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Login {
    name: String,
    password: SecretText,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewPassword {
    old: SecretText,
    new: SecretText,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    method: String,
    #[serde(default)]
    params: Option<Box<RawValue>>,
}

fn secret(text: &SecretText) -> Zeroizing<String> {
    Zeroizing::new(text.reveal().to_owned())
}

/// The reply of `GET /api/session`: the user, the version and the host name, as JSON. Without a
/// session, the user's fields are null.
pub(crate) fn session<B: Backend>(web: &Web<B>, of: Option<&SignedIn>) -> String {
    json!({
        "setup": web.logins.wants_setup(),
        "signed_in": of.is_some(),
        "name": of.map(|of| &of.name),
        "role": of.map(|of| of.role.word()),
        "version": web.about.version,
        "host": *web.about.host.borrow(),
    })
    .to_string()
}

/// Executes set-up, sign-in, sign-out and changes of passwords for a client.
pub(crate) struct Door<B> {
    pub(crate) backend: Rc<B>,
    pub(crate) logins: Rc<Logins>,
    pub(crate) address: SocketAddr,
}

impl<B: Backend> Door<B> {
    /// Creates the first account, and opens a session for it.
    pub(crate) async fn set_up(&self, body: &[u8]) -> Reply {
        let SetUp {
            code,
            name,
            password,
        } = match read(body) {
            Ok(params) => params,
            Err(refused) => return refused,
        };
        let ip = self.address.ip();
        let opened = self
            .logins
            .set_up(code.reveal(), &name, secret(&password), ip);
        let opened = opened.await;
        self.signed_in(Act::SET_UP, &name, opened).await
    }

    /// Opens a session. `old`: the browser's former session, which ends.
    pub(crate) async fn login(&self, body: &[u8], old: Option<SignedIn>) -> Reply {
        let Login { name, password } = match read(body) {
            Ok(params) => params,
            Err(refused) => return refused,
        };
        let opened = self
            .logins
            .login(&name, secret(&password), self.address.ip());
        let opened = opened.await;
        if let (Ok(_), Some(old)) = (&opened, old) {
            self.logins.logout(old.id);
        }
        self.signed_in(Act::SIGN_IN, &name, opened).await
    }

    /// Ends the session, if there is one.
    pub(crate) async fn logout(&self, of: Option<SignedIn>) -> Reply {
        if let Some(of) = of {
            self.logins.logout(of.id);
            self.note(Act::SIGN_OUT, &of.name, Ok(())).await;
        }
        Reply::SignedOut
    }

    /// Changes the user's own password. Ends all sessions of the account, and opens a new one.
    pub(crate) async fn password(&self, body: &[u8], of: SignedIn) -> Reply {
        let NewPassword { old, new } = match read(body) {
            Ok(params) => params,
            Err(refused) => return refused,
        };
        let ip = self.address.ip();
        let changed = self
            .logins
            .change_own(&of.name, secret(&old), secret(&new), ip);
        let changed = changed.await;
        self.signed_in(Act::PASSWORD, &of.name, changed).await
    }

    async fn signed_in(
        &self,
        act: &'static str,
        name: &str,
        opened: Result<Token, LoginError>,
    ) -> Reply {
        let (delay, refused) = match opened {
            Ok(token) => {
                self.note(act, name, Ok(())).await;
                return Reply::SignedIn(token);
            }
            Err(error) => refused(error),
        };
        self.note(act, name, Err(refused.clone())).await;
        match delay {
            Some(delay) => Reply::Failed(StatusCode::UNAUTHORIZED, wrong(&refused, delay)),
            None => failed(&refused),
        }
    }

    async fn note(&self, act: &'static str, name: &str, outcome: Result<(), RpcError>) {
        let role = self.logins.role(name);
        let act = Act {
            name: act,
            account: role.map(|_| name.to_owned()),
            api_token: None,
            role,
            address: self.address,
            outcome,
        };
        self.backend.note(act).await;
    }
}

/// Runs one RPC call, with the same roles, deadline, errors and audit record as over the management
/// socket.
pub(crate) async fn rpc<B: Backend>(
    backend: Rc<B>,
    body: &[u8],
    address: SocketAddr,
    of: SignedIn,
) -> Reply {
    let Call { method, params } = match read(body) {
        Ok(call) => call,
        Err(refused) => return refused,
    };
    // Methods without parameters take none, also no empty ones.
    let params = params.map(SecretJson::from);
    let params = params.filter(|params| !is_empty_object(params.get()));
    let SignedIn { name, role, .. } = of;
    let identity = match of.by {
        By::Session => Identity::Account {
            name,
            role,
            address,
        },
        By::ApiToken => Identity::ApiToken {
            name,
            role,
            address,
        },
    };
    let caller = Caller {
        identity,
        program: String::new(),
    };
    match backend.call(Rc::new(caller), method, params).await {
        Ok(result) if result.get().len() > MAX_ANSWER_BYTES => {
            let cause = format!("the answer has more than {MAX_ANSWER_BYTES} bytes");
            failed(&RpcError::internal(cause).remedy("ask for less: name one object"))
        }
        Ok(result) => Reply::Json(format!("{{\"result\":{}}}", result.get())),
        Err(refused) => failed(&refused),
    }
}

fn is_empty_object(text: &str) -> bool {
    let inner = text
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'));
    inner.is_some_and(|inner| inner.trim().is_empty())
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Reply> {
    serde_json::from_slice(body).map_err(|error| {
        let refused = if error.is_data() {
            RpcError::invalid_request(error.to_string())
        } else {
            RpcError::parse(error.to_string())
        };
        failed(&refused)
    })
}

/// The error for the client, and the delay before its next attempt.
fn refused(error: LoginError) -> (Option<Duration>, RpcError) {
    let cause = error.to_string();
    match error {
        LoginError::Wrong(delay) | LoginError::WrongCode(delay) => {
            (Some(delay), RpcError::errno(Errno::EACCES, cause))
        }
        LoginError::Account(error) => (None, error.into()),
        LoginError::Random(_) => (None, RpcError::internal(cause)),
    }
}

fn wrong(refused: &RpcError, delay: Duration) -> String {
    let wait_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
    let cause = refused.data.as_ref().map(|facts| &facts.cause);
    json!({ "error": {
        "code": refused.code,
        "message": refused.message,
        "data": { "cause": cause, "wait_ms": wait_ms },
    } })
    .to_string()
}

/// The body of the error for a request without a session.
pub(crate) fn signed_out() -> String {
    let refused = RpcError::errno(
        Errno::EACCES,
        "the request has no session, or the session is over",
    );
    error_text(&refused.remedy("sign in"))
}

/// The body of the error for a request whose API token is not valid.
pub(crate) fn unknown_token() -> String {
    let refused = RpcError::errno(
        Errno::EACCES,
        "the API token is unknown, or its time is over",
    );
    error_text(&refused.remedy("`nacre web token list` shows the tokens"))
}

pub(crate) fn error_text(error: &RpcError) -> String {
    json!({ "error": error }).to_string()
}

fn failed(error: &RpcError) -> Reply {
    let (status, text) = refusal(error);
    Reply::Failed(status, text)
}

/// The status and body of an error.
pub(crate) fn refusal(error: &RpcError) -> (StatusCode, String) {
    (status(error.code), error_text(error))
}

/// The HTTP status of an error's code.
fn status(code: i32) -> StatusCode {
    let is = |errno: Errno| code == -(errno as i32);
    match code {
        PARSE_ERROR | INVALID_REQUEST | INVALID_PARAMS => StatusCode::BAD_REQUEST,
        METHOD_NOT_FOUND => StatusCode::NOT_FOUND,
        INTERNAL_ERROR => StatusCode::INTERNAL_SERVER_ERROR,
        // EPERM, too: SPDK's code of a method in the wrong phase.
        INVALID_STATE => StatusCode::CONFLICT,
        _ if is(Errno::EACCES) => StatusCode::FORBIDDEN,
        _ if is(Errno::ENOENT) || is(Errno::ENODEV) => StatusCode::NOT_FOUND,
        _ if is(Errno::EEXIST) || is(Errno::EBUSY) || is(Errno::EALREADY) => StatusCode::CONFLICT,
        _ if is(Errno::EAGAIN) => StatusCode::SERVICE_UNAVAILABLE,
        _ if is(Errno::ETIMEDOUT) => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    }
}

impl From<AccountError> for RpcError {
    fn from(error: AccountError) -> Self {
        let cause = error.to_string();
        match error {
            AccountError::Name(_) => Self::invalid_params(cause).field("name"),
            AccountError::Exists(_) => Self::errno(Errno::EEXIST, cause)
                .field("name")
                .remedy("choose another name"),
            AccountError::Unknown(_) => Self::errno(Errno::ENOENT, cause)
                .field("name")
                .remedy("`nacre web account list` shows the accounts"),
            AccountError::LastAdmin(_) => Self::errno(Errno::EBUSY, cause)
                .field("name")
                .remedy("make another account with the role admin first"),
            AccountError::Full => {
                Self::errno(Errno::ENOSPC, cause).remedy("remove an account first")
            }
            AccountError::Nothing => Self::invalid_params(cause).remedy("give one of them"),
            AccountError::SetUp => Self::errno(Errno::EEXIST, cause).remedy("sign in"),
            AccountError::Password(PasswordError::Busy) => {
                Self::errno(Errno::EAGAIN, cause).remedy("try again in a second")
            }
            AccountError::Password(PasswordError::Failed) => Self::internal(cause),
            AccountError::Password(_) => Self::invalid_params(cause).field("password"),
            AccountError::Store(error) => Self::io(&cause, &error.source),
        }
    }
}

impl From<TokenError> for RpcError {
    fn from(error: TokenError) -> Self {
        let cause = error.to_string();
        match error {
            TokenError::Name(_) => Self::invalid_params(cause).field("name"),
            TokenError::Exists(_) => Self::errno(Errno::EEXIST, cause)
                .field("name")
                .remedy("choose another name"),
            TokenError::Unknown(_) => Self::errno(Errno::ENOENT, cause)
                .field("name")
                .remedy("`nacre web token list` shows the tokens"),
            TokenError::Full => Self::errno(Errno::ENOSPC, cause).remedy("delete a token first"),
            TokenError::Validity(_) => Self::invalid_params(cause).field("validity_s"),
            TokenError::Random(_) => Self::internal(cause),
            TokenError::Store(error) => Self::io(&cause, &error.source),
        }
    }
}
