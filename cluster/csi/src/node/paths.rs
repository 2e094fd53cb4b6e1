//! Connects and disconnects the paths of subsystems: the controllers of the kernel's NVMe host.
//!
//! Volumes may share a subsystem, so one call at a time connects or disconnects it. The kernel may
//! take long to make a connection or to delete a controller: each write to it has a deadline, after
//! which it goes on in the background. The kernel makes one connection at a time, so while one
//! hangs, no other is begun. A subsystem with a hanging connection is not disconnected; others are.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tonic::Status;

use super::bounded::{AccessError, Bounded};
use super::context::Address;
use super::fabrics::{self, HostPath};
use super::host::Host;
use super::identity::HostId;
use crate::pending::{Operation, Pending};

/// With these settings, a move of a volume costs hosts least. The kernel notices a silent path
/// within 2 s, and gives no path up for good. See docs/operate/cluster.md.
const SETTINGS: &str = "keep_alive_tmo=1,reconnect_delay=1,ctrl_loss_tmo=-1";
/// Time for one connection. The kernel needs about 3 s for a silent address, and 10 s for a target
/// that accepts the connection and says nothing.
const CONNECT: Duration = Duration::from_secs(15);
/// Time for the deletion of all paths of a subsystem.
const DISCONNECT: Duration = Duration::from_secs(30);
/// Time for a deletion after another one took all of [`DISCONNECT`].
const AFTER_LATE: Duration = Duration::from_secs(1);

/// A write to the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Write {
    nqn: String,
    to: To,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum To {
    Connect(Address),
    Delete(String),
}

#[derive(Debug)]
pub(crate) struct Paths {
    host: Arc<dyn Host>,
    me: HostId,
    /// The subsystems that a call connects or disconnects.
    pending: Pending,
    writes: Bounded<Write>,
    /// One connection at a time, as in the kernel.
    connecting: Mutex<()>,
    connect_time: Duration,
    disconnect_time: Duration,
}

impl Paths {
    pub(crate) fn new(host: Arc<dyn Host>, me: HostId) -> Self {
        Self {
            host,
            me,
            pending: Pending::default(),
            writes: Bounded::default(),
            connecting: Mutex::default(),
            connect_time: CONNECT,
            disconnect_time: DISCONNECT,
        }
    }

    pub(crate) fn with_time(self, time: Duration) -> Self {
        Self {
            connect_time: time,
            disconnect_time: time,
            ..self
        }
    }

    /// The paths of this host to a subsystem.
    pub(crate) fn of(&self, nqn: &str) -> Result<Vec<HostPath>, Status> {
        fabrics::paths(&*self.host, &self.me.nqn, nqn)
    }

    /// Addresses without a path. One that has lost its connection has a path: the kernel restores
    /// it.
    pub(crate) fn missing(&self, nqn: &str, all: &[Address]) -> Result<Vec<Address>, Status> {
        let there = self.of(nqn)?.into_iter();
        let there: BTreeSet<Address> = there.filter_map(|path| path.address).collect();
        let missing = all.iter().filter(|one| !there.contains(one));
        Ok(missing.cloned().collect())
    }

    /// Starts to change the paths of a subsystem. No other call does, until the result is dropped:
    /// it is refused with `ABORTED`.
    pub(crate) fn change(&self, nqn: &str) -> Result<PathChange<'_>, Status> {
        self.try_change(nqn).ok_or_else(|| {
            Status::aborted(format!(
                "{nqn}: another call connects or disconnects it; try again when it has ended"
            ))
        })
    }

    pub(crate) fn try_change(&self, nqn: &str) -> Option<PathChange<'_>> {
        Some(PathChange {
            _one: self.pending.try_start(nqn)?,
            paths: self,
            nqn: nqn.to_owned(),
        })
    }
}

/// The right to connect and disconnect a subsystem.
#[derive(Debug)]
pub(crate) struct PathChange<'a> {
    paths: &'a Paths,
    nqn: String,
    _one: Operation,
}

impl PathChange<'_> {
    fn write(
        &self,
        to: To,
        patience: Duration,
        work: impl FnOnce(&dyn Host) -> io::Result<()> + Send + 'static,
    ) -> Result<(), AccessError> {
        let host = Arc::clone(&self.paths.host);
        let nqn = self.nqn.clone();
        let key = Write { nqn, to };
        self.paths.writes.run(&key, patience, move || work(&*host))
    }

    pub(crate) fn connect(&self, address: &Address) -> Result<(), AccessError> {
        let Some(_turn) = self.paths.connecting.try_lock_for(self.paths.connect_time) else {
            return Err(AccessError::Pending);
        };
        // It would wait behind that one in the kernel, and hinder a deletion.
        let is_connection = |write: &Write| matches!(write.to, To::Connect(_));
        if self.paths.writes.find(is_connection).is_some() {
            return Err(AccessError::Pending);
        }
        let me = &self.paths.me;
        let options = format!(
            "transport={},traddr={},trsvcid={},nqn={},hostnqn={},hostid={},{SETTINGS}",
            address.transport,
            address.socket.ip(),
            address.socket.port(),
            self.nqn,
            me.nqn,
            me.id,
        );
        let to = To::Connect(address.clone());
        let connect = move |host: &dyn Host| host.connect(&options);
        let already = rustix::io::Errno::ALREADY.raw_os_error();
        match self.write(to, self.paths.connect_time, connect) {
            Err(AccessError::Failed(error)) if error.raw_os_error() == Some(already) => Ok(()),
            outcome => outcome,
        }
    }

    /// Deletes all controllers of this host for the subsystem. It fails while a connection to the
    /// subsystem is still being made.
    pub(crate) fn disconnect(&self) -> Result<(), Status> {
        let nqn = &self.nqn;
        // Its controller would come after this call, and stay.
        let is_connecting = |write: &Write| write.nqn == *nqn && matches!(write.to, To::Connect(_));
        if let Some(Write {
            to: To::Connect(address),
            ..
        }) = self.paths.writes.find(is_connecting)
        {
            let text = format!(
                "{nqn} stays connected: the kernel has not ended the connection to {address}"
            );
            return Err(Status::deadline_exceeded(text));
        }
        let end = Instant::now() + self.paths.disconnect_time;
        let (mut failures, mut is_late) = (Vec::new(), false);
        for HostPath { controller, .. } in self.paths.of(nqn)? {
            let rest = end.saturating_duration_since(Instant::now());
            let to = To::Delete(controller.clone());
            let delete = {
                let controller = controller.clone();
                move |host: &dyn Host| host.disconnect(&controller)
            };
            match self.write(to, rest.max(AFTER_LATE), delete) {
                Ok(()) => {}
                // It went by itself.
                Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => {}
                Err(error) => {
                    is_late |= error.is_late();
                    failures.push(format!("{controller}: {error}"));
                }
            }
        }
        if failures.is_empty() {
            return Ok(());
        }
        let text = format!("cannot disconnect {nqn}: {}", failures.join("; "));
        Err(if is_late {
            Status::deadline_exceeded(text)
        } else {
            Status::internal(text)
        })
    }
}
