//! `nacre audit`: lists calls that changed the daemon, or were refused.

use clap::Args;
use serde_json::Value;

use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::audit::{Get, GetParams};

#[derive(Debug, Args)]
#[command(
    after_help = "Needs the role admin. [rpc.audit] of the configuration names the file and its size.\n\n\
                  Example: nacre audit --limit 20 --refused"
)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    connection: Connection,
    /// Show this many calls at most, the newest ones
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    limit: usize,
    /// Only calls of this method
    #[arg(long, value_name = "METHOD")]
    method: Option<String>,
    /// Only calls about this object
    #[arg(long, value_name = "NAME")]
    object: Option<String>,
    /// Only calls of this user
    #[arg(long, value_name = "UID")]
    uid: Option<u32>,
    /// Only calls of this account, API token or certificate subject, or this uid
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Only refused calls
    #[arg(long)]
    refused: bool,
    /// Leave out this many of the newest calls, to page back
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    skip: usize,
}

pub(crate) fn run(args: AuditArgs) -> Result<(), Failure> {
    let params = GetParams {
        limit: Some(args.limit),
        method: args.method,
        object: args.object,
        uid: args.uid,
        user: args.user,
        refused: args.refused,
        skip: args.skip,
    };
    let answer = args.connection.call_for_json::<Get>(&params)?;
    if args.connection.json {
        return output::json(&answer["calls"]);
    }
    items(&answer["calls"])
        .iter()
        .try_for_each(|call| output::line(&line(call)))
}

fn line(call: &Value) -> String {
    let text = |key: &str| call[key].as_str().unwrap_or_default();
    let cause = match &call["error"] {
        Value::Null => String::new(),
        error => {
            let cause = error["cause"]
                .as_str()
                .or_else(|| error["message"].as_str());
            format!(": {}", cause.unwrap_or_default())
        }
    };
    let who = match call["uid"].as_u64() {
        Some(uid) => format!("uid {uid:5}  {:12}", text("program")),
        None => {
            // Such a client has one of the three.
            let name = [text("certificate"), text("account"), text("api_token")].concat();
            format!("{name}  {}", text("address"))
        }
    };
    let left_out = match call["left_out"].as_u64() {
        Some(calls) => format!(" ({calls} more refused calls have no line)"),
        None => String::new(),
    };
    format!(
        "{}  {:8}  {who}  {:7}  {} {}{cause}{left_out}",
        text("time"),
        text("role"),
        text("result"),
        text("method"),
        call["params"],
    )
}
