//! Rows of a pool on a RAM disk. Nothing waits for a device, so they show the cost of the code.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::super::target::number;
use super::scene::{Amount, BLOCK, GIB, KIB, MIB, Scene, TIB, Work, load};
use super::{Bar, Options, Row, Table, Unit};

const POOL: &str = "pool0";
const POOL_BYTES: u64 = 2 * GIB;
const BARE_BYTES: u64 = 256 * MIB;
/// Larger than the caches of most processors, on both sides.
const ALLOCATED: u64 = 64 * MIB;
const SNAPSHOTS: usize = 64;
/// 4 KiB writes between two snapshots.
const WRITES_BETWEEN: u64 = 32;
/// First writes are random with repetition. With a quarter of the blocks, seven in eight are first.
const FIRST_SHARE: u64 = 4;
/// Bytes that a deleted snapshot gives back. The bar is for 100 GiB, for which a RAM disk has no
/// room.
const CHANGED: u64 = 512 * MIB;
/// First writes into the first half of the 1 TiB volume, of as many units of 64 KiB.
const SCATTERED: u64 = 8 << 10;

pub(super) const OVERWRITE: &str = "overwrite after a snapshot, 4 KiB, depth 32";

/// The daemon with its pool, and the namespace of the bare RAM disk.
struct Memory<'a> {
    scene: Scene<'a>,
    bare: String,
    options: &'a Options,
}

type Group = fn(&Memory) -> Result<Vec<Row>>;

/// The measurements, each with the names of its rows.
const GROUPS: &[(&[&str], Group)] = &[
    (
        &[
            "allocated, 4 KiB read, depth 1",
            "allocated, 4 KiB read, depth 32",
            "allocated, 4 KiB write, depth 1",
            "allocated, 4 KiB write, depth 32",
        ],
        allocated,
    ),
    (
        &[
            "64 snapshots, 4 KiB read, depth 1",
            "64 snapshots, 4 KiB read, depth 32",
            "64 snapshots, 4 KiB write, depth 1",
            "64 snapshots, 4 KiB write, depth 32",
        ],
        under_snapshots,
    ),
    (&[SEQUENTIAL], first_write),
    (&[OVERWRITE], after_snapshot),
    (&[LATENCY], latency),
    (&[SNAPSHOT, CLONE], snapshot),
    (&[SPACE, FOREGROUND], space),
];

const SEQUENTIAL: &str = "first write, 128 KiB sequential, depth 16";
const LATENCY: &str = "p99.9 of writes in a snapshot's second";
const SNAPSHOT: &str = "snapshot of 1 TiB";
const CLONE: &str = "clone of 1 TiB";
const SPACE: &str = "space back after a deletion, 512 MiB changed";
const FOREGROUND: &str = "4 KiB write during that deletion, depth 32";

/// Reads and writes at two depths, in the order of the names in [`GROUPS`].
const PLACES: [(&str, u32); 4] = [
    ("randread", 1),
    ("randread", 32),
    ("randwrite", 1),
    ("randwrite", 32),
];

pub(super) fn measure(nacre: &Path, options: &Options, table: &mut Table) -> Result<()> {
    let wanted = |names: &[&str]| names.iter().any(|name| options.wants(name));
    if !GROUPS.iter().any(|(names, _)| wanted(names)) {
        return Ok(());
    }
    let scene = Scene::start(nacre)?;
    scene.ram_disk("bare", BARE_BYTES)?;
    scene.ram_disk("below", POOL_BYTES)?;
    scene.pool(POOL, "below")?;
    let bare = scene.serve("bare")?;
    let memory = Memory {
        scene,
        bare,
        options,
    };
    for (names, group) in GROUPS {
        if wanted(names) {
            println!("{}", names[0]);
            let mut rows = group(&memory)?;
            rows.retain(|row| options.wants(&row.line.name));
            table.rows.extend(rows);
        }
    }
    if wanted(&[SNAPSHOT, CLONE]) {
        table.note(format!(
            "1 TiB: {SCATTERED} writes over its first half mapped about as many units, each in another leaf; a RAM \
             disk has no room for 512 GiB"
        ));
    }
    if wanted(&[SPACE, FOREGROUND]) {
        table.note(
            "space: a RAM disk has no room for the 100 GiB of the bar, and the status of a pool, up to \
             100 ms old, is too coarse to scale the time; the foreground is measured over half a second \
             that contains the deletion"
                .into(),
        );
    }
    memory.scene.target.stop()
}

impl Memory<'_> {
    fn timed(&self, place: (&'static str, u32)) -> Work {
        let amount = Amount::Seconds(self.options.seconds / 2.0);
        Work::of_4k(place.0, place.1, ALLOCATED, amount)
    }
}

/// Allocated space beside the bare disk.
fn allocated(memory: &Memory) -> Result<Vec<Row>> {
    let Memory { scene, bare, .. } = memory;
    let free = scene.free(POOL)?;
    let ours = scene.full_lvol(POOL, "allocated", ALLOCATED)?;
    let mut rows: Vec<Row> = (GROUPS[0].0.iter())
        .map(|name| Row::ratio(*name, "bare", Bar::AtLeast(0.95)))
        .collect();
    for _ in 0..memory.options.rounds {
        for (row, place) in rows.iter_mut().zip(PLACES) {
            let (ours, other) = scene.pair(&ours, bare, &memory.timed(place))?;
            row.add(ours, other);
        }
    }
    scene.remove(POOL, "allocated", &ours, free)?;
    Ok(rows)
}

/// Like [`allocated`], for a volume with 64 snapshots beside one without.
fn under_snapshots(memory: &Memory) -> Result<Vec<Row>> {
    let scene = &memory.scene;
    let free = scene.free(POOL)?;
    let plain = scene.full_lvol(POOL, "plain", ALLOCATED)?;
    // Reads find blocks of all snapshots. Writes find space of the volume's own: it is written
    // once more after the last snapshot.
    let (read, write) = (deep(scene, "read")?, deep(scene, "write")?);
    scene.target.fill_bytes(&write, ALLOCATED)?;
    let mut rows: Vec<Row> = (GROUPS[1].0.iter())
        .map(|name| Row::ratio(*name, "no snapshot", Bar::AtLeast(0.97)))
        .collect();
    for _ in 0..memory.options.rounds {
        for (row, place) in rows.iter_mut().zip(PLACES) {
            let ours = if place.0 == "randread" { &read } else { &write };
            let (ours, other) = scene.pair(ours, &plain, &memory.timed(place))?;
            row.add(ours, other);
        }
    }
    for (name, nsid) in [("plain", plain), ("read", read), ("write", write)] {
        scene.withdraw(&nsid)?;
        scene.delete(POOL, name)?;
    }
    for name in ["read", "write"] {
        for at in (0..SNAPSHOTS).rev() {
            scene.delete(POOL, &label(name, at))?;
        }
    }
    scene.wait_for_space(POOL, free)?;
    Ok(rows)
}

fn label(name: &str, at: usize) -> String {
    format!("{name}@{at}")
}

/// A volume with snapshots below it and writes between them.
fn deep(scene: &Scene, name: &str) -> Result<String> {
    let nsid = scene.full_lvol(POOL, name, ALLOCATED)?;
    let some = Work::of_4k("randwrite", 32, ALLOCATED, Amount::Ios(WRITES_BETWEEN));
    for at in 0..SNAPSHOTS {
        scene.snapshot(POOL, name, &label(name, at))?;
        scene.rate(&nsid, &some)?;
    }
    Ok(nsid)
}

fn first_write(memory: &Memory) -> Result<Vec<Row>> {
    let Memory { scene, bare, .. } = memory;
    let mut row = Row::ratio(SEQUENTIAL, "bare", Bar::AtLeast(0.85));
    let size = 128 * KIB;
    let work = Work {
        rw: "write",
        size,
        depth: 16,
        range: BARE_BYTES,
        amount: Amount::Ios(BARE_BYTES / size),
    };
    for round in 0..memory.options.rounds {
        let ours = || {
            let free = scene.free(POOL)?;
            let nsid = scene.lvol(POOL, "fresh", work.range)?;
            let rate = scene.rate(&nsid, &work)?;
            scene.remove(POOL, "fresh", &nsid, free)?;
            Ok(rate)
        };
        let (ours, other) = in_turn(round, ours, || scene.rate(bare, &work))?;
        row.add(ours, other);
    }
    Ok(vec![row])
}

/// Measures both sides; which is first depends on the round.
pub(super) fn in_turn(
    round: usize,
    ours: impl FnOnce() -> Result<f64>,
    other: impl FnOnce() -> Result<f64>,
) -> Result<(f64, f64)> {
    if round.is_multiple_of(2) {
        let ours = ours()?;
        Ok((ours, other()?))
    } else {
        let other = other()?;
        Ok((ours()?, other))
    }
}

/// A quarter of the blocks of `range`, in random places.
pub(super) fn first_writes(range: u64) -> Work {
    let ios = range / BLOCK / FIRST_SHARE;
    Work::of_4k("randwrite", 32, range, Amount::Ios(ios))
}

fn after_snapshot(memory: &Memory) -> Result<Vec<Row>> {
    let Memory { scene, bare, .. } = memory;
    let mut row = Row::ratio(OVERWRITE, "bare", Bar::AtLeast(0.5));
    let free = scene.free(POOL)?;
    let nsid = scene.full_lvol(POOL, "over", BARE_BYTES)?;
    let work = first_writes(BARE_BYTES);
    for round in 0..memory.options.rounds {
        let (ours, other) = in_turn(
            round,
            || overwrite(scene, POOL, "over", &nsid, &work),
            || scene.rate(bare, &work),
        )?;
        row.add(ours, other);
    }
    scene.remove(POOL, "over", &nsid, free)?;
    Ok(vec![row])
}

/// The rate of a load on a full volume right after a snapshot. The volume is full and without
/// snapshots again at the end.
pub(super) fn overwrite(
    scene: &Scene,
    pool: &str,
    name: &str,
    nsid: &str,
    work: &Work,
) -> Result<f64> {
    let free = scene.free(pool)?;
    let snapshot = label(name, 0);
    scene.snapshot(pool, name, &snapshot)?;
    let rate = scene.rate(nsid, work)?;
    scene.delete(pool, &snapshot)?;
    refill(scene, pool, nsid, work.range, free)?;
    Ok(rate)
}

/// Writes all of a volume whose snapshot is deleted, and waits for the snapshot's space. A unit
/// that was written in part needs a second one until it is written in full.
fn refill(scene: &Scene, pool: &str, nsid: &str, bytes: u64, free: u64) -> Result<()> {
    scene.target.fill_bytes(nsid, bytes)?;
    scene.wait_for_space(pool, free)
}

/// Starts a load in a thread, and runs `during` once it is measured for `after`. Returns the answer
/// of the load, and what `during` returns.
fn during_load<T>(
    scene: &Scene,
    nsid: &str,
    work: &Work,
    after: Duration,
    during: impl FnOnce() -> Result<T>,
) -> Result<(serde_json::Value, T)> {
    /// The start of the program and its warm-up.
    const START: Duration = Duration::from_millis(350);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| load(&scene.target, nsid, work, &[]));
        std::thread::sleep(START + after);
        let result = during();
        let Ok(load) = load.join() else {
            bail!("the thread of a load panicked");
        };
        Ok((load?, result?))
    })
}

fn latency(memory: &Memory) -> Result<Vec<Row>> {
    let scene = &memory.scene;
    let mut row = Row::ratio(LATENCY, "second before", Bar::AtMost(2.0));
    let free = scene.free(POOL)?;
    let nsid = scene.full_lvol(POOL, "over", BARE_BYTES)?;
    let work = Work::of_4k("randwrite", 32, BARE_BYTES, Amount::Seconds(1.0));
    let tail = |answer: &serde_json::Value| number(answer, &["write", "latency_ns", "p99.9"]);
    let snapshot = label("over", 0);
    for _ in 0..memory.options.rounds {
        let without = scene.free(POOL)?;
        let before = load(&scene.target, &nsid, &work, &[])?;
        let (during, _) = during_load(scene, &nsid, &work, Duration::from_millis(300), || {
            scene.snapshot(POOL, "over", &snapshot)
        })?;
        row.add(tail(&during)? / 1000.0, tail(&before)? / 1000.0);
        scene.delete(POOL, &snapshot)?;
        refill(scene, POOL, &nsid, BARE_BYTES, without)?;
    }
    scene.remove(POOL, "over", &nsid, free)?;
    Ok(vec![row])
}

fn snapshot(memory: &Memory) -> Result<Vec<Row>> {
    let scene = &memory.scene;
    let bar = Bar::AtMost(10.0);
    let mut snapshots = Row::time(SNAPSHOT, bar, Unit::Milliseconds);
    let mut clones = Row::time(CLONE, bar, Unit::Milliseconds);
    let free = scene.free(POOL)?;
    let nsid = scene.lvol(POOL, "large", TIB)?;
    let half = Work::of_4k("randwrite", 32, TIB / 2, Amount::Ios(SCATTERED));
    scene.rate(&nsid, &half)?;
    let some = Work::of_4k("randwrite", 32, TIB / 2, Amount::Ios(WRITES_BETWEEN));
    let snapshot = label("large", 0);
    for _ in 0..memory.options.rounds {
        let time = scene.snapshot(POOL, "large", &snapshot)?;
        snapshots.add_time(time.as_secs_f64() * 1e3);
        let params =
            serde_json::json!({ "snapshot": format!("{POOL}/{snapshot}"), "name": "clone" });
        let (_, time) = scene.target.timed("lvol_clone", &params)?;
        clones.add_time(time.as_secs_f64() * 1e3);
        scene.delete(POOL, "clone")?;
        scene.rate(&nsid, &some)?;
        scene.delete(POOL, &snapshot)?;
    }
    scene.remove(POOL, "large", &nsid, free)?;
    Ok(vec![snapshots, clones])
}

fn space(memory: &Memory) -> Result<Vec<Row>> {
    let scene = &memory.scene;
    let mut times = Row::time(SPACE, Bar::AtMost(10.0), Unit::Seconds);
    let mut foreground = Row::ratio(FOREGROUND, "before", Bar::AtLeast(0.8));
    let free = scene.free(POOL)?;
    let busy = scene.full_lvol(POOL, "busy", ALLOCATED)?;
    let nsid = scene.full_lvol(POOL, "changed", CHANGED)?;
    let work = Work::of_4k("randwrite", 32, ALLOCATED, Amount::Seconds(0.5));
    let snapshot = label("changed", 0);
    for _ in 0..memory.options.rounds {
        scene.snapshot(POOL, "changed", &snapshot)?;
        scene.target.fill_bytes(&nsid, CHANGED)?;
        let before = scene.rate(&busy, &work)?;
        let enough = scene.free(POOL)? + CHANGED / 100 * 98;
        let (during, time) = during_load(scene, &busy, &work, Duration::from_millis(50), || {
            let start = Instant::now();
            scene.delete(POOL, &snapshot)?;
            scene.wait_for_free(POOL, enough, Duration::from_millis(2))?;
            Ok(start.elapsed())
        })?;
        times.add_time(time.as_secs_f64());
        foreground.add(number(&during, &["iops"])?, before);
    }
    scene.withdraw(&busy)?;
    scene.delete(POOL, "busy")?;
    scene.remove(POOL, "changed", &nsid, free)?;
    Ok(vec![times, foreground])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every group has a name for each of its places. Method: the two groups that take their
    /// names from the table.
    #[test]
    fn groups_of_four_have_four_names() {
        for (names, _) in &GROUPS[..2] {
            assert_eq!(names.len(), PLACES.len(), "{names:?}");
            for (name, (rw, depth)) in names.iter().zip(PLACES) {
                let verb = rw.strip_prefix("rand").unwrap();
                assert!(name.ends_with(&format!("{verb}, depth {depth}")), "{name}");
            }
        }
    }

    /// Goal: the sides take turns in being first, and the pair keeps its order. Method: two rounds
    /// that write down which side is asked.
    #[test]
    fn sides_take_turns() {
        let order = std::cell::RefCell::new(Vec::new());
        let side = |name: &'static str, rate| {
            order.borrow_mut().push(name);
            Ok(rate)
        };
        for round in 0..2 {
            let pair = in_turn(round, || side("ours", 1.0), || side("other", 2.0)).unwrap();
            assert_eq!(pair, (1.0, 2.0));
        }
        assert_eq!(*order.borrow(), ["ours", "other", "other", "ours"]);
    }

    /// Goal: most first writes are first. Method: with a quarter of the blocks, the expected share
    /// of repeated places is below an eighth.
    #[test]
    fn most_first_writes_are_first() {
        let Amount::Ios(ios) = first_writes(64 * MIB).amount else {
            panic!("first writes are counted");
        };
        let share = ios as f64 / (64 * MIB / BLOCK) as f64;
        assert!((1.0 - (-share).exp()) / share > 7.0 / 8.0, "{share}");
    }
}
