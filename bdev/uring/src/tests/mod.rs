//! Tests of the file module on real files: in the temporary directory, in memory (tmpfs), and on a
//! loop device where the machine allows one. A test that cannot run says so.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Completion, Done, Flags, Io, Op, Queue, Status, Support};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::{Idle, Nanos};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{Config, CreateError, Product, RingOptions, UringBdev, create};

const MIB: u64 = 1 << 20;

mod conformance;
mod files;
mod refusals;
mod rings;

/// A device with one open queue and the core's pool.
struct Rig {
    device: Arc<UringBdev>,
    queue: Box<dyn Queue>,
    pool: Pool,
}

impl Rig {
    fn open(config: Config) -> Self {
        let device = create(config).expect("the file can be opened");
        Self::on(device)
    }

    fn on(device: Arc<UringBdev>) -> Self {
        let classes = [
            ClassSpec {
                size: 8192,
                count: 64,
            },
            ClassSpec {
                size: 1 << 20,
                count: 4,
            },
        ];
        let pool = Pool::heap(&classes);
        let queue = Arc::clone(&device)
            .open(&pool)
            .expect("io_uring works here");
        Self {
            device,
            queue,
            pool,
        }
    }

    fn buf(&self, len: usize, fill: u8) -> Buf {
        let mut buf = self.pool.acquire(len).expect("the pool is large enough");
        buf.bytes_mut().expect("the only handle").fill(fill);
        buf
    }

    fn block_size(&self) -> usize {
        self.device.geometry().block_size as usize
    }

    fn submit(&mut self, io: Io) {
        self.queue.submit(io).expect("the queue has room");
    }

    /// Polls until `count` I/Os have completed.
    fn collect(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Done::with_capacity(64);
        let mut all = Vec::new();
        let start = Instant::now();
        while all.len() < count {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "{} of {count}",
                all.len()
            );
            self.queue.poll(Nanos::ZERO, &mut done);
            all.extend(done.drain());
        }
        all
    }

    fn run(&mut self, io: Io) -> Completion {
        let token = io.token;
        self.submit(io);
        let completion = self.collect(1).pop().expect("one");
        assert_eq!(completion.token, token);
        assert_eq!(self.queue.inflight(), 0);
        completion
    }

    fn status(&mut self, op: Op, lba: u64, blocks: u32) -> Status {
        self.run(Io::new(1, op, lba, blocks)).status
    }

    fn write(&mut self, lba: u64, blocks: u32, fill: u8) -> Status {
        let data = self.buf(blocks as usize * self.block_size(), fill);
        self.run(Io::new(2, Op::Write, lba, blocks).with(data))
            .status
    }

    /// The byte that all of the range holds.
    fn fill_of(&mut self, lba: u64, blocks: u32) -> u8 {
        let data = self.buf(blocks as usize * self.block_size(), 0xee);
        let completion = self.run(Io::new(3, Op::Read, lba, blocks).with(data));
        assert_eq!(completion.status, Status::Ok);
        let bytes = &completion.data[0];
        assert!(
            bytes.iter().all(|b| *b == bytes[0]),
            "mixed contents at {lba}"
        );
        bytes[0]
    }
}

/// A file of `size` bytes under `dir`, gone at the end of the test.
struct Temp {
    dir: tempfile::TempDir,
    path: PathBuf,
}

impl Temp {
    fn new(size: u64) -> Self {
        Self::under(&std::env::temp_dir(), size)
    }

    fn under(dir: &Path, size: u64) -> Self {
        let dir = tempfile::tempdir_in(dir).expect("a temporary directory");
        let path = dir.path().join("disk.img");
        File::create(&path)
            .and_then(|f| f.set_len(size))
            .expect("a file");
        Self { dir, path }
    }

    fn config(&self) -> Config {
        Config::new("u0", &self.path)
    }
}

/// Where files are tried: the temporary directory, and memory if there is a tmpfs.
fn places() -> Vec<PathBuf> {
    let shm = PathBuf::from("/dev/shm");
    let mut places = vec![std::env::temp_dir()];
    if File::create(shm.join(format!("nacre-{}", std::process::id()))).is_ok() {
        let _ = fs::remove_file(shm.join(format!("nacre-{}", std::process::id())));
        places.push(shm);
    } else {
        eprintln!("SKIPPED on tmpfs: /dev/shm cannot be written");
    }
    places
}

/// A loop device on a file, detached when dropped.
struct Loop {
    path: PathBuf,
    _file: Temp,
}

impl Loop {
    /// `None`, aloud, where the machine does not let us.
    fn attach(size: u64, sector: u32) -> Option<Self> {
        let file = Temp::new(size);
        let mut command = Command::new("losetup");
        command
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(&file.path);
        match command.output() {
            Ok(out) if out.status.success() => {
                let path = String::from_utf8_lossy(&out.stdout).trim().into();
                Some(Self { path, _file: file })
            }
            Ok(out) => {
                eprintln!(
                    "SKIPPED: losetup: {}",
                    String::from_utf8_lossy(&out.stderr).trim()
                );
                None
            }
            Err(e) => {
                eprintln!("SKIPPED: no losetup: {e}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
            .status();
    }
}
