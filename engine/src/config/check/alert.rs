//! Checks of the receivers of alerts.

use std::collections::{BTreeMap, BTreeSet};

use nacre_engine_alerts::{AddressError, Url, check_mailbox};

use super::Check;
use crate::config::Problem;
use crate::config::alert::{AlertSettings, MailSettings, MailTls, WebhookSettings};
use crate::config::names::check_key_name;
use crate::notify::TYPES;

/// Checks receivers that a call gives, not a file. The keys of problems are such as
/// `alert.webhook[0].url`.
pub(crate) fn check(settings: &AlertSettings) -> Vec<Problem> {
    let mut check = Check {
        origins: &BTreeMap::new(),
        problems: Vec::new(),
    };
    check.alerts(settings);
    check.problems
}

impl Check<'_> {
    pub(super) fn alerts(&mut self, settings: &AlertSettings) {
        let mut names = BTreeSet::new();
        for (at, webhook) in settings.webhook.iter().enumerate() {
            let key = format!("alert.webhook[{at}]");
            self.receiver(&key, &webhook.name, &webhook.selection.except, &mut names);
            self.webhook(&key, webhook);
        }
        for (at, mail) in settings.mail.iter().enumerate() {
            let key = format!("alert.mail[{at}]");
            self.receiver(&key, &mail.name, &mail.selection.except, &mut names);
            self.mail(&key, mail);
        }
    }

    fn receiver<'a>(
        &mut self,
        key: &str,
        name: &'a str,
        except: &[String],
        names: &mut BTreeSet<&'a str>,
    ) {
        let field = format!("{key}.name");
        if let Err(error) = check_key_name(name) {
            self.refused(&field, &error);
        } else if !names.insert(name) {
            let cause = format!("a second receiver \"{name}\"");
            self.refuse(&field, cause, "give each a name of its own");
        } else if names.len() == AlertSettings::MOST + 1 {
            let cause = format!("more than {} receivers", AlertSettings::MOST);
            self.refuse(&field, cause, "send to a program that passes them on");
        }
        for (at, kind) in except.iter().enumerate() {
            if !TYPES.iter().any(|(name, ..)| name == kind) {
                let cause = format!("there is no event \"{kind}\"");
                let remedy = "`nacre events --reference` lists them";
                self.refuse(&format!("{key}.except[{at}]"), cause, remedy);
            }
        }
    }

    fn webhook(&mut self, key: &str, webhook: &WebhookSettings) {
        let field = format!("{key}.url");
        self.key_name(&format!("{key}.url_key"), &webhook.url_key);
        self.key_name(&format!("{key}.secret_key"), &webhook.secret_key);
        self.key_name(&format!("{key}.token_key"), &webhook.token_key);
        let has_token = webhook.token_file.is_some() || webhook.token_key.is_some();
        match &webhook.url {
            _ if webhook.url_file.is_some() || webhook.url_key.is_some() => {}
            None => {
                let remedy = "add url, or url_file or url_key with the file or key that has it";
                self.refuse_unless_refused_with(&field, "a webhook without a URL".into(), remedy);
            }
            Some(url) => match Url::parse(url) {
                Err(error) => self.address(&field, &error),
                Ok(url) if has_token && !url.is_private() => {
                    let cause = "the token would cross the network in clear";
                    self.refuse(&field, cause, "use https://");
                }
                Ok(_) => {}
            },
        }
    }

    /// Checks the name of a key of the keyring.
    fn key_name(&mut self, field: &str, name: &Option<String>) {
        if let Some(Err(error)) = name.as_deref().map(check_key_name) {
            self.refused(field, &error);
        }
    }

    fn mail(&mut self, key: &str, mail: &MailSettings) {
        self.key_name(&format!("{key}.password_key"), &mail.password_key);
        let has_password = mail.password_file.is_some() || mail.password_key.is_some();
        let server = mail.server();
        if let Err(error) = &server {
            self.address(&format!("{key}.server"), error);
        }
        if let Err(error) = check_mailbox(&mail.from) {
            self.address(&format!("{key}.from"), &error);
        }
        if mail.to.is_empty() {
            let cause = "mail without a recipient".to_owned();
            let remedy = "add to = [\"name@example.org\"]";
            self.refuse_unless_refused_with(&format!("{key}.to"), cause, remedy);
        }
        for (at, recipient) in mail.to.iter().enumerate() {
            if let Err(error) = check_mailbox(recipient) {
                self.address(&format!("{key}.to[{at}]"), &error);
            }
        }
        if mail.user.is_some() != has_password {
            let (missing, remedy) = match mail.user {
                Some(_) => ("password_file", "add password_file or password_key"),
                None => ("user", "add user"),
            };
            let cause = "authentication needs a user and a password";
            self.refuse(&format!("{key}.{missing}"), cause, remedy);
        } else if mail.tls == MailTls::Off
            && mail.user.is_some()
            && server.is_ok_and(|server| !server.is_local())
        {
            let cause = "the password would cross the network in clear";
            let remedy = "write \"starttls\" or \"implicit\"";
            self.refuse(&format!("{key}.tls"), cause, remedy);
        }
    }

    fn address(&mut self, key: &str, error: &AddressError) {
        self.refuse(key, error, error.remedy());
    }
}
