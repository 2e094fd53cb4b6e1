//! The virtual machine: a stock Debian kernel under QEMU, started by virtme-ng. Its root is a
//! copy-on-write view of this machine's root, so binaries built outside run inside.
//!
//! ```text
//! host    vng --run vmlinuz … --rwdir DIR --exec 'tests/vm/guest.sh OUT'
//!            │                        │  watches OUT, kills the process group after a timeout
//! guest      └─ guest.sh ── cases/*.sh ── OUT/results, OUT/logs/*
//! ```
//!
//! DIR is the only folder where guests write through to the host; OUT is a folder in it, one per
//! boot. One boot runs many tests. Without hardware virtualisation the machine is emulated: slower,
//! but equally correct. Then several guests run side by side if memory allows, and each takes the
//! next waiting test.

mod case;
mod dcbsim;
mod drives;
mod events;
mod kernel;
mod queue;
mod siw;
mod suite;
mod work;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;

use self::drives::Media;
use crate::process::{End, Group};
use crate::{process, setup};

pub(crate) use drives::clean as clean_drives;
pub(crate) use kernel::Series;
pub(crate) use suite::{
    NO_NEWER_KERNEL, Selection, Target, built_nacre, debug_nacre, fast_nacre, matches,
    not_asked_for, run as run_suite,
};

#[derive(Subcommand)]
pub(crate) enum VmCommand {
    /// Open a shell inside the virtual machine.
    Shell {
        #[arg(long, value_enum, default_value_t)]
        kernel: Series,
    },
    /// Run one command inside the virtual machine and show its output.
    Run {
        /// Seconds after which the command is killed.
        #[arg(long, default_value_t = 600)]
        limit: u64,
        #[arg(long, value_enum, default_value_t)]
        kernel: Series,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Run the tests of the virtual machine.
    Test {
        /// Run only tests whose name contains one of these, separated by commas.
        #[arg(long, value_delimiter = ',')]
        filter: Vec<String>,
        /// The target under test: Nacre, or the kernel's nvmet, which validates the tests
        /// themselves.
        #[arg(long, value_enum, default_value_t = Target::Nacre)]
        target: Target,
        /// Use this `nacre` instead of building one.
        #[arg(long)]
        nacre: Option<PathBuf>,
        /// Number of guests side by side [default: up to three if they are emulated and this
        /// machine has two CPUs and enough memory].
        #[arg(long)]
        guests: Option<usize>,
        /// The kernel of all guests; cases that need the newer one have it anyway.
        #[arg(long, value_enum, default_value_t)]
        kernel: Series,
    },
    /// Download the newest Debian kernel of a series, even if the cache has one.
    Update {
        #[arg(long, value_enum, default_value_t)]
        kernel: Series,
    },
}

pub(crate) fn run(root: &Path, vm_command: &VmCommand) -> Result<ExitCode> {
    match vm_command {
        VmCommand::Shell { kernel } => shell(root, *kernel),
        VmCommand::Run {
            limit,
            kernel,
            command,
        } => {
            let vm = Vm::with_kernel(*kernel)?;
            let out = scratch(root, "run")?;
            let log = out.join("output");
            let line = format!(
                "( {} ) > {} 2>&1; echo $? > {}",
                command.join(" "),
                quoted(&log),
                quoted(&out.join("status"))
            );
            let end = vm.boot(root, &line, &out, Duration::from_secs(*limit))?;
            print!("{}", std::fs::read_to_string(&log).unwrap_or_default());
            let status = std::fs::read_to_string(out.join("status")).unwrap_or_default();
            match status.trim().parse::<u8>() {
                Ok(code) => Ok(ExitCode::from(code)),
                Err(_) => bail!(
                    "the virtual machine stopped before the command did ({end}); see {}",
                    out.display()
                ),
            }
        }
        VmCommand::Test {
            filter,
            target,
            nacre,
            guests,
            kernel,
        } => {
            let selection = Selection {
                filter: filter.clone(),
                target: *target,
                nacre: nacre.clone(),
                guests: *guests,
                kernel: *kernel,
            };
            let mut tally = run_suite(root, &selection)?;
            if let Some(what) = not_asked_for(root, &selection.filter)? {
                tally.skip(what);
            }
            tally.print_details();
            println!("{tally}");
            Ok(tally.exit_code())
        }
        VmCommand::Update { kernel } => {
            let kernel = kernel::update(*kernel, &cache_dir()?)?;
            println!("Linux {} is ready", kernel.version);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn shell(root: &Path, series: Series) -> Result<ExitCode> {
    let vm = Vm::with_kernel(series)?;
    let out = scratch(root, "shell")?;
    println!(
        "Linux {}; leave with `exit`, or kill it with Ctrl-A X; {} is shared",
        vm.kernel.version,
        out.display()
    );
    // In this process group, so that it owns the terminal.
    let status = vm.command(root, &out).status().context("starting vng")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What the machine of a guest has beyond the usual one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Machine {
    #[default]
    Plain,
    /// The kernel of [`Series::Newer`].
    NewerKernel,
    /// NVMe drives behind an IOMMU, and QEMU's monitor to pull them.
    Drives,
    /// The same drives without storage: all reads return zeroes.
    EmptyDrives,
}

/// A second, cacheable mount of this machine's root: see `tests/vm/guest.sh`.
const ROOT_TO_KEEP: &str = "-fsdev local,id=keep,path=/,security_model=none,readonly=on,multidevs=remap \
                            -device virtio-9p-pci,fsdev=keep,mount_tag=keep";

/// By default each of virtme's six serial devices has 31 ports and uses one. QEMU polls every queue
/// of every port.
const FEWER_PORTS: &str = "-global virtio-serial-device.max_ports=2";

/// Disables kernel features that are expensive in an emulated machine and useless there:
///
/// - Address space randomisation: QEMU caches translated code by address, and translates a program
///   again when it moves.
/// - The watchdog of the time-stamp counter: when an emulated CPU waits for a real one, the kernel
///   considers the counter broken and reads the HPET instead, at a thousand times the cost.
/// - Mitigations of speculative execution.
/// - Self-tests of the kernel's ciphers.
const EMULATED_KERNEL_ARGUMENTS: &str = "norandmaps tsc=reliable mitigations=off cryptomgr.notests";

/// Without CPU features that are slow when emulated: ERMS (copying by one instruction, emulated
/// byte by byte), SMAP (leaves the translated code twice per copy), and page tables of five levels.
const EMULATED_CPU: &str = "-cpu max,-erms,-smap,-la57";

/// One thread of this machine runs both CPUs in turn. With a thread per CPU, QEMU emulates atomic
/// operations and barriers in full. A guest CPU also waits for the other one (interrupts between
/// CPUs, spin locks), whose thread this machine often does not run. A case then takes 1.4 to 1.8
/// times the processor time.
const ONE_THREAD: &str = "-accel tcg,thread=single";

const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// The prepared virtual machine: kernel, tools and options.
pub(crate) struct Vm {
    kernel: kernel::Kernel,
    virtme: PathBuf,
    accelerated: bool,
    /// Emulated CPUs run in parallel, each on a thread of its own.
    parallel: bool,
}

impl Vm {
    /// A machine with the usual kernel. Installs and downloads missing parts.
    pub(crate) fn prepare() -> Result<Self> {
        Self::with_kernel(Series::default())
    }

    fn with_kernel(series: Series) -> Result<Self> {
        setup::ensure(setup::VM)?;
        let cache = cache_dir()?;
        setup::create_dir(&cache)?;
        let virtme = setup::ensure_python(&cache, "virtme-ng", "vng")?;
        let kernel = kernel::ensure(series, &cache)?;
        Ok(Self {
            kernel,
            virtme,
            accelerated: accelerated(),
            parallel: false,
        })
    }

    /// For measurements: target and host run at the same time, although that takes more of this
    /// machine's time.
    pub(crate) fn with_parallel_cpus(self) -> Self {
        Self {
            parallel: true,
            ..self
        }
    }

    pub(crate) fn describe(&self) -> String {
        let how = if self.accelerated {
            "KVM"
        } else {
            "emulated, without KVM"
        };
        format!("Linux {} on two CPUs ({how})", self.kernel.version)
    }

    /// The kernel module of the cases with DCB.
    fn dcbsim(&self, root: &Path) -> Result<PathBuf> {
        dcbsim::build(root, &self.kernel, &cache_dir()?)
    }

    /// Soft-iWARP, for the cases of iWARP.
    fn siw(&self) -> Result<PathBuf> {
        siw::build(&self.kernel, &cache_dir()?)
    }

    pub(crate) fn is_emulated(&self) -> bool {
        !self.accelerated
    }

    /// `vng` with all options except the command to run.
    fn command(&self, root: &Path, writable: &Path) -> Command {
        let mut search = std::ffi::OsString::from(&self.virtme);
        search.push(":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        let mut command = Command::new(self.virtme.join("vng"));
        command.env("PATH", search).current_dir(root);
        command.arg("--run").arg(&self.kernel.image);
        if !self.accelerated {
            command.arg("--disable-kvm");
        }
        // 9p needs no daemon. The microvm machine lacks devices that the stock kernel expects.
        command.args([
            "--force-9p",
            "--disable-microvm",
            "--cpus",
            "2",
            "--memory",
            "4G",
            "--user",
            "root",
        ]);
        command.arg(format!("--rwdir={}", writable.display()));
        command
    }

    /// Boots, runs `line` in a shell, and waits for the end. The console output goes to
    /// `OUT/console`.
    pub(crate) fn boot(&self, root: &Path, line: &str, out: &Path, limit: Duration) -> Result<End> {
        let mut group = self.start(root, line, out, out, Machine::Plain)?;
        group.wait(limit)
    }

    /// Boots and returns at once. The guest may write to `writable`, which contains `out`.
    pub(crate) fn start(
        &self,
        root: &Path,
        line: &str,
        out: &Path,
        writable: &Path,
        machine: Machine,
    ) -> Result<Group> {
        let console = process::log_file(&out.join("console"))?;
        let errors = console.try_clone().context("sharing the console's log")?;
        let mut command = self.command(root, writable);
        // Panic messages go to a serial port of their own. The kernel supports one ordinary serial
        // console, which is taken, so keep an early console. The kernel's timer check panics when
        // an emulated CPU has to wait for a real one, so disable it.
        let mut append =
            "earlycon=uart8250,io,0x2f8,115200n8 keep_bootcon loglevel=4 no_timer_check".to_owned();
        let mut options = format!(
            "-serial file:{} {ROOT_TO_KEEP} {FEWER_PORTS}",
            out.join("kernel").display()
        );
        if !self.accelerated {
            append = format!("{append} {EMULATED_KERNEL_ARGUMENTS}");
            let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            if let Some(khz) = counter_khz(&cpuinfo) {
                append = format!("{append} tsc_early_khz={khz}");
            }
            options = format!("{options} {EMULATED_CPU}");
            if !self.parallel {
                options = format!("{options} {ONE_THREAD}");
            }
        }
        let media = match machine {
            Machine::Plain | Machine::NewerKernel => None,
            Machine::Drives => Some(Media::Files),
            Machine::EmptyDrives => Some(Media::Zeroes),
        };
        if let Some(media) = media {
            append = format!("{append} {}", drives::KERNEL_ARGUMENTS);
            let more = drives::prepare(out, self.accelerated, media)?;
            options = format!("{options} {more}");
        }
        command.arg("--append").arg(append);
        command.arg(format!("--qemu-opts={options}"));
        command
            .arg("--exec")
            .arg(line)
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(errors);
        Group::spawn(&mut command)
    }
}

/// True if hardware virtualisation is usable. Some hypervisors provide the device without the CPU
/// extension, and a stock kernel does not boot there; so require the CPU flag as well. The
/// environment variable `NACRE_VM_KVM` (0 or 1) overrides the check.
fn accelerated() -> bool {
    match std::env::var("NACRE_VM_KVM").as_deref() {
        Ok("1") => return true,
        Ok("0") => return false,
        _ => {}
    }
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    device
        && cpu
            .split_whitespace()
            .any(|flag| flag == "vmx" || flag == "svm")
}

/// The rate of this machine's time-stamp counter, which emulated CPUs read too, if `/proc/cpuinfo`
/// has it. On a busy machine the guest's kernel measures a rate that is up to five times too low:
/// its clock then runs too fast, and time limits in the guest are too short.
///
/// A virtual machine without `aperfmperf` has that rate as the rate of its CPUs.
fn counter_khz(cpuinfo: &str) -> Option<u64> {
    let value = |key: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find_map(|(name, value)| (name.trim() == key).then(|| value.trim()))
    };
    let has = |flag| value("flags").is_some_and(|flags| flags.split(' ').any(|one| one == flag));
    if !has("hypervisor") || !has("constant_tsc") || has("aperfmperf") {
        return None;
    }
    let mhz: f64 = value("cpu MHz")?.parse().ok()?;
    (mhz > 0.0).then(|| (mhz * 1000.0).round() as u64)
}

/// The cache for kernels and tools, which outlives a clone of the repository: `NACRE_VM_CACHE`, or
/// `nacre-vm` in the user's cache folder.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("NACRE_VM_CACHE") {
        return Ok(dir.into());
    }
    if let Some(dir) = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        return Ok(Path::new(&dir).join("nacre-vm"));
    }
    let home = std::env::var_os("HOME")
        .context("neither NACRE_VM_CACHE nor HOME says where to keep the kernel")?;
    Ok(Path::new(&home).join(".cache/nacre-vm"))
}

/// An empty folder beside `dir`, so that a partial download is never used.
fn partial(dir: &Path) -> Result<PathBuf> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let partial = dir.with_file_name(format!(".{name}.{}", std::process::id()));
    setup::create_dir(&partial)?;
    Ok(partial)
}

/// Moves a complete download to its place; removes one that failed.
fn finish(partial: &Path, dir: &Path, fetched: Result<()>) -> Result<()> {
    let moved = fetched.and_then(|()| {
        let _ = std::fs::remove_dir_all(dir);
        std::fs::rename(partial, dir).with_context(|| format!("moving it to {}", dir.display()))
    });
    if moved.is_err() {
        let _ = std::fs::remove_dir_all(partial);
    }
    moved
}

/// A package of Debian with its libraries, unpacked in the cache; the root folder of its files.
/// "/" if the package is installed and has `program` (a path below the root folder).
pub(crate) fn unpacked(package: &str, program: &str) -> Result<PathBuf> {
    if Path::new("/").join(program).is_file() {
        return Ok(PathBuf::from("/"));
    }
    let dir = cache_dir()?.join("packages").join(package);
    if !dir.is_dir() {
        println!("fetching {package}");
        let partial = partial(&dir)?;
        let fetched = setup::unpack_with_dependencies(package, &partial, UNPACK_LIMIT);
        finish(&partial, &dir, fetched)?;
    }
    Ok(dir)
}

/// Creates an empty folder for the output of one boot. Removes an old one of the same name.
pub(crate) fn scratch(root: &Path, name: &str) -> Result<PathBuf> {
    let dir = crate::target_dir(root)
        .join("vm")
        .join(format!("{name}-{}", std::process::id()));
    if let Err(error) = std::fs::remove_dir_all(&dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error).with_context(|| format!("emptying {}", dir.display()));
    }
    setup::create_dir(&dir)?;
    dir.canonicalize()
        .with_context(|| format!("resolving {}", dir.display()))
}

/// A path as one word of a shell command.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// Time since `start`, as text.
fn seconds(start: Instant) -> String {
    format!("{:.0} s", start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the rate of the counter is only taken from machines where it is that of the CPUs.
    /// Method: lines of /proc/cpuinfo.
    #[test]
    fn the_rate_of_the_counter_is_that_of_a_virtual_cpu() {
        let cpuinfo = |flags: &str| {
            format!(
                "processor\t: 0\ncpu MHz\t\t: 2299.998\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\ncpu MHz\t\t: 1.0\n"
            )
        };
        let khz = |flags| counter_khz(&cpuinfo(flags));
        assert_eq!(khz("constant_tsc hypervisor"), Some(2_299_998));
        assert_eq!(khz("constant_tsc"), None);
        assert_eq!(khz("hypervisor"), None);
        assert_eq!(khz("constant_tsc aperfmperf hypervisor"), None);
        assert_eq!(counter_khz("flags\t: hypervisor constant_tsc\n"), None);
        assert_eq!(counter_khz(""), None);
    }
}
