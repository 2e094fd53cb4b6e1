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
    #[command(flatten)]
    params: GetParams,
}

pub(crate) fn run(args: AuditArgs) -> Result<(), Failure> {
    let answer = args.connection.call_for_json::<Get>(&args.params)?;
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
