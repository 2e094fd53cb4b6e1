//! Runs child processes with a time limit, for all commands of xtask.
//!
//! Every child leads its own process group, so that its descendants are killed with it: by the
//! group's id, never by a name that might match other processes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes SIGINT, SIGTERM and SIGHUP end every wait for a child, so that this process cleans up.
/// The children's process groups do not get the terminal's signal.
pub(crate) fn catch_interrupts() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))
            .with_context(|| format!("catching signal {signal}"))?;
    }
    Ok(())
}

/// True if SIGINT, SIGTERM or SIGHUP was received.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Exited(ExitStatus),
    /// Killed because its time limit passed.
    TimedOut(Duration),
    /// Killed because this process was interrupted.
    Interrupted,
}

impl End {
    pub(crate) fn success(self) -> bool {
        matches!(self, Self::Exited(status) if status.success())
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "{status}"),
            Self::TimedOut(limit) => write!(f, "killed after its limit of {} s", limit.as_secs()),
            Self::Interrupted => write!(f, "interrupted"),
        }
    }
}

/// A child that leads its own process group and is killed with it when dropped.
pub(crate) struct Group {
    child: Child,
    ended: bool,
}

impl Group {
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        Ok(Self {
            child,
            ended: false,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdout(&mut self) -> Option<std::process::ChildStdout> {
        self.child.stdout.take()
    }

    pub(crate) fn stderr(&mut self) -> Option<std::process::ChildStderr> {
        self.child.stderr.take()
    }

    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        let status = self.child.try_wait().context("waiting for a child")?;
        self.ended |= status.is_some();
        Ok(status)
    }

    /// Waits until the child ends, `limit` passes or an interrupt arrives; kills the group in the
    /// latter two cases.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<End> {
        self.wait_unless(limit, interrupted)
    }

    /// Like [`Group::wait`], for a child that is being stopped already: interrupts are ignored.
    pub(crate) fn wait_through_interrupts(&mut self, limit: Duration) -> Result<End> {
        self.wait_unless(limit, || false)
    }

    fn wait_unless(&mut self, limit: Duration, interrupted: impl Fn() -> bool) -> Result<End> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(End::Exited(status));
            }
            if interrupted() {
                self.kill();
                return Ok(End::Interrupted);
            }
            if start.elapsed() >= limit {
                self.kill();
                return Ok(End::TimedOut(limit));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the leader to stop (SIGTERM) without waiting for it.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends the leader a signal, by its name without `SIG`.
    pub(crate) fn signal(&self, name: &str) {
        signal(name, &self.child.id().to_string());
    }

    /// Kills the whole group and reaps its leader.
    pub(crate) fn kill(&mut self) {
        if self.ended {
            return;
        }
        signal("KILL", &format!("-{}", self.child.id()));
        // The leader was sent SIGKILL, so this cannot block for long; its status is meaningless.
        let _ = self.child.wait();
        self.ended = true;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal through the shell's `kill`, which needs no unsafe code.
fn signal(name: &str, target: &str) {
    let sent = Command::new("/bin/sh")
        .args(["-c", "kill -s \"$0\" -- \"$1\"", name, target])
        .stderr(Stdio::null())
        .status();
    if let Err(error) = sent {
        eprintln!("warning: cannot signal {target}: {error}");
    }
}

/// Runs a command to its end, for at most `limit`. Prints both output streams line by line, and
/// calls `line` for each line.
pub(crate) fn stream(
    command: &mut Command,
    limit: Duration,
    mut line: impl FnMut(&str),
) -> Result<End> {
    lines(command, limit, |text| {
        println!("{text}");
        line(text);
    })
}

/// Runs a command to its end, and calls `line` for each line of both output streams.
pub(crate) fn lines(
    command: &mut Command,
    limit: Duration,
    mut line: impl FnMut(&str),
) -> Result<End> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut group = Group::spawn(command)?;
    let (tx, rx) = mpsc::channel();
    let readers = [
        group.stdout().map(|pipe| read_lines(pipe, tx.clone())),
        group.stderr().map(|pipe| read_lines(pipe, tx.clone())),
    ];
    drop(tx);
    let start = Instant::now();
    let mut end = None;
    loop {
        match rx.recv_timeout(Duration::from_millis(100)) {
            Ok(text) => line(&text),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
        // Killing the group closes the pipes, which ends the loop.
        if end.is_none() && interrupted() {
            group.kill();
            end = Some(End::Interrupted);
        }
        if end.is_none() && start.elapsed() >= limit {
            group.kill();
            end = Some(End::TimedOut(limit));
        }
    }
    for reader in readers.into_iter().flatten() {
        if reader.join().is_err() {
            bail!("a thread that read a child's output panicked");
        }
    }
    match end {
        Some(end) => Ok(end),
        None => group.wait(
            limit
                .saturating_sub(start.elapsed())
                .max(Duration::from_secs(5)),
        ),
    }
}

fn read_lines(
    pipe: impl Read + Send + 'static,
    tx: mpsc::Sender<String>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            match reader.read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(_) => {
                    let text = String::from_utf8_lossy(&bytes);
                    if tx
                        .send(text.trim_end_matches(['\n', '\r']).to_owned())
                        .is_err()
                    {
                        return;
                    }
                }
            }
        }
    })
}

/// Runs a command to its end without printing its output. Returns stdout; an error contains both
/// streams.
pub(crate) fn capture(command: &mut Command, limit: Duration) -> Result<String> {
    let shown = shown(command);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut group = Group::spawn(command)?;
    let collect = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                // A read error ends the stream; only the exit status counts.
                let _ = pipe.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = collect(group.stdout().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let err = collect(group.stderr().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let end = group.wait(limit)?;
    let (Ok(out), Ok(err)) = (out.join(), err.join()) else {
        bail!("a thread that read a child's output panicked");
    };
    if !end.success() {
        bail!("`{shown}` failed ({end}):\n{}{}", out, err.trim_end());
    }
    Ok(out)
}

/// Creates a log file for a child.
pub(crate) fn log_file(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("creating {}", path.display()))
}

/// The command line as a user would type it.
pub(crate) fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

/// Finds a program on the search path, including the administrator's folders.
pub(crate) fn find(program: impl AsRef<OsStr>) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let admin = ["/usr/sbin", "/sbin"].map(std::path::PathBuf::from);
    std::env::split_paths(&path)
        .chain(admin)
        .map(|dir| dir.join(program.as_ref()))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_past_its_limit_is_killed_with_its_group() {
        let start = Instant::now();
        let end = stream(
            Command::new("/bin/sh").args(["-c", "sleep 60 & sleep 60"]),
            Duration::from_millis(300),
            |_| {},
        )
        .unwrap();
        assert!(matches!(end, End::TimedOut(_)), "{end}");
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "the grandchild held the pipe"
        );
    }

    #[test]
    fn an_interrupt_ends_the_wait_and_the_child() {
        let mut group = Group::spawn(Command::new("/bin/sleep").arg("60")).unwrap();
        let polls = std::cell::Cell::new(0);
        let end = group.wait_unless(Duration::from_secs(30), || {
            polls.replace(polls.get() + 1) > 2
        });
        assert_eq!(end.unwrap(), End::Interrupted);
        assert!(group.ended, "it is reaped");
        assert!(!interrupted(), "no handler is installed by default");
    }

    #[test]
    fn both_streams_are_read_line_by_line() {
        let mut lines = Vec::new();
        let end = stream(
            Command::new("/bin/sh").args(["-c", "echo one; echo two >&2; exit 3"]),
            Duration::from_secs(20),
            |line| lines.push(line.to_owned()),
        )
        .unwrap();
        lines.sort();
        assert_eq!(lines, ["one", "two"]);
        assert!(!end.success());
    }

    #[test]
    fn a_failed_capture_reports_the_command_and_its_output() {
        let error = capture(
            Command::new("/bin/sh").args(["-c", "echo because >&2; exit 1"]),
            Duration::from_secs(20),
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("/bin/sh -c") && error.contains("because"),
            "{error}"
        );
    }
}
