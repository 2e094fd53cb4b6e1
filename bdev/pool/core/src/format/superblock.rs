//! The superblock: 4 KiB that describe a pool and refer to its last checkpoint.
//!
//! | bytes | |
//! |---|---|
//! | 0..16 | `NACREPOL`, version, zero |
//! | 16..40 | features: a reader may ignore, must not write, must refuse if it does not know them |
//! | 40..72 | id of the pool, id of the disk |
//! | 72..88 | sequence, number of imports |
//! | 88..96 | state: 1 open, 2 exported; zero |
//! | 96..112 | id of the holder |
//! | 112..152 | geometry: disk, edge, log; granules per unit, units per leaf, fan-out, levels |
//! | 152..168 | LSN of the checkpoint, settled LSN |
//! | 168..184 | first log page after the checkpoint, checksum of the page before it |
//! | 184..208 | place of the directory's index |
//! | 208..232 | place of the space tree: zero, the maps give the used units |
//! | 232..256 | place of the page map |
//! | 256..264 | next generation, number of disks |
//! | 264..272 | units of the reserve |
//! | 272..528 | name: length, text |
//! | 528..3088 | one disk: its id, first unit (0), units, state (1 in), zero |
//! | | several: id and bytes of each; at 2064 the number of ranges; units × 256 + disk of each |
//! | | disk 255: no disk has the units; at 3032 a bit for the disk that leaves |
//! | 3088..4088 | name of each feature of the second and third word, in order: length, text |
//! | 4088..4096 | CRC-64/NVME of all preceding bytes |

use std::fmt::Write as _;

use uuid::Uuid;

use super::{FormatError, Page, Place, Reader, Writer, checksum, wrong};
use crate::disks::DiskTable;
use crate::geometry::{Geometry, PAGE};
use crate::ids::{Generation, Lsn, MAX_GENERATION};

const MAGIC: &[u8; 8] = b"NACREPOL";
const VERSION: u32 = 1;
const SUM: usize = PAGE - 8;
const NAME: usize = 272;
const DISKS: usize = 528;
const DISKS_END: usize = DISKS + DiskTable::BYTES;
/// A use of the format that older versions do not know. Its bit is set before its first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Feature {
    /// READONLY records, and the flag in the directory.
    ReadOnly = 1,
    /// DECOUPLE records.
    Decouple = 2,
    /// PREPARE and ADOPT records.
    SetParent = 4,
    /// A table of more than one disk.
    SeveralDisks = 8,
    /// MOVE records, a disk that leaves, and units that no disk has.
    LeavingDisks = 16,
    /// EXTERNAL records, and external places of maps.
    ExternalParents = 32,
}

/// The names of all features, in the order of their bits.
const FEATURES: [&str; 6] = [
    "read-only",
    "decouple",
    "set-parent",
    "several-disks",
    "leaving-disks",
    "external-parents",
];
const KNOWN: u64 = (1 << FEATURES.len()) - 1;

/// Longest name of a pool, a volume or a snapshot, in bytes.
pub const MAX_NAME: usize = 255;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PoolState {
    Open = 1,
    Exported = 2,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Bits of features that a version without them may ignore.
    pub features: u64,
    /// Bits of [`Feature`]: versions that do not know one refuse the pool.
    pub required: u64,
    pub pool: Uuid,
    pub disk: Uuid,
    pub name: String,
    pub sequence: u64,
    pub imports: u64,
    pub state: PoolState,
    pub holder: Uuid,
    pub geometry: Geometry,
    pub disks: DiskTable,
    pub checkpoint: Lsn,
    pub settled: Lsn,
    pub log_sequence: u64,
    pub log_previous: u64,
    pub directory: Place,
    pub page_map: Place,
    pub next_generation: Generation,
    pub reserve_units: u64,
}

impl Superblock {
    /// The tag that pages of this pool carry.
    pub fn tag(&self) -> u64 {
        checksum(self.pool.as_bytes())
    }

    /// True on the disk with the log, whose superblocks alone say which root counts.
    pub fn is_of_first_disk(&self) -> bool {
        self.disks.position(self.disk) == Some(0)
    }

    /// The superblock of another disk of the pool.
    pub(crate) fn on(&self, disk: usize) -> Self {
        Self {
            disk: self.disks.disks()[disk].id,
            ..self.clone()
        }
    }

    /// Places of this sequence: one at each end of the disk.
    pub fn places(sequence: u64) -> [usize; 2] {
        match sequence % 2 {
            0 => [0, 2],
            _ => [1, 3],
        }
    }

    pub fn encode(&self, page: &mut Page) {
        let mut w = Writer::zeroed(page);
        w.bytes(MAGIC);
        w.u32(VERSION);
        w.u32(0);
        w.u64(self.features);
        w.u64(0);
        w.u64(self.required);
        w.uuid(self.pool);
        w.uuid(self.disk);
        w.u64(self.sequence);
        w.u64(self.imports);
        w.u64(self.state as u64);
        w.uuid(self.holder);
        let g = &self.geometry;
        for size in [g.disk_bytes, g.edge_bytes, g.log_pages] {
            w.u64(size);
        }
        for size in [g.granules_per_unit, g.units_per_leaf, g.fan_out, g.levels] {
            w.u32(size);
        }
        w.u64(self.checkpoint);
        w.u64(self.settled);
        w.u64(self.log_sequence);
        w.u64(self.log_previous);
        self.directory.write(&mut w);
        Place::default().write(&mut w);
        self.page_map.write(&mut w);
        w.u32(self.next_generation);
        w.u32(self.disks.present().count() as u32);
        w.u64(self.reserve_units);
        w.text(&self.name);
        w.skip_to(DISKS);
        self.disks.write(&mut w);
        for name in names_of(self.required) {
            w.text(name);
        }
        seal(page);
    }

    /// The sequence, and the names of the features that this version does not know, of a superblock
    /// with a correct checksum. `None`: there is no such feature, or the page is no superblock.
    pub fn unknown(page: &Page) -> Option<(u64, String)> {
        if page[..8] != *MAGIC || checksum(&page[..SUM]).to_le_bytes() != page[SUM..] {
            return None;
        }
        let mut r = Reader::new(page);
        r.slice(8)?;
        let version = r.u32()?;
        r.slice(12)?;
        let (writers, readers) = (r.u64()?, r.u64()?);
        r.slice(32)?;
        let sequence = r.u64()?;
        if version != VERSION {
            return Some((sequence, format!("format {version}")));
        }
        let words = [(writers, 0), (readers, KNOWN)];
        if words.iter().all(|(word, known)| word & !known == 0) {
            return None;
        }
        let mut r = Reader::new(page);
        r.slice(DISKS_END)?;
        let mut unknown = String::new();
        for (word, known) in words {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let is_printable = |name: &&str| {
                    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
                };
                let name = r.text().filter(is_printable);
                if known >> bit & 1 == 1 {
                    continue;
                }
                let comma = if unknown.is_empty() { "" } else { ", " };
                // Writing to a string does not fail.
                let _ = match name {
                    Some(name) => write!(unknown, "{comma}{name}"),
                    None => write!(unknown, "{comma}number {bit}"),
                };
            }
        }
        Some((sequence, unknown))
    }

    pub fn decode(page: &Page) -> Result<Self, FormatError> {
        let broken = |field| wrong("superblock", field);
        if page[..8] != *MAGIC {
            return Err(broken("magic"));
        }
        if checksum(&page[..SUM]).to_le_bytes() != page[SUM..] {
            return Err(broken("checksum"));
        }
        parse(page).map_err(broken)
    }
}

/// The fields of a superblock whose checksum is right; or the name of the first wrong field.
fn parse(page: &Page) -> Result<Superblock, &'static str> {
    const SHORT: &str = "length";
    let mut r = Reader::new(page);
    r.slice(8).ok_or(SHORT)?;
    if r.u32() != Some(VERSION) {
        return Err("version");
    }
    let zero = r.u32();
    let features = r.u64().ok_or(SHORT)?;
    // This version knows no feature that only a writer must know.
    if (zero, r.u64()) != (Some(0), Some(0)) {
        return Err("feature");
    }
    let required = r.u64().ok_or(SHORT)?;
    if required & !KNOWN != 0 {
        return Err("feature");
    }
    let (pool, disk) = (r.uuid().ok_or(SHORT)?, r.uuid().ok_or(SHORT)?);
    if pool.is_nil() || disk.is_nil() {
        return Err("id");
    }
    let (sequence, imports) = (r.u64().ok_or(SHORT)?, r.u64().ok_or(SHORT)?);
    let state = match r.u64() {
        Some(1) => PoolState::Open,
        Some(2) => PoolState::Exported,
        _ => return Err("state"),
    };
    let holder = r.uuid().ok_or(SHORT)?;
    let mut geometry = Geometry {
        disk_bytes: r.u64().ok_or(SHORT)?,
        edge_bytes: r.u64().ok_or(SHORT)?,
        log_pages: r.u64().ok_or(SHORT)?,
        granules_per_unit: r.u32().ok_or(SHORT)?,
        units_per_leaf: r.u32().ok_or(SHORT)?,
        fan_out: r.u32().ok_or(SHORT)?,
        levels: r.u32().ok_or(SHORT)?,
        added_units: 0,
    };
    geometry.check().map_err(|error| error.field)?;
    let (checkpoint, settled) = (r.u64().ok_or(SHORT)?, r.u64().ok_or(SHORT)?);
    if settled < checkpoint || settled > 1 << 62 {
        return Err("settled LSN");
    }
    let (log_sequence, log_previous) = (r.u64().ok_or(SHORT)?, r.u64().ok_or(SHORT)?);
    if log_sequence > 1 << 62 || sequence > 1 << 62 || imports > 1 << 62 {
        return Err("sequence");
    }
    let directory = Place::read(&mut r).ok_or(SHORT)?;
    if !Place::read(&mut r).ok_or(SHORT)?.is_none() {
        return Err("space tree");
    }
    let page_map = Place::read(&mut r).ok_or(SHORT)?;
    let next_generation = r.u32().ok_or(SHORT)?;
    if next_generation == 0 || next_generation > MAX_GENERATION + 1 {
        return Err("generation");
    }
    let disks = r.u32().ok_or(SHORT)?;
    if disks != 1 && required & Feature::SeveralDisks as u64 == 0 {
        return Err("number of disks");
    }
    let reserve_units = r.u64().ok_or(SHORT)?;
    if reserve_units > geometry.units() {
        return Err("reserve");
    }
    debug_assert_eq!(r.position(), NAME);
    let name = r.text().ok_or("name")?.to_owned();
    if !r.is_zero_until(DISKS) {
        return Err("name");
    }
    const TABLE: &str = "table of disks";
    let disks = DiskTable::read(&mut r, disks, &mut geometry).ok_or(TABLE)?;
    let is_named = disks.removal_feature() & !required == 0;
    if geometry.check().is_err() || disks.position(disk).is_none() || !is_named {
        return Err(TABLE);
    }
    if names_of(required).any(|name| r.text() != Some(name)) {
        return Err("name of a feature");
    }
    if !r.is_zero_until(SUM) {
        return Err("reserved area");
    }
    Ok(Superblock {
        features,
        required,
        pool,
        disk,
        name,
        sequence,
        imports,
        state,
        holder,
        geometry,
        disks,
        checkpoint,
        settled,
        log_sequence,
        log_previous,
        directory,
        page_map,
        next_generation,
        reserve_units,
    })
}

/// The names of known features.
fn names_of(features: u64) -> impl Iterator<Item = &'static str> {
    let known = FEATURES.iter().enumerate();
    known.filter_map(move |(bit, name)| (features >> bit & 1 == 1).then_some(*name))
}

/// Writes the checksum into a finished superblock.
pub(crate) fn seal(page: &mut Page) {
    let sum = checksum(&page[..SUM]);
    page[SUM..].copy_from_slice(&sum.to_le_bytes());
}
