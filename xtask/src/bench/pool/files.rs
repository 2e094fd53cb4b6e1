//! Rows of a pool on files: first writes beside a bare file, and the import of a very large pool
//! after a crash.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::super::target::number;
use super::memory::in_turn;
use super::scene::{Amount, GIB, MIB, Scene, TIB, Work, load};
use super::{Bar, Options, Row, Table, Unit};
use crate::setup;

const POOL: &str = "pool0";
const FILE_BYTES: u64 = 3 * GIB / 2;
const VOLUME_BYTES: u64 = GIB;
/// Depths of first writes, each with its bar and its number of I/Os. At most one in eight blocks is
/// written, so most writes are first.
const FIRST: [(&str, u32, f64, u64); 2] = [
    ("first write, 4 KiB random, depth 32 (file)", 32, 0.6, 32768),
    ("first write, 4 KiB random, depth 1 (file)", 1, 0.5, 8192),
];

/// Disks of the large pool. Ext4 has no files of 16 TiB.
const DISKS: usize = 7;
const DISK_BYTES: u64 = 15 * TIB;
const LARGE_BYTES: u64 = 100 * TIB;
const IMPORT: &str = "import after a crash, 105 TiB";
/// Writes over the large volume before the first crash, and their longest time.
const SCATTER_TIME: f64 = 10.0;
/// Load before each crash.
const CRASH_AFTER: Duration = Duration::from_secs(2);
/// The daemon checkpoints a pool five seconds after its last change.
const CHECKPOINT: Duration = Duration::from_secs(7);

pub(super) fn measure(nacre: &Path, options: &Options, table: &mut Table) -> Result<()> {
    if FIRST.iter().any(|(name, ..)| options.wants(name)) {
        first_writes(nacre, options, table)?;
    }
    if options.wants(IMPORT) {
        import(nacre, options, table)?;
    }
    Ok(())
}

/// A folder that is removed with its files.
struct Folder(PathBuf);

impl Folder {
    fn create(options: &Options) -> Result<Self> {
        let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        let path = parent.join(format!("nacre-bench-pool-{}", std::process::id()));
        setup::create_dir(&path)?;
        let path = path
            .canonicalize()
            .with_context(|| format!("finding {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("warning: cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Writes a file in full: a write to a hole pays for the file system's space, too.
fn full_file(path: &Path, bytes: u64) -> Result<()> {
    let write = || {
        let mut file = File::create_new(path)?;
        let piece = vec![0x5a; MIB as usize];
        for _ in 0..bytes / MIB {
            file.write_all(&piece)?;
        }
        file.sync_all()
    };
    write().with_context(|| format!("writing {}", path.display()))
}

fn first_writes(nacre: &Path, options: &Options, table: &mut Table) -> Result<()> {
    println!("{}", FIRST[0].0);
    let folder = Folder::create(options)?;
    let scene = Scene::start(nacre)?;
    for name in ["bare", "below"] {
        let path = folder.0.join(name);
        full_file(&path, FILE_BYTES)?;
        scene.file(name, &path)?;
    }
    scene.pool(POOL, "below")?;
    let bare = scene.serve("bare")?;
    let mut rows: Vec<(Row, Work)> = FIRST
        .iter()
        .filter(|(name, ..)| options.wants(name))
        .map(|(name, depth, bar, ios)| {
            let row = Row::ratio(*name, "bare file", Bar::AtLeast(*bar));
            let amount = Amount::Ios(*ios);
            (row, Work::of_4k("randwrite", *depth, VOLUME_BYTES, amount))
        })
        .collect();
    for round in 0..options.rounds {
        for (row, work) in &mut rows {
            let ours = || {
                let free = scene.free(POOL)?;
                let nsid = scene.lvol(POOL, "fresh", VOLUME_BYTES)?;
                let rate = scene.rate(&nsid, work)?;
                scene.remove(POOL, "fresh", &nsid, free)?;
                Ok(rate)
            };
            let (ours, other) = in_turn(round, ours, || scene.rate(&bare, work))?;
            row.add(ours, other);
        }
    }
    table.rows.extend(rows.into_iter().map(|(row, _)| row));
    scene.target.stop()
}

fn import(nacre: &Path, options: &Options, table: &mut Table) -> Result<()> {
    println!("{IMPORT}");
    let folder = Folder::create(options)?;
    let mut row = Row::time(IMPORT, Bar::AtMost(1.0), Unit::Seconds);
    for disk in 0..DISKS {
        let path = folder.0.join(name(disk));
        File::create_new(&path)
            .and_then(|file| file.set_len(DISK_BYTES))
            .with_context(|| format!("making {} of 15 TiB", path.display()))?;
    }
    let scene = with_disks(nacre, &folder)?;
    scene.pool(POOL, &name(0))?;
    for disk in 1..DISKS {
        let params = json!({ "pool": POOL, "disk": name(disk) });
        scene.target.json("pool_add_disk", params)?;
    }
    let nsid = scene.lvol(POOL, "large", LARGE_BYTES)?;
    let scatter = first_write(Amount::Seconds(SCATTER_TIME));
    let answer = load(&scene.target, &nsid, &scatter, &[])?;
    let written = number(&answer, &["write", "ios"])?;
    std::thread::sleep(CHECKPOINT);
    crash(&scene, &nsid)?;
    drop(scene);
    let mut replayed = 0.0;
    for round in 1..=options.rounds {
        let scene = with_disks(nacre, &folder)?;
        let params = json!({ "disk": name(0), "force": true });
        let (pool, time) = scene.target.timed("pool_import", &params)?;
        row.add_time(time.as_secs_f64());
        replayed = number(&pool, &["replayed_records"])?;
        if round < options.rounds {
            let nsid = scene.serve(&format!("{POOL}/large"))?;
            crash(&scene, &nsid)?;
        }
    }
    table.rows.push(row);
    table.note(format!(
        "import: {DISKS} sparse files of 15 TiB, a volume of 100 TiB, {written:.0} scattered writes before the \
         first crash and {} s of them before each further one; the last import replayed {replayed:.0} records",
        CRASH_AFTER.as_secs()
    ));
    Ok(())
}

/// Writes that each find another leaf of the map.
fn first_write(amount: Amount) -> Work {
    Work::of_4k("randwrite", 32, LARGE_BYTES, amount)
}

fn name(disk: usize) -> String {
    format!("disk{disk}")
}

fn with_disks<'a>(nacre: &'a Path, folder: &Folder) -> Result<Scene<'a>> {
    let scene = Scene::start(nacre)?;
    for disk in 0..DISKS {
        scene.file(&name(disk), &folder.0.join(name(disk)))?;
    }
    Ok(scene)
}

/// Kills the daemon under a load of first writes.
fn crash(scene: &Scene, nsid: &str) -> Result<()> {
    let work = first_write(Amount::Seconds(60.0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| load(&scene.target, nsid, &work, &["--loss-timeout", "1s"]));
        let start = Instant::now();
        while start.elapsed() < CRASH_AFTER && !load.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = load.is_finished();
        scene.target.crash();
        match load.join() {
            Ok(Ok(_)) => bail!("the load did not notice that its target died"),
            Ok(Err(error)) if ended => Err(error.context("the load before the crash")),
            // The load lost its target, as intended.
            Ok(Err(_)) => Ok(()),
            Err(_) => bail!("the thread of a load panicked"),
        }
    })
}
