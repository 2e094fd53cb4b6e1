//! Tests of the passthru module: conformance, and the removal of its base device.

use super::*;
use crate::device::{Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::malloc;
use crate::null;
use crate::registry::{Event, Removal};

fn config() -> Config {
    Config {
        name: "PT0".into(),
        base_bdev_name: "Base".into(),
        uuid: None,
    }
}

#[test]
fn conforms() {
    crate::conformance::run(|| {
        let registry = Registry::new();
        let base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 2048});
        let base = serde_json::from_value(base).expect("a complete configuration");
        registry
            .register(malloc::create(base).expect("a good one"))
            .expect("free");
        create(config(), &registry).expect("the base is there")
    });
}

/// Goal: the device takes the blocks that its base takes; a part of a base does not know.
#[test]
fn allocated_blocks_pass_through() {
    let registry = Registry::new();
    let base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 2048});
    let base = null::create(serde_json::from_value(base).expect("complete")).expect("good");
    registry.register(Arc::new(Thin(base))).expect("free");
    let device = create(config(), &registry).expect("the base is there");
    assert_eq!(Bdev::allocated_blocks(&*device), Some(5000));
    registry.register(device).expect("free");
    let layer = registry.get("PT0").expect("there").layer;
    assert_eq!(layer.allocated_blocks(), Some(2048), "at most all");
    let split = serde_json::json!({"base_bdev": "PT0", "split_count": 2});
    let mut split = serde_json::from_value(split).expect("complete");
    for part in crate::split::create(&mut split, &registry).expect("the base is there") {
        assert_eq!(Bdev::allocated_blocks(&*part), None);
    }
}

/// The claim excludes other users. A resize of the base resizes the device, a removal of the base
/// removes it, and both cause events.
#[test]
fn follows_its_base() {
    let registry = Registry::new();
    let base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 2048});
    let base = null::create(serde_json::from_value(base).expect("complete")).expect("good");
    registry
        .register(Arc::clone(&base) as Arc<dyn Bdev>)
        .expect("free");
    let device = create(config(), &registry).expect("the base is there");
    assert_eq!(
        device.config().uuid,
        Some(Uuid::new_v5(&base.uuid(), b"PT0"))
    );
    assert!(
        create(
            Config {
                name: "PT1".into(),
                ..config()
            },
            &registry
        )
        .is_err(),
        "claimed"
    );
    registry.register(device).expect("free");
    let events = registry.subscribe(16);

    base.resize(4096).expect("a good size");
    registry.notify_resize("Base").expect("there");
    assert_eq!(
        registry.lookup("PT0").expect("there").geometry().blocks,
        4096
    );

    assert!(
        registry.remove("Base", Removal::IfUnused).is_err(),
        "it has a device on it"
    );
    assert!(
        registry
            .remove("Base", Removal::Hot)
            .expect("by force")
            .is_done()
    );
    assert_eq!(registry.list().len(), 0);
    let seen: Vec<Event> = std::iter::from_fn(|| events.take()).collect();
    let name = |text: &str| text.to_owned();
    let expected = [
        Event::Resized {
            name: name("Base"),
            blocks: 4096,
        },
        Event::Resized {
            name: name("PT0"),
            blocks: 4096,
        },
        Event::Removing { name: name("Base") },
        Event::Removing { name: name("PT0") },
        Event::Unregistered { name: name("PT0") },
        Event::Unregistered { name: name("Base") },
    ];
    assert_eq!(seen, expected);
}

/// A device that says how many blocks take space.
struct Thin(Arc<null::Null>);

impl Bdev for Thin {
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
        self.0.limits()
    }

    fn supports(&self, op: Op) -> Support {
        self.0.supports(op)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Arc::clone(&self.0).open(pool)
    }

    fn allocated_blocks(&self) -> Option<u64> {
        Some(5000)
    }
}
