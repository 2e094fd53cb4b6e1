//! The bodies of the fuzz targets, here so that the corpora in `fuzz/corpus` are replayed by an
//! ordinary test. A target accepts any bytes, and panics only on a bug in the parser.

use uuid::Uuid;

use super::layout::{BLOCK, MAX_REGIONS};
use super::{
    Label, LabelCopy, LabelError, REGIONS_PER_PAGE, decode_page, encode_page, newest, seal,
};

/// A target: takes any bytes.
pub type Target = fn(&[u8]);

/// Every target with its name: the name of its corpus folder and of its binary.
pub const TARGETS: &[(&str, Target)] = &[
    ("volume_label", volume_label),
    ("volume_log_page", volume_log_page),
];

/// The volume id that log pages must carry.
pub const VOLUME: Uuid = Uuid::from_bytes(*b"volume of a fuzz");

/// Byte 0: bit 0 corrects the checksum of the first label, bit 1 that of the second, so that the
/// fuzzer reaches the code behind the check. The starts of the two labels follow, half of the
/// remaining bytes each.
pub fn volume_label(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let (a, b) = rest.split_at(rest.len() / 2);
    let (a, b) = (block(a, choice & 1 != 0), block(b, choice & 2 != 0));
    for bytes in [&a, &b] {
        if let Ok(label) = Label::decode(bytes) {
            let mut again = [0xff; BLOCK];
            label.encode(&mut again);
            assert_eq!(again, *bytes, "a label is written as it was read");
            let bytes = label.blocks * u64::from(label.block_size);
            assert!(bytes.div_ceil(1 << label.region_shift) <= MAX_REGIONS);
        }
    }
    match newest(&a, &b) {
        Ok((label, LabelCopy::A)) => assert_eq!(Label::decode(&a), Ok(label)),
        Ok((label, LabelCopy::B)) => assert_eq!(Label::decode(&b), Ok(label)),
        Err(LabelError::NotALabel) => assert!(a.iter().chain(&b).all(|byte| *byte == 0)),
        Err(_) => {}
    }
}

/// Byte 0: bit 0 corrects the checksum, the other bits are the page number. The start of the page
/// follows.
pub fn volume_log_page(input: &[u8]) {
    let [choice, rest @ ..] = input else { return };
    let number = u64::from(choice >> 1);
    let bytes = block(rest, choice & 1 != 0);
    let page = decode_page(&bytes, VOLUME, number);
    let first = number * REGIONS_PER_PAGE;
    let Some(epoch) = page.epoch() else {
        assert!(page.is_lost() && page.is_dirty(first));
        assert!(page.is_dirty(first + REGIONS_PER_PAGE - 1));
        return;
    };
    let mut again = [0xff; BLOCK];
    let regions = first + REGIONS_PER_PAGE;
    let dirty = |region| page.is_dirty(region);
    encode_page(VOLUME, number, epoch, regions, dirty, &mut again);
    assert_eq!(decode_page(&again, VOLUME, number), page);
}

fn block(start: &[u8], sealed: bool) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let len = start.len().min(BLOCK);
    block[..len].copy_from_slice(&start[..len]);
    if sealed {
        seal(&mut block);
    }
    block
}
