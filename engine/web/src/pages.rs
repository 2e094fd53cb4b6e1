//! Answers requests: the page's files, and the API under `/api/`.
//!
//! ```text
//!   GET  /, /assets/...   the embedded files
//!   GET  /api/session     who is signed in
//!   GET  /api/live        server-sent events, see live
//!   POST /api/setup, /api/login, /api/logout, /api/password
//!   POST /api/rpc         one call, as over the management socket
//!   POST /api/upload      a file of an admin, see upload
//! ```
//!
//! A POST must have `Content-Type: application/json` (an upload: `application/octet-stream`), the
//! header `X-Nacre`, and an `Origin` that equals `Host`. A page of another origin can send such a
//! request only after a CORS preflight request, which this server does not grant.
//!
//! A program sends `Authorization: Bearer TOKEN` instead, which browsers do not send on their own:
//! such a request needs neither `X-Nacre` nor `Origin`. A program may make calls, read its role and
//! live data, and upload a file.

use std::rc::Rc;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use nacre_engine_rpc::error::Errno;
use nacre_engine_rpc::frame::MAX_REQUEST_BYTES;
use nacre_engine_rpc::{Role, RpcError};
use tracing::warn;
use zeroize::Zeroizing;

use crate::acts::Act;
use crate::api::{self, Reply};
use crate::assets::{matches, takes_gzip};
use crate::logins::{By, SignedIn};
use crate::sessions::Token;
use crate::web::{Answer, Backend, Client, Web};

/// Content type of every POST except for an upload.
const JSON: &str = "application/json";
/// Most bytes of the body of a POST, except for calls and uploads.
const MAX_SMALL_BYTES: usize = 8 * 1024;
/// A header that only our page sends. With the value `background` the request is not an act of the
/// user, and does not prolong the session.
const OURS: HeaderName = HeaderName::from_static("x-nacre");
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; \
    frame-ancestors 'none'";

pub(crate) async fn answer<B: Backend>(
    web: &Web<B>,
    request: Request<Incoming>,
    client: Client,
) -> Response<Answer> {
    let mut response = route(web, request, client).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if client.secure && web.has_real_certificate() {
        let value = HeaderValue::from_static("max-age=31536000");
        headers.insert(header::STRICT_TRANSPORT_SECURITY, value);
    }
    response
}

async fn route<B: Backend>(
    web: &Web<B>,
    request: Request<Incoming>,
    client: Client,
) -> Response<Answer> {
    let headers = request.headers();
    if the_only(headers, &header::HOST).is_none() {
        return closing(plain(
            StatusCode::BAD_REQUEST,
            "one Host header is needed\n",
        ));
    }
    // Proxies and servers may disagree where such a body ends.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        let text = "send a body with Content-Length\n";
        return closing(plain(StatusCode::LENGTH_REQUIRED, text));
    }
    let path = request.uri().path();
    match path {
        "/api/session" => match *request.method() {
            Method::GET | Method::HEAD => {
                let signed_in = match signed_in(web, headers, client) {
                    Ok(signed_in) => signed_in,
                    Err(refused) => return *refused,
                };
                json(StatusCode::OK, api::session(web, signed_in.as_ref()))
            }
            _ => not_allowed("GET, HEAD"),
        },
        "/api/live" => match *request.method() {
            Method::GET => live(web, headers, client),
            _ => not_allowed("GET"),
        },
        "/api/setup" | "/api/login" | "/api/logout" | "/api/password" | "/api/rpc" => {
            match *request.method() {
                Method::POST => post(web, request, client).await,
                _ => not_allowed("POST"),
            }
        }
        "/api/upload" => match *request.method() {
            Method::POST => closing(upload(web, request, client).await),
            _ => not_allowed("POST"),
        },
        path if path.starts_with("/api/") => error(
            StatusCode::NOT_FOUND,
            &RpcError::errno(Errno::ENOENT, "there is no such path"),
        ),
        path => match *request.method() {
            Method::GET | Method::HEAD => asset(web, path, headers),
            _ => not_allowed("GET, HEAD"),
        },
    }
}

/// A file of the page. Only paths of the embedded list exist, so there is no path traversal.
fn asset<B: Backend>(web: &Web<B>, path: &str, headers: &HeaderMap) -> Response<Answer> {
    let Some(asset) = web.assets.find(path) else {
        return plain(StatusCode::NOT_FOUND, "there is no such file\n");
    };
    let text = |name| {
        headers
            .get(name)
            .and_then(|value: &HeaderValue| value.to_str().ok())
    };
    let is_known = text(header::IF_NONE_MATCH).is_some_and(|tags| matches(tags, &asset.etag));
    let mut response = if is_known {
        empty(StatusCode::NOT_MODIFIED)
    } else if takes_gzip(text(header::ACCEPT_ENCODING)) {
        let mut response = whole(StatusCode::OK, asset.content_type, asset.gzip.into());
        let gzip = HeaderValue::from_static("gzip");
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, gzip);
        response
    } else {
        plain(
            StatusCode::NOT_ACCEPTABLE,
            "the page is sent with gzip only\n",
        )
    };
    let headers = response.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(etag) = HeaderValue::from_str(&asset.etag) {
        headers.insert(header::ETAG, etag);
    }
    response
}

fn live<B: Backend>(web: &Web<B>, headers: &HeaderMap, client: Client) -> Response<Answer> {
    let signed_in = match signed_in(web, headers, client) {
        Ok(Some(signed_in)) => signed_in,
        Ok(None) => return not_signed_in(),
        Err(refused) => return *refused,
    };
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let last = last.and_then(|id| id.trim().parse().ok());
    let Some(stream) = web.live.open(signed_in, last) else {
        let cause = format!("{} pages have live data already", crate::live::MAX_STREAMS);
        let refused = RpcError::errno(Errno::EAGAIN, cause).remedy("close other pages");
        return error(StatusCode::SERVICE_UNAVAILABLE, &refused);
    };
    let mut response = Response::new(Answer::Stream(stream));
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    closing(response)
}

async fn post<B: Backend>(
    web: &Web<B>,
    request: Request<Incoming>,
    client: Client,
) -> Response<Answer> {
    let path = request.uri().path().to_owned();
    let signed_in = match signed_in(web, request.headers(), client) {
        Ok(signed_in) => signed_in,
        Err(refused) => return closing(*refused),
    };
    let is_program = signed_in.as_ref().is_some_and(|of| of.by == By::ApiToken);
    let checked = if is_program {
        check_content_type(request.headers(), JSON).and_then(|()| match &*path {
            "/api/rpc" => Ok(()),
            _ => Err("an API token is for calls, not for sessions and passwords"),
        })
    } else {
        check_content_type(request.headers(), JSON)
            .and_then(|()| check_ours(request.headers(), client))
    };
    if let Err(cause) = checked {
        let refused = RpcError::errno(Errno::EACCES, cause);
        return closing(error(StatusCode::FORBIDDEN, &refused));
    }
    if signed_in.is_none() && matches!(&*path, "/api/rpc" | "/api/password") {
        return closing(not_signed_in());
    }
    let limit = match &*path {
        "/api/rpc" => MAX_REQUEST_BYTES,
        _ => MAX_SMALL_BYTES,
    };
    let body = match body(web, request, limit).await {
        Ok(body) => body,
        Err(refused) => return closing(refused),
    };
    // The body may have taken seconds.
    if let Some(of) = &signed_in
        && !web.logins.is_valid(of)
    {
        let refused = match of.by {
            By::Session => api::signed_out(),
            By::ApiToken => api::unknown_token(),
        };
        return closing(json(StatusCode::UNAUTHORIZED, refused));
    }
    let Ok(turn) = web.running.try_acquire() else {
        let refused = RpcError::errno(Errno::EAGAIN, "too many requests are being answered");
        return error(StatusCode::SERVICE_UNAVAILABLE, &refused);
    };
    turn.forget();
    let turn = RequestTurn(Rc::clone(&web.running));
    let address = client.address;
    let door = api::Door {
        backend: Rc::clone(&web.backend),
        logins: Rc::clone(&web.logins),
        address,
    };
    // A task of its own: a call that has begun ends, although the client has gone.
    let answered = tokio::task::spawn_local(async move {
        let _turn = turn;
        match (&*path, signed_in) {
            ("/api/setup", _) => door.set_up(&body).await,
            ("/api/login", old) => door.login(&body, old).await,
            ("/api/logout", of) => door.logout(of).await,
            ("/api/password", Some(of)) => door.password(&body, of).await,
            (_, Some(of)) => api::rpc(door.backend, &body, address, of).await,
            (_, None) => Reply::Failed(StatusCode::UNAUTHORIZED, api::signed_out()),
        }
    });
    match answered.await {
        Ok(reply) => of_reply(web, reply, client),
        Err(panic) => {
            let cause = format!("the request failed: {panic}");
            error(
                StatusCode::INTERNAL_SERVER_ERROR,
                &RpcError::internal(cause),
            )
        }
    }
}

/// Stores a file that an admin or a program with that role sends.
async fn upload<B: Backend>(
    web: &Web<B>,
    request: Request<Incoming>,
    client: Client,
) -> Response<Answer> {
    let of = match signed_in(web, request.headers(), client) {
        Ok(Some(of)) => of,
        Ok(None) => return not_signed_in(),
        Err(refused) => return *refused,
    };
    let headers = request.headers();
    let checked = check_content_type(headers, "application/octet-stream").and_then(|()| {
        let is_program = of.by == By::ApiToken;
        if is_program {
            Ok(())
        } else {
            check_ours(headers, client)
        }
    });
    if let Err(cause) = checked {
        let refused = RpcError::errno(Errno::EACCES, cause);
        return error(StatusCode::FORBIDDEN, &refused);
    }
    let length = the_only(headers, &header::CONTENT_LENGTH).and_then(|text| text.parse().ok());
    let Some(length) = length else {
        let text = "send a body with Content-Length\n";
        return plain(StatusCode::LENGTH_REQUIRED, text);
    };
    let (uploads, logins) = (Rc::clone(&web.uploads), Rc::clone(&web.logins));
    let (backend, patience) = (Rc::clone(&web.backend), web.limits.body);
    let (address, body) = (client.address, request.into_body());
    // A task of its own: an upload that is whole gets its audit line, although the client has gone.
    let stored = tokio::task::spawn_local(async move {
        let stored = match of.role {
            Role::Admin => {
                let goes_on = || logins.goes_on(&of);
                uploads.store(body, length, patience, goes_on).await
            }
            Role::Operator | Role::Viewer => {
                let cause = "an upload needs the role admin";
                Err(RpcError::errno(Errno::EACCES, cause))
            }
        };
        let act = Act {
            name: Act::UPLOAD,
            account: (of.by == By::Session).then(|| of.name.clone()),
            api_token: (of.by == By::ApiToken).then(|| of.name.clone()),
            role: Some(of.role),
            address,
            outcome: stored.as_ref().map(|_| ()).map_err(Clone::clone),
        };
        backend.note(act).await;
        stored
    });
    let stored = stored.await.unwrap_or_else(|panic| {
        let cause = format!("the upload failed: {panic}");
        Err(RpcError::internal(cause))
    });
    match stored {
        Ok(file) => {
            let text = serde_json::json!({ "file": file, "bytes": length });
            json(StatusCode::OK, text.to_string())
        }
        Err(refused) => {
            let (status, text) = api::refusal(&refused);
            json(status, text)
        }
    }
}

/// One of the bounded number of requests that are being answered.
struct RequestTurn(Rc<tokio::sync::Semaphore>);

impl Drop for RequestTurn {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

fn of_reply<B: Backend>(web: &Web<B>, reply: Reply, client: Client) -> Response<Answer> {
    match reply {
        Reply::SignedIn(token) => {
            let signed_in = web.logins.signed_in(token.id(), true);
            let mut response = json(StatusCode::OK, api::session(web, signed_in.as_ref()));
            set_cookie(&mut response, client, Some(&token));
            response
        }
        Reply::SignedOut => {
            let mut response = json(StatusCode::OK, api::session(web, None));
            set_cookie(&mut response, client, None);
            response
        }
        Reply::Json(text) => json(StatusCode::OK, text),
        Reply::Failed(status, refused) => json(status, refused),
    }
}

/// Reads the body, within limits of its size and time.
async fn body<B: Backend>(
    web: &Web<B>,
    request: Request<Incoming>,
    limit: usize,
) -> Result<Zeroizing<Vec<u8>>, Response<Answer>> {
    let too_large = || {
        let cause = format!("the request has more than {limit} bytes");
        error(
            StatusCode::PAYLOAD_TOO_LARGE,
            &RpcError::invalid_request(cause),
        )
    };
    let length = the_only(request.headers(), &header::CONTENT_LENGTH);
    let length = length.and_then(|text| text.parse::<usize>().ok());
    let Some(length) = length else {
        let text = "send a body with Content-Length\n";
        return Err(plain(StatusCode::LENGTH_REQUIRED, text));
    };
    if length > limit {
        return Err(too_large());
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(length));
    let mut body = Limited::new(request.into_body(), limit);
    let reading = async {
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => {
                    if let Ok(data) = frame.into_data() {
                        bytes.extend_from_slice(&data);
                    }
                }
                Err(_) => return false,
            }
        }
        true
    };
    match tokio::time::timeout(web.limits.body, reading).await {
        Ok(true) => Ok(bytes),
        Ok(false) => Err(plain(
            StatusCode::BAD_REQUEST,
            "the request is not complete\n",
        )),
        Err(_) => Err(plain(
            StatusCode::REQUEST_TIMEOUT,
            "the request is too slow\n",
        )),
    }
}

fn check_content_type(headers: &HeaderMap, wanted: &str) -> Result<(), &'static str> {
    let content_type = the_only(headers, &header::CONTENT_TYPE).unwrap_or_default();
    let content_type = content_type.split(';').next().unwrap_or_default().trim();
    if !content_type.eq_ignore_ascii_case(wanted) {
        return Err(
            "the Content-Type has to be application/json, or application/octet-stream of a file",
        );
    }
    Ok(())
}

/// Refuses a request that a page of another origin could make a browser send.
fn check_ours(headers: &HeaderMap, client: Client) -> Result<(), &'static str> {
    if the_only(headers, &OURS).is_none() {
        return Err("the header X-Nacre is missing");
    }
    let scheme = if client.secure { "https://" } else { "http://" };
    let origin = the_only(headers, &header::ORIGIN).and_then(|origin| origin.strip_prefix(scheme));
    let host = the_only(headers, &header::HOST);
    match (origin, host) {
        (Some(origin), Some(host)) if origin.eq_ignore_ascii_case(host) => Ok(()),
        _ => Err("the Origin is not this server"),
    }
}

/// The user or program of a request. With a bearer token, cookies do not count, and an invalid
/// token is an error. Other authorization schemes are ignored: they are for a proxy in front of the
/// page.
fn signed_in<B: Backend>(
    web: &Web<B>,
    headers: &HeaderMap,
    client: Client,
) -> Result<Option<SignedIn>, Box<Response<Answer>>> {
    let secret = match the_only(headers, &header::AUTHORIZATION) {
        Some(value) => {
            let (scheme, secret) = value.split_once(' ').unwrap_or((value, ""));
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Ok(session(web, headers, client));
            }
            Some(secret.trim())
        }
        None if headers.contains_key(header::AUTHORIZATION) => None,
        None => return Ok(session(web, headers, client)),
    };
    match secret.and_then(|secret| web.logins.program(secret)) {
        Some(program) => Ok(Some(program)),
        None => {
            web.log("an unknown API token", |times| {
                warn!(address = %client.address, times, "web: an API token that is unknown or over");
            });
            let mut response = json(StatusCode::UNAUTHORIZED, api::unknown_token());
            let bearer = HeaderValue::from_static("Bearer");
            let headers = response.headers_mut();
            headers.insert(header::WWW_AUTHENTICATE, bearer);
            Err(response.into())
        }
    }
}

/// The session of the request's cookie.
fn session<B: Backend>(web: &Web<B>, headers: &HeaderMap, client: Client) -> Option<SignedIn> {
    let name = cookie_name(client);
    let cookies = headers.get_all(header::COOKIE).iter();
    let cookies = cookies.filter_map(|line| line.to_str().ok());
    let mut pairs = cookies.flat_map(|line| line.split(';'));
    let value = pairs.find_map(|pair| pair.trim().strip_prefix(name)?.strip_prefix('='))?;
    let active = headers.get(OURS).is_some_and(|value| value != "background");
    web.logins.signed_in(Token::parse(value)?.id(), active)
}

/// Browsers accept the prefix `__Host-` with HTTPS only.
fn cookie_name(client: Client) -> &'static str {
    if client.secure {
        "__Host-nacre"
    } else {
        "nacre"
    }
}

fn set_cookie(response: &mut Response<Answer>, client: Client, token: Option<&Token>) {
    let name = cookie_name(client);
    let secure = if client.secure { "; Secure" } else { "" };
    let (value, age) = match token {
        Some(token) => (token.reveal(), crate::sessions::LONGEST.as_secs()),
        None => ("", 0),
    };
    let cookie = Zeroizing::new(format!(
        "{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"
    ));
    if let Ok(mut cookie) = HeaderValue::from_str(&cookie) {
        cookie.set_sensitive(true);
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
}

/// The text of a header that appears exactly once.
fn the_only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    value.to_str().ok()
}

fn not_signed_in() -> Response<Answer> {
    json(StatusCode::UNAUTHORIZED, api::signed_out())
}

fn not_allowed(allowed: &'static str) -> Response<Answer> {
    let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "not with this method\n");
    let allowed = HeaderValue::from_static(allowed);
    response.headers_mut().insert(header::ALLOW, allowed);
    closing(response)
}

fn error(status: StatusCode, error: &RpcError) -> Response<Answer> {
    json(status, api::error_text(error))
}

fn json(status: StatusCode, text: String) -> Response<Answer> {
    let mut response = whole(status, "application/json", text.into());
    let no_store = HeaderValue::from_static("no-store");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, no_store);
    response
}

fn plain(status: StatusCode, text: &'static str) -> Response<Answer> {
    whole(
        status,
        "text/plain; charset=utf-8",
        Bytes::from_static(text.as_bytes()),
    )
}

fn whole(status: StatusCode, content_type: &'static str, bytes: Bytes) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Some(bytes)));
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static(content_type);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    response
}

fn empty(status: StatusCode) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(None));
    *response.status_mut() = status;
    response
}

/// Closes the connection after the response, because the request may have an unread body.
fn closing(mut response: Response<Answer>) -> Response<Answer> {
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}
