//! The bytes of two lists of a pool's metadata. Each is a chain of 4 KiB pages, and each page has
//! the position of the next. Every checkpoint writes both lists as a whole.
//!
//! | list | items per page | item |
//! |---|---|---|
//! | index of the directory | 168 | [`Place`] of a directory page: both copies, checksum |
//! | page map | 504 | unit << 16 \| granules (4 KiB) of the unit that are metadata pages |

use super::leaf::Stamp;
use super::node::is_page_pair;
use super::{FormatError, HEAD_BYTES, Page, PageHead, PageKind, Place, Reader, Writer, wrong};
use crate::geometry::{Geometry, PAGE};

/// Most items of a page of the index.
pub const INDEX_ITEMS: usize = (PAGE - HEAD_BYTES) / Place::BYTES;
/// Most items of a page of the page map.
pub const MAP_ITEMS: usize = (PAGE - HEAD_BYTES) / 8;

/// A unit that holds metadata pages only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    pub unit: u64,
    /// Granules in use, one bit each.
    pub used: u16,
}

/// Encodes a page of the index. `next` is the next page, or none. Has room for [`INDEX_ITEMS`].
pub fn encode_index(places: &[Place], stamp: Stamp, next: Place, page: &mut Page) {
    let mut w = Writer::zeroed(page);
    let head = stamp.head(PageKind::DirectoryIndex, places.len(), next);
    head.write(&mut w);
    places.iter().for_each(|place| place.write(&mut w));
}

/// Encodes a page of the page map. `next` is the next page, or none. Has room for [`MAP_ITEMS`].
pub fn encode_page_map(zones: &[Zone], stamp: Stamp, next: Place, page: &mut Page) {
    let mut w = Writer::zeroed(page);
    let head = stamp.head(PageKind::PageMap, zones.len(), next);
    head.write(&mut w);
    for zone in zones {
        w.u64(zone.unit << 16 | u64::from(zone.used));
    }
}

/// Decodes page number `position` of the index of the pool `tag`: its items, and the next page.
/// Fails on any value that [`encode_index`] does not write.
pub fn decode_index(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    position: u64,
) -> Result<(Vec<Place>, Place), FormatError> {
    let read = |r: &mut Reader| {
        let place = Place::read(r)?;
        is_page_pair(&place, geometry).then_some(place)
    };
    let kind = PageKind::DirectoryIndex;
    decode(page, geometry, tag, position, kind, INDEX_ITEMS, read)
}

/// Decodes page number `position` of the page map of the pool `tag`: its items, and the next page.
/// Fails on any value that [`encode_page_map`] does not write.
pub fn decode_page_map(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    position: u64,
) -> Result<(Vec<Zone>, Place), FormatError> {
    let read = |r: &mut Reader| {
        let word = r.u64()?;
        let zone = Zone {
            unit: word >> 16,
            used: word as u16,
        };
        (zone.unit < geometry.units() && zone.used & !geometry.whole() == 0).then_some(zone)
    };
    decode(
        page,
        geometry,
        tag,
        position,
        PageKind::PageMap,
        MAP_ITEMS,
        read,
    )
}

fn decode<T>(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
    position: u64,
    kind: PageKind,
    most: usize,
    read: impl Fn(&mut Reader) -> Option<T>,
) -> Result<(Vec<T>, Place), FormatError> {
    let broken = |field| wrong("list", field);
    let mut r = Reader::new(page);
    let head = PageHead::read(&mut r, kind, tag)?;
    if head.first != position {
        return Err(broken("position"));
    }
    if usize::from(head.items) > most {
        return Err(broken("number of items"));
    }
    if !head.next.is_none() && !is_page_pair(&head.next, geometry) {
        return Err(broken("next page"));
    }
    let items: Option<Vec<T>> = (0..head.items).map(|_| read(&mut r)).collect();
    let items = items.ok_or_else(|| broken("item"))?;
    if r.is_zero_until(page.len()) {
        Ok((items, head.next))
    } else {
        Err(broken("reserved area"))
    }
}
