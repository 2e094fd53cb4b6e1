//! `nacre console`: the screen of the appliance's own terminals.
//!
//! ```text
//!   keys ──▶ screen ── Action, one at a time ──▶ worker ── systemctl, networkctl
//!              ▲────────── Facts, results ────────┴─────── the daemon, by RPC
//! ```
//!
//! The screen draws while the worker waits: a daemon that hangs does not stop it. The command does
//! not end by a key: systemd starts it on terminals without a login. A screen that fails ends the
//! command, after the action that has begun: half an installation leaves a disk that does not boot.

use std::io::{self, IsTerminal, Stdout, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use clap::Args;
use nacre_engine_appliance::acts::ActKind;
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
use signal_hook::consts::SIGHUP;

use super::reply::items;
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

enum ConsoleUpdate {
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
    // The end of a terminal must not end an installation.
    let hangup = Arc::new(AtomicBool::default());
    signal_hook::flag::register(SIGHUP, Arc::clone(&hangup))?;
    drop(ratatui::try_init()?);
    let places = Places::system();
    let programs = Programs::new(PATIENCE);
    let outcome = operate(
        Tty { hangup },
        || facts(&places, &connection, &programs),
        |action, updates| perform(action, &places, &programs, updates),
    );
    if let Some(result) = outcome.unseen {
        // Standard error may be gone, too.
        let _ = writeln!(io::stderr(), "{result}");
    }
    outcome.shown
}

/// The terminal.
trait Screen {
    type Output: Write;

    fn cleared(&mut self) -> io::Result<Terminal<CrosstermBackend<Self::Output>>>;

    /// Waits for a key, or a new size, for at most [`TICK`].
    fn event(&mut self) -> io::Result<Option<Event>>;

    /// Gives the terminal back.
    fn restore(&mut self) {}
}

/// This program's terminal.
struct Tty {
    /// Set by SIGHUP: the terminal is gone.
    hangup: Arc<AtomicBool>,
}

impl Screen for Tty {
    type Output = Stdout;

    fn cleared(&mut self) -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
        let area = match size() {
            Ok((width, height)) if width > 0 && height > 0 => Rect::new(0, 0, width, height),
            _ => SERIAL,
        };
        console::cleared(CrosstermBackend::new(io::stdout()), area)
    }

    fn event(&mut self) -> io::Result<Option<Event>> {
        if self.hangup.load(Ordering::Relaxed) {
            return Err(io::Error::other("the terminal hung up"));
        }
        let is_there = event::poll(TICK)?;
        is_there.then(event::read).transpose()
    }

    fn restore(&mut self) {
        ratatui::restore();
    }
}

/// The end of the screen.
struct Outcome {
    shown: Result<(), Failure>,
    /// The result of the last action, if the screen failed before it.
    unseen: Option<String>,
}

/// Shows the screen until it fails, then waits for the action that has begun.
fn operate(
    mut screen: impl Screen,
    facts: impl Fn() -> Facts + Send,
    perform: impl Fn(Action, &SyncSender<ConsoleUpdate>) -> Result<String, Failure> + Send,
) -> Outcome {
    let (orders, ordered) = sync_channel(1);
    let (updates, updated) = sync_channel(4);
    // A scope waits also after a panic of the screen.
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || work(facts, perform, &ordered, &updates));
        let shown = show(&mut screen, orders, updated);
        screen.restore();
        if let Err(failure) = &shown {
            // Standard error may be gone, too.
            let _ = writeln!(
                io::stderr(),
                "the screen failed ({failure}); an action that has begun ends first"
            );
        }
        Outcome {
            shown,
            unseen: worker.join().ok().flatten(),
        }
    })
}

/// Draws until the screen fails, or the worker ends. Both channels end with it: an action that
/// reports its progress must not wait for the screen.
fn show(
    screen: &mut impl Screen,
    orders: SyncSender<Action>,
    updated: Receiver<ConsoleUpdate>,
) -> Result<(), Failure> {
    let mut app = App::default();
    let mut terminal = screen.cleared()?;
    let mut cleared_at = Instant::now();
    let mut stale = true;
    loop {
        if cleared_at.elapsed() > REDRAW {
            terminal = screen.cleared()?;
            cleared_at = Instant::now();
            stale = true;
        }
        // An unchanged screen still costs escape sequences, on a slow line.
        if std::mem::take(&mut stale) {
            terminal.draw(|frame| draw(frame, &app))?;
        }
        match screen.event()? {
            Some(Event::Key(key)) => {
                stale = true;
                if let Some(action) = app.on_key(key) {
                    // The worker takes one order at a time, and the screen gives one.
                    orders.try_send(action).map_err(anyhow::Error::from)?;
                }
            }
            Some(Event::Resize(..)) => {
                terminal = screen.cleared()?;
                stale = true;
            }
            _ => {}
        }
        loop {
            let update = updated.try_recv();
            stale |= update.is_ok();
            match update {
                Ok(ConsoleUpdate::Facts(facts)) => app.on_facts(*facts),
                Ok(ConsoleUpdate::Progress(message)) => app.on_progress(message),
                Ok(ConsoleUpdate::Done(message)) => app.on_done(message),
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

/// Ends with the screen. Returns the result of an action that the screen did not take.
fn work(
    facts: impl Fn() -> Facts,
    perform: impl Fn(Action, &SyncSender<ConsoleUpdate>) -> Result<String, Failure>,
    ordered: &Receiver<Action>,
    updates: &SyncSender<ConsoleUpdate>,
) -> Option<String> {
    loop {
        updates.send(ConsoleUpdate::Facts(Box::new(facts()))).ok()?;
        match ordered.recv_timeout(INTERVAL) {
            Ok(action) => {
                let message = perform(action, updates);
                let message = message.unwrap_or_else(|failure| format!("error: {failure}"));
                if updates.send(ConsoleUpdate::Done(message.clone())).is_err() {
                    return Some(message);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn perform(
    action: Action,
    places: &Places,
    programs: &impl Run,
    updates: &SyncSender<ConsoleUpdate>,
) -> Result<String, Failure> {
    Ok(match action {
        Action::Restart => appliance::stopped(places, programs, ActKind::Restart, || Ok(()))?,
        Action::PowerOff => appliance::stopped(places, programs, ActKind::PowerOff, || Ok(()))?,
        Action::FactoryReset { typed } => {
            reset::request(places, &typed).map_err(anyhow::Error::from)?;
            let asked = programs.run("systemctl", &["reboot"]);
            asked.map_err(anyhow::Error::from)?;
            "restarting; the next start erases configuration and state".into()
        }
        Action::SetNetwork {
            interface,
            settings,
        } => {
            let program = appliance::network::program()?;
            appliance::network::with_entry(places, || {
                network::set(places, programs, &program, &interface, &settings)
                    .map_err(anyhow::Error::from)?;
                Ok("the new settings are in force; k keeps them".into())
            })?
        }
        Action::SetName { name } => appliance::rename(places, &name)?,
        Action::ConfirmNetwork => {
            appliance::network::with_entry(places, || appliance::network::keep(places, programs))?
        }
        Action::RevertNetwork => appliance::network::with_entry(places, || {
            appliance::network::revert(places, programs, true)
        })?,
        Action::Install { serial, overwrite } => {
            let programs = Programs::new(INSTALL_PATIENCE);
            let installer = Installer {
                places,
                run: &programs,
                open: &Kernel,
            };
            let mut reporter = appliance::install::Reporter::default();
            let done = installer.install(&serial, overwrite, &mut |progress| {
                // Without the screen the installation goes on: `operate` waits for its end.
                if let Some(line) = reporter.line(progress) {
                    let _ = updates.send(ConsoleUpdate::Progress(line));
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

#[cfg(test)]
mod tests {
    use nacre_engine_appliance::acts::{self, ActState};
    use nacre_engine_appliance::install::Disk;
    use nacre_engine_appliance::run::RunError;
    use ratatui::crossterm::event::{KeyCode, KeyModifiers};

    use super::*;

    const SERIAL_NUMBER: &str = "DISK";

    /// Chooses the disk by keys, then fails.
    struct Failing {
        keys: std::vec::IntoIter<KeyCode>,
        calls: usize,
        /// Drawing fails, not reading.
        draws: bool,
        is_broken: Arc<AtomicBool>,
        /// The installation has begun.
        has_begun: Arc<AtomicBool>,
    }

    impl Failing {
        fn new(draws: bool, has_begun: &Arc<AtomicBool>) -> Self {
            let serial = SERIAL_NUMBER.chars().map(KeyCode::Char);
            let keys = [KeyCode::Char('i')].into_iter().chain(serial);
            let keys: Vec<KeyCode> = keys.chain([KeyCode::Enter]).collect();
            Self {
                keys: keys.into_iter(),
                calls: 0,
                draws,
                is_broken: Arc::default(),
                has_begun: Arc::clone(has_begun),
            }
        }
    }

    struct Line(Arc<AtomicBool>);

    impl Write for Line {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.load(Ordering::Relaxed) {
                return Err(io::Error::other("gone"));
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Screen for Failing {
        type Output = Line;

        fn cleared(&mut self) -> io::Result<Terminal<CrosstermBackend<Line>>> {
            let line = Line(Arc::clone(&self.is_broken));
            console::cleared(CrosstermBackend::new(line), SERIAL)
        }

        fn event(&mut self) -> io::Result<Option<Event>> {
            self.calls += 1;
            assert!(self.calls < 1000, "the installation never begins");
            std::thread::sleep(Duration::from_millis(20));
            // The list of disks has to arrive before the first key.
            if self.calls < 10 {
                return Ok(None);
            }
            let key = |code| Event::Key(event::KeyEvent::new(code, KeyModifiers::NONE));
            if let Some(code) = self.keys.next() {
                return Ok(Some(key(code)));
            }
            if !self.has_begun.load(Ordering::Relaxed) {
                return Ok(None);
            }
            if !self.draws {
                return Err(io::Error::other("gone"));
            }
            self.is_broken.store(true, Ordering::Relaxed);
            Ok(Some(Event::Resize(80, 24)))
        }
    }

    fn installer() -> Facts {
        let disk = Disk {
            path: "/dev/sdb".into(),
            model: "Model".into(),
            serial: SERIAL_NUMBER.into(),
            bytes: 6 << 30,
            sector_bytes: 512,
            contents: Vec::new(),
            refusal: None,
        };
        Facts {
            install: Some(Ok(vec![disk])),
            ..Facts::default()
        }
    }

    /// Goal: an installation ends also if the screen fails in its middle. Method: a screen that
    /// fails to read, or to draw, once the installation has begun. The installation reports more
    /// progress than the channel holds.
    #[test]
    fn an_installation_outlives_the_screen() {
        for draws in [false, true] {
            let (has_begun, has_ended) = (Arc::default(), AtomicBool::default());
            let screen = Failing::new(draws, &has_begun);
            let outcome = operate(screen, installer, |action, updates| {
                let serial = SERIAL_NUMBER.to_owned();
                let overwrite = false;
                assert_eq!(action, Action::Install { serial, overwrite });
                has_begun.store(true, Ordering::Relaxed);
                for percent in 0..100 {
                    std::thread::sleep(Duration::from_millis(3));
                    let _ = updates.send(ConsoleUpdate::Progress(format!("copying: {percent} %")));
                }
                has_ended.store(true, Ordering::Relaxed);
                Ok("it is installed".into())
            });
            let failure = outcome.shown.expect_err("the screen failed");
            assert!(failure.to_string().contains("gone"), "{failure}");
            assert!(has_ended.load(Ordering::Relaxed));
            assert_eq!(outcome.unseen.as_deref(), Some("it is installed"));
        }
    }

    struct Silent;

    impl Run for Silent {
        fn run(&self, _: &str, _: &[&str]) -> Result<String, RunError> {
            Ok(String::new())
        }
    }

    /// Goal: the history has the acts at the screen. Method: a restart, and a confirmation without
    /// a change.
    #[test]
    fn acts_at_the_screen_are_in_the_history() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["var/lib/nacre-appliance", "usr/lib"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let release = "IMAGE_ID=nacre\nIMAGE_VERSION=0.2.0\n";
        std::fs::write(root.path().join("usr/lib/os-release"), release).unwrap();
        let places = Places::below(root.path());
        let (updates, _shown) = sync_channel(1);
        let act = |action| perform(action, &places, &Silent, &updates);
        assert!(act(Action::ConfirmNetwork).is_err());
        assert_eq!(act(Action::Restart).unwrap(), "the machine restarts");
        let history = acts::history(&places);
        let found: Vec<_> = history.iter().map(|one| (one.act, one.state)).collect();
        let expected = [
            (ActKind::Restart, ActState::Done),
            (ActKind::Network, ActState::Failed),
        ];
        assert_eq!(found, expected);
    }
}
