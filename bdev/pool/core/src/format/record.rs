//! Records of the log: every change of metadata.
//!
//! A record has a head of 16 bytes and a body; its length is a multiple of 8.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | kind, zero, length (u16) |
//! | 4..8 | version |
//! | 8..16 | place in units, or another number of the kind |
//!
//! | kind | | number | body |
//! |---|---|---|---|
//! | 1 | MAP | place | unit << 16 \| granules, CRC32C of each granule |
//! | 2 | UNMAP | first granule of the volume | granules (u64) |
//! | 3 | CREATE | size in units | id, flags (u64: 1 thick), name |
//! | 4 | SNAP | number of snapshots | each: volume, snapshot (u32), id, name |
//! | 5 | CLONE | source version | id, flags, name |
//! | 6 | HIDE | 0 | – (deletion begins) |
//! | 7 | PASS | kind of pass | – (a pass over a hidden version begins) |
//! | 8 | STEP | leaf | – (of the pass) |
//! | 9 | END | 0 | – (of the pass) |
//! | 10 | RESIZE | size in units | – |
//! | 11 | CANCEL | LSN of a MAP whose data could not be written | – |
//! | 12 | CLEAR | leaf that is lost | – (it becomes empty) |
//! | 13 | RENAME | 0 | name |
//! | 14 | RESTORE | snapshot | slot for the old contents, which are hidden (u64) |
//! | 15 | DETACH | 0 | – (the volume shares nothing with its parent) |
//! | 16 | DECOUPLE | ancestor | – (the volume shares nothing with it; its parent is the next one) |
//! | 17 | READONLY | 0 | – (the volume does not change any more) |
//! | 18 | PREPARE | snapshot | slot for new contents, a hidden clone of the snapshot (u64) |
//! | 19 | ADOPT | slot of the new contents | – (the slot gets the old ones, hidden) |
//! | 20 | MOVE | place | unit, and the unit that has its contents now (u64 each), in all versions |
//! | 21 | EXTERNAL | size in units | id and name of the device (an external device, to be cloned) |
//!
//! DECOUPLE needs the feature `decouple`, READONLY `read-only`, PREPARE and ADOPT `set-parent`,
//! MOVE `leaving-disks`, EXTERNAL `external-parents`.

use uuid::Uuid;

use super::bytes::{Reader, Writer};
use super::superblock::MAX_NAME;
use super::{FormatError, wrong};
use crate::geometry::MAX_GRANULES;
use crate::ids::{Lsn, VersionId};

/// Most volumes that one SNAP cuts.
pub const MAX_SNAPSHOTS: usize = 8;
const HEAD: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Map {
        version: VersionId,
        place: u64,
        unit: u64,
        granules: u16,
        /// One per granule of the set, in order.
        checksums: Vec<u32>,
    },
    Unmap {
        version: VersionId,
        first: u64,
        granules: u64,
    },
    Create {
        version: VersionId,
        units: u64,
        identity: Identity,
        thick: bool,
    },
    Snapshot {
        cuts: Vec<Cut>,
    },
    Clone {
        version: VersionId,
        source: VersionId,
        identity: Identity,
        thick: bool,
    },
    Hide {
        version: VersionId,
    },
    Pass {
        version: VersionId,
        kind: PassKind,
    },
    Step {
        version: VersionId,
        leaf: u64,
    },
    End {
        version: VersionId,
    },
    Resize {
        version: VersionId,
        units: u64,
    },
    Cancel {
        lsn: Lsn,
    },
    Clear {
        version: VersionId,
        leaf: u64,
    },
    Rename {
        version: VersionId,
        name: String,
    },
    /// The volume begins anew as a clone of `source`; `old` gets its contents until now, hidden.
    Restore {
        version: VersionId,
        source: VersionId,
        old: VersionId,
    },
    Detach {
        version: VersionId,
    },
    /// The parent of `ancestor` becomes the parent of the volume.
    Decouple {
        version: VersionId,
        ancestor: VersionId,
    },
    ReadOnly {
        version: VersionId,
    },
    /// `new` gets the contents of `source`, hidden, for the volume to adopt.
    Prepare {
        version: VersionId,
        source: VersionId,
        new: VersionId,
    },
    /// The volume and `new` exchange their contents.
    Adopt {
        version: VersionId,
        new: VersionId,
    },
    /// Every version that has the unit `from` at the place has `to` there from now on. The contents
    /// are copied and durable.
    Move {
        place: u64,
        from: u64,
        to: u64,
    },
    /// Adds an external device, as a snapshot of which volumes are clones.
    External {
        version: VersionId,
        units: u64,
        identity: Identity,
    },
}

/// The id and the name of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub id: Uuid,
    pub name: String,
}

/// One volume of a SNAP record, and its new snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    pub volume: VersionId,
    pub snapshot: VersionId,
    pub identity: Identity,
}

/// A pass over a hidden version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum PassKind {
    /// It has no child: all its units are freed, and it is removed.
    Free = 1,
    /// It has one child, which gets the units that it uses: the version is removed.
    Merge = 2,
    /// It has several children: units that none of them uses are freed, and the version stays.
    Reclaim = 3,
}

impl Record {
    pub fn encoded_len(&self) -> usize {
        let body = match self {
            Self::Map { checksums, .. } => 8 + 4 * checksums.len(),
            Self::Unmap { .. } | Self::Restore { .. } | Self::Prepare { .. } => 8,
            Self::Move { .. } => 16,
            Self::Rename { name, .. } => 1 + name.len(),
            Self::Create { identity, .. } | Self::Clone { identity, .. } => {
                identity.encoded_len() + 8
            }
            Self::External { identity, .. } => identity.encoded_len(),
            Self::Snapshot { cuts } => cuts.iter().map(|cut| 8 + cut.identity.encoded_len()).sum(),
            _ => 0,
        };
        (HEAD + body).next_multiple_of(8)
    }

    /// Writes the record into `out`, which has exactly its length.
    pub fn encode(&self, out: &mut [u8]) {
        let (kind, version, number) = self.head();
        let len = out.len() as u16;
        let mut w = Writer::zeroed(out);
        w.u8(kind);
        w.u8(0);
        w.u16(len);
        w.u32(version.0);
        w.u64(number);
        match self {
            Self::Map {
                unit,
                granules,
                checksums,
                ..
            } => {
                w.u64(unit << 16 | u64::from(*granules));
                checksums.iter().for_each(|sum| w.u32(*sum));
            }
            Self::Unmap { granules, .. } => w.u64(*granules),
            Self::Restore { old, .. } => w.u64(u64::from(old.0)),
            Self::Prepare { new, .. } => w.u64(u64::from(new.0)),
            Self::Move { from, to, .. } => {
                w.u64(*from);
                w.u64(*to);
            }
            Self::Rename { name, .. } => w.text(name),
            Self::Create {
                identity, thick, ..
            }
            | Self::Clone {
                identity, thick, ..
            } => {
                w.uuid(identity.id);
                w.u64(u64::from(*thick));
                w.text(&identity.name);
            }
            Self::External { identity, .. } => {
                w.uuid(identity.id);
                w.text(&identity.name);
            }
            Self::Snapshot { cuts } => {
                for cut in cuts {
                    w.u32(cut.volume.0);
                    w.u32(cut.snapshot.0);
                    w.uuid(cut.identity.id);
                    w.text(&cut.identity.name);
                }
            }
            _ => {}
        }
    }

    fn head(&self) -> (u8, VersionId, u64) {
        let none = VersionId(0);
        match self {
            Self::Map { version, place, .. } => (1, *version, *place),
            Self::Unmap { version, first, .. } => (2, *version, *first),
            Self::Create { version, units, .. } => (3, *version, *units),
            Self::Snapshot { cuts } => (4, none, cuts.len() as u64),
            Self::Clone {
                version, source, ..
            } => (5, *version, u64::from(source.0)),
            Self::Hide { version } => (6, *version, 0),
            Self::Pass { version, kind } => (7, *version, *kind as u64),
            Self::Step { version, leaf } => (8, *version, *leaf),
            Self::End { version } => (9, *version, 0),
            Self::Resize { version, units } => (10, *version, *units),
            Self::Cancel { lsn } => (11, none, *lsn),
            Self::Clear { version, leaf } => (12, *version, *leaf),
            Self::Rename { version, .. } => (13, *version, 0),
            Self::Restore {
                version, source, ..
            } => (14, *version, u64::from(source.0)),
            Self::Detach { version } => (15, *version, 0),
            Self::Decouple { version, ancestor } => (16, *version, u64::from(ancestor.0)),
            Self::ReadOnly { version } => (17, *version, 0),
            Self::Prepare {
                version, source, ..
            } => (18, *version, u64::from(source.0)),
            Self::Adopt { version, new } => (19, *version, u64::from(new.0)),
            Self::Move { place, .. } => (20, none, *place),
            Self::External { version, units, .. } => (21, *version, *units),
        }
    }

    /// The first record of `bytes`, and its length.
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), FormatError> {
        let broken = |field| wrong("record", field);
        let mut r = Reader::new(bytes);
        let head = (|| Some((r.u8()?, r.u8()?, r.u16()?, r.u32()?, r.u64()?)))();
        let (kind, zero, len, version, number) = head.ok_or_else(|| broken("length"))?;
        let len = usize::from(len);
        if len % 8 != 0 || len > bytes.len() || zero != 0 {
            return Err(broken("length"));
        }
        let mut r = Reader::new(&bytes[..len]);
        r.slice(HEAD).ok_or_else(|| broken("length"))?;
        let record =
            body(kind, VersionId(version), number, &mut r).ok_or_else(|| broken("body"))?;
        let again = record.head();
        if record.encoded_len() != len || !r.is_zero_until(len) || again.1.0 != version {
            return Err(broken("length"));
        }
        Ok((record, len))
    }
}

fn body(kind: u8, version: VersionId, number: u64, r: &mut Reader) -> Option<Record> {
    Some(match kind {
        1 => {
            let word = r.u64()?;
            let granules = word as u16;
            let sums = (0..granules.count_ones()).map(|_| r.u32());
            let checksums: Vec<u32> = sums.collect::<Option<_>>()?;
            if checksums.is_empty() || checksums.len() > MAX_GRANULES as usize {
                return None;
            }
            Record::Map {
                version,
                place: number,
                unit: word >> 16,
                granules,
                checksums,
            }
        }
        2 => Record::Unmap {
            version,
            first: number,
            granules: r.u64()?,
        },
        3 => {
            let (identity, thick) = named(r)?;
            Record::Create {
                version,
                units: number,
                identity,
                thick,
            }
        }
        4 => {
            if number == 0 || number > MAX_SNAPSHOTS as u64 {
                return None;
            }
            let mut cut = || {
                let (volume, snapshot) = (VersionId(r.u32()?), VersionId(r.u32()?));
                let id = r.uuid()?;
                let name = r.text()?.to_owned();
                Some(Cut {
                    volume,
                    snapshot,
                    identity: Identity { id, name },
                })
            };
            let cuts: Option<Vec<Cut>> = (0..number).map(|_| cut()).collect();
            Record::Snapshot { cuts: cuts? }
        }
        5 => {
            let source = VersionId(u32::try_from(number).ok()?);
            let (identity, thick) = named(r)?;
            Record::Clone {
                version,
                source,
                identity,
                thick,
            }
        }
        6 if number == 0 => Record::Hide { version },
        7 => {
            let kinds = [PassKind::Free, PassKind::Merge, PassKind::Reclaim];
            let kind = kinds.into_iter().find(|kind| *kind as u64 == number)?;
            Record::Pass { version, kind }
        }
        8 => Record::Step {
            version,
            leaf: number,
        },
        9 if number == 0 => Record::End { version },
        10 => Record::Resize {
            version,
            units: number,
        },
        11 => Record::Cancel { lsn: number },
        12 => Record::Clear {
            version,
            leaf: number,
        },
        13 if number == 0 => Record::Rename {
            version,
            name: r.text()?.to_owned(),
        },
        14 => Record::Restore {
            version,
            source: VersionId(u32::try_from(number).ok()?),
            old: VersionId(u32::try_from(r.u64()?).ok()?),
        },
        15 if number == 0 => Record::Detach { version },
        16 => Record::Decouple {
            version,
            ancestor: VersionId(u32::try_from(number).ok()?),
        },
        17 if number == 0 => Record::ReadOnly { version },
        18 => Record::Prepare {
            version,
            source: VersionId(u32::try_from(number).ok()?),
            new: VersionId(u32::try_from(r.u64()?).ok()?),
        },
        19 => Record::Adopt {
            version,
            new: VersionId(u32::try_from(number).ok()?),
        },
        20 => Record::Move {
            place: number,
            from: r.u64()?,
            to: r.u64()?,
        },
        21 => Record::External {
            version,
            units: number,
            identity: Identity {
                id: r.uuid()?,
                name: r.text()?.to_owned(),
            },
        },
        _ => return None,
    })
}

fn named(r: &mut Reader) -> Option<(Identity, bool)> {
    let id = r.uuid()?;
    let thick = match r.u64()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    let name = r.text()?.to_owned();
    Some((Identity { id, name }, thick))
}

impl Identity {
    /// Id, length of the name, name.
    fn encoded_len(&self) -> usize {
        debug_assert!(self.name.len() <= MAX_NAME);
        16 + 1 + self.name.len()
    }
}
