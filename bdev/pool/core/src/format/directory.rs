//! A page of the directory: seven volumes and snapshots.
//!
//! After the [`PageHead`], 512 bytes each:
//!
//! | bytes | |
//! |---|---|
//! | 0..16 | id |
//! | 16..24 | version (slot), parent (`u32::MAX`: none) |
//! | 24..32 | generation, flags: 1 snapshot, 2 thick, 4 hidden, 8 read-only, 16 external |
//! | 32..40 | size in units |
//! | 40..48 | kind of the pass over it: 0 none, 1 free, 2 merge, 3 reclaim |
//! | 48..56 | first leaf that the pass has not visited |
//! | 56..80 | place of the map's root |
//! | 80..256 | zero |
//! | 256..512 | name: length, text |

use uuid::Uuid;

use super::leaf::Stamp;
use super::node::is_page_pair;
use super::record::{Identity, PassKind};
use super::{FormatError, HEAD_BYTES, Page, PageHead, PageKind, Place, Reader, Writer, wrong};
use crate::geometry::{Geometry, PAGE};
use crate::ids::{Generation, MAX_GENERATION, MAX_VERSIONS, VersionId};

const BYTES: usize = 512;
const NAME: usize = 256;
const NO_PARENT: u32 = u32::MAX;
/// Versions of a page.
pub const VERSIONS_PER_PAGE: usize = (PAGE - HEAD_BYTES) / BYTES;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionEntry {
    pub version: VersionId,
    pub identity: Identity,
    pub parent: Option<VersionId>,
    pub generation: Generation,
    pub is_snapshot: bool,
    pub is_thick: bool,
    pub is_hidden: bool,
    pub is_read_only: bool,
    /// The id and the name are those of the external device.
    pub is_external: bool,
    pub units: u64,
    pub pass: Option<(PassKind, u64)>,
    /// No root: the map is empty.
    pub root: Place,
}

pub fn encode(versions: &[VersionEntry], stamp: Stamp, page: &mut Page) {
    let mut w = Writer::zeroed(page);
    let head = stamp.head(PageKind::Directory, versions.len(), Place::default());
    head.write(&mut w);
    for (at, version) in versions.iter().enumerate() {
        let start = HEAD_BYTES + at * BYTES;
        w.skip_to(start);
        w.uuid(version.identity.id);
        w.u32(version.version.0);
        w.u32(version.parent.map_or(NO_PARENT, |parent| parent.0));
        w.u32(version.generation);
        w.u32(
            u32::from(version.is_snapshot)
                | u32::from(version.is_thick) << 1
                | u32::from(version.is_hidden) << 2
                | u32::from(version.is_read_only) << 3
                | u32::from(version.is_external) << 4,
        );
        w.u64(version.units);
        let (kind, cursor) = version.pass.map_or((0, 0), |(kind, at)| (kind as u64, at));
        w.u64(kind);
        w.u64(cursor);
        version.root.write(&mut w);
        w.skip_to(start + NAME);
        w.text(&version.identity.name);
    }
}

/// Decodes a page of the directory of the pool `tag`: its number ([`page_of`]), and its versions.
pub fn decode(
    page: &Page,
    geometry: &Geometry,
    tag: u64,
) -> Result<(u64, Vec<VersionEntry>), FormatError> {
    let broken = |field| wrong("directory", field);
    let mut r = Reader::new(page);
    let head = PageHead::read(&mut r, PageKind::Directory, tag)?;
    if !head.next.is_none() {
        return Err(broken("next page"));
    }
    if usize::from(head.items) > VERSIONS_PER_PAGE {
        return Err(broken("number of versions"));
    }
    let versions = (0..usize::from(head.items)).map(|at| {
        let version = version(&mut r, HEAD_BYTES + at * BYTES, geometry);
        version.map_err(broken)
    });
    let versions = versions.collect::<Result<Vec<_>, _>>()?;
    let slots = versions.iter().map(|version| version.version.0);
    let is_sorted = slots.clone().is_sorted_by(|a, b| a < b);
    if !is_sorted
        || slots
            .into_iter()
            .any(|slot| page_of(VersionId(slot)) != head.first)
    {
        return Err(broken("version"));
    }
    if r.is_zero_until(page.len()) {
        Ok((head.first, versions))
    } else {
        Err(broken("reserved area"))
    }
}

/// The page of the directory that has a version.
pub fn page_of(version: VersionId) -> u64 {
    u64::from(version.0) / VERSIONS_PER_PAGE as u64
}

fn version(
    r: &mut Reader,
    start: usize,
    geometry: &Geometry,
) -> Result<VersionEntry, &'static str> {
    const SHORT: &str = "length";
    let id: Uuid = r.uuid().ok_or(SHORT)?;
    let (version, parent) = (r.u32().ok_or(SHORT)?, r.u32().ok_or(SHORT)?);
    let (generation, flags) = (r.u32().ok_or(SHORT)?, r.u32().ok_or(SHORT)?);
    let (units, kind, cursor) = (
        r.u64().ok_or(SHORT)?,
        r.u64().ok_or(SHORT)?,
        r.u64().ok_or(SHORT)?,
    );
    let root = Place::read(r).ok_or(SHORT)?;
    if version >= MAX_VERSIONS || (parent != NO_PARENT && parent >= MAX_VERSIONS) {
        return Err("version");
    }
    if generation == 0 || generation > MAX_GENERATION {
        return Err("generation");
    }
    // An external version is a snapshot without a parent, and nothing else.
    let is_external = flags & 16 != 0;
    if flags > 31 || is_external && (flags & !4 != 17 || parent != NO_PARENT) {
        return Err("flags");
    }
    if units > geometry.max_volume_units() {
        return Err("size");
    }
    let kinds = [PassKind::Free, PassKind::Merge, PassKind::Reclaim];
    let pass = match kind {
        0 if cursor == 0 => None,
        0 => return Err("pass"),
        _ => {
            let found = kinds.into_iter().find(|known| *known as u64 == kind);
            Some((found.ok_or("pass")?, cursor))
        }
    };
    if !root.is_none() && !is_page_pair(&root, geometry) {
        return Err("root");
    }
    if !r.is_zero_until(start + NAME) {
        return Err("reserved area");
    }
    let name = r.text().ok_or("name")?.to_owned();
    if !r.is_zero_until(start + BYTES) {
        return Err("name");
    }
    Ok(VersionEntry {
        version: VersionId(version),
        identity: Identity { id, name },
        parent: (parent != NO_PARENT).then_some(VersionId(parent)),
        generation,
        is_snapshot: flags & 1 != 0,
        is_thick: flags & 2 != 0,
        is_hidden: flags & 4 != 0,
        is_read_only: flags & 8 != 0,
        is_external,
        units,
        pass,
        root,
    })
}
