//! Runs the plan of `nacre connect`: attempts, delays and fallback. [`HostCommands`] provides time
//! and commands, so that a test can replace them.

use std::net::IpAddr;
use std::time::Duration;

use super::log::{Log, Path};
use super::{ConnectArgs, Plan, module};
use nacre_nvmf::address::IpTransport;

/// The machine's functions for `drive`.
pub(super) trait HostCommands {
    /// Runs a command after printing it. Returns its standard output; its standard error is the
    /// cause of a failure.
    fn run(&mut self, command: &[String]) -> Result<String, Cause>;
    /// True when the kernel has `/dev/nvme-fabrics`.
    fn has_fabrics(&self) -> bool;
    fn pause(&mut self, time: Duration);
    fn print(&mut self, text: &str);
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Cause {
    #[error("{program} cannot be run: {error}")]
    NoProgram { program: String, error: String },
    /// The message of nvme-cli, and the kernel's log lines.
    #[error("{}", joined(.said, .kernel))]
    Refused { said: String, kernel: Vec<String> },
    #[error("{}", timed_out(.what, .after, .kernel))]
    TimedOut {
        /// `RDMA connection`, `TCP connection`, or the command.
        what: String,
        after: Duration,
        kernel: Vec<String>,
    },
}

fn joined(said: &str, kernel: &[String]) -> String {
    if kernel.is_empty() {
        said.to_owned()
    } else {
        format!("{said} (kernel: {})", kernel.join("; "))
    }
}

fn timed_out(what: &str, after: &Duration, kernel: &[String]) -> String {
    let mut text = format!("{what} timeout after {}ms", after.as_millis());
    if what == RDMA_CONNECTION {
        text += &format!(" in {}", stage(kernel));
    }
    joined(&text, kernel)
}

/// The terms that operators search for in timeouts.
const RDMA_CONNECTION: &str = "RDMA connection";

/// The purpose of a command.
pub(super) fn purpose(command: &[String]) -> String {
    let after = |word: &str| {
        let at = command.iter().position(|w| w == word)?;
        command.get(at + 1)
    };
    match after("-t") {
        Some(transport) => format!("{} connection", transport.to_uppercase()),
        None => words(command),
    }
}

/// The stage that the kernel's connection manager reached, according to its log lines.
fn stage(kernel: &[String]) -> &'static str {
    let said = |words: &[&str]| {
        let mut lines = kernel.iter();
        lines.any(|line| words.iter().any(|word| line.contains(word)))
    };
    if said(&["rdma_resolve_addr", "address resolution"]) {
        "ADDR_RESOLVE"
    } else if said(&["rdma_resolve_route", "route resolution"]) {
        "ROUTE_RESOLVE"
    } else {
        "CONNECT"
    }
}

/// The result of one path.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Attempt {
    pub path: Path,
    pub failures: u64,
    /// `Ok(true)`: the path was connected before this command.
    pub outcome: Result<bool, Cause>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("not connected to {path}: {cause}{}; remedy: {remedy}", attempts(*.failures))]
    Failed {
        path: Path,
        failures: u64,
        cause: Box<Cause>,
        remedy: String,
    },
    /// No transport could be tried.
    #[error("{cause}; remedy: {remedy}")]
    Unable { cause: String, remedy: &'static str },
}

fn attempts(failures: u64) -> String {
    match failures {
        0 | 1 => String::new(),
        more => format!(", {} failed", super::super::output::count(more, "attempt")),
    }
}

/// Connects every path of the discovery log. Without a log: the first transport of the plan that
/// works. It is an error if no path is connected.
pub(super) fn drive(
    args: &ConnectArgs,
    plan: &Plan,
    runner: &mut impl HostCommands,
    check_rdma_route: &dyn Fn(IpAddr) -> Result<(), String>,
) -> Result<Vec<Attempt>, ConnectError> {
    load(plan, runner)?;
    let here = |transport: IpTransport| Path {
        transport,
        address: args.address.traddr(),
        port: args.address.port(),
    };
    let nqn = args.nqn.as_deref().unwrap_or_default();
    let (log, cause) = discover(args, plan, runner, &here);
    let (paths, every, listed) = match log {
        Some((log, transport)) => {
            let (paths, skipped) =
                log.paths(nqn, &args.address.scoped_ip(), plan, check_rdma_route);
            skipped.iter().for_each(|why| runner.print(why));
            if !paths.is_empty() {
                (paths, true, true)
            } else {
                (vec![here(transport)], false, false)
            }
        }
        None => {
            if let Some(cause @ Cause::NoProgram { .. }) = cause {
                return Err(failed(here(plan.order[0]), 0, cause, plan, true));
            }
            (plan.order.iter().copied().map(here).collect(), false, true)
        }
    };
    let mut attempts = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        let one = attempt(args, path, runner);
        let next = paths.get(at + 1);
        // Another transport would give the same result.
        let ends = match &one.outcome {
            Ok(_) => !every,
            Err(cause) => !every && answered(cause),
        };
        if let Err(cause) = &one.outcome {
            // The error of the whole has the last cause.
            let is_error = (ends || next.is_none()) && attempts.iter().all(is_failed);
            if !is_error {
                runner.print(&attempt_failed(args, one.failures, path, cause));
            }
            if let (false, false, Some(next)) = (every, ends, next) {
                let (from, to) = (path.transport.word(), next.transport.word());
                runner.print(&format!("falling back from {from} to {to}"));
            }
        }
        attempts.push(one);
        if ends {
            break;
        }
    }
    if attempts.iter().any(|one| !is_failed(one)) {
        return Ok(attempts);
    }
    let failures = attempts.iter().map(|one| one.failures).sum();
    let Some(Attempt {
        path,
        outcome: Err(cause),
        ..
    }) = attempts.pop()
    else {
        unreachable!("at least one path exists, and none is connected");
    };
    Err(failed(path, failures, cause, plan, listed))
}

fn is_failed(one: &Attempt) -> bool {
    one.outcome.is_err()
}

fn failed(path: Path, failures: u64, cause: Cause, plan: &Plan, listed: bool) -> ConnectError {
    let alone = plan.order == [IpTransport::Rdma];
    let remedy = remedy(&cause, &path, alone, listed);
    ConnectError::Failed {
        path,
        failures,
        cause: Box::new(cause),
        remedy,
    }
}

/// Loads the kernel's transports. A module may be built in, so a failure counts only if there is no
/// `/dev/nvme-fabrics` afterwards.
fn load(plan: &Plan, runner: &mut impl HostCommands) -> Result<(), ConnectError> {
    let mut causes = Vec::new();
    for transport in &plan.order {
        let module = module(*transport);
        if let Err(cause) = runner.run(&["modprobe".into(), module.into()]) {
            causes.push(format!("modprobe {module}: {cause}"));
        }
    }
    if !runner.has_fabrics() {
        causes.push("this kernel has no /dev/nvme-fabrics, so it cannot connect".into());
        return Err(ConnectError::Unable {
            cause: causes.join("; "),
            remedy: "`nacre initiator check` says which modules are missing; in a container load them on its host",
        });
    }
    causes.iter().for_each(|cause| runner.print(cause));
    Ok(())
}

/// Reads the discovery log at the target, over the first transport that works, and returns that
/// transport, too.
fn discover(
    args: &ConnectArgs,
    plan: &Plan,
    runner: &mut impl HostCommands,
    here: &dyn Fn(IpTransport) -> Path,
) -> (Option<(Log, IpTransport)>, Option<Cause>) {
    let mut last = None;
    for transport in &plan.order {
        match runner.run(&discovery(args, &here(*transport))) {
            Ok(text) => match Log::parse(&text) {
                Some(log) => return (Some((log, *transport)), None),
                None => runner.print("the discovery log cannot be read; connecting without it"),
            },
            Err(cause @ Cause::NoProgram { .. }) => return (None, Some(cause)),
            Err(cause) => last = Some(cause),
        }
    }
    if let Some(cause) = &last {
        runner.print(&format!(
            "no discovery log there ({cause}); connecting without it"
        ));
    }
    (None, last)
}

/// Tries one path until it is connected, cannot succeed, or has used up its attempts.
fn attempt(args: &ConnectArgs, path: &Path, runner: &mut impl HostCommands) -> Attempt {
    let mut failures: u64 = 0;
    let outcome = loop {
        let cause = match runner.run(&command(args, path)) {
            Ok(_) => break Ok(false),
            Err(cause) if is_connected_already(&cause) => break Ok(true),
            Err(cause) => cause,
        };
        failures += 1;
        let over = args.attempts.retries != 0 && failures >= u64::from(args.attempts.retries);
        if over || is_hopeless(&cause) {
            break Err(cause);
        }
        runner.print(&attempt_failed(args, failures, path, &cause));
        runner.pause(args.attempts.retry_delay);
    };
    Attempt {
        path: path.clone(),
        failures,
        outcome,
    }
}

fn attempt_failed(args: &ConnectArgs, at: u64, path: &Path, cause: &Cause) -> String {
    let of = match args.attempts.retries {
        0 => String::new(),
        retries => format!(" of {retries}"),
    };
    format!(
        "attempt {at}{of} over {} failed: {cause}",
        path.transport.word()
    )
}

/// Options of nvme-cli whose values are not printed.
const SECRET_OPTIONS: [&str; 2] = ["--dhchap-secret", "--dhchap-ctrl-secret"];

/// nvme-cli on the command line.
pub(super) fn command(args: &ConnectArgs, path: &Path) -> Vec<String> {
    let mut words = invocation("connect", path);
    let mut option = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            words.push(name.to_owned());
            words.push(value);
        }
    };
    option("-n", args.nqn.clone());
    option("--hostnqn", args.hostnqn.clone());
    option("--hostid", args.hostid.clone());
    option("--nr-io-queues", args.nr_io_queues.map(|n| n.to_string()));
    option("--queue-size", args.queue_size.map(|n| n.to_string()));
    let text = |secret: &Option<zeroize::Zeroizing<String>>| secret.as_ref().map(|s| s.to_string());
    option(SECRET_OPTIONS[0], text(&args.secrets.own));
    option(SECRET_OPTIONS[1], text(&args.secrets.target));
    if let Some(seconds) = args.ctrl_loss_tmo {
        // One word: a negative number would be taken for an option.
        words.push(format!("--ctrl-loss-tmo={seconds}"));
    }
    if let Some(tos) = args.tos {
        words.push(format!("--tos={tos}"));
    }
    words
}

/// The command that prints the discovery log.
pub(super) fn discovery(args: &ConnectArgs, path: &Path) -> Vec<String> {
    let mut words = invocation("discover", path);
    let identity = [("--hostnqn", &args.hostnqn), ("--hostid", &args.hostid)];
    for (name, value) in identity {
        if let Some(value) = value {
            words.extend([name.to_owned(), value.clone()]);
        }
    }
    words.extend(["-o".to_owned(), "json".to_owned()]);
    words
}

fn invocation(what: &str, path: &Path) -> Vec<String> {
    let port = path.port.to_string();
    let transport = path.transport.word();
    [
        "nvme",
        what,
        "-t",
        transport,
        "-a",
        &path.address,
        "-s",
        &port,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// A command in shell syntax, without its secrets.
pub(super) fn words(command: &[String]) -> String {
    let plain = |word: &str| {
        !word.is_empty()
            && word
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+[]".contains(c))
    };
    let before = std::iter::once(None).chain(command.iter().map(Some));
    let quoted = command.iter().zip(before).map(|(word, before)| {
        if before.is_some_and(|option| SECRET_OPTIONS.contains(&option.as_str())) {
            "***".to_owned()
        } else if plain(word) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// The kernel's EALREADY, as the versions of libnvme print it.
fn is_connected_already(cause: &Cause) -> bool {
    let said = cause.to_string().to_lowercase();
    said.contains("already connected") || said.contains("operation already in progress")
}

/// The target answered, and refuses this subsystem or this host.
fn answered(cause: &Cause) -> bool {
    let said = cause.to_string().to_lowercase();
    [
        "connect invalid data parameter",
        "connect invalid parameter",
        "is not allowed, hostnqn",
    ]
    .iter()
    .any(|words| said.contains(words))
}

/// The same command would fail again: the target's response or this machine is the cause.
fn is_hopeless(cause: &Cause) -> bool {
    let said = cause.to_string().to_lowercase();
    let of_this_machine = [
        "no handler found for transport",
        "permission denied",
        "must be root",
        "unrecognized option",
        "invalid option",
    ];
    matches!(cause, Cause::NoProgram { .. })
        || answered(cause)
        || of_this_machine.iter().any(|words| said.contains(words))
}

fn remedy(cause: &Cause, path: &Path, alone: bool, listed: bool) -> String {
    let said = cause.to_string().to_lowercase();
    let Path { address, port, .. } = path;
    let discover =
        format!("`nacre discover {address}:{port}` lists the subsystems that this host may use");
    let mut remedies = Vec::new();
    if let Cause::NoProgram { program, .. } = cause {
        remedies.push(match program.as_str() {
            "nvme" => "install the package nvme-cli".to_owned(),
            other => format!("install the package with {other}"),
        });
    } else if said.contains("permission denied") || said.contains("must be root") {
        remedies.push("run it as root".to_owned());
    } else if said.contains("no handler found for transport") {
        remedies.push(format!(
            "`modprobe {}`, or use the other transport",
            module(path.transport)
        ));
    } else if said.contains("is not allowed, hostnqn") {
        remedies
            .push("allow this host on the target: `nacre host add`, with the NQN above".to_owned());
    } else if answered(cause) || !listed {
        remedies.push(discover);
    } else if said.contains("connection refused") || said.contains("connection reset") {
        remedies.push(
            "does the target listen there over this transport? `nacre listener list` on it shows its listeners"
                .to_owned(),
        );
    } else if said.contains("timeout") || said.contains("timed out") {
        remedies.push(
            match path.transport {
                IpTransport::Rdma => {
                    "`ping` the target; the packet filter must admit UDP 4791 (RoCE v2); `nacre rdma gids` must show \
                     this machine's address"
                }
                IpTransport::Tcp => "`ping` the target; the packet filter must admit its TCP port",
            }
            .to_owned(),
        );
    } else if said.contains("unreachable") || said.contains("no route") {
        remedies.push("`ip route get` the target's address".to_owned());
    } else {
        remedies.push(format!(
            "`nacre initiator check {address}` examines this machine; {discover}"
        ));
    }
    if alone && !answered(cause) {
        remedies.push(
            "keep the fallback (`--fallback tcp`), or move the users of the volume to a host with \
                RDMA"
                .to_owned(),
        );
    }
    remedies.join("; ")
}
