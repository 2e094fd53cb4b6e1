//! One attempt to deliver a message: reads the receiver's secrets, then sends.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nacre_engine_alerts::{
    Failure, Login, Mail, MailEncryption, Message, Progress, SigningSecret, Trust, Url, Webhook,
};
use tokio::sync::Semaphore;
use zeroize::Zeroizing;

use crate::config::alert::{AlertReceiver, MailSettings, MailTls, WebhookSettings};
use crate::services::keyring::text::{LONGEST_LINE, line};
use crate::services::keyring::{Keyring, NamedKey, file};

/// Most bytes of the file `ca`. The system's own list has about a quarter of that.
const LARGEST_CA: usize = 1 << 20;

/// The keys that hold a receiver's secrets, by the names of its settings.
type NamedKeys = BTreeMap<&'static str, Arc<NamedKey>>;

/// Attempts one delivery. `permit` allows one helper thread per receiver, even if that hangs.
pub(super) async fn once(
    (receiver, permit): (&AlertReceiver, &Arc<Semaphore>),
    keyring: &Keyring,
    message: &Message,
    progress: &mut Progress,
    limit: Duration,
) -> Result<(), Failure> {
    let keys = keys_of(receiver, keyring)?;
    let reading = read(receiver.clone(), keys, Arc::clone(permit));
    let read = tokio::time::timeout(limit, reading).await;
    match read.map_err(|_| Failure::Late(limit))?? {
        Ready::Webhook(webhook) => webhook.send(message, limit).await,
        Ready::Mail(mail) => mail.send(message, progress, limit).await,
    }
}

/// Looks up the keys at each attempt, so that a replaced key takes effect at once.
fn keys_of(receiver: &AlertReceiver, keyring: &Keyring) -> Result<NamedKeys, Failure> {
    let found = receiver.keys().into_iter().map(|(setting, name)| {
        let found = keyring.find(name).map(|key| (setting, key));
        found.ok_or_else(|| Failure::Secret {
            setting,
            place: name.to_owned(),
            cause: "there is no such key".into(),
        })
    });
    found.collect()
}

/// Reads the files and resolves the host name at each attempt, so that changes take effect at once.
/// A disk that does not respond holds up only the helper thread.
async fn read(
    receiver: AlertReceiver,
    keys: NamedKeys,
    permit: Arc<Semaphore>,
) -> Result<Ready, Failure> {
    let permit = permit.acquire_owned().await;
    let reading = tokio::task::spawn_blocking(move || {
        let _until_the_end = permit;
        match receiver {
            AlertReceiver::Webhook(webhook) => webhook_of(&webhook, &keys).map(Ready::Webhook),
            AlertReceiver::Mail(mail) => mail_of(mail, &keys).map(Ready::Mail),
        }
    });
    let read = reading.await;
    read.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

enum Ready {
    Webhook(Webhook),
    Mail(Mail),
}

fn webhook_of(settings: &WebhookSettings, keys: &NamedKeys) -> Result<Webhook, Failure> {
    let hidden = secret(("url_file", settings.url_file.as_deref()), "url_key", keys)?;
    let of_secret = hidden.as_ref().map(|url| url.as_str());
    let url = Url::parse(of_secret.or(settings.url.as_deref()).unwrap_or_default())?;
    if !url.is_private() && hidden.is_some() {
        return Err(Failure::UrlInClear);
    }
    let of_file = ("secret_file", settings.secret_file.as_deref());
    let signing = secret(of_file, "secret_key", keys)?;
    let signing = signing.map(|text| {
        SigningSecret::parse(&text).map_err(|error| {
            let (setting, place) = match (&settings.secret_key, &settings.secret_file) {
                (Some(key), _) => ("secret_key", key.clone()),
                (None, path) => ("secret_file", shown(path.as_deref())),
            };
            Failure::Secret {
                setting,
                place,
                cause: error.to_string(),
            }
        })
    });
    let authorities = || authorities(settings.ca.as_deref());
    Ok(Webhook {
        trust: url.is_https().then(authorities).transpose()?,
        secret: signing.transpose()?,
        token: secret(
            ("token_file", settings.token_file.as_deref()),
            "token_key",
            keys,
        )?,
        addresses: url.server().resolve()?,
        url,
    })
}

fn mail_of(settings: MailSettings, keys: &NamedKeys) -> Result<Mail, Failure> {
    let of_file = ("password_file", settings.password_file.as_deref());
    let password = secret(of_file, "password_key", keys)?;
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

fn shown(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| path.display().to_string())
}

/// The secret in a key, or in a file that no other user can read.
fn secret(
    (file_setting, path): (&'static str, Option<&Path>),
    key_setting: &'static str,
    keys: &NamedKeys,
) -> Result<Option<Zeroizing<String>>, Failure> {
    if let Some(key) = keys.get(key_setting) {
        let refuse = |cause: String| Failure::Secret {
            setting: key_setting,
            place: key.name.clone(),
            cause,
        };
        return key
            .line()
            .map(Some)
            .map_err(|error| refuse(error.to_string()));
    }
    let Some(path) = path else { return Ok(None) };
    let refuse = |cause: String| Failure::Secret {
        setting: file_setting,
        place: shown(Some(path)),
        cause,
    };
    let read = file::read_at_most(path, LONGEST_LINE + 2);
    let (text, _) = read.map_err(|error| refuse(error.to_string()))?;
    line(&text).map(Some).map_err(refuse)
}
