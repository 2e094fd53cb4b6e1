//! `nacre audit`: the calls that changed something, or tried to.

use clap::Args;
use serde_json::Value;

use super::subsystem::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::audit::{Get, GetParams};

#[derive(Debug, Args)]
#[command(
    after_help = "Needs the role admin. [rpc.audit] of the configuration names the file and its size.\n\n\
                  Example: nacre audit --limit 20 --refused"
)]
pub struct AuditArgs {
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
    /// Only refused calls
    #[arg(long)]
    refused: bool,
}

pub fn run(args: AuditArgs) -> Result<(), Failure> {
    let params = GetParams {
        limit: Some(args.limit),
        method: args.method,
        object: args.object,
        uid: args.uid,
        refused: args.refused,
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
            let cause = error["cause"].as_str().or(error["message"].as_str());
            format!(": {}", cause.unwrap_or_default())
        }
    };
    format!(
        "{}  {:8}  uid {:5}  {:12}  {:7}  {} {}{cause}",
        text("time"),
        text("role"),
        call["uid"].as_u64().unwrap_or_default(),
        text("program"),
        text("result"),
        text("method"),
        call["params"],
    )
}
