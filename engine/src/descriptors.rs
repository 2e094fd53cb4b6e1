//! Raises the daemon's limit on open files and sockets.
//!
//! Each queue of a host is a connection. A daemon without free descriptors can neither accept a
//! connection nor read /proc and /sys. The usual soft limit, 1024, exists for programs that use
//! select(2).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::config::Settings;
use crate::metrics::http;
use crate::rpc::clients;

/// Limit below which the daemon warns at start. It suffices for some tens of hosts with one queue
/// per CPU.
const LOW: u64 = 4096;

/// Descriptors for files opened by management calls, in addition to its clients.
const FILES: u64 = 32;

/// Number of descriptors reserved for management, so that its clients can connect and its calls can
/// open files, however many hosts are connected.
pub(crate) fn reserved(settings: &Settings) -> u64 {
    let rpc = settings.rpc.max_clients + clients::RESERVED;
    (rpc + http::MAX_CLIENTS) as u64 + FILES
}

/// Raises the soft limit to the hard limit.
pub(crate) fn raise() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if limit.current != wanted.current
        && let Err(error) = setrlimit(Resource::Nofile, wanted)
    {
        warn!(%error, "the limit of open files is as it was");
    }
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < LOW => warn!(
            limit,
            "few files and connections can be open at a time; raise the hard limit of open files (LimitNOFILE= of a \
             unit, ulimit -Hn)"
        ),
        limit => info!(limit, "open files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
