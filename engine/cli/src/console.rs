//! `nacre console`: the screen of the appliance's own terminals.
//!
//! ```text
//!   keys ──▶ screen ── Action, one at a time ──▶ worker ── systemctl, networkctl
//!              ▲────────── Facts, results ────────┴─────── the daemon, by RPC
//! ```
//!
//! The screen draws while the worker waits: a daemon that hangs does not stop it. The command does
//! not end by a key: systemd starts it on terminals without a login.

use std::io::{self, IsTerminal, Stdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use clap::Args;
use nacre_engine_appliance::console::{self, Action, Answers, App, Daemon, Facts, draw};
use nacre_engine_appliance::install::{self, Installer, Kernel};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::run::{Programs, Run};
use nacre_engine_appliance::slots::{Slot, SlotState};
use nacre_engine_appliance::{network, reset, slots, status};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::size;
use ratatui::layout::Rect;
use serde_json::Value;

use super::subsystem::items;
use super::{Connection, Failure, address, appliance, output};
use nacre_engine::methods::nvmf::listeners::{GetListeners, GetListenersParams};
use nacre_engine::methods::volume::list::List;
use nacre_engine::methods::web::GetStatus;
use nacre_engine_rpc::method::NoParams;

#[derive(Debug, Args)]
pub(crate) struct ConsoleArgs {
    /// The daemon's socket
    #[arg(short = 'r', long, value_name = "PATH", env = "NACRE_RPC_SOCKET")]
    socket: Option<std::path::PathBuf>,
}

/// Time between two looks at the machine.
const INTERVAL: Duration = Duration::from_secs(2);
/// Longest wait for one answer of the daemon.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest time for a program of systemd.
const PATIENCE: Duration = Duration::from_secs(60);
/// The kernel and systemd write on the same terminal: draw everything again.
const REDRAW: Duration = Duration::from_secs(15);
/// Longest time until a key or an update is shown.
const TICK: Duration = Duration::from_millis(100);
/// A serial line does not know its size.
const SERIAL: Rect = Rect::new(0, 0, 80, 24);

/// Longest time for a program of an installation, which reads all of a USB disk.
const INSTALL_PATIENCE: Duration = Duration::from_secs(1800);

enum Update {
    Facts(Box<Facts>),
    Progress(String),
    Done(String),
}

pub(crate) fn run(args: ConsoleArgs) -> Result<(), Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let cause = "this is no terminal to draw on; `nacre appliance status` and `nacre web status` print text";
        return Err(Failure::Usage(cause.into()));
    }
    let connection = Connection {
        socket: args.socket,
        timeout: ANSWER,
        json: false,
    };
    let (orders, ordered) = sync_channel(1);
    let (updates, updated) = sync_channel(4);
    std::thread::spawn(move || work(&connection, &ordered, &updates));
    drop(ratatui::try_init()?);
    let outcome = show(&orders, &updated);
    ratatui::restore();
    outcome
}

/// Draws until the worker ends, which it does not.
fn show(orders: &SyncSender<Action>, updated: &Receiver<Update>) -> Result<(), Failure> {
    let mut app = App::default();
    let mut terminal = cleared()?;
    let mut cleared_at = Instant::now();
    let mut stale = true;
    loop {
        if cleared_at.elapsed() > REDRAW {
            terminal = cleared()?;
            cleared_at = Instant::now();
            stale = true;
        }
        // An unchanged screen still costs escape sequences, on a slow line.
        if std::mem::take(&mut stale) {
            terminal.draw(|frame| draw(frame, &app))?;
        }
        if event::poll(TICK)? {
            match event::read()? {
                Event::Key(key) => {
                    stale = true;
                    if let Some(action) = app.on_key(key) {
                        // The worker takes one order at a time, and the screen gives one.
                        orders.try_send(action).map_err(anyhow::Error::from)?;
                    }
                }
                Event::Resize(..) => {
                    terminal = cleared()?;
                    stale = true;
                }
                _ => {}
            }
        }
        loop {
            let update = updated.try_recv();
            stale |= update.is_ok();
            match update {
                Ok(Update::Facts(facts)) => app.on_facts(*facts),
                Ok(Update::Progress(message)) => app.on_progress(message),
                Ok(Update::Done(message)) => app.on_done(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(Failure::Failed(anyhow::anyhow!(
                        "the console's worker ended"
                    )));
                }
            }
        }
    }
}

/// This program's terminal with an empty screen.
fn cleared() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    let area = match size() {
        Ok((width, height)) if width > 0 && height > 0 => Rect::new(0, 0, width, height),
        _ => SERIAL,
    };
    console::cleared(CrosstermBackend::new(io::stdout()), area)
}

fn work(connection: &Connection, ordered: &Receiver<Action>, updates: &SyncSender<Update>) {
    let places = Places::system();
    let programs = Programs::new(PATIENCE);
    loop {
        let facts = facts(&places, connection, &programs);
        if updates.send(Update::Facts(Box::new(facts))).is_err() {
            return;
        }
        match ordered.recv_timeout(INTERVAL) {
            Ok(action) => {
                let message = perform(action, &places, &programs, updates)
                    .unwrap_or_else(|failure| format!("error: {failure}"));
                if updates.send(Update::Done(message)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn perform(
    action: Action,
    places: &Places,
    programs: &impl Run,
    updates: &SyncSender<Update>,
) -> Result<String, Failure> {
    let systemctl = |verb| {
        let done = programs.run("systemctl", &[verb]);
        done.map_err(anyhow::Error::from)
    };
    Ok(match action {
        Action::Restart => {
            systemctl("reboot")?;
            "restarting".into()
        }
        Action::PowerOff => {
            systemctl("poweroff")?;
            "powering off".into()
        }
        Action::FactoryReset { typed } => {
            reset::request(places, &typed).map_err(anyhow::Error::from)?;
            systemctl("reboot")?;
            "restarting; the next start erases configuration and state".into()
        }
        Action::SetNetwork {
            interface,
            settings,
        } => {
            let program = appliance::network::program()?;
            network::set(places, programs, &program, &interface, &settings)
                .map_err(anyhow::Error::from)?;
            "the new settings are in force; k keeps them".into()
        }
        Action::ConfirmNetwork => {
            let interface = network::confirm(places, programs).map_err(anyhow::Error::from)?;
            format!("the new settings of {interface} stay")
        }
        Action::RevertNetwork => {
            network::revert(places, programs, true).map_err(anyhow::Error::from)?;
            "the former settings are back".into()
        }
        Action::Install { serial, overwrite } => {
            let programs = Programs::new(INSTALL_PATIENCE);
            let installer = Installer {
                places,
                run: &programs,
                open: &Kernel,
            };
            let mut reporter = appliance::install::Reporter::default();
            let done = installer.install(&serial, overwrite, &mut |progress| {
                // Without the screen the installation still ends.
                if let Some(line) = reporter.line(progress) {
                    let _ = updates.send(Update::Progress(line));
                }
            });
            let done = done.map_err(anyhow::Error::from)?;
            let summary = appliance::install::summary(&done);
            format!("{summary}. Press r to restart, and remove the USB disk")
        }
    })
}

/// Machine and daemon as they are now. An unknown part is empty.
fn facts(places: &Places, connection: &Connection, programs: &impl Run) -> Facts {
    if install::is_requested(places) {
        return installer_facts(places, programs);
    }
    let image = status::image(places).ok();
    let addresses = if_addrs::get_if_addrs().unwrap_or_default();
    let shown = addresses.iter().filter(|address| {
        let is_link_local =
            matches!(address.ip(), std::net::IpAddr::V6(v6) if v6.is_unicast_link_local());
        !address.is_loopback() && !is_link_local
    });
    let line = |address: &if_addrs::Interface| {
        let prefix = match &address.addr {
            if_addrs::IfAddr::V4(v4) => v4.prefixlen,
            if_addrs::IfAddr::V6(v6) => v6.prefixlen,
        };
        format!("{} {}/{prefix}", address.name, address.ip())
    };
    let slots = image
        .as_ref()
        .and_then(|image| slots::slots(places, &image.version).ok());
    let matters = |slot: &Slot| match slot.state {
        SlotState::Untried => true,
        SlotState::Failed => image
            .as_ref()
            .is_some_and(|image| slot.version > image.version),
        SlotState::Running | SlotState::Good | SlotState::Incomplete => false,
    };
    let other_slot = slots.into_iter().flatten().find(matters);
    let version = image.map(|image| image.version.to_string());
    Facts {
        host: status::host_name(places),
        version: version.unwrap_or_else(|| env!("CARGO_PKG_VERSION").into()),
        addresses: shown.map(line).collect(),
        interfaces: network::interfaces(places).unwrap_or_default(),
        daemon: daemon(connection),
        other_slot,
        trouble: status::trouble(places),
        pending: network::pending(places)
            .ok()
            .flatten()
            .map(|pending| pending.interface),
        install: None,
    }
}

/// A start of the installer: it has disks, and neither a daemon nor state.
fn installer_facts(places: &Places, programs: &impl Run) -> Facts {
    let installer = Installer {
        places,
        run: programs,
        open: &Kernel,
    };
    let disks = installer.disks().map_err(|error| error.to_string());
    let image = status::image(places).ok();
    Facts {
        host: status::host_name(places),
        version: image.map_or_else(String::new, |image| image.version.to_string()),
        install: Some(disks),
        ..Facts::default()
    }
}

/// One connection, three calls. A refused call leaves its part out.
fn daemon(connection: &Connection) -> Daemon {
    let mut client = match connection.open() {
        Ok(client) => client,
        Err(failure) => return Daemon::Away(first_line(&failure.to_string())),
    };
    let volumes = client.call_for_json::<List, _>(&NoParams {});
    let web = client.call_for_json::<GetStatus, _>(&NoParams {});
    let listeners = client.call_for_json::<GetListeners, _>(&GetListenersParams::default());
    if let (Err(error), Err(_), Err(_)) = (&volumes, &web, &listeners) {
        return Daemon::Away(first_line(&error.to_string()));
    }
    let listeners = listeners.unwrap_or_default();
    Daemon::Up(Box::new(Answers {
        volumes: volumes.ok(),
        web: web.ok(),
        listeners: items(&listeners["listeners"])
            .iter()
            .map(listener)
            .collect(),
    }))
}

fn listener(listener: &Value) -> String {
    let text = |field: &str| output::cell(listener.get(field));
    format!(
        "{} {}",
        address::describe(&listener["address"]),
        text("actual")
    )
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
