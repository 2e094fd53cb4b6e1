//! `nacre alert`: the receivers of alerts, test messages and silences.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::config::alert::{AlertSelection, MailSettings, MailTls, WebhookSettings};
use nacre_engine::methods::alert_receivers::{
    RemoveReceiver, RemoveReceiverParams, SetMail, SetWebhook,
};
use nacre_engine::methods::alerts::{
    AddSilence, AddSilenceParams, EndSilence, EndSilenceParams, ListAlerts, TestAlerts,
    TestAlertsParams,
};
use nacre_engine::notify::{Category, Severity};
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
    /// Add a webhook, or replace the one of this name that this command added
    Webhook(WebhookArgs),
    /// Add recipients by mail, or replace the ones of this name that this command added
    Mail(MailArgs),
    /// Remove a receiver that a command added
    #[command(visible_alias = "rm")]
    Remove(RemoveArgs),
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
#[command(
    after_help = "Secrets are keys of kind text: `nacre key import NAME FILE --sealed --text`.\n\n\
                  Example: nacre alert webhook pager --url https://alerts.example.org/nacre"
)]
struct WebhookArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name of the receiver
    name: String,
    /// The URL: operators see it, viewers its origin
    #[arg(long, value_name = "URL", required_unless_present = "url_key")]
    url: Option<String>,
    /// The key with the URL
    #[arg(long, value_name = "KEY", conflicts_with = "url")]
    url_key: Option<String>,
    /// The key with the secret that signs requests
    #[arg(long, value_name = "KEY")]
    secret_key: Option<String>,
    /// The key with a token for `Authorization: Bearer`
    #[arg(long, value_name = "KEY")]
    token_key: Option<String>,
    /// File with the certificates that sign the webhook's; those of the system unless given
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    #[command(flatten)]
    selection: SelectionArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The password is a key of kind text: `nacre key import NAME FILE --sealed --text`.\n\n\
                  Example: nacre alert mail ops --server mail.example.org --user nacre \
                  --password-key mail --from nacre@example.org --to ops@example.org"
)]
struct MailArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name of the receiver
    name: String,
    /// The mail server: HOST or HOST:PORT
    #[arg(long, value_name = "HOST")]
    server: String,
    /// Encryption of the connection
    #[arg(long, value_enum, default_value = "starttls")]
    tls: MailTls,
    /// The user for authentication; none unless given
    #[arg(long, value_name = "NAME", requires = "password_key")]
    user: Option<String>,
    /// The key with the user's password
    #[arg(long, value_name = "KEY", requires = "user")]
    password_key: Option<String>,
    /// File with the certificates that sign the server's; those of the system unless given
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The sender
    #[arg(long, value_name = "ADDRESS")]
    from: String,
    /// The recipients (several with commas)
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', required = true)]
    to: Vec<String>,
    #[command(flatten)]
    selection: SelectionArgs,
}

/// The events that a receiver gets.
#[derive(Debug, Args)]
struct SelectionArgs {
    /// Only events of this severity and above
    #[arg(long, value_enum, default_value = "warning")]
    severity: Severity,
    /// Only events of these categories (several with commas); all unless given
    #[arg(
        long = "category",
        value_enum,
        value_delimiter = ',',
        value_name = "CATEGORY"
    )]
    categories: Vec<Category>,
    /// Types of events that are not sent (several with commas)
    #[arg(long, value_delimiter = ',', value_name = "TYPE")]
    except: Vec<String>,
    /// Events within this time of the first one share a message; 2s, and 30s for mail, unless given
    #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::whole_seconds)]
    gather: Option<Duration>,
    /// How long a failed message is tried again; 1h unless given
    #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::whole_seconds)]
    retry_for: Option<Duration>,
}

impl SelectionArgs {
    fn over(self, default: AlertSelection) -> AlertSelection {
        let seconds = |given: Option<Duration>, or| given.map_or(or, |time| time.as_secs());
        AlertSelection {
            severity: self.severity,
            categories: self.categories,
            except: self.except,
            gather_s: seconds(self.gather, default.gather_s),
            retry_for_s: seconds(self.retry_for, default.retry_for_s),
        }
    }
}

#[derive(Debug, Args)]
struct RemoveArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name of the receiver
    name: String,
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
        AlertCommand::Webhook(args) => {
            let params = WebhookSettings {
                name: args.name,
                url: args.url,
                url_key: args.url_key,
                secret_key: args.secret_key,
                token_key: args.token_key,
                ca: absolute(args.ca)?,
                selection: args.selection.over(WebhookSettings::default().selection),
                ..WebhookSettings::default()
            };
            args.connection.call_for_json::<SetWebhook>(&params)?;
            output::line(&format!("alerts go to {} (webhook)", params.name))
        }
        AlertCommand::Mail(args) => {
            let params = MailSettings {
                name: args.name,
                server: args.server,
                tls: args.tls,
                user: args.user,
                password_key: args.password_key,
                ca: absolute(args.ca)?,
                from: args.from,
                to: args.to,
                selection: args.selection.over(MailSettings::default().selection),
                ..MailSettings::default()
            };
            args.connection.call_for_json::<SetMail>(&params)?;
            output::line(&format!("alerts go to {} (mail)", params.name))
        }
        AlertCommand::Remove(args) => {
            let params = RemoveReceiverParams { name: args.name };
            args.connection.call_for_json::<RemoveReceiver>(&params)?;
            output::line(&format!("removed receiver {}", params.name))
        }
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

/// The daemon's folder is another one.
fn absolute(path: Option<PathBuf>) -> Result<Option<PathBuf>, Failure> {
    let absolute = path.map(|path| std::path::absolute(&path).map_err(|error| (path, error)));
    absolute
        .transpose()
        .map_err(|(path, error)| anyhow::anyhow!("{}: {error}", path.display()).into())
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
        output::line("no receivers: add one with `nacre alert webhook` or `nacre alert mail`")?;
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
