//! Goal: a disk that may have lost unflushed writes ends all confirmations, and the pool is whole
//! when it is imported again. Method: a RAM disk with a volatile cache and a count of losses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_bdev::malloc;
use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Geometry, Holder, Limits, Op, OpenError, Queue, Registry, Status, Support};
use nacre_hugepages::Pool;
use uuid::Uuid;

use super::rig::{self, Home, Host, run};
use crate::{Command, PoolError, PoolHandle, PoolState};

/// A RAM disk that says that it may lose writes.
struct Lossy {
    name: String,
    inner: Arc<dyn Bdev>,
    losses: AtomicU64,
    cuts: AtomicU64,
    is_volatile: bool,
}

impl Bdev for Lossy {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "lossy"
    }

    fn uuid(&self) -> Uuid {
        self.inner.uuid()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> Limits {
        Limits {
            volatile_cache: self.is_volatile,
            ..self.inner.limits()
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.inner.supports(op)
    }

    fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst) + self.cuts()
    }

    fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::SeqCst)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Arc::clone(&self.inner).open(pool)
    }
}

impl Lossy {
    /// Registers a disk of 64 MiB.
    fn add(home: &Home, name: &str, is_volatile: bool) -> Arc<Self> {
        let config = serde_json::json!({
            "name": format!("{name}-ram"), "block_size": 512, "num_blocks": 64 * 2048,
        });
        let inner = malloc::create(serde_json::from_value(config).unwrap()).unwrap();
        let lossy = Arc::new(Self {
            name: name.to_owned(),
            inner: inner as Arc<dyn Bdev>,
            losses: AtomicU64::new(2),
            cuts: AtomicU64::new(1),
            is_volatile,
        });
        let device = Arc::clone(&lossy) as Arc<dyn Bdev>;
        home.registry.register(device).unwrap();
        lossy
    }

    fn lose(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }
}

/// A pool on such a disk, with a volume.
fn start(is_volatile: bool) -> (Home, Arc<Lossy>, PoolHandle, Uuid, Host) {
    let home = Home::new(&Registry::new());
    let disk = Lossy::add(&home, "disk", is_volatile);
    let pool = home.create();
    let lvol = rig::volume(&pool, 1, 8);
    let host = Host::on(&pool, lvol);
    (home, disk, pool, lvol, host)
}

fn until_interrupted(pool: &PoolHandle) {
    let began = std::time::Instant::now();
    while pool.status().state != PoolState::Interrupted {
        assert!(began.elapsed().as_secs() < 60, "{:?}", pool.status().state);
        std::thread::yield_now();
    }
}

#[test]
fn a_flush_after_a_loss_is_not_confirmed() {
    let (home, disk, pool, lvol, mut host) = start(true);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    let device = rig::block_on(pool.lvol(lvol)).unwrap();
    let before = device.losses();
    assert_eq!(host.write(0, 16, 2), Status::Ok);
    disk.lose();
    assert_eq!(host.flush(), Status::WriteError);
    assert!(device.losses() > before, "users of the volume see it, too");
    until_interrupted(&pool);
    assert_eq!(pool.interrupted_by().as_deref(), Some("disk"));
    // Nothing is confirmed from now on: first writes, writes in place, reads, commands.
    assert_eq!(host.write(64, 1, 3), Status::Gone);
    assert_eq!(host.write(0, 1, 3), Status::Gone);
    assert_eq!(host.read(0, 1).0, Status::Gone);
    assert_eq!(host.flush(), Status::WriteError);
    let create = run(&pool, Command::Check).unwrap_err();
    assert_eq!(create, PoolError::Closed);
    run(&pool, Command::Close { export: false }).unwrap();
    assert_eq!(pool.status().state, PoolState::Closed);
    drop((host, device, pool));

    let (pool, _) = home.import();
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.read(0, 16), (Status::Ok, vec![2; 16 * 4096]));
    assert_eq!(host.write(64, 1, 4), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    assert_eq!(pool.status().state, PoolState::Online);
    rig::check(&pool);
}

/// The loss comes while writes, an unmap and an export are in progress: each of them ends, and none
/// is confirmed after the loss.
#[test]
fn a_loss_ends_all_that_is_in_flight() {
    let (home, disk, pool, lvol, mut host) = start(true);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    let pause = std::time::Duration::from_millis(200);
    let paused = home
        .reactor
        .run_future(move |_| async move { std::thread::sleep(pause) });
    let mut tokens: Vec<_> = (0..20)
        .map(|n| host.begin_write(32 + n * 16, 4, 5))
        .collect();
    tokens.push(host.begin_unmap(0, 16));
    disk.lose();
    let closed = Command::Close { export: true };
    let (_, exported) = rig::block_on(async { tokio::join!(paused, pool.run(closed)) });
    assert_eq!(exported.unwrap_err(), PoolError::Closed);
    for token in tokens {
        assert_eq!(host.end(token), Status::Gone);
    }
    run(&pool, Command::Close { export: false }).ok();
    drop((host, pool));
    let (pool, _) = home.import();
    assert_eq!(Host::on(&pool, lvol).flush(), Status::Ok);
    rig::check(&pool);
}

/// What a disk without a volatile cache has completed is not lost; a disk that was cut keeps the
/// rest.
#[test]
fn other_losses_interrupt_nothing() {
    for is_volatile in [false, true] {
        let (_home, disk, pool, _, mut host) = start(is_volatile);
        assert_eq!(host.write(0, 16, 1), Status::Ok);
        if is_volatile {
            disk.cuts.fetch_add(1, Ordering::SeqCst);
        } else {
            disk.lose();
        }
        assert_eq!(host.write(16, 16, 2), Status::Ok);
        if is_volatile {
            assert_eq!(host.flush(), Status::Ok);
        }
        assert_eq!(pool.status().state, PoolState::Online);
        rig::check(&pool);
    }
}

/// A further disk counts from when it joins, and not after it has left.
#[test]
fn a_further_disk_is_watched() {
    let (home, disk, pool, lvol, host) = start(true);
    // An idle queue does not answer the keeper.
    drop(host);
    let second = Lossy::add(&home, "second", true);
    second.lose();
    let holder = Holder::User("pool".into());
    let claim = home.registry.claim("second", holder, Usage::Exclusive);
    rig::block_on(pool.add_disk(claim.unwrap(), false)).unwrap();
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    assert_eq!(disk.losses(), 3);
    second.lose();
    assert_eq!(host.flush(), Status::WriteError);
    until_interrupted(&pool);
    assert_eq!(pool.interrupted_by().as_deref(), Some("second"));
    run(&pool, Command::Close { export: false }).unwrap();
}
