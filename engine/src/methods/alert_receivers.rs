//! `alert_set_webhook`, `alert_set_mail` and `alert_remove`, Nacre extensions: add, change and
//! remove receivers of alerts, in addition to those of the configuration file. Their secrets are
//! keys of kind `text`, or in files.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::alert::{AlertReceiver, AlertSettings, MailSettings, WebhookSettings};
use crate::config::check::alert::check;
use crate::config::names::RELATIVE_KEY;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::alerts::PREFIX;
use crate::services::keyring::no_key;
use crate::store::Change;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetWebhook>().add::<SetMail>();
    registry.add::<RemoveReceiver>();
}

pub(super) fn record_key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

pub struct SetWebhook;

impl Method<Engine> for SetWebhook {
    const NAME: &'static str = "alert_set_webhook";
    const ABOUT: &'static str = "Adds a webhook that gets alerts, or replaces the receiver of this name that an earlier call added. Settings that are left out have their defaults.";
    const CLASS: Class = Class::Secret;
    const ORDER: Order = Order::Exclusive;
    type Params = WebhookSettings;
    type Reply = bool;

    async fn apply(params: WebhookSettings, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let files = [
            ("url_file", &params.url_file),
            ("secret_file", &params.secret_file),
            ("token_file", &params.token_file),
            ("ca", &params.ca),
        ];
        for (field, path) in files {
            check_path(field, path.as_deref())?;
        }
        let record = serde_json::to_value(&params).expect("settings are plain data");
        set(&engine, Self::NAME, AlertReceiver::Webhook(params), record).await
    }
}

pub struct SetMail;

impl Method<Engine> for SetMail {
    const NAME: &'static str = "alert_set_mail";
    const ABOUT: &'static str = "Adds recipients of alerts by mail, or replaces the receiver of this name that an earlier call added. Settings that are left out have their defaults.";
    const CLASS: Class = Class::Secret;
    const ORDER: Order = Order::Exclusive;
    type Params = MailSettings;
    type Reply = bool;

    async fn apply(params: MailSettings, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let files = [("password_file", &params.password_file), ("ca", &params.ca)];
        for (field, path) in files {
            check_path(field, path.as_deref())?;
        }
        let record = serde_json::to_value(&params).expect("settings are plain data");
        set(&engine, Self::NAME, AlertReceiver::Mail(params), record).await
    }
}

fn check_path(field: &str, path: Option<&std::path::Path>) -> Result<(), RpcError> {
    match path {
        Some(path) if !path.is_absolute() => {
            let cause = format!("{}: {RELATIVE_KEY}", path.display());
            Err(RpcError::invalid_params(cause).field(field))
        }
        _ => Ok(()),
    }
}

async fn set(
    engine: &Rc<Engine>,
    method: &str,
    receiver: AlertReceiver,
    mut record: Value,
) -> Result<bool, RpcError> {
    let alerts = &engine.alerts;
    let (name, key) = (receiver.name().to_owned(), record_key(receiver.name()));
    let problems = check(&AlertSettings::of(receiver.clone()));
    if let Some(problem) = problems.into_iter().next() {
        // `alert.webhook[0].url: CAUSE`
        let field = problem.key.split_once("].").map_or("", |(_, field)| field);
        let cause = problem.cause.strip_prefix(&format!("{}: ", problem.key));
        let refused = RpcError::invalid_params(cause.unwrap_or(&problem.cause)).field(field);
        return Err(match problem.remedy {
            Some(remedy) => refused.remedy(remedy),
            None => refused,
        });
    }
    if !crate::journal::is_replaying() {
        if alerts.is_declared(&name) && !alerts.is_added(&name) {
            let cause = format!("the configuration file has a receiver \"{name}\"");
            return Err(RpcError::errno(Errno::EEXIST, cause)
                .field("name")
                .remedy("change it there, and reload the configuration; or give another name"));
        }
        for (setting, key) in receiver.keys() {
            let key = engine
                .keyring
                .find(key)
                .ok_or_else(|| no_key(setting, key))?;
            let line = tokio::task::spawn_blocking(move || key.line().map(drop));
            let line = line.await.map_err(|e| RpcError::internal(e.to_string()))?;
            line.map_err(|e| RpcError::errno(Errno::EINVAL, e.to_string()).field(setting))?;
        }
    }
    if alerts.added() >= AlertSettings::MOST && !alerts.is_added(&name) {
        let cause = format!(
            "calls have added {} receivers, the most",
            AlertSettings::MOST
        );
        let refused = RpcError::errno(Errno::ENOSPC, cause).field("name");
        return Err(refused.remedy("remove one with alert_remove"));
    }
    if let Some(settings) = record.as_object_mut() {
        settings.retain(|_, value| !value.is_null());
    }
    let change = Change::put(key, method, record);
    engine.journal.commit(change).await?;
    alerts.add(engine, receiver);
    Ok(true)
}

pub struct RemoveReceiver;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveReceiverParams {
    /// The receiver, which a call has added.
    pub name: String,
}

impl Method<Engine> for RemoveReceiver {
    const NAME: &'static str = "alert_remove";
    const ABOUT: &'static str = "Removes a receiver that a call has added. Events that wait to be sent to it are lost; keys with its secrets stay.";
    const CLASS: Class = Class::Secret;
    const ORDER: Order = Order::Exclusive;
    type Params = RemoveReceiverParams;
    type Reply = bool;

    async fn apply(params: RemoveReceiverParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let (name, key) = (&params.name, record_key(&params.name));
        if engine.journal.find(&key).is_none() {
            let (errno, cause, remedy) = if engine.alerts.is_declared(name) {
                (
                    Errno::EINVAL,
                    format!("receiver \"{name}\" is in the configuration file"),
                    "remove it there, and reload the configuration",
                )
            } else {
                (
                    Errno::ENOENT,
                    format!("there is no receiver \"{name}\""),
                    "alert_list lists them",
                )
            };
            let refused = RpcError::errno(errno, cause);
            return Err(refused.field("name").remedy(remedy));
        }
        engine.journal.commit(Change::remove(key)).await?;
        engine.alerts.remove(&engine, name);
        Ok(true)
    }
}
