//! `nacre test failover`: sets the ANA state of a listener to inaccessible for a time and restores
//! it, under verified I/O of this program. The command checks that this I/O and that of the hosts
//! moves.

use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::time::Duration;

use clap::Args;
use nacre_engine_load::multipath::{FailoverJob, FailoverLoad, Mount, Shape, TestPhase};
use nacre_nvmf::address::IpTransport;
use serde_json::Value;

use super::super::address::ListenUrl;
use super::super::perf::Interrupt;
use super::super::remote::{OwnHost, usage};
use super::super::{Connection, Failure, output};
use super::hosts::{HostIo, Snapshots, host_reports};
use super::paths::{self, Place, TestedListener, usage_or_failed};
use super::show;
use super::verdict::{Findings, plan};
use nacre_engine::methods::nvmf::connected::{GetQpairs, SubsystemParams};
use nacre_engine::methods::nvmf::failover::{TestFailover, TestFailoverParams};
use nacre_engine_values::size::parse_bytes;
use nacre_engine_values::time;

pub(super) const HELP: &str = "The daemon makes the listener inaccessible (ANA). Hosts with multipath move \
    their I/O to another path. The states return after the time, after Ctrl-C and after a failure. \
    If this command is killed, the daemon restores them 10 s after the time. Nothing is stored.\n\n\
    Without --overwrite the test only reads, and compares all paths. With it, the data in the range \
    is lost.\n\nExit codes: 0 passed, 1 failed, 2 wrong usage, 3 cannot connect, 4 the daemon \
    refused.\n\nExamples:\n  nacre test failover vol0 --listener rdma://192.0.2.1:4420 --to tcp \
    --for 30s\n  nacre test failover nqn.2025-01.io.nacre:vol0 --listener rdma://192.0.2.1 \
    --overwrite --offset 1GiB --range 64MiB\n  nacre test failover vol0 --listener \
    rdma://192.0.2.1 --restore";

#[derive(Debug, Args)]
pub(super) struct FailoverArgs {
    /// NQN of the subsystem, or name of the published volume or device [default: the subsystem of
    /// the listener]
    subsystem: Option<String>,
    /// The listener to take out of use, such as rdma://192.0.2.1:4420
    #[arg(long, value_name = "ADDRESS")]
    listener: ListenUrl,
    /// Transport that must take over: tcp or rdma [default: any]
    #[arg(long, value_name = "TRANSPORT", value_parser = parse_transport)]
    to: Option<IpTransport>,
    /// How long the listener is out of use
    #[arg(long = "for", value_name = "TIME", default_value = "30s", value_parser = time::above_zero)]
    time: Duration,
    /// How long to measure before and after
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::above_zero)]
    around: Duration,
    /// Time for hosts to move, which is not counted
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time::parse)]
    settle: Duration,
    /// Longest pause of I/O that passes
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::above_zero)]
    max_pause: Duration,
    #[command(flatten)]
    place: Place,
    /// Bytes to use [default: at most 16MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    range: Option<u64>,
    /// I/Os per second
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    rate: u64,
    /// I/Os in flight
    #[arg(short, long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(paths::IN_FLIGHT))]
    depth: u16,
    /// Bytes per I/O
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = paths::io_bytes)]
    size: u64,
    /// Test even if a connected host has no other path: its I/O waits or fails
    #[arg(long)]
    force: bool,
    /// Only end a test that is running
    #[arg(long)]
    restore: bool,
    /// No line for each second
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    own: OwnHost,
}

/// Bytes of the range unless given.
const RANGE: u64 = 16 << 20;
/// The daemon restores the states this long after the test should have ended.
const LEASE: Duration = Duration::from_secs(10);
/// The daemon's limit of an hour, without the lease.
const LONGEST: Duration = Duration::from_secs(3590);
/// Time for this program to see the restored states.
const RETURN: Duration = Duration::from_secs(10);
/// Time for the I/O in flight at the end.
const DRAIN: Duration = Duration::from_secs(35);

fn parse_transport(text: &str) -> Result<IpTransport, String> {
    text.parse::<IpTransport>()
        .map_err(|error| error.to_string())
}

pub(super) fn run(connection: &Connection, args: &FailoverArgs) -> Result<(), Failure> {
    if args.time > LONGEST {
        let most = LONGEST.as_secs();
        return Err(Failure::Usage(format!("--for: at most {most} s")));
    }
    let mut client = connection.open()?;
    let nqn = paths::subsystem(&mut client, args.subsystem.as_deref(), Some(&args.listener))?;
    let listeners = paths::listeners(&mut client, &nqn)?;
    let daemon = TestedDaemon {
        connection,
        nqn: &nqn,
        args,
        urls: listeners.iter().map(|one| one.url.clone()).collect(),
    };
    if args.restore {
        daemon.test(Duration::ZERO)?;
        return Ok(());
    }
    let withdrawn = plan(&listeners, &args.listener, args.to).map_err(Failure::Usage)?;
    daemon.check_hosts(&listeners)?;
    let (mount, withdrawn) = daemon.mount(&listeners, withdrawn)?;
    let mut findings = measure(&daemon, mount, withdrawn)?;
    findings.evaluate();
    if connection.json {
        output::json(&serde_json::to_value(&findings).expect("findings serialise"))?;
    } else {
        show::findings(&findings)?;
    }
    match &findings.failures[..] {
        [] => Ok(()),
        failures => Err(Failure::Failed(anyhow::anyhow!(
            "the failover test failed: {}",
            failures.join("; ")
        ))),
    }
}

/// The daemon's side of a test.
struct TestedDaemon<'a> {
    connection: &'a Connection,
    nqn: &'a str,
    args: &'a FailoverArgs,
    /// The listeners of the subsystem.
    urls: Vec<ListenUrl>,
}

impl TestedDaemon<'_> {
    /// Starts a test of this length, or ends it if that is zero.
    fn test(&self, time: Duration) -> Result<Value, Failure> {
        let params = TestFailoverParams {
            nqn: self.nqn.to_owned(),
            listen_address: self.args.listener.params(),
            seconds: u32::try_from(time.as_secs()).unwrap_or(u32::MAX),
            to: self.args.to.map(|to| to.word().to_owned()),
            force: self.args.force,
            tgt_name: None,
        };
        self.connection.call_for_json::<TestFailover>(&params)
    }

    fn snapshot(&self, own: &BTreeSet<u64>) -> Result<HostIo, Failure> {
        let params = SubsystemParams {
            nqn: self.nqn.to_owned(),
            tgt_name: None,
        };
        let qpairs = self.connection.call_for_json::<GetQpairs>(&params)?;
        Ok(HostIo::read(&qpairs, own, &self.urls))
    }

    /// Refuses where a host would lose its only path. The daemon checks this again, but then this
    /// program's own paths may look like those of the kernel's host on this machine.
    fn check_hosts(&self, listeners: &[TestedListener]) -> Result<(), Failure> {
        let listener = self.args.listener.to_string();
        let accessible = listeners.iter().filter(|one| one.is_accessible());
        let names = accessible.map(|one| one.url.to_string());
        let others: Vec<String> = names.filter(|name| *name != listener).collect();
        let lonely = self
            .snapshot(&BTreeSet::new())?
            .without_path(&listener, &others);
        if self.args.force || lonely.is_empty() {
            return Ok(());
        }
        Err(Failure::Failed(anyhow::anyhow!(
            "no other accessible path: {}; connect every path of these hosts (nvme connect-all), \
                or --force",
            lonely.join(", ")
        )))
    }

    /// Connects every accessible listener. Returns also the index of the path to withdraw.
    fn mount(
        &self,
        listeners: &[TestedListener],
        withdrawn: usize,
    ) -> Result<(Mount, usize), Failure> {
        let args = self.args;
        let shape = Shape {
            depth: args.depth,
            io_bytes: u32::try_from(args.size).map_err(usage)?,
        };
        let mut open = Vec::new();
        let mut index = 0;
        for (at, listener) in listeners.iter().enumerate() {
            if !listener.is_accessible() {
                continue;
            }
            if at == withdrawn {
                index = open.len();
            }
            open.push(paths::open(
                listener,
                self.nqn,
                args.place.nsid,
                shape,
                &args.own,
            )?);
        }
        let mount =
            Mount::new(open, (args.place.offset, args.range, RANGE)).map_err(usage_or_failed)?;
        if args.place.overwrite && mount.is_read_only() {
            let cause = "--overwrite: the namespace is write protected";
            return Err(Failure::Usage(cause.into()));
        }
        Ok((mount, index))
    }
}

/// Restores the states when it is dropped.
struct FailoverGuard<'a> {
    daemon: &'a TestedDaemon<'a>,
    ended: bool,
}

impl FailoverGuard<'_> {
    fn end(&mut self) -> Result<(), Failure> {
        self.daemon.test(Duration::ZERO)?;
        self.ended = true;
        Ok(())
    }
}

impl Drop for FailoverGuard<'_> {
    fn drop(&mut self) {
        if !self.ended
            && let Err(error) = self.daemon.test(Duration::ZERO)
        {
            eprintln!("warning: the states are not restored yet, the daemon does it soon: {error}");
        }
    }
}

/// A running test: its load, and what the user sees of it.
struct Run<'a> {
    daemon: &'a TestedDaemon<'a>,
    load: FailoverLoad,
    own: BTreeSet<u64>,
    interrupt: Interrupt,
    names: Vec<String>,
    shown: usize,
    quiet: bool,
}

fn measure(daemon: &TestedDaemon, mut mount: Mount, withdrawn: usize) -> Result<Findings, Failure> {
    let args = daemon.args;
    let names = mount.names();
    let own = mount.paths().iter().map(|path| path.cntlid().into());
    let own: BTreeSet<u64> = own.collect();
    let nsid = mount.geometry().0.0;
    let job = FailoverJob {
        writes: args.place.overwrite,
        depth: args.depth,
        rate: args.rate,
        seed: uuid::Uuid::new_v4().as_u64_pair().0,
    };
    let mut run = Run {
        daemon,
        load: FailoverLoad::new(mount, job),
        own,
        interrupt: Interrupt::listen(),
        names: names.clone(),
        shown: 0,
        quiet: args.quiet || daemon.connection.json,
    };
    let interrupt = &run.interrupt;
    let mut failed_passes = run.load.prepare(&mut || !interrupt.seen());
    let mut snapshots = Snapshots::default();
    let mut not_restored = None;
    let outcome = run.phases(&mut snapshots, &mut not_restored);
    let unfinished = run.load.drain(DRAIN);
    let now = run.load.now();
    let phases = run.load.record().phases(now);
    let interrupted = run.interrupt.seen();
    if unfinished == 0 && outcome.is_ok() && !interrupted {
        let interrupt = &run.interrupt;
        failed_passes.extend(run.load.compare(&mut || !interrupt.seen()));
    }
    outcome?;
    let losses = run.load.mount().paths().iter().map(|path| path.losses());
    let connections_lost = losses.sum();
    let findings = Findings {
        schema: Findings::SCHEMA,
        subsystem: daemon.nqn.to_owned(),
        listener: args.listener.to_string(),
        nsid,
        paths: names,
        withdrawn_path: withdrawn,
        to: args.to.map(|to| to.word().to_owned()),
        writes: args.place.overwrite,
        seconds: run.load.record().seconds().to_vec(),
        phases,
        contents: run.load.contents().report().clone(),
        errors: run.load.record().errors.clone(),
        unfinished,
        failed_passes,
        connections_lost,
        hosts: host_reports(&snapshots, &args.listener.to_string()),
        not_restored,
        interrupted,
        max_pause_ms: args.max_pause.as_secs_f64() * 1e3,
        failures: Vec::new(),
        warnings: Vec::new(),
    };
    run.load.finish();
    Ok(findings)
}

impl Run<'_> {
    fn phases(
        &mut self,
        snapshots: &mut Snapshots,
        not_restored: &mut Option<String>,
    ) -> Result<(), Failure> {
        let (daemon, args) = (self.daemon, self.daemon.args);
        snapshots.before.0 = self.snapshot()?;
        if !self.go_on(args.around)? {
            return Ok(());
        }
        snapshots.before.1 = self.snapshot()?;
        self.during(|| daemon.test(args.time + LEASE))?;
        let mut withdrawal = FailoverGuard {
            daemon,
            ended: false,
        };
        self.load.enter(TestPhase::Withdrawn);
        self.print(&format!(
            "{} is inaccessible for {} s",
            args.listener,
            args.time.as_secs()
        ))?;
        let settle = args.settle.min(args.time / 2);
        let mut goes_on = self.go_on(settle)?;
        snapshots.withdrawn.0 = self.snapshot()?;
        if goes_on {
            goes_on = self.go_on(args.time - settle)?;
        }
        snapshots.withdrawn.1 = self.snapshot()?;
        let restored = self.during(|| withdrawal.end());
        self.load.enter(TestPhase::After);
        if let Err(error) = restored {
            *not_restored = Some(format!(
                "cannot restore {}, the daemon does it within {} s: {error}",
                args.listener,
                LEASE.as_secs()
            ));
            withdrawal.ended = true;
            return Ok(());
        }
        self.print(&format!("{} is restored", args.listener))?;
        let begin = self.load.now();
        while goes_on
            && self.load.now().since(begin) < RETURN
            && !self
                .load
                .mount()
                .paths()
                .iter_mut()
                .all(|path| path.is_accessible())
        {
            self.turn()?;
            goes_on = !self.interrupt.seen();
        }
        if goes_on {
            goes_on = self.go_on(args.settle)?;
        }
        snapshots.after.0 = self.snapshot()?;
        if goes_on {
            self.go_on(args.around)?;
        }
        snapshots.after.1 = self.snapshot()?;
        Ok(())
    }

    fn snapshot(&mut self) -> Result<HostIo, Failure> {
        let (daemon, own) = (self.daemon, self.own.clone());
        self.during(|| daemon.snapshot(&own))
    }

    /// Runs a call to the daemon on another thread, so that the I/O continues meanwhile.
    fn during<T: Send>(
        &mut self,
        call: impl FnOnce() -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        std::thread::scope(|scope| {
            let call = scope.spawn(call);
            while !call.is_finished() {
                self.turn()?;
            }
            call.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Runs the I/O for a time. Returns false if the user interrupts it.
    fn go_on(&mut self, time: Duration) -> Result<bool, Failure> {
        let begin = self.load.now();
        while self.load.now().since(begin) < time {
            if self.interrupt.seen() {
                return Ok(false);
            }
            self.turn()?;
        }
        Ok(true)
    }

    fn turn(&mut self) -> Result<(), Failure> {
        self.load.turn();
        let seconds = self.load.record().seconds();
        if let (false, Some(second)) = (self.quiet, seconds.get(self.shown)) {
            output::line(&show::second(second, &self.names))?;
        }
        self.shown = (self.shown + 1).min(seconds.len());
        Ok(())
    }

    fn print(&self, text: &str) -> Result<(), Failure> {
        if self.quiet {
            return Ok(());
        }
        output::line(text)
    }
}
