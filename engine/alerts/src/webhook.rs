//! Sends a message to a webhook: JSON by HTTP POST, signed according to
//! [Standard Webhooks](https://www.standardwebhooks.com/).

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64ct::{Base64, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncWrite};
use zeroize::Zeroizing;

use crate::{Failure, Message, Trust, Url};

/// A webhook, with its secrets.
#[derive(Debug)]
pub struct Webhook {
    pub url: Url,
    /// From [`Server::resolve`](crate::Server::resolve).
    pub addresses: Vec<SocketAddr>,
    /// `None`: requests are not signed.
    pub secret: Option<SigningSecret>,
    /// For the header `Authorization: Bearer`.
    pub token: Option<Zeroizing<String>>,
    /// Required for https: without it, a request to an https URL fails.
    pub trust: Option<Trust>,
}

/// The key that signs requests with HMAC-SHA-256.
pub struct SigningSecret(Zeroizing<Vec<u8>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("24 to 64 random bytes in base64 are needed: `openssl rand -base64 32` makes some")]
pub struct WeakSecret;

impl SigningSecret {
    /// Reads base64, with or without the prefix `whsec_`.
    pub fn parse(text: &str) -> Result<Self, WeakSecret> {
        let text = text.trim();
        let text = text.strip_prefix("whsec_").unwrap_or(text);
        let key = Zeroizing::new(Base64::decode_vec(text).map_err(|_| WeakSecret)?);
        if !(24..=64).contains(&key.len()) {
            return Err(WeakSecret);
        }
        Ok(Self(key))
    }

    /// The header `webhook-signature`.
    fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes any key");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        format!("v1,{}", Base64::encode_string(&mac.finalize().into_bytes()))
    }
}

impl std::fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SigningSecret")
    }
}

impl Webhook {
    /// Sends the message within `limit`; `Ok` after an answer of 2xx. Does not follow redirects.
    /// Refuses to send a token without https, except to this machine.
    pub async fn send(&self, message: &Message, limit: Duration) -> Result<(), Failure> {
        if self.token.is_some() && !self.url.is_private() {
            return Err(Failure::TokenInClear);
        }
        let request = self.request(message, SystemTime::now())?;
        let answered = tokio::time::timeout(limit, self.exchange(request, limit)).await;
        let response = answered.map_err(|_| Failure::Late(limit))??;
        if response.status().is_success() {
            return Ok(());
        }
        let seconds = response.headers().get(header::RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
        Err(Failure::Status {
            status: response.status().as_u16(),
            retry_after: seconds.map(Duration::from_secs),
        })
    }

    fn request(
        &self,
        message: &Message,
        now: SystemTime,
    ) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let body = serde_json::to_vec(message).expect("a message is plain data");
        let timestamp = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(&self.url.path)
            .header(header::HOST, &self.url.authority)
            .header(
                header::USER_AGENT,
                concat!("nacre/", env!("CARGO_PKG_VERSION")),
            )
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .header("webhook-id", &message.id)
            .header("webhook-timestamp", timestamp);
        if let Some(secret) = &self.secret {
            let signature = secret.sign(&message.id, timestamp, &body);
            request = request.header("webhook-signature", signature);
        }
        if let Some(token) = &self.token {
            let mut value = header::HeaderValue::try_from(format!("Bearer {}", token.as_str()))?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        request.body(Full::new(Bytes::from(body)))
    }

    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        limit: Duration,
    ) -> Result<Response<Incoming>, Failure> {
        let server = &self.url.server;
        let stream = server.connect(&self.addresses, limit).await?;
        match (&self.trust, self.url.https) {
            (Some(trust), true) => over(server.handshake(stream, trust).await?, request).await,
            // Never in clear: the request may have a token.
            (None, true) => Err(Failure::Tls {
                server: server.to_string(),
                source: std::io::Error::other("no authority is trusted"),
            }),
            (_, false) => over(stream, request).await,
        }
    }
}

/// Sends one request over a connection of its own.
async fn over<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Failure> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let answer = sender.send_request(request);
    tokio::pin!(answer, connection);
    tokio::select! {
        biased;
        answer = &mut answer => Ok(answer?),
        // After its end the answer is known, or fails.
        _ = &mut connection => Ok(answer.await?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification of Standard Webhooks.
    #[test]
    fn requests_are_signed_as_the_specification_says() {
        let secret = SigningSecret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
        let signature = secret.sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(format!("{secret:?}"), "SigningSecret");
        for weak in ["", "whsec_", "whsec_AAAA", "not base64!"] {
            SigningSecret::parse(weak).unwrap_err();
        }
    }
}
