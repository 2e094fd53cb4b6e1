//! Opens the queue of a core to a namespace on one path.

use std::sync::Arc;

use nacre_bdev::OpenError;
use nacre_hugepages::Pool;
use nacre_nvmf::host::{IoQueue, NamespaceInfo};
use nacre_reactor::{EventSet, Nanos};

use crate::namespace::Namespace;
use crate::qids::Qid;
use crate::shared::Shared;

/// The error of opening a queue when all granted I/O queues are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the target grants {granted} I/O queues to this host, and all of them are open: attach it with more (num_io_queues), \
     let the target grant more, or serve on fewer cores"
)]
pub struct NoQueue {
    pub granted: u16,
}

/// Opens this core's queue to the namespace on one path. Its connections are put into `watch`.
pub(crate) fn open_queue(
    namespace: &Namespace,
    shared: &Arc<Shared>,
    pool: &Pool,
    watch: &EventSet,
) -> Result<(IoQueue, Qid), OpenError> {
    let granted = shared.status().io_queues;
    let none = || {
        let kind = match granted {
            0 => std::io::ErrorKind::NotConnected,
            _ => std::io::ErrorKind::ResourceBusy,
        };
        namespace.cannot_open(std::io::Error::new(kind, NoQueue { granted }))
    };
    let qid = shared.qids.take(granted).ok_or_else(none)?;
    let ids = (qid.value, namespace.attached.nsid);
    let (options, link) = (shared.config.options.clone(), Arc::clone(&shared.link));
    let dial = shared.connector.dialer();
    // The queue's poller passes the time later.
    let queue = IoQueue::new(options, link, dial, pool.clone(), ids, Nanos::ZERO);
    let queue = queue.map_err(|error| namespace.cannot_open(error))?;
    let queue = queue.watched_by(watch);
    let queue = queue.map_err(|error| namespace.cannot_open(error))?;
    let queue = queue.expecting(NamespaceInfo {
        blocks: namespace.size.blocks(),
        ..namespace.attached.clone()
    });
    Ok((queue, qid))
}
