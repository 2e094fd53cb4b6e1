//! The guardian: a process that waits for the end of the daemon, and then gives its lease back.
//!
//! Without it, other nodes wait until the lease has run out. The end of the process is the proof:
//! its sockets are closed, and it answers nothing more. The guardian gives back only a lease that
//! this very process created, so it cannot end that of a daemon that was started meanwhile.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nacre_cluster_core::{Holder, Incarnation, NodeId, Transaction};
use nacre_cluster_etcd::{Endpoints, NodeLeases, Outcome, Prefix};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::connection::{connect, thread};
use crate::error::Error;

/// Time between two requests that keep the connection to etcd open.
const WARM: Duration = Duration::from_secs(5);
/// Time for the return of the lease. Later, other nodes have fenced the node.
const LIMIT: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_millis(50);

/// The process whose lease is given back.
#[derive(Debug, Clone, Copy)]
pub struct Ward {
    pub node: NodeId,
    /// As in [`crate::Me::process`].
    pub process: Uuid,
}

/// The outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Returned {
    Lease(Incarnation, Duration),
    /// The daemon had given the lease back, or another node had fenced it.
    Nothing,
}

/// A descriptor of the process. Open it before the process can end.
pub fn watched(pid: u32) -> Result<OwnedFd, Error> {
    let thread = |why: String| Error::Thread { why };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| thread("no process has the id 0".to_owned()))?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|error| thread(format!("{pid}: {error}")))
}

/// Waits for the end of the process, and gives its lease back. Blocks the thread.
pub fn run(
    process: OwnedFd,
    ward: Ward,
    endpoints: &Endpoints,
    prefix: &Prefix,
) -> Result<Returned, Error> {
    let key = prefix.lease(ward.node);
    let (runtime, client) = connect(endpoints, &key)?;
    let leases = NodeLeases::new(client, prefix.clone());
    runtime.block_on(async {
        let mut ended = end_of(process).map_err(thread)?;
        // Keeps a connection to etcd open. A failed request needs no action: the next one follows.
        let warm = async {
            loop {
                let _ = leases.read(ward.node).await;
                tokio::time::sleep(WARM).await;
            }
        };
        let ended = tokio::select! {
            ended = &mut ended => ended,
            () = warm => unreachable!("it never ends"),
        };
        // Without proof of the end, the process may still answer hosts.
        ended
            .unwrap_or_else(|_| Err(std::io::Error::other("it panicked")))
            .map_err(thread)?;
        give_back(&leases, ward).await.map_err(Error::at(&key))
    })
}

/// A thread waits for the end of the process, and reports it. An error proves no end.
fn end_of(process: OwnedFd) -> std::io::Result<oneshot::Receiver<std::io::Result<()>>> {
    let (sender, ended) = oneshot::channel();
    let wait = move || {
        // The receiver waits as long as this thread runs.
        let _ = sender.send(wait_for(&process));
    };
    let thread = std::thread::Builder::new().name("guardian".to_owned());
    thread.spawn(wait)?;
    Ok(ended)
}

/// Blocks until the process has ended.
fn wait_for(process: &OwnedFd) -> std::io::Result<()> {
    loop {
        let mut watched = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut watched, None) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) if watched[0].revents().contains(PollFlags::IN) => return Ok(()),
            Ok(_) => return Err(std::io::Error::other("the descriptor is no process")),
            Err(error) => return Err(error.into()),
        }
    }
}

async fn give_back(leases: &NodeLeases, ward: Ward) -> Result<Returned, nacre_cluster_etcd::Error> {
    let began = Instant::now();
    loop {
        let is_late = began.elapsed() >= LIMIT;
        let found = match leases.read(ward.node).await {
            Ok(found) => found.filter(|key| key.process == ward.process),
            Err(error) if error.is_passing() && !is_late => {
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let Some(key) = found else {
            return Ok(Returned::Nothing);
        };
        let (node, incarnation) = (ward.node, key.incarnation);
        let release = Transaction::release(Holder { node, incarnation });
        let encode = |_: &_| unreachable!("not a commit");
        match leases.execute(&release, encode).await {
            Ok(Outcome::Made(_)) => return Ok(Returned::Lease(incarnation, began.elapsed())),
            // The read may have been stale, or an earlier copy was made: look again.
            Ok(Outcome::Refused { .. }) => {}
            Err(error) if error.is_passing() && !is_late => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Only a process that has ended is the proof: not a descriptor without an end, nor an error.
    #[test]
    fn the_end_of_a_process() {
        let mut cat = Command::new("cat");
        let mut child = cat.stdin(Stdio::piped()).spawn().expect("it starts");
        let process = watched(child.id()).expect("it runs");
        drop(child.stdin.take());
        wait_for(&process).expect("it ended");
        child.wait().expect("it ended");
        // The reading end of a pipe without a writer: `poll` returns, and nothing is readable.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(writer);
        assert!(wait_for(&OwnedFd::from(reader)).is_err());
    }
}
