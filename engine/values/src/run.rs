//! Runs programs of the system, each with a time limit and bounded output.
//!
//! A program that waits for a dead device does not end before the device answers, even if it is
//! killed. The same command line is refused until then, so that retries add no processes. Other
//! command lines run: they may be for another device.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Runs programs. Tests have one that only records.
pub trait Run {
    /// Runs a program. Returns its standard output after an exit status of 0. Blocks.
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError>;
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{program}: {source}")]
    Start {
        program: String,
        source: std::io::Error,
    },
    #[error("{program}: {status}: {text}")]
    Failed {
        program: String,
        status: ExitStatus,
        /// The last three lines of its standard error.
        text: String,
    },
    #[error("{program}: no end after {} s", .patience.as_secs())]
    Late { program: String, patience: Duration },
    #[error(
        "{program}: not started, because the same command was killed and has not ended: it waits \
         for a device"
    )]
    Stuck { program: String },
    #[error("{program}: not started, because {MOST_STUCK} killed programs have not ended")]
    Crowded { program: String },
}

/// The exit status of a program, and its standard output and standard error: at most 64 KiB of
/// each, as UTF-8.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
}

/// Runs programs of this machine, with the locale C and a time limit (`patience`) for each.
#[derive(Debug, Clone)]
pub struct Programs {
    patience: Duration,
}

/// Most bytes of one output. The rest is read and dropped.
const MOST_OUTPUT: u64 = 64 * 1024;
const POLL: Duration = Duration::from_millis(20);
/// Killed programs that may wait for devices at the same time: some for each of many dead volumes.
const MOST_STUCK: usize = 256;
/// Time for a killed program to end, before it counts as stuck.
const DEATH: Duration = Duration::from_millis(500);

static STUCK: Stuck = Stuck(Mutex::new(BTreeMap::new()));

impl Programs {
    pub fn new(patience: Duration) -> Self {
        Self { patience }
    }

    /// Runs a program, and waits for its end, whatever its exit status. Kills it after the time
    /// limit.
    pub fn finish(&self, program: &str, arguments: &[&str]) -> Result<Ended, RunError> {
        let line = command_line(program, arguments);
        STUCK.refuse(&line)?;
        let failed = |source| RunError::Start {
            program: program.to_owned(),
            source,
        };
        let mut child = Command::new(program)
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take().map(reader);
        let errors = child.stderr.take().map(reader);
        let end = Instant::now() + self.patience;
        let late = || RunError::Late {
            program: program.to_owned(),
            patience: self.patience,
        };
        let status = wait(child, line, end, Child::try_wait).map_err(failed)?;
        let status = status.ok_or_else(late)?;
        // A program's own child may keep the pipe open.
        let text = |reader: Option<Receiver<String>>| {
            let rest = end.saturating_duration_since(Instant::now());
            reader.and_then(|reader| reader.recv_timeout(rest).ok())
        };
        let output = text(output);
        let errors = text(errors);
        if status.success() && output.is_none() {
            return Err(late());
        }
        Ok(Ended {
            status,
            output: output.unwrap_or_default(),
            errors: errors.unwrap_or_default(),
        })
    }
}

impl Run for Programs {
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
        let ended = self.finish(program, arguments)?;
        if ended.status.success() {
            return Ok(ended.output);
        }
        let lines: Vec<&str> = ended.errors.trim().lines().collect();
        Err(RunError::Failed {
            program: program.to_owned(),
            status: ended.status,
            text: lines[lines.len().saturating_sub(3)..].join("; "),
        })
    }
}

fn command_line(program: &str, arguments: &[&str]) -> Vec<String> {
    let words = [program].into_iter().chain(arguments.iter().copied());
    words.map(str::to_owned).collect()
}

/// Waits for the end of the program. `None`: it is late. A program that is late, or whose state
/// cannot be read, is killed.
fn wait(
    mut child: Child,
    line: Vec<String>,
    end: Instant,
    mut poll: impl FnMut(&mut Child) -> std::io::Result<Option<ExitStatus>>,
) -> std::io::Result<Option<ExitStatus>> {
    loop {
        match poll(&mut child) {
            Ok(None) if Instant::now() < end => thread::sleep(POLL),
            Ok(Some(status)) => return Ok(Some(status)),
            other => {
                kill(child, line);
                return other;
            }
        }
    }
}

/// Kills the program. If the program does not end at once, a thread waits for its end, so that no
/// zombie stays.
fn kill(mut child: Child, line: Vec<String>) {
    // A program that ended meanwhile cannot be killed.
    let _ = child.kill();
    let end = Instant::now() + DEATH;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return,
            Ok(None) if Instant::now() < end => thread::sleep(POLL),
            _ => break,
        }
    }
    STUCK.until(line, move || drop(child.wait()));
}

/// The killed programs that have not ended, with their number of each command line.
struct Stuck(Mutex<BTreeMap<Vec<String>, usize>>);

impl Stuck {
    /// Refuses a command line that is stuck, and every one if too many are.
    fn refuse(&self, line: &[String]) -> Result<(), RunError> {
        let lines = self.0.lock();
        let program = line.first().cloned().unwrap_or_default();
        if lines.contains_key(line) {
            return Err(RunError::Stuck { program });
        }
        if lines.values().sum::<usize>() >= MOST_STUCK {
            return Err(RunError::Crowded { program });
        }
        Ok(())
    }

    /// Counts the program as stuck until `wait` returns, on a thread.
    fn until(&'static self, line: Vec<String>, wait: impl FnOnce() + Send + 'static) {
        *self.0.lock().entry(line.clone()).or_default() += 1;
        let entry = Entry { all: self, line };
        let wait = move || {
            wait();
            drop(entry);
        };
        // Without a thread, the zombie stays until this process ends.
        let _ = thread::Builder::new().spawn(wait);
    }
}

struct Entry {
    all: &'static Stuck,
    line: Vec<String>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut lines = self.all.0.lock();
        if let Some(count) = lines.get_mut(&self.line) {
            *count -= 1;
            if *count == 0 {
                lines.remove(&self.line);
            }
        }
    }
}

fn reader(mut pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // An output that cannot be read is empty; the exit status decides.
        let _ = pipe.by_ref().take(MOST_OUTPUT).read_to_end(&mut bytes);
        let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: output, failure and deadline each end as their own case. Method: the shell.
    #[test]
    fn a_program_ends_or_is_ended() {
        let programs = Programs::new(Duration::from_secs(20));
        assert_eq!(programs.run("sh", &["-c", "echo one"]).unwrap(), "one\n");
        let error = programs.run("sh", &["-c", "echo why >&2; exit 3"]);
        assert!(matches!(error, Err(RunError::Failed { text, .. }) if text == "why"));
        let error = programs.run("/nonexistent/program", &[]);
        assert!(matches!(error, Err(RunError::Start { .. })));
        let programs = Programs::new(Duration::from_millis(100));
        let error = programs.run("sleep", &["60"]);
        assert!(matches!(error, Err(RunError::Late { .. })));
        // The shell ends, and its child keeps the output.
        let error = programs.run("sh", &["-c", "sleep 60 &"]);
        assert!(matches!(error, Err(RunError::Late { .. })));
        let programs = Programs::new(Duration::from_secs(20));
        let output = programs.run("sh", &["-c", "head -c 300000 /dev/zero"]);
        assert_eq!(output.unwrap().len() as u64, MOST_OUTPUT);
        let ended = programs.finish("sh", &["-c", "echo out; echo err >&2; exit 2"]);
        let ended = ended.unwrap();
        assert_eq!(ended.status.code(), Some(2));
        assert_eq!((&*ended.output, &*ended.errors), ("out\n", "err\n"));
    }

    fn until_gone(pid: &str) {
        let process = std::path::Path::new("/proc").join(pid.trim());
        let end = Instant::now() + Duration::from_secs(20);
        while process.exists() {
            assert!(Instant::now() < end, "it is a zombie");
            thread::sleep(POLL);
        }
    }

    /// Goal: a program that is killed leaves no zombie.
    #[test]
    fn a_killed_program_is_reaped() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 60", pid.display());
        let programs = Programs::new(Duration::from_millis(500));
        let late = programs.finish("sh", &["-c", &script]);
        assert!(matches!(late, Err(RunError::Late { .. })), "{late:?}");
        until_gone(&std::fs::read_to_string(pid).unwrap());
    }

    /// Goal: a program whose state cannot be read leaves no zombie and no process. Method: the poll
    /// fails.
    #[test]
    fn a_program_without_a_state_is_reaped() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().to_string();
        let end = Instant::now() + Duration::from_secs(60);
        let line = command_line("sleep", &["60", "of this test"]);
        let error = wait(child, line, end, |_| {
            Err(std::io::ErrorKind::Interrupted.into())
        });
        assert!(error.is_err());
        until_gone(&pid);
    }

    /// Goal: a stuck program costs its own command line only, until it ends. Method: a wait that
    /// the test ends stands for the wait for a program that a dead device holds.
    #[test]
    fn a_stuck_program_blocks_its_command_line_only() {
        let programs = Programs::new(Duration::from_secs(20));
        let stuck = ["-c", "echo stuck"];
        let (release, held) = sync_channel::<()>(1);
        STUCK.until(command_line("sh", &stuck), move || {
            let _ = held.recv();
        });
        for _ in 0..2 {
            let refused = programs.run("sh", &stuck);
            assert!(
                matches!(refused, Err(RunError::Stuck { .. })),
                "{refused:?}"
            );
        }
        assert_eq!(
            programs.run("sh", &["-c", "echo other"]).unwrap(),
            "other\n"
        );
        drop(release);
        let end = Instant::now() + Duration::from_secs(20);
        while programs.run("sh", &stuck).is_err() {
            assert!(Instant::now() < end, "it stays refused");
            thread::sleep(POLL);
        }
    }

    /// Goal: stuck programs have a bound over all command lines. Method: a list of its own.
    #[test]
    fn stuck_programs_have_a_bound() {
        static STUCK: Stuck = Stuck(Mutex::new(BTreeMap::new()));
        let line = |number: usize| command_line("umount", &[&number.to_string()]);
        let (releases, helds): (Vec<_>, Vec<_>) =
            (0..MOST_STUCK).map(|_| sync_channel::<()>(1)).unzip();
        for (number, held) in helds.into_iter().enumerate() {
            STUCK.refuse(&line(number)).expect("few are stuck");
            STUCK.until(line(number), move || {
                let _ = held.recv();
            });
        }
        let refused = STUCK.refuse(&line(MOST_STUCK));
        assert!(matches!(refused, Err(RunError::Crowded { .. })));
        drop(releases);
        let end = Instant::now() + Duration::from_secs(20);
        while STUCK.refuse(&line(0)).is_err() || !STUCK.0.lock().is_empty() {
            assert!(Instant::now() < end, "it stays refused");
            thread::sleep(POLL);
        }
    }
}
