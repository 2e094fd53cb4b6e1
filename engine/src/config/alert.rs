//! `[[alert.webhook]]` and `[[alert.mail]]`: receivers of messages about events.

use std::path::PathBuf;

use nacre_engine_alerts::{AddressError, Server, Url};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::notify::{Category, EventDetails, Severity};
use crate::values::flattened;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlertSettings {
    pub webhook: Vec<WebhookSettings>,
    pub mail: Vec<MailSettings>,
}

impl AlertSettings {
    /// Most receivers.
    pub const MOST: usize = 16;

    /// One receiver alone.
    pub fn of(receiver: AlertReceiver) -> Self {
        let mut only = Self::default();
        match receiver {
            AlertReceiver::Webhook(webhook) => only.webhook.push(webhook),
            AlertReceiver::Mail(mail) => only.mail.push(mail),
        }
        only
    }

    pub fn receivers(&self) -> Vec<AlertReceiver> {
        let webhooks = self.webhook.iter().cloned().map(AlertReceiver::Webhook);
        webhooks
            .chain(self.mail.iter().cloned().map(AlertReceiver::Mail))
            .collect()
    }
}

/// JSON by HTTP POST.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct WebhookSettings {
    /// Name of the receiver: 1 to 128 bytes, no control characters.
    pub name: String,
    /// The URL: operators see it, viewers its origin.
    pub url: Option<String>,
    /// File with the URL, if the URL is a secret: it counts instead of `url`.
    pub url_file: Option<PathBuf>,
    /// Name of a key of kind `text` with the URL: it counts instead of the file.
    pub url_key: Option<String>,
    /// File with the secret that signs requests; none: they are not signed.
    pub secret_file: Option<PathBuf>,
    /// Name of a key of kind `text` with this secret, instead of the file.
    pub secret_key: Option<String>,
    /// File with a token for `Authorization: Bearer`; none: no such header.
    pub token_file: Option<PathBuf>,
    /// Name of a key of kind `text` with this token, instead of the file.
    pub token_key: Option<String>,
    /// PEM file with the certificates that sign the webhook's; none: those of the system.
    pub ca: Option<PathBuf>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub selection: AlertSelection,
}

flattened!(WebhookSettings, selection);

/// Mail through an SMTP server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct MailSettings {
    /// Name of the receiver: 1 to 128 bytes, no control characters.
    pub name: String,
    /// `HOST` or `HOST:PORT`.
    pub server: String,
    pub tls: MailTls,
    /// None: no authentication.
    pub user: Option<String>,
    /// File with the user's password.
    pub password_file: Option<PathBuf>,
    /// Name of a key of kind `text` with this password, instead of the file.
    pub password_key: Option<String>,
    /// PEM file with the certificates that sign the server's; none: those of the system.
    pub ca: Option<PathBuf>,
    /// The sender: `name@example.org` or `Name <name@example.org>`.
    pub from: String,
    /// The recipients.
    pub to: Vec<String>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub selection: AlertSelection,
}

impl Default for MailSettings {
    fn default() -> Self {
        Self {
            name: String::new(),
            server: String::new(),
            tls: MailTls::default(),
            user: None,
            password_file: None,
            password_key: None,
            ca: None,
            from: String::new(),
            to: Vec::new(),
            selection: AlertSelection {
                gather_s: 30,
                ..AlertSelection::default()
            },
        }
    }
}

flattened!(MailSettings, selection);

impl MailSettings {
    pub fn server(&self) -> Result<Server, AddressError> {
        Server::parse(&self.server, self.tls.default_port())
    }
}

/// The setting `tls` of a mail receiver. The authorities are files of the receiver, which are read
/// for each message.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum MailTls {
    /// The connection is encrypted after a first word in clear; the default.
    #[default]
    StartTls,
    /// TLS from the first byte.
    Implicit,
    /// No encryption.
    Off,
}

impl MailTls {
    fn default_port(self) -> u16 {
        match self {
            Self::StartTls => 587,
            Self::Implicit => 465,
            Self::Off => 25,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum AlertReceiver {
    Webhook(WebhookSettings),
    Mail(MailSettings),
}

/// How a receiver is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReceiverKind {
    Webhook,
    Mail,
}

/// The events that a receiver gets, and when. The only declaration of these keys of
/// `[[alert.webhook]]` and `[[alert.mail]]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AlertSelection {
    /// It gets events of this severity and above.
    pub severity: Severity,
    /// Empty: all.
    pub categories: Vec<Category>,
    /// Types of events that it does not get.
    pub except: Vec<String>,
    /// Events within this time of the first one share a message.
    pub gather_s: u64,
    /// How long a failed message is tried again.
    pub retry_for_s: u64,
}

impl Default for AlertSelection {
    fn default() -> Self {
        Self {
            severity: Severity::Warning,
            categories: Vec::new(),
            except: Vec::new(),
            gather_s: 2,
            retry_for_s: 3600,
        }
    }
}

impl AlertReceiver {
    pub fn name(&self) -> &str {
        match self {
            Self::Webhook(webhook) => &webhook.name,
            Self::Mail(mail) => &mail.name,
        }
    }

    pub fn kind(&self) -> ReceiverKind {
        match self {
            Self::Webhook(_) => ReceiverKind::Webhook,
            Self::Mail(_) => ReceiverKind::Mail,
        }
    }

    /// The address without its secrets: the path of a webhook's URL can be one.
    pub fn target(&self) -> String {
        match self {
            Self::Webhook(webhook) => {
                let of_url = |url: &String| {
                    Url::parse(url).map_or_else(|_| String::new(), |url| url.origin())
                };
                match (&webhook.url_key, &webhook.url_file, &webhook.url) {
                    (Some(key), ..) => format!("key {key}"),
                    (None, Some(path), _) => path.display().to_string(),
                    (None, None, url) => url.as_ref().map_or_else(String::new, of_url),
                }
            }
            Self::Mail(mail) => mail.to.join(", "),
        }
    }

    /// The URL of a webhook whose settings have it.
    pub fn url(&self) -> Option<&str> {
        match self {
            Self::Webhook(webhook) => webhook.url.as_deref(),
            Self::Mail(_) => None,
        }
    }

    /// The names of the keys with its secrets, and the settings that name them.
    pub fn keys(&self) -> Vec<(&'static str, &str)> {
        let named = match self {
            Self::Webhook(of) => vec![
                ("url_key", &of.url_key),
                ("secret_key", &of.secret_key),
                ("token_key", &of.token_key),
            ],
            Self::Mail(of) => vec![("password_key", &of.password_key)],
        };
        let given = named.into_iter().filter(|(_, key)| key.is_some());
        given
            .map(|(setting, key)| (setting, key.as_deref().unwrap_or_default()))
            .collect()
    }

    pub fn selection(&self) -> &AlertSelection {
        match self {
            Self::Webhook(webhook) => &webhook.selection,
            Self::Mail(mail) => &mail.selection,
        }
    }
}

impl AlertSelection {
    pub fn takes(&self, event: &EventDetails) -> bool {
        event.severity >= self.severity
            && (self.categories.is_empty() || self.categories.contains(&event.category))
            && !self.except.iter().any(|kind| kind == event.kind)
    }
}
