//! `nacre top`: shows the activity of a daemon: its namespaces and block devices, reactors,
//! listeners, connections, remote paths and pools.
//!
//! ```text
//!   daemon ── RPC ──▶ poll: Sample ─┐
//!   an interval later poll: Sample ─┴─▶ snapshot: rates, shares, percentiles ─▶ report (once)
//!                                                                            └▶ app + view (live)
//! ```
//!
//! Missing methods are no error, so it works with SPDK's `nvmf_tgt` as well: SPDK lacks those of
//! remote paths and pools.

mod app;
mod histogram;
mod poll;
pub(crate) mod rates;
mod report;
mod snapshot;
mod view;

#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use self::app::{App, Flow};
use self::poll::{Order, Poller, Source, Update, WATCHED_MAX};
use self::snapshot::{Snapshot, Sort};
use super::{Connection, Failure, output};

#[derive(Debug, Args)]
#[command(
    after_help = "Keys: q quit, Tab namespaces, devices, connections or paths, n i b l p e sort by name, I/Os,\n\
                  bytes, latency, 99th percentile, errors, r reverse, arrows scroll, + - interval, space pause,\n\
                  h histograms on or off."
)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    connection: Connection,
    /// Interval between samples
    #[arg(short, long, value_name = "TIME", value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// Sort order
    #[arg(short, long, value_enum, default_value = "iops")]
    sort: Sort,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// Print one table for one interval, and end; so does --json. With more than 128 devices, an
    /// interval before it finds the 128 whose percentiles are counted
    #[arg(long)]
    once: bool,
    /// Do not have the daemon count latencies for percentiles
    #[arg(long)]
    no_histograms: bool,
}

/// The shortest and the longest interval.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

fn interval(text: &str) -> Result<Duration, String> {
    let time = nacre_engine_values::time::parse(text)?;
    if (INTERVALS.0..=INTERVALS.1).contains(&time) {
        Ok(time)
    } else {
        Err("from 100ms to 60s".into())
    }
}

pub(crate) fn run(args: TopArgs) -> Result<(), Failure> {
    let mut source = Source::new(args.connection.clone(), !args.no_histograms);
    if args.once || args.connection.json {
        let outcome = once(&mut source, &args);
        source.leave();
        let snapshot = outcome?;
        return if args.connection.json {
            output::json(&report::json(&snapshot))
        } else {
            report::print(&snapshot)
        };
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "this is no terminal to draw on; --once prints a table and --json a document".into(),
        ));
    }
    // Report a wrong socket as text, before drawing.
    args.connection.open()?;
    live(source, &args)
}

/// Two samples an interval apart. The percentiles of only [`WATCHED_MAX`] devices can be counted:
/// with more devices, another interval finds those that the order has first.
fn once(source: &mut Source, args: &TopArgs) -> Result<Snapshot, Failure> {
    let mut first = source.sample()?;
    let mut snapshot = Snapshot::between(None, &first);
    if snapshot.devices.len() > WATCHED_MAX && !args.no_histograms {
        std::thread::sleep(args.interval);
        let next = source.sample()?;
        snapshot = Snapshot::between(Some(&first), &next);
        first = next;
    }
    // No percentile is known yet.
    let order = match args.sort {
        Sort::P99 => Sort::Latency,
        order => order,
    };
    snapshot.sort(order, args.reverse);
    // The devices are known now: include their histograms in the first sample.
    source.watch(snapshot.bdevs());
    source.add_histograms(&mut first)?;
    std::thread::sleep(args.interval);
    let second = source.sample()?;
    let mut snapshot = Snapshot::between(Some(&first), &second);
    snapshot.sort(args.sort, args.reverse);
    if !args.no_histograms {
        snapshot.not_watched = snapshot.devices.len().saturating_sub(WATCHED_MAX);
    }
    Ok(snapshot)
}

fn live(source: Source, args: &TopArgs) -> Result<(), Failure> {
    let (orders, ordered) = mpsc::channel();
    let (updates, updated) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let mut poller = Poller::new(source, args.interval);
    std::thread::spawn(move || {
        poller.run(&ordered, &updates);
        drop(end);
    });
    let app = App::new(args.interval, args.sort, args.reverse, !args.no_histograms);
    let mut terminal = ratatui::try_init()?;
    let outcome = draw_until_quit(&mut terminal, app, &orders, &updated);
    ratatui::restore();
    // The poller reverts its changes in the daemon; do not wait for one that hangs.
    drop(orders);
    let _ = ended.recv_timeout(Duration::from_secs(1));
    outcome
}

fn draw_until_quit(
    terminal: &mut DefaultTerminal,
    mut app: App,
    orders: &Sender<Order>,
    updated: &Receiver<Update>,
) -> Result<(), Failure> {
    /// Longest time until a key or an update is shown.
    const PATIENCE: Duration = Duration::from_millis(50);
    let mut stale = true;
    loop {
        if stale {
            terminal.draw(|frame| view::draw(frame, &mut app))?;
        }
        stale = app.grows_old();
        if event::poll(PATIENCE)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if let Flow::Quit = app.on_key(key) {
                        return Ok(());
                    }
                    stale = true;
                }
                Event::Resize(..) => stale = true,
                _ => {}
            }
        }
        for update in updated.try_iter() {
            app.on_update(update);
            stale = true;
        }
        for order in app.orders() {
            // A poller that ended gave the reason in its last update.
            let _ = orders.send(order);
        }
    }
}
