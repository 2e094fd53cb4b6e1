//! A test device that can be truncated, and enlarged again with zeroes.

use std::sync::Arc;

use nacre_bdev::{
    Bdev, Busy, Completion, Done, Geometry, Io, Limits, Op, OpenError, Queue, Size, Status,
    Support, Token,
};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

use super::rig::{DISK_BLOCKS, World, pool};
use crate::handle::{NewVolume, VolumeState};
use crate::model::Settings;

pub(super) struct Cuttable {
    pub base: Arc<dyn Bdev>,
    pub name: String,
    /// One for each time that it is opened.
    pub size: Mutex<Arc<Size>>,
}

impl Cuttable {
    pub(super) fn new(name: &str, base: Arc<dyn Bdev>) -> Arc<Self> {
        let size = Size::new(base.geometry().blocks);
        Arc::new(Self {
            base,
            name: name.into(),
            size: Mutex::new(Arc::new(size)),
        })
    }

    pub(super) fn size(&self) -> Arc<Size> {
        Arc::clone(&self.size.lock())
    }

    /// As after a restart: the size before is unknown.
    pub(super) fn reopen(&self) {
        let now = self.size().blocks();
        *self.size.lock() = Arc::new(Size::new(now));
    }

    /// As another machine, which counted `size`, sees it. Returns the count of the machine before.
    pub(super) fn seen_with(&self, size: Arc<Size>) -> Arc<Size> {
        std::mem::replace(&mut self.size.lock(), size)
    }
}

impl Bdev for Cuttable {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "cuttable"
    }

    fn uuid(&self) -> Uuid {
        Uuid::new_v5(&self.base.uuid(), self.name.as_bytes())
    }

    /// The geometry that was announced.
    fn geometry(&self) -> Geometry {
        self.base.geometry()
    }

    fn limits(&self) -> Limits {
        Limits {
            is_sync: false,
            ..self.base.limits()
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.base.supports(op)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(CuttableQueue {
            base: Arc::clone(&self.base).open(pool)?,
            device: self,
            refused: Vec::new(),
        }))
    }

    fn losses(&self) -> u64 {
        self.size().cuts()
    }

    fn present_blocks(&self) -> u64 {
        self.size().blocks()
    }

    fn least_blocks(&self) -> u64 {
        self.size().least()
    }

    fn forget_least(&self) -> u64 {
        self.size().forget_least()
    }
}

struct CuttableQueue {
    base: Box<dyn Queue>,
    device: Arc<Cuttable>,
    refused: Vec<Completion>,
}

impl Queue for CuttableQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if io.lba + u64::from(io.blocks) <= self.device.size().blocks() {
            return self.base.submit(io);
        }
        self.refused.push(io.complete(Status::OutOfRange));
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(refused) = self.refused.pop()
        {
            done.push(refused);
        }
        self.base.poll(now, done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.base.abort(token)
    }

    fn inflight(&self) -> usize {
        self.base.inflight() + self.refused.len()
    }
}

impl World {
    /// A volume of disks that can lose their end.
    pub(super) fn cuttable(disks: usize) -> Self {
        Self::cuttable_with(disks, None)
    }

    /// Like the above, with this size in bytes.
    pub(super) fn cuttable_with(disks: usize, bytes: Option<u64>) -> Self {
        let mut world = Self::empty(0);
        for name in (0..disks).map(|at| format!("d{at}")) {
            let shelf = &world.shelf;
            shelf.add_on(&name, DISK_BLOCKS, |memory| {
                let disk = Cuttable::new(&format!("{name}-medium"), memory);
                let mut all = shelf.cuttable.lock();
                all.insert(name.clone(), Arc::clone(&disk));
                disk
            });
        }
        let new = NewVolume {
            name: "vol".into(),
            id: None,
            bytes,
            devices: (0..disks).map(|at| format!("d{at}")).collect(),
            settings: Settings::default(),
            force: false,
            copied_from: None,
        };
        world.create_new(new).unwrap();
        world.open().unwrap();
        world
    }

    pub(super) fn disk(&self, name: &str) -> Arc<Cuttable> {
        Arc::clone(&self.shelf.cuttable.lock()[name])
    }

    /// Truncates the disk to this number of blocks.
    pub(super) fn cut(&self, name: &str, blocks: u64) {
        let (pool, left) = (pool(), (DISK_BLOCKS - blocks) as u32);
        self.behind(&pool, name, Io::new(1, Op::WriteZeroes, blocks, left));
        self.disk(name).size().set(blocks);
    }

    pub(super) fn enlarge(&self, name: &str) {
        self.disk(name).size().set(DISK_BLOCKS);
    }

    /// As after a restart of the process that had it open.
    pub(super) fn reopen(&self, name: &str) {
        self.disk(name).reopen();
    }

    /// Erases everything before the volume's first block.
    pub(super) fn wipe(&self, name: &str) {
        self.behind(&pool(), name, Io::new(1, Op::WriteZeroes, 0, 2048));
    }

    /// Its state as of now.
    pub(super) fn fresh_state(&self) -> VolumeState {
        self.handle.as_ref().unwrap().status().state
    }

    pub(super) fn why(&self, name: &str) -> String {
        let replicas = self.status().replicas;
        let replica = replicas.into_iter().find(|m| m.device == name);
        replica.and_then(|m| m.why).unwrap_or_default()
    }
}
