//! `audit_get`, a Nacre extension: the last lines of the audit log.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<Get>();
}

pub struct Get;

const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 10_000;

/// The parameters of the method, and arguments of `nacre audit`.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct GetParams {
    /// Most lines, the newest ones; default 100, at most 10000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Only calls of this method.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "METHOD")]
    pub method: Option<String>,
    /// Only calls about this object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "NAME")]
    pub object: Option<String>,
    /// Only calls of this user.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "UID")]
    pub uid: Option<u32>,
    /// Only calls of this account, API token or certificate subject, or this uid.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Only refused calls.
    #[serde(default)]
    #[arg(long)]
    pub refused: bool,
    /// Only calls that began up to this `time` of a line: pages do not move while calls are added.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Leave out this many of the newest selected calls, to page back; at most 10000.
    #[serde(default)]
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub skip: usize,
}

impl GetParams {
    fn selects(&self, line: &Value) -> bool {
        let is = |key: &str, wanted: Option<&str>| wanted.is_none_or(|text| line[key] == *text);
        is("method", self.method.as_deref())
            && is("object", self.object.as_deref())
            && self.uid.is_none_or(|uid| line["uid"] == uid)
            && self.user.as_deref().is_none_or(|user| is_of(line, user))
            && (!self.refused || line["result"] == "refused")
            && self.until.as_deref().is_none_or(|until| {
                let time = line["time"].as_str();
                time.is_some_and(|time| time <= until)
            })
    }
}

/// True for a line about a call of this account, API token, certificate or uid.
fn is_of(line: &Value, user: &str) -> bool {
    ["account", "api_token", "certificate"]
        .iter()
        .any(|key| line[key] == user)
        || line["uid"]
            .as_u64()
            .is_some_and(|uid| uid.to_string() == user)
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct AuditLinesReply {
    /// The file with the newest lines.
    file: String,
    /// The oldest first: time, uid, gids, pid, program, role, class, method, object, params,
    /// left_out, result, error, duration_ms. A client over the network has address, and
    /// certificate, account or api_token.
    calls: Vec<Value>,
}

impl Method<Engine> for Get {
    const NAME: &'static str = "audit_get";
    const ABOUT: &'static str = "Lists the last calls of methods that need the role operator or admin: user, time, method, \
         parameters, result.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const ORDER: Order = Order::Free;
    type Params = GetParams;
    type Reply = AuditLinesReply;

    async fn apply(params: GetParams, engine: Rc<Engine>) -> Result<AuditLinesReply, RpcError> {
        let limit = params.limit.unwrap_or(DEFAULT_LIMIT);
        for (field, count) in [("limit", limit), ("skip", params.skip)] {
            if count > MAX_LIMIT {
                let cause = format!("{count} is more than {MAX_LIMIT}");
                return Err(RpcError::invalid_params(cause).field(field));
            }
        }
        let (Some(file), Some(path)) = (engine.calls.audit.file(), engine.calls.audit.path())
        else {
            let cause = "there is no audit file: calls are only in the daemon's log";
            return Err(RpcError::errno(Errno::ENOENT, cause)
                .remedy("set [rpc.audit] file in the configuration"));
        };
        let read = tokio::task::spawn_blocking(move || {
            // Without the lock: writers do not wait for readers.
            let file = file.blocking_lock().reader();
            let mut lines = file.last(limit + params.skip, |line| params.selects(line))?;
            lines.truncate(lines.len().saturating_sub(params.skip));
            Ok(lines)
        });
        let read = read.await.map_err(|e| RpcError::internal(e.to_string()))?;
        let calls = read
            .map_err(|error: std::io::Error| RpcError::io(&path.display().to_string(), &error))?;
        let file = path.display().to_string();
        Ok(AuditLinesReply { file, calls })
    }
}
