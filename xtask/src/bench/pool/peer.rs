//! Compares Nacre's pools with SPDK's lvols where SPDK copies a whole cluster for each write: the
//! overwrite of a volume after a snapshot, and first writes to a new volume.
//!
//! SPDK's target serves an lvstore on a RAM disk. The load on it has half as many writes as a
//! volume has clusters. The load on Nacre overwrites a quarter of the blocks, and makes 16,384
//! first writes to a volume of 64 GiB. `nacre perf` generates both.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::super::spdk::Spdk;
use super::super::target::{Disk, Target};
use super::memory::{first_writes, in_turn, overwrite};
use super::scene::{Amount, BLOCK, GIB, MIB, Scene, Work, rate, serve, withdraw};
use super::{Bar, FIRST_PASS, FRESH, Options, Row, Table};

const POOL: &str = "pool0";
const STORE: &str = "lvs0";
const VOLUME: u64 = 256 * MIB;
/// SPDK's RAM disk, which fits in the 1 GiB of memory that its program gets.
const DISK: Disk = Disk {
    block_bytes: BLOCK,
    blocks: 640 * MIB / BLOCK,
};
/// Cluster sizes in MiB, with the text of the row: the default of lvols, and that of blobs.
const CLUSTERS: [(u64, &str); 2] = [(4, "SPDK, 4 MiB"), (1, "SPDK, 1 MiB")];

/// Runs the comparison, and adds a row to `table` for each workload and cluster size.
pub(super) fn measure(
    nacre: &Path,
    spdk: &Spdk,
    options: &Options,
    table: &mut Table,
) -> Result<()> {
    if !options.wants(FIRST_PASS) && !options.wants(FRESH) {
        return Ok(());
    }
    println!("beside SPDK's lvols");
    let scene = Scene::start(nacre)?;
    scene.ram_disk("below", 2 * GIB)?;
    scene.pool(POOL, "below")?;
    let nsid = scene.full_lvol(POOL, "over", VOLUME)?;
    scene.target.pause();
    let theirs = Target::start_spdk(nacre, &spdk.target, spdk.memory, DISK)?;
    theirs.fill("1")?;
    withdraw(&theirs, "1")?;
    for (mib, beside) in CLUSTERS {
        let store = Store::create(&theirs, mib)?;
        let mut over = Row::ratio(FIRST_PASS, beside, Bar::AtLeast(10.0));
        let mut large = Row::ratio(FRESH, beside, Bar::AtLeast(0.6));
        for round in 0..options.rounds {
            let (ours, other) = in_turn(
                round,
                || {
                    alone(&scene.target, || {
                        overwrite(&scene, POOL, "over", &nsid, &first_writes(VOLUME))
                    })
                },
                || alone(&theirs, || store.overwrite()),
            )?;
            over.add(ours, other);
            let (ours, other) = in_turn(
                round,
                || alone(&scene.target, || fresh_rate(&scene)),
                || alone(&theirs, || store.fresh()),
            )?;
            large.add(ours, other);
        }
        theirs.resume();
        store.delete()?;
        table.rows.extend(
            [over, large]
                .into_iter()
                .filter(|row| options.wants(&row.line.name)),
        );
    }
    table.note("import beside SPDK: not measured; its bar is the absolute time".into());
    theirs.resume();
    theirs.stop()?;
    scene.target.resume();
    scene.target.stop()
}

/// Runs `measure` while only this target runs.
fn alone<T>(target: &Target, measure: impl FnOnce() -> Result<T>) -> Result<T> {
    target.resume();
    let result = measure();
    target.pause();
    result
}

/// I/O per second of random first writes to a new volume of 64 GiB: nearly every write needs a new
/// unit.
fn fresh_rate(scene: &Scene) -> Result<f64> {
    let free = scene.free(POOL)?;
    let nsid = scene.lvol(POOL, "fresh", 64 * GIB)?;
    let work = Work::of_4k("randwrite", 32, 64 * GIB, Amount::Ios(16 << 10));
    let rate = scene.rate(&nsid, &work)?;
    scene.remove(POOL, "fresh", &nsid, free)?;
    Ok(rate)
}

/// An lvstore of SPDK with one full volume.
struct Store<'a> {
    target: &'a Target<'a>,
    nsid: String,
    clusters: u64,
}

impl<'a> Store<'a> {
    fn create(target: &'a Target<'a>, cluster_mib: u64) -> Result<Self> {
        target.resume();
        let params = json!({
            "bdev_name": "m", "lvs_name": STORE, "cluster_sz": cluster_mib * MIB, "clear_method": "none",
        });
        target.json("bdev_lvol_create_lvstore", params)?;
        create(target, "over")?;
        let nsid = serve(target, &path("over"))?;
        target.fill_bytes(&nsid, VOLUME)?;
        target.pause();
        Ok(Self {
            target,
            nsid,
            clusters: VOLUME / (cluster_mib * MIB),
        })
    }

    /// Half as many writes as clusters: four in five find a cluster that is not written yet.
    fn work(&self) -> Work {
        Work::of_4k("randwrite", 32, VOLUME, Amount::Ios(self.clusters / 2))
    }

    fn overwrite(&self) -> Result<f64> {
        let params = json!({ "lvol_name": path("over"), "snapshot_name": "snapshot" });
        self.target.json("bdev_lvol_snapshot", params)?;
        let rate = rate(self.target, &self.nsid, &self.work())?;
        remove(self.target, "snapshot")?;
        self.target.fill_bytes(&self.nsid, VOLUME)?;
        Ok(rate)
    }

    fn fresh(&self) -> Result<f64> {
        create(self.target, "fresh")?;
        let nsid = serve(self.target, &path("fresh"))?;
        let rate = rate(self.target, &nsid, &self.work())?;
        withdraw(self.target, &nsid)?;
        remove(self.target, "fresh")?;
        Ok(rate)
    }

    fn delete(self) -> Result<()> {
        withdraw(self.target, &self.nsid)?;
        remove(self.target, "over")?;
        let params = json!({ "lvs_name": STORE });
        self.target
            .json("bdev_lvol_delete_lvstore", params)
            .map(drop)
    }
}

fn path(name: &str) -> String {
    format!("{STORE}/{name}")
}

fn create(target: &Target, name: &str) -> Result<()> {
    let params = json!({
        "lvs_name": STORE, "lvol_name": name, "size_in_mib": VOLUME / MIB, "thin_provision": true,
        "clear_method": "none",
    });
    target.json("bdev_lvol_create", params).map(drop)
}

fn remove(target: &Target, name: &str) -> Result<()> {
    let params = json!({ "name": path(name) });
    target.json("bdev_lvol_delete", params).map(drop)
}
