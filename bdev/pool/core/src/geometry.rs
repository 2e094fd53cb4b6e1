//! The sizes of a pool, and the offsets of its areas on the first disk: superblocks, log, units.
//!
//! ```text
//!   0      edge            edge + log                                     end - edge      end
//!   │ edge │ log pages … │ unit 0 │ unit 1 │ unit 2 │ …          (free) │ edge │
//!     ▲ ▲                                                                   ▲ ▲
//!     superblocks 0, 1                                          superblocks 2, 3
//! ```
//!
//! The sizes are values, so that tests use pools of a few units.

/// Bytes of a granule, of a log page and of a metadata page.
pub const PAGE: usize = 4096;

/// Most granules of a unit: the width of a set of granules.
pub const MAX_GRANULES: u32 = 16;
/// Most units of a leaf: both units of all its entries and their granules are two pages.
pub const MAX_UNITS_PER_LEAF: u32 = 256;
/// Most children of an interior node: as many entries as a page has room for.
pub const MAX_FAN_OUT: u32 = 64;
/// Most levels of interior nodes.
pub const MAX_LEVELS: u32 = 8;
/// Unit numbers have 36 bits.
pub const MAX_UNITS: u64 = 1 << 36;

/// The sizes of a pool. The superblock has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the disk with the log.
    pub disk_bytes: u64,
    /// Bytes at each end of a disk, which hold superblocks only.
    pub edge_bytes: u64,
    pub log_pages: u64,
    pub granules_per_unit: u32,
    pub units_per_leaf: u32,
    pub fan_out: u32,
    pub levels: u32,
    /// Units of all disks but the first.
    pub added_units: u64,
}

/// A size that is out of range: the first one found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the pool's {field} is out of range; use a size that the format can hold")]
pub struct GeometryError {
    pub field: &'static str,
}

impl Geometry {
    /// The sizes of a new pool on a disk of `disk_bytes`: the log is 1/256 of the disk, 16 to
    /// 256 MiB. Units begin at a multiple of 1 MiB, so that discards of whole MiB are aligned.
    pub fn of_disk(disk_bytes: u64) -> Self {
        let log_bytes = (disk_bytes / 256).clamp(16 << 20, 256 << 20) >> 20 << 20;
        Self {
            disk_bytes,
            edge_bytes: 1 << 20,
            log_pages: log_bytes / PAGE as u64,
            granules_per_unit: 16,
            units_per_leaf: 256,
            fan_out: 64,
            levels: 4,
            added_units: 0,
        }
    }

    /// Checks every size, and that the areas fit on the disk.
    pub fn check(&self) -> Result<(), GeometryError> {
        let page = PAGE as u64;
        let fields = [
            (
                "granules per unit",
                (1..=MAX_GRANULES).contains(&self.granules_per_unit),
            ),
            (
                "units per leaf",
                (1..=MAX_UNITS_PER_LEAF).contains(&self.units_per_leaf),
            ),
            ("fan-out", (2..=MAX_FAN_OUT).contains(&self.fan_out)),
            ("levels", (1..=MAX_LEVELS).contains(&self.levels)),
            (
                "edge",
                self.edge_bytes >= 16 * page
                    && self.edge_bytes <= 1 << 30
                    && self.edge_bytes.is_multiple_of(16 * page),
            ),
            ("log", (16..=1 << 32).contains(&self.log_pages)),
            ("disk size", {
                let fixed = 2 * self.edge_bytes + self.log_pages.saturating_mul(page);
                self.disk_bytes <= 1 << 60
                    && self.disk_bytes >= fixed.saturating_add(8 * self.unit_bytes())
                    && self.units() <= MAX_UNITS
            }),
        ];
        match fields.iter().find(|(_, holds)| !holds) {
            Some((field, _)) => Err(GeometryError { field }),
            None => Ok(()),
        }
    }

    pub fn unit_bytes(&self) -> u64 {
        u64::from(self.granules_per_unit) * PAGE as u64
    }

    /// Units of all disks.
    pub fn units(&self) -> u64 {
        self.first_disk_units().saturating_add(self.added_units)
    }

    /// Units of the disk with the log.
    pub fn first_disk_units(&self) -> u64 {
        let fixed = 2 * self.edge_bytes + self.log_pages * PAGE as u64;
        self.disk_bytes.saturating_sub(fixed) / self.unit_bytes()
    }

    /// All granules of a unit, one bit each.
    pub fn whole(&self) -> u16 {
        u16::MAX >> (MAX_GRANULES - self.granules_per_unit)
    }

    /// Units that the largest volume has.
    pub fn max_volume_units(&self) -> u64 {
        let leaves = u64::from(self.fan_out).saturating_pow(self.levels);
        leaves.saturating_mul(u64::from(self.units_per_leaf))
    }

    /// Byte offset of a log page on the disk. The log is a ring.
    pub fn log_offset(&self, sequence: u64) -> u64 {
        self.edge_bytes + sequence % self.log_pages * PAGE as u64
    }

    /// Byte offset of a granule of a unit of the first disk's first range.
    pub fn granule_offset(&self, unit: u64, granule: u32) -> u64 {
        let data = self.edge_bytes + self.log_pages * PAGE as u64;
        data + unit * self.unit_bytes() + u64::from(granule) * PAGE as u64
    }

    /// Byte offset of a metadata page in the first disk's first range.
    pub fn page_offset(&self, page: u64) -> u64 {
        let granules = u64::from(self.granules_per_unit);
        self.granule_offset(page / granules, (page % granules) as u32)
    }

    /// Metadata pages that the disk can have: one per granule.
    pub fn pages(&self) -> u64 {
        self.units() * u64::from(self.granules_per_unit)
    }

    /// Byte offsets of the four places of superblocks.
    pub fn superblock_offsets(&self) -> [u64; 4] {
        superblock_offsets(self.disk_bytes, self.edge_bytes)
    }
}

/// Byte offsets of the superblocks. Even and odd sequences use different places, one at each end:
/// places 0 and 2, or 1 and 3.
pub fn superblock_offsets(disk_bytes: u64, edge_bytes: u64) -> [u64; 4] {
    [
        0,
        edge_bytes / 16,
        disk_bytes - edge_bytes / 8,
        disk_bytes - edge_bytes / 16,
    ]
}

/// The granules of a set, in order.
pub fn granules_of(set: u16) -> impl Iterator<Item = u32> {
    (0..MAX_GRANULES).filter(move |granule| set >> granule & 1 == 1)
}
