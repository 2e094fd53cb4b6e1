//! This machine: the kernel's NVMe host, its files, and the programs that make and mount file
//! systems. Tests have a simulated one.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nacre_engine_values::run::{Programs, RunError};
use rustix::fs::OFlags;

/// Time limit of a program.
const PROGRAM: Duration = Duration::from_secs(300);
/// Largest file of the kernel that is read whole: the mounts of a machine with many pods.
const MOST_MOUNTS: u64 = 16 << 20;

/// The exit code (`None`: killed by a signal) and the output of a program that has ended.
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
    /// The directories of sysfs and of devices: `/sys` and `/dev`.
    fn sys(&self) -> &Path;
    fn dev(&self) -> &Path;
    /// The boot id of the kernel. Connections and mounts do not outlive a boot.
    fn boot_id(&self) -> io::Result<String>;
    /// The contents of `/proc/self/mountinfo`.
    fn mounts(&self) -> io::Result<String>;
    /// Writes the options to `/dev/nvme-fabrics`: connects a controller. May wait long, and waits
    /// also for other connections that are begun.
    fn connect(&self, options: &str) -> io::Result<()>;
    /// Deletes a controller, by its name in sysfs. May wait as long as the controller does.
    fn disconnect(&self, controller: &str) -> io::Result<()>;
    /// Opens a device exclusively (`O_EXCL`), and flushes the data that the kernel caches for it.
    /// `EBUSY`: it is in use. May wait as long as the device does.
    fn claim(&self, device: &Path) -> io::Result<File>;
    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Ran>;
}

/// The machine that this process runs on. A program may run for 300 s.
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

    fn boot_id(&self) -> io::Result<String> {
        let text = std::fs::read_to_string(self.proc.join("sys/kernel/random/boot_id"))?;
        Ok(text.trim().to_owned())
    }

    fn mounts(&self) -> io::Result<String> {
        let mut text = String::new();
        let file = File::open(self.proc.join("self/mountinfo"))?;
        file.take(MOST_MOUNTS).read_to_string(&mut text)?;
        // A part of the list could miss the mount that matters.
        if text.len() as u64 == MOST_MOUNTS {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(text)
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

    fn claim(&self, device: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.custom_flags(OFlags::EXCL.bits().cast_signed());
        let file = options.read(true).open(device)?;
        file.sync_all()?;
        Ok(file)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Ran> {
        let ended = Programs::new(PROGRAM).finish(program, arguments);
        let ended = ended.map_err(|error| match error {
            RunError::Start { source, .. } => source,
            late @ RunError::Late { .. } => io::Error::new(io::ErrorKind::TimedOut, late),
            other => io::Error::new(io::ErrorKind::ResourceBusy, other),
        })?;
        Ok(Ran {
            code: ended.status.code(),
            output: ended.output.trim().to_owned(),
            errors: ended.errors.trim().to_owned(),
        })
    }
}
