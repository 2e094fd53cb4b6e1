//! Tests of the null module: conformance, the data of reads, resizing, and its configuration.

use super::*;
use crate::conformance::Suite;
use crate::io::{Io, Status};
use crate::queue::Done;
use nacre_hugepages::ClassSpec;
use nacre_reactor::Nanos;

fn config(block_size: u32, reads: Reads) -> Config {
    Config {
        name: "Null0".into(),
        block_size,
        num_blocks: 1 << 40,
        physical_block_size: None,
        uuid: None,
        reads,
    }
}

#[test]
fn conforms() {
    for reads in [Reads::Zeroes, Reads::Untouched] {
        Suite::new(|| create(config(512, reads)).expect("a good configuration"))
            .keeps_no_data()
            .run();
    }
    Suite::new(|| create(config(4096, Reads::Zeroes)).expect("a good configuration"))
        .keeps_no_data()
        .run();
}

/// A read answers zeroes or leaves the buffer alone, as configured; a resize counts at once.
#[test]
fn reads_and_resize() {
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 1,
    }]);
    for (reads, expected) in [(Reads::Zeroes, 0), (Reads::Untouched, 9)] {
        let null = create(config(512, reads)).expect("a good configuration");
        let mut queue = Arc::clone(&null).open(&pool).expect("opens");
        let mut done = Done::with_capacity(1);
        let mut buf = pool.acquire(512).expect("free");
        buf.bytes_mut().expect("not shared").fill(9);
        queue
            .submit(Io::new(1, Op::Read, 99, 1).with(buf))
            .expect("empty queue");
        null.resize(99).expect("a good size");
        assert_eq!(queue.poll(Nanos::ZERO, &mut done), 1);
        let completion = done.drain().next().expect("just counted");
        assert!(completion.status.is_ok() && completion.data[0].iter().all(|b| *b == expected));
        queue
            .submit(Io::new(2, Op::Write, 99, 1))
            .expect("empty queue");
        queue.poll(Nanos::ZERO, &mut done);
        assert_eq!(
            done.drain().next().map(|c| c.status),
            Some(Status::OutOfRange)
        );
        assert_eq!(null.config().num_blocks, 99);
    }
}

/// Unknown keys are refused; optional keys have a default.
#[test]
fn configuration() {
    let short = r#"{"name":"n","block_size":512,"num_blocks":8}"#;
    let config: Config = serde_json::from_str(short).expect("complete");
    assert_eq!((config.reads, config.uuid), (Reads::Zeroes, None));
    let long = r#"{"name":"n","block_size":512,"num_blocks":8,"size":1}"#;
    let error = serde_json::from_str::<Config>(long).expect_err("an unknown key");
    assert!(error.to_string().contains("size"));
}
