//! Programs of the system, each with a deadline and bounded output.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Runs programs. Tests have one that only records.
pub trait Run {
    /// The standard output of a program that ended well.
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
        /// The end of its standard error.
        text: String,
    },
    #[error("{program}: no end after {} s", .patience.as_secs())]
    Late { program: String, patience: Duration },
    #[error("{program}: not started, because {MOST_STUCK} killed programs have not ended")]
    Stuck { program: String },
}

/// The end of a program, with its output.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
}

/// Runs programs of this machine, with messages in English.
#[derive(Debug, Clone)]
pub struct Programs {
    patience: Duration,
}

/// Most bytes of one output. The rest is read and dropped.
const MOST_OUTPUT: u64 = 64 * 1024;
const POLL: Duration = Duration::from_millis(20);
/// Killed programs that may wait for a device at the same time.
const MOST_STUCK: usize = 16;

static STUCK: AtomicUsize = AtomicUsize::new(0);

impl Programs {
    pub fn new(patience: Duration) -> Self {
        Self { patience }
    }

    /// Waits for the end of the program, whatever its status. A program that is late is killed.
    pub fn finish(&self, program: &str, arguments: &[&str]) -> Result<Ended, RunError> {
        if STUCK.load(Ordering::Relaxed) >= MOST_STUCK {
            let program = program.to_owned();
            return Err(RunError::Stuck { program });
        }
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
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break status,
                None if Instant::now() >= end => {
                    end_late(child);
                    return Err(late());
                }
                None => thread::sleep(POLL),
            }
        };
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

/// Kills the program. One that waits for a device ends when the device answers: a thread waits for
/// that, so that no zombie stays.
fn end_late(mut child: Child) {
    // A program that ended meanwhile cannot be killed.
    let _ = child.kill();
    STUCK.fetch_add(1, Ordering::Relaxed);
    thread::spawn(move || {
        let _ = child.wait();
        STUCK.fetch_sub(1, Ordering::Relaxed);
    });
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

    /// Goal: a program that is killed leaves no zombie.
    #[test]
    fn a_killed_program_is_reaped() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 60", pid.display());
        let programs = Programs::new(Duration::from_millis(500));
        let late = programs.finish("sh", &["-c", &script]);
        assert!(matches!(late, Err(RunError::Late { .. })), "{late:?}");
        let pid = std::fs::read_to_string(pid).unwrap();
        let process = std::path::Path::new("/proc").join(pid.trim());
        let end = Instant::now() + Duration::from_secs(20);
        while process.exists() {
            assert!(Instant::now() < end, "it is a zombie");
            thread::sleep(POLL);
        }
    }
}
