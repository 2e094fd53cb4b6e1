//! The host's side of the tests in the virtual machine: boots guests, reads their results, and
//! replaces guests that fail.
//!
//! The guest enforces each test's limit. If it cannot (a process is stuck in the kernel, or the
//! kernel crashed), the host gets no event in time and kills the machine. The running test fails,
//! and another guest runs the remaining ones.
//!
//! ```text
//!   Suite ── a thread per guest ─┬─ boot ── guest.sh ── results ─┐
//!     │                          └──────────── again ────────────┤ while tests wait
//!     └─ Work: Queue, tally  <───────────────────────────────────┘
//! ```

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use parking_lot::Mutex;

use super::case::Case;
use super::events::{Event, Events, Verdict, Watch};
use super::queue::Queue;
use super::work::{Boot, Work};
use super::{Machine, Series, Vm, case, drives, quoted, scratch, seconds};
use crate::setup::{self, AT_LENGTH, Unavailable};
use crate::tally::Tally;

/// Time limit from the start of QEMU to the first event. On a busy machine an emulated boot takes
/// up to half a minute.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
const BUILD_LIMIT: Duration = Duration::from_secs(1500);
/// Lines of a failed test's log shown where it ran, and in the summary at the end.
const TAIL_LINES: usize = 40;
const LAST_LINES: usize = 10;

/// The target that serves the namespaces in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    Nacre,
    /// The kernel's `nvmet-tcp`.
    Nvmet,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nacre => "nacre",
            Self::Nvmet => "nvmet",
        })
    }
}

/// Which tests to run, against which target.
pub(crate) struct Selection {
    pub filter: Vec<String>,
    pub target: Target,
    pub nacre: Option<PathBuf>,
    /// Number of guests side by side; `None`: as many as this machine can run.
    pub guests: Option<usize>,
    /// The kernel of the cases that need no particular one.
    pub kernel: Series,
}

/// Consecutive boots without a test result after which the run ends. An emulated machine may fail
/// once.
const MAX_EMPTY_BOOTS: u32 = 2;

/// Most tests that a run repeats because the emulator crashed the guest's kernel.
const STUMBLES: u32 = 2;

/// Most guests at the same time. More would only wait for the machine's disk.
const MOST_GUESTS: usize = 3;

/// Memory of the host per guest: the guest's 4 GiB, at most 1 GiB of QEMU's translated code, and a
/// quarter for the rest of QEMU. A machine of 24 GiB with 16 GiB available runs three guests.
const GUEST_MIB: u64 = (5 << 10) + 256;

/// Programs that the tests start in the guest.
struct Programs {
    nacre: PathBuf,
    /// Both ends of an RDMA connection, for the test of verbs.
    pingpong: PathBuf,
    /// Initialises NVMe drives through VFIO.
    probe: PathBuf,
    /// The conformance suite of bdevs, on NVMe drives.
    conformance: PathBuf,
    /// The kernel module with DCB, and the folder of lldpd's package. An empty path: not available.
    dcbsim: PathBuf,
    lldpd: PathBuf,
    /// The kernel module of soft-iWARP. An empty path: not available.
    siw: PathBuf,
    /// The folder of etcd's package. An empty path: not available.
    etcd: PathBuf,
    /// The checkout of blktests. An empty path: none is named.
    blktests: PathBuf,
}

const NACRE: &[&str] = &["--locked", "--package", "nacre-engine-cli"];

/// A Cargo example that the guest runs, needed by the cases whose names end in `cases`.
struct Example {
    name: &'static str,
    cases: &'static str,
}

const PINGPONG: Example = Example {
    name: "pingpong",
    cases: "rdma-verbs",
};
const PROBE: Example = Example {
    name: "probe",
    cases: "vfio",
};
const CONFORMANCE: Example = Example {
    name: "conformance",
    cases: "conformance",
};

impl Example {
    fn is_needed(&self, cases: &[Case]) -> bool {
        cases.iter().any(|case| case.name.ends_with(self.cases))
    }

    /// Builds the example and returns its path, or a path that does not exist if no case needs it.
    fn build(&self, root: &Path, cases: &[Case]) -> Result<PathBuf> {
        if !self.is_needed(cases) {
            return Ok(PathBuf::from("/nonexistent"));
        }
        // `--workspace` selects the features of libraries as in the build of the tests. With
        // `--package` Cargo would build the libraries again.
        let arguments = ["--locked", "--workspace", "--example", self.name];
        setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
        let dir = crate::target_dir(root).join("debug/examples");
        found(&dir.join(self.name))
    }
}

/// Cases with names that contain this need the kernel module with DCB, or lldpd.
const DCB_CASES: &str = "-dcb-";

/// Cases with names that contain this need the kernel module of soft-iWARP.
const IWARP_CASES: &str = "-iwarp";

/// Cases with names that contain this need etcd.
const ETCD_CASES: &str = "-cluster";

/// Cases with names that contain this need a checkout of blktests, which this variable names.
const BLKTESTS_CASES: &str = "-blktests";
const BLKTESTS: &str = "NACRE_TEST_BLKTESTS";

/// Prints why an optional part is missing, and returns an empty path for it. The cases that need it
/// skip themselves.
fn optional(what: &str, part: Result<PathBuf>) -> PathBuf {
    part.unwrap_or_else(|error| {
        println!("no {what}, the cases that need it are skipped: {error:#}");
        PathBuf::new()
    })
}

fn blktests() -> Option<PathBuf> {
    std::env::var_os(BLKTESTS).map(PathBuf::from)
}

/// Why some of these cases do not run unless they are asked for; `None`: all run.
fn left_out(cases: &[Case]) -> Option<String> {
    let has_blktests = cases.iter().any(|case| case.name.contains(BLKTESTS_CASES));
    (has_blktests && blktests().is_none())
        .then(|| format!("vm blktests: {BLKTESTS} names no checkout of it"))
}

/// [`left_out`], of the cases that the filter selects.
pub(crate) fn not_asked_for(root: &Path, filter: &[String]) -> Result<Option<String>> {
    Ok(left_out(&case::list(root, filter)?))
}

pub(crate) fn run(root: &Path, selection: &Selection) -> Result<Tally> {
    let mut cases = case::list(root, &selection.filter)?;
    if left_out(&cases).is_some() {
        cases.retain(|case| !case.name.contains(BLKTESTS_CASES));
        if cases.is_empty() {
            return Ok(Tally::default());
        }
    }
    if cases.is_empty() {
        bail!(
            "no test of the virtual machine matches {:?}",
            selection.filter
        );
    }
    let vm = Vm::with_kernel(selection.kernel)?;
    let mut set_aside = Tally::default();
    let newer = newer_vm(selection.kernel, &mut cases, &mut set_aside);
    if cases.is_empty() {
        return Ok(set_aside);
    }
    let has_dcb = cases.iter().any(|case| case.name.contains(DCB_CASES));
    let (dcbsim, lldpd) = if has_dcb {
        (
            optional("module dcbsim", vm.dcbsim(root)),
            optional("lldpd", super::unpacked("lldpd", "usr/sbin/lldpd")),
        )
    } else {
        Default::default()
    };
    let has_iwarp = cases.iter().any(|case| case.name.contains(IWARP_CASES));
    let siw = if has_iwarp {
        optional("module siw", vm.siw())
    } else {
        PathBuf::new()
    };
    let has_etcd = cases.iter().any(|case| case.name.contains(ETCD_CASES));
    let etcd = if has_etcd {
        optional("etcd", super::unpacked("etcd-server", "usr/bin/etcd"))
    } else {
        PathBuf::new()
    };
    let programs = Programs {
        dcbsim,
        lldpd,
        siw,
        etcd,
        blktests: blktests().unwrap_or_default(),
        nacre: match selection.target {
            Target::Nacre => debug_nacre(root, selection.nacre.as_deref())?,
            // Not started in this case.
            Target::Nvmet => PathBuf::from("/nonexistent"),
        },
        pingpong: PINGPONG.build(root, &cases)?,
        probe: PROBE.build(root, &cases)?,
        conformance: CONFORMANCE.build(root, &cases)?,
    };
    println!("virtual machine: {}; {} tests", vm.describe(), cases.len());
    if let Some(newer) = &newer {
        println!("virtual machine, newer kernel: {}", newer.describe());
    }

    let dir = scratch(root, "test")?;
    let taken = dir.join("taken");
    setup::create_dir(&taken)?;
    let guests = selection.guests.unwrap_or_else(|| guests(&vm)).max(1);
    let lanes = guests.min(cases.len());
    let suite = Suite {
        root,
        dir,
        vm: &vm,
        newer: newer.as_ref(),
        target: selection.target,
        programs,
        work: Mutex::new(Work::new(Queue::new(taken, cases))),
    };
    println!("virtual machine: {lanes} at a time");
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(|| suite.run())).collect();
        lanes.into_iter().try_for_each(|lane| match lane.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let work = suite.work.into_inner();
    let mut tally = work.tally;
    tally.add(set_aside);
    for name in work.queue.rest() {
        tally.fail(format!("vm {name}: no guest ran it to its end"));
    }
    Ok(tally)
}

/// The reason for the skip of a case that needs the newer kernel. CI tolerates it: an archive that
/// has lost its newer kernels is no fault of this source.
pub(crate) const NO_NEWER_KERNEL: &str = "Debian's archive gives no newer kernel";

/// The machine of the cases that need the newer kernel. An error sets them aside.
fn newer_vm(usual: Series, cases: &mut Vec<Case>, tally: &mut Tally) -> Option<Vm> {
    let needs = |case: &Case| case.machine == Machine::NewerKernel;
    if usual == Series::Newer {
        let newer = cases.iter_mut().filter(|case| needs(case));
        newer.for_each(|case| case.machine = Machine::Plain);
    }
    if !cases.iter().any(needs) {
        return None;
    }
    let vm = Vm::with_kernel(Series::Newer);
    if let Err(error) = &vm {
        for case in cases.extract_if(.., |case| needs(case)) {
            without_newer_kernel(&case.name, error, tally);
        }
    }
    vm.ok()
}

/// A case without its kernel: skipped if the archive lacks it, and failed after any other error.
fn without_newer_kernel(name: &str, error: &anyhow::Error, tally: &mut Tally) {
    if error.is::<Unavailable>() {
        println!("vm {name} ... skipped");
        tally.skip(format!("vm {name}: {NO_NEWER_KERNEL}: {error:#}"));
    } else {
        println!("vm {name} ... FAILED");
        tally.fail(format!("vm {name}: preparing the newer kernel: {error:#}"));
    }
}

/// True if the filter selects a test: otherwise no machine needs to be prepared.
pub(crate) fn matches(root: &Path, filter: &[String]) -> bool {
    // The suite itself reports an unreadable folder.
    case::list(root, filter).map_or(true, |cases| !cases.is_empty())
}

/// True if the kernel died of its own breakpoint. Linux patches live code through an `int3` and
/// handles each one that it hits. QEMU's multi-threaded emulation sometimes executes an `int3`
/// after its removal.
fn emulator_stumbled(last_words: &[u8]) -> bool {
    String::from_utf8_lossy(last_words).contains("Oops: int3")
}

/// Number of guests for this machine. An emulated guest keeps less than one host CPU busy; with
/// hardware virtualisation one guest is fast enough.
fn guests(vm: &Vm) -> usize {
    if !vm.is_emulated() {
        return 1;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (cpus * 3 / 2)
        .min(MOST_GUESTS)
        .min(guests_that_fit(setup::available_mib()))
}

/// Number of guests that fit into this much memory.
fn guests_that_fit(available_mib: Option<u64>) -> usize {
    available_mib.map_or(1, |mib| (mib / GUEST_MIB) as usize)
}

/// The result of one guest.
#[derive(Default)]
struct Outcome {
    ran: usize,
    /// The test during which the guest hung or died.
    died_in: Option<String>,
}

/// One run of the suite. Several threads each boot one guest at a time.
struct Suite<'a> {
    root: &'a Path,
    /// The folder of all guests, which they may write.
    dir: PathBuf,
    vm: &'a Vm,
    newer: Option<&'a Vm>,
    target: Target,
    programs: Programs,
    work: Mutex<Work>,
}

impl Suite<'_> {
    /// One thread's loop: boots guests until no test waits.
    fn run(&self) -> Result<()> {
        loop {
            let Some(boot) = self.work.lock().next() else {
                return Ok(());
            };
            let ended = self.boot(&boot).and_then(|(out, outcome)| {
                let mut work = self.work.lock();
                work.over(boot.machine);
                self.count_outcome(&mut work, &boot, &out, outcome)
            });
            if ended.is_err() {
                self.work.lock().queue.close();
                return ended;
            }
        }
    }

    fn count_outcome(
        &self,
        work: &mut Work,
        boot: &Boot,
        out: &Path,
        outcome: Outcome,
    ) -> Result<()> {
        // Count a guest that ran nothing although tests wait. If none waits, the other guests took
        // the tests.
        let idle = outcome.ran == 0 && outcome.died_in.is_none();
        let left = !work.queue.waiting(boot.machine).is_empty();
        work.empty_boots = if idle {
            work.empty_boots + u32::from(left)
        } else {
            0
        };
        if let Some(name) = outcome.died_in {
            let last_words = std::fs::read(out.join("kernel")).unwrap_or_default();
            if work.stumbles < STUMBLES && self.vm.is_emulated() && emulator_stumbled(&last_words) {
                work.stumbles += 1;
                println!(
                    "vm {name} ... once more: the emulator ran code that the kernel was replacing"
                );
                return work.put_back(&name);
            }
            work.queue.ended(&name);
            work.tally
                .fail(format!("vm {name}: the guest hung or died"));
        }
        if work.empty_boots >= MAX_EMPTY_BOOTS {
            // A machine that runs nothing in several boots will not recover: the remaining tests
            // fail.
            println!(
                "virtual machine: the guest ran nothing, see {}",
                out.display()
            );
            work.queue.close();
        }
        Ok(())
    }

    /// One boot, which takes and runs waiting tests. Returns its output folder and the result.
    fn boot(&self, boot: &Boot) -> Result<(PathBuf, Outcome)> {
        let out = self.dir.join(boot.number.to_string());
        setup::create_dir(&out)?;
        std::fs::write(out.join("cases"), boot.cases.join("\n") + "\n")
            .context("writing the list of tests")?;
        // When emulated, idle polling takes CPU time from the other guests.
        let patience = if self.vm.is_emulated() {
            "NACRE_REACTOR_BUSY_POLL_US=0 "
        } else {
            ""
        };
        let line = format!(
            "{patience}TARGET={} TAKEN={} NACRE={} PINGPONG={} PROBE={} CONFORMANCE={} DCBSIM={} LLDPD={} SIW={} ETCD={} BLKTESTS={} {AT_LENGTH}={} bash {} {}",
            self.target,
            quoted(&self.work.lock().queue.dir),
            quoted(&self.programs.nacre),
            quoted(&self.programs.pingpong),
            quoted(&self.programs.probe),
            quoted(&self.programs.conformance),
            quoted(&self.programs.dcbsim),
            quoted(&self.programs.lldpd),
            quoted(&self.programs.siw),
            quoted(&self.programs.etcd),
            quoted(&self.programs.blktests),
            quoted(Path::new(&std::env::var_os(AT_LENGTH).unwrap_or_default())),
            quoted(&self.root.join("tests/vm/guest.sh")),
            quoted(&out),
        );
        let start = Instant::now();
        let vm = match boot.machine {
            Machine::NewerKernel => self.newer.context("the newer kernel is missing")?,
            _ => self.vm,
        };
        let mut group = vm.start(self.root, &line, &out, &self.dir, boot.machine)?;
        let mut events = Events::new(out.join("results"));
        let mut watch = Watch {
            begun: None,
            deadline: start + BOOT_LIMIT,
        };
        let (mut booted, mut ran) = (false, 0);
        loop {
            // Check for the end first, then read: events written before the end are then all seen.
            let stopped = group.try_wait()?.is_some();
            for event in events.read()? {
                if !std::mem::replace(&mut booted, true) {
                    println!("virtual machine: up after {}", seconds(start));
                }
                watch.apply(&event);
                if let Event::End {
                    name,
                    verdict,
                    took,
                } = event
                {
                    // Print under the lock, so that the reports of two tests do not mix.
                    let mut work = self.work.lock();
                    report(&out, &name, verdict, took, &mut work.tally);
                    work.queue.ended(&name);
                    ran += 1;
                }
            }
            if stopped {
                break;
            }
            if Instant::now() >= watch.deadline {
                group.kill();
                break;
            }
            std::thread::sleep(Duration::from_millis(250));
        }
        drives::clean(&out);
        let _one_at_a_time = self.work.lock();
        if let Some(name) = &watch.begun {
            println!("vm {name} ... the guest hung or died");
            show_tail("log", &out.join("logs").join(format!("{name}.log")));
            show_tail("kernel log", &out.join("dmesg"));
            show_tail("kernel's last words", &out.join("kernel"));
            show_tail("console", &out.join("console"));
        } else if !booted {
            println!("virtual machine: no sign of life after {}", seconds(start));
            show_tail("kernel", &out.join("kernel"));
            show_tail("console", &out.join("console"));
        }
        let died_in = watch.begun;
        Ok((out, Outcome { ran, died_in }))
    }
}

fn report(out: &Path, name: &str, verdict: Verdict, took: f64, tally: &mut Tally) {
    let log = out.join("logs").join(format!("{name}.log"));
    match verdict {
        Verdict::Pass => {
            println!("vm {name} ... ok ({took:.0} s)");
            tally.pass();
        }
        Verdict::Skip => {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let why = text
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix("SKIPPED: "));
            println!("vm {name} ... skipped");
            tally.skip(format!("vm {name}: {}", why.unwrap_or("no reason given")));
        }
        Verdict::Fail => {
            println!("vm {name} ... FAILED ({took:.0} s)");
            show_tail("log", &log);
            show_tail(
                "daemon",
                &out.join("logs").join(format!("{name}.daemon.log")),
            );
            show_tail(
                "kernel log",
                &out.join("logs").join(format!("{name}.dmesg")),
            );
            let daemon = out.join("logs").join(format!("{name}.daemon.log"));
            let ends = [&log, &daemon].map(|path| quoted_tail(&read(path), LAST_LINES));
            tally.fail(format!("vm {name}: see {}{}", log.display(), ends.concat()));
        }
    }
}

/// The text of a file; empty if it does not exist.
fn read(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The last lines of a text, each on its own line and marked.
fn quoted_tail(text: &str, most: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(most)..].iter();
    tail.map(|line| format!("\n  | {line}")).collect()
}

fn show_tail(what: &str, path: &Path) {
    let tail = quoted_tail(&read(path), TAIL_LINES);
    if !tail.is_empty() {
        println!("  --- {what}: {}{tail}", path.display());
    }
}

/// The daemon that the build of the other tests made. Cargo would build it again for its package
/// alone, because the tests of the workspace turn on more features of its libraries (`testing`).
pub(crate) fn built_nacre(root: &Path) -> Result<PathBuf> {
    found(&crate::target_dir(root).join("debug/nacre"))
}

/// The daemon for tests: the given one, or a build without optimisation.
pub(crate) fn debug_nacre(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    given.map_or_else(|| nacre(root, NACRE, "debug"), found)
}

/// The daemon for measurements: the given one, or an optimised build.
pub(crate) fn fast_nacre(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    let arguments = [&["--release"], NACRE].concat();
    given.map_or_else(|| nacre(root, &arguments, "release"), found)
}

fn nacre(root: &Path, arguments: &[&str], folder: &str) -> Result<PathBuf> {
    setup::cargo_build(root, arguments, BUILD_LIMIT)?;
    found(&crate::target_dir(root).join(folder).join("nacre"))
}

fn found(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .with_context(|| format!("finding {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: cases do not vanish if a kernel is there and cannot be used. Method: an error of the
    /// archive with context, and another one.
    #[test]
    fn only_an_archive_without_the_kernel_skips_a_case() {
        let mut tally = Tally::default();
        let absent = anyhow::anyhow!("404")
            .context(Unavailable)
            .context("fetching");
        without_newer_kernel("118", &absent, &mut tally);
        without_newer_kernel("326", &anyhow::anyhow!("depmod is missing"), &mut tally);
        assert_eq!(tally.skipped.len(), 1);
        assert!(tally.skipped[0].starts_with(&format!("vm 118: {NO_NEWER_KERNEL}: fetching")));
        assert_eq!(
            tally.failures,
            ["vm 326: preparing the newer kernel: depmod is missing"]
        );
    }

    #[test]
    fn memory_limits_the_number_of_guests() {
        assert_eq!(guests_that_fit(Some(16 << 10)), 3);
        assert_eq!(guests_that_fit(Some(12 << 10)), 2);
        assert_eq!(guests_that_fit(Some(5 << 10)), 0);
        assert_eq!(guests_that_fit(None), 1);
    }

    #[test]
    fn failures_show_the_end_of_the_log() {
        assert_eq!(quoted_tail("one\ntwo\nthree\n", 2), "\n  | two\n  | three");
        assert_eq!(quoted_tail("one", 2), "\n  | one");
        assert_eq!(quoted_tail("", 2), "");
    }

    #[test]
    fn only_a_kernel_breakpoint_counts_as_an_emulator_failure() {
        let int3 = b"[   80.400675] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\n[   80.402169] CPU: 0 UID: 0 PID: 0";
        assert!(emulator_stumbled(int3));
        for words in [
            "",
            "BUG: kernel NULL pointer dereference, address: 0000000000000008\nOops: Oops: 0002 [#1] PREEMPT SMP NOPTI",
            "Kernel panic - not syncing: Fatal exception in interrupt",
        ] {
            assert!(!emulator_stumbled(words.as_bytes()), "{words}");
        }
    }
}
