//! `nacre events`: past events, and new ones with --follow.

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::subsystem::items;
use super::{Connection, Failure, output};
use crate::notify::Category;

#[derive(Debug, Args)]
#[command(
    after_help = "The last 1024 events are kept. Example: nacre events --category volume,replica --follow"
)]
pub struct EventsArgs {
    #[command(flatten)]
    connection: Connection,
    /// Only these categories (several with commas)
    #[arg(long, value_delimiter = ',', value_name = "CATEGORY")]
    category: Vec<CategoryArg>,
    #[command(flatten)]
    follow: FollowArgs,
    /// Print the reference of all events, in Markdown
    #[arg(long)]
    reference: bool,
}

#[derive(Debug, Args)]
pub struct FollowArgs {
    /// Continue with new events
    #[arg(short, long)]
    follow: bool,
    /// From this event on
    #[arg(long, value_name = "ID", default_value_t = 0)]
    from: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CategoryArg {
    Device,
    Target,
    Transport,
    Volume,
    Replica,
    State,
}

impl CategoryArg {
    fn word(self) -> &'static str {
        let category = match self {
            CategoryArg::Device => Category::Device,
            CategoryArg::Target => Category::Target,
            CategoryArg::Transport => Category::Transport,
            CategoryArg::Volume => Category::Volume,
            CategoryArg::Replica => Category::Replica,
            CategoryArg::State => Category::State,
        };
        category.word()
    }
}

pub fn run(args: EventsArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(crate::notify::markdown().trim_end());
    }
    let categories: Vec<&str> = args.category.iter().map(|c| c.word()).collect();
    follow(&args.connection, &args.follow, &categories)
}

pub fn follow(
    connection: &Connection,
    args: &FollowArgs,
    categories: &[&str],
) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let params = json!({ "from": args.from, "categories": categories });
    let mut answer = client.call_by_name("events_get", params)?;
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
        let params = json!({
            "from": answer["next"], "categories": categories, "wait_ms": wait.min(30_000),
        });
        answer = client.call_by_name("events_subscribe", params)?;
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
