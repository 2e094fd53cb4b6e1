//! Measures 4 KiB random reads of one file on one core, through a queue of the file module: page
//! cache and O_DIRECT, depth 1 and 32, with and without registered buffers and deferred task work.
//! `pread` on the same file is the reference.
//!
//! ```text
//! cargo run --release -p nacre-bdev-uring --example qd -- [file] [seconds per line]
//! ```
//! Without a file it makes one of 256 MiB in the temporary directory. Three interleaved rounds;
//! the median counts.

use std::error::Error;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Done, Io, Op, Queue};
use nacre_bdev_uring::{Config, RingOptions, create};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_random::Random;
use nacre_reactor::Nanos;

const ROUNDS: usize = 3;
const SIZE: u64 = 256 << 20;

#[derive(Clone, Copy)]
enum Method {
    Pread,
    Queue {
        depth: u32,
        registered_buffers: bool,
        defer_taskrun: bool,
    },
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = tempfile::tempdir()?;
    let path = match args.next() {
        Some(path) => PathBuf::from(path),
        None => filled(dir.path().join("qd.img"))?,
    };
    let seconds: f64 = args.next().map_or(Ok(0.5), |s| s.parse())?;
    let time = Duration::from_secs_f64(seconds);

    let mut lines = Vec::new();
    for direct in [false, true] {
        lines.push((direct, Method::Pread, Vec::new()));
        for depth in [1, 32] {
            for (registered_buffers, defer_taskrun) in
                [(true, true), (false, true), (true, false), (false, false)]
            {
                let method = Method::Queue {
                    depth,
                    registered_buffers,
                    defer_taskrun,
                };
                lines.push((direct, method, Vec::new()));
            }
        }
    }
    for _ in 0..ROUNDS {
        for (direct, method, rates) in &mut lines {
            rates.push(match *method {
                Method::Pread => pread(&path, *direct, time)?,
                Method::Queue {
                    depth,
                    registered_buffers,
                    defer_taskrun,
                } => {
                    let ring = RingOptions {
                        registered_buffers,
                        defer_taskrun,
                        ..Default::default()
                    };
                    queue(&path, *direct, depth, ring, time)?
                }
            });
        }
    }
    println!(
        "{:10} {:28} {:>10} {:>10}",
        "4k read", "how", "kIOPS", "us each"
    );
    for (direct, method, rates) in &mut lines {
        rates.sort_by(f64::total_cmp);
        let rate = rates[ROUNDS / 2];
        let (how, depth) = match *method {
            Method::Pread => ("pread".to_owned(), 1),
            Method::Queue {
                depth,
                registered_buffers,
                defer_taskrun,
            } => {
                let buffers = if registered_buffers {
                    "registered"
                } else {
                    "plain"
                };
                let task = if defer_taskrun { "defer" } else { "coop" };
                (format!("depth {depth:2}, {buffers}, {task}"), depth)
            }
        };
        let kind = if *direct { "direct" } else { "cached" };
        let each = f64::from(depth) / rate * 1e6;
        println!("{kind:10} {how:28} {:>10.1} {each:>10.2}", rate / 1e3);
    }
    Ok(())
}

fn filled(path: PathBuf) -> Result<PathBuf, Box<dyn Error>> {
    let file = std::fs::File::create(&path)?;
    let chunk = vec![0x5a; 1 << 20];
    for at in (0..SIZE).step_by(chunk.len()) {
        file.write_all_at(&chunk, at)?;
    }
    file.sync_all()?;
    Ok(path)
}

fn pread(path: &PathBuf, direct: bool, time: Duration) -> Result<f64, Box<dyn Error>> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let mut memory = vec![0; 8192];
    let skew = memory.as_ptr().align_offset(4096);
    let (mut random, mut count, start) = (Random::new(1), 0u64, Instant::now());
    while start.elapsed() < time {
        for _ in 0..64 {
            let at = random.below(blocks) * 4096;
            file.read_exact_at(&mut memory[skew..skew + 4096], at)?;
            count += 1;
        }
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn queue(
    path: &PathBuf,
    direct: bool,
    depth: u32,
    ring: RingOptions,
    time: Duration,
) -> Result<f64, Box<dyn Error>> {
    let config = Config {
        block_size: Some(4096),
        readonly: true,
        direct: Some(direct),
        ring,
        ..Config::new("qd", path)
    };
    let device = create(config)?;
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 64,
    }]);
    let mut queue = Arc::clone(&device).open(&pool)?;
    let blocks = device.geometry().blocks;
    let mut free: Vec<Buf> = (0..depth).filter_map(|_| pool.acquire(4096)).collect();
    let mut done = Done::with_capacity(depth as usize);
    let (mut random, mut count, start) = (Random::new(1), 0u64, Instant::now());
    while start.elapsed() < time {
        for _ in 0..64 {
            while let Some(buf) = free.pop() {
                let io = Io::new(0, Op::Read, random.below(blocks), 1).with(buf);
                queue.submit(io).map_err(|_| "the queue is deep enough")?;
            }
            count += poll(&mut *queue, &mut done, &mut free)?;
        }
    }
    let rate = count as f64 / start.elapsed().as_secs_f64();
    while queue.inflight() > 0 {
        poll(&mut *queue, &mut done, &mut free)?;
    }
    Ok(rate)
}

fn poll(
    queue: &mut dyn Queue,
    done: &mut Done,
    free: &mut Vec<Buf>,
) -> Result<u64, Box<dyn Error>> {
    let found = queue.poll(Nanos::ZERO, done);
    for mut completion in done.drain() {
        if !completion.status.is_ok() {
            return Err(format!("{:?}", completion.status).into());
        }
        free.extend(completion.data.pop());
    }
    Ok(found as u64)
}
