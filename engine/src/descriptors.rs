//! How many files and sockets the daemon may have open.
//!
//! Each queue of a host is a connection, and a daemon without a descriptor to spare can neither accept one more nor
//! look at its own machine. The soft limit that a login or systemd gives is made for programs that use select(2).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::config::Settings;
use crate::metrics::http;
use crate::rpc::clients;

/// With less than this it is said at start: some tens of hosts with a queue per processor.
const LOW: u64 = 4096;

/// Beside clients of management: files that its calls open.
const FILES: u64 = 32;

/// Descriptors that hosts leave to management: its clients can connect and its calls can open files, however many hosts
/// there are.
pub fn reserved(settings: &Settings) -> u64 {
    let rpc = settings.rpc.max_clients + clients::RESERVED;
    (rpc + http::MAX_CLIENTS) as u64 + FILES
}

/// Raises the soft limit to the hard one.
pub fn raise() {
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
