//! The identifiers of a pool's core: versions (volumes and snapshots), log records, generations,
//! requests, I/O and metadata pages.

/// Identifies a volume or snapshot (a version) in its pool: the number of its entry in the pool's
/// directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VersionId(pub u32);

/// Most versions of a pool.
pub const MAX_VERSIONS: u32 = 65_536;

/// Number of a record in the log. The first record of a pool is 1.
pub type Lsn = u64;

/// The age of a unit: the number of the version that it was allocated in. Generations grow along
/// every path from a version to its descendants.
pub type Generation = u32;

/// Generations have 24 bits.
pub const MAX_GENERATION: Generation = (1 << 24) - 1;

/// The caller's identifier of a request; its answer has it.
pub type Token = u64;

/// Identifies an I/O that the core has requested; its completion has it.
pub type IoId = u64;

/// The position of a metadata page: the page numbers of its two copies, and the checksum that both
/// must have. Page 0 is the first granule (4 KiB) of unit 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Place {
    pub a: u64,
    pub b: u64,
    pub sum: u64,
}

impl Place {
    /// True when it refers to no page.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}
