//! The bdev conformance suite on the file module: files and block devices, direct and buffered I/O,
//! with each setup of the ring.

use nacre_bdev::conformance;

use super::*;

/// The suite over fresh files under `place`; a file that was opened outlives its name.
fn suite(place: &Path, adjust: impl Fn(Config) -> Config) {
    conformance::run(|| {
        let temp = Temp::under(place, 4 * MIB);
        create(adjust(temp.config())).expect("opened")
    });
}

#[test]
fn direct_file() {
    suite(&std::env::temp_dir(), |config| config);
}

#[test]
fn direct_file_of_large_blocks_on_a_plain_ring() {
    let ring = RingOptions {
        depth: 16,
        registered_buffers: false,
        defer_taskrun: false,
    };
    suite(&std::env::temp_dir(), |config| Config {
        block_size: Some(4096),
        ring,
        ..config
    });
}

#[test]
fn page_cache() {
    suite(&std::env::temp_dir(), |config| Config {
        direct: Some(false),
        ..config
    });
}

#[test]
fn memory_files() {
    for place in places().iter().skip(1) {
        suite(place, |config| config);
    }
}

#[test]
fn without_fallocate() {
    suite(&std::env::temp_dir(), |config| Config {
        fallocate: Some(false),
        ..config
    });
}

/// One device for all cases: each takes it over from the one before.
#[test]
fn loop_device() {
    let Some(disk) = Loop::attach(8 * MIB, 512) else {
        return;
    };
    conformance::run(|| create(Config::new("loop", &disk.path)).expect("opened"));
}
