//! The tests inside the virtual machine, seen from outside.
//!
//! The guest enforces each test's limit itself. When it cannot (a process stuck in the kernel, a crash), the host
//! notices the silence, kills the machine, blames the test that had begun, and boots again for those that are left.
//!
//! ```text
//!   Suite ── a thread per guest ─┬─ boot ── guest.sh ── results ─┐
//!     │                          └──────────── again ────────────┤ while tests wait
//!     └─ Work: Queue, tally  <───────────────────────────────────┘
//! ```

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::events::{Event, Events, Verdict, Watch};
use super::queue::Queue;
use super::work::{Boot, Work};
use super::{Hardware, Vm, drives, quoted, scratch, seconds};
use crate::setup;
use crate::tally::Tally;

/// From the start of QEMU to the first event. Emulated and on a busy machine a boot takes up to half a minute.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
const BUILD_LIMIT: Duration = Duration::from_secs(1500);
/// How much of a failed test's log is shown where it ran, and again at the very end, where nobody has to look for it.
const TAIL_LINES: usize = 40;
const LAST_LINES: usize = 10;

/// What serves the namespaces in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    Nacre,
    /// The kernel's `nvmet-tcp`.
    Nvmet,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Target::Nacre => "nacre",
            Target::Nvmet => "nvmet",
        })
    }
}

/// Which tests, against what.
pub struct Selection {
    pub filter: Vec<String>,
    pub target: Target,
    pub nacre: Option<PathBuf>,
    /// How many guests run side by side; as many as this machine is good for when none.
    pub guests: Option<usize>,
}

/// Boots that run nothing before the rest of the tests is given up: an emulated machine may stumble once.
const BOOTS_IN_VAIN: u32 = 2;

/// Tests that are begun again, in the whole suite, because the emulator killed the guest's kernel.
const STUMBLES: u32 = 2;

/// More than these wait for this machine's disk, and for each other.
const MOST_GUESTS: usize = 3;

/// What a guest takes of this machine's memory: its own, and what QEMU keeps of translated code.
const GUEST_MIB: u64 = 6 << 10;

/// What the tests start in the guest.
struct Programs {
    nacre: PathBuf,
    /// Both ends of RDMA connections, for the test of verbs.
    pingpong: PathBuf,
    /// Brings NVMe drives up through VFIO.
    probe: PathBuf,
    /// The conformance suite of block devices, on NVMe drives.
    conformance: PathBuf,
}

pub fn run(root: &Path, selection: &Selection) -> Result<Tally> {
    let cases = cases(root, &selection.filter)?;
    if cases.is_empty() {
        bail!(
            "no test of the virtual machine matches {:?}",
            selection.filter
        );
    }
    let nacre = match selection.target {
        Target::Nacre => nacre(root, selection.nacre.as_deref())?,
        // Nobody starts it.
        Target::Nvmet => PathBuf::from("/nonexistent"),
    };
    let needed = |name: &str| cases.iter().any(|case| case.ends_with(name));
    let pingpong = if needed("rdma-verbs") {
        example(root, "nacre-rdma-verbs", "pingpong", false)?
    } else {
        PathBuf::from("/nonexistent")
    };
    let probe = if needed("vfio") {
        example(root, "nacre-bdev-nvme-vfio", "probe", false)?
    } else {
        PathBuf::from("/nonexistent")
    };
    let conformance = if needed("conformance") {
        example(root, "nacre-bdev-nvme-vfio", "conformance", true)?
    } else {
        PathBuf::from("/nonexistent")
    };
    let programs = Programs {
        nacre,
        pingpong,
        probe,
        conformance,
    };
    let vm = Vm::prepare()?;
    println!("virtual machine: {}; {} tests", vm.describe(), cases.len());

    let dir = scratch(root, "test")?;
    let taken = dir.join("taken");
    setup::create_dir(&taken)?;
    let mut wanted = Vec::with_capacity(cases.len());
    for case in cases {
        let hardware = hardware(root, &case)?;
        wanted.push((case, hardware));
    }
    let guests = selection.guests.unwrap_or_else(|| guests(&vm)).max(1);
    let lanes = guests.min(wanted.len());
    let suite = Suite {
        root,
        dir,
        vm: &vm,
        target: selection.target,
        programs,
        work: Mutex::new(Work::new(Queue::new(taken, wanted))),
    };
    println!("virtual machine: {lanes} at a time");
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(|| suite.run())).collect();
        lanes.into_iter().try_for_each(|lane| match lane.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let work = suite.work.into_inner().expect("no lane panicked");
    let mut tally = work.tally;
    for name in work.queue.rest() {
        tally.fail(format!("vm {name}: no guest ran it to its end"));
    }
    Ok(tally)
}

/// Whether a filter leaves anything to run, so that no machine is built for nothing.
pub fn matches(root: &Path, filter: &[String]) -> bool {
    // A folder that cannot be read is reported by the suite itself.
    cases(root, filter).map_or(true, |cases| !cases.is_empty())
}

/// Whether a kernel died of a breakpoint of its own. Linux replaces code under way by way of an `int3`, and knows every
/// one that it meets; QEMU, which emulates processors on several threads, now and then runs one that is there no more.
fn emulator_stumbled(last_words: &[u8]) -> bool {
    String::from_utf8_lossy(last_words).contains("Oops: int3")
}

/// How many guests this machine is good for. An emulated one keeps less than one CPU busy, whatever it has itself;
/// with hardware virtualisation one is fast enough.
fn guests(vm: &Vm) -> usize {
    if !vm.is_emulated() {
        return 1;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    (cpus * 3 / 2).min(MOST_GUESTS).min(roomy_for(&memory))
}

/// How many guests the memory of this `/proc/meminfo` is enough for.
fn roomy_for(meminfo: &str) -> usize {
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    available.map_or(1, |kib| (kib / 1024 / GUEST_MIB) as usize)
}

/// What became of a guest.
#[derive(Default)]
struct Outcome {
    ran: usize,
    /// The test in which it hung or died.
    died_in: Option<String>,
}

/// The whole run. Each lane has one guest at a time.
struct Suite<'a> {
    root: &'a Path,
    /// Of all guests, which may write there.
    dir: PathBuf,
    vm: &'a Vm,
    target: Target,
    programs: Programs,
    work: Mutex<Work>,
}

impl Suite<'_> {
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().expect("no lane panicked")
    }

    /// A lane: boots until nothing waits.
    fn run(&self) -> Result<()> {
        loop {
            let Some(boot) = self.work().next() else {
                return Ok(());
            };
            let ended = self.boot(&boot).and_then(|(out, outcome)| {
                let mut work = self.work();
                work.over(boot.hardware);
                self.judge(&mut work, &boot, &out, outcome)
            });
            if ended.is_err() {
                self.work().queue.close();
                return ended;
            }
        }
    }

    fn judge(&self, work: &mut Work, boot: &Boot, out: &Path, outcome: Outcome) -> Result<()> {
        // Where nothing waits any more others were faster.
        let idle = outcome.ran == 0 && outcome.died_in.is_none();
        let left = !work.queue.waiting(boot.hardware).is_empty();
        work.in_vain = if idle {
            work.in_vain + u32::from(left)
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
        if work.in_vain >= BOOTS_IN_VAIN {
            // A machine that boots and runs nothing does so again: the rest has failed.
            println!(
                "virtual machine: the guest ran nothing, see {}",
                out.display()
            );
            work.queue.close();
        }
        Ok(())
    }

    /// One boot, which runs what it takes of the tests that wait. Answers with the folder of what it left.
    fn boot(&self, boot: &Boot) -> Result<(PathBuf, Outcome)> {
        let out = self.dir.join(boot.number.to_string());
        setup::create_dir(&out)?;
        std::fs::write(out.join("cases"), boot.cases.join("\n") + "\n")
            .context("writing the list of tests")?;
        // Emulated, a turn that finds nothing takes what the other guests need.
        let patience = if self.vm.is_emulated() {
            "NACRE_REACTOR_BUSY_POLL_US=0 "
        } else {
            ""
        };
        let line = format!(
            "{patience}TARGET={} TAKEN={} NACRE={} PINGPONG={} PROBE={} CONFORMANCE={} bash {} {}",
            self.target,
            quoted(&self.work().queue.dir),
            quoted(&self.programs.nacre),
            quoted(&self.programs.pingpong),
            quoted(&self.programs.probe),
            quoted(&self.programs.conformance),
            quoted(&self.root.join("tests/vm/guest.sh")),
            quoted(&out),
        );
        let start = Instant::now();
        let mut group = self
            .vm
            .start(self.root, &line, &out, &self.dir, boot.hardware)?;
        let mut events = Events::new(out.join("results"));
        let mut watch = Watch {
            begun: None,
            deadline: start + BOOT_LIMIT,
        };
        let (mut booted, mut ran) = (false, 0);
        loop {
            // The order matters: what a guest wrote before it stopped is read after it was seen to stop.
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
                    // Under the lock, so that what is said of two tests does not mix.
                    let mut work = self.work();
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
        let _one_at_a_time = self.work();
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

/// Empty if there is no such file.
fn read(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The end of a text, each line on one of its own and marked.
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

/// The names of the test scripts, in order.
fn cases(root: &Path, filter: &[String]) -> Result<Vec<String>> {
    let dir = root.join("tests/vm/cases");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        if let Some(name) = file.strip_suffix(".sh")
            && (filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str())))
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// What a test says of the machine that it wants, with a line `# hardware: drives`.
fn hardware(root: &Path, case: &str) -> Result<Hardware> {
    let path = root.join("tests/vm/cases").join(format!("{case}.sh"));
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    hardware_of(&text).with_context(|| format!("in {}", path.display()))
}

fn hardware_of(script: &str) -> Result<Hardware> {
    let wish = script
        .lines()
        .find_map(|line| line.strip_prefix("# hardware: "));
    match wish {
        None => Ok(Hardware::Plain),
        Some("drives") => Ok(Hardware::Drives),
        Some(other) => bail!("there is no hardware {other:?}, only \"drives\""),
    }
}

/// The daemon to test: the one given, or an optimised build (an unoptimised one crawls when emulated).
pub fn nacre(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_path_buf(),
        None => {
            setup::cargo_build(
                root,
                &["--release", "--locked", "--package", "nacre-engine"],
                BUILD_LIMIT,
            )?;
            crate::target_dir(root).join("release/nacre")
        }
    };
    path.canonicalize()
        .with_context(|| format!("finding {}", path.display()))
}

fn example(root: &Path, package: &str, name: &str, optimised: bool) -> Result<PathBuf> {
    let mut arguments = vec!["--locked", "--package", package, "--example", name];
    let mut folder = "debug/examples";
    if optimised {
        arguments.push("--release");
        folder = "release/examples";
    }
    setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
    let path = crate::target_dir(root).join(folder).join(name);
    path.canonicalize()
        .with_context(|| format!("finding {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_say_what_hardware_they_want() {
        let of = |script: &str| hardware_of(script).ok();
        assert_eq!(of("# A goal.\nserve"), Some(Hardware::Plain));
        assert_eq!(
            of("# A goal.\n# hardware: drives\nserve"),
            Some(Hardware::Drives)
        );
        assert_eq!(of("# hardware: disks"), None);
    }

    #[test]
    fn guests_are_as_many_as_there_is_memory_for() {
        let of = |kib: u64| roomy_for(&format!("MemTotal: 1 kB\nMemAvailable:   {kib} kB\n"));
        assert_eq!(of(20 << 20), 3);
        assert_eq!(of(12 << 20), 2);
        assert_eq!(of(5 << 20), 0);
        assert_eq!(roomy_for("MemTotal: 1 kB"), 1);
    }

    #[test]
    fn what_failed_is_told_with_the_end_of_its_log() {
        assert_eq!(quoted_tail("one\ntwo\nthree\n", 2), "\n  | two\n  | three");
        assert_eq!(quoted_tail("one", 2), "\n  | one");
        assert_eq!(quoted_tail("", 2), "");
    }

    #[test]
    fn only_a_breakpoint_of_the_kernels_own_is_the_emulators_fault() {
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
