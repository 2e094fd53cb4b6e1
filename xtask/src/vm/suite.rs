//! The tests inside the virtual machine, seen from outside.
//!
//! The guest appends one line per event to `OUT/results`, and the host reads them as they come:
//!
//! ```text
//! begin <name> <limit in seconds>
//! end <name> pass|fail|skip <seconds>
//! dirty <name>            the guest could not be brought back to a clean state: boot again for the rest
//! done                    nothing is left to run
//! ```
//!
//! The guest enforces each test's limit itself. When it cannot (a process stuck in the kernel, a crash), the host
//! notices the silence, kills the machine, blames the test that had begun, and boots again for those that are left.

use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::{Hardware, Vm, drives, quoted, scratch, seconds};
use crate::setup;
use crate::tally::Tally;

/// From the start of QEMU to the first event. Emulated and on a busy machine a boot takes up to half a minute.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// What a test may overrun its own limit before the host stops waiting for the guest to end it.
const GRACE: Duration = Duration::from_secs(90);
const BUILD_LIMIT: Duration = Duration::from_secs(1500);
/// How much of a failed test's log is shown.
const TAIL_LINES: usize = 40;

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
}

/// Boots that run nothing before the rest of the tests is given up: an emulated machine may stumble once.
const BOOTS_IN_VAIN: u32 = 2;

/// Tests that are begun again, in the whole suite, because the emulator killed the guest's kernel.
const STUMBLES: u32 = 2;

/// What the tests start in the guest.
struct Programs {
    nacre: PathBuf,
    /// Both ends of RDMA connections, for the test of verbs.
    pingpong: PathBuf,
    /// Brings NVMe drives up through VFIO.
    probe: PathBuf,
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
    let pingpong = match needed("rdma-verbs") {
        true => example(root, "nacre-rdma-verbs", "pingpong")?,
        false => PathBuf::from("/nonexistent"),
    };
    let probe = match needed("vfio") {
        true => example(root, "nacre-bdev-nvme-vfio", "probe")?,
        false => PathBuf::from("/nonexistent"),
    };
    let programs = Programs {
        nacre,
        pingpong,
        probe,
    };
    let vm = Vm::prepare()?;
    println!("virtual machine: {}; {} tests", vm.describe(), cases.len());

    let mut tally = Tally::default();
    let mut left = VecDeque::from(cases);
    let (mut boots, mut in_vain, mut stumbles) = (0, 0, 0);
    while !left.is_empty() {
        boots += 1;
        let before = left.len();
        let out = scratch(root, &format!("test-{boots}"))?;
        let died_in = boot(root, &vm, selection, &programs, &out, &mut left, &mut tally)?;
        if let Some(name) = died_in {
            let last_words = std::fs::read(out.join("kernel")).unwrap_or_default();
            if stumbles < STUMBLES && vm.is_emulated() && emulator_stumbled(&last_words) {
                stumbles += 1;
                println!(
                    "vm {name} ... once more: the emulator ran code that the kernel was replacing"
                );
                continue;
            }
            tally.fail(format!("vm {name}: the guest hung or died"));
            left.retain(|case| *case != name);
        }
        if left.len() != before {
            continue;
        }
        in_vain += 1;
        if in_vain == BOOTS_IN_VAIN {
            // A machine that boots and runs nothing does so again: the rest has failed.
            for name in left.drain(..) {
                tally.fail(format!(
                    "vm {name}: the guest ran nothing, see {}",
                    out.display()
                ));
            }
        }
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

/// One boot, of the machine that the first test wants, with all tests that want the same: takes those that have ended off
/// `left`, whatever way they ended. Answers with the one in which the guest hung or died.
fn boot(
    root: &Path,
    vm: &Vm,
    selection: &Selection,
    programs: &Programs,
    out: &Path,
    left: &mut VecDeque<String>,
    tally: &mut Tally,
) -> Result<Option<String>> {
    let hardware = left
        .front()
        .map_or(Ok(Hardware::Plain), |case| hardware(root, case))?;
    let mut names = Vec::new();
    for case in left.iter() {
        if self::hardware(root, case)? == hardware {
            names.push(case.as_str());
        }
    }
    std::fs::write(out.join("cases"), names.join("\n") + "\n")
        .context("writing the list of tests")?;
    let line = format!(
        "TARGET={} NACRE={} PINGPONG={} PROBE={} bash {} {}",
        selection.target,
        quoted(&programs.nacre),
        quoted(&programs.pingpong),
        quoted(&programs.probe),
        quoted(&root.join("tests/vm/guest.sh")),
        quoted(out),
    );
    let start = Instant::now();
    let mut group = vm.start(root, &line, out, hardware)?;
    let mut events = Events::new(out.join("results"));
    let mut watch = Watch {
        begun: None,
        deadline: start + BOOT_LIMIT,
    };
    let mut booted = false;
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
                report(out, &name, verdict, took, tally);
                left.retain(|case| *case != name);
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
    drives::clean(out);
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
    Ok(watch.begun)
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
            tally.fail(format!("vm {name}: see {}", log.display()));
        }
    }
}

fn show_tail(what: &str, path: &Path) {
    let Ok(bytes) = std::fs::read(path) else {
        return;
    };
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    if lines.is_empty() {
        return;
    }
    println!("  --- {what}: {}", path.display());
    for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
        println!("  | {line}");
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

fn example(root: &Path, package: &str, name: &str) -> Result<PathBuf> {
    let arguments = ["--locked", "--package", package, "--example", name];
    setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
    let path = crate::target_dir(root).join("debug/examples").join(name);
    path.canonicalize()
        .with_context(|| format!("finding {}", path.display()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Pass,
    Fail,
    Skip,
}

#[derive(Debug, Clone, PartialEq)]
enum Event {
    Begin {
        name: String,
        limit: Duration,
    },
    End {
        name: String,
        verdict: Verdict,
        took: f64,
    },
    Dirty,
    Done,
}

fn parse(line: &str) -> Result<Event> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let event = match *words.as_slice() {
        ["begin", name, limit] => Event::Begin {
            name: name.to_owned(),
            limit: Duration::from_secs(limit.parse()?),
        },
        ["end", name, verdict, took] => Event::End {
            name: name.to_owned(),
            verdict: match verdict {
                "pass" => Verdict::Pass,
                "skip" => Verdict::Skip,
                "fail" => Verdict::Fail,
                other => bail!("a verdict that is none: {other}"),
            },
            took: took.parse()?,
        },
        ["dirty", _] => Event::Dirty,
        ["done"] => Event::Done,
        _ => bail!("no event: {line:?}"),
    };
    Ok(event)
}

/// What the guest is doing, and until when it may.
struct Watch {
    begun: Option<String>,
    deadline: Instant,
}

impl Watch {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Begin { name, limit } => {
                self.begun = Some(name.clone());
                self.deadline = Instant::now() + *limit + GRACE;
            }
            Event::End { .. } => {
                self.begun = None;
                self.deadline = Instant::now() + GRACE;
            }
            // It is about to stop by itself.
            Event::Dirty | Event::Done => self.deadline = Instant::now() + GRACE,
        }
    }
}

/// A file that grows, read by whole lines.
struct Events {
    path: PathBuf,
    seen: usize,
}

impl Events {
    fn new(path: PathBuf) -> Events {
        Events { path, seen: 0 }
    }

    fn read(&mut self) -> Result<Vec<Event>> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(error).with_context(|| format!("reading {}", self.path.display()));
            }
        };
        let fresh = bytes.get(self.seen..).unwrap_or_default();
        let whole = fresh
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |at| at + 1);
        self.seen += whole;
        String::from_utf8_lossy(&fresh[..whole])
            .lines()
            .map(parse)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_by_whole_lines_and_once() {
        let dir = std::env::temp_dir().join(format!("nacre-xtask-events-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("results");
        let mut events = Events::new(path.clone());
        assert!(events.read().unwrap().is_empty());
        std::fs::write(&path, "begin connect 60\nend conn").unwrap();
        let begun = Event::Begin {
            name: "connect".into(),
            limit: Duration::from_secs(60),
        };
        assert_eq!(events.read().unwrap(), [begun]);
        std::fs::write(&path, "begin connect 60\nend connect pass 2.5\n").unwrap();
        let ended = Event::End {
            name: "connect".into(),
            verdict: Verdict::Pass,
            took: 2.5,
        };
        assert_eq!(events.read().unwrap(), [ended]);
        assert!(events.read().unwrap().is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }

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
    fn a_line_that_is_no_event_is_refused() {
        for line in ["", "begin x", "end x maybe 1", "end x pass long", "hello"] {
            assert!(parse(line).is_err(), "{line}");
        }
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

    #[test]
    fn a_test_that_has_begun_is_blamed_until_it_ends() {
        let mut watch = Watch {
            begun: None,
            deadline: Instant::now(),
        };
        watch.apply(&parse("begin fio 30").unwrap());
        assert_eq!(watch.begun.as_deref(), Some("fio"));
        watch.apply(&parse("end fio fail 3").unwrap());
        assert_eq!(watch.begun, None);
    }
}
