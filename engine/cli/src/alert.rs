//! `nacre alert`: the receivers of alerts, test messages and silences.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::alerts::{
    AddSilence, AddSilenceParams, EndSilence, EndSilenceParams, ListAlerts, TestAlerts,
    TestAlertsParams,
};
use nacre_engine_rpc::method::NoParams;

#[derive(Debug, Args)]
pub(crate) struct AlertArgs {
    #[command(subcommand)]
    command: AlertCommand,
}

#[derive(Debug, Subcommand)]
enum AlertCommand {
    /// List receivers with their deliveries, and silences
    List(ListArgs),
    /// Send a test message, and show whether it was accepted
    Test(AlertTestArgs),
    /// Send no alerts about some or all events for a time
    Silence(SilenceArgs),
    /// End a silence
    Unsilence(UnsilenceArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, Args)]
#[command(after_help = "Exit code 1: a receiver did not accept the message.")]
struct AlertTestArgs {
    #[command(flatten)]
    connection: Connection,
    /// The receiver; all unless given
    name: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A silence ends after its time, by `nacre alert unsilence`, or with the daemon.\n\n\
                  Example: nacre alert silence --for 2h --object vol0"
)]
struct SilenceArgs {
    #[command(flatten)]
    connection: Connection,
    /// How long, at most 30 days
    #[arg(long = "for", value_name = "TIME", value_parser = nacre_engine_values::time::parse)]
    length: Duration,
    /// Only events of these types (several with commas)
    #[arg(long = "type", value_delimiter = ',', value_name = "TYPE")]
    types: Vec<String>,
    /// Only events about this object
    #[arg(long, value_name = "NAME")]
    object: Option<String>,
}

#[derive(Debug, Args)]
struct UnsilenceArgs {
    #[command(flatten)]
    connection: Connection,
    /// The silence, from `nacre alert list`
    id: u64,
}

pub(crate) fn run(args: AlertArgs) -> Result<(), Failure> {
    match args.command {
        AlertCommand::List(args) => list(&args.connection),
        AlertCommand::Test(args) => test(&args.connection, args.name),
        AlertCommand::Silence(args) => {
            let params = AddSilenceParams {
                // A part of a second counts.
                duration_s: args.length.as_secs() + u64::from(args.length.subsec_nanos() > 0),
                types: args.types,
                object: args.object,
            };
            let silence = args.connection.call_for_json::<AddSilence>(&params)?;
            if args.connection.json {
                return output::json(&silence);
            }
            output::line(&silence_line(&silence))
        }
        AlertCommand::Unsilence(args) => {
            let params = EndSilenceParams { id: args.id };
            args.connection.call_for_json::<EndSilence>(&params)?;
            output::line(&format!("ended silence {}", args.id))
        }
    }
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let answer = connection.call_for_json::<ListAlerts>(&NoParams {})?;
    if connection.json {
        return output::json(&answer);
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rows = items(&answer["receivers"]).iter().map(|receiver| {
        let state = match receiver["error"].as_str() {
            Some(error) => format!(
                "failing since {}: {error}",
                text(&receiver["failing_since"])
            ),
            None => "ok".to_owned(),
        };
        vec![
            text(&receiver["name"]),
            text(&receiver["kind"]),
            text(&receiver["target"]),
            text(&receiver["severity"]),
            receiver["pending"].to_string(),
            receiver["delivered"].to_string(),
            receiver["dropped"].to_string(),
            state,
        ]
    });
    let titles = [
        "NAME",
        "KIND",
        "TARGET",
        "SEVERITY",
        "PENDING",
        "DELIVERED",
        "DROPPED",
        "STATE",
    ];
    output::table(&titles, rows)?;
    items(&answer["silences"])
        .iter()
        .try_for_each(|silence| output::line(&silence_line(silence)))
}

fn silence_line(silence: &Value) -> String {
    let types: Vec<&str> = items(&silence["types"])
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let what = match types.as_slice() {
        [] => "all events".to_owned(),
        types => types.join(", "),
    };
    let object = match silence["object"].as_str() {
        Some(object) => format!(" of {object}"),
        None => String::new(),
    };
    let until = silence["until"].as_str().unwrap_or_default();
    format!("silence {}: {what}{object}, until {until}", silence["id"])
}

fn test(connection: &Connection, name: Option<String>) -> Result<(), Failure> {
    let answer = connection.call_for_json::<TestAlerts>(&TestAlertsParams { name })?;
    let results = items(&answer);
    if connection.json {
        output::json(&answer)?;
    } else if results.is_empty() {
        output::line("no receivers: add [[alert.webhook]] or [[alert.mail]] to the configuration")?;
    } else {
        for result in results {
            let outcome = match result["error"].as_str() {
                Some(error) => format!("not delivered: {error}"),
                None => format!("delivered in {} ms", result["milliseconds"]),
            };
            output::line(&format!(
                "{}: {outcome}",
                result["name"].as_str().unwrap_or_default()
            ))?;
        }
    }
    let failed = results.iter().filter(|result| result["delivered"] == false);
    match failed.count() {
        0 => Ok(()),
        n => Err(anyhow::anyhow!(
            "{n} of {} receivers did not accept the message",
            results.len()
        )
        .into()),
    }
}
