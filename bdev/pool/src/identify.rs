//! Superblocks of a device: which disk of which pool it is.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Layer;
use nacre_bdev_pool_core::format::superblock::Superblock;
use nacre_bdev_pool_core::geometry::{PAGE, superblock_offsets};
use nacre_hugepages::Pool as Memory;
use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, Work};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::EDGE;
use crate::keeper::{Disk, Ended, remove_current};
use crate::model::PoolError;
use crate::port::layer_bytes;

/// How long a device may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// The newest superblock of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    pub pool: Uuid,
    pub name: String,
    pub sequence: u64,
    /// The disk itself.
    pub disk: Uuid,
    /// All disks of the pool; only the first one's superblock is certain to name every one.
    pub disks: Vec<Uuid>,
    /// The disk itself was about to leave the pool.
    pub is_leaving: bool,
}

/// Reads the superblocks of a device on the present reactor. `None`: it has no valid one, has less
/// than 4 MiB, or does not answer within 4 s.
pub async fn identify(
    core: &CoreHandle,
    memory: Memory,
    layer: &Arc<Layer>,
) -> Result<Option<Label>, PoolError> {
    let bytes = layer_bytes(layer);
    if bytes < 4 * EDGE {
        return Ok(None);
    }
    let queue = layer.open_queue(&memory).map_err(|error| PoolError::Io {
        what: error.to_string(),
    })?;
    let mut disk = Disk::new(queue, &**layer, memory);
    let offsets = superblock_offsets(bytes, EDGE);
    for (tag, offset) in (0..).zip(offsets) {
        disk.read(tag, offset, PAGE);
    }
    let (sender, answer) = oneshot::channel();
    let reader = Reader {
        deadline: None,
        core: core.clone(),
        disk: Some(disk),
        left: offsets.len(),
        best: None,
        sender: Some(sender),
        ended: Vec::new(),
    };
    let added = core.add_poller(Box::new(reader));
    added.map_err(|error| PoolError::Io {
        what: format!("cannot watch its completions: {error}"),
    })?;
    answer.await.map_err(|_| PoolError::Closed)
}

struct Reader {
    /// Then the device counts as one without an answer, and its queue is closed.
    deadline: Option<Nanos>,
    core: CoreHandle,
    disk: Option<Disk>,
    left: usize,
    best: Option<Label>,
    sender: Option<oneshot::Sender<Option<Label>>>,
    ended: Vec<Ended>,
}

impl Poller for Reader {
    fn name(&self) -> &str {
        "pool label"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        let Some(disk) = &mut self.disk else {
            return Work::None;
        };
        disk.poll(now, &mut self.ended);
        let count = self.ended.len() as u32;
        for ended in self.ended.drain(..) {
            let Ended::Read(_, result) = ended else {
                continue;
            };
            self.left -= 1;
            let bytes = result.ok();
            let page = bytes.as_ref().and_then(|bytes| bytes.first_chunk());
            let Some(found) = page.and_then(|page| Superblock::decode(page).ok()) else {
                continue;
            };
            let is_newer = |best: &Label| best.sequence < found.sequence;
            if self.best.as_ref().is_none_or(is_newer) {
                let at = found.disks.position(found.disk);
                self.best = Some(Label {
                    is_leaving: at.is_some() && found.disks.leaving() == at,
                    pool: found.pool,
                    sequence: found.sequence,
                    disk: found.disk,
                    disks: found.disks.disks().iter().map(|disk| disk.id).collect(),
                    name: found.name,
                });
            }
        }
        let deadline = *self.deadline.get_or_insert(now + PATIENCE);
        if self.left > 0 && now >= deadline {
            self.best = None;
            self.left = 0;
        }
        if self.left == 0 {
            // The device is free before the answer.
            self.disk = None;
            if let Some(sender) = self.sender.take() {
                // The caller may no longer wait.
                let _ = sender.send(self.best.take());
            }
            remove_current(&self.core);
        }
        match count {
            0 => Work::None,
            count => Work::Did(count),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let Some(disk) = &mut self.disk else {
            return Idle::Quiet;
        };
        let deadline = self.deadline.unwrap_or(now + PATIENCE);
        disk.arm(now).and(Idle::Until(deadline))
    }

    fn disarm(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.disarm();
        }
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let fds = self.disk.iter().filter_map(Disk::wake_fd);
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }
}
