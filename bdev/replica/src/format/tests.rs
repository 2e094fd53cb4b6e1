//! Tests of labels, log pages and the layout: their bytes, and the error for each invalid field.

use std::path::Path;

use proptest::prelude::*;
use uuid::Uuid;

use super::fuzzing::TARGETS;
use super::layout::{BLOCK, MAX_REGIONS};
use super::*;
use crate::model::Stamp;

fn label() -> Label {
    let replica = |slot, state| LabelReplica {
        slot,
        id: Uuid::from_bytes([0xa0 + slot; 16]),
        state,
    };
    Label {
        volume: Uuid::from_bytes([0x11; 16]),
        name: "gold".to_owned(),
        replica: Uuid::from_bytes([0xa0; 16]),
        slot: 0,
        stamp: Stamp {
            epoch: 0x0102,
            revision: 3,
        },
        sequence: 4,
        clean: true,
        block_size: 4096,
        blocks: 0x1_0000,
        region_shift: 20,
        replicas: [
            replica(0, LabelState::InSync),
            replica(2, LabelState::Out),
            replica(4, LabelState::Filling),
        ]
        .into_iter()
        .collect(),
    }
}

fn encoded(label: &Label) -> [u8; BLOCK] {
    let mut block = [0xff; BLOCK];
    label.encode(&mut block);
    block
}

/// The table in `label.rs`, byte for byte.
#[test]
fn a_label_as_bytes() {
    let mut want = [0; BLOCK];
    let fields: &[(usize, &[u8])] = &[
        (0, b"NACREVOL"),
        (8, &[1, 0, 0, 0]),
        (12, &[1, 0, 0, 0]),
        (16, &[0x11; 16]),
        (32, &[0xa0; 16]),
        (48, &[2, 1, 0, 0, 0, 0, 0, 0]),
        (56, &[3, 0, 0, 0, 0, 0, 0, 0]),
        (64, &[4, 0, 0, 0, 0, 0, 0, 0]),
        (72, &[0, 0, 1, 0, 0, 0, 0, 0]),
        (80, &[0, 0x10, 0, 0]),
        (84, &[0, 20, 3, 4]),
        (88, b"gold"),
        (344, &[0xa0; 16]),
        (360, &[0, 1]),
        (376, &[0xa2; 16]),
        (392, &[2, 2]),
        (408, &[0xa4; 16]),
        (424, &[4, 3]),
    ];
    for (at, bytes) in fields {
        want[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    // "123456789" has the checksum that every table of CRC32C gives.
    assert_eq!(crc_fast::crc32_iscsi(b"123456789"), 0xe306_9283);
    let sum = crc_fast::crc32_iscsi(&want[..4092]);
    want[4092..].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(encoded(&label()), want);
    assert_eq!(Label::decode(&want), Ok(label()));
}

/// The error names the wrong field, and only after the checksum was found correct.
#[test]
fn invalid_labels_name_the_field() {
    let good = encoded(&label());
    let field = |name| LabelError::Field { name };
    let cases: &[(usize, &[u8], LabelError)] = &[
        (0, b"n", LabelError::Foreign),
        (8, &[2], LabelError::Version { found: 2 }),
        (12, &[2], field("flags")),
        (16, &[0; 16], field("volume id")),
        (32, &[0; 16], field("replica id")),
        (72, &[0; 8], field("number of blocks")),
        (72, &[0xff; 8], field("number of blocks")),
        (72, &[0, 0, 0, 0, 1, 0, 0, 0], field("region size")),
        (80, &[0, 0, 0, 0], field("block size")),
        (80, &[0, 1, 0, 0], field("block size")),
        (80, &[0, 0x20, 0, 0], field("block size")),
        (80, &[0, 0x11, 0, 0], field("block size")),
        (84, &[5], field("slot")),
        (85, &[19], field("region size")),
        (85, &[64], field("region size")),
        (86, &[0], field("number of replicas")),
        (86, &[6], field("number of replicas")),
        (86, &[4], field("table of replicas")),
        (86, &[2], field("table of replicas")),
        (87, &[3], field("name")),
        (88, &[0xff], field("name")),
        (343, &[1], field("name")),
        (361, &[0], field("table of replicas")),
        (361, &[4], field("table of replicas")),
        (362, &[1], field("table of replicas")),
        (376, &[0xa0; 16], field("table of replicas")),
        (392, &[0], field("table of replicas")),
        (392, &[5], field("table of replicas")),
        (503, &[1], field("table of replicas")),
        (504, &[1], field("reserved area")),
        (4091, &[1], field("reserved area")),
    ];
    for (at, bytes, error) in cases {
        let mut block = good;
        block[*at..at + bytes.len()].copy_from_slice(bytes);
        let unsealed = match at {
            0 => LabelError::Foreign,
            _ => LabelError::Checksum,
        };
        assert_eq!(Label::decode(&block), Err(unsealed), "{at} {bytes:?}");
        seal(&mut block);
        assert_eq!(Label::decode(&block), Err(*error), "{at} {bytes:?}");
    }
    assert_eq!(Label::decode(&[0; BLOCK]), Err(LabelError::NotALabel));
    assert_eq!(Label::decode(&[]), Err(LabelError::Foreign));
    assert_eq!(Label::decode(&good[..4095]), Err(LabelError::Foreign));
}

#[test]
fn a_long_name_is_cut_between_characters() {
    let long = Label {
        name: "ü".repeat(128),
        ..label()
    };
    let read = Label::decode(&encoded(&long)).expect("a label");
    assert_eq!(read.name, "ü".repeat(127));
}

/// Which of two labels is valid.
#[test]
fn the_newest_of_two() {
    let at = |epoch, revision, sequence| {
        let stamp = Stamp { epoch, revision };
        encoded(&Label {
            stamp,
            sequence,
            ..label()
        })
    };
    let which = |a: &[u8], b: &[u8]| newest(a, b).map(|(_, place)| place);
    let old = at(1, 9, 9);
    for new in [at(2, 1, 1), at(1, 10, 1), at(1, 9, 10)] {
        assert_eq!(which(&old, &new), Ok(LabelCopy::B));
        assert_eq!(which(&new, &old), Ok(LabelCopy::A));
    }
    let (zero, foreign) = ([0; BLOCK], [0x55; BLOCK]);
    let mut torn = old;
    torn[512..1024].fill(7);
    let mut newer = old;
    newer[8] = 9;
    seal(&mut newer);
    let other = encoded(&Label {
        replica: Uuid::from_bytes([9; 16]),
        ..label()
    });
    for bad in [zero, foreign, torn] {
        assert_eq!(which(&bad, &old), Ok(LabelCopy::B));
        assert_eq!(which(&old, &bad), Ok(LabelCopy::A));
    }
    let version = Err(LabelError::Version { found: 9 });
    for any in [zero, foreign, torn, old] {
        assert_eq!(
            (which(&newer, &any), which(&any, &newer)),
            (version, version)
        );
    }
    assert_eq!(which(&old, &other), Err(LabelError::TwoOwners));
    assert_eq!(which(&zero, &zero), Err(LabelError::NotALabel));
    assert_eq!(which(&zero, &foreign), Err(LabelError::Foreign));
    assert_eq!(which(&torn, &foreign), Err(LabelError::Checksum));
    assert_eq!(which(&zero, &torn), Err(LabelError::Checksum));
    assert_eq!(next_copy(LabelCopy::A), LabelCopy::B);
    assert_eq!(next_copy(LabelCopy::B), LabelCopy::A);
    assert_eq!(
        (label_offset(LabelCopy::A), label_offset(LabelCopy::B)),
        (0, 4096)
    );
}

#[test]
fn region_sizes() {
    const GIB: u64 = 1 << 30;
    let cases = [
        (1, 20),
        (GIB, 20),
        (256 * GIB, 20),
        (256 * GIB + 1, 21),
        (1024 * GIB, 22),
        (1 << 60, 42),
        (u64::MAX, 46),
    ];
    for (bytes, shift) in cases {
        assert_eq!(region_shift_for(bytes), shift, "{bytes}");
        assert!(bytes.div_ceil(1 << shift) <= MAX_REGIONS);
    }
    assert_eq!(
        (pages_for(1), pages_for(32_000), pages_for(32_001)),
        (1, 1, 2)
    );
    assert_eq!(pages_for(MAX_REGIONS), 9);
    assert_eq!((page_offset(0), page_offset(8)), (65_536, 98_304));
}

/// The table in `log.rs`, byte for byte; a page that is not the expected one marks every region
/// dirty.
#[test]
fn a_log_page_as_bytes() {
    let volume = Uuid::from_bytes([0x22; 16]);
    let mut want = [0; BLOCK];
    want[..8].copy_from_slice(b"NACRELOG");
    want[8] = 1;
    want[12] = 1;
    want[16..32].fill(0x22);
    want[32] = 7;
    want[64] = 0b10;
    want[65] = 1;
    seal(&mut want);
    let mut out = [0xff; BLOCK];
    let dirty = [32_001, 32_008];
    let is_dirty = |region| {
        assert!(
            (32_000..32_009).contains(&region),
            "region {region} is not on this page"
        );
        dirty.contains(&region)
    };
    encode_page(volume, 1, 7, 32_009, is_dirty, &mut out);
    assert_eq!(out, want);
    let page = decode_page(&out, volume, 1);
    assert_eq!((page.is_lost(), page.epoch()), (false, Some(7)));
    let named: Vec<u64> = (32_000..64_000).filter(|r| page.is_dirty(*r)).collect();
    assert_eq!(named, dirty);

    let other_volume = decode_page(&out, Uuid::from_bytes([0x23; 16]), 1);
    let other_page = decode_page(&out, volume, 0);
    let mut version = out;
    version[8] = 2;
    seal(&mut version);
    let others = [
        other_volume,
        decode_page(&version, volume, 1),
        decode_page(&[0; BLOCK], volume, 1),
        decode_page(&out[..4000], volume, 1),
    ];
    for page in others {
        assert!(page.is_lost() && page.epoch().is_none());
        assert!(page.is_dirty(32_000) && page.is_dirty(63_999));
    }
    assert!(other_page.is_dirty(0));
}

fn any_label() -> impl Strategy<Value = Label> {
    let state = prop_oneof![
        Just(LabelState::InSync),
        Just(LabelState::Out),
        Just(LabelState::Filling)
    ];
    let replicas = proptest::collection::vec((any::<u128>(), state), 1..=5);
    (
        (1u128.., 1u128.., 0u8..5, ".{0,80}", any::<bool>()),
        (any::<u64>(), any::<u64>(), any::<u64>()),
        (9u32..=12, 1u64..1 << 50),
        replicas,
    )
        .prop_map(|(who, when, (size, blocks), replicas)| Label {
            volume: Uuid::from_u128(who.0),
            name: cut_to(who.3),
            replica: Uuid::from_u128(who.1),
            slot: who.2,
            stamp: Stamp {
                epoch: when.0,
                revision: when.1,
            },
            sequence: when.2,
            clean: who.4,
            block_size: 1 << size,
            blocks,
            region_shift: region_shift_for(blocks << size),
            replicas: replicas
                .into_iter()
                .enumerate()
                .map(|(slot, (id, state))| LabelReplica {
                    slot: slot as u8,
                    // Ids are unique and never nil.
                    id: Uuid::from_u128(id / 8 * 8 + slot as u128 + 1),
                    state,
                })
                .collect(),
        })
}

fn cut_to(name: String) -> String {
    name.chars().take(60).collect()
}

/// Sectors of `new` where a bit is set, otherwise of `old`: a possible result of a power failure.
fn torn(old: &[u8; BLOCK], new: &[u8; BLOCK], sectors: u8) -> [u8; BLOCK] {
    let mut mix = *old;
    for sector in 0..8 {
        if sectors >> sector & 1 == 1 {
            let range = sector * 512..(sector + 1) * 512;
            mix[range.clone()].copy_from_slice(&new[range]);
        }
    }
    mix
}

proptest! {
    #[test]
    fn a_label_is_read_as_it_was_written(label in any_label()) {
        prop_assert_eq!(Label::decode(&encoded(&label)), Ok(label));
    }

    #[test]
    fn any_flipped_byte_is_detected(label in any_label(), at in 0..BLOCK, by in 1u8..) {
        let mut block = encoded(&label);
        block[at] ^= by;
        prop_assert!(Label::decode(&block).is_err());
        let volume = label.volume;
        encode_page(volume, 0, 1, 900, |r| r % 3 == 0, &mut block);
        block[at] ^= by;
        prop_assert!(decode_page(&block, volume, 0).is_lost());
    }

    /// A label is written over the older of two. However much of it reaches the medium, the newest
    /// label is the previous one or the new one.
    #[test]
    fn a_torn_label_is_the_old_or_the_new(
        label in any_label(), older in any_label(), sectors in any::<u8>(), in_a in any::<bool>(),
    ) {
        let stamp = Stamp { epoch: label.stamp.epoch >> 1, revision: 5 };
        let current = Label { stamp, ..label.clone() };
        let next = Label { stamp: Stamp { revision: 6, ..stamp }, clean: !label.clean, ..label.clone() };
        let before = Label {
            stamp: Stamp { revision: 4, ..stamp },
            volume: label.volume,
            replica: label.replica,
            ..older
        };
        let kept = encoded(&current);
        let written = torn(&encoded(&before), &encoded(&next), sectors);
        let found = if in_a { newest(&written, &kept) } else { newest(&kept, &written) };
        let (found, place) = found.expect("one valid record");
        prop_assert!(found == current || found == next);
        prop_assert_eq!(place == LabelCopy::A, in_a == (found == next));
        if sectors == 0xff {
            prop_assert_eq!(found, next);
        }
    }

    /// A torn page is the old page, the new page, or all dirty.
    #[test]
    fn a_torn_log_page_forgets_nothing(old in any::<u64>(), new in any::<u64>(), sectors in any::<u8>()) {
        let volume = Uuid::from_bytes([1; 16]);
        let page = |seed: u64| {
            let mut out = [0; BLOCK];
            let dirty = |r: u64| (seed ^ r).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1;
            encode_page(volume, 0, seed, REGIONS_PER_PAGE, dirty, &mut out);
            out
        };
        let (old, new) = (page(old), page(new));
        let found = decode_page(&torn(&old, &new, sectors), volume, 0);
        let whole = [&old, &new].map(|bytes| decode_page(bytes, volume, 0));
        prop_assert!(found.is_lost() || whole.contains(&found));
    }
}

/// Every fuzz target has a corpus, and no input in it breaks a promise. A failure names the file;
/// run that file with the target's binary (fuzz/README.md) to look closer.
#[test]
fn corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (target, run) in TARGETS {
        let folder = root.join(target);
        let inputs: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.expect("a readable folder").path())
            .collect();
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for input in inputs {
            let bytes = std::fs::read(&input).expect("a readable input");
            if std::panic::catch_unwind(|| run(&bytes)).is_err() {
                panic!("{target} broke on {}", input.display());
            }
        }
    }
}
