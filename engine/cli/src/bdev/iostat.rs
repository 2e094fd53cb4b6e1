//! `nacre bdev iostat`: I/O counters of block devices, once, or as rates until interrupted.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::super::top::rates::{self, Iostat, Rates};
use super::super::{Connection, Failure, output};
use nacre_engine::methods::bdev::iostat::{GetIostat, GetIostatParams, ResetMode};

#[derive(Debug, Args)]
pub(super) struct IostatArgs {
    /// All devices unless given
    name: Vec<String>,
    /// Print rates at this interval
    #[arg(short, long, value_name = "TIME", value_parser = nacre_engine_values::time::parse)]
    interval: Option<Duration>,
    /// With an interval: the number of rounds; unless given, until interrupted
    #[arg(long, value_name = "N", requires = "interval")]
    count: Option<u64>,
    /// Show each core's queue separately; for one device
    #[arg(long, conflicts_with = "interval")]
    per_channel: bool,
    /// Count from zero afterwards
    #[arg(long, conflicts_with = "interval")]
    reset: bool,
}

pub(super) fn run(connection: &Connection, args: &IostatArgs) -> Result<(), Failure> {
    match args.interval {
        Some(interval) => repeat(connection, args, interval),
        None => once(connection, args),
    }
}

fn once(connection: &Connection, args: &IostatArgs) -> Result<(), Failure> {
    if args.per_channel && args.name.len() != 1 {
        return Err(Failure::Usage(
            "--per-channel needs one device: name it".into(),
        ));
    }
    let params = GetIostatParams {
        per_channel: args.per_channel,
        reset_mode: if args.reset {
            ResetMode::All
        } else {
            ResetMode::None
        },
        ..of_devices(args)
    };
    let answer = connection.call_for_json::<GetIostat>(&params)?;
    if connection.json {
        return output::json(&answer);
    }
    let (first, items) = if args.per_channel {
        ("thread_id", &answer["channels"])
    } else {
        ("name", &answer["bdevs"])
    };
    let items = items.as_array().map_or(&[][..], Vec::as_slice);
    let tick_rate = answer["tick_rate"].as_u64().unwrap_or(1).max(1);
    let rows = items.iter().map(|item| {
        let iostat = Iostat::read(item);
        let average = |ticks: u64, ops: u64| match ops {
            0 => String::new(),
            ops => rates::time((ticks as f64 / tick_rate as f64) / ops as f64),
        };
        vec![
            output::cell(item.get(first)),
            iostat.read.ops.to_string(),
            output::bytes(iostat.read.bytes),
            average(iostat.read.ticks, iostat.read.ops),
            iostat.write.ops.to_string(),
            output::bytes(iostat.write.bytes),
            average(iostat.write.ticks, iostat.write.ops),
            iostat.unmap.ops.to_string(),
            iostat.errors.to_string(),
        ]
    });
    let header = [
        if args.per_channel { "thread" } else { "name" },
        "reads",
        "read",
        "avg",
        "writes",
        "written",
        "avg",
        "unmaps",
        "errors",
    ];
    output::table(&header, rows)
}

fn of_devices(args: &IostatArgs) -> GetIostatParams {
    GetIostatParams {
        names: (!args.name.is_empty()).then(|| args.name.clone()),
        ..GetIostatParams::default()
    }
}

fn repeat(connection: &Connection, args: &IostatArgs, interval: Duration) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let params = of_devices(args);
    let mut before = client.call_for_json::<GetIostat, _>(&params)?;
    let mut round = 0;
    while args.count.is_none_or(|count| round < count) {
        std::thread::sleep(interval);
        let now = client.call_for_json::<GetIostat, _>(&params)?;
        let elapsed = rates::elapsed(&before, &now).unwrap_or(interval.as_secs_f64());
        let rows: Vec<(String, Rates)> = rates::devices(&now)
            .map(|(name, iostat)| {
                let earlier = rates::devices(&before).find(|(n, _)| *n == name);
                let since = earlier.map_or(iostat, |(_, earlier)| iostat.since(&earlier));
                (
                    name.to_owned(),
                    since.rates(elapsed, rates::tick_rate(&now)),
                )
            })
            .collect();
        if connection.json {
            // One document per round and line, for programs that parse a stream.
            let object = |(name, rates): &(String, Rates)| {
                let mut object = rates.json();
                object["name"] = json!(name);
                object
            };
            let document: Value = rows.iter().map(object).collect();
            output::line(&document.to_string())?;
        } else {
            if round > 0 {
                output::line("")?;
            }
            output::table(
                &["name", "r/s", "r", "r avg", "w/s", "w", "w avg", "errors"],
                rows.iter().map(row),
            )?;
        }
        before = now;
        round += 1;
    }
    Ok(())
}

fn row((name, rates): &(String, Rates)) -> Vec<String> {
    vec![
        name.clone(),
        rates::count(rates.read.iops),
        rates::throughput(rates.read.bytes_per_s),
        rates.read.latency_s.map(rates::time).unwrap_or_default(),
        rates::count(rates.write.iops),
        rates::throughput(rates.write.bytes_per_s),
        rates.write.latency_s.map(rates::time).unwrap_or_default(),
        rates.errors.to_string(),
    ]
}
