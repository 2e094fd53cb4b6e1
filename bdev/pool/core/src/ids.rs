//! Numbers with a meaning.

/// A volume or snapshot of a pool: its slot in the directory.
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

/// The caller's name for a request.
pub type Token = u64;

/// A request's data on its way to the disk; the number of an I/O of the core.
pub type IoId = u64;

/// The two copies of a metadata page, and the checksum that both must have. Pages are numbered from
/// the first granule of unit 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
