//! Runs a load on a namespace of an NVMe-oF target, through the host side of `nacre_nvmf`.

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{Connector, ControllerState, HostOptions, IoQueue, Link, NamespaceInfo};
use nacre_reactor::Nanos;
use nacre_transport_connect::Session;

use super::error::{Owner, PerfError};
use super::job::{Job, JobError};
use super::lane::{ConnectionCounts, Load, Namespace};
use super::report::{PathReport, Report};
use super::run::{Stage, Watch, progress, run_id, run_on};

impl Load for IoQueue {
    fn qid(&self) -> u16 {
        Self::qid(self)
    }

    fn is_live(&self) -> bool {
        Self::is_live(self)
    }

    fn refusal(&self) -> Option<&str> {
        Self::refusal(self)
    }

    fn failure(&self) -> Option<&str> {
        Self::failure(self)
    }

    fn flush(&mut self) {
        Self::flush(self);
    }

    fn connection_counts(&self) -> ConnectionCounts {
        let stats = self.stats();
        ConnectionCounts {
            losses: stats.losses,
            resent: stats.resent,
            moves: stats.moves,
        }
    }
}

struct Remote<'a> {
    link: &'a Arc<Link>,
    options: &'a HostOptions,
    connector: &'a Arc<dyn Connector>,
    nsid: u32,
}

impl Stage for Remote<'_> {
    type Queue = IoQueue;

    fn memory(&self, classes: &[ClassSpec]) -> Result<Pool, PerfError> {
        self.connector.memory(classes).map_err(PerfError::Memory)
    }

    fn open(&self, lane: u16, pool: &Pool, now: Nanos) -> Result<IoQueue, PerfError> {
        let queue = IoQueue::new(
            self.options.clone(),
            Arc::clone(self.link),
            self.connector.dialer(),
            pool.clone(),
            (lane + 1, self.nsid),
            now,
        );
        Ok(queue?)
    }

    fn patience(&self) -> Duration {
        // Each attempt may take `connect_timeout`, and the target may be busy at first. With two
        // transports, each one has its attempts.
        let tries = match &self.options.paths {
            Some(paths) => 2 * (paths.connection_retries + 1),
            None => 2,
        };
        self.options.connect_timeout * tries
    }
}

/// Runs `job` on namespace `nsid` of the connected controller `session`; `None`: its only one.
/// `connector` opens the connections of the I/O queues; `target` is the address for the report.
pub fn run(
    job: &Job,
    session: &mut Session,
    connector: &Arc<dyn Connector>,
    (target, nsid): (&str, Option<u32>),
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let link = Arc::clone(session.controller().link());
    let options = session.controller().options().clone();
    let info = choose(&link, nsid)?;
    let granted = link.state().io_queues;
    if granted < job.queues {
        let asked = job.queues;
        return Err(PerfError::Queues { asked, granted });
    }
    let max_io = link.state().max_transfer_bytes;
    let area = job.area(info.block_size, info.blocks, max_io)?;
    if job.writes() && info.read_only {
        return Err(JobError::ReadOnly.into());
    }
    let namespace = Namespace {
        nsid: info.nsid,
        block_size: info.block_size,
        run: run_id(job),
    };
    let stage = Remote {
        link: &link,
        options: &options,
        connector,
        nsid: info.nsid,
    };
    let (sum, interrupted) = run_on(job, &stage, area, namespace, &mut |crew| {
        session.poll();
        let reconnecting = match session.controller().state() {
            ControllerState::Waiting { attempt, .. } => Some(*attempt),
            ControllerState::Connecting => Some(0),
            _ => None,
        };
        watch.tick(&progress(job, crew, reconnecting))
    })?;
    let moves = sum.moves;
    let mut report = sum.report(job, target, info.nsid, interrupted);
    let paths = session.controller().paths();
    report.paths = paths.map(|paths| PathReport::new(paths, moves));
    Ok(report)
}

pub(crate) fn choose(link: &Link, nsid: Option<u32>) -> Result<NamespaceInfo, PerfError> {
    let mut namespaces = link.state().namespaces;
    let there: Vec<u32> = namespaces.keys().copied().collect();
    let owner = Owner::Subsystem;
    let nsid = match (nsid, there.as_slice()) {
        (Some(nsid), _) => nsid,
        (None, [only]) => *only,
        (None, []) => return Err(PerfError::Empty { owner }),
        (None, _) => return Err(PerfError::SeveralNamespaces { owner, there }),
    };
    namespaces
        .remove(&nsid)
        .ok_or(PerfError::NoNamespace { owner, nsid, there })
}
