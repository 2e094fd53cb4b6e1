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

    pub fn receivers(&self) -> Vec<AlertReceiver> {
        let webhooks = self.webhook.iter().cloned().map(AlertReceiver::Webhook);
        webhooks
            .chain(self.mail.iter().cloned().map(AlertReceiver::Mail))
            .collect()
    }
}

/// JSON by HTTP POST.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, remote = "Self")]
pub struct WebhookSettings {
    pub name: String,
    pub url: Option<String>,
    /// File with the URL, if the URL is a secret: it counts instead of `url`.
    pub url_file: Option<PathBuf>,
    /// File with the secret that signs requests; none: they are not signed.
    pub secret_file: Option<PathBuf>,
    /// File with a token for `Authorization: Bearer`; none: no such header.
    pub token_file: Option<PathBuf>,
    /// PEM file with the certificates that sign the webhook's; none: those of the system.
    pub ca: Option<PathBuf>,
    #[serde(skip)]
    pub selection: AlertSelection,
}

flattened!(WebhookSettings, selection);

/// Mail through an SMTP server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, remote = "Self")]
pub struct MailSettings {
    pub name: String,
    /// `HOST` or `HOST:PORT`.
    pub server: String,
    pub tls: MailTls,
    /// None: no authentication.
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    /// PEM file with the certificates that sign the server's; none: those of the system.
    pub ca: Option<PathBuf>,
    pub from: String,
    pub to: Vec<String>,
    #[serde(skip)]
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MailTls {
    #[default]
    StartTls,
    Implicit,
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlertSelection {
    pub severity: Severity,
    /// Empty: all.
    pub categories: Vec<Category>,
    /// Types of events that it does not get.
    pub except: Vec<String>,
    pub gather_s: u64,
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
            Self::Webhook(webhook) => match (&webhook.url_file, &webhook.url) {
                (Some(path), _) => path.display().to_string(),
                (None, Some(url)) => {
                    Url::parse(url).map_or_else(|_| String::new(), |url| url.origin())
                }
                (None, None) => String::new(),
            },
            Self::Mail(mail) => mail.to.join(", "),
        }
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
