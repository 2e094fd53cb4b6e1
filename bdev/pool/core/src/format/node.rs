//! An interior node of a version's map.
//!
//! After the [`PageHead`], 48 bytes per child:
//!
//! | bytes | |
//! |---|---|
//! | 0..24 | place: two pages, checksum |
//! | 24..32 | LSN of the checkpoint that wrote the child |
//! | 32..36 | generation of a linear leaf, or of external places |
//! | 36..40 | kind: 0 none, 1 page, 2 linear leaf, 3 lost, 4 external |
//! | 40..48 | first unit of a linear leaf |

use super::leaf::{Linear, Stamp};
use super::{FormatError, Page, PageHead, PageKind, Place, Reader, Writer, wrong};
use crate::geometry::Geometry;
use crate::ids::{Generation, Lsn, MAX_GENERATION};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Child {
    None,
    /// A node on a page of its own.
    Page {
        place: Place,
        lsn: Lsn,
    },
    Linear(Linear),
    /// A node that was unreadable in both copies.
    Lost,
    /// Of all places of the node, all granules are those of the external device.
    External {
        generation: Generation,
    },
}

pub fn encode(children: &[Child], stamp: Stamp, page: &mut Page) {
    let mut w = Writer::zeroed(page);
    let head = stamp.head(PageKind::Interior, children.len(), Place::default());
    head.write(&mut w);
    for child in children {
        let ((place, lsn), (generation, first_unit), kind) = match *child {
            Child::None => (Default::default(), (0, 0), 0),
            Child::Page { place, lsn } => ((place, lsn), (0, 0), 1),
            Child::Linear(linear) => {
                let unit = (linear.generation, linear.first_unit);
                (Default::default(), unit, 2)
            }
            Child::Lost => (Default::default(), (0, 0), 3),
            Child::External { generation } => (Default::default(), (generation, 0), 4),
        };
        Place::write(&place, &mut w);
        w.u64(lsn);
        w.u32(generation);
        w.u32(kind);
        w.u64(first_unit);
    }
}

/// Decodes the interior node of the pool `tag` whose first leaf has the number `first`.
pub fn decode(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    first: u64,
) -> Result<Vec<Child>, FormatError> {
    let broken = |field| wrong("interior node", field);
    let mut r = Reader::new(page);
    let head = PageHead::read(&mut r, PageKind::Interior, tag)?;
    if head.first != first || !head.next.is_none() {
        return Err(broken("place"));
    }
    if u32::from(head.items) != geometry.fan_out {
        return Err(broken("number of children"));
    }
    let mut children = Vec::with_capacity(usize::from(head.items));
    for _ in 0..head.items {
        let fields = (|| Some((Place::read(&mut r)?, r.u64()?, r.u32()?, r.u32()?, r.u64()?)))();
        let (place, lsn, generation, kind, first_unit) = fields.ok_or_else(|| broken("length"))?;
        let linear = Linear {
            first_unit,
            generation,
        };
        let last = first_unit.checked_add(u64::from(geometry.units_per_leaf));
        let child = match kind {
            1 if is_page_pair(&place, geometry) => Child::Page { place, lsn },
            2 if (1..=MAX_GENERATION).contains(&generation)
                && last.is_some_and(|last| last <= geometry.units()) =>
            {
                Child::Linear(linear)
            }
            0 => Child::None,
            3 => Child::Lost,
            4 if (1..=MAX_GENERATION).contains(&generation) => Child::External { generation },
            _ => return Err(broken("child")),
        };
        let is_sound = match child {
            Child::Page { .. } => (generation, first_unit) == (0, 0),
            Child::Linear(_) => place.is_none() && lsn == 0,
            Child::External { .. } => place.is_none() && (lsn, first_unit) == (0, 0),
            _ => place.is_none() && (lsn, generation, first_unit) == (0, 0, 0),
        };
        if !is_sound {
            return Err(broken("child"));
        }
        children.push(child);
    }
    if !r.is_zero_until(page.len()) {
        return Err(broken("reserved area"));
    }
    Ok(children)
}

/// True when both copies are on the disk, and are two.
pub fn is_page_pair(place: &Place, geometry: &Geometry) -> bool {
    let pages = geometry.pages();
    place.a < pages && place.b < pages && place.a != place.b
}
