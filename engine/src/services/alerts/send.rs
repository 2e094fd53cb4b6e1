//! One attempt to deliver a message: reads the receiver's files, then sends.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nacre_engine_alerts::{
    Failure, Login, Mail, Message, Security, SigningSecret, Trust, Url, Webhook,
};
use zeroize::Zeroizing;

use crate::config::alert::{AlertReceiver, MailSettings, MailTls, WebhookSettings};
use crate::services::keyring::file;

/// Longest secret in bytes: URLs of webhooks can be long.
const LONGEST_SECRET: usize = 4096;

pub(super) async fn once(
    receiver: &AlertReceiver,
    message: &Message,
    limit: Duration,
) -> Result<(), Failure> {
    // The files may be on a disk that does not respond. They are read each time, so that new ones
    // count at once.
    let of_files = receiver.clone();
    let reading = tokio::task::spawn_blocking(move || match of_files {
        AlertReceiver::Webhook(webhook) => webhook_of(&webhook).map(Ready::Webhook),
        AlertReceiver::Mail(mail) => mail_of(mail).map(Ready::Mail),
    });
    let read = tokio::time::timeout(limit, reading).await;
    let read = read.map_err(|_| Failure::Late(limit))?;
    match read.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))? {
        Ready::Webhook(webhook) => webhook.send(message, limit).await,
        Ready::Mail(mail) => mail.send(message, limit).await,
    }
}

enum Ready {
    Webhook(Webhook),
    Mail(Mail),
}

fn webhook_of(settings: &WebhookSettings) -> Result<Webhook, Failure> {
    let url_file = secret("url_file", settings.url_file.as_deref())?;
    let of_file = url_file.as_ref().map(|url| url.as_str());
    let url = Url::parse(of_file.or(settings.url.as_deref()).unwrap_or_default())?;
    let signing = secret("secret_file", settings.secret_file.as_deref())?;
    let signing = signing.map(|text| {
        SigningSecret::parse(&text).map_err(|error| Failure::Secret {
            key: "secret_file",
            path: settings.secret_file.clone().unwrap_or_default(),
            cause: error.to_string(),
        })
    });
    Ok(Webhook {
        trust: trust(url.is_https(), settings.ca.as_deref())?,
        secret: signing.transpose()?,
        token: secret("token_file", settings.token_file.as_deref())?,
        url,
    })
}

fn mail_of(settings: MailSettings) -> Result<Mail, Failure> {
    let password = secret("password_file", settings.password_file.as_deref())?;
    let server = settings.server()?;
    let trusted = || Trust::read(settings.ca.as_deref());
    let security = match settings.tls {
        MailTls::StartTls => Security::StartTls(trusted()?),
        MailTls::Implicit => Security::Implicit(trusted()?),
        MailTls::Off => Security::Clear,
    };
    let login = settings.user.zip(password);
    Ok(Mail {
        server,
        security,
        login: login.map(|(user, password)| Login { user, password }),
        from: settings.from,
        to: settings.to,
    })
}

fn trust(is_needed: bool, ca: Option<&Path>) -> Result<Option<Trust>, Failure> {
    is_needed.then(|| Trust::read(ca)).transpose()
}

/// The line in a file, which no other user can read.
fn secret(key: &'static str, path: Option<&Path>) -> Result<Option<Zeroizing<String>>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let refuse = |cause: String| Failure::Secret {
        key,
        path: PathBuf::from(path),
        cause,
    };
    let read = file::read_at_most(path, LONGEST_SECRET);
    let (text, _) = read.map_err(|error| refuse(error.to_string()))?;
    let line = text.trim_matches(['\r', '\n']);
    if line.is_empty() || line.contains(char::is_control) {
        return Err(refuse("one line of text is needed".into()));
    }
    Ok(Some(Zeroizing::new(line.to_owned())))
}
