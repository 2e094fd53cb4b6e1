//! Part of `cargo xtask bench tcp`: the daemon's CPU time and memory for idle connections, from
//! `/proc`.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process::Group;

const CONNECTIONS: u32 = 64;
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// Wait after the last connection, until reactors that poll before sleeping have gone to sleep.
const SETTLE: Duration = Duration::from_secs(2);
const WATCH: Duration = Duration::from_secs(10);
/// Limit of CPU time, in percent of one core.
const GOAL_PERCENT: f64 = 1.0;

/// Connects [`CONNECTIONS`] idle hosts with the program `idle-hosts` and prints the daemon's CPU
/// time and memory. Returns true if the CPU time is below [`GOAL_PERCENT`].
pub(super) fn measure(idle_hosts: &Path, daemon: u32, address: &str, nqn: &str) -> Result<bool> {
    let before = memory_kib(daemon)?;
    let mut command = Command::new(idle_hosts);
    command
        .args([
            "--address",
            address,
            "--nqn",
            nqn,
            "--connections",
            &CONNECTIONS.to_string(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut hosts = Group::spawn(&mut command)?;
    wait_for_ready(&mut hosts)?;
    thread::sleep(SETTLE);

    let (start, from) = (Instant::now(), processor_seconds(daemon)?);
    thread::sleep(WATCH);
    let percent = (processor_seconds(daemon)? - from) / start.elapsed().as_secs_f64() * 100.0;
    let each = (memory_kib(daemon)? - before) / f64::from(CONNECTIONS);
    println!(
        "\n{CONNECTIONS} idle connections: {percent:.2} % of one core (goal: below {GOAL_PERCENT} %), {each:.0} KiB each"
    );
    Ok(percent < GOAL_PERCENT)
}

fn wait_for_ready(hosts: &mut Group) -> Result<()> {
    let out = hosts.stdout().context("idle-hosts has no output")?;
    let (tx, rx) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(out.take(4096))
            .read_line(&mut line)
            .map(|_| line);
        // The receiver is gone if this took longer than the limit.
        let _ = tx.send(read);
    });
    match rx.recv_timeout(CONNECT_LIMIT) {
        Ok(Ok(line)) if line.trim() == "ready" => Ok(()),
        Ok(said) => bail!("idle-hosts could not connect: {said:?}"),
        Err(_) => bail!(
            "idle-hosts did not connect within {} s",
            CONNECT_LIMIT.as_secs()
        ),
    }
}

fn memory_kib(pid: u32) -> Result<f64> {
    let text = read(pid, "status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .context("no VmRSS in /proc")
}

/// User and system time of all threads. On Linux the kernel reports it in hundredths of a second.
fn processor_seconds(pid: u32) -> Result<f64> {
    ticks(&read(pid, "stat")?)
        .map(|ticks| ticks as f64 / 100.0)
        .context("no times in /proc")
}

/// The sum of utime and stime in `/proc/PID/stat` (fields 14 and 15). Field 2, the program's name,
/// may contain any character and ends at the last parenthesis.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn read(pid: u32, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_after_any_process_name() {
        assert_eq!(
            ticks("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 300 42 0 0 20"),
            Some(342)
        );
        assert_eq!(ticks("7 (short) S 1"), None);
    }

    #[test]
    fn our_own_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(memory_kib(pid).unwrap() > 0.0);
        assert!(processor_seconds(pid).unwrap() >= 0.0);
    }
}
