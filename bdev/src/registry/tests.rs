//! Tests of the registry: names, claims, events, removal and resizing of devices.

use std::sync::atomic::{AtomicU32, Ordering};

use nacre_hugepages::ClassSpec;
use nacre_reactor::Nanos;

use super::*;
use crate::device::{Geometry, Limits, Support};
use crate::io::{Io, Op, Status};
use crate::null::{self, Null};
use crate::queue::{Done, Queue};

fn null(name: &str) -> Arc<Null> {
    let config = serde_json::json!({"name": name, "block_size": 512, "num_blocks": 1000});
    let config = serde_json::from_value(config).expect("a complete configuration");
    null::create(config).expect("a good configuration")
}

/// A device that refuses writes.
struct Fixed(Arc<Null>);

impl Bdev for Fixed {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn product_name(&self) -> &'static str {
        self.0.product_name()
    }

    fn uuid(&self) -> Uuid {
        self.0.uuid()
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn limits(&self) -> Limits {
        Limits {
            read_only: true,
            ..self.0.limits()
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.0.supports(op)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Arc::clone(&self.0).open(pool)
    }
}

fn pool() -> Pool {
    Pool::heap(&[ClassSpec {
        size: 4096,
        count: 8,
    }])
}

fn user() -> Holder {
    Holder::User("namespace 1 of nqn.x".into())
}

/// A device is found by name, alias and UUID in any notation; all three are taken for others.
#[test]
fn names() {
    let registry = Registry::new();
    let device = null("a");
    let uuid = device.uuid();
    registry.register(device).expect("the first");
    registry.add_alias("a", "lvs/one").expect("free");
    for name in [
        "a",
        "lvs/one",
        &uuid.to_string(),
        &uuid.simple().to_string().to_uppercase(),
    ] {
        assert_eq!(registry.lookup(name).expect(name).name(), "a");
    }
    assert!(matches!(
        registry.register(null("a")),
        Err(RegistryError::Exists { .. })
    ));
    assert!(matches!(
        registry.register(null("lvs/one")),
        Err(RegistryError::Exists { .. })
    ));
    registry.register(null("b")).expect("a free name");
    assert!(matches!(
        registry.add_alias("b", "a"),
        Err(RegistryError::Exists { .. })
    ));
    registry
        .rename_alias("a", "lvs/one", "lvs/two")
        .expect("it is there");
    assert!(registry.lookup("lvs/one").is_none() && registry.lookup("lvs/two").is_some());
    let missing = registry.rename_alias("a", "lvs/one", "lvs/three");
    assert!(matches!(missing, Err(RegistryError::NoSuchAlias { .. })));
    assert!(
        registry.lookup("lvs/three").is_none(),
        "nothing is half done"
    );
    let names: Vec<String> = registry
        .list()
        .iter()
        .map(|l| l.layer.name().to_owned())
        .collect();
    assert_eq!(names, ["a", "b"]);
    for bad in ["", " x", "x\n", &"y".repeat(256)] {
        assert!(
            matches!(
                registry.register(null(bad)),
                Err(RegistryError::BadName { .. })
            ),
            "{bad:?}"
        );
    }
}

/// A claimed device is not removed, and the error names the holder; an exclusive claim excludes all
/// others.
#[test]
fn claims() {
    let registry = Registry::new();
    registry.register(null("a")).expect("free");
    let shared = registry.claim("a", user(), Usage::Shared).expect("unused");
    let again = registry
        .claim("a", user(), Usage::Shared)
        .expect("shared is shared");
    let error = registry
        .remove("a", Removal::IfUnused)
        .err()
        .expect("it is claimed");
    assert!(
        error.to_string().contains("namespace 1 of nqn.x"),
        "{error}"
    );
    let above = || Holder::Bdevs(vec!["above".into()]);
    assert!(registry.claim("a", above(), Usage::Exclusive).is_err());
    drop((shared, again));
    let queue = registry.open("a", &pool()).expect("free for all");
    let open = registry.claim("a", above(), Usage::Exclusive);
    assert!(matches!(open, Err(RegistryError::Open { queues: 1, .. })));
    drop(queue);
    let exclusive = registry
        .claim("a", above(), Usage::Exclusive)
        .expect("no user is left");
    assert!(matches!(
        registry.open("a", &pool()),
        Err(RegistryError::Claimed { .. })
    ));
    assert!(registry.claim("a", user(), Usage::Shared).is_err());
    assert!(exclusive.open_module(&pool()).is_ok());
    drop(exclusive);
    assert!(
        registry
            .remove("a", Removal::IfUnused)
            .expect("unused")
            .is_done()
    );
}

/// While a read-only claim exists, nothing may write the device: neither another user nor a queue
/// without a claim. The device itself may refuse writes instead.
#[test]
fn read_only_claims() {
    let registry = Registry::new();
    registry.register(null("a")).expect("free");
    let claim = |usage| registry.claim("a", user(), usage);
    let shared = claim(Usage::Shared).expect("unused");
    assert!(claim(Usage::ReadOnly).is_err());
    drop(shared);
    let queue = registry.open("a", &pool()).expect("free for all");
    let open = claim(Usage::ReadOnly);
    assert!(matches!(open, Err(RegistryError::Open { queues: 1, .. })));
    drop(queue);
    let first = claim(Usage::ReadOnly).expect("nothing writes");
    let queue = first.open(&pool()).expect("opens");
    let second = claim(Usage::ReadOnly).expect("both read");
    for usage in [Usage::Shared, Usage::Exclusive] {
        let refused = claim(usage).err().expect("it may write");
        assert!(refused.to_string().contains("namespace 1"), "{refused}");
    }
    assert!(registry.open("a", &pool()).is_err());
    assert!(registry.remove("a", Removal::IfUnused).is_err());
    drop((queue, first, second));
    assert!(claim(Usage::Exclusive).is_ok());

    let fixed = Arc::new(Fixed(null("b")));
    registry.register(fixed).expect("free");
    let _shared = registry.claim("b", user(), Usage::Shared).expect("unused");
    let _queue = registry.open("b", &pool()).expect("free for all");
    let claim = registry.claim("b", user(), Usage::ReadOnly);
    let _claim = claim.expect("the device refuses writes");
    assert!(registry.claim("b", user(), Usage::Shared).is_ok());
    assert!(registry.claim("b", user(), Usage::Exclusive).is_err());
}

/// A hot removal answers `Gone` to open queues and is over when the last one is closed.
#[test]
fn hot_removal() {
    let registry = Registry::new();
    let events = registry.subscribe(8);
    registry.register(null("a")).expect("free");
    let claim = registry.claim("a", user(), Usage::Shared).expect("unused");
    let mut queue = claim.open(&pool()).expect("opens");
    let ticket = registry.remove("a", Removal::Hot).expect("hot");
    let called = Arc::new(AtomicU32::new(0));
    let calls = Arc::clone(&called);
    ticket.on_done(move || calls.store(1, Ordering::Relaxed));
    assert!(!ticket.is_done() && registry.lookup("a").is_none());
    assert!(matches!(
        registry.register(null("a")),
        Err(RegistryError::Removing { queues: 1, .. })
    ));
    assert!(claim.open(&pool()).is_err(), "no new queues");

    queue.submit(Io::new(5, Op::Flush, 0, 0)).expect("room");
    let mut done = Done::with_capacity(1);
    assert_eq!(queue.poll(Nanos(1), &mut done), 1);
    assert_eq!(
        done.drain().next().map(|c| (c.token, c.status)),
        Some((5, Status::Gone))
    );
    drop(queue);
    assert!(ticket.is_done() && called.load(Ordering::Relaxed) == 1);
    let name = || "a".to_owned();
    let seen: Vec<Event> = std::iter::from_fn(|| events.take()).collect();
    let expected = [
        Event::Registered { name: name() },
        Event::Removing { name: name() },
        Event::Unregistered { name: name() },
    ];
    assert_eq!(seen, expected);
    registry
        .register(null("a"))
        .expect("the name is free again");
    drop(claim);
    assert_eq!(registry.get("a").expect("there").claims.len(), 0);
}

/// A resize reaches queues that are open, and subscribers, once. A full list forgets the oldest.
#[test]
fn resize() {
    let registry = Registry::new();
    let events = registry.subscribe(1);
    let device = null("a");
    registry
        .register(Arc::clone(&device) as Arc<dyn Bdev>)
        .expect("free");
    let mut queue = registry.open("a", &pool()).expect("opens");
    let mut status_at = |lba: u64| {
        let mut done = Done::with_capacity(1);
        queue.submit(Io::new(1, Op::Unmap, lba, 1)).expect("room");
        queue.poll(Nanos(1), &mut done);
        done.drain().next().map(|c| c.status)
    };
    assert_eq!(status_at(1000), Some(Status::OutOfRange));
    device.resize(2000).expect("a good size");
    assert_eq!(registry.notify_resize("a").expect("there"), Some(2000));
    assert_eq!(registry.notify_resize("a").expect("there"), None);
    assert_eq!(status_at(1999), Some(Status::Ok));
    assert_eq!(events.missed(), 1);
    assert_eq!(
        events.take(),
        Some(Event::Resized {
            name: "a".into(),
            blocks: 2000
        })
    );
    assert_eq!(events.take(), None);
}

/// A device that shrinks keeps its announced size while a user relies on it, directly or through a
/// stacked device. Existing blocks are served, the rest fails, and a grow is measured from the
/// announced size.
#[test]
fn nothing_shrinks_under_its_users() {
    let registry = Registry::new();
    let device = null("a");
    registry
        .register(Arc::clone(&device) as Arc<dyn Bdev>)
        .expect("free");
    let config = serde_json::json!({"name": "above", "base_bdev_name": "a"});
    let config = serde_json::from_value(config).expect("a complete configuration");
    let above = crate::passthru::create(config, &registry).expect("unused");
    registry.register(above).expect("free");
    let host = Arc::new(Mutex::new(Some("host nqn.h".to_owned())));
    let connected = Arc::clone(&host);
    let watch = Arc::new(move || connected.lock().clone());
    let claim = registry
        .claim_watched("above", user(), Usage::Shared, watch)
        .expect("unused");
    let mut queue = claim.open(&pool()).expect("opens");
    let mut status_at = |lba: u64| {
        let mut done = Done::with_capacity(1);
        queue.submit(Io::new(1, Op::Unmap, lba, 1)).expect("room");
        queue.poll(Nanos(1), &mut done);
        done.drain().next().map(|c| c.status)
    };
    let events = registry.subscribe(8);
    let sizes = || {
        let blocks = |name| registry.lookup(name).expect("there").geometry().blocks;
        (blocks("a"), blocks("above"))
    };

    // The check alone has no visible effect.
    let refused = registry.may_shrink("a", 400 * 512);
    assert!(matches!(
        refused,
        Err(RegistryError::WouldShrink {
            wanted: 204_800,
            ..
        })
    ));
    assert_eq!(events.take(), None, "it is as it was");
    registry.may_shrink("a", 1000 * 512).expect("no smaller");
    assert_eq!(status_at(999), Some(Status::Ok));

    device.resize(400).expect("a good size");
    for name in ["a", "above"] {
        match registry.notify_resize(name) {
            Err(RegistryError::Shrinks {
                announced,
                now,
                user,
                ..
            }) if name == "a" => {
                assert_eq!((announced, now), (1000 * 512, 400 * 512));
                assert_eq!(user, "host nqn.h");
            }
            // This is the stacked device, which did not change.
            Ok(None) if name == "above" => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(sizes(), (1000, 1000));
    for name in ["a", "above", "above"] {
        // Users that keep data on it lost the end.
        let name = name.to_owned();
        assert_eq!(events.take(), Some(Event::Cut { name }));
    }
    let above = registry.lookup("above").expect("there");
    assert_eq!((above.present_blocks(), above.least_blocks()), (400, 400));
    assert_eq!(status_at(399), Some(Status::Ok));
    assert_eq!(status_at(400), Some(Status::OutOfRange));
    assert_eq!(status_at(1000), Some(Status::OutOfRange));

    device.resize(700).expect("a good size");
    assert!(registry.notify_resize("a").is_err(), "still too few");
    while let Some(event) = events.take() {
        assert!(matches!(event, Event::Cut { .. }), "{event:?}");
    }
    device.resize(1000).expect("a good size");
    assert_eq!(registry.notify_resize("a").expect("as it was"), None);
    assert_eq!(events.take(), None, "no subscriber got an event");
    assert_eq!(status_at(999), Some(Status::Ok));
    device.resize(1200).expect("a good size");
    assert_eq!(registry.notify_resize("a").expect("larger"), Some(1200));
    assert_eq!(sizes(), (1200, 1200));

    device.resize(600).expect("a good size");
    assert!(registry.notify_resize("a").is_err());
    assert_eq!(
        registry.take_size("a", Shrink::Forced).expect("forced"),
        Some(600)
    );
    assert_eq!(sizes(), (600, 600));
    *host.lock() = None;
    registry.may_shrink("a", 500 * 512).expect("no host");
    device.resize(500).expect("a good size");
    assert_eq!(registry.notify_resize("a").expect("no host"), Some(500));
    assert_eq!(sizes(), (500, 500));
    drop((queue, claim));
    let volume = registry
        .claim("above", user(), Usage::Exclusive)
        .expect("unused");
    device.resize(100).expect("a good size");
    let refused = registry
        .notify_resize("a")
        .expect_err("a holder without a watch relies on it");
    assert!(
        refused.to_string().contains("namespace 1 of nqn.x"),
        "{refused}"
    );
    drop(volume);
    let queue = registry.open("above", &pool()).expect("free for all");
    let refused = registry
        .notify_resize("a")
        .expect_err("so does who has it open");
    assert!(refused.to_string().contains("1 open queues"), "{refused}");
    drop(queue);
    assert_eq!(registry.notify_resize("a").expect("unused"), Some(100));
}

/// A device that shrank during a restart, and the devices on top of it, keep the size that hosts
/// saw before.
#[test]
fn a_size_survives_a_restart() {
    let registry = Registry::new();
    let layer = registry.register_announced(null("a"), 5000).expect("free");
    assert_eq!(layer.geometry().blocks, 5000);
    let config = serde_json::json!({"name": "above", "base_bdev_name": "a"});
    let config = serde_json::from_value(config).expect("a complete configuration");
    let above = crate::passthru::create(config, &registry).expect("unused");
    let above = registry.register(above).expect("free");
    assert_eq!(above.geometry().blocks, 5000);
    // No user has come: a check is enough.
    assert_eq!(registry.notify_resize("a").expect("unused"), Some(1000));
    assert_eq!(above.geometry().blocks, 1000);
    let larger = registry.register_announced(null("b"), 10).expect("free");
    assert_eq!(larger.geometry().blocks, 1000);
}

/// A queue that another core closes last ends the removal, but takes the device apart elsewhere.
#[test]
fn closed_on_another_core() {
    let registry = Registry::new();
    registry.register(null("a")).expect("free");
    let (removed, remove) = std::sync::mpsc::channel();
    let (opened, open) = std::sync::mpsc::channel();
    let theirs = registry.clone();
    let core = std::thread::spawn(move || {
        let queue = theirs.open("a", &pool()).expect("opens");
        opened.send(()).expect("the main thread waits");
        remove.recv().expect("the main thread removes it");
        drop(queue);
    });
    open.recv().expect("it opens");
    let ticket = registry.remove("a", Removal::Hot).expect("by force");
    let (done, wait) = std::sync::mpsc::channel();
    ticket.on_done(move || {
        let name = std::thread::current().name().map(str::to_owned);
        done.send(name).expect("the main thread waits");
    });
    assert!(!ticket.is_done());
    removed.send(()).expect("it waits");
    assert_eq!(
        wait.recv().expect("it is called").as_deref(),
        Some("bdev-close")
    );
    core.join().expect("no panic");
    assert!(registry.lookup("a").is_none() && registry.register(null("a")).is_ok());
}
