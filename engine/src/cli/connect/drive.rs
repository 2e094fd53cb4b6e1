//! Attempts, pauses and fallback. Time and commands are a [`Runner`]'s, so that a test has its own.

use std::time::Duration;

use super::{ConnectArgs, Plan, Transport};

/// What driving needs of the machine.
pub trait Runner {
    /// Runs a command after printing it. What it wrote on standard error is its failure's cause.
    fn run(&mut self, command: &[String]) -> Result<(), Cause>;
    fn pause(&mut self, time: Duration);
    fn say(&mut self, text: &str);
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    #[error("{program} cannot be run: {error}")]
    NoProgram { program: String, error: String },
    /// In the words of nvme-cli, and what the kernel said meanwhile.
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
    match kernel.is_empty() {
        true => said.to_owned(),
        false => format!("{said} (kernel: {})", kernel.join("; ")),
    }
}

fn timed_out(what: &str, after: &Duration, kernel: &[String]) -> String {
    let mut text = format!("{what} timeout after {}ms", after.as_millis());
    if what == RDMA_CONNECTION {
        text += &format!(" in {}", stage(kernel));
    }
    joined(&text, kernel)
}

/// The words of the timeouts that operators search for.
const RDMA_CONNECTION: &str = "RDMA connection";

/// What a command was to make.
pub fn purpose(command: &[String]) -> String {
    let after = |word: &str| {
        let at = command.iter().position(|w| w == word)?;
        command.get(at + 1)
    };
    match after("-t") {
        Some(transport) => format!("{} connection", transport.to_uppercase()),
        None => words(command),
    }
}

/// How far the kernel's connection manager came, by what it said.
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

/// What was reached.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub transport: Transport,
    pub failures: u64,
    /// It was there before.
    pub already: bool,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    #[error("not connected to {target}: {failures} attempts failed, the last over {}: {cause}; remedy: {remedy}", .transport.word())]
    Exhausted {
        target: String,
        failures: u64,
        transport: Transport,
        cause: Cause,
        remedy: String,
    },
    /// Trying again would not help.
    #[error("{cause}; remedy: {remedy}")]
    Hopeless { cause: Cause, remedy: &'static str },
}

/// Connects by the first transport of the plan that works.
pub fn drive(
    args: &ConnectArgs,
    plan: &Plan,
    runner: &mut impl Runner,
) -> Result<Outcome, ConnectError> {
    let mut failures = 0;
    let mut last = None;
    for (at, transport) in plan.order.iter().copied().enumerate() {
        // Loading may fail where the module is built in or loaded by udev: then connecting tells.
        if let Err(cause) = runner.run(&["modprobe".into(), transport.module().into()]) {
            runner.say(&format!("modprobe {}: {cause}", transport.module()));
        }
        let mut attempt: u64 = 0;
        let cause = loop {
            attempt += 1;
            let cause = match runner.run(&command(args, transport)) {
                Ok(()) => {
                    return Ok(Outcome {
                        transport,
                        failures,
                        already: false,
                    });
                }
                Err(cause) => cause,
            };
            if is_connected_already(&cause) {
                return Ok(Outcome {
                    transport,
                    failures,
                    already: true,
                });
            }
            if matches!(cause, Cause::NoProgram { .. }) {
                return Err(ConnectError::Hopeless {
                    cause,
                    remedy: "install the package nvme-cli",
                });
            }
            failures += 1;
            let of = match args.retries {
                0 => String::new(),
                retries => format!(" of {retries}"),
            };
            runner.say(&format!(
                "attempt {attempt}{of} over {} failed: {cause}",
                transport.word()
            ));
            if args.retries != 0 && attempt >= u64::from(args.retries) {
                break cause;
            }
            runner.pause(args.retry_delay);
        };
        if let Some(next) = plan.order.get(at + 1) {
            runner.say(&format!(
                "falling back from {} to {}",
                transport.word(),
                next.word()
            ));
        }
        last = Some((transport, cause));
    }
    let (transport, cause) = last.expect("a plan names a transport");
    let alone = plan.order == [Transport::Rdma];
    Err(ConnectError::Exhausted {
        target: args.address.to_string(),
        failures,
        transport,
        remedy: remedy(&cause, transport, alone),
        cause,
    })
}

/// nvme-cli on the command line.
pub fn command(args: &ConnectArgs, transport: Transport) -> Vec<String> {
    let mut words: Vec<String> = ["nvme", "connect", "-t", transport.word(), "-a"]
        .map(str::to_owned)
        .to_vec();
    words.push(args.address.ip.to_string());
    let mut option = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            words.push(name.to_owned());
            words.push(value);
        }
    };
    option("-s", Some(args.address.port.to_string()));
    option("-n", args.nqn.clone());
    option("--hostnqn", args.hostnqn.clone());
    option("--hostid", args.hostid.clone());
    option("--nr-io-queues", args.nr_io_queues.map(|n| n.to_string()));
    option("--queue-size", args.queue_size.map(|n| n.to_string()));
    if let Some(seconds) = args.ctrl_loss_tmo {
        // One word: a negative number would be taken for an option.
        words.push(format!("--ctrl-loss-tmo={seconds}"));
    }
    if let Some(tos) = args.tos {
        words.push(format!("--tos={tos}"));
    }
    words
}

/// A command as a shell would take it.
pub fn words(command: &[String]) -> String {
    let plain = |word: &str| {
        !word.is_empty()
            && word
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+[]".contains(c))
    };
    let quoted = command.iter().map(|word| match plain(word) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// The kernel's EALREADY, in the words of libnvme's versions.
fn is_connected_already(cause: &Cause) -> bool {
    let Cause::Refused { said, .. } = cause else {
        return false;
    };
    let said = said.to_lowercase();
    said.contains("already connected") || said.contains("operation already in progress")
}

fn remedy(cause: &Cause, transport: Transport, alone: bool) -> String {
    let said = cause.to_string().to_lowercase();
    let mut remedies = Vec::new();
    if said.contains("permission denied") || said.contains("must be root") {
        remedies.push("run it as root");
    } else if said.contains("nvme-fabrics") && said.contains("no such file") {
        remedies.push("`modprobe nvme-fabrics`");
    } else if said.contains("connection refused") || said.contains("connection reset") {
        remedies.push(
            "does the target listen there over this transport? `nacre listener list` on it tells",
        );
    } else if said.contains("timeout") || said.contains("timed out") {
        remedies.push(match transport {
            Transport::Rdma => {
                "`ping` the target; the packet filter must admit UDP 4791 (RoCE v2); `nacre rdma gids` must show this \
                 machine's address"
            }
            Transport::Tcp => "`ping` the target; the packet filter must admit its TCP port",
        });
    } else if said.contains("unreachable") || said.contains("no route") {
        remedies.push("`ip route get` the target's address");
    } else {
        remedies.push("`nacre initiator check` with the target's address tells what is missing");
    }
    if alone {
        remedies.push("keep the fallback (`--fallback tcp`), or move what uses the volume to a host with RDMA");
    }
    remedies.join("; ")
}
