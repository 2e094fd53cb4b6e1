//! Makes a new pool, on one disk.

use std::sync::Arc;

use uuid::Uuid;

use crate::disks::DiskTable;
use crate::format::Place;
use crate::format::superblock::{PoolState, Superblock};
use crate::geometry::{Geometry, GeometryError, PAGE};
use crate::image::Image;
use crate::interface::Limits;
use crate::log::LogPosition;
use crate::map::PageGarbage;
use crate::pool::{Pool, Start};
use crate::space::Space;
use crate::state::State;
use crate::zones::Zones;

/// The names and sizes of a new pool.
#[derive(Debug, Clone)]
pub struct NewPool {
    pub pool: Uuid,
    pub disk: Uuid,
    pub holder: Uuid,
    pub name: String,
    pub geometry: Geometry,
    /// Units that only metadata may use, so that trims and deletions work when the pool is full.
    pub reserve_units: u64,
}

impl NewPool {
    /// Returns the pool. It exists once its first checkpoint is on the disk, which overwrites the
    /// superblocks of a former pool.
    pub fn create(self, limits: Limits) -> Result<Pool, GeometryError> {
        self.geometry.check()?;
        let superblock = Superblock {
            features: 0,
            required: 0,
            pool: self.pool,
            disk: self.disk,
            name: self.name,
            sequence: 0,
            imports: 1,
            state: PoolState::Open,
            holder: self.holder,
            geometry: self.geometry,
            disks: DiskTable::new(self.disk, &self.geometry),
            checkpoint: 0,
            settled: 0,
            log_sequence: 0,
            log_previous: 0,
            directory: Place::default(),
            page_map: Place::default(),
            next_generation: 1,
            reserve_units: self.reserve_units.min(self.geometry.units()),
        };
        let places = superblock.disks.superblocks(0, &self.geometry);
        let wipes = Superblock::places(superblock.sequence).map(|place| places[place]);
        let start = Start {
            state: State::new(self.geometry),
            space: Space::of(&superblock.disks, limits.allocation),
            zones: Zones::new(&self.geometry),
            garbage: PageGarbage::default(),
            image: Image::default(),
            old_pages: Vec::new(),
            until_root: Vec::new(),
            log: LogPosition {
                imports: superblock.imports,
                sequence: 0,
                previous: 0,
                next: 1,
            },
            tail: 0,
            repairs: wipes.map(|at| (at, Arc::new([0; PAGE]))).to_vec(),
            superblock,
            limits,
        };
        Ok(Pool::start(start))
    }
}
