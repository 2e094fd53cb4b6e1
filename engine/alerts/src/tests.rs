//! Goal: messages arrive as specified; every failure of a receiver ends within the time limit, and
//! secrets are not sent in clear. Method: servers on loopback that answer as a script says.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);
/// Enough for one recipient.
const SLOW: Duration = Duration::from_secs(2);

macro_rules! test_file {
    ($name:literal) => {
        include_str!(concat!("../../rpc/src/tls/test_files/", $name))
    };
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work)
}

fn trust(pem: &str) -> Trust {
    Trust::of_pem(Path::new("/ca.pem"), pem.as_bytes()).unwrap()
}

fn acceptor() -> TlsAcceptor {
    let chain = CertificateDer::pem_slice_iter(test_file!("server.pem").as_bytes());
    let key = PrivateKeyDer::from_pem_slice(test_file!("server.key").as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

fn message() -> Message {
    let event = |severity, text: &str| Event {
        id: 7,
        time: "2026-11-27T08:00:00Z".into(),
        category: "volume",
        severity,
        kind: "volume_degraded",
        ctx: "vol0".into(),
        text: text.into(),
        facts: serde_json::json!({ "replicas": 1 }),
        left_out: 2,
    };
    Message {
        id: "0a1b".into(),
        kind: "events",
        timestamp: "2026-11-27T08:00:01Z".into(),
        node: "san1".into(),
        text: "nacre on san1: error: it is bad".into(),
        events: vec![
            event("warning", "ähnlich"),
            event("error", ".\r\nit is bad"),
        ],
        lost: 3,
    }
}

/// The text that servers received.
type Received = Arc<Mutex<String>>;

/// The received text, once it contains this part.
async fn text_of(received: &Received, part: &str) -> String {
    loop {
        let text = received.lock().clone();
        if text.contains(part) {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Answers every request with this text; an empty one: never.
async fn http(answer: &'static str, tls: Option<TlsAcceptor>) -> (u16, Received) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let received = Received::default();
    let all = Arc::clone(&received);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (all, tls) = (Arc::clone(&all), tls.clone());
            tokio::spawn(async move {
                match tls {
                    None => serve_http(stream, answer, all).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            serve_http(stream, answer, all).await;
                        }
                    }
                }
            });
        }
    });
    (port, received)
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &'static str,
    all: Received,
) {
    let mut stream = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    while stream.read_line(&mut head).await.unwrap() > 2 {
        let last = head.lines().last().unwrap().to_lowercase();
        if let Some(value) = last.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    all.lock()
        .push_str(&(head + &String::from_utf8(body).unwrap()));
    if answer.is_empty() {
        std::future::pending::<()>().await;
    }
    stream.write_all(answer.as_bytes()).await.unwrap();
    let _ = stream.shutdown().await;
}

fn webhook(url: &str) -> Webhook {
    let url = Url::parse(url).unwrap();
    Webhook {
        // Requests that must not be made need no addresses.
        addresses: if url.server.is_local() {
            url.server.resolve().unwrap()
        } else {
            Vec::new()
        },
        url,
        secret: None,
        token: None,
        trust: None,
    }
}

const ACCEPTED: &str = "HTTP/1.1 204 No Content\r\n\r\n";

#[test]
fn a_webhook_gets_signed_json() {
    run(async {
        let (port, received) = http(ACCEPTED, None).await;
        let mut hook = webhook(&format!("http://127.0.0.1:{port}/a?b=c"));
        hook.secret = Some(SigningSecret::parse(&"QUJD".repeat(10)).unwrap());
        hook.token = Some(Zeroizing::new("s3cret".to_owned()));
        hook.send(&message(), LIMIT).await.unwrap();
        let text = received.lock().clone();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("POST /a?b=c HTTP/1.1\r\n"), "{head}");
        for line in [
            &format!("host: 127.0.0.1:{port}"),
            "content-type: application/json",
            "webhook-id: 0a1b",
            "webhook-signature: v1,",
            "authorization: Bearer s3cret",
        ] {
            assert!(head.contains(line), "{line} in {head}");
        }
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            (&body["type"], &body["lost"]),
            (&"events".into(), &3.into())
        );
        assert_eq!(body["events"][1]["text"], ".\r\nit is bad");
        assert_eq!(body["events"][0]["facts"]["replicas"], 1);
    });
}

#[test]
fn answers_decide_about_another_attempt() {
    for (answer, is_final, after) in [
        ("HTTP/1.1 500 Oops\r\n\r\n", false, None),
        (
            "HTTP/1.1 503 Busy\r\nRetry-After: 7\r\n\r\n",
            false,
            Some(7),
        ),
        (
            "HTTP/1.1 429 Many\r\nretry-after: soon\r\n\r\n",
            false,
            None,
        ),
        ("HTTP/1.1 404 None\r\n\r\n", true, None),
        (
            "HTTP/1.1 302 There\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
            true,
            None,
        ),
        ("no HTTP at all\r\n\r\n", false, None),
        ("HTTP/1.1 2", false, None),
    ] {
        run(async {
            let (port, _) = http(answer, None).await;
            let hook = webhook(&format!("http://localhost:{port}"));
            let failure = hook.send(&message(), LIMIT).await.unwrap_err();
            assert_eq!(failure.is_final(), is_final, "{answer}: {failure}");
            let seconds = failure.retry_after().map(|after| after.as_secs());
            assert_eq!(seconds, after, "{answer}");
        });
    }
}

#[test]
fn a_webhook_that_hangs_is_given_up_in_time() {
    run(async {
        let (port, received) = http("", None).await;
        let begun = Instant::now();
        let hook = webhook(&format!("http://127.0.0.1:{port}"));
        let failure = hook.send(&message(), SHORT).await.unwrap_err();
        assert!(matches!(failure, Failure::Late(_)), "{failure}");
        assert!(begun.elapsed() >= SHORT && !failure.is_final());
        assert!(!text_of(&received, "ähnlich").await.is_empty());
        // A server that accepts nothing, and a port without a server: it stays bound.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = silent.local_addr().unwrap().port();
        let mut hook = webhook(&format!("https://127.0.0.1:{port}"));
        hook.trust = Some(trust(test_file!("ca.pem")));
        let failure = hook.send(&message(), SHORT).await.unwrap_err();
        assert!(matches!(failure, Failure::Late(_)), "{failure}");
        let closed = TcpSocket::new_v4().unwrap();
        closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = closed.local_addr().unwrap().port();
        let hook = webhook(&format!("http://127.0.0.1:{port}"));
        let failure = hook.send(&message(), LIMIT).await.unwrap_err();
        assert!(matches!(failure, Failure::Connect { .. }), "{failure}");
    });
}

#[test]
fn https_needs_a_certificate_of_a_known_authority() {
    run(async {
        let (port, received) = http(ACCEPTED, Some(acceptor())).await;
        for host in ["localhost", "127.0.0.1"] {
            let mut hook = webhook(&format!("https://{host}:{port}/"));
            hook.trust = Some(trust(test_file!("ca.pem")));
            hook.send(&message(), LIMIT).await.unwrap();
            assert!(received.lock().contains("webhook-id"));
            received.lock().clear();
            hook.trust = Some(trust(test_file!("foreign_ca.pem")));
            let failure = hook.send(&message(), LIMIT).await.unwrap_err();
            assert!(matches!(failure, Failure::Tls { .. }), "{failure}");
            assert!(!failure.is_final(), "the certificate may be corrected");
            hook.trust = None;
            let failure = hook.send(&message(), LIMIT).await.unwrap_err();
            assert!(matches!(failure, Failure::Tls { .. }), "{failure}");
        }
        assert_eq!(*received.lock(), "");
        let nothing = Trust::of_pem(Path::new("/ca.pem"), b"text").unwrap_err();
        assert_eq!(nothing.to_string(), "/ca.pem: there is no certificate");
        let mut hook = webhook("http://192.0.2.1/");
        hook.token = Some(Zeroizing::new("s3cret".to_owned()));
        let failure = hook.send(&message(), LIMIT).await.unwrap_err();
        assert!(matches!(failure, Failure::TokenInClear), "{failure}");
    });
}

/// How a mail server behaves.
#[derive(Clone)]
struct Script {
    /// TLS after STARTTLS.
    starttls: Option<TlsAcceptor>,
    /// TLS from the first byte on.
    implicit: Option<TlsAcceptor>,
    /// A command that gets this answer instead of the usual one; an empty one: never.
    special: Option<(&'static str, &'static str)>,
}

const PLAIN: Script = Script {
    starttls: None,
    implicit: None,
    special: None,
};

async fn smtp(script: Script) -> (u16, Received) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let received = Received::default();
    let all = Arc::clone(&received);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        if script.special.is_some_and(|(word, _)| word == "(greeting)") {
            flood(&mut stream).await;
            return;
        }
        if let Some(tls) = script.implicit.clone() {
            if let Ok(stream) = tls.accept(stream).await {
                converse(BufReader::new(stream), &script, &all, "220 hello\r\n").await;
            }
            return;
        }
        let stream = BufReader::new(stream);
        let after = converse(stream, &script, &all, "220 hello\r\n").await;
        if let (Some(stream), Some(tls)) = (after, &script.starttls)
            && let Ok(stream) = tls.accept(stream.into_inner()).await
        {
            all.lock().push_str("(TLS)\r\n");
            converse(BufReader::new(stream), &script, &all, "").await;
        }
    });
    (port, received)
}

/// Sends a line without an end until the client closes the connection.
async fn flood(stream: &mut TcpStream) {
    while stream.write_all(&[b'2'; 4096]).await.is_ok() {}
}

/// Answers commands; returns the stream after STARTTLS.
async fn converse<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: BufReader<S>,
    script: &Script,
    all: &Received,
    greeting: &str,
) -> Option<BufReader<S>> {
    stream.write_all(greeting.as_bytes()).await.ok()?;
    let mut in_data = false;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        all.lock().push_str(&line);
        if in_data && line != ".\r\n" {
            continue;
        }
        let is_encrypted = script.implicit.is_some() || greeting.is_empty();
        let command = line.trim_end();
        let usual = match command.get(..4).unwrap_or(command) {
            _ if in_data => "250 queued\r\n",
            "EHLO" if script.starttls.is_some() && !is_encrypted => {
                "250-here\r\n250-STARTTLS\r\n250 AUTH PLAIN LOGIN\r\n"
            }
            "EHLO" => "250-here\r\n250 AUTH PLAIN LOGIN\r\n",
            "STAR" => "220 go\r\n",
            "AUTH" => "235 welcome\r\n",
            "DATA" => "354 go on\r\n",
            "QUIT" => "221 bye\r\n",
            _ => "250 ok\r\n",
        };
        let special = script.special.filter(|(word, _)| command.starts_with(word));
        let answer = special.map_or(usual, |(_, answer)| answer);
        if answer.is_empty() {
            std::future::pending::<()>().await;
        }
        in_data = answer.starts_with("354");
        stream.write_all(answer.as_bytes()).await.ok()?;
        if command == "STARTTLS" && answer.starts_with("220") {
            return Some(stream);
        }
    }
}

fn mail(port: u16, security: MailEncryption, with_login: bool) -> Mail {
    let server = Server::parse(&format!("localhost:{port}"), 25).unwrap();
    Mail {
        addresses: server.resolve().unwrap(),
        server,
        security,
        login: with_login.then(|| Login {
            user: "nacre".into(),
            password: Zeroizing::new("p4ssword".to_owned()),
        }),
        from: "Nacre <nacre@example.org>".into(),
        to: vec!["ops@example.org".into(), "Zoë <zoe@example.org>".into()],
    }
}

/// PLAIN of the user and password above (RFC 4616).
const CREDENTIALS: &str = "AUTH PLAIN AG5hY3JlAHA0c3N3b3Jk";

#[test]
fn mail_is_sent_over_tls_with_authentication() {
    let known = || trust(test_file!("ca.pem"));
    let starttls = Script {
        starttls: Some(acceptor()),
        ..PLAIN
    };
    let implicit = Script {
        implicit: Some(acceptor()),
        ..PLAIN
    };
    for (script, security, login) in [
        (starttls, MailEncryption::StartTls(known()), true),
        (implicit, MailEncryption::Implicit(known()), true),
        (PLAIN, MailEncryption::Clear, false),
    ] {
        run(async {
            let (port, received) = smtp(script).await;
            mail(port, security, login)
                .send(&message(), &mut Progress::default(), LIMIT)
                .await
                .unwrap();
            let text = received.lock().clone();
            if let Some((clear, _)) = text.split_once("(TLS)") {
                assert_eq!(clear, "EHLO san1\r\nSTARTTLS\r\n");
            }
            assert_eq!(text.contains(CREDENTIALS), login, "{text}");
            for line in [
                "MAIL FROM:<nacre@example.org>",
                "RCPT TO:<ops@example.org>",
                "RCPT TO:<zoe@example.org>",
                "Subject: nacre on san1: error: it is bad\r\n",
                "Auto-Submitted: auto-generated\r\n",
                "Message-ID: <0a1b@san1>\r\n",
            ] {
                assert!(text.contains(line), "{line} in {text}");
            }
            // One transaction for each of two recipients. A line with a single dot would end one.
            assert_eq!(text.matches("\r\n.\r\n").count(), 2, "{text}");
            assert!(text.contains("3 earlier events were lost"), "{text}");
        });
    }
}

#[test]
fn no_secret_leaves_without_the_right_tls() {
    let no_tls = PLAIN;
    let with_tls = Script {
        starttls: Some(acceptor()),
        ..PLAIN
    };
    let refuses = Script {
        special: Some(("STARTTLS", "454 not now\r\n")),
        ..with_tls.clone()
    };
    for (script, ca) in [
        (no_tls, test_file!("ca.pem")),
        (with_tls, test_file!("foreign_ca.pem")),
        (refuses, test_file!("ca.pem")),
    ] {
        run(async {
            let (port, received) = smtp(script).await;
            let mail = mail(port, MailEncryption::StartTls(trust(ca)), true);
            let failure = mail
                .send(&message(), &mut Progress::default(), LIMIT)
                .await
                .unwrap_err();
            let text = received.lock().clone();
            assert!(
                !text.contains("AUTH") && !text.contains("MAIL"),
                "{failure}: {text}"
            );
        });
    }
}

#[test]
fn answers_of_mail_servers_decide_about_another_attempt() {
    for (command, answer, is_final) in [
        ("AUTH", "535 wrong password\r\n", true),
        ("MAIL", "451 later\r\n", false),
        ("RCPT", "550 nobody\r\n", true),
        ("DATA", "421 closing\r\n", false),
        (".", "452 full\r\n", false),
        ("EHLO", "what?\r\n", false),
    ] {
        run(async {
            let script = Script {
                special: Some((command, answer)),
                ..PLAIN
            };
            let (port, _) = smtp(script).await;
            let mail = mail(port, MailEncryption::Clear, true);
            let failure = mail
                .send(&message(), &mut Progress::default(), LIMIT)
                .await
                .unwrap_err();
            assert_eq!(failure.is_final(), is_final, "{command}: {failure}");
        });
    }
    for command in ["EHLO", "MAIL", "."] {
        run(async {
            let script = Script {
                special: Some((command, "")),
                ..PLAIN
            };
            let (port, _) = smtp(script).await;
            let mail = mail(port, MailEncryption::Clear, false);
            let failure = mail
                .send(&message(), &mut Progress::default(), SHORT)
                .await
                .unwrap_err();
            assert!(!failure.is_final(), "{command}: {failure}");
        });
    }
}

/// Sends the message to a server that behaves in this way: the outcome, and what the server got.
async fn attempt(
    special: (&'static str, &'static str),
    progress: &mut Progress,
    limit: Duration,
) -> (Result<(), Failure>, String) {
    let special = Some(special);
    let (port, received) = smtp(Script { special, ..PLAIN }).await;
    let mail = mail(port, MailEncryption::Clear, false);
    let outcome = mail.send(&message(), progress, limit).await;
    let text = received.lock().clone();
    (outcome, text)
}

/// Goal: a mail that is accepted counts as such, whatever the server does afterwards.
#[test]
fn accepted_mail_is_not_sent_again() {
    for answer in [
        "500 what?\r\n",
        "421 closing\r\n",
        "no answer at all\r\n",
        "",
    ] {
        run(async {
            let mut progress = Progress::default();
            let (outcome, _) = attempt(("QUIT", answer), &mut progress, LIMIT).await;
            outcome.unwrap();
        });
    }
}

/// Goal: each recipient gets a message once, whatever the server says about the other.
#[test]
fn a_recipient_that_is_refused_delays_no_other() {
    run(async {
        // A refusal for good.
        let mut progress = Progress::default();
        let refusal = ("RCPT TO:<ops", "550 nobody\r\n");
        let (outcome, text) = attempt(refusal, &mut progress, LIMIT).await;
        let failure = outcome.unwrap_err();
        assert!(failure.is_final() && progress.is_partial());
        let cause = failure.to_string();
        assert!(
            cause.contains("ops@example.org") && cause.contains("nobody"),
            "{cause}"
        );
        assert_eq!(text.matches("\r\n.\r\n").count(), 1, "{text}");
        // A temporary one: the next attempt is only for that recipient.
        let mut progress = Progress::default();
        let refusal = ("RCPT TO:<ops", "451 later\r\n");
        let (outcome, text) = attempt(refusal, &mut progress, LIMIT).await;
        assert!(!outcome.unwrap_err().is_final());
        assert_eq!(text.matches("\r\n.\r\n").count(), 1, "{text}");
        let (outcome, text) = attempt(("none", ""), &mut progress, LIMIT).await;
        outcome.unwrap();
        assert!(!text.contains("zoe@example.org>\r\nDATA"), "{text}");
        assert_eq!(text.matches("RCPT").count(), 1, "{text}");
        // A server that hangs after the first recipient.
        let mut progress = Progress::default();
        let (outcome, _) = attempt(("RCPT TO:<zoe", ""), &mut progress, SLOW).await;
        assert!(!outcome.unwrap_err().is_final());
        let (outcome, text) = attempt(("RCPT TO:<zoe", "550 no\r\n"), &mut progress, LIMIT).await;
        assert!(outcome.unwrap_err().is_final());
        assert!(!text.contains("RCPT TO:<ops"), "{text}");
    });
}

/// Goal: an address with letters outside ASCII costs no other recipient the message. Servers with
/// SMTPUTF8 get it too.
#[test]
fn an_address_outside_ascii_is_refused_alone() {
    run(async {
        for (ehlo, reached) in [
            ("250 here\r\n", 1),
            ("250-here\r\n250-8BITMIME\r\n250 SMTPUTF8\r\n", 2),
        ] {
            let special = Some(("EHLO", ehlo));
            let (port, received) = smtp(Script { special, ..PLAIN }).await;
            let mut mail = mail(port, MailEncryption::Clear, false);
            mail.to = vec!["zoë@example.org".into(), "ops@example.org".into()];
            let mut progress = Progress::default();
            let outcome = mail.send(&message(), &mut progress, LIMIT).await;
            let text = received.lock().clone();
            assert_eq!(text.matches("\r\n.\r\n").count(), reached, "{text}");
            assert_eq!(text.contains("zoë@"), reached == 2, "{text}");
            assert!(progress.is_partial());
            if reached == 2 {
                outcome.unwrap();
                continue;
            }
            let failure = outcome.unwrap_err();
            assert!(failure.is_final());
            let cause = failure.to_string();
            assert!(
                cause.contains("zoë@example.org") && cause.contains("SMTPUTF8"),
                "{cause}"
            );
        }
    });
}

/// Goal: a mail server cannot fill the memory, and nothing that it sends in clear counts after the
/// handshake.
#[test]
fn answers_of_mail_servers_are_bounded() {
    run(async {
        let mut progress = Progress::default();
        let (outcome, _) = attempt(("(greeting)", ""), &mut progress, LIMIT).await;
        let cause = outcome.unwrap_err().to_string();
        assert!(cause.contains("more than 262144 bytes"), "{cause}");
        let script = Script {
            starttls: Some(acceptor()),
            special: Some(("STARTTLS", "220 go\r\n250 injected\r\n")),
            ..PLAIN
        };
        let (port, received) = smtp(script).await;
        let mail = mail(
            port,
            MailEncryption::StartTls(trust(test_file!("ca.pem"))),
            true,
        );
        let outcome = mail.send(&message(), &mut Progress::default(), LIMIT).await;
        outcome.unwrap_err();
        assert!(!received.lock().contains("(TLS)"));
    });
}

/// Goal: an address that does not answer leaves time for the others. Method: a listener whose queue
/// of connections is full.
#[test]
fn an_address_that_does_not_answer_delays_no_other() {
    run(async {
        let full = TcpSocket::new_v4().unwrap();
        full.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let full = full.listen(1).unwrap();
        let dead = full.local_addr().unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = tokio::time::timeout(SHORT, TcpStream::connect(dead)).await {
            waiting.push(stream.unwrap());
        }
        let (port, _) = http(ACCEPTED, None).await;
        let mut hook = webhook(&format!("http://127.0.0.1:{port}"));
        hook.addresses.insert(0, dead);
        let limit = Duration::from_secs(4);
        hook.send(&message(), limit).await.unwrap();
    });
}

/// Goal: the text of an event cannot forge lines or headers, or fill a mail.
#[test]
fn texts_have_one_line() {
    let mut message = message();
    message.text = "a\r\nBcc: x@example.org\u{1b}[2J\u{202e}".into();
    message.node = "san\r\n1".into();
    message.events[0].text = format!("a\nNode: forged\u{7}{}", "x".repeat(600));
    assert_eq!(message.subject(), "a  Bcc: x@example.org [2J ");
    assert_eq!(message.domain(), "san1");
    let text = message.mail_text();
    assert_eq!(text.lines().count(), 7, "{text}");
    assert!(
        text.contains("  a Node: forged x") && text.contains("x… (2 more"),
        "{text}"
    );
    assert!(text.lines().next().unwrap().chars().count() < 560);
}
