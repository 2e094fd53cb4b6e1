//! Writes a pool's metadata as pages of 4 KiB, for a checkpoint.
//!
//! An image is the exact state after one log record: the volumes and snapshots, and their maps.
//! Taking one copies nothing, because the image shares the nodes of the maps' trees; later changes
//! replace nodes and do not alter it. Only nodes that changed since the last image are written, and
//! the path from each to its root: a node has the positions and checksums of its children.
//!
//! ```text
//!   superblock ─▶ index of the directory ─▶ directory pages ─▶ roots ─▶ nodes ─▶ leaves
//!             └─▶ page map
//! ```
//!
//! The directory lists the volumes and snapshots; the page map has the use of metadata pages. Every
//! page has two copies on the disk.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use crate::format::chain::{self, INDEX_ITEMS, MAP_ITEMS};
use crate::format::directory::{self, VersionEntry};
use crate::format::leaf::{self, Linear, Stamp};
use crate::format::node::{self, Child};
use crate::format::{Page, checksum};
use crate::geometry::{Geometry, PAGE};
use crate::ids::{Lsn, Place, VersionId};
use crate::map::{Node, NodePages, PageGarbage, PagePair, Shape, Tree};
use crate::mutation::Mutation;
use crate::space::Space;
use crate::state::{State, Version};
use crate::zones::Zones;

/// An image on the disk. Images share unchanged pages; a page is freed when the last image that has
/// it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Image {
    /// The map of each version, with the id of the version.
    trees: Vec<(Uuid, Tree)>,
    /// Pages of the directory by number, with their contents.
    directory: BTreeMap<u64, (Vec<VersionEntry>, Arc<PagePair>)>,
    /// Pages of the index and the page map.
    chains: Vec<PagePair>,
    /// The first page of the directory's index.
    pub index: Place,
    /// The first page of the page map.
    pub page_map: Place,
}

/// A page to write, and its position: a page number.
pub(crate) type PageWrite = (u64, Arc<Page>);

/// The pool has no free unit for more metadata pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom;

impl Image {
    /// The image that a recovery has read from the disk, with `state` as its contents.
    pub(crate) fn loaded(
        state: &State,
        directory: BTreeMap<u64, (Vec<VersionEntry>, Arc<PagePair>)>,
        chains: Vec<PagePair>,
    ) -> Self {
        Self {
            trees: trees(&state.versions),
            directory,
            chains,
            ..Self::default()
        }
    }

    pub(crate) fn trees(&self) -> &[(Uuid, Tree)] {
        &self.trees
    }

    /// Pages that belong to no tree: of the directory, its index, and the page map.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = &PagePair> {
        let directory = self.directory.values().map(|(_, page)| &**page);
        self.chains.iter().chain(directory)
    }
}

/// Encodes a node again, as it was written to its pages: to repair a bad copy. Empty for a node
/// that was never written, or is unreadable. `levels`: levels of interior nodes from this one down;
/// `first`: the node's first leaf.
pub(crate) fn encode_again(
    geometry: &Geometry,
    tag: u64,
    node: &Node,
    levels: u32,
    first: u64,
) -> Vec<Arc<Page>> {
    let Some(pages) = node.pages() else {
        return Vec::new();
    };
    let stamp = Stamp {
        tag,
        lsn: pages.lsn,
        first,
    };
    let page = |encode: &dyn Fn(&mut Page)| {
        let mut page = Arc::new([0; PAGE]);
        encode(Arc::get_mut(&mut page).expect("made just now"));
        page
    };
    match node {
        Node::External(_) | Node::Lost { .. } => Vec::new(),
        Node::Leaf(leaf) => {
            let rest = pages.rest.as_ref().map(|rest| rest.place);
            let rest = rest.unwrap_or_default();
            vec![
                page(&|page| leaf::encode_own(&leaf.entries, stamp, rest, page)),
                page(&|page| {
                    let _ = leaf::encode_rest(&leaf.entries, stamp, page);
                }),
            ]
        }
        Node::Interior(interior) => {
            debug_assert!(levels > 0);
            let children = interior.children.iter().map(|child| {
                let Some(child) = child else {
                    return Child::None;
                };
                match (child.pages(), &**child) {
                    (Some(pages), _) => Child::Page {
                        place: pages.first.place,
                        lsn: pages.lsn,
                    },
                    (None, Node::Leaf(leaf)) => Linear::of(&leaf.entries, geometry.whole())
                        .map_or(Child::Lost, Child::Linear),
                    (None, Node::External(part)) => Child::External {
                        generation: part.generation,
                    },
                    _ => Child::Lost,
                }
            });
            let children: Vec<Child> = children.collect();
            vec![page(&|page| node::encode(&children, stamp, page))]
        }
    }
}

fn trees(versions: &BTreeMap<VersionId, Version>) -> Vec<(Uuid, Tree)> {
    versions
        .values()
        .map(|version| (version.identity.id, version.tree.clone()))
        .collect()
}

/// Encodes a state as pages, and allocates their positions. `writes` has the pages to write.
pub(crate) struct Encoder<'a> {
    pub geometry: &'a Geometry,
    pub tag: u64,
    /// The last record of the state.
    pub lsn: Lsn,
    pub zones: &'a mut Zones,
    pub space: &'a mut Space,
    pub garbage: &'a PageGarbage,
    pub writes: Vec<PageWrite>,
}

impl Encoder<'_> {
    /// Encodes `versions`. The image shares the pages of `last` that have not changed.
    pub(crate) fn encode(
        &mut self,
        versions: &BTreeMap<VersionId, Version>,
        last: &Image,
    ) -> Result<Image, NoRoom> {
        let mut pages: BTreeMap<u64, Vec<VersionEntry>> = BTreeMap::new();
        for (id, version) in versions {
            let entry = self.version(*id, version)?;
            let page = pages.entry(directory::page_of(*id)).or_default();
            page.push(entry);
        }
        let mut directory = BTreeMap::new();
        for (number, entries) in pages {
            let unchanged = last.directory.get(&number);
            let unchanged = unchanged.filter(|(last, _)| *last == entries);
            let page = match unchanged {
                Some((_, page)) => Arc::clone(page),
                None => {
                    let stamp = self.stamp(number);
                    let page = self.page(|page| directory::encode(&entries, stamp, page))?;
                    Arc::new(page)
                }
            };
            directory.insert(number, (entries, page));
        }
        let mut chains = Vec::new();
        let places: Vec<Place> = directory.values().map(|(_, page)| page.place).collect();
        let index = self.chain(&places, INDEX_ITEMS, chain::encode_index, &mut chains)?;
        let page_map = self.page_map(&mut chains)?;
        Ok(Image {
            trees: trees(versions),
            directory,
            chains,
            index,
            page_map,
        })
    }

    fn version(&mut self, id: VersionId, version: &Version) -> Result<VersionEntry, NoRoom> {
        let levels = self.geometry.levels;
        let root = match &version.tree.root {
            None => Place::default(),
            Some(root) => match self.node(root, levels, 0)? {
                Child::Page { place, .. } => place,
                _ => unreachable!("a root is an interior node"),
            },
        };
        Ok(VersionEntry {
            version: id,
            identity: version.identity.clone(),
            parent: version.parent,
            generation: version.generation,
            is_snapshot: version.is_snapshot,
            is_thick: version.is_thick,
            is_hidden: version.is_hidden,
            is_read_only: version.is_read_only,
            is_external: version.is_external,
            units: version.units,
            pass: version.pass,
            root,
        })
    }

    fn node(&mut self, node: &Node, levels: u32, first: u64) -> Result<Child, NoRoom> {
        if let Some(pages) = node.pages() {
            return Ok(Child::Page {
                place: pages.first.place,
                lsn: pages.lsn,
            });
        }
        let stamp = self.stamp(first);
        let pages = match node {
            Node::Lost { .. } => return Ok(Child::Lost),
            Node::External(part) => {
                let generation = part.generation;
                return Ok(if Mutation::OmitExternalNodes.is_active() {
                    Child::None
                } else {
                    Child::External { generation }
                });
            }
            Node::Leaf(leaf) => {
                if let Some(linear) = Linear::of(&leaf.entries, self.geometry.whole()) {
                    return Ok(Child::Linear(linear));
                }
                let mut rest = [0; PAGE];
                let rest = match leaf::encode_rest(&leaf.entries, stamp, &mut rest) {
                    None => None,
                    Some(()) => Some(self.page(|page| *page = rest)?),
                };
                let place = rest.as_ref().map_or_else(Place::default, |rest| rest.place);
                let first =
                    self.page(|page| leaf::encode_own(&leaf.entries, stamp, place, page))?;
                NodePages {
                    lsn: self.lsn,
                    first,
                    rest,
                }
            }
            Node::Interior(interior) => {
                let span = Shape::from(self.geometry).span(levels - 1);
                let mut children = Vec::with_capacity(interior.children.len());
                for (at, child) in interior.children.iter().enumerate() {
                    children.push(match child {
                        None => Child::None,
                        Some(child) => self.node(child, levels - 1, first + at as u64 * span)?,
                    });
                }
                let first = self.page(|page| node::encode(&children, stamp, page))?;
                NodePages {
                    lsn: self.lsn,
                    first,
                    rest: None,
                }
            }
        };
        let place = pages.first.place;
        node.set_pages(pages);
        Ok(Child::Page {
            place,
            lsn: self.lsn,
        })
    }

    /// Writes a list as a chain of pages, at least one; returns the first.
    fn chain<T>(
        &mut self,
        items: &[T],
        per_page: usize,
        encode: impl Fn(&[T], Stamp, Place, &mut Page),
        chains: &mut Vec<PagePair>,
    ) -> Result<Place, NoRoom> {
        let mut next = Place::default();
        let parts = items.len().div_ceil(per_page).max(1);
        for position in (0..parts).rev() {
            let end = items.len().min((position + 1) * per_page);
            let stamp = self.stamp(position as u64);
            let items = &items[position * per_page..end];
            let page = self.page(|page| encode(items, stamp, next, page))?;
            next = page.place;
            chains.push(page);
        }
        Ok(next)
    }

    /// Writes the page map; returns its first page. It lists its own pages too, so all of them are
    /// allocated before the first one is encoded.
    fn page_map(&mut self, chains: &mut Vec<PagePair>) -> Result<Place, NoRoom> {
        let mut pairs = Vec::new();
        while pairs.is_empty() || pairs.len() * MAP_ITEMS < self.zones.len() {
            pairs.push(self.allocate()?);
        }
        let table = self.zones.table();
        let mut next = Place::default();
        for (position, pair) in pairs.into_iter().enumerate().rev() {
            let start = table.len().min(position * MAP_ITEMS);
            let end = table.len().min((position + 1) * MAP_ITEMS);
            let stamp = self.stamp(position as u64);
            let zones = &table[start..end];
            let page = self.write(pair, |page| {
                chain::encode_page_map(zones, stamp, next, page)
            });
            next = page.place;
            chains.push(page);
        }
        Ok(next)
    }

    fn stamp(&self, first: u64) -> Stamp {
        Stamp {
            tag: self.tag,
            lsn: self.lsn,
            first,
        }
    }

    fn allocate(&mut self) -> Result<[u64; 2], NoRoom> {
        self.zones.allocate_pair(self.space).ok_or(NoRoom)
    }

    fn page(&mut self, encode: impl FnOnce(&mut Page)) -> Result<PagePair, NoRoom> {
        let pair = self.allocate()?;
        Ok(self.write(pair, encode))
    }

    fn write(&mut self, [a, b]: [u64; 2], encode: impl FnOnce(&mut Page)) -> PagePair {
        let mut page = Arc::new([0; PAGE]);
        encode(Arc::get_mut(&mut page).expect("made just now"));
        let sum = checksum(&page[..]);
        self.writes.push((a, Arc::clone(&page)));
        self.writes.push((b, page));
        PagePair::new(Place { a, b, sum }, self.garbage)
    }
}
