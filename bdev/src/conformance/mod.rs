//! The conformance suite: tests that every block device must pass. The tests of each module run it.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # fn make() -> Arc<dyn nacre_bdev::Bdev> { unreachable!() }
//! nacre_bdev::conformance::Suite::new(make).run();
//! ```
//!
//! Each case gets a fresh device of at least [`MIN_BLOCKS`] blocks, twice: as the module itself,
//! with its native operations and within its limits, and through the [`Layer`], with every
//! operation. A case panics when the device misbehaves. Random choices come from a seed that a
//! failure prints.

mod cases;
mod random;
mod rig;
mod threads;

use std::sync::Arc;

use nacre_hugepages::{ClassSpec, Pool};

use crate::device::{Bdev, Support};
use crate::io::Op;
use crate::layer::Layer;

/// The smallest device that the suite can work with.
pub const MIN_BLOCKS: u64 = 512;
/// The environment variable with the seed (a decimal `u64`) of a run to replay.
pub const SEED_VARIABLE: &str = "NACRE_CONFORMANCE_SEED";

/// The suite, with properties of the module that the module does not report itself.
pub struct Suite<F> {
    make: F,
    keeps_data: bool,
    as_module: bool,
    /// Divisor of the repetitions.
    haste: u32,
    memory: Box<Memory>,
}

/// Creates the buffer pool of one queue's user.
type Memory = dyn Fn(&[ClassSpec]) -> Pool + Sync;

/// Runs everything for an ordinary module, one that keeps written data.
pub fn run(make: impl Fn() -> Arc<dyn Bdev>) {
    Suite::new(make).run();
}

impl<F: Fn() -> Arc<dyn Bdev>> Suite<F> {
    /// `make` makes a fresh device, whose contents may be anything.
    pub fn new(make: F) -> Self {
        Self {
            make,
            keeps_data: true,
            as_module: true,
            haste: 1,
            memory: Box::new(Pool::heap),
        }
    }

    /// The device accepts only buffers that `memory` makes; each thread that uses the device calls
    /// it.
    pub fn memory(mut self, memory: impl Fn(&[ClassSpec]) -> Pool + Sync + 'static) -> Self {
        self.memory = Box::new(memory);
        self
    }

    /// The device forgets written data (null): the suite checks everything except the data.
    pub fn keeps_no_data(mut self) -> Self {
        self.keeps_data = false;
        self
    }

    /// Tests the device through the layer only: for a module that relies on the layer's splitting.
    pub fn layer_only(mut self) -> Self {
        self.as_module = false;
        self
    }

    /// For slow emulated machines: a quarter of the repetitions in the random and threaded cases.
    pub fn in_haste(mut self) -> Self {
        self.haste = 4;
        self
    }

    pub fn run(&self) {
        let seed = Seed::choose();
        if self.as_module {
            self.run_view("module", seed.0, |bdev| bdev);
        }
        self.run_view("layer", seed.0, |bdev| Layer::new(bdev));
    }

    fn run_view(
        &self,
        view: &'static str,
        seed: u64,
        wrap: impl Fn(Arc<dyn Bdev>) -> Arc<dyn Bdev>,
    ) {
        for (name, case) in cases::ALL.iter().chain(random::ALL).chain(threads::ALL) {
            let _named = Named { view, name };
            let device = wrap((self.make)());
            assert!(
                device.geometry().blocks >= MIN_BLOCKS,
                "the device is too small for the suite"
            );
            case(&Subject {
                device,
                keeps_data: self.keeps_data,
                seed,
                haste: self.haste,
                memory: &*self.memory,
            });
        }
    }
}

/// A device under test.
struct Subject<'a> {
    device: Arc<dyn Bdev>,
    keeps_data: bool,
    seed: u64,
    haste: u32,
    memory: &'a Memory,
}

type Case = (&'static str, fn(&Subject));

impl Subject<'_> {
    fn does(&self, op: Op) -> bool {
        let writable = !(op.is_write() && self.device.limits().read_only);
        writable && self.device.supports(op) != Support::No
    }

    fn writable(&self) -> bool {
        !self.device.limits().read_only
    }

    /// The largest read or write that a case submits: the device's limit, capped by the buffers of
    /// the cases.
    fn largest(&self) -> u32 {
        let limits = self.device.limits();
        let own = (rig::LARGEST_BUF / self.device.geometry().block_size as usize) as u32;
        let boundary = match limits.optimal_boundary_blocks {
            // Through the layer, where the limits are lifted, crossing a boundary is allowed.
            0 => u32::MAX,
            _ if limits.max_blocks == u32::MAX => u32::MAX,
            boundary => boundary,
        };
        limits.max_blocks.min(own).min(boundary).min(200)
    }

    /// The largest compare-and-write that a case submits, in blocks, capped like `largest`.
    fn largest_swap(&self) -> u32 {
        let most = self.device.limits().compare_and_write_blocks;
        self.largest().min(most)
    }
}

/// Prints the name of the case on a failure.
struct Named {
    view: &'static str,
    name: &'static str,
}

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "conformance: case \"{}\" failed on the {}",
                self.name, self.view
            );
        }
    }
}

/// The seed of this run; printed when it fails.
struct Seed(u64);

impl Seed {
    fn choose() -> Self {
        let given = std::env::var(SEED_VARIABLE)
            .ok()
            .and_then(|text| text.parse().ok());
        let clock = || {
            std::time::UNIX_EPOCH
                .elapsed()
                .map_or(1, |now| now.as_nanos() as u64)
        };
        Self(given.unwrap_or_else(clock))
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "conformance: replay with {SEED_VARIABLE}={} cargo test …",
                self.0
            );
        }
    }
}
