//! Measures the cost of the layer: 4 KiB I/O on the null device and on the RAM disk, with the
//! module's own queue and through the layer. `cargo bench -p nacre-bdev` prints nanoseconds per
//! I/O, the median of several runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Done, Io, Layer, Op, Queue, malloc, null};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::Nanos;

const DEPTH: usize = 32;
const ROUNDS: usize = 9;
const IOS: usize = 200_000;

fn main() {
    let pool = Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: DEPTH + 4,
        },
        ClassSpec {
            size: 64 << 10,
            count: 8,
        },
    ]);
    println!(
        "{:<24} {:>10} {:>10} {:>10}",
        "ns per I/O, depth 32", "module", "layer", "difference"
    );
    for (name, device) in devices() {
        for op in [Op::Read, Op::Write] {
            let mut module = Arc::clone(&device).open(&pool).expect("opens");
            let mut layer = Layer::new(Arc::clone(&device))
                .open_queue(&pool)
                .expect("opens");
            let (mut without, mut with) = (Vec::new(), Vec::new());
            // Takes the device's memory.
            measure(&mut layer, Op::Write, &pool);
            // Interleaved, so that whatever else the machine does meets both.
            for _ in 0..ROUNDS {
                without.push(measure(&mut *module, op, &pool));
                with.push(measure(&mut layer, op, &pool));
            }
            let (without, with) = (median(without), median(with));
            let label = format!("{name} {}", op.name());
            println!(
                "{label:<24} {without:>10.1} {with:>10.1} {:>10.1}",
                with - without
            );
        }
    }
}

fn measure(queue: &mut dyn Queue, op: Op, pool: &Pool) -> f64 {
    let mut bufs: Vec<Buf> = (0..DEPTH)
        .map(|_| pool.acquire(4096).expect("enough"))
        .collect();
    let mut done = Done::with_capacity(DEPTH);
    let mut now = Nanos(1);
    let started = Instant::now();
    for turn in 0..IOS / DEPTH {
        for at in 0..DEPTH {
            let buf = bufs.pop().expect("as many as the depth");
            let lba = ((turn * DEPTH + at) * 8 % 8192) as u64;
            queue
                .submit(Io::new(at as u64, op, lba, 8).with(buf))
                .expect("below its depth");
        }
        now = now + Duration::from_micros(1);
        queue.poll(now, &mut done);
        bufs.extend(done.drain().flat_map(|completion| completion.data));
    }
    started.elapsed().as_nanos() as f64 / IOS as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn devices() -> Vec<(&'static str, Arc<dyn Bdev>)> {
    fn config<T: serde::de::DeserializeOwned>(json: serde_json::Value) -> T {
        serde_json::from_value(json).expect("a complete configuration")
    }
    let null = serde_json::json!({"name": "N", "block_size": 512, "num_blocks": 16384,
        "reads": "untouched"});
    let malloc = serde_json::json!({"name": "M", "block_size": 512, "num_blocks": 16384});
    vec![
        (
            "null",
            null::create(config(null)).expect("a good configuration"),
        ),
        (
            "malloc",
            malloc::create(config(malloc)).expect("a good configuration"),
        ),
    ]
}
