//! One attempt to deliver a message: reads the receiver's files, then sends.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nacre_engine_alerts::{
    Failure, Login, Mail, MailEncryption, Message, Progress, SigningSecret, Trust, Url, Webhook,
};
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

use crate::config::alert::{AlertReceiver, MailSettings, MailTls, WebhookSettings};
use crate::services::keyring::file;

/// Longest secret in bytes: URLs of webhooks can be long.
const LONGEST_SECRET: usize = 4096;
/// Largest file of `ca` in bytes. The system's authorities have a quarter of it.
const LARGEST_CA: usize = 1 << 20;

/// `permit`: at most one helper thread reads for a receiver, also one that hangs.
pub(super) async fn once(
    (receiver, permit): (&AlertReceiver, &Arc<Semaphore>),
    message: &Message,
    progress: &mut Progress,
    limit: Duration,
) -> Result<(), Failure> {
    let reading = read(receiver.clone(), Arc::clone(permit));
    let read = tokio::time::timeout(limit, reading).await;
    match read.map_err(|_| Failure::Late(limit))?? {
        Ready::Webhook(webhook) => webhook.send(message, limit).await,
        Ready::Mail(mail) => mail.send(message, progress, limit).await,
    }
}

/// Reads the files, which can be on a disk that does not respond, and asks the resolver. Both
/// happen each time, so that changes count at once.
async fn read(receiver: AlertReceiver, permit: Arc<Semaphore>) -> Result<Ready, Failure> {
    let permit = permit.acquire_owned().await;
    let reading = tokio::task::spawn_blocking(move || {
        let _until_the_end = permit;
        match receiver {
            AlertReceiver::Webhook(webhook) => webhook_of(&webhook).map(Ready::Webhook),
            AlertReceiver::Mail(mail) => mail_of(mail).map(Ready::Mail),
        }
    });
    let read = reading.await;
    read.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

enum Ready {
    Webhook(Webhook),
    Mail(Mail),
}

fn webhook_of(settings: &WebhookSettings) -> Result<Webhook, Failure> {
    let url_file = secret("url_file", settings.url_file.as_deref())?;
    let of_file = url_file.as_ref().map(|url| url.as_str());
    let url = Url::parse(of_file.or(settings.url.as_deref()).unwrap_or_default())?;
    if !url.is_private() && settings.url_file.is_some() {
        return Err(Failure::UrlInClear);
    }
    let signing = secret("secret_file", settings.secret_file.as_deref())?;
    let signing = signing.map(|text| {
        SigningSecret::parse(&text).map_err(|error| Failure::Secret {
            key: "secret_file",
            path: settings.secret_file.clone().unwrap_or_default(),
            cause: error.to_string(),
        })
    });
    let authorities = || authorities(settings.ca.as_deref());
    Ok(Webhook {
        trust: url.is_https().then(authorities).transpose()?,
        secret: signing.transpose()?,
        token: secret("token_file", settings.token_file.as_deref())?,
        addresses: url.server().resolve()?,
        url,
    })
}

fn mail_of(settings: MailSettings) -> Result<Mail, Failure> {
    let password = secret("password_file", settings.password_file.as_deref())?;
    let server = settings.server()?;
    let authorities = || authorities(settings.ca.as_deref());
    let security = match settings.tls {
        MailTls::StartTls => MailEncryption::StartTls(authorities()?),
        MailTls::Implicit => MailEncryption::Implicit(authorities()?),
        MailTls::Off => MailEncryption::Clear,
    };
    let login = settings.user.zip(password);
    Ok(Mail {
        addresses: server.resolve()?,
        server,
        security,
        login: login.map(|(user, password)| Login { user, password }),
        from: settings.from,
        to: settings.to,
    })
}

fn authorities(ca: Option<&Path>) -> Result<Trust, Failure> {
    let Some(path) = ca else {
        return Trust::of_system();
    };
    let text = file::read_public(path, LARGEST_CA).map_err(|error| Failure::Authorities {
        path: path.to_owned(),
        cause: error.to_string(),
    })?;
    Trust::of_pem(path, &text)
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
