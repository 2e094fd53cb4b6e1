//! `nacre events`: lists past events, and with `--follow` new ones.

use clap::Args;
use serde_json::Value;

use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::events::{
    GetEvents, GetEventsParams, SubscribeEvents, SubscribeEventsParams,
};
use nacre_engine::notify::Category;

#[derive(Debug, Args)]
#[command(
    after_help = "The last 1024 events are kept. Example: nacre events --category volume,replica --follow"
)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    connection: Connection,
    /// Only these categories (several with commas)
    #[arg(long, value_delimiter = ',', value_name = "CATEGORY")]
    category: Vec<Category>,
    #[command(flatten)]
    follow: FollowArgs,
    /// Print the reference of all events, in Markdown
    #[arg(long)]
    reference: bool,
}

#[derive(Debug, Args)]
pub(crate) struct FollowArgs {
    /// Continue with new events
    #[arg(short, long)]
    follow: bool,
    /// From this event on
    #[arg(long, value_name = "ID", default_value_t = 0)]
    from: u64,
}

pub(crate) fn run(args: EventsArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(nacre_engine::notify::markdown().trim_end());
    }
    follow(&args.connection, &args.follow, &args.category)
}

pub(crate) fn follow(
    connection: &Connection,
    args: &FollowArgs,
    categories: &[Category],
) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let mut answer = client.call_for_json::<GetEvents, _>(&GetEventsParams {
        from: args.from,
        categories: categories.to_vec(),
        max: None,
    })?;
    if !args.follow {
        return if connection.json {
            output::json(&answer["events"])
        } else {
            answer_lines(&answer)
        };
    }
    // Half of the time that the connection waits for a reply.
    let wait = connection.timeout.as_millis() as u64 / 2;
    loop {
        for event in items(&answer["events"]) {
            if connection.json {
                output::line(&event.to_string())?
            } else {
                output::line(&line(event))?
            }
        }
        answer = client.call_for_json::<SubscribeEvents, _>(&SubscribeEventsParams {
            from: answer["next"].as_u64(),
            categories: categories.to_vec(),
            wait_ms: Some(wait.min(30_000)),
            max: None,
        })?;
        if let Some(lost) = answer["lost"].as_u64().filter(|lost| *lost > 0) {
            eprintln!("{lost} events were dropped before they could be shown");
        }
    }
}

fn answer_lines(answer: &Value) -> Result<(), Failure> {
    items(&answer["events"])
        .iter()
        .try_for_each(|event| output::line(&line(event)))
}

fn line(event: &Value) -> String {
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    let left_out = match event["left_out"].as_u64() {
        Some(n) => format!(" ({n} more like it)"),
        None => String::new(),
    };
    format!(
        "{}  {:7}  {:9}  {}{left_out}",
        text("time"),
        text("severity"),
        text("category"),
        text("text")
    )
}
