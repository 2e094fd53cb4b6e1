//! The daemon of the pool benchmark: creates devices, pools and volumes, and puts loads on them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::super::target::{NQN, Target, WARM_UP, number};

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
pub(super) const TIB: u64 = 1 << 40;
pub(super) const BLOCK: u64 = 4 * KIB;

const JOB_LIMIT: Duration = Duration::from_secs(120);
/// Twice the age of the status of a busy pool.
const STATUS_AGE: Duration = Duration::from_millis(200);
/// Space that metadata of a pool may take or give back in the meantime.
const METADATA: u64 = 48 * MIB;

#[derive(Debug, Clone, Copy)]
pub(super) enum Amount {
    /// Seconds, after the usual warm-up.
    Seconds(f64),
    /// A number of I/Os, without a warm-up: first writes are first only once.
    Ios(u64),
}

/// A load on the first `range` bytes of a namespace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    pub rw: &'static str,
    pub size: u64,
    pub depth: u32,
    pub range: u64,
    pub amount: Amount,
}

impl Work {
    pub(super) fn of_4k(rw: &'static str, depth: u32, range: u64, amount: Amount) -> Self {
        Self {
            rw,
            size: BLOCK,
            depth,
            range,
            amount,
        }
    }
}

/// A daemon with pools, and the loads on its devices.
pub(super) struct Scene<'a> {
    pub target: Target<'a>,
}

impl<'a> Scene<'a> {
    pub(super) fn start(nacre: &'a Path) -> Result<Self> {
        Ok(Self {
            target: Target::start(nacre)?,
        })
    }

    /// Creates a RAM disk and writes all of it, so that no measurement pays for new memory.
    pub(super) fn ram_disk(&self, name: &str, bytes: u64) -> Result<()> {
        let params = json!({ "name": name, "block_size": BLOCK, "num_blocks": bytes / BLOCK });
        self.target.json("bdev_malloc_create", params)?;
        let nsid = self.serve(name)?;
        self.target.fill_bytes(&nsid, bytes)?;
        self.withdraw(&nsid)
    }

    pub(super) fn file(&self, name: &str, path: &Path) -> Result<()> {
        let params = json!({ "name": name, "filename": path, "block_size": BLOCK });
        self.target.json("bdev_uring_create", params).map(drop)
    }

    /// Creates a pool on a device, whose data is lost.
    pub(super) fn pool(&self, name: &str, disk: &str) -> Result<()> {
        let params = json!({ "name": name, "disk": disk, "force": true });
        self.target.json("pool_create", params).map(drop)
    }

    /// Creates a thin volume and serves it. Returns its namespace's id.
    pub(super) fn lvol(&self, pool: &str, name: &str, bytes: u64) -> Result<String> {
        let params = json!({ "pool": pool, "name": name, "size": bytes });
        self.target.json("lvol_create", params)?;
        self.serve(&format!("{pool}/{name}"))
    }

    /// Creates a volume as [`Scene::lvol`] does, and writes all of it.
    pub(super) fn full_lvol(&self, pool: &str, name: &str, bytes: u64) -> Result<String> {
        let nsid = self.lvol(pool, name, bytes)?;
        self.target.fill_bytes(&nsid, bytes)?;
        Ok(nsid)
    }

    /// Deletes a served volume, and waits for its space.
    pub(super) fn remove(&self, pool: &str, name: &str, nsid: &str, free: u64) -> Result<()> {
        self.withdraw(nsid)?;
        self.delete(pool, name)?;
        self.wait_for_space(pool, free)
    }

    pub(super) fn delete(&self, pool: &str, name: &str) -> Result<()> {
        let lvol = json!({ "lvol": format!("{pool}/{name}") });
        self.target.json("lvol_delete", lvol).map(drop)
    }

    /// Makes a snapshot, and returns the duration of the call.
    pub(super) fn snapshot(&self, pool: &str, name: &str, snapshot: &str) -> Result<Duration> {
        let one = json!({ "lvol": format!("{pool}/{name}"), "name": snapshot });
        let params = json!({ "snapshots": [one] });
        Ok(self.target.timed("lvol_snapshot", &params)?.1)
    }

    /// The free space of a pool, once it is the same for [`STATUS_AGE`].
    pub(super) fn free(&self, pool: &str) -> Result<u64> {
        let start = Instant::now();
        let mut before = self.free_now(pool)?;
        loop {
            std::thread::sleep(STATUS_AGE);
            let now = self.free_now(pool)?;
            if now == before {
                return Ok(now);
            }
            if start.elapsed() > JOB_LIMIT {
                bail!("the free space of pool {pool} does not settle");
            }
            before = now;
        }
    }

    fn free_now(&self, pool: &str) -> Result<u64> {
        let (pool, _) = self.target.timed("pool_get", &json!({ "pool": pool }))?;
        Ok(number(&pool, &["free_bytes"])? as u64)
    }

    /// Waits until the pool has as much free space as before, except for metadata.
    pub(super) fn wait_for_space(&self, pool: &str, before: u64) -> Result<()> {
        self.wait_for_free(
            pool,
            before.saturating_sub(METADATA),
            Duration::from_millis(20),
        )
    }

    pub(super) fn wait_for_free(&self, pool: &str, free: u64, pause: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let now = self.free_now(pool)?;
            if now >= free {
                return Ok(());
            }
            if start.elapsed() > JOB_LIMIT {
                bail!("pool {pool} has {now} bytes of space, and should have {free}");
            }
            std::thread::sleep(pause);
        }
    }

    /// Makes a namespace of a device, and returns its id.
    pub(super) fn serve(&self, bdev: &str) -> Result<String> {
        serve(&self.target, bdev)
    }

    pub(super) fn withdraw(&self, nsid: &str) -> Result<()> {
        withdraw(&self.target, nsid)
    }

    /// I/Os per second of a load.
    pub(super) fn rate(&self, nsid: &str, work: &Work) -> Result<f64> {
        rate(&self.target, nsid, work)
    }

    /// I/Os per second of two namespaces under the same timed load. They run in the order other,
    /// ours, ours, other, so that other load on the machine affects both equally.
    pub(super) fn pair(&self, ours: &str, other: &str, work: &Work) -> Result<(f64, f64)> {
        let first = self.rate(other, work)?;
        let middle = self.rate(ours, work)? + self.rate(ours, work)?;
        let last = self.rate(other, work)?;
        Ok((middle / 2.0, f64::midpoint(first, last)))
    }
}

pub(super) fn serve(target: &Target, bdev: &str) -> Result<String> {
    let params = json!({ "nqn": NQN, "namespace": { "bdev_name": bdev } });
    let nsid = target.json("nvmf_subsystem_add_ns", params)?;
    let nsid = nsid.as_u64().with_context(|| format!("no NSID: {nsid}"))?;
    Ok(nsid.to_string())
}

pub(super) fn withdraw(target: &Target, nsid: &str) -> Result<()> {
    let nsid: u64 = nsid.parse().with_context(|| format!("no NSID: {nsid}"))?;
    let params = json!({ "nqn": NQN, "nsid": nsid });
    target.json("nvmf_subsystem_remove_ns", params).map(drop)
}

pub(super) fn rate(target: &Target, nsid: &str, work: &Work) -> Result<f64> {
    number(&load(target, nsid, work, &[])?, &["iops"])
}

/// Runs a load, with `more` arguments, and returns the answer of `nacre perf`.
pub(super) fn load(target: &Target, nsid: &str, work: &Work, more: &[&str]) -> Result<Value> {
    let [size, depth, range] =
        [work.size, u64::from(work.depth), work.range].map(|number| number.to_string());
    let (amount, limit) = match work.amount {
        Amount::Seconds(seconds) => (
            ["--warmup", WARM_UP, "--seconds"].as_slice(),
            (seconds.to_string(), seconds * 4.0 + 30.0),
        ),
        Amount::Ios(ios) => (["--ios"].as_slice(), (ios.to_string(), 120.0)),
    };
    let arguments = [
        "--nsid", nsid, "--rw", work.rw, "--size", &size, "--depth", &depth, "--range", &range,
        "--queues", "1",
    ];
    let arguments = [&arguments, amount, &[&limit.0], more].concat();
    target.load(&arguments, Duration::from_secs_f64(limit.1))
}
