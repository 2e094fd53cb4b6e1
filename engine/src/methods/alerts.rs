//! `alert_*`, Nacre extensions: the state of receivers, test messages and silences.
//! [`super::alert_receivers`] has the receivers that calls add.

use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::alert_receivers::record_key;
use crate::config::alert::ReceiverKind;
use crate::notify::{Category, Severity, TYPES};
use crate::rpc::error::Errno;
use crate::rpc::method::NoParams;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::alerts::{AlertTask, Silence, Silences};
use crate::values::read;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<ListAlerts>()
        .add::<TestAlerts>()
        .add::<AddSilence>()
        .add::<EndSilence>();
}

fn utc(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

pub struct ListAlerts;

#[derive(Debug, Serialize, JsonSchema)]
pub struct AlertList {
    receivers: Vec<ReceiverState>,
    silences: Vec<SilenceState>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ReceiverState {
    name: String,
    kind: ReceiverKind,
    /// Scheme and host of a webhook's URL, or the file with the URL; recipients of mail.
    target: String,
    /// The receiver gets events of this severity and above.
    severity: Severity,
    /// Empty: all.
    categories: Vec<Category>,
    /// Types of events that the receiver does not get.
    except: Vec<String>,
    /// True: from the configuration file. False: a call has added it, and calls can change it.
    declared: bool,
    /// The settings of a receiver that a call has added, as the call has them; null for others.
    settings: Option<serde_json::Value>,
    /// Events that wait to be sent.
    pending: usize,
    /// Messages since the daemon's start.
    delivered: u64,
    /// Messages that were given up, at least for one recipient.
    dropped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_delivery: Option<String>,
    /// Since when attempts fail, and the last cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    failing_since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ReceiverState {
    fn of(engine: &Engine, running: &AlertTask) -> Self {
        let (receiver, state) = (&running.receiver, running.state());
        let added = engine.journal.find(&record_key(receiver.name()));
        let added = added.filter(|_| engine.alerts.is_added(receiver.name()));
        let selection = receiver.selection();
        Self {
            name: receiver.name().to_owned(),
            kind: receiver.kind(),
            target: receiver.target(),
            severity: selection.severity,
            categories: selection.categories.to_vec(),
            except: selection.except.to_vec(),
            declared: added.is_none(),
            settings: added.map(|entry| entry.record.params),
            pending: running.pending(),
            delivered: state.delivered,
            dropped: state.dropped,
            last_delivery: state.last_delivery.map(utc),
            failing_since: state.failing_since.map(utc),
            error: state.error,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct SilenceState {
    id: u64,
    /// RFC 3339, in UTC.
    until: String,
    /// Empty: all.
    types: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
}

impl From<Silence> for SilenceState {
    fn from(silence: Silence) -> Self {
        Self {
            id: silence.id,
            until: utc(silence.until),
            types: silence.types,
            object: silence.object,
        }
    }
}

impl Method<Engine> for ListAlerts {
    const NAME: &'static str = "alert_list";
    const ABOUT: &'static str =
        "Lists the receivers of alerts with the state of their deliveries, and the silences.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = AlertList;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<AlertList, RpcError> {
        let alerts = &engine.alerts;
        let receivers = alerts.receivers();
        let receivers = receivers
            .iter()
            .map(|task| ReceiverState::of(&engine, task));
        Ok(AlertList {
            receivers: receivers.collect(),
            silences: alerts
                .silences
                .active()
                .into_iter()
                .map(Into::into)
                .collect(),
        })
    }
}

pub struct TestAlerts;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TestAlertsParams {
    /// The receiver; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct AlertTestResult {
    name: String,
    kind: ReceiverKind,
    delivered: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    milliseconds: u64,
}

impl Method<Engine> for TestAlerts {
    const NAME: &'static str = "alert_test";
    const ABOUT: &'static str = "Sends a test message to receivers of alerts, once and whatever is silenced, and returns whether each \
         accepted it.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = TestAlertsParams;
    type Reply = Vec<AlertTestResult>;

    async fn apply(
        params: TestAlertsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<AlertTestResult>, RpcError> {
        let alerts = &engine.alerts;
        let mut receivers = alerts.receivers();
        if let Some(name) = &params.name {
            receivers.retain(|running| running.receiver.name() == name);
            if receivers.is_empty() {
                let cause = format!("there is no receiver \"{name}\"");
                return Err(RpcError::errno(Errno::ENOENT, cause)
                    .field("name")
                    .remedy("alert_list lists them"));
            }
        }
        let testing = receivers.iter().map(async |running| {
            let (receiver, begun) = (&running.receiver, Instant::now());
            let outcome = alerts.test(&engine, running).await;
            AlertTestResult {
                name: receiver.name().to_owned(),
                kind: receiver.kind(),
                delivered: outcome.is_ok(),
                error: outcome.err().map(|failure| failure.cause()),
                milliseconds: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            }
        });
        Ok(join_all(testing).await)
    }
}

pub struct AddSilence;

/// Longest silence. For longer ones, receivers have the setting `except`.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddSilenceParams {
    /// How long, in seconds: at most 30 days.
    #[serde(deserialize_with = "read::seconds")]
    pub duration_s: u64,
    /// Only events of these types; default: all.
    #[serde(default)]
    pub types: Vec<String>,
    /// Only events about this object; default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

impl Method<Engine> for AddSilence {
    const NAME: &'static str = "alert_silence";
    const ABOUT: &'static str = "Sends no alerts about some or all events for a time, or until the daemon stops. The events themselves stay.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = AddSilenceParams;
    type Reply = SilenceState;

    async fn apply(params: AddSilenceParams, engine: Rc<Engine>) -> Result<SilenceState, RpcError> {
        let length = Duration::from_secs(params.duration_s);
        if length.is_zero() || length > LONGEST {
            let cause = format!(
                "{} s is not from 1 s to 30 days ({} s)",
                params.duration_s,
                LONGEST.as_secs()
            );
            return Err(RpcError::invalid_params(cause).field("duration_s"));
        }
        for (at, kind) in params.types.iter().enumerate() {
            if !TYPES.iter().any(|(name, ..)| name == kind) {
                let cause = format!("there is no event \"{kind}\"");
                return Err(RpcError::invalid_params(cause)
                    .field(format!("types[{at}]"))
                    .remedy("notify_get_types lists them"));
            }
        }
        let silences = &engine.alerts.silences;
        let added = silences.add(length, params.types, params.object);
        let added = added.ok_or_else(|| {
            let cause = format!("there are {} silences, the most", Silences::MOST);
            RpcError::errno(Errno::ENOSPC, cause).remedy("end one with alert_unsilence")
        })?;
        Ok(added.into())
    }
}

pub struct EndSilence;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EndSilenceParams {
    /// From `alert_list`.
    pub id: u64,
}

impl Method<Engine> for EndSilence {
    const NAME: &'static str = "alert_unsilence";
    const ABOUT: &'static str = "Ends a silence. Events that it covered are not sent later.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = EndSilenceParams;
    type Reply = bool;

    async fn apply(params: EndSilenceParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if engine.alerts.silences.end(params.id) {
            return Ok(true);
        }
        let cause = format!("there is no silence {}", params.id);
        Err(RpcError::errno(Errno::ENOENT, cause)
            .field("id")
            .remedy("alert_list lists them"))
    }
}
