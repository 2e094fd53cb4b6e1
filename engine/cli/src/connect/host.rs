//! The [`HostCommands`] of this machine: runs programs with a time limit, and collects the kernel's
//! log lines about NVMe meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::drive::{Cause, HostCommands, purpose, words};

pub(super) struct Shell {
    /// Messages go to standard error; standard output is for programs.
    quiet: bool,
    timeout: Duration,
}

impl Shell {
    pub(super) fn new(quiet: bool, timeout: Duration) -> Self {
        Self { quiet, timeout }
    }
}

/// Interval between checks whether a command has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Most lines kept of the kernel's log; the newest count.
const KERNEL_LINES: usize = 4;

impl HostCommands for Shell {
    fn run(&mut self, command: &[String]) -> Result<String, Cause> {
        self.print(&words(command));
        let mut kernel = KernelLog::from_now();
        let spawned = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = spawned.map_err(|error| Cause::NoProgram {
            program: command[0].clone(),
            error: error.to_string(),
        })?;
        let stdout = reader(child.stdout.take().expect("it is piped"));
        let stderr = reader(child.stderr.take().expect("it is piped"));
        match wait(&mut child, self.timeout) {
            Some(true) => Ok(stdout.join().unwrap_or_default()),
            Some(false) => {
                let said = stderr.join().unwrap_or_default();
                let said = if said.is_empty() {
                    format!("{} failed without a message", command[0])
                } else {
                    sentence(&said)
                };
                Err(Cause::Refused {
                    said,
                    kernel: kernel.lines(),
                })
            }
            None => {
                // A command stuck in the kernel ends when the kernel gives up; this process or init
                // reaps it then.
                drop(child.kill());
                drop(child.try_wait());
                Err(Cause::TimedOut {
                    what: purpose(command),
                    after: self.timeout,
                    kernel: kernel.lines(),
                })
            }
        }
    }

    fn has_fabrics(&self) -> bool {
        Path::new("/dev/nvme-fabrics").exists()
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
    }

    fn print(&mut self, text: &str) {
        if self.quiet {
            eprintln!("{text}")
        } else {
            println!("{text}")
        }
    }
}

/// Most output kept of a command: a discovery log of some thousand entries.
const MOST_OUTPUT: u64 = 4 << 20;

/// Reads in the background, so that a command with much output does not block.
fn reader(from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        // An output that cannot be read is empty; the exit status still counts.
        let mut from = from;
        drop(from.by_ref().take(MOST_OUTPUT).read_to_end(&mut text));
        drop(std::io::copy(&mut from, &mut std::io::sink()));
        String::from_utf8_lossy(&text).trim().to_owned()
    })
}

/// Joins several lines of a program's output.
pub(super) fn sentence(said: &str) -> String {
    let lines = said
        .lines()
        .map(|line| line.trim().trim_end_matches([';', '.']));
    lines
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}

/// True if the exit status is 0; `None` if the program did not end in time.
fn wait(child: &mut Child, timeout: Duration) -> Option<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.success()),
            Ok(None) if Instant::now() < deadline => thread::sleep(LOOK),
            Ok(None) => return None,
            Err(_) => return Some(false),
        }
    }
}

/// The kernel's log lines about NVMe from now on; empty if its log is not readable.
struct KernelLog {
    file: Option<File>,
}

impl KernelLog {
    fn from_now() -> Self {
        /// O_NONBLOCK: do not wait for a record.
        const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(NONBLOCK)
            .open("/dev/kmsg");
        let file = file.ok().and_then(|mut file| {
            file.seek(SeekFrom::End(0)).ok()?;
            Some(file)
        });
        Self { file }
    }

    fn lines(&mut self) -> Vec<String> {
        let Some(file) = &mut self.file else {
            return Vec::new();
        };
        let mut lines = Vec::new();
        let mut record = [0; 8192];
        loop {
            // One record a read: `priority,sequence,time,flags;text`.
            let length = match file.read(&mut record) {
                Ok(0) => break,
                Ok(length) => length,
                // Overwritten before it was read: the next one is available.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(_) => break,
            };
            let text = String::from_utf8_lossy(&record[..length]);
            let text = text.lines().next().unwrap_or_default();
            let text = text.split_once(';').map_or(text, |(_, text)| text);
            if text.contains("nvme") {
                lines.push(text.to_owned());
            }
        }
        lines.split_off(lines.len().saturating_sub(KERNEL_LINES))
    }
}
