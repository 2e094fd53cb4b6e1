//! A registry, a reactor that is the home of pools, and a queue to a volume.

use std::sync::Arc;
use std::time::Instant;

use nacre_bdev::malloc;
use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Completion, Done, Holder, Io, Layer, Op, Queue, Registry, Status, Token};
use nacre_hugepages::{ClassSpec, Pool};
use nacre_reactor::{Nanos, ReactorConfig, ReactorHandle};
use uuid::Uuid;

use crate::{
    BLOCK, Command, Create, Import, ImportReport, LvolInfo, Outcome, PoolError, PoolHandle,
};

pub(super) const HOLDER: Uuid = Uuid::from_u128(99);
pub(super) const POOL: Uuid = Uuid::from_u128(77);

pub(super) fn memory() -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 256,
        },
        ClassSpec {
            size: 64 << 10,
            count: 64,
        },
        ClassSpec {
            size: 1 << 20,
            count: 4,
        },
    ])
}

pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(future)
}

pub(super) struct Home {
    pub reactor: ReactorHandle,
    pub registry: Registry,
}

impl Home {
    pub(super) fn new(registry: &Registry) -> Self {
        let config = ReactorConfig {
            name: "home".into(),
            ..ReactorConfig::default()
        };
        Self {
            reactor: nacre_reactor::spawn(config, |_| {}).unwrap(),
            registry: registry.clone(),
        }
    }

    /// A home with a RAM disk "disk".
    pub(super) fn with_disk(mebibytes: u64) -> Self {
        let home = Self::new(&Registry::new());
        home.disk("disk", mebibytes);
        home
    }

    pub(super) fn disk(&self, name: &str, mebibytes: u64) {
        let config = serde_json::json!({
            "name": name, "block_size": 512, "num_blocks": mebibytes * 2048,
        });
        let config = serde_json::from_value(config).unwrap();
        let device = malloc::create(config).unwrap();
        self.registry.register(device as Arc<dyn Bdev>).unwrap();
    }

    pub(super) fn create_on(&self, disk: &str, force: bool) -> Result<PoolHandle, PoolError> {
        let holder = Holder::User("pool".into());
        let claim = self.registry.claim(disk, holder, Usage::Exclusive).unwrap();
        let new = Create {
            id: POOL,
            name: "pool0".into(),
            holder: HOLDER,
            force,
        };
        let opened = self.reactor.run_future(move |core| async move {
            crate::create(&core, memory(), claim, new).await
        });
        block_on(opened).unwrap()
    }

    pub(super) fn create(&self) -> PoolHandle {
        self.create_on("disk", false).unwrap()
    }

    pub(super) fn import_by(
        &self,
        disk: &str,
        id: Option<Uuid>,
        holder: Uuid,
    ) -> Result<(PoolHandle, ImportReport), PoolError> {
        let claim = loop {
            let user = Holder::User("pool".into());
            match self.registry.claim(disk, user, Usage::Exclusive) {
                Ok(claim) => break claim,
                // The reactor of before is dropping its queues.
                Err(_) => std::thread::yield_now(),
            }
        };
        let wanted = Import {
            id,
            open: Vec::new(),
            taken_names: Vec::new(),
            holder,
            force: false,
        };
        let opened = self.reactor.run_future(move |core| async move {
            crate::import(&core, memory(), vec![claim], wanted).await
        });
        block_on(opened).unwrap()
    }

    pub(super) fn import(&self) -> (PoolHandle, ImportReport) {
        self.import_by("disk", Some(POOL), HOLDER).unwrap()
    }

    /// Ends the keeper as the death of the daemon does.
    pub(super) fn kill(self) -> Registry {
        self.reactor.stop();
        self.reactor.join().unwrap();
        self.registry
    }
}

pub(super) fn run(pool: &PoolHandle, command: Command) -> Result<Outcome, PoolError> {
    block_on(pool.run(command))
}

pub(super) fn volume(pool: &PoolHandle, number: u128, mebibytes: u64) -> Uuid {
    let id = Uuid::from_u128(number);
    let command = Command::Create {
        id,
        name: format!("v{number}"),
        bytes: mebibytes << 20,
        thick: false,
    };
    run(pool, command).unwrap();
    id
}

pub(super) fn snapshot(pool: &PoolHandle, of: Uuid, number: u128) -> Uuid {
    let id = Uuid::from_u128(number);
    let cuts = vec![(of, id, format!("s{number}"))];
    run(pool, Command::Snapshot { cuts }).unwrap();
    id
}

pub(super) fn clone(pool: &PoolHandle, source: Uuid, number: u128) -> Uuid {
    let id = Uuid::from_u128(number);
    let command = Command::Clone {
        source,
        id,
        name: format!("c{number}"),
        thick: false,
    };
    run(pool, command).unwrap();
    id
}

pub(super) fn list(pool: &PoolHandle) -> Vec<LvolInfo> {
    match run(pool, Command::List).unwrap() {
        Outcome::List(list) => list,
        other => panic!("{other:?}"),
    }
}

/// Checks the pool when it has come to rest.
pub(super) fn check(pool: &PoolHandle) {
    match run(pool, Command::Check).unwrap() {
        Outcome::Checked(report) => {
            assert_eq!(report.findings, []);
            assert_eq!((report.repaired, report.not_repaired), (0, 0));
        }
        other => panic!("{other:?}"),
    }
}

/// A pool on a RAM disk, with a thin volume of these sizes in MiB, and a queue to it.
pub(super) fn start(disk: u64, volume: u64) -> (Home, PoolHandle, Uuid, Host) {
    let home = Home::with_disk(disk);
    let pool = home.create();
    let lvol = self::volume(&pool, 1, volume);
    let host = Host::on(&pool, lvol);
    (home, pool, lvol, host)
}

/// A queue to a volume, through a layer.
pub(super) struct Host {
    queue: Box<dyn Queue>,
    pub memory: Pool,
    done: Done,
    /// I/Os that have ended, and whose outcome the test has not taken.
    ended: Vec<Completion>,
    next: Token,
    began: Instant,
    /// The time that the queue sees; `None`: the present time.
    pub frozen: Option<Nanos>,
}

impl Host {
    pub(super) fn on(pool: &PoolHandle, id: Uuid) -> Self {
        let lvol = block_on(pool.lvol(id)).unwrap();
        Self::on_layer(Layer::new(lvol as Arc<dyn Bdev>))
    }

    /// A queue to a device with blocks of [`BLOCK`].
    pub(super) fn on_layer(layer: Arc<Layer>) -> Self {
        let memory = memory();
        Self {
            queue: layer.open(&memory).unwrap(),
            memory,
            done: Done::with_capacity(16),
            ended: Vec::new(),
            next: 1,
            began: Instant::now(),
            frozen: None,
        }
    }

    pub(super) fn now(&self) -> Nanos {
        let now = Nanos(1) + self.began.elapsed();
        self.frozen.unwrap_or(now)
    }

    fn begin(&mut self, io: Io) -> Token {
        self.next += 1;
        let token = self.next;
        let submitted = self.queue.submit(Io { token, ..io });
        submitted.map_err(|(busy, _)| busy).unwrap();
        token
    }

    fn take(&mut self, token: Token) -> Option<Completion> {
        let now = self.now();
        self.queue.poll(now, &mut self.done);
        self.ended.extend(self.done.drain());
        let at = self.ended.iter().position(|ended| ended.token == token)?;
        Some(self.ended.swap_remove(at))
    }

    pub(super) fn run(&mut self, io: Io) -> Completion {
        let token = self.begin(io);
        self.wait(token)
    }

    /// The status of an I/O that has ended.
    pub(super) fn ended(&mut self, token: Token) -> Option<Status> {
        self.take(token).map(|ended| ended.status)
    }

    fn wait(&mut self, token: Token) -> Completion {
        let began = Instant::now();
        loop {
            if let Some(ended) = self.take(token) {
                return ended;
            }
            assert!(began.elapsed().as_secs() < 120, "an I/O does not end");
            std::thread::yield_now();
        }
    }

    /// Does what an idle core does: it polls a queue that is not settled.
    pub(super) fn rest(&mut self) {
        if !self.queue.is_settled() {
            let now = self.now();
            self.queue.poll(now, &mut self.done);
        }
    }

    /// The status of an I/O, when it has ended.
    pub(super) fn end(&mut self, token: Token) -> Status {
        self.wait(token).status
    }

    /// Writes blocks of one byte, again while the status asks for that, as hosts do.
    pub(super) fn write(&mut self, lba: u64, blocks: u32, byte: u8) -> Status {
        let began = Instant::now();
        loop {
            assert!(began.elapsed().as_secs() < 120, "a write has no outcome");
            let token = self.begin_write(lba, blocks, byte);
            let status = self.end(token);
            if status != Status::Retry {
                return status;
            }
        }
    }

    pub(super) fn begin_write(&mut self, lba: u64, blocks: u32, byte: u8) -> Token {
        let mut buf = self.memory.acquire((blocks * BLOCK) as usize).unwrap();
        buf.bytes_mut().unwrap().fill(byte);
        self.begin(Io::new(1, Op::Write, lba, blocks).with(buf))
    }

    pub(super) fn read(&mut self, lba: u64, blocks: u32) -> (Status, Vec<u8>) {
        let token = self.begin_read(lba, blocks);
        self.end_read(token)
    }

    pub(super) fn begin_read(&mut self, lba: u64, blocks: u32) -> Token {
        let mut buf = self.memory.acquire((blocks * BLOCK) as usize).unwrap();
        buf.bytes_mut().unwrap().fill(0xEE);
        self.begin(Io::new(1, Op::Read, lba, blocks).with(buf))
    }

    /// The outcome of a read, when it has ended.
    pub(super) fn end_read(&mut self, token: Token) -> (Status, Vec<u8>) {
        let ended = self.wait(token);
        let bytes = ended.data.iter().flat_map(|buf| buf.to_vec()).collect();
        (ended.status, bytes)
    }

    pub(super) fn unmap(&mut self, lba: u64, blocks: u32) -> Status {
        let token = self.begin_unmap(lba, blocks);
        self.end(token)
    }

    pub(super) fn begin_unmap(&mut self, lba: u64, blocks: u32) -> Token {
        self.begin(Io::new(1, Op::Unmap, lba, blocks))
    }

    pub(super) fn flush(&mut self) -> Status {
        self.run(Io::new(1, Op::Flush, 0, 0)).status
    }
}
