//! Programs of the system, each with a deadline and bounded output.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
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
}

/// Runs programs of this machine.
#[derive(Debug, Clone)]
pub struct Programs {
    patience: Duration,
}

/// Most bytes of one output. The rest is read and dropped.
const MOST_OUTPUT: u64 = 64 * 1024;
const POLL: Duration = Duration::from_millis(20);

impl Programs {
    pub fn new(patience: Duration) -> Self {
        Self { patience }
    }
}

impl Run for Programs {
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
        let failed = |source| RunError::Start {
            program: program.to_owned(),
            source,
        };
        let mut child = Command::new(program)
            .args(arguments)
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
                    // A program that ended meanwhile cannot be killed.
                    let _ = child.kill();
                    let _ = child.wait();
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
        if status.success() {
            return text(output).ok_or_else(late);
        }
        let text = text(errors).unwrap_or_default();
        let lines: Vec<&str> = text.trim().lines().collect();
        Err(RunError::Failed {
            program: program.to_owned(),
            status,
            text: lines[lines.len().saturating_sub(3)..].join("; "),
        })
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
pub(crate) mod testing {
    use super::*;
    use std::cell::RefCell;
    use std::os::unix::process::ExitStatusExt;
    use std::path::{Path, PathBuf};

    /// Records each command line; fails each that contains a given text.
    #[derive(Default)]
    pub(crate) struct Recorder {
        pub lines: RefCell<Vec<String>>,
        pub failing: Option<&'static str>,
    }

    /// Copies the machine's disk before each command: a boot after a power failure there has it.
    pub(crate) struct Cuts {
        root: PathBuf,
        copies: RefCell<Vec<(String, tempfile::TempDir)>>,
    }

    impl Cuts {
        pub(crate) fn of(root: &Path) -> Self {
            Self {
                root: root.to_owned(),
                copies: RefCell::default(),
            }
        }

        pub(crate) fn taken(&self) -> Vec<(String, tempfile::TempDir)> {
            std::mem::take(&mut self.copies.borrow_mut())
        }
    }

    impl Run for Cuts {
        fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
            let copy = tempfile::tempdir().unwrap();
            let mut command = Command::new("cp");
            let status = command.arg("-a").arg(self.root.join(".")).arg(copy.path());
            assert!(status.status().unwrap().success());
            let line = [&[program], arguments].concat().join(" ");
            self.copies.borrow_mut().push((line, copy));
            Ok(String::new())
        }
    }

    impl Recorder {
        pub(crate) fn taken(&self) -> Vec<String> {
            std::mem::take(&mut self.lines.borrow_mut())
        }
    }

    impl Run for Recorder {
        fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
            let line = [&[program], arguments].concat().join(" ");
            let fails = self.failing.is_some_and(|part| line.contains(part));
            self.lines.borrow_mut().push(line);
            if fails {
                return Err(RunError::Failed {
                    program: program.to_owned(),
                    status: ExitStatus::from_raw(256),
                    text: "refused".into(),
                });
            }
            Ok(String::new())
        }
    }
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
    }
}
