//! A simulated holder: one run of a daemon that has the replicated volume open or is opening it. It
//! has a reactor, a buffer pool, the volume's control and its I/O queues.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use nacre_bdev::{Bdev, Layer};
use nacre_bdev_replica::answers::{self, AnswerLease};
use nacre_bdev_replica::control;
use nacre_bdev_replica::handle::{
    Command, Devices, NewVolume, NoDevice, Observer, ReplicaDevice, ResyncKind, VolumeError,
    VolumeEvent, VolumeHandle,
};
use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::prepared::Prepared;
use nacre_bdev_replica::store::MemoryStore;
use nacre_hugepages::{ClassSpec, Pool};
use nacre_reactor::{CoreHandle, ReactorConfig, TestCore, VirtualClock};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::checker::Checker;
use crate::device::Device;
use crate::disk::SimDisk;
use crate::holds::Hold;
use crate::leases::{LeaseBook, SimLease};
use crate::load::Lane;
use crate::media::Format;

thread_local! {
    /// One for all holders of all runs on this thread: creating one takes longer than most runs.
    /// Room for the chunks of two holders' copies and their load in flight.
    static POOL: Pool = {
        let classes = [(4096, 512), (64 << 10, 256), (512 << 10, 24)];
        Pool::heap(&classes.map(|(size, count)| ClassSpec { size, count }))
    };
}

type Pending<T> = Rc<RefCell<Option<Result<T, VolumeError>>>>;

pub(crate) struct Holder {
    /// The number of this holder, unique within the simulation. A restarted daemon is a new holder.
    pub number: u64,
    pub node: Uuid,
    pub lanes: Vec<Lane>,
    pub opening: Option<Pending<VolumeHandle>>,
    pub handle: Option<VolumeHandle>,
    /// The block device to which hosts can connect before the volume is open.
    pub prepared: Option<Prepared>,
    pub layer: Option<Arc<Layer>>,
    pub commands: Vec<(String, Pending<()>)>,
    /// The hold of writes that was begun last and is not released.
    pub hold: Option<Hold>,
    pub events: Arc<Events>,
    pub pool: Pool,
    /// True while the process has no free file descriptor: opening a queue to a disk fails.
    pub lacks: Arc<AtomicBool>,
    lease: Option<Arc<dyn AnswerLease>>,
    format: Format,
    devices: Arc<HolderDevices>,
    store: MemoryStore,
    pub core: TestCore,
}

/// The volume's events, until they are read.
#[derive(Default)]
pub(crate) struct Events(Mutex<Vec<VolumeEvent>>);

impl Events {
    pub(crate) fn take(&self) -> Vec<VolumeEvent> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl Observer for Events {
    fn event(&self, event: VolumeEvent) {
        self.0.lock().push(event);
    }
}

/// The disks that one holder can reach.
struct HolderDevices {
    holder: u64,
    disks: Vec<Arc<SimDisk>>,
    queues: Arc<AtomicU64>,
    lacks: Arc<AtomicBool>,
    layers: Mutex<BTreeMap<String, Arc<Layer>>>,
    /// The answer of [`Devices::patience`]: [`PATIENCE`] in runs with leases, as in a cluster, and
    /// otherwise `None`.
    patience: Option<Duration>,
}

/// The time after which a replica that completes nothing goes out of sync ([`Devices::patience`]).
/// Many disks are silent for longer, and many volumes have a longer deadline. So it has effect in
/// many runs.
pub(crate) const PATIENCE: Duration = Duration::from_millis(700);

impl Devices for HolderDevices {
    fn claim(&self, name: &str, _volume: &str) -> Result<ReplicaDevice, NoDevice> {
        let refused = |why: &str| NoDevice {
            name: name.to_owned(),
            why: why.to_owned(),
        };
        let disk = self.disks.iter().find(|disk| disk.name == name);
        let disk = disk.ok_or_else(|| refused("there is none"))?;
        if !disk.claim(self.holder) {
            return Err(refused("it cannot be reached"));
        }
        let mut layers = self.layers.lock();
        let layer = layers.entry(name.to_owned()).or_insert_with(|| {
            let (queues, lacks) = (Arc::clone(&self.queues), Arc::clone(&self.lacks));
            let device = Device::new(Arc::clone(disk), self.holder, queues, lacks);
            Layer::new(Arc::new(device))
        });
        Ok(ReplicaDevice {
            layer: Arc::clone(layer),
            local: disk.inner.lock().traits.local,
            claim: Box::new(()),
        })
    }

    fn is_awaited(&self, name: &str) -> bool {
        let disk = self.disks.iter().find(|disk| disk.name == name);
        disk.is_none_or(|disk| disk.is_awaited_by(self.holder))
    }

    fn patience(&self, _name: &str) -> Option<Duration> {
        self.patience
    }
}

impl Holder {
    pub(crate) fn new(
        number: u64,
        node: Uuid,
        clock: &VirtualClock,
        store: &MemoryStore,
        disks: &[Arc<SimDisk>],
        queues: &Arc<AtomicU64>,
        book: Option<&Arc<LeaseBook>>,
    ) -> Self {
        let lacks: Arc<AtomicBool> = Arc::default();
        Self {
            number,
            node,
            lanes: Vec::new(),
            opening: None,
            handle: None,
            prepared: None,
            layer: None,
            commands: Vec::new(),
            hold: None,
            events: Arc::default(),
            pool: POOL.with(Pool::clone),
            lease: book.map(|book| {
                let book = Arc::clone(book);
                Arc::new(SimLease {
                    book,
                    holder: number,
                }) as _
            }),
            format: disks[0].inner.lock().media.format,
            devices: Arc::new(HolderDevices {
                holder: number,
                disks: disks.to_vec(),
                queues: Arc::clone(queues),
                lacks: Arc::clone(&lacks),
                layers: Mutex::default(),
                patience: book.map(|_| PATIENCE),
            }),
            lacks,
            store: store.client(number as u32),
            core: TestCore::with_clock(ReactorConfig::default(), clock.clone()),
        }
    }

    pub(crate) fn create(&mut self, new: NewVolume) -> Result<Uuid, VolumeError> {
        let core = self.core.core().clone();
        let (pool, store) = (self.pool.clone(), Arc::new(self.store.clone()));
        let devices = Arc::clone(&self.devices) as Arc<dyn Devices>;
        let place =
            self.run(async move { control::create(&core, pool, store, devices, new).await });
        // Every disk completes at its time, which only passes here.
        for _ in 0..200_000 {
            self.core.run_until_idle();
            if let Some(outcome) = place.borrow_mut().take() {
                return outcome;
            }
            let now = self.core.clock().now() + Duration::from_micros(20);
            self.core.clock().set(now);
            for disk in &self.devices.disks {
                disk.advance(now);
            }
        }
        panic!("the volume is not created");
    }

    /// Creates the block device of the volume, to which hosts can connect before the volume is
    /// open.
    pub(crate) fn prepare(&mut self, record: &VolumeRecord) {
        let prepared = Prepared::new(record);
        self.layer = prepared.volume().map(Layer::new);
        self.prepared = Some(prepared);
    }

    /// True once the volume is open: only then may I/O complete with success.
    pub(crate) fn may_answer(&self) -> bool {
        let ended = |place: &Pending<VolumeHandle>| matches!(&*place.borrow(), Some(Ok(_)));
        self.handle.is_some() || self.opening.as_ref().is_some_and(ended)
    }

    pub(crate) fn open(&mut self, id: Uuid) {
        let core: CoreHandle = self.core.core().clone();
        let (pool, store) = (self.pool.clone(), Arc::new(self.store.clone()));
        let devices = Arc::clone(&self.devices) as Arc<dyn Devices>;
        let observer = Arc::clone(&self.events) as Arc<dyn Observer>;
        let prepared = self.prepared.clone();
        let node = answers::Holder {
            id: self.node,
            lease: self.lease.clone(),
        };
        let place = self.run(async move {
            match prepared {
                Some(prepared) => {
                    control::open_prepared(&core, pool, store, devices, observer, node, &prepared)
                        .await
                }
                None => control::open(&core, pool, store, devices, observer, id, node).await,
            }
        });
        self.opening = Some(place);
    }

    /// Returns the result of opening the volume, once it has ended. If the volume does not use the
    /// prepared device, closes the queues and reports their I/Os to the checker.
    pub(crate) fn opened(&mut self, checker: &mut Checker) -> Option<Result<(), VolumeError>> {
        let outcome = self.opening.as_ref()?.borrow_mut().take()?;
        self.opening = None;
        Some(outcome.map(|handle| {
            let prepared = self.prepared.take();
            if prepared.is_some_and(|prepared| prepared.is_served_by(&handle))
                && self.layer.is_some()
            {
                self.refresh();
            } else {
                self.lanes.drain(..).for_each(|lane| lane.orphan(checker));
                self.layer = Some(Layer::new(Arc::clone(handle.volume())));
            }
            self.handle = Some(handle);
        }))
    }

    pub(crate) fn command(&mut self, command: Command) {
        let Some(handle) = self.handle.clone() else {
            return;
        };
        let name = format!("{command:?}");
        let place = self.run(async move { handle.run(command).await });
        self.commands.push((name, place));
    }

    /// Declares a replica of the volume, which no holder has open as of `record`, to be in sync.
    pub(crate) fn force_in_sync(&mut self, record: &VolumeRecord, replica: String) {
        let core = self.core.core().clone();
        let (pool, store) = (self.pool.clone(), Arc::new(self.store.clone()));
        let devices = Arc::clone(&self.devices) as Arc<dyn Devices>;
        let command = format!("force_in_sync {replica}");
        let (id, seen, name) = (record.id, record.version(), record.name.clone());
        let place = self.run(async move {
            control::force_in_sync(&core, pool, store, devices, id, seen, &replica, &name).await
        });
        self.commands.push((command, place));
    }

    /// Returns the commands that have ended, and their results.
    pub(crate) fn answered(&mut self) -> Vec<(String, Result<(), VolumeError>)> {
        let mut ended = Vec::new();
        self.commands.retain(|(name, place)| {
            let outcome = place.borrow_mut().take();
            match outcome {
                Some(outcome) => ended.push((name.clone(), outcome)),
                None => return true,
            }
            false
        });
        ended
    }

    /// True while a reconcile runs, which makes the replicas in sync equal after an unclean stop.
    pub(crate) fn reconciles(&self) -> bool {
        let status = self.handle.as_ref().map(VolumeHandle::status);
        let replicas = status.iter().flat_map(|status| &status.replicas);
        let mut resyncs = replicas.filter_map(|replica| replica.resync.as_ref());
        resyncs.any(|resync| resync.kind == ResyncKind::Reconcile)
    }

    pub(crate) fn add_lane(&mut self) {
        let Some(layer) = &self.layer else { return };
        match layer.open_queue(&self.pool) {
            Ok(queue) => self.lanes.push(Lane::new(queue, self.format)),
            Err(error) => panic!("a queue of the volume: {error}"),
        }
    }

    /// Updates the device's size from the volume, whose size may have changed.
    pub(crate) fn refresh(&self) {
        if let Some(layer) = &self.layer {
            layer.refresh();
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        let layer = self.layer.as_ref();
        layer.map_or(0, |layer| layer.geometry().blocks)
    }

    fn run<T: 'static>(
        &self,
        future: impl Future<Output = Result<T, VolumeError>> + 'static,
    ) -> Pending<T> {
        let place: Pending<T> = Rc::default();
        let to = Rc::clone(&place);
        drop(self.core.spawn_local(async move {
            let outcome = future.await;
            *to.borrow_mut() = Some(outcome);
        }));
        place
    }
}
