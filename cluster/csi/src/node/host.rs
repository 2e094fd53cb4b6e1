//! This machine: the kernel's NVMe host, its files, and the programs that make and mount file
//! systems. Tests have another one.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time for a program. Making a file system discards the whole device first.
const PROGRAM: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(10);
/// Most output kept of a program.
const MOST_OUTPUT: u64 = 64 << 10;

/// The end of a program, with its output.
#[derive(Debug, Clone)]
pub struct Ran {
    pub code: Option<i32>,
    pub output: String,
    pub errors: String,
}

impl Ran {
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

/// The machine that a node service works on.
pub trait Host: Send + Sync + std::fmt::Debug {
    /// Directories of sysfs and devices.
    fn sys(&self) -> &Path;
    fn dev(&self) -> &Path;
    /// The contents of `/proc/self/mountinfo`.
    fn mounts(&self) -> io::Result<String>;
    /// Writes the options to `/dev/nvme-fabrics`: connects a controller.
    fn connect(&self, options: &str) -> io::Result<()>;
    /// Deletes a controller, by its name in sysfs.
    fn disconnect(&self, controller: &str) -> io::Result<()>;
    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Ran>;
}

/// The real one.
#[derive(Debug, Clone)]
pub struct Machine {
    sys: PathBuf,
    dev: PathBuf,
    proc: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            dev: "/dev".into(),
            proc: "/proc".into(),
        }
    }
}

impl Host for Machine {
    fn sys(&self) -> &Path {
        &self.sys
    }

    fn dev(&self) -> &Path {
        &self.dev
    }

    fn mounts(&self) -> io::Result<String> {
        std::fs::read_to_string(self.proc.join("self/mountinfo"))
    }

    fn connect(&self, options: &str) -> io::Result<()> {
        let path = self.dev.join("nvme-fabrics");
        let mut fabrics = OpenOptions::new().read(true).write(true).open(path)?;
        // One write: each one is a connection.
        let written = fabrics.write(options.as_bytes())?;
        if written != options.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut answer = [0; 256];
        fabrics.read(&mut answer).map(drop)
    }

    fn disconnect(&self, controller: &str) -> io::Result<()> {
        let path = self.sys.join("class/nvme").join(controller);
        std::fs::write(path.join("delete_controller"), "1")
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Ran> {
        let mut child = Command::new(program)
            .args(arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let output = reader(child.stdout.take());
        let errors = reader(child.stderr.take());
        let end = Instant::now() + PROGRAM;
        let status: ExitStatus = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() >= end {
                // A program in an uninterruptible wait ends when its device answers; it stays a
                // child until then.
                child.kill()?;
                let text = format!("{program} has not ended within {} s", PROGRAM.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            std::thread::sleep(LOOK);
        };
        Ok(Ran {
            code: status.code(),
            output: output.join().unwrap_or_default(),
            errors: errors.join().unwrap_or_default(),
        })
    }
}

fn reader(from: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut from) = from {
            drop(from.by_ref().take(MOST_OUTPUT).read_to_end(&mut text));
            drop(io::copy(&mut from, &mut io::sink()));
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    })
}
