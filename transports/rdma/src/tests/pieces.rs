//! Tests of memory that is larger than the largest memory region of a device.

use nacre_hugepages::{Buf, ClassSpec, GRAIN};
use nacre_nvmf::transport::conformance::{self, Rig};
use nacre_nvmf::transport::{Address, ListenerId, ListenerOptions, Plug};
use nacre_transport_rdma_verbs::MrKey;
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};

use super::rig::{Options, TARGET, TestRig};
use crate::{RdmaConfig, RdmaPlug};

/// Pools have their small buffers before the end of a piece and the large ones behind it; receives
/// take several pieces.
fn options(change: impl FnOnce(&mut Options)) -> Options {
    Options::with(|options| {
        options.config.srq_size = 4096;
        options.lead = GRAIN - 96 * 8192 - 4096;
        change(options);
    })
}

/// The suite of all plugs over the shortest possible regions: by the limit of the devices of both
/// sides, and by the configured limit if they accept more.
#[test]
fn conforms() {
    conformance::run(|| {
        TestRig::new(options(|options| {
            options.device.max_mr_size = 2 * GRAIN as u64 - 1;
        }))
    });
    conformance::run(|| TestRig::new(options(|options| options.config.max_mr_size = GRAIN as u64)));
}

/// Goal: all memory is registered, piece by piece, each with a key that its buffers find. The
/// registrations are shown, do not grow under load, and come back with a device.
#[test]
fn regions_are_shown() {
    let mut rig = TestRig::new(options(|options| {
        options.config.max_mr_size = 3 * GRAIN as u64;
    }));
    let class = ClassSpec {
        size: 128 << 10,
        count: 300,
    };
    let pool = rig.pool(&[class]);
    let check = |rig: &TestRig| {
        let [known] = &rig.plug.memory_regions()[..] else {
            panic!("one device is in use")
        };
        assert_eq!(known.max_mr_size, 2 * GRAIN as u64);
        let there = known.domain.registrations();
        assert_eq!(there.regions, known.regions.len() as u64);
        assert_eq!(
            there.bytes,
            known.regions.iter().map(|r| r.bytes).sum::<u64>()
        );
        for (at, arena) in rig.plug.arenas().iter().enumerate() {
            let mut end = 0;
            for region in known.regions.iter().filter(|r| r.arena == at) {
                assert_eq!(region.offset, end, "no holes");
                assert!(region.bytes > 0 && region.bytes <= known.max_mr_size);
                end += region.bytes;
            }
            assert_eq!(end, arena.len() as u64);
        }
        let mut keys: Vec<u32> = known.regions.iter().map(|r| r.lkey).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), known.regions.len(), "a key each");
        keys
    };
    let keys = check(&rig);
    assert!(keys.len() >= 4, "two arenas of two pieces or more");
    let bufs: Vec<Buf> = std::iter::from_fn(|| pool.acquire(class.size)).collect();
    assert_eq!(bufs.len(), class.count);
    let key = |buf: &Buf| MrKey::from_bits(buf.key(0).expect("all of it is known")).lkey;
    let mut used: Vec<u32> = bufs.iter().map(key).collect();
    used.dedup();
    assert_eq!(used.len(), 2, "both pieces are used, in order");
    assert!(used.iter().all(|key| keys.contains(key)));

    rig.fabric.remove_device(rig.device);
    for _ in 0..8 {
        rig.manage();
    }
    assert!(rig.plug.memory_regions().is_empty());
    assert_eq!(bufs[0].key(0), None);
    rig.fabric
        .add_device(attributes("sim_target"), &[TARGET])
        .unwrap();
    for _ in 0..8 {
        rig.manage();
        rig.clock.advance(std::time::Duration::from_secs(2));
    }
    assert_eq!(check(&rig).len(), keys.len());
}

/// Goal: only a device whose regions would be shorter than a buffer is refused, with an
/// explanation.
#[test]
fn too_little_is_refused() {
    let fabric = Fabric::new();
    let mut small = attributes("small");
    small.max_mr_size = GRAIN as u64 - 1;
    let other = "10.0.0.9".parse().unwrap();
    fabric.add_device(small, &[TARGET]).unwrap();
    fabric.add_device(attributes("other"), &[other]).unwrap();
    let plug =
        RdmaPlug::without_thread(RdmaConfig::default(), fabric.provider(), Vec::new()).unwrap();
    let listen = |ip| {
        plug.listen(
            ListenerId(1),
            &Address::Ip((ip, 4420).into()),
            &ListenerOptions::default(),
        )
    };
    let error = listen(TARGET).unwrap_err();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    let why =
        "the size of a memory region (max_mr_size) is 16777216, the device small allows 16777215";
    assert!(text.contains(why), "{text}");
    assert!(plug.memory_regions().is_empty());
    listen(other).unwrap();
    assert_eq!(plug.memory_regions().len(), 1);

    let config = RdmaConfig {
        max_mr_size: GRAIN as u64 - 1,
        ..RdmaConfig::default()
    };
    let error = config.validate().unwrap_err().to_string();
    assert_eq!(
        error,
        "max_mr_size is 16777215, but must be at least 16777216"
    );
}
