//! A leaf of a version's map: the own units of its places in one page; the second units, if there
//! are any, in another.
//!
//! After the [`PageHead`], 10 bytes per place, as one little-endian number:
//!
//! | bits | |
//! |---|---|
//! | 0..36 | unit |
//! | 36..60 | generation |
//! | 60..64 | state: 0 none, 1 mapped, 2 external (unit 0) |
//! | 64..80 | valid granules |

use super::{FormatError, HEAD_BYTES, Page, PageHead, PageKind, Place, Reader, Writer, wrong};
use crate::geometry::Geometry;
use crate::ids::{Lsn, MAX_GENERATION};
use crate::map::{EXTERNAL_UNIT, Entry, Part};

/// The identity of a page that is being written.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    pub tag: u64,
    pub lsn: Lsn,
    /// First leaf of the node; of a chain the position of the page.
    pub first: u64,
}

impl Stamp {
    pub(super) fn head(self, kind: PageKind, items: usize, next: Place) -> PageHead {
        PageHead {
            kind,
            items: items as u16,
            tag: self.tag,
            lsn: self.lsn,
            first: self.first,
            next,
        }
    }
}

/// Writes the second units. `None`: there are none, and no page is needed.
pub fn encode_rest(entries: &[Entry], stamp: Stamp, page: &mut Page) -> Option<()> {
    let is_empty = entries.iter().all(|entry| entry.second.is_none());
    if is_empty {
        return None;
    }
    let seconds = entries.iter().map(|entry| entry.second);
    let head = stamp.head(PageKind::LeafRest, entries.len(), Place::default());
    encode(seconds, head, page);
    Some(())
}

/// Writes the own units. `rest`: the page of the second units.
pub fn encode_own(entries: &[Entry], stamp: Stamp, rest: Place, page: &mut Page) {
    let head = stamp.head(PageKind::Leaf, entries.len(), rest);
    encode(entries.iter().map(|entry| entry.own), head, page);
}

fn encode(parts: impl Iterator<Item = Part>, head: PageHead, page: &mut Page) {
    let mut w = Writer::zeroed(page);
    head.write(&mut w);
    debug_assert_eq!(w.position(), HEAD_BYTES);
    for part in parts {
        let (unit, state) = match part {
            part if part.is_none() => (0, 0),
            part if part.is_external() => (0, 2),
            part => (part.unit, 1),
        };
        let word = u128::from(unit)
            | u128::from(part.generation) << 36
            | state << 60
            | u128::from(part.granules) << 64;
        w.bytes(&word.to_le_bytes()[..10]);
    }
}

/// The own units of a leaf, and the place of the page with its second units.
pub fn decode_own(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    first: u64,
) -> Result<(Vec<Part>, Place), FormatError> {
    decode(page, geometry, PageKind::Leaf, tag, first)
}

/// The entries of a leaf, from its own units and the page with its second units.
pub fn decode_rest(
    own: Vec<Part>,
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    first: u64,
) -> Result<Vec<Entry>, FormatError> {
    let (seconds, _) = decode(page, geometry, PageKind::LeafRest, tag, first)?;
    let entries = own.into_iter().zip(seconds);
    let entries = entries.map(|(own, second)| {
        let is_sound = second.is_none()
            || (!own.is_none() && own.granules & second.granules == 0 && own.unit != second.unit);
        if is_sound {
            Ok(Entry { own, second })
        } else {
            Err(wrong("leaf", "second unit"))
        }
    });
    entries.collect()
}

fn decode(
    page: &Page,
    geometry: &Geometry,
    kind: PageKind,
    tag: u64,
    first: u64,
) -> Result<(Vec<Part>, Place), FormatError> {
    let broken = |field| wrong("leaf", field);
    let mut r = Reader::new(page);
    let head = PageHead::read(&mut r, kind, tag)?;
    if head.first != first {
        return Err(broken("place"));
    }
    if u32::from(head.items) != geometry.units_per_leaf {
        return Err(broken("number of units"));
    }
    let mut parts = Vec::with_capacity(usize::from(head.items));
    for _ in 0..head.items {
        let (low, granules) = (r.u64(), r.u16());
        let (low, granules) = low.zip(granules).ok_or_else(|| broken("length"))?;
        let mut part = Part {
            unit: low & ((1 << 36) - 1),
            generation: (low >> 36) as u32 & MAX_GENERATION,
            granules,
        };
        let has_granules = granules != 0 && granules & !geometry.whole() == 0;
        let is_sound = match low >> 60 {
            0 => part == Part::NONE,
            1 => part.unit < geometry.units() && part.generation != 0 && has_granules,
            2 => {
                let is_plain = part.unit == 0 && part.generation != 0;
                part.unit = EXTERNAL_UNIT;
                is_plain && has_granules
            }
            _ => false,
        };
        if !is_sound {
            return Err(broken("unit"));
        }
        parts.push(part);
    }
    if !r.is_zero_until(page.len()) {
        return Err(broken("reserved area"));
    }
    Ok((parts, head.next))
}

/// A leaf without a page: all its units are whole, of one generation, and in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    pub first_unit: u64,
    pub generation: u32,
}

impl Linear {
    pub fn of(entries: &[Entry], whole: u16) -> Option<Self> {
        let first = entries.first()?.own;
        let is_linear = entries.iter().enumerate().all(|(at, entry)| {
            entry.second.is_none()
                && !entry.own.is_external()
                && entry.own.granules == whole
                && entry.own.generation == first.generation
                && entry.own.unit == first.unit + at as u64
        });
        is_linear.then_some(Self {
            first_unit: first.unit,
            generation: first.generation,
        })
    }

    pub fn entries(self, geometry: &Geometry) -> Vec<Entry> {
        let entry = |at| Entry {
            own: Part {
                unit: self.first_unit + at,
                generation: self.generation,
                granules: geometry.whole(),
            },
            second: Part::NONE,
        };
        (0..u64::from(geometry.units_per_leaf)).map(entry).collect()
    }
}
