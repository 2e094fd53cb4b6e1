//! A blocking interface to a controller of another target, for commands such as `nacre discover`:
//! the calling thread polls the association until an admin command completes.

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::host::{
    Connector, ControllerState, DiscoveryLog, HostController, HostError, HostOptions, Paths,
    fetch_discovery_log,
};
use nacre_nvmf_wire::commands::admin::{GetLogPage, Identify};
use nacre_nvmf_wire::identify;
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Clock;

/// Buffer sizes for admin commands; the large ones are for log pages.
const CLASSES: [ClassSpec; 2] = [
    ClassSpec {
        size: 4096,
        count: 32,
    },
    ClassSpec {
        size: 64 << 10,
        count: 2,
    },
];
/// Sleep between two polls that found no work.
const NAP: Duration = Duration::from_micros(100);
/// Attempts to read a discovery log that keeps changing.
const DISCOVERY_ATTEMPTS: u32 = 8;

/// The reason why an association was not established, or why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("cannot connect to {remote}: {error}{}", remedy(.error))]
    Connect { remote: String, error: HostError },
    #[error("cannot connect to {remote}: {attempts} attempt{} failed: {causes}; {remedy}", if *.attempts == 1 { "" } else { "s" })]
    Exhausted {
        remote: String,
        attempts: u64,
        causes: String,
        remedy: &'static str,
    },
    #[error("no memory for connections: {0}")]
    Memory(std::io::Error),
    #[error("{command}: {error}")]
    Command {
        command: &'static str,
        error: HostError,
    },
    #[error("{command} was refused: {status}")]
    Refused {
        command: &'static str,
        status: StatusCode,
    },
    #[error("{command}: too many commands wait")]
    Busy { command: &'static str },
    #[error(
        "{command} of {bytes} bytes is too large: a session reads at most {most} bytes at once"
    )]
    TooLarge {
        command: &'static str,
        bytes: usize,
        most: usize,
    },
}

/// Advice for an error, or an empty string.
fn remedy(error: &HostError) -> &'static str {
    use nacre_nvmf_wire::fabrics::InvalidParameter as Invalid;
    match error {
        HostError::Refused { status, .. } if status.code() == StatusCode::CONNECT_INVALID_HOST => {
            "; the target does not allow this host: `nacre host allow SUBSYSTEM HOSTNQN` there, or --hostnqn another here"
        }
        HostError::InvalidParameter { parameter, .. } if *parameter == Invalid::SUBNQN => {
            "; no such subsystem there: `nacre discover` lists the subsystems"
        }
        HostError::InvalidParameter { parameter, .. } if *parameter == Invalid::CNTLID => {
            "; is it a subsystem with static controllers (cntlid 65534 in `nacre discover --json`)? --cntlid any asks for \
             one of those, without --cntlid it is a dynamic one"
        }
        HostError::Lost(nacre_nvmf::transport::Closed::Protocol(_)) => {
            "; is this an NVMe/TCP port, and does it take the digests asked for?"
        }
        HostError::Lost(_) => "; is a target listening there?",
        HostError::LostInAuthentication(_) => {
            "; do both ends have the same keys? The target's log has its reason"
        }
        _ => "",
    }
}

/// Advice for an error when the options allow a choice of transports (RDMA, TCP).
fn path_remedy(paths: &Paths, error: &HostError) -> &'static str {
    match (error, paths.options().fallback) {
        (HostError::Dial(_), None) => {
            "--fallback tcp allows TCP; else use a host that has RDMA to the target"
        }
        (HostError::Lost(_) | HostError::TimedOut { .. }, None) => {
            "is a target listening there, and does the way to it carry RDMA (ping, firewall, GID: nacre doctor)? \
             --fallback tcp allows TCP; else use a host that has RDMA to the target"
        }
        (error, _) => match remedy(error) {
            "" => "is a target listening there?",
            known => known.trim_start_matches("; "),
        },
    }
}

/// An association with a controller, and its buffers.
pub struct Session {
    controller: HostController,
    pool: Pool,
    clock: Clock,
}

impl Session {
    /// Bytes that suffice for the memory of a session ([`Connector::memory`]).
    pub const MEMORY: usize = 512 << 10;

    /// Connects, and waits until the controller is enabled and identified. With one transport, the
    /// first failed attempt is the error; with a choice of transports, each has its attempts. An
    /// association that is lost later is established again as the options define. `remote` names
    /// the target in errors.
    pub fn connect(
        remote: &str,
        options: HostOptions,
        connector: &Arc<dyn Connector>,
    ) -> Result<Self, SessionError> {
        Self::connect_reporting(remote, options, connector, |_| {})
    }

    /// Like [`Session::connect`]. With a choice of transports, calls `report` with the cause of
    /// each failed attempt.
    pub fn connect_reporting(
        remote: &str,
        options: HostOptions,
        connector: &Arc<dyn Connector>,
        mut report: impl FnMut(&str),
    ) -> Result<Self, SessionError> {
        let pool = connector.memory(&CLASSES).map_err(SessionError::Memory)?;
        let clock = Clock::real();
        let controller =
            HostController::new(options, connector.dialer(), pool.clone(), clock.now());
        let mut session = Self {
            controller,
            pool,
            clock,
        };
        let mut failed = 0;
        loop {
            let paths = session.controller.paths();
            if let Some(paths) = paths
                && paths.counts().failed_attempts > failed
            {
                failed = paths.counts().failed_attempts;
                if let Some((kind, why)) = paths.latest_failure() {
                    report(&format!("attempt {failed}, by {kind}: {why}"));
                }
            }
            let fail = |error: &HostError| {
                let (remote, error) = (remote.to_owned(), error.clone());
                Err(match paths {
                    Some(paths) => SessionError::Exhausted {
                        remote,
                        attempts: paths.counts().failed_attempts,
                        causes: paths.causes(),
                        remedy: path_remedy(paths, &error),
                    },
                    None => SessionError::Connect { remote, error },
                })
            };
            match session.controller.state() {
                ControllerState::Live => return Ok(session),
                ControllerState::Failed(error) => return fail(error),
                ControllerState::Waiting { .. } if paths.is_some_and(|p| !p.all_failed()) => {
                    session.turn();
                }
                ControllerState::Waiting { error, .. } => return fail(error),
                ControllerState::Connecting => session.turn(),
                ControllerState::Closed => {
                    return fail(&HostError::Lost(nacre_nvmf::transport::Closed::Local));
                }
            }
        }
    }

    pub fn controller(&self) -> &HostController {
        &self.controller
    }

    pub fn controller_mut(&mut self) -> &mut HostController {
        &mut self.controller
    }

    /// Does pending work (Keep Alive, asynchronous events, reconnecting), and returns its amount.
    /// Does not block.
    pub fn poll(&mut self) -> usize {
        let now = self.clock.now();
        self.controller.poll(now)
    }

    /// Executes one admin command, which returns `bytes` of data (0: none), and waits for its
    /// completion. `command` names it in errors. A completion with an error status is
    /// [`SessionError::Refused`]; more than 64 KiB are [`SessionError::TooLarge`].
    pub fn admin(
        &mut self,
        command: &'static str,
        sqe: Sqe,
        bytes: usize,
    ) -> Result<(Cqe, Vec<u8>), SessionError> {
        let read = buffer(&self.pool, command, bytes)?;
        let busy = || SessionError::Busy { command };
        let ticket = self.controller.submit(sqe, None, read).ok_or_else(busy)?;
        let answer = loop {
            if let Some(answer) = self.controller.take_result(ticket) {
                break answer.map_err(|error| SessionError::Command { command, error })?;
            }
            self.turn();
        };
        match answer.cqe.status() {
            status if status.is_success() => {}
            status => return Err(SessionError::Refused { command, status }),
        }
        let data = answer.data.map_or_else(Vec::new, |buf| buf.to_vec());
        Ok((answer.cqe, data))
    }

    /// Executes an Identify command and returns its 4096 bytes.
    pub fn identify(&mut self, what: Identify, nsid: u32) -> Result<Vec<u8>, SessionError> {
        let sqe = what.to_sqe(0, nsid);
        Ok(self.admin("identify", sqe, identify::SIZE)?.1)
    }

    pub fn log_page(&mut self, page: GetLogPage, nsid: u32) -> Result<Vec<u8>, SessionError> {
        let bytes = usize::try_from(page.bytes()).unwrap_or(usize::MAX);
        Ok(self.admin("get log page", page.to_sqe(0, nsid), bytes)?.1)
    }

    /// Reads the discovery log, all of it of one generation (GENCTR). Fails if the log changes
    /// during each of 8 attempts.
    pub fn discovery_log(&mut self) -> Result<DiscoveryLog, SessionError> {
        let command = "discovery log";
        let mut refused = None;
        let read = |page: GetLogPage| {
            self.log_page(page, 0).map_err(|error| {
                let source = match &error {
                    SessionError::Command { error, .. } => error.clone(),
                    SessionError::Refused { status, .. } => HostError::Refused {
                        step: command,
                        status: *status,
                        fabrics: false,
                    },
                    other => HostError::Misbehaved {
                        what: other.to_string(),
                    },
                };
                refused = Some(error);
                source
            })
        };
        fetch_discovery_log(read, DISCOVERY_ATTEMPTS)
            .map_err(|error| refused.unwrap_or(SessionError::Command { command, error }))
    }

    /// Shuts the controller down, and waits at most 2 s for it.
    pub fn disconnect(mut self) {
        let start = self.clock.now();
        self.controller.disconnect(start);
        while !matches!(
            self.controller.state(),
            ControllerState::Closed | ControllerState::Failed(_)
        ) && self.clock.now().since(start) < Duration::from_secs(2)
        {
            self.turn();
        }
    }

    fn turn(&mut self) {
        if self.poll() == 0 {
            std::thread::sleep(NAP);
        }
    }
}

/// A buffer for the data of a command; `None` for none.
fn buffer(pool: &Pool, command: &'static str, bytes: usize) -> Result<Option<Buf>, SessionError> {
    let most = pool.max_len();
    match bytes {
        0 => Ok(None),
        _ if bytes > most => Err(SessionError::TooLarge {
            command,
            bytes,
            most,
        }),
        _ => {
            let buf = pool.acquire(bytes);
            buf.map(Some).ok_or(SessionError::Busy { command })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command of more bytes than a session has buffers for is refused with the limit: a later
    /// attempt would fail, too. A shortage of buffers is another error.
    #[test]
    fn a_command_that_is_too_large_learns_the_limit() {
        let pool = Pool::heap(&CLASSES);
        let buffer = |bytes| buffer(&pool, "get log page", bytes);
        assert!(buffer(0).unwrap().is_none());
        let held = [buffer(64 << 10).unwrap(), buffer(5000).unwrap()];
        assert_eq!(held[0].as_ref().map(|buf| buf.len()), Some(65_536));
        let error = buffer((64 << 10) + 1).unwrap_err();
        assert!(matches!(
            error,
            SessionError::TooLarge {
                bytes: 65_537,
                most: 65_536,
                ..
            }
        ));
        assert!(error.to_string().contains("at most 65536 bytes"), "{error}");
        let error = buffer(64 << 10).unwrap_err();
        assert!(matches!(error, SessionError::Busy { .. }), "{error}");
    }

    #[test]
    fn a_refused_host_learns_the_command() {
        let refused = HostError::Refused {
            step: "connect",
            status: StatusCode::CONNECT_INVALID_HOST,
            fabrics: true,
        };
        assert!(remedy(&refused).contains("`nacre host allow SUBSYSTEM HOSTNQN`"));
    }

    #[test]
    fn one_attempt_is_no_plural() {
        let exhausted = |attempts| SessionError::Exhausted {
            remote: "x".into(),
            attempts,
            causes: "no way".into(),
            remedy: "go home",
        };
        let text = exhausted(1).to_string();
        assert_eq!(
            text,
            "cannot connect to x: 1 attempt failed: no way; go home"
        );
        assert!(exhausted(2).to_string().contains("2 attempts failed"));
    }
}
