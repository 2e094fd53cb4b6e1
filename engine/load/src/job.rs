//! The parameters of a load run, and their checks against the size and block size of a namespace.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

/// The operations of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rw {
    Read,
    Write,
    RandRead,
    RandWrite,
    /// Sequential reads and writes, mixed.
    Rw,
    RandRw,
}

impl Rw {
    pub const ALL: [(&'static str, Self); 6] = [
        ("read", Self::Read),
        ("write", Self::Write),
        ("randread", Self::RandRead),
        ("randwrite", Self::RandWrite),
        ("rw", Self::Rw),
        ("randrw", Self::RandRw),
    ];

    pub fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite | Self::RandRw)
    }

    /// Percentage of reads, 0 to 100. `mix` is the percentage of the mixed modes `Rw` and
    /// `RandRw`.
    pub fn read_percent(self, mix: u8) -> u8 {
        match self {
            Self::Read | Self::RandRead => 100,
            Self::Write | Self::RandWrite => 0,
            Self::Rw | Self::RandRw => mix,
        }
    }
}

impl FromStr for Rw {
    type Err = JobError;

    fn from_str(text: &str) -> Result<Self, JobError> {
        let known = Self::ALL.iter().find(|(name, _)| *name == text);
        known.map(|(_, rw)| *rw).ok_or_else(|| JobError::Rw {
            found: text.to_owned(),
        })
    }
}

impl fmt::Display for Rw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::ALL.iter().find(|(_, rw)| rw == self);
        f.write_str(known.map_or("?", |(name, _)| name))
    }
}

/// Bytes per I/O, from `min` to `max`. Every multiple of the block size in between is equally
/// likely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sizes {
    pub min: u32,
    pub max: u32,
}

impl Sizes {
    pub fn is_fixed(self) -> bool {
        self.min == self.max
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: u32| match bytes {
            b if b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
            b if b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
            b => format!("{b} B"),
        };
        if self.is_fixed() {
            f.write_str(&size(self.min))
        } else {
            write!(f, "{} to {}", size(self.min), size(self.max))
        }
    }
}

/// The condition that ends the load. The filling and reading back of a verification, and a run with
/// [`Verify::Only`], end after all units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// Duration of the measured part, after the warm-up.
    Time(Duration),
    /// Number of I/Os of all queues together, with those of the warm-up.
    Ios(u64),
}

/// The verification mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    Off,
    /// Write patterns, check every read, and read all written blocks back at the end. A job with
    /// reads writes all blocks first.
    On,
    /// Only read, and check the patterns of an earlier run with `On`.
    Only,
}

/// The parameters of a run that are also options of `nacre perf`, with the same meaning.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[cfg_attr(feature = "clap", command(about = None, long_about = None))]
pub struct JobOptions {
    /// read, write, randread, randwrite, rw, randrw
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "WHAT", default_value = "randread")
    )]
    pub rw: Rw,
    /// Percentage of reads, for rw and randrw
    #[cfg_attr(feature = "clap", arg(long, value_name = "PERCENT", default_value_t = 70, value_parser = clap::value_parser!(u8).range(0..=100)))]
    pub mix: u8,
    /// I/Os in flight, per queue
    #[cfg_attr(feature = "clap", arg(short = 'd', long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=i64::from(*nacre_nvmf::transport::QUEUE_DEPTHS.end()))))]
    pub depth: u16,
    /// Bytes of the namespace to use [default: all; with verification at most 1g]
    #[cfg_attr(feature = "clap", arg(long, value_name = "BYTES", value_parser = nacre_units::size::parse_bytes))]
    pub range: Option<u64>,
    /// Start of the range
    #[cfg_attr(feature = "clap", arg(long, value_name = "BYTES", default_value = "0", value_parser = nacre_units::size::parse_bytes))]
    pub offset: u64,
    /// Most I/Os per second, of all queues together
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..)))]
    pub rate: Option<u64>,
    /// Time before the measurement begins
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value = "0", value_parser = nacre_units::time::parse))]
    pub warmup: Duration,
    /// Continue after an I/O failed or data was wrong
    #[cfg_attr(feature = "clap", arg(long))]
    pub keep_going: bool,
}

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Job {
    /// Offset and range must be multiples of the block size. With verification, the default range
    /// is at most [`Job::VERIFY_RANGE`].
    pub options: JobOptions,
    pub sizes: Sizes,
    /// I/O queues; over a fabric each has its own connection.
    pub queues: u16,
    /// Cores with a pinned thread each, at most one per queue. Empty: one thread, not pinned.
    pub cores: Vec<usize>,
    pub limit: Limit,
    pub verify: Verify,
    /// Seed of the random block addresses, sizes and data.
    pub seed: u64,
    /// How long to wait for I/O in flight at the end of each phase.
    pub drain: Duration,
}

/// The part of a namespace that a run uses, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    pub first: u64,
    pub blocks: u64,
}

/// An invalid parameter, or one that does not fit the namespace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    #[error("\"{found}\" is not one of read, write, randread, randwrite, rw, randrw")]
    Rw { found: String },
    #[error("{bytes} bytes are not a multiple of the namespace's blocks of {block_size}")]
    NotBlocks { bytes: u64, block_size: u32 },
    #[error("I/Os of {asked} bytes are more than the controller takes ({limit})")]
    TooLarge { asked: u32, limit: u32 },
    #[error("the sizes {min} to {max} run backwards")]
    SizesBackwards { min: u32, max: u32 },
    #[error(
        "bytes {offset} to {end} are not inside the namespace, which has {bytes}: choose --offset and --range"
    )]
    Outside { offset: u64, end: u64, bytes: u64 },
    #[error(
        "{bytes} bytes are too few for {lanes} queues with {depth} I/Os of {size} bytes each that must not overlap: \
         fewer --queues, less --depth, or a larger --range"
    )]
    TooSmall {
        bytes: u64,
        lanes: u16,
        depth: u16,
        size: u32,
    },
    #[error(
        "verification of {bytes} bytes in units of {unit} needs to remember {units} places, and {max} is the most: a smaller --range"
    )]
    TooManyUnits {
        bytes: u64,
        unit: u64,
        units: u64,
        max: u64,
    },
    #[error("the namespace is write protected")]
    ReadOnly,
}

impl Job {
    /// Default range of a verification, in bytes: large enough to matter, and quickly read back.
    pub const VERIFY_RANGE: u64 = 1 << 30;
    /// Most units ([`Job::unit_blocks`]) that [`Verify::On`] can track, of all queues. Each costs 4
    /// bytes of memory.
    pub const MAX_UNITS: u64 = 64 << 20;

    pub fn read_percent(&self) -> u8 {
        self.options.rw.read_percent(self.options.mix)
    }

    pub fn writes(&self) -> bool {
        match self.verify {
            Verify::Only => false,
            Verify::On => true,
            Verify::Off => self.read_percent() < 100,
        }
    }

    /// Blocks per unit, the granularity of the LBAs: the I/O size if it is fixed, otherwise one
    /// block.
    pub fn unit_blocks(&self, block_size: u32) -> u32 {
        if self.sizes.is_fixed() {
            self.sizes.min / block_size
        } else {
            1
        }
    }

    /// True if each queue has its own part of the area. Verification needs exclusive access to
    /// blocks, and sequential queues would otherwise all access the same blocks.
    pub fn is_split(&self) -> bool {
        self.verify != Verify::Off || !self.options.rw.is_random()
    }

    /// Validates the job against a namespace of `blocks` blocks and returns the blocks to use.
    /// `max_io` is the largest I/O of the controller, in bytes.
    pub fn area(&self, block_size: u32, blocks: u64, max_io: u32) -> Result<Area, JobError> {
        let block = u64::from(block_size);
        if self.sizes.min > self.sizes.max {
            let Sizes { min, max } = self.sizes;
            return Err(JobError::SizesBackwards { min, max });
        }
        if self.sizes.max > max_io {
            let (asked, limit) = (self.sizes.max, max_io);
            return Err(JobError::TooLarge { asked, limit });
        }
        let sizes = [self.sizes.min.max(1), self.sizes.max.max(1)].map(u64::from);
        for bytes in sizes
            .into_iter()
            .chain([self.options.offset])
            .chain(self.options.range)
        {
            if bytes % block != 0 {
                return Err(JobError::NotBlocks { bytes, block_size });
            }
        }
        let bytes = blocks * block;
        let rest = bytes.saturating_sub(self.options.offset);
        let range = self.options.range.unwrap_or_else(|| match self.verify {
            Verify::Off => rest,
            _ => rest.min(Self::VERIFY_RANGE),
        });
        let end = self.options.offset.saturating_add(range);
        if end > bytes || range == 0 {
            let offset = self.options.offset;
            return Err(JobError::Outside { offset, end, bytes });
        }
        self.check_lanes(range, block)?;
        Ok(Area {
            first: self.options.offset / block,
            blocks: range / block,
        })
    }

    fn check_lanes(&self, range: u64, block: u64) -> Result<(), JobError> {
        let size = self.sizes.max;
        let lanes = if self.is_split() { self.queues } else { 1 };
        // Units with an I/O in flight are not used again, so some must remain.
        let depth = match self.verify {
            Verify::On => 2 * u64::from(self.options.depth),
            _ => 1,
        };
        if range / u64::from(lanes) < depth * u64::from(size) {
            let (bytes, depth) = (range, self.options.depth);
            return Err(JobError::TooSmall {
                bytes,
                lanes,
                depth,
                size,
            });
        }
        let unit = u64::from(self.unit_blocks(block as u32)) * block;
        let (units, max) = (range / unit, Self::MAX_UNITS);
        if self.verify == Verify::On && units > max {
            let bytes = range;
            return Err(JobError::TooManyUnits {
                bytes,
                unit,
                units,
                max,
            });
        }
        Ok(())
    }
}

impl Area {
    /// Splits the area into `count` equal parts of whole units and returns part `index`, from 0.
    /// The remainder stays unused.
    pub fn part(self, index: u64, count: u64, unit_blocks: u32) -> Self {
        let units = self.blocks / u64::from(unit_blocks) / count;
        let blocks = units * u64::from(unit_blocks);
        Self {
            first: self.first + index * blocks,
            blocks,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn job() -> Job {
        Job {
            options: JobOptions {
                rw: Rw::RandRead,
                mix: 70,
                depth: 32,
                range: None,
                offset: 0,
                rate: None,
                warmup: Duration::ZERO,
                keep_going: false,
            },
            sizes: Sizes {
                min: 4096,
                max: 4096,
            },
            queues: 1,
            cores: Vec::new(),
            limit: Limit::Ios(1),
            verify: Verify::Off,
            seed: 1,
            drain: Duration::from_secs(1),
        }
    }

    /// A job with other options.
    pub(crate) fn job_with(change: impl FnOnce(&mut JobOptions)) -> Job {
        let mut job = job();
        change(&mut job.options);
        job
    }

    #[test]
    fn areas() {
        let all = Area {
            first: 0,
            blocks: 1000,
        };
        assert_eq!(job().area(4096, 1000, 1 << 20), Ok(all));
        let part = job_with(|options| {
            (options.offset, options.range) = (8192, Some(409_600));
        });
        assert_eq!(
            part.area(4096, 1000, 1 << 20),
            Ok(Area {
                first: 2,
                blocks: 100
            })
        );
        let verify = Job {
            verify: Verify::On,
            ..job()
        };
        let area = verify.area(512, 1 << 30, 1 << 20).unwrap();
        assert_eq!(
            area.blocks,
            Job::VERIFY_RANGE / 512,
            "bounded when nothing is said"
        );
        // Parts have whole units and do not overlap.
        let thirds: Vec<Area> = (0..3).map(|i| all.part(i, 3, 8)).collect();
        assert_eq!(
            thirds
                .iter()
                .map(|a| (a.first, a.blocks))
                .collect::<Vec<_>>(),
            [(0, 328), (328, 328), (656, 328)]
        );
    }

    #[test]
    fn refusals() {
        use JobError as E;
        let refused = |job: Job| job.area(4096, 1000, 65_536).unwrap_err();
        let sized = |min, max| Job {
            sizes: Sizes { min, max },
            ..job()
        };
        assert!(matches!(refused(sized(512, 512)), E::NotBlocks { .. }));
        assert!(matches!(
            refused(sized(8192, 4096)),
            E::SizesBackwards { .. }
        ));
        assert!(matches!(refused(sized(4096, 131_072)), E::TooLarge { .. }));
        let outside = job_with(|options| {
            (options.offset, options.range) = (4096 * 999, Some(8192));
        });
        assert!(matches!(refused(outside), E::Outside { .. }));
        let beyond = job_with(|options| options.offset = 1 << 40);
        assert!(matches!(refused(beyond), E::Outside { .. }));
        let crowded = Job {
            verify: Verify::On,
            queues: 64,
            ..job()
        };
        assert!(matches!(refused(crowded), E::TooSmall { .. }));
        let huge = Job {
            verify: Verify::On,
            ..job_with(|options| options.range = Some(1 << 40))
        };
        assert!(matches!(
            huge.area(4096, 1 << 40, 65_536),
            Err(E::TooManyUnits { .. })
        ));
    }
}
