//! The bodies of the fuzz targets, here so that the corpora in `fuzz/corpus` are replayed by an
//! ordinary test. A target takes any bytes, and panics only when a promise of the format is broken.

use super::log_page::{self, LogPage, PageBuilder};
use super::superblock::{self, Superblock};
use super::{Page, chain, directory, leaf, node};
use crate::geometry::{Geometry, PAGE};
use crate::map::Part;

/// A target: takes any bytes.
pub type Target = fn(&[u8]);

/// Every target with its name: the name of its corpus folder and of its binary.
pub const TARGETS: &[(&str, Target)] = &[
    ("pool_superblock", pool_superblock),
    ("pool_log_page", pool_log_page),
    ("pool_page", pool_page),
];

/// The tag that metadata pages must carry.
pub const TAG: u64 = u64::from_le_bytes(*b"fuzzpool");

/// Byte 0: bit 0 corrects the checksum. The start of the superblock follows.
pub fn pool_superblock(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let mut page = page(rest);
    if choice & 1 != 0 {
        superblock::seal(&mut page);
    }
    if let Ok(superblock) = Superblock::decode(&page) {
        let mut again = [0xff; PAGE];
        superblock.encode(&mut again);
        assert_eq!(again, page, "a superblock is written as it was read");
        assert_eq!(superblock.geometry.check(), Ok(()));
    }
}

/// Byte 0: bit 0 corrects the checksum. The start of the page follows.
pub fn pool_log_page(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let mut page = page(rest);
    if choice & 1 != 0 {
        log_page::seal(&mut page);
    }
    if let Ok(read) = LogPage::decode(&page) {
        let mut builder = PageBuilder::default();
        for record in &read.records {
            assert!(builder.has_room(record));
            builder.push(record);
        }
        let (again, sum) = builder.finish(&read.head);
        assert_eq!(*again, page, "a page is written as it was read");
        assert_eq!(sum, read.sum);
    }
}

/// Byte 0: the structure (modulo 5: leaf, second units, interior node, directory, list). The start
/// of the page follows.
pub fn pool_page(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let page = page(rest);
    let geometry = Geometry::of_disk(1 << 40);
    match choice % 5 {
        0 => {
            if let Ok((own, _)) = leaf::decode_own(&page, &geometry, TAG, 0) {
                let known = |part: &Part| part.is_external() || part.unit < geometry.units();
                assert!(own.iter().all(known));
            }
        }
        1 => {
            let none = vec![Part::NONE; geometry.units_per_leaf as usize];
            let _ = leaf::decode_rest(none, &page, &geometry, TAG, 0);
        }
        2 => {
            let _ = node::decode(&page, &geometry, TAG, 0);
        }
        3 => {
            if let Ok((number, versions)) = directory::decode(&page, &geometry, TAG) {
                let mut again = [0; PAGE];
                let stamp = leaf::Stamp {
                    tag: TAG,
                    lsn: u64::from_le_bytes(page[16..24].try_into().unwrap_or_default()),
                    first: number,
                };
                directory::encode(&versions, stamp, &mut again);
                assert_eq!(again, page, "a directory page is written as it was read");
            }
        }
        _ => {
            let _ = chain::decode_index(&page, &geometry, TAG, 0);
            let _ = chain::decode_page_map(&page, &geometry, TAG, 0);
        }
    }
}

fn page(start: &[u8]) -> Page {
    let mut page = [0; PAGE];
    let len = start.len().min(PAGE);
    page[..len].copy_from_slice(&start[..len]);
    page
}
