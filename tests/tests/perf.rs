//! Tests of the library behind `nacre perf`, with a target in the same process, over real TCP.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_engine_load::{self as load, Job, JobOptions, Limit, Report, Rw, Sizes, Verify, Wrong};
use nacre_nvmf::host::{Connector, HostOptions};
use nacre_nvmf_wire::tcp::Digests;
use nacre_tests::target::{SUBNQN, TestTarget, nqn, ram};
use nacre_transport_connect::{Session, TcpConnector};

fn job(rw: Rw, size: u32, ios: u64) -> Job {
    Job {
        options: JobOptions {
            rw,
            mix: 50,
            depth: 32,
            range: None,
            offset: 0,
            rate: None,
            warmup: Duration::ZERO,
            keep_going: false,
        },
        sizes: Sizes {
            min: size,
            max: size,
        },
        queues: 2,
        cores: Vec::new(),
        limit: Limit::Ios(ios),
        verify: Verify::On,
        seed: 42,
        drain: Duration::from_secs(10),
    }
}

fn run(target: &TestTarget, job: &Job, digests: Digests) -> Report {
    let mut options = HostOptions::new(
        nqn("nqn.2025-01.io.nacre:host"),
        *b"0123456789abcdef",
        nqn(SUBNQN),
    );
    options.io_queues = job.queues;
    options.queue_entries = job.options.depth + 1;
    options.reconnect_delay = Duration::from_millis(20);
    let entries = options.queue_entries;
    let connector: Arc<dyn Connector> =
        Arc::new(TcpConnector::new(target.address, digests, entries));
    let mut session = Session::connect(&target.uri(), options, &connector).unwrap();
    let mut watch = |_: &load::Progress| true;
    let uri = target.uri();
    let report = load::run(job, &mut session, &connector, (&uri, None), &mut watch).unwrap();
    session.disconnect();
    report
}

/// Goal: unverified writes share a few buffers. With every mix and size each I/O gets a buffer, and
/// the written data is not zero.
#[test]
fn unverified_io() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    for (rw, min, max) in [
        (Rw::RandRw, 512, 131_072),
        (Rw::RandRead, 4096, 4096),
        (Rw::Write, 1 << 17, 1 << 17),
    ] {
        let job = Job {
            sizes: Sizes { min, max },
            verify: Verify::Off,
            ..job(rw, 0, 1000)
        };
        let report = run(&target, &job, Digests::NONE);
        assert!(report.is_good(), "{rw}: {report:?}");
        assert_eq!(report.read.ios + report.write.ios, 1000, "{rw}");
    }
    let only = Job {
        verify: Verify::Only,
        ..job(Rw::RandRead, 4096, 1)
    };
    let scan = run(&target, &only, Digests::NONE);
    let found = scan.verification.as_ref().unwrap();
    let first = found.first_mismatch.as_ref().unwrap();
    assert!(matches!(first.found, Wrong::Foreign { .. }), "{first:?}");
}

/// Goal: verified data is read back as written, for every mix, size and digest setting.
#[test]
fn verified_io() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 16 << 20));
    for (rw, min, max, digests) in [
        (Rw::RandWrite, 4096, 4096, Digests::NONE),
        (Rw::RandRw, 512, 131_072, Digests::BOTH),
        (Rw::Write, 65_536, 65_536, Digests::NONE),
        (Rw::RandRead, 8192, 8192, Digests::NONE),
    ] {
        let job = Job {
            sizes: Sizes { min, max },
            ..job(rw, 0, 2000)
        };
        let report = run(&target, &job, digests);
        let found = report.verification.as_ref().unwrap();
        assert!(report.is_good(), "{rw}: {report:?}");
        assert_eq!(report.read.ios + report.write.ios, 2000, "{rw}");
        assert!(found.blocks_checked >= 2000, "{rw}: {found:?}");
        assert_eq!(report.read.ios > 0, rw != Rw::RandWrite && rw != Rw::Write);
        assert_eq!(report.write.ios > 0, rw != Rw::RandRead);
        assert!(report.iops > 0.0 && report.seconds > 0.0);
    }
}

/// Goal: a block that another program changed during the run is found and named.
#[test]
fn damage_is_found() {
    let target = TestTarget::start();
    let disk = ram("ram", 4096, 4 << 20);
    target.add_namespace(Arc::clone(&disk));
    let written = run(&target, &job(Rw::RandRead, 4096, 100), Digests::NONE);
    assert!(written.is_good());

    let only = Job {
        verify: Verify::Only,
        ..job(Rw::RandRead, 4096, 1)
    };
    let scan = run(&target, &only, Digests::NONE);
    assert!(scan.is_good(), "{scan:?}");
    assert_eq!(scan.verification.unwrap().blocks_checked, 1024);

    overwrite(&disk, 77);
    let scan = run(&target, &only, Digests::NONE);
    let found = scan.verification.as_ref().unwrap();
    assert!(!scan.is_good());
    assert_eq!(found.blocks_wrong, 1, "{found:?}");
    let first = found.first_mismatch.as_ref().unwrap();
    assert_eq!(first.lba, 77);
    assert!(matches!(first.found, Wrong::Foreign { .. }), "{first:?}");
}

fn overwrite(disk: &Arc<dyn Bdev>, lba: u64) {
    use nacre_bdev::{Done, Io, Op};
    let pool = nacre_hugepages::Pool::heap(&[nacre_hugepages::ClassSpec {
        size: 4096,
        count: 1,
    }]);
    let mut queue = Arc::clone(disk).open(&pool).unwrap();
    let mut buf = pool.acquire(4096).unwrap();
    buf.bytes_mut().unwrap().fill(0x5a);
    queue
        .submit(Io::new(1, Op::Write, lba, 1).with(buf))
        .unwrap();
    let mut done = Done::with_capacity(1);
    while queue.poll(nacre_reactor::Nanos(1), &mut done) == 0 {}
}
