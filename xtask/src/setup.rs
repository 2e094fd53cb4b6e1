//! Installs the programs that a command needs: Debian packages by name, and a Python tool in its
//! own virtual environment. Programs that are present are not installed again.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use regex::Regex;

use crate::process;

/// A program (or a library, by its path below the library folder), and its Debian package.
pub(crate) struct Need {
    pub program: &'static str,
    pub package: &'static str,
}

pub(crate) const fn need(program: &'static str, package: &'static str) -> Need {
    Need { program, package }
}

/// Environment variable: if it is set, randomised tests, and cases in the guest, run at full
/// length. The tests of the pool core run shorter with the value `ci`.
pub(crate) const AT_LENGTH: &str = "NACRE_TEST_AT_LENGTH";

/// Programs that the virtual machine and the tests inside it need.
pub(crate) const VM: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86"),
    need("busybox", "busybox-static"),
    need("depmod", "kmod"),
    need("nvme", "nvme-cli"),
    need("fio", "fio"),
    need("mkfs.xfs", "xfsprogs"),
    need("mkfs.ext4", "e2fsprogs"),
    need("ip", "iproute2"),
    need("rdma", "iproute2"),
    need("libibverbs.so.1", "libibverbs1"),
    need("libibverbs/librxe-rdmav34.so", "ibverbs-providers"),
    need("librdmacm.so.1", "librdmacm1"),
    need("ibv_devinfo", "ibverbs-utils"),
    need("ps", "procps"),
    need("gojq", "gojq"),
    need("dcb", "iproute2"),
    need("ethtool", "ethtool"),
    need("libgnutls.so.30", "libgnutls30"),
    need("libkeyutils.so.1", "libkeyutils1"),
    need("bwrap", "bubblewrap"),
    need("python3/dist-packages/yaml", "python3-yaml"),
];

/// Optional packages: the headers that a test compares structs with, and a program that other tests
/// connect with. Without them these tests are skipped.
pub(crate) const OPTIONAL: &[Need] = &[
    need("openssl", "openssl"),
    need("libibverbs.so", "libibverbs-dev"),
    need("librdmacm.so", "librdmacm-dev"),
];

const APT_LIMIT: Duration = Duration::from_secs(600);
const PIP_LIMIT: Duration = Duration::from_secs(300);

/// Installs missing `needs`. Without the right to do so, the error says what to type.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let missing: Vec<&str> = needs
        .iter()
        .filter(|need| !is_there(need.program))
        .map(|need| need.package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    apt_install(&missing)
}

/// True if a program is in the search path, or a library (`lib…`, or a path) below `/usr/lib`.
fn is_there(program: &str) -> bool {
    if !program.starts_with("lib") && !program.contains('/') {
        return process::find(program).is_some();
    }
    let dirs = ["x86_64-linux-gnu", "aarch64-linux-gnu", "."];
    dirs.iter()
        .any(|dir| Path::new("/usr/lib").join(dir).join(program).exists())
}

pub(crate) fn apt_install(packages: &[&str]) -> Result<()> {
    let line = format!(
        "apt-get install -y --no-install-recommends {}",
        packages.join(" ")
    );
    if process::find("apt-get").is_none() {
        bail!(
            "this machine lacks {}, and has no apt-get to install them with",
            packages.join(", ")
        );
    }
    if !is_root()? {
        bail!(
            "this machine lacks {}; as root, type: {line}",
            packages.join(", ")
        );
    }
    println!("installing {}", packages.join(", "));
    apt_update()?;
    process::capture(
        apt()
            .args(["install", "-y", "--no-install-recommends"])
            .args(packages),
        APT_LIMIT,
    )?;
    Ok(())
}

/// Refreshes the package lists.
fn apt_update() -> Result<()> {
    Suite::of_this_machine().update()
}

/// `apt-get` without questions; waits while another process holds its lock.
fn apt() -> Command {
    let mut command = Command::new("apt-get");
    // Not translated: `explain` reads its errors.
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C.UTF-8");
    command.args([
        "-q",
        "-o",
        "DPkg::Lock::Timeout=180",
        "-o",
        "Acquire::Retries=3",
    ]);
    command
}

/// Downloads a package of this machine's suites and unpacks it into `dir`: nothing is installed or
/// started.
pub(crate) fn unpack(package: &str, dir: &Path, limit: Duration) -> Result<()> {
    Suite::of_this_machine().unpack(package, dir, limit)
}

const MIRROR: &str = "http://deb.debian.org/debian";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// An archive of packages cannot be reached, or has no such package: no fault of this source.
#[derive(Debug)]
pub(crate) struct Unavailable;

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the archive cannot be reached, or has no such package")
    }
}

/// Errors of apt that [`Unavailable`] stands for. A wrong signature or checksum is none of them.
const UNAVAILABLE: &str = concat!(
    r"Could not (connect to|resolve)|Temporary failure resolving|Unable to connect to",
    r"|Cannot initiate the connection|Connection (failed|timed out)|Error reading from server",
    r"|  [45][0-9]{2}  |File not found|(does not have|no longer has) a Release file",
    r"|Unable to locate package|Unable to fetch some archives|Some index files failed to download",
);

/// Adds [`Unavailable`] to an error of apt if that is all that apt reports.
fn explain(error: anyhow::Error) -> anyhow::Error {
    let text = error.to_string();
    let errors = text.lines().filter_map(|line| line.strip_prefix("E: "));
    let mut errors = errors.peekable();
    let is_unavailable = errors.peek().is_some()
        && Regex::new(UNAVAILABLE)
            .is_ok_and(|unavailable| errors.all(|line| unavailable.is_match(line)));
    if is_unavailable {
        error.context(Unavailable)
    } else {
        error
    }
}

/// Where packages come from: the suites of this machine, or another one of Debian.
pub(crate) struct Suite {
    /// Options of apt.
    options: Vec<String>,
}

impl Suite {
    pub(crate) fn of_this_machine() -> Self {
        let options = Vec::new();
        Self { options }
    }

    /// Another suite of Debian, signed by Debian's keys. Its package lists are in `dir`, so this
    /// machine's stay as they are.
    pub(crate) fn open(name: &str, dir: &Path) -> Result<Self> {
        let source = format!("deb [signed-by={KEYRING}] {MIRROR} {name} main");
        Self::of_source(&source, dir)
    }

    /// `source`: a line of a sources.list.
    pub(crate) fn of_source(source: &str, dir: &Path) -> Result<Self> {
        create_dir(&dir.join("lists/partial"))?;
        create_dir(&dir.join("cache/archives/partial"))?;
        let list = dir.join("sources.list");
        std::fs::write(&list, format!("{source}\n"))
            .with_context(|| format!("writing {}", list.display()))?;
        let dir = dir.display();
        let options = [
            format!("Dir::Etc::SourceList={dir}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={dir}/lists"),
            format!("Dir::Cache={dir}/cache"),
            "Acquire::Languages=none".to_owned(),
            // Old lists are no success.
            "APT::Update::Error-Mode=any".to_owned(),
            // apt's own user may not enter the folder.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let options = options.into_iter().flat_map(|o| ["-o".to_owned(), o]);
        let options = options.collect();
        Ok(Self { options })
    }

    /// Refreshes the package lists.
    pub(crate) fn update(&self) -> Result<()> {
        let mut command = apt();
        command.args(&self.options).arg("update");
        process::capture(&mut command, APT_LIMIT)
            .map(drop)
            .map_err(explain)
    }

    /// The packages whose names match.
    pub(crate) fn search(&self, pattern: &str) -> Result<Vec<String>> {
        let mut command = Command::new("apt-cache");
        command.args(&self.options);
        command.args(["search", "--names-only", pattern]);
        let out = process::capture(&mut command, Duration::from_secs(60))?;
        let names = out.lines().filter_map(|line| line.split(' ').next());
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads a package and unpacks it into `dir`: nothing is installed or started.
    pub(crate) fn unpack(&self, package: &str, dir: &Path, limit: Duration) -> Result<()> {
        let download = || {
            let mut command = apt();
            command.args(&self.options).args(["download", package]);
            process::capture(command.current_dir(dir), APT_LIMIT).map_err(explain)
        };
        if download().is_err() {
            // The lists may be older than the mirror.
            self.update()?;
            download()?;
        }
        unpack_all(dir, dir, limit)
    }
}

/// Like [`unpack`], with all dependencies that this machine lacks. For packages of daemons, because
/// installing them would start the daemon.
pub(crate) fn unpack_with_dependencies(package: &str, dir: &Path, limit: Duration) -> Result<()> {
    let archives = dir.join("archives");
    create_dir(&archives.join("partial"))?;
    let download = || {
        let mut command = apt();
        command
            .args([
                "install",
                "-y",
                "--no-install-recommends",
                "--download-only",
            ])
            // Nothing is installed, so a user without rights can do this.
            .args(["-o", "Debug::NoLocking=1", "-o"])
            .arg(format!("Dir::Cache::archives={}", archives.display()))
            .arg(package);
        process::capture(&mut command, APT_LIMIT)
    };
    if download().is_err() {
        apt_update()?;
        download()?;
    }
    unpack_all(&archives, dir, limit)?;
    std::fs::remove_dir_all(&archives).with_context(|| format!("removing {}", archives.display()))
}

fn unpack_all(archives: &Path, dir: &Path, limit: Duration) -> Result<()> {
    let mut found = false;
    for entry in std::fs::read_dir(archives)? {
        let archive = entry?.path();
        if archive
            .extension()
            .is_none_or(|extension| extension != "deb")
        {
            continue;
        }
        found = true;
        process::capture(Command::new("dpkg").arg("-x").arg(&archive).arg(dir), limit)?;
        std::fs::remove_file(&archive)?;
    }
    if !found {
        bail!("apt-get downloaded no archive into {}", archives.display());
    }
    Ok(())
}

pub(crate) fn is_root() -> Result<bool> {
    let id = process::capture(Command::new("id").arg("-u"), Duration::from_secs(10))?;
    Ok(id.trim() == "0")
}

/// Installs `package` of PyPI in the virtual environment under `cache`, unless its `program` is
/// there; returns the environment's `bin` folder.
pub(crate) fn ensure_python(cache: &Path, package: &str, program: &str) -> Result<PathBuf> {
    let venv = cache.join("venv");
    let bin = venv.join("bin");
    if bin.join(program).is_file() {
        return Ok(bin);
    }
    println!("installing {package} from PyPI into {}", venv.display());
    if !bin.join("pip").is_file() {
        create_venv(&venv)?;
    }
    process::capture(
        Command::new(bin.join("pip")).args(["install", "--quiet", package]),
        PIP_LIMIT,
    )?;
    if !bin.join(program).is_file() {
        bail!(
            "{package} was installed, but there is no {}",
            bin.join(program).display()
        );
    }
    Ok(bin)
}

fn create_venv(venv: &Path) -> Result<()> {
    // Use the distribution's Python, not one of a version manager: the guest runs it too.
    let python = Path::new("/usr/bin/python3");
    let has_venv = python.is_file()
        && process::capture(
            Command::new(python).args(["-c", "import ensurepip, venv"]),
            Duration::from_secs(30),
        )
        .is_ok();
    if !has_venv {
        apt_install(&["python3", "python3-venv"])?;
    }
    process::capture(
        Command::new(python)
            .args(["-m", "venv", "--clear"])
            .arg(venv),
        PIP_LIMIT,
    )
    .map(drop)
}

/// Runs cargo with its output passed through.
pub(crate) fn cargo_build(root: &Path, args: &[&str], limit: Duration) -> Result<()> {
    let mut command = cargo();
    command.current_dir(root).arg("build").args(args);
    let shown = process::shown(&command);
    println!("$ {shown}");
    let end = process::stream(&mut command, limit, |_| {})?;
    if !end.success() {
        bail!("`{shown}` failed: {end}");
    }
    Ok(())
}

/// Available memory in MiB: `MemAvailable` in `/proc/meminfo`.
pub(crate) fn available_mib() -> Option<u64> {
    available_mib_of(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available_mib_of(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib / 1024)
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Creates a folder; an error names it.
pub(crate) fn create_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("creating {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Goal: only an archive that cannot be reached, or lacks a package, is `Unavailable`.
    /// Method: errors of apt 2.6, as it prints them.
    #[test]
    fn an_unavailable_archive_is_told_from_other_errors() {
        let is_unavailable = |errors: &str| {
            let error = anyhow::anyhow!("`apt-get update` failed (exit status: 100):\n{errors}");
            explain(error).is::<Unavailable>()
        };
        let old = "E: Some index files failed to download. They have been ignored, or old ones used instead.";
        for good in [
            "E: Failed to fetch http://127.0.0.1:1/InRelease  Could not connect to 127.0.0.1:1 (127.0.0.1). - connect (111: Connection refused)",
            "E: Failed to fetch http://a.invalid/InRelease  Could not resolve 'a.invalid'",
            "E: Failed to fetch http://a/b.deb  404  Not Found [IP: 203.0.113.80 80]",
            "E: The repository 'http://a/debian b Release' does not have a Release file.",
            "E: Unable to locate package linux-none",
        ] {
            assert!(is_unavailable(good), "{good}");
            assert!(is_unavailable(&format!("{good}\n{old}")), "{good}");
        }
        for bad in [
            "",
            "W: Failed to fetch http://a.invalid/InRelease  Could not resolve 'a.invalid'",
            "E: The repository 'http://a/debian b InRelease' is not signed.",
            "E: Failed to fetch http://a/b.deb  Hash Sum mismatch",
            "E: Could not get lock /a/lists/lock. It is held by process 1 (apt-get)",
            "E: You don't have enough free space in /a/cache/archives/.",
        ] {
            assert!(!is_unavailable(bad), "{bad}");
            let both = format!("E: Unable to locate package a\n{bad}");
            assert_eq!(is_unavailable(&both), !bad.starts_with("E: "), "{bad}");
        }
    }

    /// Goal: an update through an archive that cannot be reached is an error, although apt goes on
    /// with the lists that it has. Method: a port without a server.
    #[test]
    fn an_unreachable_archive_is_an_error() {
        if process::find("apt-get").is_none() {
            let why = b"SKIPPED: an_unreachable_archive_is_an_error: no apt-get\n";
            let _ = std::io::stderr().write_all(why);
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let source = format!("deb [trusted=yes arch=amd64] http://{address}/ ./");
        let mut suite = Suite::of_source(&source, dir.path()).unwrap();
        suite
            .options
            .extend(["-o", "Acquire::Retries=0"].map(str::to_owned));
        let error = suite.update().unwrap_err();
        assert!(error.is::<Unavailable>(), "{error:#}");
    }

    #[test]
    fn available_memory_is_read() {
        let of = available_mib_of;
        assert_eq!(of("MemTotal: 1 kB\nMemAvailable:   2048 kB\n"), Some(2));
        assert_eq!(of("MemTotal: 1 kB"), None);
    }
}
